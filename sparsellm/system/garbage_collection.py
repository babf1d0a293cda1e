"""When Python looks for garbage: objects that only refer to each other, which it otherwise never frees."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Until the block ends, Python does not look for garbage, and never among the objects that there are by then. What
    nothing refers to is freed as ever.

    For a block that makes many objects which stay, as importing a library does: Python would look through all of them
    again and again as their number grows, and once more when the process ends.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
