"""Broken and malicious checkpoints: each is refused by name, or loads completely; none is filled in or runs code.

An hf/ folder that is a checkpoint of a run has checksums, and each flipped bit of each of its files is named. Alone it
has none: there a flipped bit may make another valid configuration, say another rms_norm_eps, which nothing contradicts.
"""

import ast
import json
import pickle
import random
import time
from pathlib import Path

import pytest
import torch
from attack import small_export
from attack.seed import SEED, one, positions
from attack.small_export import VOCABULARY, content, cut, damaged, keys, sharded, tensors
from evaluation.small_rows import write_rows
from safetensors.torch import load_file
from transformers.utils import logging

from sparsellm.commands import analyze, evaluate
from sparsellm.hf import conversion, pretrained
from sparsellm.hf.pretrained import BrokenModel
from sparsellm.runs.committed import file_digest
from sparsellm.runs.locate import Checkpoint, CheckpointNotFound

PACKAGE = Path(pretrained.__file__).parents[1]
NORM, GATE, EMBEDDING = "model.norm.weight", "model.layers.0.mlp.gate_proj.weight", "model.embed_tokens.weight"
WEIGHTS = "model.safetensors"


def fill(name, value):
    def change(found):
        found[name].view(-1)[3] = value

    return tensors(change)


BROKEN = {  # what: (damage, what the refusal names)
    "a missing tensor": (tensors(lambda found: found.pop(GATE)), f"missing: {GATE}"),
    "a missing embedding": (tensors(lambda found: found.pop(EMBEDDING)), f"missing: .*{EMBEDDING}"),
    "no tensors": (tensors(lambda found: found.clear()), "layers, but the files have only 0 tensors"),
    "an unexpected tensor": (
        tensors(lambda found: found.update({"model.layers.7.x": torch.ones(2)})),
        r"unexpected \(no such layer in config\.json\): model\.layers\.7\.x",
    ),
    "another shape": (tensors(lambda found: found.update({NORM: torch.ones(17)})), f"whose shape differs.*: {NORM}"),
    "integers": (tensors(lambda found: found.update({NORM: torch.ones(16).int()})), f"integer values: {NORM}"),
    "NaN": (fill(GATE, torch.nan), f"not finite: {GATE}"),
    "infinity": (fill(NORM, torch.inf), f"not finite: {NORM}"),
    "an output matrix of its own": (
        tensors(lambda found: found.update({"lm_head.weight": found[EMBEDDING] + 1})),
        r"not equal to the embedding.*lm_head\.weight",
    ),
    "truncated weights": (cut(WEIGHTS, 0.9), WEIGHTS),
    "weights cut in their header": (cut(WEIGHTS, 0.01), WEIGHTS),
    "empty weights": (content(WEIGHTS, b""), WEIGHTS),
    "garbage weights": (content(WEIGHTS, random.Random(SEED).randbytes(4000)), WEIGHTS),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), f"contains no {WEIGHTS}"),
    "a lost shard": (sharded(lost=True), "model-00002-of-00002"),
    "an index that names a tensor too many": (sharded(lambda index: index.update(x=index[NORM])), "missing: x"),
    "an index that names a tensor too few": (sharded(lambda index: index.pop(NORM)), f"not where .* says: {NORM}"),
    "an index out of the folder": (sharded(lambda index: index.update({NORM: "../x.safetensors"})), "not in it"),
    "a garbage index": (
        lambda folder: [sharded()(folder), content(f"{WEIGHTS}.index.json", b"{")(folder)], "index.json",
    ),
    "a pickle in place of the weights": (
        lambda folder: (folder / WEIGHTS).rename(folder / "pytorch_model.bin"), f"contains no {WEIGHTS}",
    ),
    "an adapter": (content("adapter_config.json", b"{}"), "holds adapter_config.json"),
    "garbage config.json": (content("config.json", b"\xff\xfe"), "config.json"),
    "truncated config.json": (cut("config.json", 0.5), "config.json"),
    "a list as config.json": (content("config.json", b"[]"), "config.json"),
    "null as config.json": (content("config.json", b"null"), "config.json"),
    "an unknown model": (keys("config.json", model_type="none"), "config.json"),
    "a billion layers": (keys("config.json", num_hidden_layers=10**9), "num_hidden_layers 1000000000"),
    "a vocabulary of a billion": (keys("config.json", vocab_size=10**9), "vocab_size 1000000000"),
    "no heads": (keys("config.json", num_attention_heads=0), "config.json"),
    "a key of another name": (
        lambda folder: (folder / "config.json").write_text(
            (folder / "config.json").read_text().replace("hidden_act", "hidden_ act")
        ),
        "has no hidden_act",
    ),
    "words as sizes": (keys("config.json", hidden_size="many"), "hidden_size"),
    "garbage tokenizer": (content("tokenizer.json", b"\x00garbage"), "tokenizer"),
    "empty tokenizer": (content("tokenizer.json", b""), "tokenizer"),
    "truncated tokenizer": (cut("tokenizer.json", 0.5), "tokenizer"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), r"no tokenizer\.json"),
    "a tokenizer beyond the vocabulary": (
        lambda folder: (folder / "tokenizer.json").write_text(
            (folder / "tokenizer.json").read_text().replace(f": {VOCABULARY - 1}", ": 999999")
        ),
        "token 999,999 .* outside the model's vocabulary",
    ),
}  # fmt: skip
SENTENCES = ("a missing tensor", "NaN", "truncated weights", "garbage config.json", "garbage tokenizer")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    logging.disable_progress_bar()
    return small_export.write_export(tmp_path_factory.mktemp("export"))


def read(folder: Path) -> torch.nn.Module:
    """Everything that an evaluation reads."""
    config = pretrained.read_config(folder)
    pretrained.read_tokenizer(folder, config.get_text_config().vocab_size)
    return pretrained.read_model(folder)


def test_a_whole_model_is_read_as_it_was_written_in_one_file_or_in_two(whole, tmp_path):
    written = load_file(whole / WEIGHTS)
    for folder in (whole, damaged(whole, tmp_path / "hf", sharded())):
        state = read(folder).state_dict()
        assert state.keys() == written.keys() | {"lm_head.weight"}
        assert all(torch.equal(state[name], tensor) for name, tensor in written.items())
        assert len(conversion.load(folder)[2]) == len(written)


@pytest.mark.parametrize("what", BROKEN)
@one("broken models")
def test_a_broken_model_is_refused_by_name(what, whole, tmp_path):
    damage, named = BROKEN[what]
    folder = damaged(whole, tmp_path / "hf", damage)
    start = time.monotonic()
    with pytest.raises(BrokenModel, match=named) as error:
        read(folder)
    assert time.monotonic() - start < 5
    assert "\n" not in str(error.value)
    assert str(folder) in str(error.value)


@pytest.mark.parametrize("command", [evaluate, analyze])
@pytest.mark.parametrize("what", SENTENCES)
def test_the_commands_say_it_in_one_sentence_and_write_nothing(command, what, whole, tmp_path, capsys):
    folder = damaged(whole, tmp_path / "hf", BROKEN[what][0])
    (tmp_path / "text.txt").write_text("why water stone bird " * 40)
    write_rows(tmp_path / "rows", "piqa", "validation")
    more = ["text=" + str(tmp_path / "text.txt")] if command is analyze else [f"data_dir={tmp_path}/rows"]
    more += ["tasks=[piqa]"] if command is evaluate else []
    assert command.main([f"checkpoint={folder}", "device=cpu", *more], "program") == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if "cannot be read" in line]
    assert len(lines) == 1
    assert lines[0].startswith(f"sparsellm: checkpoint={folder} cannot be read: ")
    assert not list(folder.rglob("results.json")) + list(folder.rglob("analysis.json"))


def flipped(data: bytes, at: int, draw: random.Random) -> bytes:
    return data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :]


def header_length(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


@pytest.mark.slow
def test_one_flipped_bit_at_each_byte_of_the_small_files_of_a_checkpoint_is_named(whole, tmp_path):
    folder = damaged(whole, tmp_path / "step_00000001/hf", lambda _: None)
    files = {
        f"hf/{path.name}": {"bytes": path.stat().st_size, "xxh3_128": file_digest(path)} for path in folder.iterdir()
    }
    (folder.parent / "COMMITTED").write_text(json.dumps({"step": 1, "files": files}))
    checkpoint = Checkpoint(str(folder), folder.parent, tmp_path, 1)
    checkpoint.identity()
    draw, tried, held = random.Random(SEED), 0, 0
    lengths = {"config.json": None, "tokenizer_config.json": None, WEIGHTS: header_length(folder / WEIGHTS)}
    for name, length in lengths.items():
        data = (folder / name).read_bytes()
        for at in positions(length or len(data)):
            (folder / name).write_bytes(flipped(data, at, draw))
            tried += 1
            try:
                checkpoint.identity()
            except CheckpointNotFound as error:
                held += f"is damaged: hf/{name} has checksum" in str(error)
        (folder / name).write_bytes(data)
    print(f"bits of a checkpoint: tried {tried}, held {held}, failed {tried - held}")
    assert held == tried > 300


@pytest.mark.slow
def test_one_flipped_bit_of_a_bare_folder_is_refused_or_leaves_every_tensor_as_it_is(whole, tmp_path):
    """Without checksums: never a traceback, never a tensor that is not in the file."""
    folder = damaged(whole, tmp_path / "hf", lambda _: None)
    original, written = pretrained.read_config(whole).to_dict(), load_file(whole / WEIGHTS)
    original.pop("_name_or_path", None)
    draw = random.Random(SEED)
    count = dict.fromkeys(("refused", "the same", "another configuration", "failed"), 0)
    failures = []
    lengths = {
        "config.json": (None, 1),
        "tokenizer_config.json": (None, 3),
        WEIGHTS: (header_length(folder / WEIGHTS), 17),
    }
    for name, (length, stride) in lengths.items():
        data = (folder / name).read_bytes()
        for at in positions(length or len(data), stride):
            bad = flipped(data, at, draw)
            (folder / name).write_bytes(bad)
            try:
                outcome = of_a_bare_folder(folder, name, original, written)
            except BrokenModel as error:
                outcome = "refused" if "\n" not in str(error) else "failed"
            except Exception as error:
                outcome = "failed"
                failures.append(f"{name} byte {at}: {type(error).__name__}: {error}")
            count[outcome] += 1
        (folder / name).write_bytes(data)
    tried = sum(count.values())
    print(f"bits of a bare folder: tried {tried}, held {tried - count['failed']}, failed {count['failed']}: {count}")
    assert not failures, failures[:5]
    assert count["failed"] == 0
    assert count["refused"] > tried / 4


def of_a_bare_folder(folder, name, original, written):
    found = pretrained.read_config(folder).to_dict()
    found.pop("_name_or_path", None)
    if name == "tokenizer_config.json":
        tokenizer = pretrained.read_tokenizer(folder, VOCABULARY)
        return "the same" if tokenizer("why water").input_ids == whole_tokens(folder) else "another configuration"
    if name == "config.json" and found == original:
        return "the same"
    state = pretrained.read_model(folder, torch.float32).state_dict()
    assert all(torch.equal(state[tensor], value) for tensor, value in written.items())
    return "the same" if found == original else "another configuration"


def whole_tokens(folder: Path) -> list[int]:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "tokenizer.json")).encode("why water").ids


class Evil:
    """The code that a pickle runs when it is read."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


MALICIOUS = {
    "code for a known model": keys(
        "config.json", auto_map={"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}
    ),
    "code for an unknown model": keys(
        "config.json", model_type="evil", auto_map={"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}
    ),
    "code for the tokenizer": keys(
        "tokenizer_config.json", tokenizer_class="Evil", auto_map={"AutoTokenizer": ["evil.Evil", "evil.Evil"]}
    ),
    "a tokenizer of another class": keys("tokenizer_config.json", tokenizer_class="os.system"),
    "a pickled tokenizer class": keys("tokenizer_config.json", tokenizer_class=["os", "system"]),
    "a kernel from the hub": keys("config.json", attn_implementation="evil/kernel"),
    "weights by another name": keys("config.json", transformers_weights="pytorch_model.bin"),
    "no safetensors": lambda folder: (folder / WEIGHTS).unlink(),
    "a quantizer of its own": keys("config.json", quantization_config={"quant_method": "evil"}),
    "weights that are a link out of the folder": lambda folder: (
        (folder / WEIGHTS).unlink(), (folder / WEIGHTS).symlink_to(folder / "pytorch_model.bin"),
    ),
    "a configuration that is a link out of the folder": lambda folder: (
        (folder / "config.json").unlink(), (folder / "config.json").symlink_to("/dev/null"),
    ),
    "a tensor's name out of the folder": tensors(lambda found: found.update({"../../evil": torch.ones(2)})),
}  # fmt: skip


@pytest.mark.parametrize("what", MALICIOUS)
@one("malicious checkpoints")
def test_a_malicious_checkpoint_runs_no_code_and_asks_nobody(what, whole, tmp_path, monkeypatch):
    marker = tmp_path / "ran"
    folder = damaged(whole, tmp_path / "hf", lambda _: None)
    code = f"from pathlib import Path\nPath({str(marker)!r}).touch()\nclass Evil: pass\n"
    for name in ("evil.py", "modeling_evil.py", "sitecustomize.py"):
        (folder / name).write_text(code)
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate/generate.py").write_text(code)
    for name in ("pytorch_model.bin", "tokenizer.pkl", "training_args.bin"):
        (folder / name).write_bytes(pickle.dumps(Evil(marker)))
    MALICIOUS[what](folder)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("somebody was asked"))
    try:
        state = read(folder).state_dict()
    except BrokenModel:
        state = load_file(whole / WEIGHTS)  # refused
    assert all(torch.equal(state[name], tensor) for name, tensor in load_file(whole / WEIGHTS).items())
    assert not marker.exists()


def test_only_one_file_loads_models_and_it_never_trusts_code():
    trusted = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            owner = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
            if node.func.attr not in ("from_pretrained", "from_config") or owner == "Tokenizer":
                continue  # Tokenizer: of the library `tokenizers`, which knows no code
            given = {keyword.arg: keyword.value for keyword in node.keywords}
            where = f"{path.relative_to(PACKAGE)}:{node.lineno}"
            assert isinstance(given.get("trust_remote_code"), ast.Constant), where
            assert given["trust_remote_code"].value is False, where
            trusted.append((path.name, node.func.attr))
    assert {name for name, call in trusted if call == "from_pretrained"} == {"pretrained.py"}
