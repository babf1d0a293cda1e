"""The table of commands: usage, configuration keys and rules of each.

A command NAME is the function `main(arguments, program)` of sparsellm/commands/NAME.py, whose docstring is its help
text and starts with a one-line summary. `python -m sparsellm.NAME` runs sparsellm/NAME.py, next to cli.py.

This module imports nothing slow, because `--help` reads the table.
"""

import ast
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsellm.config.checkpoint_rules import (
    analyze_mistakes,
    benchmark_mistakes,
    calibrate_mistakes,
    evaluate_mistakes,
    generate_mistakes,
    import_mistakes,
    push_mistakes,
)
from sparsellm.config.rules import mistakes, prepare_mistakes
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

FOLDER = Path(__file__).parents[1] / "commands"


@dataclass(frozen=True)
class Keys:
    """Keys that a command accepts: the keys of a schema, or of some of its groups, with an optional prefix."""

    schema: type
    groups: tuple[str, ...] | None = None  # None: all
    prefix: str = ""


@dataclass(frozen=True)
class Command:
    usage: str  # arguments, as shown in the help
    keys: tuple[Keys, ...]  # the first entry has the schema of the command's configuration
    mistakes: Callable[[Any], list[str]] | None  # checks the configuration; None: the runs that it starts are checked
    of_ranks: bool = False  # runs on all ranks of torchrun, or starts commands that do
    prints_result: bool = False  # its only result is standard output, so it stops if that closes

    @property
    def schema(self) -> type:
        return self.keys[0].schema


COMMANDS = {
    "train": Command("[GROUP=CHOICE ...] [KEY=VALUE ...]", (Keys(Config),), mistakes, of_ranks=True),
    "prepare_data": Command(
        "[GROUP=CHOICE ...] [KEY=VALUE ...]", (Keys(Config, ("data", "training")),), prepare_mistakes
    ),
    "evaluate": Command("checkpoint=PATH [KEY=VALUE ...]", (Keys(EvaluateConfig),), evaluate_mistakes, of_ranks=True),
    "sweep": Command(
        "[GROUP=CHOICE,... ...] [KEY=VALUE,VALUE ...] [sweep.KEY=VALUE ...] [evaluate.KEY=VALUE ...]",
        (Keys(SweepConfig, prefix="sweep."), Keys(EvaluateConfig, prefix="evaluate.")),
        mistakes=None,
        of_ranks=True,
    ),
    "analyze": Command("checkpoint=PATH [KEY=VALUE ...]", (Keys(AnalyzeConfig),), analyze_mistakes),
    "generate": Command(
        "checkpoint=PATH [prompt=TEXT] [KEY=VALUE ...]", (Keys(GenerateConfig),), generate_mistakes, prints_result=True
    ),
    "benchmark": Command(
        "checkpoint=PATH [baseline=PATH] [KEY=VALUE ...]", (Keys(BenchmarkConfig),), benchmark_mistakes
    ),
    "calibrate": Command("model=NAME [KEY=VALUE ...]", (Keys(CalibrateConfig),), calibrate_mistakes),
    "import_model": Command(
        "checkpoint=FOLDER_OR_HUB_NAME output_dir=FOLDER [KEY=VALUE ...]", (Keys(ImportConfig),), import_mistakes
    ),
    "push": Command(
        "checkpoint=PATH repo=OWNER/NAME [license=NAME] [KEY=VALUE ...]", (Keys(PushConfig),), push_mistakes
    ),
}


def description(name: str) -> str:
    """The help text of a command: the docstring of its module, which is read without importing it."""
    text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    return ast.get_docstring(ast.parse(text)) or ""
