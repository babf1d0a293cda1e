"""What people read while something goes on: lines on stderr, and how far it has come if it takes minutes."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

LINE_EVERY = 10  # seconds, where there is no terminal


def say(text: str) -> None:
    """A line on stderr, above the bar if one is shown."""
    tqdm.write(text, file=sys.stderr)
    sys.stderr.flush()


def warn(text: str) -> None:
    """The same of what people should know: under the program's name, by which it is found in a log."""
    say(f"sparsellm: {text}")


def is_main_rank() -> bool:
    """Whether this is the rank that speaks: by what torchrun announces, so before there is a process group, too."""
    return int(os.environ.get("RANK", "0")) == 0


@contextmanager
def progress(title: str, total: int, unit: str, shown: bool = True) -> Iterator[Callable[[int], object]]:
    """Yields advance(n): a bar on a terminal; elsewhere a line every few seconds, which a log file keeps readable.

    `unit`: what is counted, in the singular. Not `shown`: nothing.
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
            print(f"{title}  {done:,}/{total:,} {unit}s", file=sys.stderr, flush=True)

    yield advance
