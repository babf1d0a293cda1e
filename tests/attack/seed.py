"""What random attacks are drawn from, and how a test of one attack is counted.

`make attack` counts ATTACK_SEED up from a fresh one, round by round.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

SEED = int(os.environ.get("ATTACK_SEED", "0"))


@contextmanager
def one(kind: str) -> Iterator[None]:
    """One attack: it holds if the block raises nothing. The line is one that rounds.py adds up."""
    held = False
    try:
        yield
        held = True
    finally:
        print(f"{kind}: tried 1, held {held:d}, failed {not held:d}")
