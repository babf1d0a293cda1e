"""How a run handles signals, also while its main thread is in C code."""

import ctypes
import os
import signal
import time
from pathlib import Path

import pytest
from processes import PATIENCE, SERVER

from sparsellm.distributed import groups
from sparsellm.system.processes import PARENT_ENDED
from sparsellm.training import stop
from sparsellm.training.stop import StopRequest, StopSignals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_first_signal_is_remembered_and_a_second_one_would_kill(number, capfd):
    both = (signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(each) for each in both]
    with StopRequest() as request:
        assert request.signal is None
        os.kill(os.getpid(), number)
        assert request.signal == number
        assert [signal.getsignal(each) for each in both] == [signal.SIG_DFL] * 2
    assert [signal.getsignal(each) for each in both] == before
    assert capfd.readouterr().err == stop.STOPPING


@pytest.mark.parametrize("number", [PARENT_ENDED, signal.SIGHUP])
def test_the_end_of_torchrun_or_the_terminal_is_one_request_however_often_it_is_said(number, capfd, monkeypatch):
    monkeypatch.setattr(stop, "SECOND", 0)
    before = signal.signal(number, signal.SIG_DFL)  # `nohup make test` ignores SIGHUP
    with StopRequest() as request:
        for _ in range(3):
            os.kill(os.getpid(), number)
        assert request.signal == number
    signal.signal(number, before)
    assert capfd.readouterr().err == StopRequest.REPEATED[number]


def test_a_hangup_that_nohup_has_ignored_stays_so():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        for signals in (StopRequest(), StopSignals()):
            with signals:
                assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
                os.kill(os.getpid(), signal.SIGHUP)
                assert signals.signal is None
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_forked_process_that_gets_a_signal_asks_nothing_of_its_parent(capfd):
    with StopRequest() as request:
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        assert request.signal is None
    assert capfd.readouterr().err == ""


def stuck(folder: Path) -> None:
    """Waits as a collective does for a rank that hangs: in C, where Python runs no handler."""
    os.dup2(os.open(folder / "said", os.O_WRONLY | os.O_CREAT), 2)
    stop.SECOND = 0.5
    groups.hurry = lambda: (folder / "hurried").touch()
    mutex, lock = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock
    with StopRequest():
        lock(mutex)
        (folder / "ready").touch()
        lock(mutex)


@pytest.mark.slow
def test_signals_reach_a_run_whose_main_thread_waits_without_an_end(tmp_path):
    process = SERVER.Process(target=stuck, args=(tmp_path,))
    process.start()

    def wait_for(name):
        deadline = time.monotonic() + PATIENCE
        while not (tmp_path / name).exists():
            assert time.monotonic() < deadline, name
            time.sleep(0.02)

    wait_for("ready")
    os.kill(process.pid, signal.SIGTERM)
    wait_for("hurried")
    assert (tmp_path / "said").read_text() == stop.STOPPING
    os.kill(process.pid, signal.SIGTERM)  # at once, as of a scheduler besides torchrun
    time.sleep(1)
    assert process.is_alive()
    os.kill(process.pid, signal.SIGTERM)
    process.join(PATIENCE)
    assert process.exitcode == 128 + signal.SIGTERM
