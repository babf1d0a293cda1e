"""Freed memory of tensors on a CPU is kept for the next ones."""

import resource
from concurrent.futures import ProcessPoolExecutor

import torch
from processes import SERVER

from sparsellm.system.host_memory import keep_freed_memory

PAGES, ROUNDS = 10_000, 20  # of 4,096 bytes: more than glibc keeps by default


def faults(keeping):
    """The page faults of ROUNDS tensors, one after the other, after as many: until blocks fit, the heap grows."""
    if keeping:
        keep_freed_memory()
    for _ in range(ROUNDS):
        torch.ones(PAGES * 4096, dtype=torch.uint8)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(ROUNDS):
        torch.ones(PAGES * 4096, dtype=torch.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_freed_memory_is_used_again():
    with ProcessPoolExecutor(1, SERVER) as pool:
        by_default, kept = (pool.submit(faults, keeping).result() for keeping in (False, True))
    assert kept < by_default / 10, f"{kept} page faults instead of {by_default}"
