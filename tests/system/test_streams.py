"""Standard streams that end no command, each in a process of its own."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import TextIO

import pytest

from sparsellm.system import streams

WORK = "import sys; from sparsellm.system import streams; streams.outlast(); "
LOUD = WORK + "print('a' * 10_000); print('b', file=sys.stderr, flush=True); print('c', flush=True); sys.exit(0)"
LOST = "sparsellm: {} cannot be written ({}): its lines are lost, and the command continues\n"


def shell(code: str, redirections: str = "", options: str = "") -> subprocess.CompletedProcess[str]:
    command = f"exec {sys.executable} {options} -c '{code}' {redirections}"
    return subprocess.run(["bash", "-c", command.replace("\n", ";")], capture_output=True, text=True, timeout=60)


def code_of(text: str) -> str:
    return text.replace("'", '"')


@pytest.mark.parametrize("options", ["", "-u"])
def test_a_full_disk_under_the_output_ends_nothing_and_is_said_once(options):
    done = shell(code_of(LOUD), ">/dev/full", options)
    assert done.returncode == 0
    assert sorted(done.stderr.splitlines(keepends=True)) == [
        "b\n",
        LOST.format("standard output", "No space left on device"),
    ]
    done = shell(code_of(LOUD), "2>/dev/full", options)
    assert done.returncode == 0
    assert done.stdout == "a" * 10_000 + "\n" + LOST.format("standard error", "No space left on device") + "c\n"


@pytest.mark.parametrize("redirections", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_streams_that_are_closed_from_the_start_end_nothing_and_lend_their_numbers_to_no_file(redirections, tmp_path):
    written = tmp_path / "written"
    code = LOUD.replace("print('a'", f"file = open('{written}', 'w'); print(file.fileno(), file=file); print('a'")
    assert shell(code_of(code), redirections).returncode == 0
    assert int(written.read_text()) > 2


def unread() -> int:
    """The end of a pipe that nobody reads any more."""
    reading, writing = os.pipe()
    os.close(reading)
    return writing


def test_a_reader_that_is_gone_ends_nothing():
    pipe = unread()
    done = subprocess.run([sys.executable, "-c", LOUD], stdout=pipe, stderr=pipe, timeout=60, check=False)
    os.close(pipe)
    assert done.returncode == 0


def test_lines_for_a_reader_that_has_stopped_are_counted_once_it_goes_on():
    code = WORK + (
        "import os; streams.PAUSE = 0.1\n"
        "for number in range(20_000): print(number)\n"
        "print('full', file=sys.stderr, flush=True); sys.stdin.readline(); print('last')"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", code], **pipes, text=True, bufsize=0)
    assert process.stderr.readline() == LOST.format("standard output", "its reader has stopped")
    assert process.stderr.readline() == "full\n"
    os.set_blocking(process.stdout.fileno(), False)
    first = b""
    while part := os.read(process.stdout.fileno(), 1 << 20) if select.select([process.stdout], [], [], 0.2)[0] else b"":
        first += part
    os.set_blocking(process.stdout.fileno(), True)
    out = first.decode() + process.communicate("go on\n", timeout=60)[0]
    assert process.returncode == 0
    shown, _, rest = out.partition("\nsparsellm: ")
    numbers, lost = shown.splitlines(), int(rest.split()[0].replace(",", ""))
    assert rest.endswith("\nlast\n")
    assert len(numbers) + lost + rest.count("\n") - 2 == pytest.approx(20_000, abs=2)  # lines cut in two count twice


def test_a_character_that_the_encoding_lacks_is_spelled_out():
    code = WORK + "print(chr(0x4E2D), chr(0xDC80))"
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    assert (done.returncode, done.stdout) == (0, "\\u4e2d \\udc80\n")


RESULT = """
import sys
from sparsellm.system import streams
streams.outlast(result=True)
try:
    print("x" * 10_000, flush=True)
except streams.OutputLost as lost:
    print(lost, lost.unread, file=sys.stderr)
    sys.exit(lost.exit_code)
"""


def told(code: str, out: int | TextIO) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, timeout=60, check=False)


def test_a_result_that_cannot_be_written_is_an_error():
    with Path("/dev/full").open("w") as full:
        done = told(RESULT, full)
    said = "the result cannot be written: standard output fails (No space left on device) False\n"
    assert (done.returncode, done.stderr) == (1, said)
    pipe = unread()
    done = told(RESULT, pipe)
    os.close(pipe)
    assert done.returncode == 128 + signal.SIGPIPE
    assert done.stderr.endswith(" True\n")


def test_streams_that_a_test_captures_stay_as_they_are(capsys):
    before = sys.stdout, sys.stderr
    streams.outlast()
    assert (sys.stdout, sys.stderr) == before
