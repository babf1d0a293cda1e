"""Commands under a sweep: their output, their signals, and what happens to them when the sweep is killed."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from sparsellm.sweep.launch import Launcher

# Notes every signal that it gets, and ends half a second after the first one.
NOTES_SIGNALS = """
import signal, sys, time
got = []
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, _: got.append(number))
print("ready", flush=True)
deadline = time.monotonic() + 20
while not got and time.monotonic() < deadline:
    time.sleep(0.02)
time.sleep(0.5)
print("got", *(int(number) for number in got), flush=True)
sys.exit(128 + got[0] if got else 0)
"""


def wait_until(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def done(work):
    """What `work` comes to."""
    while True:
        try:
            next(work)
        except StopIteration as ended:
            return ended.value
        time.sleep(0.01)


def test_output_goes_to_the_log_and_on_as_it_comes(tmp_path, capfd):
    log = tmp_path / "logs" / "x.log"
    code = "import sys; print('out', 'a b'); print('err', file=sys.stderr); sys.exit(3)"
    with Launcher() as launcher, done(launcher.claim(log)) as file:
        assert done(launcher.run([sys.executable, "-uc", code], file)) == 3
        assert done(launcher.run([sys.executable, "-c", "print('again')"], file)) == 0
        assert launcher.signal is None
    assert capfd.readouterr().out == "out a b\nerr\nagain\n"
    lines = log.read_text().splitlines()
    assert [line for line in lines if not line.startswith("$ ")] == ["out a b", "err", "again"]
    assert lines[0].startswith(f"$ {sys.executable} -uc ")
    with Launcher(shown=False) as launcher, done(launcher.claim(log)) as file:
        code = "import os; print('quiet', os.environ['X'])"
        assert done(launcher.run([sys.executable, "-c", code], file, {"X": "7"})) == 0
    assert capfd.readouterr().out == ""
    assert log.read_text().endswith("\nquiet 7\n")


def test_a_command_that_dies_of_a_signal_has_the_shells_exit_code(tmp_path):
    code = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    with Launcher() as launcher, done(launcher.claim(tmp_path / "log")) as file:
        assert done(launcher.run([sys.executable, "-c", code], file)) == 128 + signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_the_command_once_and_the_sweep_goes_on(tmp_path, number):
    log = tmp_path / "log"

    def interrupt():
        wait_until(lambda: "ready\n" in log.read_text())
        os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    with Launcher() as launcher, done(launcher.claim(log)) as file:
        threading.Thread(target=interrupt).start()
        assert done(launcher.run([sys.executable, "-c", NOTES_SIGNALS], file)) == 128 + number
        assert launcher.signal == number
    assert log.read_text().splitlines()[-1] == f"got {int(number)}"
    assert signal.getsignal(number) == before


@pytest.mark.skipif(sys.platform != "linux", reason="the death of a parent is a signal on Linux only")
@pytest.mark.slow
def test_a_command_ends_with_a_sweep_that_is_killed_and_the_next_one_waits_for_it(tmp_path, capfd):
    log = tmp_path / "log"
    sweep = (
        "import sys, pathlib, time\n"
        "from sparsellm.sweep.launch import Launcher\n"
        "with Launcher() as launcher:\n"
        "    try:\n"
        "        next(launcher.claim(pathlib.Path(sys.argv[1])))\n"
        "    except StopIteration as claimed:\n"
        "        for _ in launcher.run([sys.executable, '-c', sys.argv[2]], claimed.value):\n"
        "            time.sleep(0.05)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", sweep, log, NOTES_SIGNALS])
    wait_until(lambda: log.exists() and "ready\n" in log.read_text())
    process.kill()
    process.wait()
    with Launcher() as launcher, done(launcher.claim(log)):
        assert log.read_text().splitlines()[-1] == f"got {int(signal.SIGTERM)}"
    assert "waiting for it to end" in capfd.readouterr().out
