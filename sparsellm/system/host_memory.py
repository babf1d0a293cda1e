"""Control of the C library's allocator, from which tensors on a CPU get their memory."""

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h of glibc
LARGEST = 2**31 - 1  # bytes


def keep_freed_memory() -> None:
    """Let this process keep the memory of freed tensors, up to LARGEST, and use it again.

    By default, glibc returns blocks of 32 MB and more to the kernel, which zeroes their pages whenever a step allocates
    them anew: a fifth of a step of `experiment=smoke`. Does nothing where the C library is not glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, LARGEST)
