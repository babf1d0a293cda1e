"""The table of commands, with each command's usage, configuration keys and rules.

A command NAME is the function `main(arguments, program)` of sparsellm/commands/NAME.py. The docstring of that file is
the command's help text and starts with a one-line summary. `python -m sparsellm.NAME` runs sparsellm/NAME.py.

`--help` reads the table, so this module imports nothing slow.
"""

import ast
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsellm.config import checkpoint_rules, rules, schema

FOLDER = Path(__file__).parents[1] / "commands"


@dataclass(frozen=True)
class Keys:
    """Keys that a command accepts: all keys in a schema, or those in some of the schema's groups. May have a prefix."""

    schema: type
    groups: tuple[str, ...] | None = None  # None: all groups
    prefix: str = ""


@dataclass(frozen=True)
class Command:
    usage: str  # arguments, as shown in the help text
    keys: tuple[Keys, ...]  # the first entry's schema is the command's configuration
    mistakes: Callable[[Any], list[str]] | None  # checks the configuration; None: `sweep` checks each run instead
    of_ranks: bool = False  # whether the command runs on all ranks under torchrun, or starts commands that do
    prints_result: bool = False  # whether the result is what it prints, so that a closed output ends the command

    @property
    def schema(self) -> type:
        return self.keys[0].schema


COMMANDS = {
    "train": Command("[GROUP=CHOICE ...] [KEY=VALUE ...]", (Keys(schema.Config),), rules.mistakes, of_ranks=True),
    "prepare_data": Command(
        "[GROUP=CHOICE ...] [KEY=VALUE ...]", (Keys(schema.Config, ("data", "training")),), rules.prepare_mistakes
    ),
    "evaluate": Command(
        "checkpoint=PATH|export=DIR [KEY=VALUE ...]", (Keys(schema.EvaluateConfig),),
        checkpoint_rules.evaluate_mistakes,
        of_ranks=True,
    ),
    "sweep": Command(
        "[GROUP=CHOICE,... ...] [KEY=VALUE,VALUE ...] [sweep.KEY=VALUE ...] [evaluate.KEY=VALUE ...]",
        (Keys(schema.SweepConfig, prefix="sweep."), Keys(schema.EvaluateConfig, prefix="evaluate.")),
        mistakes=None, of_ranks=True,
    ),
    "analyze": Command(
        "checkpoint=PATH [KEY=VALUE ...]", (Keys(schema.AnalyzeConfig),), checkpoint_rules.analyze_mistakes
    ),
    "generate": Command(
        "checkpoint=PATH [prompt=TEXT] [KEY=VALUE ...]", (Keys(schema.GenerateConfig),),
        checkpoint_rules.generate_mistakes, prints_result=True,
    ),
    "benchmark": Command(
        "checkpoint=PATH [baseline=PATH] [KEY=VALUE ...]", (Keys(schema.BenchmarkConfig),),
        checkpoint_rules.benchmark_mistakes,
    ),
    "calibrate": Command(
        "model=NAME [KEY=VALUE ...]", (Keys(schema.CalibrateConfig),), checkpoint_rules.calibrate_mistakes
    ),
    "import_model": Command(
        "checkpoint=FOLDER_OR_HUB_NAME output_dir=FOLDER [KEY=VALUE ...]", (Keys(schema.ImportConfig),),
        checkpoint_rules.import_mistakes,
    ),
    "push": Command(
        "checkpoint=PATH repo=OWNER/NAME [license=NAME] [KEY=VALUE ...]", (Keys(schema.PushConfig),),
        checkpoint_rules.push_mistakes,
    ),
}  # fmt: skip


def description(name: str) -> str:
    """A command's help text: the docstring in its module, read without importing the module."""
    text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    return ast.get_docstring(ast.parse(text)) or ""
