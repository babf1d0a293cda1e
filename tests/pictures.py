"""Tests of runs do not draw their plots: a plot takes a third of a second, and a run has three or four. Tests of plots
are marked `draws`."""

import struct
import zlib
from typing import Any

from matplotlib.figure import Figure


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


PIXEL = b"\x89PNG\r\n\x1a\n" + b"".join(
    [_chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0)), _chunk(b"IDAT", zlib.compress(b"\0\0")),
     _chunk(b"IEND", b"")]
)  # fmt: skip


def pixel(_figure: Figure, kind: str = "png", **_metadata: Any) -> bytes:
    """In place of sparsellm.figures.saved: a PNG of one pixel."""
    assert kind == "png"
    return PIXEL
