"""The commands: one record for each, which says all that the others of its files do not.

A command NAME is the function `main(arguments, program)` of sparsellm/commands/NAME.py, whose docstring is its help:
the first line says what it does. `python -m sparsellm.NAME` starts from the file of that name beside cli.py.

Imports nothing slow: `--help` reads this table.
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
    """The keys that a command takes: those of a schema, of all or some of its groups, under a prefix."""

    schema: type
    groups: tuple[str, ...] | None = None  # None: all
    prefix: str = ""


@dataclass(frozen=True)
class Command:
    usage: str  # what follows its name
    keys: tuple[Keys, ...]  # the first one's schema is that of its configuration
    mistakes: Callable[[Any], list[str]] | None  # the rules of its values; None: those of the runs that it starts
    of_ranks: bool = False  # whether torchrun's ranks do it together, or it starts what they do
    prints_result: bool = False  # whether standard output is all that it gives: it ends where that cannot be written

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
    """What a command does, in its first line, and how: the docstring of its module, which is not imported."""
    text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    return ast.get_docstring(ast.parse(text)) or ""
