"""`--help` of a command: its module's docstring, and every key with its default, unit and meaning.

Imports nothing slow."""

import ast
from collections.abc import Iterable
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path
from textwrap import wrap
from typing import Any

from sparsellm.config.groups import EXPERIMENT, choices, default_choices, groups
from sparsellm.config.keys import MEANING
from sparsellm.config.schema import (
    AnalyzeConfig,
    BenchmarkConfig,
    CalibrateConfig,
    Config,
    EvaluateConfig,
    GenerateConfig,
    ImportConfig,
    PushConfig,
    SweepConfig,
)
from sparsellm.config.values import to_dict

COMMANDS = Path(__file__).parents[1] / "commands"
WIDTH = 118


@dataclass(frozen=True)
class Keys:
    """What a command takes: the keys of a schema, all or some of its groups, under a prefix."""

    schema: type
    groups: tuple[str, ...] | None = None  # None: all
    prefix: str = ""


TAKEN = {
    "train": (Keys(Config),),
    "prepare_data": (Keys(Config, ("data", "training")),),
    "evaluate": (Keys(EvaluateConfig),),
    "analyze": (Keys(AnalyzeConfig),),
    "generate": (Keys(GenerateConfig),),
    "benchmark": (Keys(BenchmarkConfig),),
    "calibrate": (Keys(CalibrateConfig),),
    "import_model": (Keys(ImportConfig),),
    "push": (Keys(PushConfig),),
    "sweep": (Keys(SweepConfig, prefix="sweep."), Keys(EvaluateConfig, prefix="evaluate.")),
}
LEFT_OUT = {"evaluate.checkpoint", "evaluate.output_dir"}  # of a sweep: every run has its own
USAGE = {
    "train": "[GROUP=CHOICE ...] [KEY=VALUE ...]",
    "prepare_data": "[GROUP=CHOICE ...] [KEY=VALUE ...]",
    "evaluate": "checkpoint=PATH [KEY=VALUE ...]",
    "analyze": "checkpoint=PATH [KEY=VALUE ...]",
    "generate": "checkpoint=PATH [prompt=TEXT] [KEY=VALUE ...]",
    "benchmark": "checkpoint=PATH [baseline=PATH] [KEY=VALUE ...]",
    "calibrate": "model=NAME [KEY=VALUE ...]",
    "import_model": "checkpoint=FOLDER_OR_HUB_NAME output_dir=FOLDER [KEY=VALUE ...]",
    "push": "checkpoint=PATH repo=OWNER/NAME [license=NAME] [KEY=VALUE ...]",
    "sweep": "[GROUP=CHOICE,... ...] [KEY=VALUE,VALUE ...] [sweep.KEY=VALUE ...] [evaluate.KEY=VALUE ...]",
}


def text(command: str, program: str) -> str:
    """The help of `command`, which was started as `program`."""
    lines = [f"usage: {program} {USAGE[command]}", "", *_docstring(command).splitlines(), ""]
    composed = [taken for taken in TAKEN[command] if taken.schema is Config]
    if composed:
        lines += _choices(composed[0])
    if command == "sweep":
        training = program.replace("sweep", "train")
        lines += [f"Every group and key of `{training} --help` accepts a list of values. In addition:", ""]
    for taken in TAKEN[command]:
        lines += _keys(taken)
    if composed:
        lines += [
            "A group or key given on the command line overrides every default.",
            f"{program} --cfg job [...] prints the configuration of a command line without running it.",
        ]
    return "\n".join(lines).rstrip()


def _docstring(command: str) -> str:
    """Of the command's module, without its first line, which spells the command."""
    whole = ast.get_docstring(ast.parse((COMMANDS / f"{command}.py").read_text(encoding="utf-8"))) or ""
    first, _, rest = whole.partition("\n")
    return f"{first.partition(' : ')[2].capitalize()}\n{rest}".rstrip()


def _choices(taken: Keys) -> list[str]:
    default = default_choices()
    lines = ["Groups and their choices. A * marks the choice used by default; it overrides some of the defaults listed"]
    lines += ["below. --cfg job prints the complete configuration."]
    shown = [g for g in groups() if taken.groups is None or g in (EXPERIMENT, "model", *taken.groups)]
    for group in sorted(shown, key=lambda g: (g != EXPERIMENT, g)):
        marked = [f"{c}*" if default.get(group) == c else c for c in choices(group)]
        lines.append(f"  {group:<12} {' '.join(marked)}")
    return [*lines, ""]


def _keys(taken: Keys) -> list[str]:
    defaults = to_dict(taken.schema())
    lines: list[str] = []
    nested = [f for f in fields(taken.schema) if is_dataclass(f.type)]
    if nested and (alone := {name: value for name, value in defaults.items() if not isinstance(value, dict)}):
        rows = [row for row in _rows(taken.schema, defaults, taken.prefix) if row[0] in alone]
        lines += [_paragraph(taken.schema.__doc__), *_table(rows), ""]
    for group in nested:
        if taken.groups is None or group.name in taken.groups:
            lines += [f"{group.name}: {_paragraph(group.type.__doc__)}"]
            schema: Any = group.type
            lines += [*_table(_rows(schema, defaults[group.name], f"{taken.prefix}{group.name}.")), ""]
    if not nested:
        lines += [_paragraph(taken.schema.__doc__), *_table(_rows(taken.schema, defaults, taken.prefix)), ""]
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
