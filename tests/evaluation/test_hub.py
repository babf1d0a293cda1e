"""Names on the hub, without a network: what is said at once, and that nothing waits for half a minute."""

import socket
import time

import pytest

from sparsellm.commands import analyze, evaluate
from sparsellm.evaluation import hub


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*_args, **_kwargs):
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.mark.parametrize("command", [evaluate, analyze])
def test_a_hub_name_without_a_network_ends_at_once_with_a_sentence(command, no_network, tmp_path, monkeypatch, capsys):
    (tmp_path / "text.txt").write_text("why water")
    monkeypatch.chdir(tmp_path)
    printed = []

    def obstacle(answer=hub.obstacle):
        printed.append(capsys.readouterr().err)
        return answer()

    monkeypatch.setattr(hub, "obstacle", obstacle)
    arguments = ["checkpoint=owner/no-such-model", *(["text=text.txt"] if command is analyze else [])]
    start = time.monotonic()
    assert command.main(arguments, "program") == 1
    assert time.monotonic() - start < 10
    assert printed == [
        "owner/no-such-model is no folder here: looking for a model of that name on the hub\n"
    ]  # before the network is asked
    said = capsys.readouterr().err
    assert "does not answer (" in said
    assert "sparsellm: checkpoint=owner/no-such-model is no folder here, and no model of that name can be read" in said


def test_a_path_is_not_looked_for_on_the_hub(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "obstacle", lambda: pytest.fail("asked the hub"))
    for command in (evaluate, analyze):
        assert command.main(["checkpoint=runs/nope"], "program") == 2
        assert "checkpoint=runs/nope does not exist" in capsys.readouterr().err
