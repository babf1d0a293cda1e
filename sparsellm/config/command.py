"""A function of one configuration as a command line.

@entry_point(check)
def main(config: Config) -> int: ...

main(["experiment=0p5b", "training.steps=100"], "python -m sparsellm.train")  # the exit code
"""

import os
import sys
from collections.abc import Callable

from sparsellm.config.compose import AnyConfig, as_yaml, composition
from sparsellm.config.errors import ConfigError
from sparsellm.config.schema import Config

CFG = "--cfg"  # as Hydra has it: --cfg job prints the composed configuration


def entry_point(
    check: Callable[[AnyConfig], list[str]],
    values: Callable[[AnyConfig], list[str]],
    schema: type[AnyConfig] = Config,
) -> Callable[[Callable[[AnyConfig], int]], Callable[[list[str], str], int]]:
    """Make `main(config)` a command line: compose a `schema`, check, call.

    `check` lists everything wrong with a configuration; `values` only what is wrong with its values, which is said of
    the rest where something typed was refused: what that would have changed elsewhere is not known. The exit code:
    what `main` returns, or 2 for a refused configuration, with every mistake listed.
    """

    def decorate(main: Callable[[AnyConfig], int]) -> Callable[[list[str], str], int]:
        def command(arguments: list[str], program: str) -> int:
            try:
                show = CFG in arguments
                composed = composition(_without_cfg(arguments) if show else arguments, schema)
                if found := composed.mistakes + (values if show or composed.mistakes else check)(composed.config):
                    raise ConfigError(list(dict.fromkeys(found)))
                for note in composed.notes:
                    _say(note)
                if show:
                    print(as_yaml(composed.config), end="")
                    return 0
                return main(composed.config)
            except ConfigError as error:
                _say(str(error))
                return 2

        return command

    return decorate


def _without_cfg(arguments: list[str]) -> list[str]:
    at = arguments.index(CFG)
    return arguments[:at] + arguments[at + (2 if arguments[at + 1 : at + 2] == ["job"] else 1) :]


def _say(text: str) -> None:
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"sparsellm: {text}", file=sys.stderr)
