"""Hub names without a network, or nonexistent ones: a line says that the hub is asked, and the command ends soon."""

import http.server
import importlib
import os
import socket
import subprocess
import sys
import threading
import time

import datasets
import pytest
from huggingface_hub.errors import HTTPError, OfflineModeIsEnabled

from sparsellm.commands import analyze, evaluate
from sparsellm.data import tokenizer
from sparsellm.hf import hub

CLIENT = importlib.import_module(HTTPError.__module__)  # httpx or httpx2
SECONDS = 10  # in which the hub's libraries, left alone, would not have asked the second time of five
TOKENIZER = "data.tokenizer=owner/no-such-tokenizer"
FILES = ["experiment=smoke", "data=files", "data.files=text.txt", "logging=disabled"]
HUB_DATA = ["data=fineweb_edu", "data.dataset=owner/no-such-data", "data.tokenizer=tokenizer"]
# Typed name -> what is looked for, and the final message.
CASES = {
    "evaluate checkpoint=owner/no-such-model": ("checkpoint=owner/no-such-model", "no model of that name can be read"),
    "analyze text=text.txt checkpoint=owner/no-such-model": (
        "checkpoint=owner/no-such-model",
        "no model of that name can be read",
    ),
    " ".join(["train", *FILES, "data.streaming=true", TOKENIZER]): (TOKENIZER, "give a folder with tokenizer.json"),
    " ".join(["prepare_data", *FILES, TOKENIZER]): (TOKENIZER, "give a folder with tokenizer.json"),
    " ".join(["train", "experiment=smoke", *HUB_DATA, "data.streaming=true", "logging=disabled"]): (
        "data.dataset=owner/no-such-data",
        "data=files",
    ),
    " ".join(["prepare_data", "experiment=smoke", *HUB_DATA]): ("data.dataset=owner/no-such-data", "data=files"),
    "train experiment=smoke logging=disabled evaluation.every=1 evaluation.tasks=[piqa,winogrande]": (
        "the rows of piqa, winogrande",
        "evaluation.data_dir=DIR",
    ),
}


@pytest.fixture
def no_network(monkeypatch, tmp_path):
    def refuse(*_args, **_kwargs):
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")  # in which there is no copy of rows


@pytest.mark.parametrize("typed", CASES)
def test_a_name_without_a_network_ends_in_seconds_with_a_sentence(typed, no_network, tmp_path, monkeypatch, capsys):
    (tmp_path / "text.txt").write_text("why water")
    tokenizer.save(tokenizer.train(["why water"], 300), tmp_path / "tokenizer")
    monkeypatch.chdir(tmp_path)
    asked, answers = [], hub.answers
    monkeypatch.setattr(hub, "answers", lambda what: asked.append(what) or answers(what))
    command, *arguments = typed.split()
    start = time.monotonic()
    assert importlib.import_module(f"sparsellm.commands.{command}").main(arguments, "program") in (1, 2)
    assert time.monotonic() - start < SECONDS
    wanted, remedy = CASES[typed]
    said = capsys.readouterr().err.splitlines()
    assert len(asked) == 1
    assert asked[0].startswith(wanted)
    looking = said.index(f"sparsellm: looking for {asked[0]} on the hub")
    assert "does not answer (" in said[looking + 1]
    assert wanted.partition("=")[0] in said[-1]
    assert remedy in said[-1]
    assert not (tmp_path / "runs").exists()
    assert not (tmp_path / "evaluations").exists()


def test_of_several_ranks_one_says_what_is_looked_for(no_network, monkeypatch, capsys):
    for rank, lines in (("0", 2), ("1", 0)):
        monkeypatch.setenv("RANK", rank)
        assert not hub.answers("init_from=owner/name")
        assert len(capsys.readouterr().err.splitlines()) == lines


@pytest.mark.slow
def test_a_name_that_the_hub_does_not_have_ends_in_seconds_with_a_sentence(tmp_path):
    class Nothing(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/" else 404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_POST = do_GET

        def log_message(self, *_):
            pass

    (tmp_path / "text.txt").write_text("why water")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Nothing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_port}"
        environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "hub")}
        start = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "sparsellm.prepare_data", *FILES, TOKENIZER],
            capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=60,
        )  # fmt: skip
        server.shutdown()
    assert time.monotonic() - start < 2 * SECONDS  # imports, on a busy machine
    assert done.returncode == 2
    _first, looking, *_, last = done.stderr.splitlines()
    assert looking == f"sparsellm: looking for {TOKENIZER} on the hub"
    assert TOKENIZER in last
    assert "404" in last
    assert "give a folder with tokenizer.json" in last


def test_a_path_is_not_looked_for_on_the_hub(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "answers", lambda what: pytest.fail(f"asked the hub for {what}"))
    for command in (evaluate, analyze):
        assert command.main(["checkpoint=runs/nope"], "program") == 2
        assert "checkpoint=runs/nope does not exist" in capsys.readouterr().err


def test_nobody_waits_for_a_hub_that_is_switched_off():
    assert not hub.is_temporary(OfflineModeIsEnabled("HF_HUB_OFFLINE is set"))
    assert hub.is_temporary(ConnectionError("reset by peer"))


def answered(status):
    request = CLIENT.Request("GET", "https://example.org")
    return CLIENT.HTTPStatusError("an error", request=request, response=CLIENT.Response(status, request=request))


@pytest.mark.parametrize(
    ("error", "temporary"),
    [
        (CLIENT.ReadTimeout("late"), True), (ConnectionResetError(), True), (TimeoutError(), True),
        (answered(503), True), (answered(429), True), (answered(408), True), (answered(404), False),
        (OfflineModeIsEnabled(), False), (FileNotFoundError(), False), (ValueError(), False),
    ],
    ids=repr,
)  # fmt: skip
def test_a_failure_is_retried_if_waiting_may_help(error, temporary):
    assert hub.is_temporary(error) is temporary
