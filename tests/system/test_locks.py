"""A lock keeps other processes out, says that it waits, and may be given up."""

import subprocess
import sys

import pytest

from sparsellm.system import locks

HOLD = """
import sys
from sparsellm.system import locks
file = open(sys.argv[1], "w")
locks.take(file)
print("held", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock of tmp_path/lock until it reads a line or is killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path / "lock"], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


@pytest.mark.parametrize("patient", [True, False])
def test_waits_for_another_process_and_says_so_once(holder, tmp_path, patient):
    said = []

    def waiting():
        said.append("waiting")
        holder.kill()  # the system frees its lock

    with (tmp_path / "lock").open("w") as file:
        assert locks.take(file, waiting, *(() if patient else (lambda: False,)))
    assert said == ["waiting"]


@pytest.mark.usefixtures("holder")
def test_gives_up_and_says_nothing_where_there_is_no_time_to_wait(tmp_path):
    looks = iter([False, True])
    said = []
    with (tmp_path / "lock").open("w") as file:
        assert not locks.take(file, lambda: said.append("waiting"), lambda: True)
        assert said == []
        assert not locks.take(file, lambda: said.append("waiting"), lambda: next(looks))
    assert said == ["waiting"]


def test_a_free_lock_is_taken_without_a_word(tmp_path):
    with (tmp_path / "lock").open("w") as file:
        assert locks.take(file, lambda: pytest.fail("waited"), lambda: True)
