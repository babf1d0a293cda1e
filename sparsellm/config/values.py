"""A configuration as plain values and back, and those of them that define a run."""

import hashlib
import json
import types
import typing
from dataclasses import asdict, fields, is_dataclass
from enum import Enum
from typing import Any

from sparsellm.config.errors import ConfigError
from sparsellm.config.schema import Config

# What may differ between two starts of the same run. Data may move: other tokens are refused by their checksum.
FREE_GROUPS = ("runtime", "logging", "evaluation", "run")
FREE_KEYS = ("data.path",)


def to_dict(config: Config) -> dict[str, Any]:
    """Nested plain values, enums as their names: what config.yaml and a checkpoint hold."""
    return asdict(config, dict_factory=lambda items: {k: v.name if isinstance(v, Enum) else v for k, v in items})


def from_dict(values: dict[str, Any]) -> Config:
    """The inverse of `to_dict`. Raises ConfigError for unknown keys."""
    if unknown := unknown_keys(Config, values):
        raise ConfigError(unknown)
    return build(Config, values)


def definition(config: Config) -> dict[str, Any]:
    """Flat `group.key` to value of all that defines the run: two starts of one run agree on these."""
    nested = {group: values for group, values in to_dict(config).items() if group not in FREE_GROUPS}
    flat = {f"{group}.{key}": value for group, values in nested.items() for key, value in values.items()}
    return {key: value for key, value in flat.items() if key not in FREE_KEYS}


def fingerprint(config: Config) -> str:
    """8 hex digits of `definition`: of the resolved configuration without the free groups and keys."""
    return hashlib.sha256(json.dumps(definition(config), sort_keys=True).encode()).hexdigest()[:8]


def unknown_keys(schema: type, values: dict[str, Any], prefix: str = "") -> list[str]:
    """What is wrong with each key of the nested `values` that `schema` does not have."""
    known = {f.name: f.type for f in fields(schema)}
    found = []
    for key, value in values.items():
        if key not in known:
            found.append(f"{prefix}{key} is not a key: {prefix[:-1] or 'the top level'} has {', '.join(known)}")
        elif is_dataclass(known[key]):
            found += unknown_keys(known[key], value, f"{prefix}{key}.")
    return found


def build(schema: type, values: dict[str, Any]) -> Any:
    """A `schema` of the nested plain `values`; its defaults where they have none."""

    def convert(kind: Any, value: Any) -> Any:
        if is_dataclass(kind):
            return build(kind, value)
        if isinstance(kind, type) and issubclass(kind, Enum):
            return kind[value]
        if value is not None and isinstance(kind, types.UnionType):
            return convert(next(k for k in typing.get_args(kind) if k is not type(None)), value)
        return float(value) if kind is float else value

    return schema(**{f.name: convert(f.type, values[f.name]) for f in fields(schema) if f.name in values})
