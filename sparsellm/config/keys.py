"""A key of a configuration, as its dataclass declares it."""

from dataclasses import field
from typing import Any

MEANING = "meaning"  # of a key, in its field's metadata


def key(default: Any, meaning: str) -> Any:
    """A key of a configuration: its default, and what it means, with its unit, as `--help` says it."""
    made = {"default_factory": default.copy} if isinstance(default, list) else {"default": default}
    return field(**made, metadata={MEANING: meaning})
