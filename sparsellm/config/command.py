"""Turns a function that takes a configuration into a command.

@entry_point("train", check)
def main(config: Config) -> int: ...

main(["experiment=0p5b", "training.steps=100"], "python -m sparsellm.train")  # the exit code
"""

from collections.abc import Callable
from typing import Any, cast

from sparsellm.config.commands import COMMANDS
from sparsellm.config.compose import AnyConfig, as_yaml, composition
from sparsellm.config.errors import ConfigError
from sparsellm.config.overrides import sweep_request
from sparsellm.config.schema import EvaluateConfig
from sparsellm.system.console import warn, warn_on_main
from sparsellm.system.errors import SparsellmError

CFG = "--cfg"  # like Hydra's: --cfg job prints the composed configuration


def entry_point(
    name: str,
    check: Callable[[AnyConfig, list[str]], list[str]] | None = None,
    adopt: Callable[[AnyConfig, list[str]], list[str]] = lambda _config, _typed: [],
) -> Callable[[Callable[[AnyConfig], int]], Callable[[list[str], str], int]]:
    """Turn `main(config)` into the command `name`: compose the configuration, check it, and call `main`.

    `check(config, typed overrides)` returns all error messages. Without `check`, or if a typed override is refused (its
    effect on other checks is unknown), only the command's rules in COMMANDS apply. `adopt` sets values in place from
    files named in the configuration. `adopt` runs before the rules, and `check` must call it.

    Exit code: the result of `main`, 2 for a refused configuration (after listing every error), or 1 for any other
    SparsellmError.
    """
    record = COMMANDS[name]
    assert record.mistakes is not None
    values, schema = record.mistakes, cast(type[AnyConfig], record.schema)

    def decorate(main: Callable[[AnyConfig], int]) -> Callable[[list[str], str], int]:
        def command(arguments: list[str], program: str) -> int:
            try:
                show = CFG in arguments
                composed = composition(_without_cfg(arguments) if show else arguments, schema)
                config, typed = composed.config, composed.overrides
                if show or composed.mistakes or check is None:
                    found = looked_at(lambda: adopt(config, typed) or values(config))
                else:
                    found = looked_at(lambda: check(config, typed))
                if found := composed.mistakes + found:
                    raise ConfigError(list(dict.fromkeys(found)))
                for note in composed.notes:
                    warn_on_main(note)
                if show:
                    print(as_yaml(config), end="")
                    return 0
                return main(config)
            except ConfigError as error:
                warn_on_main(str(error))
                return 2
            except SparsellmError as error:
                warn(str(error))
                return 1

        return command

    return decorate


def refused(name: str, arguments: list[str]) -> bool:
    """Whether the command `name` refuses its overrides `arguments`. Prints all error messages that can be found without
    torch, which takes seconds to import; the command checks data, folders and devices later."""
    arguments = _without_cfg(arguments) if CFG in arguments else arguments
    record = COMMANDS[name]
    try:
        if record.mistakes is None:
            request = sweep_request(arguments)
            texts = [text for texts in request.axes.values() for text in texts]
            found = composition([*request.options.texts, *texts]).mistakes
            found += [f"evaluate: {m}" for m in composition(request.evaluate, EvaluateConfig).mistakes]
        else:
            values, composed = record.mistakes, composition(arguments, cast(type[Any], record.schema))
            # The values of model.* are unknown until the init_from model is read.
            whole = getattr(composed.config, "init_from", None) is None
            found = composed.mistakes + (looked_at(lambda: values(composed.config)) if whole else [])
        if found:
            raise ConfigError(list(dict.fromkeys(found)))
    except ConfigError as error:
        warn_on_main(str(error))
        return True
    return False


def looked_at(look: Callable[[], list[str]]) -> list[str]:
    """The error messages returned by `look()`. If `look()` cannot read a path, an error message that names the path."""
    try:
        return look()
    except OSError as error:
        if error.filename is None:
            raise
        return [
            f"{error.filename} cannot be read ({error.strerror}): ask its owner for permission, or give another path"
        ]


def _without_cfg(arguments: list[str]) -> list[str]:
    at = arguments.index(CFG)
    return arguments[:at] + arguments[at + (2 if arguments[at + 1 : at + 2] == ["job"] else 1) :]
