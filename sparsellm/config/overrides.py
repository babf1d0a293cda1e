"""Parses the overrides of a command line, `key=value` in Hydra's grammar, and converts and checks each value.

A key is `group.key` of a schema; a group is a folder of configs/. Every mistake is reported, with its remedy. A value
that the grammar cannot parse (`data.path=~/a=b`) is taken literally.
"""

import difflib
import os
import re
import types
import typing
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, ValueType
from hydra.errors import HydraException

from sparsellm.config.errors import ConfigError
from sparsellm.config.groups import EXPERIMENT, SWEEP, choices, groups, swept_values
from sparsellm.config.schema import Config, EvaluateConfig, SweepConfig, Verbatim
from sparsellm.config.values import build, flat_types, nested, unknown_key

# A list that Hydra's grammar cannot parse, because of special characters in file names: [~/a(1).txt, b].
_LIST = re.compile(r"\[(.*)\]", re.DOTALL)
_ITEM = re.compile(r"""\s*("[^"]*"|'[^']*'|(?:\[[^\]]*\]|[^,])+?)\s*(?:,|$)""")
# Keys whose value is or may be a path.
PATHS = (
    "baseline", "checkpoint", "data.files", "data.mix", "data.path", "data.tokenizer", "data_dir", "distill.teacher",
    "evaluation.data_dir", "init_from", "output_dir", "recordings", "run.name", "run.root", "sweep.name", "sweep.root",
    "text",
)  # fmt: skip
LONGEST_NAME = 255  # bytes of a file name on Linux


@dataclass
class Typed:
    """A parsed command line."""

    groups: dict[str, str | None] = field(default_factory=dict)  # group -> choice; None for experiment=null
    keys: dict[str, Any] = field(default_factory=dict)  # group.key -> plain value; enums by name
    mistakes: list[str] = field(default_factory=list)  # a message for each refused override


@dataclass(frozen=True)
class SweepRequest:
    """A sweep's command line, sorted by purpose."""

    sweep: SweepConfig
    axes: dict[str, list[str]]  # key or group of a run -> its overrides, one per value, in order
    evaluate: list[str]  # overrides of the evaluations, without the prefix "evaluate."


def parse(texts: list[str], schema: type = Config) -> Typed:
    """Sort and convert the overrides `texts`. If a key is typed twice, the last value wins."""
    typed = Typed()
    for text in _without_dashes(texts, typed.mistakes, schema):
        name, equals, raw = text.partition("=")
        name = name.lstrip("+")  # Hydra's prefix for adding a key, which is not needed here
        if name.startswith("~"):
            typed.mistakes.append(f"{text}: a key cannot be removed, only set to another value")
        elif not equals:
            typed.mistakes.append(_without_value(name, schema))
        elif schema is Config and name in groups():
            _choose(typed, name, raw)
        else:
            _set(typed, name, raw, schema)
    return typed


def _without_dashes(texts: list[str], mistakes: list[str], schema: type) -> list[str]:
    """The `texts` without flags such as --lr 3; adds a message to `mistakes` for each flag, which says what to
    write instead."""
    kept, rest = [], list(texts)
    while rest:
        text = rest.pop(0)
        if not text.startswith("-"):
            kept.append(text)
        elif text in ("-m", "--multirun"):
            mistakes.append(f"{text} is not supported: use the command `sweep`, or start one command per job")
        else:
            name, equals, value = text.lstrip("-").partition("=")
            if not equals:
                value = rest.pop(0) if rest and "=" not in rest[0] and not rest[0].startswith("-") else "VALUE"
            name = name.replace("-", "_")
            known = name in flat_types(schema) or (schema is Config and name in groups())
            what = f"write {name}={value}" if known else unknown_key(name, schema)
            mistakes.append(f"{text} is not an option, because keys have no dashes: {what}")
    return kept


def _choose(typed: Typed, group: str, raw: str) -> None:
    listed = choices(group)
    if raw in listed:
        typed.groups[group] = raw
    elif group == EXPERIMENT and raw == "null":
        typed.groups[group] = None
    else:
        close = difflib.get_close_matches(raw, listed, n=1)
        hint = f"did you mean {group}={close[0]}? " if close else ""
        typed.mistakes.append(f"{group}={raw} is not a choice: {hint}{group} has {', '.join(listed)}")


def _set(typed: Typed, name: str, raw: str, schema: type) -> None:
    kinds = flat_types(schema)
    if name not in kinds:
        grouped = schema is Config and "." not in name
        group = difflib.get_close_matches(name, groups(), n=1, cutoff=0.75) if grouped else []
        meant = f"{name} is not a key: did you mean {group[0]}={raw}?" if group else unknown_key(name, schema)
        typed.mistakes.append(meant)
        return
    if Verbatim in typing.get_args(kinds[name]):
        typed.keys[name] = raw
        return
    value = _value(f"{name}={raw}", raw)
    if value == raw and list[str] in _options(kinds[name]) and (listed := _LIST.fullmatch(raw)):
        value = [text.strip("\"'") for text in _ITEM.findall(listed[1])]
    if isinstance(value, str) and "${" in value:
        typed.mistakes.append(f"{name} is {raw}: interpolations are not supported; write the value")
    elif value == "???":
        typed.mistakes.append(f"{name} has no value: give it one with {name}=...")
    elif isinstance(value, Override):
        typed.mistakes.append(f"{name} is {raw}: it takes one value; only the command `sweep` takes lists of values")
    else:
        try:
            converted = convert(kinds[name], value, raw)
        except ValueError as error:
            typed.mistakes.append(f"{name} is {raw or 'empty'}: it should be {error}")
            return
        if name in PATHS and (found := [mistake for path in _strings(converted) for mistake in _path_mistakes(path)]):
            typed.mistakes += [f"{name}={mistake}" for mistake in found]
        else:
            typed.keys[name] = converted


def _strings(value: Any) -> list[str]:
    """All strings in a plain value."""
    if isinstance(value, str):
        return [value]
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for each in inside for text in _strings(each)]


def _path_mistakes(path: str) -> list[str]:
    """Why the operating system could not even look up `path`."""
    first, *_ = parts = path.split("/")
    if first.startswith("~") and os.path.expanduser(first) == first:  # noqa: PTH111 (Path's raises)
        return [f"{path} refers to the home folder of an unknown user, {first[1:]}: write the path without {first}"]
    if longest := max((part for part in parts if len(os.fsencode(part)) > LONGEST_NAME), key=len, default=""):
        size = len(os.fsencode(longest))
        return [f"{path:.40}... has a name of {size} bytes, {longest:.20}...: it should have at most {LONGEST_NAME}"]
    return []


def _value(text: str, raw: str) -> Any:
    """The parsed value `raw` of the override `text`: an Override if it lists several, `raw` if parsing fails."""
    try:
        (override,) = OverridesParser.create().parse_overrides([text])
    except HydraException:
        return raw
    return override if override.is_sweep_override() else override.value()


def convert(kind: Any, value: Any, raw: str) -> Any:
    """Convert `value`, which a person wrote as `raw`, to the type `kind`; members of an enum are given by name. Raises
    ValueError, whose message says what the value should be.

    Whole numbers may be written as 1e9, and a single value is accepted as a list of one.
    """
    options = _options(kind)
    if value is None and type(None) in options:
        return None
    for option in options:
        if option is bool and isinstance(value, bool):
            return value
        if option is int and isinstance(value, int | float) and not isinstance(value, bool):
            if isinstance(value, int) or value.is_integer():
                return int(value)
        elif option is float and isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        elif option is str and isinstance(value, str | int | float | bool):
            if value != "" or type(None) not in options:  # as a path, "" would mean the working directory
                return value if isinstance(value, str) else raw
        elif typing.get_origin(option) is list and value is not None and not isinstance(value, dict):
            items = value if isinstance(value, list) else [value if isinstance(value, str) else raw]
            if option == list[str] and all(isinstance(item, str | int | float) for item in items):
                return [str(item) for item in items]
            if option == list[int] and all(isinstance(item, int) and not isinstance(item, bool) for item in items):
                return items
            if option == list[dict[str, Any]] and all(isinstance(item, dict) for item in items):
                return items
        elif isinstance(option, type) and issubclass(option, Enum) and str(value) in option.__members__:
            return value
    raise ValueError(" or ".join(_wanted(option) for option in options))


def _options(kind: Any) -> tuple[Any, ...]:
    """The types that a key of type `kind` accepts."""
    return typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)


def _wanted(kind: Any) -> str:
    if isinstance(kind, type) and issubclass(kind, Enum):
        return f"one of {', '.join(kind.__members__)}"
    if typing.get_origin(kind) is list:
        (inner,) = typing.get_args(kind)
        wanted = {int: "a list of whole numbers, like [1,2]", str: "a list, like [a,b]"}
        return wanted.get(inner, "a list of mappings, like [{a: b}]")
    return {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "null"}[kind]


def _without_value(name: str, schema: type) -> str:
    if schema is Config and name in groups():
        return f"{name} has no choice: write {name}=CHOICE, one of {', '.join(choices(name))}"
    if name in flat_types(schema):
        return f"{name} has no value: write {name}=VALUE"
    unknown = unknown_key(name, schema)
    return unknown if "=" in unknown else f"{unknown}; write KEY=VALUE"


@dataclass
class _OfSweep:
    """Gives the keys of SweepConfig their prefix, `sweep.`."""

    sweep: SweepConfig = field(default_factory=SweepConfig)


def sweep_request(overrides: list[str]) -> SweepRequest:
    """Sort a sweep's overrides. Hydra's grammar parses lists of values: `key=1,2`, `choice`, `range`.

    sweep=NAME stands for the lists in configs/sweep/NAME.yaml, which other overrides of the same key replace.
    Raises ConfigError with every mistake in the overrides of the sweep, the runs and the evaluations.
    """
    axes: dict[str, list[str]] = {}
    evaluate, options, found = list[str](), list[str](), list[str]()
    parser, named, given = OverridesParser.create(), Typed(), _without_dashes(overrides, found, Config)
    for text in [text for text in given if text.startswith(f"{SWEEP}=")]:
        given.remove(text)
        _choose(named, SWEEP, text.partition("=")[2])
    found += named.mistakes
    for text in [*(each for choice in named.groups.values() for each in swept_values(str(choice))), *given]:
        key, _, _ = text.lstrip("+").partition("=")
        group, _, name = key.partition(".")
        try:
            (override,) = parser.parse_overrides([text.lstrip("+")])
        except HydraException:  # not a list of values, so `parse` handles the override
            override = None
        texts = [text]
        if override is not None and override.is_sweep_override():
            # Refuse globs (they need Hydra's search path), intervals (not a list) and shuffled lists (no fixed order).
            listed = override.is_discrete_sweep() and override.value_type != ValueType.GLOB_CHOICE_SWEEP
            single = group in ("sweep", "evaluate")
            if not listed or getattr(override.value(), "shuffle", False) or single:
                wanted = "one value" if single else f"a list of values in order, like {key}=1,2"
                found.append(f"{text}: {key} takes {wanted}")
                continue
            texts = [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
        if group == "sweep" and name:
            options.append(text)
        elif group == "evaluate" and name:
            evaluate.append(text.removeprefix("evaluate."))
        else:
            axes[key] = texts
    typed = parse(options, _OfSweep)
    if found := found + typed.mistakes:
        found += parse([text for texts in axes.values() for text in texts]).mistakes
        found += [f"evaluate: {mistake}" for mistake in parse(evaluate, EvaluateConfig).mistakes]
        raise ConfigError(list(dict.fromkeys(found)))
    return SweepRequest(build(_OfSweep, nested(typed.keys)).sweep, axes, evaluate)


def quoted(value: str) -> str:
    """`value` as it must be written in an override: quoted if Hydra's grammar would parse it differently."""
    if re.fullmatch(r"[\w./-]+", value) and value.lower() != "null":
        return value
    # In Hydra's grammar, a backslash escapes only before a quote.
    return "'" + re.sub(r"(\\*)('|\Z)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), value) + "'"
