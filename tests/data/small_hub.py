"""A data set on a stand-in for the hub, which the real libraries ask over HTTP."""

import http.server
import json
import threading
import urllib.parse
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pytest

NAME = "somebody/dumps"
FIRST, SECOND = "a" * 40, "b" * 40  # commits


class SmallHub:
    """Serves the data set NAME: `commits` has the folder of each commit, of which the last is the latest."""

    def __init__(self, commits: dict[str, Path]) -> None:
        self.commits = commits
        self.reads: Counter[str] = Counter()  # ranges of files that were asked for
        self.fails: list[str] = []  # how the next reads fail: a status, or "stalls" or "hangs up"
        self.fails_after = 0  # reads that succeed before that

    def folder(self, revision: str) -> tuple[str, Path] | None:
        commit = list(self.commits)[-1] if revision == "main" else revision
        return (commit, self.commits[commit]) if commit in self.commits else None


class _Served(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: SmallHub

    def do_GET(self) -> None:
        path, _, query = urllib.parse.unquote(self.path).partition("?")
        if path.startswith(f"/api/datasets/{NAME}"):
            self.api(path.removeprefix(f"/api/datasets/{NAME}").strip("/"), "recursive=true" in query.lower())
        elif path.startswith(f"/datasets/{NAME}/resolve/"):
            revision, _, name = path.removeprefix(f"/datasets/{NAME}/resolve/").partition("/")
            self.file(revision, name)
        else:
            self.answer(b"", 200 if path == "/" else 404)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(b"[]")

    def api(self, path: str, recursive: bool) -> None:
        what, _, rest = path.partition("/")
        revision, _, inside = rest.partition("/")
        found = self.hub.folder(revision or "main")
        if found is None:
            return self.answer(b"{}", 404, {"X-Error-Code": "RevisionNotFound"})
        commit, folder = found
        if what != "tree":
            return self.json({"id": NAME, "sha": commit, "private": False, "siblings": [], "tags": []})
        listed = sorted((folder / inside).rglob("*") if recursive else (folder / inside).iterdir())
        return self.json([entry(each, folder) for each in listed])

    def file(self, revision: str, name: str) -> None:
        found = self.hub.folder(revision)
        path = found and found[1] / name
        if not path or not path.is_file():
            return self.answer(b"", 404, {"X-Error-Code": "EntryNotFound"})
        content = path.read_bytes()
        headers = {"ETag": f'"{name}"', "X-Repo-Commit": found[0], "Accept-Ranges": "bytes"}
        if (asked := self.headers["Range"]) is None:
            return self.answer(content, 200, headers)
        if self.command == "GET":
            self.hub.reads[name] += 1
            if self.hub.fails and self.hub.reads.total() > self.hub.fails_after:
                return self.fail(self.hub.fails.pop(0))
        first, last = (int(number) for number in asked.removeprefix("bytes=").split("-"))
        headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
        return self.answer(content[first : last + 1], 206, headers)

    def fail(self, how: str) -> None:
        if how == "stalls":
            threading.Event().wait(0.6)  # longer than the timeout; tests replace time.sleep
        if how in ("stalls", "hangs up"):
            self.close_connection = True
            self.connection.close()
            return None
        return self.answer(b"", int(how))

    def json(self, value: Any) -> None:
        self.answer(json.dumps(value).encode(), 200, {"Content-Type": "application/json"})

    def answer(self, content: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {**(headers or {}), "Content-Length": str(len(content))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


def entry(path: Path, folder: Path) -> dict[str, Any]:
    kind = {"type": "directory", "oid": "0"} if path.is_dir() else {"type": "file", "oid": "0"}
    return {**kind, "path": path.relative_to(folder).as_posix(), "size": 0 if path.is_dir() else path.stat().st_size}


@contextmanager
def serving(commits: dict[str, Path], cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallHub]:
    """A SmallHub that the libraries of this process and of forks take for the hub."""
    hub = SmallHub(commits)
    handler = type("Handler", (_Served,), {"hub": hub})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.handle_error = lambda *_: None  # connections that `fail` closed
        threading.Thread(target=server.serve_forever, daemon=True).start()
        endpoint, constants = f"http://127.0.0.1:{server.server_port}", huggingface_hub.constants
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.3)
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", endpoint)
        url = endpoint + "/datasets/{repo_id}/resolve/{revision}/{path}"
        monkeypatch.setattr(datasets.config, "HUB_DATASETS_URL", url)
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
        huggingface_hub.HfFileSystem.clear_instance_cache()
        yield hub
        server.shutdown()
    huggingface_hub.HfFileSystem.clear_instance_cache()
