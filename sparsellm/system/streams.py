"""Makes standard output and standard error survive write failures, so that these do not end a command.

With a log on a full disk, a closed pipe (`| head`, a killed `tee`), a closed terminal or a stream that was never open
(`>&-`), Python raises at the next print, or complains at exit and changes the exit code. A stopped reader (`| less`, a
terminal after Ctrl-S) blocks the writer indefinitely. After `outlast()`, a line that cannot be written is dropped and
the work continues. The other stream reports this once. When writing works again, a message gives the number of missing
lines. Only if the printed text is the command's whole result (`result`), as for --help and `generate`, does a write
block indefinitely and raise OutputLost on failure.
"""

import errno
import io
import os
import select
import signal
import sys
from contextlib import suppress
from typing import Any, TextIO

NAMES = {1: "standard output", 2: "standard error"}
PAUSE = 60  # seconds that a write waits for a stopped reader


class OutputLost(Exception):
    """The result cannot be written. Not an OSError, so that no command mistakes it for an error of its own files."""

    def __init__(self, error: OSError) -> None:
        super().__init__(f"the result cannot be written: {NAMES[1]} fails ({error.strerror})")
        # On a closed pipe, exit silently with the code of SIGPIPE, like other tools (`seq 1000000 | head -1`).
        self.unread = error.errno == errno.EPIPE
        self.exit_code = 128 + signal.SIGPIPE if self.unread else 1


def outlast(result: bool = False) -> None:
    """Keep failed writes to standard output or standard error from ending this process.

    `result`: whether the printed text is the command's whole result.
    """
    _open_closed()
    sys.stdout, sys.stderr = _lasting(sys.stdout, 1, result), _lasting(sys.stderr, 2)


def write_now(text: str) -> None:
    """Write to standard error, bypassing Python's buffers: other threads or interrupted code may hold the buffers'
    locks.

    Drops `text` if the write would block.
    """
    with suppress(OSError):
        if select.select([], [2], [], 0)[1]:
            os.write(2, text.encode())


class _Lasting(io.FileIO):
    """A standard stream's raw file, which drops lines that cannot be written."""

    def __init__(self, descriptor: int, result: bool) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self.name = f"<{NAMES[descriptor]}>"
        self.result, self.lost, self.said = result, 0, False

    def write(self, data: Any) -> int:
        """Like `FileIO.write`, but if writing fails, all of `data` counts as written."""
        try:
            if self.lost:
                self._write(f"\nsparsellm: {self.lost:,} lines could not be written here\n".encode())
                self.lost = 0
            self._write(data)
        except OSError as error:
            if self.result:
                self.result = False  # the rest of the buffer is discarded without another error
                raise OutputLost(error) from error
            self.lost += bytes(data).count(b"\n")
            if not self.said:
                self.said = True
                with suppress(OSError):
                    os.write(
                        3 - self.fileno(),
                        f"sparsellm: {NAMES[self.fileno()]} cannot be written ({error.strerror}): its lines are lost,"
                        " and the command continues\n".encode(),
                    )
        return len(data)

    def _write(self, data: Any) -> None:
        rest = memoryview(data)
        while rest:
            pause = None if self.result else 0 if self.lost else PAUSE
            if not select.select([], [self], [], pause)[1]:
                raise OSError(errno.EAGAIN, "its reader has stopped")
            # `write` returns None if another process filled the pipe after `select`; then nothing was written.
            rest = rest[super().write(rest[: select.PIPE_BUF]) or 0 :]


def _open_closed() -> None:
    """Open /dev/null for each closed standard stream. Otherwise the next opened file would get the stream's descriptor,
    and receive what libraries write to the stream."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)
            os.set_inheritable(descriptor, True)


def _lasting(stream: TextIO | None, descriptor: int, result: bool = False) -> TextIO:
    """`stream`, reopened on a _Lasting file. Unchanged if `stream` is not Python's own, as when a test captures it."""
    own = sys.__stdout__ if descriptor == 1 else sys.__stderr__
    if stream is not own:
        assert stream is not None
        return stream
    raw = _Lasting(descriptor, result)
    if not isinstance(stream, io.TextIOWrapper):  # the stream was closed from the start
        return io.TextIOWrapper(io.BufferedWriter(raw), "utf-8", "backslashreplace", line_buffering=True)
    with suppress(OSError):
        stream.flush()
    # Escape characters that the encoding lacks, as standard error always does.
    errors = "backslashreplace" if stream.errors == "strict" else stream.errors
    buffer: Any = raw if stream.write_through else io.BufferedWriter(raw)  # unbuffered under python -u
    return io.TextIOWrapper(
        buffer, stream.encoding, errors, line_buffering=stream.line_buffering, write_through=stream.write_through
    )
