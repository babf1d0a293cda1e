"""Commands that benchmarks start: whatever they do, nothing of them is left after their time."""

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from scripts.benchmarks import harness

# Starts a process in a session of its own that ignores SIGTERM, writes its ID to argv[1], and does what argv[2] says.
PARENT = """
import subprocess, sys, time
ignores = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", ignores], stdout=subprocess.PIPE, start_new_session=True)
child.stdout.readline()
open(sys.argv[1], "w").write(str(child.pid))
exec(sys.argv[2])
"""
# Rank 1 dies by SIGKILL while rank 0 waits.
RANK = """
import os, signal, sys, time
open(f"{sys.argv[1]}{os.environ['RANK']}", "w").write(str(os.getpid()))
while os.environ["RANK"] == "1":
    if os.path.exists(f"{sys.argv[1]}0"):
        os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""


def is_gone(written: Path) -> bool:
    return not psutil.pid_exists(int(written.read_text()))


@pytest.mark.parametrize(("does", "code"), [("time.sleep(600)", None), ("sys.exit(3)", 3)])
def test_a_command_ends_with_all_that_it_has_started(tmp_path, monkeypatch, does, code):
    monkeypatch.setattr(harness, "GRACE", 1)
    child, log = tmp_path / "child", tmp_path / "log"
    assert harness.run([sys.executable, "-c", PARENT, str(child), does], log, 5) == code
    deadline = time.monotonic() + 10  # whoever adopted it has to reap it
    while not is_gone(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert is_gone(child)


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_command_and_the_other_rank(tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    code = harness.run([*torchrun, str(script), str(tmp_path / "pid")], tmp_path / "log", 120)
    assert code not in (0, None), (tmp_path / "log").read_text()
    assert is_gone(tmp_path / "pid1")
    assert is_gone(tmp_path / "pid0")


def test_output_is_appended_also_of_a_command_that_ends_at_once(tmp_path):
    for word in ("one", "two"):
        with harness.started([sys.executable, "-c", f"print({word!r})"], tmp_path / "log") as process:
            assert isinstance(process, subprocess.Popen)
            assert process.wait(60) == 0
    assert (tmp_path / "log").read_text() == "one\ntwo\n"
