"""A function of one configuration as a command line.

@entry_point(check)
def main(config: Config) -> int: ...

main(["experiment=0p5b", "training.steps=100"], "python -m sparsellm.train")  # the exit code
"""

import os
from collections.abc import Callable
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
from sparsellm.config.compose import AnyConfig, as_yaml, composition
from sparsellm.config.errors import ConfigError
from sparsellm.config.overrides import sweep_request
from sparsellm.config.rules import prepare_mistakes, value_mistakes
from sparsellm.config.schema import (
    AnalyzeConfig,
    BenchmarkConfig,
    CalibrateConfig,
    Config,
    EvaluateConfig,
    GenerateConfig,
    ImportConfig,
    PushConfig,
)
from sparsellm.system.console import is_main_rank, warn

# Of each command but `sweep`: its schema, and the rules for values that need no torch.
RULES: dict[str, tuple[type, Callable[[Any], list[str]]]] = {
    "train": (Config, lambda config: value_mistakes(config, int(os.environ.get("WORLD_SIZE", "1")))),
    "prepare_data": (Config, prepare_mistakes),
    "evaluate": (EvaluateConfig, evaluate_mistakes),
    "analyze": (AnalyzeConfig, analyze_mistakes),
    "generate": (GenerateConfig, generate_mistakes),
    "benchmark": (BenchmarkConfig, benchmark_mistakes),
    "calibrate": (CalibrateConfig, calibrate_mistakes),
    "import_model": (ImportConfig, import_mistakes),
    "push": (PushConfig, push_mistakes),
}
CFG = "--cfg"  # as Hydra has it: --cfg job prints the composed configuration


def entry_point(
    check: Callable[[AnyConfig, list[str]], list[str]],
    values: Callable[[AnyConfig], list[str]],
    schema: type[AnyConfig],
    adopt: Callable[[AnyConfig, list[str]], list[str]] = lambda _config, _typed: [],
) -> Callable[[Callable[[AnyConfig], int]], Callable[[list[str], str], int]]:
    """Make `main(config)` a command line: compose a `schema`, check, call.

    `check` lists everything wrong with a configuration, whose overrides it is given, too; `values` only what is wrong
    with its values, which is said of the rest where something typed was refused: what that would have changed elsewhere
    is not known. `adopt` gives a configuration, in place, the values that come from files which it names; it is called
    before `values`, and `check` calls it by itself. The exit code: what `main` returns, or 2 for a refused
    configuration, with every mistake listed.
    """

    def decorate(main: Callable[[AnyConfig], int]) -> Callable[[list[str], str], int]:
        def command(arguments: list[str], program: str) -> int:
            try:
                show = CFG in arguments
                typed = _without_cfg(arguments) if show else arguments
                composed = composition(typed, schema)
                if show or composed.mistakes:
                    found = composed.mistakes + looked_at(
                        lambda: adopt(composed.config, typed) or values(composed.config)
                    )
                else:
                    found = looked_at(lambda: check(composed.config, typed))
                if found:
                    raise ConfigError(list(dict.fromkeys(found)))
                for note in composed.notes:
                    _warn(note)
                if show:
                    print(as_yaml(composed.config), end="")
                    return 0
                return main(composed.config)
            except ConfigError as error:
                _warn(str(error))
                return 2

        return command

    return decorate


def refused(command: str, arguments: list[str]) -> bool:
    """Whether `command` is refused for what was typed alone: every mistake is said that shows without torch, whose
    import takes seconds. The command itself looks at the rest, data, folders and devices, once these hold."""
    arguments = _without_cfg(arguments) if CFG in arguments else arguments
    try:
        if command == "sweep":
            request = sweep_request(arguments)
            found = composition([text for texts in request.axes.values() for text in texts]).mistakes
            found += [f"evaluate: {m}" for m in composition(request.evaluate, EvaluateConfig).mistakes]
        else:
            schema, rules = RULES[command]
            composed = composition(arguments, schema)
            # The model of init_from is not read yet: rules that look at its values would look at others.
            whole = getattr(composed.config, "init_from", None) is None
            found = composed.mistakes + (looked_at(lambda: rules(composed.config)) if whole else [])
        if found:
            raise ConfigError(list(dict.fromkeys(found)))
    except ConfigError as error:
        _warn(str(error))
        return True
    return False


def looked_at(look: Callable[[], list[str]]) -> list[str]:
    """The mistakes that `look()` finds; or that it may not look, as in a folder of somebody else."""
    try:
        return look()
    except OSError as error:
        if error.filename is None:
            raise
        return [f"{error.filename} cannot be read ({error.strerror}): ask its owner for it, or give another path"]


def _without_cfg(arguments: list[str]) -> list[str]:
    at = arguments.index(CFG)
    return arguments[:at] + arguments[at + (2 if arguments[at + 1 : at + 2] == ["job"] else 1) :]


def _warn(text: str) -> None:
    """On the main rank: the mistakes of a command line are those of all ranks."""
    if is_main_rank():
        warn(text)
