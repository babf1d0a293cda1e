"""Declares a configuration key in its dataclass, with help text and bounds."""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from operator import ge, gt, le, lt
from typing import Any

MEANING, BOUNDS = "meaning", "bounds"  # keys in a field's metadata


@dataclass(frozen=True)
class Bounds:
    """Bounds of a number. null and `auto` are valid wherever the key's type allows them."""

    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    below: float | None = None
    multiple_of: int | None = None

    def mistake(self, value: Any) -> str | None:
        """Says what `value` should be; None if `value` is valid."""
        if value is None or value == "auto":
            return None
        every = (
            ("at least", ge, self.minimum), ("above", gt, self.above), ("at most", le, self.maximum),
            ("below", lt, self.below),
        )  # fmt: skip
        bounds = [(words, holds, bound) for words, holds, bound in every if bound is not None]
        text = " and ".join(f"{words} {bound}" for words, _, bound in bounds)
        text = "a positive number" if text == "above 0" else text
        if isinstance(value, str):
            return text
        if not math.isfinite(value):
            return f"{text}, and finite"
        if not all(holds(value, bound) for _, holds, bound in bounds):
            return text
        return f"a multiple of {self.multiple_of}" if self.multiple_of and value % self.multiple_of else None


def key(default: Any, meaning: str, **bounds: float) -> Any:
    """A dataclass field for a configuration key. `meaning`: help text, with the unit and what null means. `bounds`:
    keywords of Bounds."""
    made = {"default_factory": default.copy} if isinstance(default, list) else {"default": default}
    return field(**made, metadata={MEANING: meaning, BOUNDS: Bounds(**bounds) if bounds else None})  # type: ignore[arg-type]


def bound_mistakes(config: Any, prefix: str = "", names: Collection[str] | None = None) -> Iterator[str]:
    """An error message for each value outside its key's bounds. `names`: the keys to check, by default all."""
    for each in fields(config):
        if names is not None and each.name not in names:
            continue
        name, value = f"{prefix}{each.name}", getattr(config, each.name)
        if is_dataclass(value):
            yield from bound_mistakes(value, f"{name}.")
            continue
        bounds, wanted = each.metadata[BOUNDS], None
        if isinstance(value, int) and value >= 2**63:
            wanted = "below 2^63"
        elif bounds is not None and (wanted := bounds.mistake(value)) is not None:
            kinds = getattr(each.type, "__args__", ())
            wanted = f"auto, or a number of {wanted}" if str in kinds else wanted
            wanted += ", or null" if type(None) in kinds else ""
        if wanted is not None:
            yield f"{name} is {value}: it should be {wanted}"
