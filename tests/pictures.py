"""Tests of runs do not draw their plots: a plot takes a third of a second, and a run has three or four. Tests of plots
are marked `draws`."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

PIXEL = bytes.fromhex(  # a PNG of one black pixel
    "89504e470d0a1a0a0000000d49484452000000010000000108000000003a7e9b550"
    "000000a49444154789c636000000002000148afa4710000000049454e44ae426082"
)


def do_not_draw(set_attribute: Callable[[Any, str, Any], None] = setattr) -> None:
    """Make runs of this process write PIXEL for each plot. Without matplotlib, they draw nothing anyway."""
    with suppress(ImportError):
        from sparsellm.runs import curves

        set_attribute(curves, "saved", lambda _figure: PIXEL)
