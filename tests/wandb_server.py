"""A local Weights & Biases server with what a record needs, and its failure modes."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

OK, SILENT, RUBBISH = 200, 0, 299  # beside the HTTP statuses of failures
RUN = {
    "id": "x", "name": "run", "displayName": "run", "historyLineCount": 0,
    "project": {"id": "p", "name": "sparsellm", "entity": {"id": "e", "name": "tests"}},
}  # fmt: skip
ANSWERS = {
    "RunResumeStatus": {"model": None},
    "UpsertBucket": {"upsertBucket": {"bucket": RUN, "inserted": True}},
    "CreateRunFiles": {"createRunFiles": {"runID": "x", "uploadHeaders": [], "files": []}},
}


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body, server = self.rfile.read(int(self.headers.get("content-length") or 0)), self.server
        assert isinstance(server, Server)
        server.requests.append(self.path)
        if server.answer == SILENT:
            server.ended.wait()
            return
        answer = b"<html>" if server.answer == RUBBISH else b"{}"
        if server.answer == OK and self.path == "/graphql":
            name = json.loads(body)["query"].split("(")[0].split("{")[0].split()[-1]
            answer = json.dumps({"data": ANSWERS.get(name, {})}).encode()
        self.send_response(OK if server.answer == RUBBISH else server.answer)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_GET = do_PUT = do_POST

    def log_message(self, *_: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True
    answer = OK  # may change at any time

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[str] = []
        self.ended = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def serving(answer: int = OK) -> Iterator[Server]:
    server = Server()
    server.answer = answer
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.ended.set()
        server.shutdown()
        server.server_close()


def dead_url() -> str:
    """The URL of a port on which nothing listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"
