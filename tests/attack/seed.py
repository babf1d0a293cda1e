"""The seed of random attacks, and the count of attacks.

`make attack` counts ATTACK_SEED up from a fresh one, round by round.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

SEED = int(os.environ.get("ATTACK_SEED", "0"))


@contextmanager
def one(kind: str) -> Iterator[None]:
    """One attack, which passes if the block raises nothing. rounds.py sums the printed lines."""
    held = False
    try:
        yield
        held = True
    finally:
        print(f"{kind}: tried 1, held {held:d}, failed {not held:d}")
