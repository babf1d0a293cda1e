"""Declares a configuration key in its dataclass."""

from dataclasses import field
from typing import Any

MEANING = "meaning"  # of a key, in its field's metadata


def key(default: Any, meaning: str) -> Any:
    """A configuration key: its default, and its help text with unit and the meaning of null."""
    made = {"default_factory": default.copy} if isinstance(default, list) else {"default": default}
    return field(**made, metadata={MEANING: meaning})
