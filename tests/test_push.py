"""What `sparsellm push` uploads to a stand-in for the hub, and what it refuses."""

import base64
import hashlib
import http.server
import inspect
import json
import shutil
import socket
import threading
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from attack.small_export import content, cut, damaged, keys, sharded, tensors
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.hf_api import BlobLfsInfo, HfApi, RepoSibling
from small_run import small_trainer

from sparsellm.commands.push import main
from sparsellm.hf import card, hub
from sparsellm.runs.locate import locate

PROGRAM = "sparsellm push"
REPO, LICENCE = "repo=somebody/tiny", "license=apache-2.0"
OLD = {".gitattributes": b"", "model.safetensors": b"old", "notes.md": b"mine"}


def called(method):
    """A method of Hub that notes its calls, which must fit the signature of the real one."""

    def checked(self, *arguments, **options):
        inspect.signature(getattr(HfApi, method.__name__)).bind(self, *arguments, **options)
        self.calls.append(method.__name__)
        return method(self, *arguments, **options)

    return checked


class Hub:
    """In place of huggingface_hub.HfApi: repositories in memory."""

    def __init__(self):
        self.repos, self.calls, self.status = {}, [], None

    def add(self, name, files, private=True):
        self.repos[name] = SimpleNamespace(private=private, branches={"main": dict(files)})

    @called
    def model_info(self, repo, revision=None, files_metadata=False):
        if repo not in self.repos:
            raise RepositoryNotFoundError("404", response=response(404))
        found = self.repos[repo]
        if (revision or "main") not in found.branches:
            raise RevisionNotFoundError("404", response=response(404))
        held = found.branches[revision or "main"]
        siblings = [sibling(name, data if files_metadata else None) for name, data in held.items()]
        return SimpleNamespace(private=found.private, sha="a" * 40, siblings=siblings)

    @called
    def create_repo(self, repo, private):
        self.add(repo, {".gitattributes": b""}, private)

    @called
    def create_branch(self, repo, branch):
        self.repos[repo].branches[branch] = dict(self.repos[repo].branches["main"])

    @called
    def upload_folder(self, repo_id, folder_path, revision, parent_commit, delete_patterns, commit_message):
        if self.status is not None:
            raise HfHubHTTPError("refused", response=response(self.status))
        assert parent_commit in (None, "a" * 40)
        held = self.repos[repo_id].branches[revision]
        if delete_patterns is not None:
            assert delete_patterns == "*"
            for name in [name for name in held if name != ".gitattributes"]:
                del held[name]
        held.update({str(p.relative_to(folder_path)): p.read_bytes() for p in Path(folder_path).rglob("*")})
        return SimpleNamespace(commit_url=f"https://hub/{repo_id}/commit/1 {commit_message}")


class Served(http.server.BaseHTTPRequestHandler):
    """As much of the hub's HTTP as the real library asks of it for files that it stores in git; `hub` is a Hub."""

    protocol_version = "HTTP/1.1"

    def do_HEAD(self):
        self.answer({})

    def do_GET(self):
        path, _, query = self.path.partition("?")
        repo, _, revision = path.removeprefix("/api/models/").partition("/revision/")
        if "/tree/" in path:
            repo, revision = path.removeprefix("/api/models/").split("/tree/")
            held = self.hub.repos[repo].branches[revision]
            self.answer([{"type": "file", "path": p, "size": len(d), "oid": "0"} for p, d in held.items()])
        elif repo not in self.hub.repos:
            self.answer({}, 404, "RepoNotFound")
        elif (revision or "main") not in self.hub.repos[repo].branches:
            self.answer({}, 404, "RevisionNotFound")
        else:
            found = self.hub.repos[repo]
            each = [sibling(name, data, False) for name, data in found.branches[revision or "main"].items()]
            files = [{"rfilename": s.rfilename, "size": s.size, "blobId": s.blob_id} for s in each]
            held = {"siblings": files} if "blobs=True" in query or "blobs=true" in query else {}
            self.answer({"id": repo, "private": found.private, "sha": "a" * 40, **held})

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        assert self.headers["Authorization"] == "Bearer hf_token"
        what, _, revision = self.path.removeprefix("/api/models/somebody/tiny/").partition("/")
        if what == "commit":
            header, *operations = [json.loads(line) for line in body.splitlines()]
            held = self.hub.repos["somebody/tiny"].branches[revision]
            self.hub.calls.append((header["value"]["summary"], header["value"].get("parentCommit")))
            for each in operations:
                if each["key"] == "deletedFile":
                    del held[each["value"]["path"]]
                else:
                    held[each["value"]["path"]] = base64.b64decode(each["value"]["content"])
            url = f"{huggingface_hub.constants.ENDPOINT}/somebody/tiny/commit/b"
            self.answer({"success": True, "commitOid": "b" * 40, "commitUrl": url, "hookOutput": ""})
        elif what == "preupload":
            names = [file["path"] for file in json.loads(body)["files"]]
            files = [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]
            self.answer({"files": files, "commitOid": "a" * 40})
        elif what == "branch":
            self.hub.create_branch("somebody/tiny", branch=revision)
            self.answer({})
        elif self.path == "/api/repos/create":
            asked = json.loads(body)
            private = asked.get("private", asked.get("visibility") == "private")  # by the version of the library
            self.hub.create_repo(f"{asked['organization']}/{asked['name']}", private=private)
            self.answer({"url": f"{huggingface_hub.constants.ENDPOINT}/somebody/tiny"})
        else:
            assert self.path == "/api/validate-yaml"
            self.answer({"errors": [], "warnings": []})

    def answer(self, value, status=200, error=None):
        data = json.dumps(value).encode()
        self.send_response(status)
        if error is not None:
            self.send_header("X-Error-Code", error)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_):
        pass


def response(status):
    return SimpleNamespace(headers={}, request=None, status_code=status)


def sibling(name, data, weights_are_large=True):
    if data is None:
        return RepoSibling(name)
    large = weights_are_large and name.endswith(".safetensors")
    sha = hashlib.sha256(data).hexdigest()
    blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    lfs = BlobLfsInfo(size=len(data), sha256=sha, pointer_size=1) if large else None
    return RepoSibling(name, size=len(data), blob_id="of the pointer" if large else blob, lfs=lfs)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    with small_trainer(folder, "run.checkpoint_every=8") as trainer:
        assert trainer.fit() == 0
    (folder / "config.yaml").touch()  # which makes it a run
    return folder


@pytest.fixture
def bare(run, tmp_path):
    """A copy of the model without its checkpoint, so without checksums."""
    return Path(shutil.copytree(locate(str(run)).model, tmp_path / "bare"))


@pytest.fixture
def online(monkeypatch):
    """A hub that answers, and a token."""
    found = Hub()
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: found)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_token")
    monkeypatch.setattr(hub, "obstacle", lambda: None)
    return found


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*_args, **_kwargs):
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


def push(*arguments):
    return main([*arguments], PROGRAM)


def sent_of(folder):
    """What a push of the hf/ `folder` must send: each of its files, the card with a licence."""
    files = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    return files | {"README.md": card.licensed(files["README.md"].decode(), "apache-2.0").encode()}


def test_a_dry_run_lists_every_file_and_needs_no_network_and_no_account(run, no_network, monkeypatch, capsys):
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: pytest.fail("asked for a token"))
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: pytest.fail("asked the hub"))
    assert push(f"checkpoint={run}", REPO, LICENCE, "dry_run=true", "private=false", "revision=v2") == 0
    shown = capsys.readouterr()
    first, *rest = shown.out.splitlines()
    hf = run / "checkpoints/step_00000012/hf"
    assert first == f"{hf} -> https://huggingface.co/somebody/tiny, branch v2, public"
    expected = sent_of(hf)
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= expected.keys()
    listed = dict(line.rsplit(" bytes", 1)[0].split(maxsplit=1) for line in rest[: len(expected)])
    assert listed == {name: f"{len(data):,}" for name, data in expected.items()}
    assert rest[len(expected)].split() == [
        str(len(expected)),
        "files",
        f"{sum(map(len, expected.values())):,}",
        "bytes",
    ]
    assert rest[len(expected) + 1 : len(expected) + 4] == ["README.md begins:", "  ---", "  library_name: transformers"]
    assert "  license: apache-2.0" in rest
    assert rest[-1] == "dry_run=true: nothing was uploaded"
    assert shown.err == ""


def test_what_arrives_is_the_model_with_a_licence_and_the_checkpoint_stays_as_it_is(run, online, capsys):
    before = locate(str(run)).identity()
    assert push(f"checkpoint={run}", REPO, LICENCE) == 0
    checkpoint = locate(str(run))
    assert checkpoint.identity() == before
    assert (checkpoint.folder / "state").is_dir()
    repo = online.repos["somebody/tiny"]
    assert repo.private
    assert repo.branches == {"main": {".gitattributes": b""} | sent_of(checkpoint.model)}
    assert capsys.readouterr().out.splitlines()[-1].endswith("/commit/1 sparsellm push tiny, step 12")
    # Again, as after an interrupted upload: uploaded files are no obstacle, but another step is.
    del repo.branches["main"]["config.json"]
    assert push(f"checkpoint={run}", REPO, LICENCE) == 0
    assert repo.branches == {"main": {".gitattributes": b""} | sent_of(checkpoint.model)}
    assert push(f"checkpoint={run}/checkpoints/step_00000008", REPO, LICENCE) == 1
    assert "has other files in its branch main: README.md, model.safetensors." in capsys.readouterr().err


def test_only_files_of_the_model_are_sent_and_what_stays_is_named(bare, online, capsys):
    expected = sent_of(bare)
    for name in ("optimizer.pt", "optimizer.safetensors", "modeling_evil.py", "notes.txt", ".env"):
        (bare / name).write_bytes(b"secret")
    (bare / "evaluation").mkdir()
    (bare / "evaluation/config.json").write_text("{}")
    assert push(f"checkpoint={bare}", REPO, LICENCE) == 0
    shown = capsys.readouterr()
    stays = ".env, evaluation, modeling_evil.py, notes.txt, optimizer.pt, optimizer.safetensors"
    assert f"\nnot uploaded: {stays}\n" in shown.out
    assert f"{bare} has no COMMITTED file" in shown.err
    assert online.repos["somebody/tiny"].branches["main"] == {".gitattributes": b""} | expected


def test_weights_in_several_files_are_sent_with_their_index(bare, online):
    sharded()(bare)
    expected = sent_of(bare)
    assert {"model.safetensors.index.json", "model-00002-of-00002.safetensors"} <= expected.keys()
    assert push(f"checkpoint={bare}", REPO, LICENCE) == 0
    assert online.repos["somebody/tiny"].branches["main"] == {".gitattributes": b""} | expected


@pytest.mark.parametrize(
    ("files", "private", "arguments", "words"),
    [
        (OLD, True, [], ["has other files in its branch main: model.safetensors, notes.md.", "overwrite=true"]),
        ({}, False, [], ["exists and is public: give private=false"]),
        ({}, True, ["private=false", "overwrite=true"], ["exists and is private: give private=true"]),
    ],
)
def test_a_repository_that_is_not_as_expected_is_left_alone(files, private, arguments, words, run, online, capsys):
    online.add("somebody/tiny", files, private)
    assert push(f"checkpoint={run}", REPO, LICENCE, *arguments) == 1
    said = capsys.readouterr().err
    assert all(word in said for word in words), said
    assert set(online.calls) == {"model_info"}


def test_overwrite_and_a_new_branch_hold_exactly_what_is_sent(run, online):
    expected = {".gitattributes": b""} | sent_of(locate(str(run)).model)
    online.add("somebody/tiny", OLD)
    assert push(f"checkpoint={run}", REPO, LICENCE, "revision=v2") == 0
    assert online.repos["somebody/tiny"].branches == {"main": OLD, "v2": expected}
    assert push(f"checkpoint={run}", REPO, LICENCE, "overwrite=true") == 0
    assert online.repos["somebody/tiny"].branches == {"main": expected, "v2": expected}
    assert push(f"checkpoint={run}", "repo=somebody/other", LICENCE, "revision=v2", "private=false") == 0
    assert online.repos["somebody/other"].branches == {"main": {".gitattributes": b""}, "v2": expected}
    assert not online.repos["somebody/other"].private


def test_the_real_library_sends_the_same_over_http(run, monkeypatch, capsys):
    """To a server in this process: a new repository, the rest of an upload, a new branch, another step."""
    Served.hub = Hub()
    expected = {".gitattributes": b""} | sent_of(locate(str(run)).model)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Served) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("HF_TOKEN", "hf_token")
        assert push(f"checkpoint={run}", REPO, LICENCE) == 0
        branches = Served.hub.repos["somebody/tiny"].branches
        assert branches == {"main": expected}
        del branches["main"]["config.json"]
        assert push(f"checkpoint={run}", REPO, LICENCE) == 0
        assert branches == {"main": expected}
        theirs = {"notes.md": b"mine", "config.json": expected["config.json"].swapcase()}  # of the same size
        branches["main"] |= theirs
        assert push(f"checkpoint={run}", REPO, LICENCE) == 1
        assert push(f"checkpoint={run}", REPO, LICENCE, "revision=v2") == 0
        assert branches == {"main": expected | theirs, "v2": expected}
        assert push(f"checkpoint={run}", REPO, LICENCE, "overwrite=true") == 0
        assert branches == {"main": expected, "v2": expected}
        server.shutdown()
    shown = capsys.readouterr()
    assert shown.out.count("/somebody/tiny/commit/b\n") == 4, shown.err
    assert "has other files in its branch main: config.json, notes.md." in shown.err
    commits = [call for call in Served.hub.calls if isinstance(call, tuple)]
    assert commits == [("sparsellm push tiny, step 12", parent) for parent in (None, "a" * 40, None, "a" * 40)]


@pytest.mark.parametrize(
    ("status", "words"),
    [(401, "the token has no write access to somebody/tiny"), (403, "the token has no write"),
     (412, "has changed meanwhile"),
     (500, "HfHubHTTPError from the hub (refused); run the same command to try again")],
)  # fmt: skip
def test_what_the_hub_refuses_is_said_with_what_to_do(status, words, run, online, capsys):
    online.status = status
    assert push(f"checkpoint={run}", REPO, LICENCE) == 1
    assert words in capsys.readouterr().err


def test_without_a_token_or_a_network_nothing_is_read(run, no_network, monkeypatch, capsys):
    monkeypatch.setattr("sparsellm.commands.push._files", lambda _: pytest.fail("read the checkpoint"))
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    assert push(f"checkpoint={run}", REPO, LICENCE) == 1
    assert "there is no hub token on this machine" in capsys.readouterr().err
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_token")
    assert push(f"checkpoint={run}", REPO, LICENCE) == 1
    assert "does not answer (" in capsys.readouterr().err


def licence_of(name):
    return content("README.md", f"---\nlicense: {name}\n---\n# Mine\n".encode())


def link(folder):
    (folder / "config.json").rename(folder.parent / "config.json")
    (folder / "config.json").symlink_to(folder.parent / "config.json")


@pytest.mark.parametrize(
    ("damage", "arguments", "words"),
    [
        (lambda _: None, [], ["README.md names no licence: give one with license=NAME"]),
        (licence_of("mit"), [LICENCE], ["license=apache-2.0, but ", "README.md says mit"]),
        (content("README.md", b"---\na: [\n---\n"), [LICENCE], ["README.md cannot be read as a model card"]),
        (lambda folder: (folder / "README.md").unlink(), [LICENCE], ["README.md is missing: write a model card"]),
        (link, [LICENCE], ["config.json in ", "symbolic links", "cp -rL"]),
        (cut("model.safetensors", 0.9), [LICENCE], ["model.safetensors of ", "cannot be read"]),
        (tensors(lambda found: found.pop("model.norm.weight")), [LICENCE], ["missing: model.norm.weight"]),
        (lambda folder: (folder / "tokenizer.json").unlink(), [LICENCE], ["the tokenizer"]),
        (keys("config.json", model_type="llama_sparse_relu"), [LICENCE], ["sparsellm import_model"]),
    ],
)  # fmt: skip
def test_a_folder_that_should_not_be_sent_is_not(damage, arguments, words, bare, online, tmp_path, capsys):
    folder = damaged(bare, tmp_path / "damaged", damage)
    assert push(f"checkpoint={folder}", REPO, *arguments) == 1
    said = capsys.readouterr().err
    assert all(word in said for word in [f"checkpoint={folder} was not uploaded", *words]), said
    assert not online.calls


def test_a_licence_in_the_card_is_enough_and_the_card_is_sent_as_it_is(bare, online):
    licence_of("mit")(bare)
    assert push(f"checkpoint={bare}", REPO) == 0
    assert online.repos["somebody/tiny"].branches["main"]["README.md"] == (bare / "README.md").read_bytes()


def test_a_changed_byte_of_a_checkpoint_is_found(run, online, tmp_path, capsys):
    copy = Path(shutil.copytree(run / "checkpoints/step_00000012", tmp_path / "step_00000012"))
    weights = copy / "hf/model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert push(f"checkpoint={copy}", REPO, LICENCE) == 1
    assert "hf/model.safetensors has checksum" in capsys.readouterr().err
    assert json.loads((copy / "COMMITTED").read_text())["files"]
    assert not online.calls


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["checkpoint has no value", "repo has no value"]),
        (["checkpoint=owner/name", REPO, LICENCE], ["checkpoint=owner/name is not a local folder"]),
        (["checkpoint=nope/nope/nope", REPO], ["nope/nope/nope"]),
        (
            ["checkpoint=RUN", "repo=tiny", "license=Apache 2"],
            ["repo=tiny is not a hub name", "license=Apache 2 is not a hub licence"],
        ),
        (["checkpoint=RUN", "repo=a/b--c", "license=other"], ["repo=a/b--c is not a hub name", "license_link"]),
        (["checkpoint=RUN", REPO, "revision=''"], ["revision is empty"]),
        (["checkpoint=RUN", REPO, "revision=a..b"], ["revision=a..b is not a branch name"]),
        (["checkpoint=RUN", REPO, "revision=step 4"], ["revision=step 4 is not a branch name"]),
    ],
)
def test_mistakes_are_listed_with_their_remedies(arguments, words, run, online, capsys):
    assert push(*(argument.replace("RUN", str(run)) for argument in arguments)) == 2
    said = capsys.readouterr().err
    assert all(word in said for word in words), said
    assert not online.calls


def test_scores_of_these_weights_are_added_to_the_card_that_is_sent(run, online):
    checkpoint = locate(str(run))
    found = {"identity": checkpoint.identity(), "tasks": {"piqa": {"score": 0.625, "metric": "acc_norm", "rows": 1838}}}
    (checkpoint.folder / "evaluation").mkdir()
    for identity, shown in (("of other weights", False), (found["identity"], True)):
        (checkpoint.folder / "evaluation/results.json").write_text(json.dumps(found | {"identity": identity}))
        assert push(f"checkpoint={run}", REPO, LICENCE, "overwrite=true") == 0
        text = online.repos["somebody/tiny"].branches["main"]["README.md"].decode()
        assert ("\n## Scores\n" in text) == ("| piqa | 0.6250 | acc_norm | 1,838 |" in text) == shown
        assert "\n## Licence\n" in text
    (result,) = huggingface_hub.ModelCard(text).data.eval_results
    assert (result.dataset_name, result.metric_type, result.metric_value) == ("piqa", "acc_norm", 0.625)
