"""Runs commands one after another, each with a log; forwards signals, and leaves no unnoticed processes behind.

A command writes to its log itself, and the sweep shows what arrives there. So killing the sweep does not cut off the
command's output. The log is also the lock of its run: the command inherits it, and a restarted sweep waits until the
command has ended.
"""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from sparsellm.system import locks, regular
from sparsellm.system.processes import end_with_parent
from sparsellm.training.stop import StopSignals

POLL = 0.1  # seconds between checks of a command, its output and its signals
# Seconds that torchrun gives its workers to save after a signal; torch before 2.13 ignores this and gives 30.
SHUTDOWN_TIMEOUT = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "120"}


class Launcher(StopSignals):
    """While entered, SIGTERM and SIGINT are forwarded to the running command instead of ending the sweep at once.

    Commands have their own sessions, so Ctrl-C reaches them once, through this class. If the sweep is killed with
    SIGKILL, Linux sends them SIGTERM, perhaps once per thread of the sweep; a second SIGTERM ends a run without saving,
    and it then resumes from its last checkpoint.
    """

    @contextmanager
    def claim(self, log: Path) -> Iterator[BinaryIO]:
        """Open `log` for appending once no other process writes to it. A signal ends the wait too."""
        log.parent.mkdir(parents=True, exist_ok=True)
        with regular.to_write(log, "ab") as file:
            locks.take(
                file,
                lambda: print(f"{log} is in use by another start of this sweep: waiting for it to end", flush=True),
                lambda: self.signal is not None,
            )
            yield file

    def run(self, command: list[str], log: BinaryIO) -> int:
        """Run `command` with its output in the claimed `log`, echoed as it arrives. Returns its exit code, or 128 +
        signal."""
        log.write(f"$ {shlex.join(command)}\n".encode())
        log.flush()
        with Path(log.name).open("rb") as output:
            output.seek(0, os.SEEK_END)
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                preexec_fn=_end_with_the_sweep, env=SHUTDOWN_TIMEOUT | os.environ,
            )  # fmt: skip
            passed_on = 0
            while True:
                code = process.poll()
                for number in self.received[passed_on:]:
                    process.send_signal(number)
                    passed_on += 1
                shutil.copyfileobj(output, sys.stdout.buffer)
                sys.stdout.flush()
                if code is not None:
                    return code if code >= 0 else 128 - code
                time.sleep(POLL)


def _end_with_the_sweep() -> None:
    end_with_parent(signal.SIGTERM)
