"""Parses a command line: overrides `key=value` in Hydra's grammar, and the options --config and --config-dir.

A key is a schema's `group.key`; a group is a folder in configs/. Each value is converted and checked, and every error
is reported with a remedy. A value that the grammar cannot parse (`data.path=~/a=b`) is taken literally.
"""

import difflib
import os
import re
import types
import typing
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, cast

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, ValueType
from hydra.errors import HydraException
from omegaconf import OmegaConf

from sparsellm.config.errors import ConfigError
from sparsellm.config.groups import (
    CONFIG,
    CONFIG_DIR,
    EXPERIMENT,
    OPTIONS,
    SWEEP,
    choices,
    groups,
    swept_values,
    syntax_mistake,
)
from sparsellm.config.schema import Config, EvaluateConfig, SweepConfig, Verbatim
from sparsellm.config.values import build, flat_types, nested, unknown_key

# A list that Hydra's grammar cannot parse, because of special characters in file names: [~/a(1).txt, b].
_LIST = re.compile(r"\[(.*)\]", re.DOTALL)
_ITEM = re.compile(r"""\s*("[^"]*"|'[^']*'|(?:\[[^\]]*\]|[^,])+?)\s*(?:,|$)""")
# Keys whose value is a path or may be one.
PATHS = (
    "baseline", "checkpoint", "data.files", "data.mix", "data.path", "data.tokenizer", "data_dir", "distill.teacher",
    "evaluation.data_dir", "export", "init_from", "output_dir", "recordings", "run.name", "run.root", "sweep.name",
    "sweep.root", "text",
)  # fmt: skip
LARGEST, DEEPEST = 1_000_000, 16  # limits for a YAML file: characters, and nesting depth
LONGEST_NAME = 255  # maximum bytes in a file name on Linux
URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
ENVIRONMENT = re.compile(r"\$\{oc\.env:\s*(\w+)\s*(?:,\s*([^{}]*?)\s*)?\}")  # groups: NAME, default


@dataclass(frozen=True)
class Options:
    """The options on a command line."""

    texts: list[str] = field(default_factory=list)  # as --OPTION=VALUE
    config: Path | None = None  # a file with values that the overrides may replace
    folders: tuple[Path, ...] = ()  # folders with choices in addition to those in configs/


@dataclass
class Typed:
    """A parsed command line."""

    groups: dict[str, str | None] = field(default_factory=dict)  # group -> choice; None for experiment=null
    keys: dict[str, Any] = field(default_factory=dict)  # group.key -> plain value; enums by name
    mistakes: list[str] = field(default_factory=list)  # error messages, one per refused override


@dataclass(frozen=True)
class SweepRequest:
    """A sweep's command line, sorted by purpose."""

    options: Options
    sweep: SweepConfig
    axes: dict[str, list[str]]  # a run's key or group -> overrides, one per value, in order
    evaluate: list[str]  # overrides for the evaluations, without the prefix "evaluate."


def split(texts: list[str]) -> tuple[Options, list[str], list[str]]:
    """The options among the command line's arguments `texts`, the other arguments, and error messages about options."""
    given: dict[str, str] = {}
    others, found, rest = list[str](), list[str](), list(texts)
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        if name not in OPTIONS:
            others.append(f"{name}{equals}{value}")
            continue
        value = value if equals or not rest else rest.pop(0)
        if not value:
            found.append(f"{name} has no value: write {name} {OPTIONS[name]}")
        elif name in given:
            found.append(f"{name} is {given[name]} and {value}: it should be given once")
        elif wrong := path_mistakes(value):
            found += [f"{name}={mistake}" for mistake in wrong]
        else:
            given[name] = value
    paths = {name: Path(value).expanduser() for name, value in given.items()}
    folders = (paths[CONFIG_DIR],) if CONFIG_DIR in paths else ()
    return Options([f"{n}={v}" for n, v in given.items()], paths.get(CONFIG), folders), others, found


def parse(texts: list[str], schema: type = Config, folders: tuple[Path, ...] = ()) -> Typed:
    """Sort and convert the overrides `texts`. If a key is typed twice, the last value wins.

    `folders`: as in Options."""
    typed = Typed()
    for text in _without_dashes(texts, typed.mistakes, schema):
        name, equals, raw = text.partition("=")
        name = name.lstrip("+")  # Hydra's prefix for adding a key, which is not needed here
        if name.startswith("~"):
            typed.mistakes.append(f"{text}: a key cannot be removed, only set to another value")
        elif not equals:
            typed.mistakes.append(_without_value(name, schema))
        elif schema is Config and name in groups():
            choose(typed, name, raw, folders)
        else:
            _set(typed, name, raw, schema)
    return typed


def _without_dashes(texts: list[str], mistakes: list[str], schema: type) -> list[str]:
    """`texts` without flags such as --lr 3. For each flag, `mistakes` gets a message that says what to write."""
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


def choose(typed: Typed, group: str, raw: str, folders: tuple[Path, ...] = ()) -> None:
    """Add the choice `raw` of `group` to `typed`, or an error message if there is no such choice."""
    listed = choices(group, folders)
    if raw in listed:
        typed.groups[group] = raw
    elif group == EXPERIMENT and raw == "null":
        typed.groups[group] = None
    else:
        close = difflib.get_close_matches(raw, listed, n=1)
        own = "" if folders else f"; {CONFIG_DIR} DIR adds your own"
        hint = f"did you mean {group}={close[0]}? " if close else ""
        typed.mistakes.append(f"{group}={raw} is not a choice: {hint}{group} has {', '.join(listed)}{own}")


def _set(typed: Typed, name: str, raw: str, schema: type) -> None:
    kinds = flat_types(schema)
    if name not in kinds:
        typed.mistakes.append(unknown(name, raw, schema))
        return
    if Verbatim in typing.get_args(kinds[name]):
        typed.keys[name] = raw
        return
    value = _value(f"{name}={raw}", raw)
    if value == raw and list[str] in _options(kinds[name]) and (listed := _LIST.fullmatch(raw)):
        value = [text.strip("\"'") for text in _ITEM.findall(listed[1])]
    accept(typed, name, value, raw, kinds[name])


def unknown(name: str, raw: str, schema: type) -> str:
    """The error message for `name`, typed with the value `raw`, which is neither a key of `schema` nor a group."""
    grouped = schema is Config and "." not in name
    group = difflib.get_close_matches(name, groups(), n=1, cutoff=0.75) if grouped else []
    return f"{name} is not a key: did you mean {group[0]}={raw}?" if group else unknown_key(name, schema)


def accept(typed: Typed, name: str, value: Any, raw: str, kind: Any) -> None:
    """Add `value` for the key `name`, of type `kind`, to `typed`, or an error message if `value` is invalid. `raw`:
    `value` as it was written."""
    if value == "???":
        typed.mistakes.append(f"{name} has no value: give it one with {name}=...")
        return
    if isinstance(value, Override):
        typed.mistakes.append(f"{name} is {raw}: it takes one value; only the command `sweep` takes lists of values")
        return
    shown = raw or "empty"
    try:
        resolved = _resolved(value)
    except ValueError as error:
        typed.mistakes.append(f"{name} is {shown}: {error}")
        return
    if isinstance(value, str) and resolved != value:
        read = _value(f"{name}={resolved}", resolved)
        value, raw = read if read is None or isinstance(read, int | float) else resolved, resolved
    else:
        value = resolved
    try:
        converted = convert(kind, value, raw)
    except ValueError as error:
        typed.mistakes.append(f"{name} is {shown}: it should be {error}")
        return
    if name in PATHS and (found := [mistake for path in _strings(converted) for mistake in path_mistakes(path)]):
        typed.mistakes += [f"{name}={mistake}" for mistake in found]
    else:
        typed.keys[name] = converted


def _resolved(value: Any) -> Any:
    """`value` with references to environment variables resolved in all strings. Raises ValueError for an unset variable
    or an unsupported interpolation."""
    if isinstance(value, list):
        return [_resolved(each) for each in value]
    if isinstance(value, dict):
        return {key: _resolved(each) for key, each in value.items()}
    if not isinstance(value, str) or "${" not in value:
        return value
    if "${" in ENVIRONMENT.sub("", value):
        raise ValueError("interpolations are not supported, except ${oc.env:NAME}; write the value")

    def variable(found: re.Match[str]) -> str:
        name, default = found.groups()
        if (text := os.environ.get(name, default)) is None:
            raise ValueError(f"the environment variable {name} is not set; set it, or write ${{oc.env:{name},DEFAULT}}")
        return text

    return ENVIRONMENT.sub(variable, value)


def mapping(text: str) -> dict[str, Any]:
    """The values in the YAML document `text`, with unresolved interpolations. Raises ValueError if it is refused."""
    if len(text) > LARGEST:
        raise ValueError(f"it has {len(text):,} characters: a configuration has at most {LARGEST:,}")
    try:
        if (why := _bomb(text)) is None:
            keyed = isinstance(yaml.compose(text, yaml.SafeLoader), yaml.MappingNode)  # OmegaConf makes a text a key
            values = OmegaConf.to_container(OmegaConf.create(text)) if keyed else None
    except Exception as error:  # YAML and OmegaConf raise many kinds of exceptions for bad content
        raise ValueError(f"it is not YAML: {syntax_mistake(error, text)}") from error
    if why is not None:
        raise ValueError(why)
    if not isinstance(values, dict) or not values:
        raise ValueError("it contains no keys")
    return cast(dict[str, Any], values)


def _bomb(text: str) -> str | None:
    """Why the YAML document `text` must not be parsed: aliases or deep nesting can take unlimited time or memory. None
    if it may be parsed."""
    depth = 0
    for token in yaml.scan(text, yaml.SafeLoader):
        if isinstance(token, yaml.AliasToken):
            return "it has aliases (*NAME), which a configuration does not need"
        kind = type(token).__name__
        depth += kind.endswith("StartToken") - kind.endswith("EndToken")
        if depth > DEEPEST:
            return f"its values are nested more than {DEEPEST} levels deep"
    return None


def _strings(value: Any) -> list[str]:
    """All strings in `value`, including those nested in lists and dicts."""
    if isinstance(value, str):
        return [value]
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for each in inside for text in _strings(each)]


def path_mistakes(path: str) -> list[str]:
    """Error messages if `path` cannot be the path of a local file or folder; empty if it can."""
    if URL.match(path):
        return [
            f"{path} is a URL: it should be a local path; mount the storage and give its folder, or copy the files to"
            " or from a local folder"
        ]
    first, *_ = parts = path.split("/")
    if first.startswith("~") and os.path.expanduser(first) == first:  # noqa: PTH111 (Path's raises)
        return [f"{path} refers to the home folder of an unknown user, {first[1:]}: write the path without {first}"]
    if longest := max((part for part in parts if len(os.fsencode(part)) > LONGEST_NAME), key=len, default=""):
        size = len(os.fsencode(longest))
        return [f"{path:.40}... has a name of {size} bytes, {longest:.20}...: it should have at most {LONGEST_NAME}"]
    return []


def _value(text: str, raw: str) -> Any:
    """Parse the value in the override `text`. Returns an Override for a list of values A,B; and `raw`, the value as
    typed, if Hydra cannot parse it."""
    try:
        (override,) = OverridesParser.create().parse_overrides([text])
    except HydraException:
        return raw
    return override if override.is_sweep_override() else override.value()


def convert(kind: Any, value: Any, raw: str) -> Any:
    """Convert `value`, written as `raw`, to the type `kind`; enum members are written by name. Raises ValueError,
    saying what the value should be, if it cannot be converted.

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
            if value != "" or type(None) not in options:  # an empty path would mean the working directory
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
    """The types accepted by a key of type `kind`."""
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
    """A schema in which the keys of SweepConfig have their prefix, `sweep.`."""

    sweep: SweepConfig = field(default_factory=SweepConfig)


def sweep_request(overrides: list[str]) -> SweepRequest:
    """Sort a sweep's overrides. Hydra's grammar parses lists of values: `key=1,2`, `choice`, `range`.

    sweep=NAME stands for the lists in configs/sweep/NAME.yaml; overrides of the same keys replace these lists. Raises
    ConfigError that lists all errors in the overrides for the sweep, the runs and the evaluations.
    """
    axes: dict[str, list[str]] = {}
    evaluate, options = list[str](), list[str]()
    chosen, texts, found = split(overrides)
    parser, named, given = OverridesParser.create(), Typed(), _without_dashes(texts, found, Config)
    for text in [text for text in given if text.startswith(f"{SWEEP}=")]:
        given.remove(text)
        choose(named, SWEEP, text.partition("=")[2], chosen.folders)
    found += named.mistakes
    lists, files = list[tuple[str, Path | None]](), dict[str, Path | None]()
    for choice in named.groups.values():
        try:
            path, swept = swept_values(str(choice), chosen.folders)
            lists += [(text, path) for text in swept]
        except ValueError as error:
            found.append(f"{SWEEP}={choice}: {error}")
    for text, file in [*lists, *((text, None) for text in given)]:
        key, _, _ = text.lstrip("+").partition("=")
        group, _, name = key.partition(".")
        try:
            (override,) = parser.parse_overrides([text.lstrip("+")])
        except HydraException:  # not a list of values; left to `parse`
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
            axes[key], files[key] = texts, file
    for key, file in files.items():
        if file is not None:
            found += [f"{file}: {mistake}" for mistake in parse(axes[key], folders=chosen.folders).mistakes]
    typed = parse(options, _OfSweep)
    if found := found + typed.mistakes:
        by_hand = [text for key, texts in axes.items() if files[key] is None for text in texts]
        found += parse(by_hand, folders=chosen.folders).mistakes
        found += [f"evaluate: {mistake}" for mistake in parse(evaluate, EvaluateConfig).mistakes]
        raise ConfigError(list(dict.fromkeys(found)))
    return SweepRequest(chosen, build(_OfSweep, nested(typed.keys)).sweep, axes, evaluate)


def quoted(value: str) -> str:
    """`value` as it must be written in an override: quoted if Hydra's grammar would otherwise parse it differently."""
    if re.fullmatch(r"[\w./-]+", value) and value.lower() != "null":
        return value
    # In Hydra's grammar, a backslash is an escape character only before a quote.
    return "'" + re.sub(r"(\\*)('|\Z)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), value) + "'"
