"""Starts the commands of a sweep's runs, passes signals on to them, and keeps one log per run.

A command writes to its log directly, so its output continues if the sweep is killed. The log file is also the
run's lock: the command inherits it, and a sweep that is started again waits until the command ends.

Long operations are generators that yield while they wait (Work), so one thread handles several runs at once. There must
not be more threads: Linux sends a command its parent-death signal as soon as the thread that started the command ends.
"""

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import BinaryIO, TypeVar

from sparsellm.system import locks, regular
from sparsellm.system.processes import end_with_parent
from sparsellm.training.stop import StopSignals

T = TypeVar("T")
Work = Generator[None, None, T]

# Seconds that torchrun gives its workers to save after a signal; torch before 2.13 ignores this variable and gives 30.
SHUTDOWN_TIMEOUT = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "120"}


class Launcher(StopSignals):
    """Context manager that forwards SIGTERM and SIGINT to the running commands instead of ending the sweep at once.

    Commands have their own sessions, so Ctrl-C reaches them only once, through this class. If the sweep is killed with
    SIGKILL, Linux sends each command SIGTERM, perhaps once per thread of the sweep; a second SIGTERM ends a run without
    saving, and the run later resumes from its last checkpoint.
    """

    def __init__(self, shown: bool = True) -> None:
        """`shown`: whether to show the commands' output on the screen too."""
        super().__init__()
        self.shown = shown

    def claim(self, log: Path) -> Work[BinaryIO]:
        """Wait until no other process writes to `log`, or a signal arrives, and open `log` for appending."""
        log.parent.mkdir(parents=True, exist_ok=True)
        file = regular.to_write(log, "ab")
        if not locks.take(file, give_up=lambda: True):
            print(f"{log} is in use by another start of this sweep: waiting for it to end", flush=True)
            while self.signal is None and not locks.take(file, give_up=lambda: True):
                yield
        return file

    def run(self, command: list[str], log: BinaryIO, environment: Mapping[str, str] | None = None) -> Work[int]:
        """Run `command`, with output to the claimed `log`. Returns its exit code, or 128 + signal.

        `environment`: variables in addition to this process's.
        """
        log.write(f"$ {shlex.join(command)}\n".encode())
        log.flush()
        sweep = os.getpid()

        def end_with_the_sweep() -> None:
            end_with_parent(signal.SIGTERM)
            if os.getppid() != sweep:  # the sweep ended before the request reached the kernel
                os._exit(128 + signal.SIGTERM)

        with Path(log.name).open("rb") as output:
            output.seek(0, os.SEEK_END)
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                preexec_fn=end_with_the_sweep, env=SHUTDOWN_TIMEOUT | os.environ | dict(environment or {}),
            )  # fmt: skip
            passed_on = 0
            while True:
                code = process.poll()
                for number in self.received[passed_on:]:
                    process.send_signal(number)
                    passed_on += 1
                if self.shown:
                    shutil.copyfileobj(output, sys.stdout.buffer)
                    sys.stdout.flush()
                if code is not None:
                    return code if code >= 0 else 128 - code
                yield
