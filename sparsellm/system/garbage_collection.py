"""Control of Python's cyclic garbage collector."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Disable the cyclic collector until the block ends, and exclude all objects that exist then from later
    collections. Reference counting works as usual.

    For blocks that create many permanent objects, such as imports: the collector would traverse these objects
    repeatedly as their number grows, and once more at exit.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
