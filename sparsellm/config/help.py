"""A command's `--help`: description, and every key with default, unit and meaning. Imports nothing slow."""

from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from enum import Enum
from textwrap import wrap
from typing import Any, cast

from sparsellm.config.commands import COMMANDS, Keys, description
from sparsellm.config.groups import CONFIG, CONFIG_DIR, EXPERIMENT, OPTIONS, choices, default_choices, groups
from sparsellm.config.keys import MEANING
from sparsellm.config.schema import Config
from sparsellm.config.values import to_dict

WIDTH = 118
LEFT_OUT = {"evaluate.checkpoint", "evaluate.export", "evaluate.output_dir"}  # a sweep sets or refuses these


def text(command: str, program: str) -> str:
    """The help text for `command`. `program`: how the command is started, for the usage line."""
    keys = COMMANDS[command].keys
    lines = [f"usage: {program} {COMMANDS[command].usage}", "", *description(command).splitlines(), ""]
    composed = [taken for taken in keys if taken.schema is Config]
    if composed:
        lines += _choices(composed[0])
    if command == "sweep":
        training = program.replace("sweep", "train")
        lines += [f"Every group and key of `{training} --help` accepts a list of values. In addition:", ""]
    for taken in keys:
        lines += _keys(taken)
    a_run = composed or command == "sweep"
    example = ", such as runs/NAME/config.yaml" if a_run else ""
    lines.append(f"{CONFIG} {OPTIONS[CONFIG]} starts from the values of a YAML file{example}.")
    if a_run or command == "calibrate":
        what = "choices and experiments, DIR/GROUP/CHOICE.yaml" if a_run else "models, DIR/model/NAME.yaml"
        lines.append(f"{CONFIG_DIR} {OPTIONS[CONFIG_DIR]} adds your own {what}.")
    lines.append("Keys and groups given on the command line override files and defaults.")
    if composed:
        lines += [f"{program} --cfg job [...] prints the configuration of a command line without running it."]
    return "\n".join(lines).rstrip()


def _choices(taken: Keys) -> list[str]:
    default = default_choices()
    lines = [
        "Groups and their choices. * marks the default choice, which overrides some of the defaults of keys below.",
        "--cfg job prints the complete configuration.",
    ]
    shown = [g for g in groups() if taken.groups is None or g in (EXPERIMENT, "model", *taken.groups)]
    for group in sorted(shown, key=lambda g: (g != EXPERIMENT, g)):
        marked = [f"{c}*" if default.get(group) == c else c for c in choices(group)]
        lines.append(f"  {group:<12} {' '.join(marked)}")
    return [*lines, ""]


def _keys(taken: Keys) -> list[str]:
    schema, prefix, lines = taken.schema, taken.prefix, list[str]()
    defaults = to_dict(schema())
    nested = [each for each in fields(schema) if is_dataclass(each.type)]
    if alone := {f"{prefix}{each.name}" for each in fields(schema) if each not in nested}:
        rows = (row for row in _rows(schema, defaults, prefix) if row[0] in alone)
        lines += [_paragraph(schema.__doc__), *_table(rows), ""]
    for group in nested:
        if taken.groups is None or group.name in taken.groups:
            table = _table(_rows(cast(type, group.type), defaults[group.name], f"{prefix}{group.name}."))
            lines += [f"{group.name}: {_paragraph(group.type.__doc__)}", *table, ""]
    return lines


def _rows(schema: type, defaults: dict[str, Any], prefix: str) -> Iterable[tuple[str, str, str]]:
    for each in fields(schema):
        name = f"{prefix}{each.name}"
        if name in LEFT_OUT:
            continue
        if isinstance(each.type, type) and is_dataclass(each.type):
            yield from _rows(each.type, defaults[each.name], f"{name}.")
            continue
        meaning = each.metadata[MEANING]
        if isinstance(each.type, type) and issubclass(each.type, Enum):
            meaning += f" ({' | '.join(each.type.__members__)})"
        yield name, _spelled(defaults[each.name]), meaning


def _table(rows: Iterable[tuple[str, str, str]]) -> list[str]:
    rows, lines = list(rows), []
    names, values = (max(len(row[i]) for row in rows) for i in (0, 1))
    for name, value, meaning in rows:
        first, *more = wrap(meaning, max(40, WIDTH - names - values - 6))
        lines.append(f"  {name:<{names}}  {value:<{values}}  {first}")
        lines += [" " * (names + values + 6) + line for line in more]
    return lines


def _spelled(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _paragraph(docstring: str | None) -> str:
    return " ".join((docstring or "").split("\n\n")[0].split())
