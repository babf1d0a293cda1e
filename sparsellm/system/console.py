"""Console output during work: lines on stderr, and progress bars."""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest

from tqdm import tqdm

LINE_EVERY = 10  # seconds between progress lines without a terminal


def say(text: str) -> None:
    """Print a line on stderr, above the progress bar if one is shown."""
    tqdm.write(text, file=sys.stderr)
    sys.stderr.flush()


def warn(text: str) -> None:
    """Print a warning on stderr, prefixed with the program's name so that the line can be found in a log."""
    say(f"sparsellm: {text}")


def quantity(count: int, noun: str) -> str:
    """`count` followed by `noun`, in the plural unless `count` is 1: 1 step, 2,000 steps."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table with left-aligned columns. Rows may lack cells at their end."""
    widths = [max(map(len, column)) for column in zip_longest(*rows, fillvalue="")]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def is_main_rank() -> bool:
    """Whether this is rank 0, from torchrun's environment, so it works before a process group exists."""
    return int(os.environ.get("RANK", "0")) == 0


def warn_on_main(text: str) -> None:
    """`warn` on rank 0 only, for what all ranks find."""
    if is_main_rank():
        warn(text)


@contextmanager
def progress(title: str, total: int, unit: str, shown: bool = True) -> Iterator[Callable[[int], object]]:
    """Yields advance(n). Shows a bar on a terminal, otherwise a line every few seconds, which keeps log files readable.

    `unit`: what is counted, in the singular. shown=False: print nothing.
    """
    if not shown or sys.stderr.isatty():
        with tqdm(total=total, desc=title, unit=unit, disable=not shown) as bar:
            yield bar.update
        return
    done, last = 0, time.monotonic()

    def advance(count: int) -> None:
        nonlocal done, last
        done += count
        if time.monotonic() - last >= LINE_EVERY or done == total:
            last = time.monotonic()
            print(f"{title}  {done:,}/{quantity(total, unit)}", file=sys.stderr, flush=True)

    yield advance
