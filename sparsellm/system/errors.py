"""The base class of this package's errors, and functions that format errors and lists for messages."""

from collections.abc import Sequence


class SparsellmError(Exception):
    """An error with a message for the user: what is wrong, and what to do. A command ends with only this message."""


def one_line(error: BaseException) -> str:
    """The type and message of `error` on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def listed(items: Sequence[str], most: int, separator: str = ", ") -> str:
    """The first `most` of `items` and the number of remaining ones: "a, b and 3 more", or "a; b; and 3 more"."""
    more = len(items) - most
    return separator.join(items[:most]) + (f"{separator.rstrip(', ')} and {more:,} more" if more > 0 else "")
