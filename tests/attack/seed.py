"""The seed of random attacks, how many there are, and the count of attacks.

`make attack` counts ATTACK_SEED up from a fresh one, round by round.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

ALL = "ATTACK_SEED" in os.environ  # `make test` attacks less often, and always alike
SEED = int(os.environ.get("ATTACK_SEED", "0"))
SAMPLE = 200  # bytes that `make test` attacks of a file


def positions(size: int, stride: int = 1) -> range:
    """Those to attack of `size` bytes: each `stride`-th in `make attack`, some SAMPLE of these in `make test`.

    Those are an odd distance apart, so that all bits have their turn where the position decides the bit.
    """
    if not ALL:
        stride *= size // stride // SAMPLE + 1
        stride |= 1
    return range(SEED % stride, size, stride)


@contextmanager
def one(kind: str) -> Iterator[None]:
    """One attack, which passes if the block raises nothing. rounds.py sums the printed lines."""
    held = False
    try:
        yield
        held = True
    finally:
        print(f"{kind}: tried 1, held {held:d}, failed {not held:d}")
