"""Failures around a command: its log, its terminal, its data workers, another rank that hangs.

A run ends as it should at a random instant of each, leaves no process behind, and the same command ends as if nobody
had disturbed it.
"""

import multiprocessing
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest
from attack.kills import TORCHRUN, left, said, unlike
from attack.seed import SEED, one
from processes import PATIENCE, SERVER, family, kill, started

from sparsellm.distributed import lifeline

pytestmark = pytest.mark.slow
TRIALS = 1  # of each kind, for each seed
LOGS = ("kept", "full", "closed", "unread")


@pytest.fixture(scope="module")
def command(prepared) -> list[str]:
    return ["-m", "sparsellm.train", *prepared, "run.name=r", "runtime.data_workers=2"]


@pytest.fixture(scope="module")
def plain(command, tmp_path_factory) -> dict[str, object]:
    """The output of an undisturbed run."""
    folder = tmp_path_factory.mktemp("plain") / "here"
    assert ended(start(command, folder)) == 0, said(folder).read_text()
    return left(folder)


def _disturbed_by(how: Callable[[], object] | None, _name: str) -> None:
    multiprocessing.set_start_method("fork", force=True)  # of data workers; the server of forks has left its own
    if how is not None:
        how()


def start(command: list[str], folder: Path, how: Callable[[], object] | None = None):
    folder.mkdir(exist_ok=True)
    prepare = partial(_disturbed_by, how)
    process = SERVER.Process(target=started, args=(command, folder, said(folder), prepare))
    process.start()
    return process


def ended(process) -> int:
    """The exit code, after the process and all its descendants have ended."""
    members = family(process.pid)
    deadline = time.monotonic() + PATIENCE
    while process.is_alive() and time.monotonic() < deadline:
        members = list(dict.fromkeys([*members, *family(process.pid)]))
        process.join(0.1)
    alive = psutil.wait_procs(members, 5)[1]
    kill(alive)
    assert not alive, f"still there: {alive}"
    return process.exitcode


def require_as_plain(command: list[str], folder: Path, plain: dict[str, object]) -> None:
    """The same command, now undisturbed, ends like one that was never disturbed."""
    process = start(command, folder)
    assert ended(process) == 0, said(folder).read_text()[-2000:]
    differ = unlike(folder, plain, stopped=True)
    assert not differ, f"these differ: {differ}"
    shutil.rmtree(folder)


def wait_for(path: Path, process) -> None:
    deadline = time.monotonic() + PATIENCE
    while not path.exists():
        assert process.is_alive(), "it ended before"
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.02)


def sentences(folder: Path) -> str:
    text = said(folder).read_text()
    assert "Traceback" not in text, text[-2000:]
    return text


def _log_on(logs: tuple[str, str]) -> None:
    for number, log in enumerate(logs, start=1):
        if log == "closed":
            os.close(number)
        elif log == "full":
            os.dup2(os.open("/dev/full", os.O_WRONLY), number)
        elif log == "unread":
            reading, writing = os.pipe()
            os.dup2(writing, number)
            os.close(reading)
            os.close(writing)


def test_a_log_that_cannot_be_written(command, plain, tmp_path):
    for number in range(TRIALS):
        draw = random.Random(f"{SEED} log {number}")
        logs = draw.choice(LOGS), draw.choice(LOGS[1:])
        with one("a log that is full, closed or unread"):
            print(logs)
            folder = tmp_path / str(number)
            assert ended(start(command, folder, partial(_log_on, logs))) == 0
            assert left(folder) == plain


def test_a_hangup(command, plain, tmp_path):
    for number in range(TRIALS):
        draw = random.Random(f"{SEED} hangup {number}")
        with one("a terminal that is closed"):
            folder = tmp_path / str(number)
            process = start(command, folder)
            wait_for(folder / "runs/r/metrics.jsonl", process)
            time.sleep(draw.uniform(0, 0.5))
            for member in family(process.pid) * 2:  # by the system, and by the shell
                if member.is_running():
                    member.send_signal(signal.SIGHUP)
            assert ended(process) in (128 + signal.SIGHUP, 0)
            sentences(folder)
            require_as_plain(command, folder, plain)


def _fail_at_fork(number: int) -> None:
    fork, forks = os.fork, []

    def failing() -> int:
        forks.append(None)
        if len(forks) == number:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return fork()

    os.fork = failing


def test_a_data_worker_that_cannot_start(command, plain, tmp_path):
    for number in range(TRIALS):
        draw = random.Random(f"{SEED} fork {number}")
        with one("a data worker that cannot start"):
            folder = tmp_path / str(number)
            assert ended(start(command, folder, partial(_fail_at_fork, draw.choice((1, 2))))) == 1
            assert "sparsellm: a data worker cannot be started" in sentences(folder)
            require_as_plain(command, folder, plain)


def test_a_data_worker_that_is_killed(command, plain, tmp_path):
    for number in range(TRIALS):
        draw = random.Random(f"{SEED} worker {number}")
        with one("a data worker that is killed"):
            folder = tmp_path / str(number)
            process = start(command, folder)
            wait_for(folder / "runs/r/metrics.jsonl", process)
            time.sleep(draw.uniform(0, 0.3))
            if workers := family(process.pid)[1:]:  # there are none once the run has taken its last batch
                draw.choice(workers).kill()
            if (code := ended(process)) != 0:  # the batches that it had sent may have been the last ones
                assert code == 1
                assert "was killed, perhaps by the system for lack of memory" in sentences(folder)
            require_as_plain(command, folder, plain)


def _impatient() -> None:
    lifeline.BEAT, lifeline.SILENT, lifeline.SILENT_LIMIT = 0.2, 1, 2
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = "1"  # a stopped process answers no signal but the last


def test_a_rank_that_hangs(prepared, tmp_path):
    command = [*TORCHRUN, "-m", "sparsellm.train", *prepared, "run.name=r"]
    for number in range(TRIALS):
        draw = random.Random(f"{SEED} hang {number}")
        with one("a rank that hangs"):
            folder = tmp_path / str(number)
            process = start(command, folder, _impatient)
            wait_for(folder / "runs/r/metrics.jsonl", process)
            time.sleep(draw.uniform(0, 0.3))
            rank = draw.choice(psutil.Process(process.pid).children())
            rank.suspend()
            if ended(process) != 0:
                assert f"process {rank.pid}) has not answered for" in said(folder).read_text()
            assert ended(start(command, folder)) == 0, said(folder).read_text()[-2000:]
