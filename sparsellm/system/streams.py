"""Standard output and standard error that do not end a command.

A log on a full disk, a pipe that nobody reads any more (`| head`, a killed `tee`), a closed terminal, a stream closed
from the start (`>&-`): Python raises at the next print, or complains as it exits with a code of its own. A reader that
has stopped (`| less`, a terminal after Ctrl-S) blocks the writer for as long as it likes. After `outlast()` a line that
cannot be written is lost, and the work goes on. The other stream says so once; where lines can be written again, a line
says how many are missing. Only where the printed text is the command's whole result (`result`), as for --help and
`generate`, does a write wait without end, and raise OutputLost where it fails.
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
PAUSE = 60  # seconds that a write waits for a reader that has stopped


class OutputLost(Exception):
    """The result cannot be written. No OSError, so that no command takes it for an error of a file of its own."""

    def __init__(self, error: OSError) -> None:
        super().__init__(f"the result cannot be written: {NAMES[1]} fails ({error.strerror})")
        # Like other tools of a pipe (`seq 1000000 | head -1`): without a word, and with the exit code of SIGPIPE.
        self.unread = error.errno == errno.EPIPE
        self.exit_code = 128 + signal.SIGPIPE if self.unread else 1


def outlast(result: bool = False) -> None:
    """Have no failed write to standard output or standard error end this process. `result`: see above."""
    _open_closed()
    sys.stdout, sys.stderr = _lasting(sys.stdout, 1), _lasting(sys.stderr, 2)
    raw = getattr(sys.stdout, "buffer", None)
    raw = getattr(raw, "raw", raw)
    if isinstance(raw, _Lasting):
        raw.result = result


def write_now(text: str) -> None:
    """Write to standard error without Python's buffers, whose locks other threads or the interrupted code may hold.

    Drops `text` where that would wait.
    """
    with suppress(OSError):
        if select.select([], [2], [], 0)[1]:
            os.write(2, text.encode())


class _Lasting(io.FileIO):
    """The file under a standard stream."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self.name = f"<{NAMES[descriptor]}>"
        self.result, self.lost, self.said = False, 0, False

    def write(self, data: Any) -> int:
        """As of any raw file, but all of `data` counts as written where nothing can be."""
        try:
            if self.lost:
                self._write(f"\nsparsellm: {self.lost:,} lines could not be written here\n".encode())
                self.lost = 0
            self._write(data)
        except OSError as error:
            if self.result:
                self.result = False  # what is still buffered is lost, too, without another error
                raise OutputLost(error) from error
            self.lost += bytes(data).count(b"\n")
            if not self.said:
                self.said = True
                with suppress(OSError):
                    os.write(
                        3 - self.fileno(),
                        f"sparsellm: {NAMES[self.fileno()]} cannot be written ({error.strerror}): its lines are lost,"
                        " and the command goes on\n".encode(),
                    )
        return len(data)

    def _write(self, data: Any) -> None:
        rest = memoryview(data)
        while rest:
            pause = None if self.result else 0 if self.lost else PAUSE
            if not select.select([], [self], [], pause)[1]:
                raise OSError(errno.EAGAIN, "nobody reads it")
            rest = rest[super().write(rest[: select.PIPE_BUF]) or 0 :]  # None, for 0: another process was faster


def _open_closed() -> None:
    """Open /dev/null in place of each standard stream that is closed: the next file would take its number, and get what
    libraries write there."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)
            os.set_inheritable(descriptor, True)


def _lasting(stream: TextIO | None, descriptor: int) -> TextIO:
    """`stream` on a _Lasting file; as it is where it is not Python's own, as under a test that captures it."""
    own = sys.__stdout__ if descriptor == 1 else sys.__stderr__
    if stream is not own:
        assert stream is not None
        return stream
    raw = _Lasting(descriptor)
    if not isinstance(stream, io.TextIOWrapper):  # it was closed from the start
        return io.TextIOWrapper(io.BufferedWriter(raw), "utf-8", "backslashreplace", line_buffering=True)
    with suppress(OSError):
        stream.flush()
    # A character that the encoding lacks is spelled out, as standard error always does.
    errors = "backslashreplace" if stream.errors == "strict" else stream.errors
    buffer: Any = raw if stream.write_through else io.BufferedWriter(raw)  # without a buffer under python -u
    return io.TextIOWrapper(
        buffer, stream.encoding, errors, line_buffering=stream.line_buffering, write_through=stream.write_through
    )
