"""How far something has come that takes minutes, for people."""

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
