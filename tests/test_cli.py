"""The program `sparsellm`, and what it says first."""

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from sparsellm import cli
from sparsellm.system.processes import rank_mistake


def test_commands_are_listed(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["sparsellm"])
    with pytest.raises(SystemExit, match="0"):
        cli.main()
    shown = capsys.readouterr().out
    assert all(command in shown for command in cli.COMMANDS)


def test_a_misspelt_command_is_refused_with_the_one_it_may_mean(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["sparsellm", "trian", "experiment=smoke"])
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    assert "trian is not a command: did you mean train?" in capsys.readouterr().err


def test_an_option_that_is_not_there_is_spelled_as_it_was_typed(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["sparsellm", "--verbose"])
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    assert capsys.readouterr().err.startswith("sparsellm: --verbose is not a command\n")


SLOW = "{'torch', 'datasets', 'transformers', 'lm_eval', 'pandas', 'matplotlib', 'wandb'}"  # to import


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_a_command_speaks_before_it_imports_what_takes_seconds(command):
    arguments = [] if command in ("train", "prepare_data", "sweep") else ["checkpoint=x"]
    if command == "calibrate":
        arguments = ["model=tiny"]
    if command == "import_model":
        arguments.append("output_dir=not-there")
    if command == "push":
        arguments.append("repo=owner/name")
    code = (
        "import sys, importlib; from sparsellm import cli\n"
        "importlib.import_module = lambda name: (_ for _ in ()).throw(SystemExit(9))\n"
        f"try: cli.run({command!r}, {arguments!r})\n"
        "except SystemExit as end: assert end.code == 9\n"
        f"assert not {SLOW} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == f"sparsellm {command}: starting\n"


@pytest.mark.parametrize(
    ("command", "arguments", "words"),
    [
        ("train", ["data.tokenzier=x"], "did you mean data.tokenizer?"),
        ("train", ["training.batch_size=0", "optimizer.beta1=2"], "2 mistakes in the configuration"),
        ("train", ["--cfg", "job", "training.steps=many"], "training.steps is many"),
        ("prepare_data", ["data.validation_fraction=2"], "it should be at least 0 and below 1"),
        ("evaluate", ["checkpiont=x", "limit=0"], "3 mistakes in the configuration"),
        ("analyze", [], "checkpoint has no value"),
        ("push", ["checkpoint=x", "repo=name"], "repo=name is not a hub name"),
        ("calibrate", ["model=[tiny,9b]"], "model=9b is unknown"),
        ("sweep", ["sparsity.l1_coeficient=0,1", "evaluate.limits=3"], "2 mistakes in the configuration"),
        ("sweep", ["sweep.mode=lsf"], "sweep.mode is lsf"),
    ],
)
def test_a_mistake_in_what_was_typed_is_refused_before_imports_that_take_seconds(command, arguments, words):
    code = (
        "import sys; from sparsellm import cli\n"
        f"try: cli.run({command!r}, {arguments!r})\n"
        f"finally: assert not {SLOW} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("during", ["import", "main"])
def test_an_interrupt_during_start_up_ends_with_a_sentence(during):
    code = f"""
import importlib, os, signal, types
from sparsellm import cli

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs, and theirs, begin by ignoring it

def interrupted(*_):
    try:
        os.kill(os.getpid(), signal.SIGINT)
        signal.pause()
    except KeyboardInterrupt as error:  # as libraries do in the middle of their imports
        if {during == "import"}:
            raise ImportError("another error") from error
        raise

command = interrupted if {during == "import"} else lambda: types.SimpleNamespace(main=interrupted)
other = importlib.import_module
importlib.import_module = lambda name, *rest: command() if name == "sparsellm.commands.train" else other(name, *rest)
cli.run("train", [])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 130
    assert done.stderr == (
        "sparsellm train: starting\n\nsparsellm train: interrupted; run the same command to start again\n"
    )


def test_an_interrupt_that_python_drops_in_a_finalizer_is_one_still():
    code = """
import os, signal, sys, types
from sparsellm import cli

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs, and theirs, begin by ignoring it

class Finalized:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)

class Broken:
    def __del__(self):
        raise ValueError("of a finalizer")

def main(_arguments, _program):
    Broken()
    Finalized()
    print("went on")
    return 0

sys.modules["sparsellm.commands.push"] = types.SimpleNamespace(main=main)
cli.run("push", ["checkpoint=x", "repo=a/b"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 130
    assert "went on" not in done.stdout
    assert "ValueError: of a finalizer" in done.stderr  # printed as usual
    assert done.stderr.endswith("\nsparsellm push: interrupted; run the same command to start again\n")


def test_an_interrupt_that_a_library_catches_ends_the_command_a_little_later():
    code = """
import os, signal, sys, time, types
from sparsellm import cli

cli.SECONDS_AFTER_AN_INTERRUPT = 0.2
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs, and theirs, begin by ignoring it

def main(_arguments, _program):
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
    except:
        print("caught", flush=True)
    time.sleep(60)
    return 0

sys.modules["sparsellm.commands.push"] = types.SimpleNamespace(main=main)
cli.run("push", ["checkpoint=x", "repo=a/b"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.returncode == 130
    assert done.stdout == "caught\n"
    assert done.stderr.endswith("\nsparsellm push: interrupted; run the same command to start again\n")


@pytest.mark.slow
def test_the_first_mistake_a_person_makes_is_answered_without_a_traceback(tmp_path):
    for arguments, words in (
        (["--experiment", "smoke"], "write experiment=smoke"),
        (["traning.steps=3"], "did you mean training.steps?"),
        (["training.steps=0", "sparsity.activation=gelu", "run.nme=x"], "3 mistakes"),
    ):
        command = [sys.executable, "-m", "sparsellm.train", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 2
        assert words in done.stderr
        for foreign in ("Traceback", "HYDRA", "hydra", "+traning"):
            assert foreign not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_of_which_a_library_makes_another_error_is_one_still(monkeypatch, capsys):
    def main(_arguments, _program):
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
        except KeyboardInterrupt as error:
            raise RuntimeError("Error calling __set_name__") from error

    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    other = cli.importlib.import_module

    def import_module(name, *rest):
        return SimpleNamespace(main=main) if name == "sparsellm.commands.train" else other(name, *rest)

    monkeypatch.setattr(cli.importlib, "import_module", import_module)
    try:
        assert cli._interruptible("train", ["experiment=smoke"], "program") == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert "interrupted; run the same command to start again" in capsys.readouterr().err


@pytest.mark.parametrize("letters", [1, 100_000], ids=["as it ends", "before"])
@pytest.mark.parametrize("command", ["push", "generate"])
def test_output_that_nobody_reads_any_more_ends_only_a_command_that_gives_nothing_else(command, letters):
    """As of `| head`; a few letters are written only as the process ends."""
    given = ["checkpoint=x", "repo=a/b"] if command == "push" else ["checkpoint=x"]
    code = (
        "import sys, types; from sparsellm import cli;"
        f"main = lambda *_: print('x' * {letters}) or print('done', file=sys.stderr) or 0;"
        f"sys.modules['sparsellm.commands.{command}'] = types.SimpleNamespace(main=main);"
        f"cli.run('{command}', {given})"
    )
    done = into_closed_pipe([sys.executable, "-c", code])
    lines = done.stderr.splitlines()
    if command == "push":
        lost = (
            "sparsellm: standard output cannot be written (Broken pipe): its lines are lost, and the command continues"
        )
        assert done.returncode == 0
        assert sorted(lines) == sorted(["done", lost, "sparsellm push: starting"])
    else:
        assert done.returncode == 128 + signal.SIGPIPE
        assert [line for line in lines if line != "done"] == ["sparsellm generate: starting"]


def into_closed_pipe(command: list[str]) -> subprocess.CompletedProcess[str]:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        return subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    finally:
        os.close(writing)


def test_help_that_nobody_reads_ends_without_a_word():
    done = into_closed_pipe([sys.executable, "-c", "from sparsellm import cli; cli.main()", "--help"])
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 is set in the environment without RANK, MASTER_ADDR, MASTER_PORT"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "RANK=0, WORLD_SIZE=2 is set in the environment without MASTER_ADDR"),
        (
            {"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
            "RANK=2 is not a rank of WORLD_SIZE=2: `unset RANK WORLD_SIZE MASTER_ADDR MASTER_PORT` to start one",
        ),
    ],
)
def test_variables_of_ranks_that_are_left_over_are_refused(variables, words, monkeypatch, capsys):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match="2"):
        cli.run("train", ["experiment=smoke"])
    assert words in capsys.readouterr().err


def test_a_world_of_one_is_no_mistake(monkeypatch):
    for variables in ({}, {"WORLD_SIZE": "1"}, dict.fromkeys(("RANK", "MASTER_ADDR", "MASTER_PORT"), "0")):
        for name, value in (variables | {"WORLD_SIZE": "1"}).items():
            monkeypatch.setenv(name, value)
        assert rank_mistake() is None
