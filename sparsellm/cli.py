"""The command line: `sparsellm COMMAND ...`, or `python -m sparsellm.COMMAND ...`, alone or under torchrun.

A command prints its first line, or the error messages about its overrides, before importing torch, which takes seconds.
"""

import difflib
import importlib
import os
import signal
import sys
from collections.abc import Callable
from importlib import metadata
from types import FrameType
from typing import NoReturn

from sparsellm.config.commands import COMMANDS, description
from sparsellm.system.garbage_collection import without_garbage_collection
from sparsellm.system.packages import PackageMissing, needed_by
from sparsellm.system.processes import end_with_torchrun, rank_mistake
from sparsellm.system.streams import OutputLost, outlast

HELP = ("-h", "--help")
INTERRUPTED = 128 + signal.SIGINT
SECONDS_AFTER_AN_INTERRUPT = 10  # the longest that a command may take to end


def main() -> None:
    """The entry point of the program `sparsellm`."""
    command, *arguments = sys.argv[1:] or HELP
    if command == "--version":
        _show(f"sparsellm {metadata.version('sparsellm')}")
    command = command.replace("-", "_") if not command.startswith("-") else command
    if command in HELP or command not in COMMANDS:
        width = max(map(len, COMMANDS))
        listed = "\n".join(f"  {name:<{width}}  {description(name).splitlines()[0]}" for name in COMMANDS)
        text = f"sparsellm COMMAND [key=value ...]\n\n{listed}\n\nsparsellm COMMAND --help lists a command's keys."
        if command in HELP:
            _show(text)
        outlast()
        close = difflib.get_close_matches(command, COMMANDS, n=1)
        hint = f": did you mean {close[0]}?" if close else ""
        print(f"sparsellm: {command} is not a command{hint}\n{text}", file=sys.stderr)
        sys.exit(2)
    run(command, arguments, f"sparsellm {command}")


def run(command: str, arguments: list[str] | None = None, program: str | None = None) -> None:
    """Run `command`, and exit with its exit code. `arguments`: default sys.argv. `program`: its name in help texts."""
    arguments = sys.argv[1:] if arguments is None else arguments
    program = program or f"python -m sparsellm.{command}"
    if set(arguments) & set(HELP):
        from sparsellm.config import help

        _show(help.text(command, program))
    outlast(result=COMMANDS[command].prints_result or "--cfg" in arguments or "sweep.mode=print" in arguments)
    if COMMANDS[command].of_ranks and (mistake := rank_mistake()) is not None:
        print(f"sparsellm: {mistake}", file=sys.stderr)
        sys.exit(2)
    if int(os.environ.get("RANK", "0")) == 0 and "--cfg" not in arguments:
        print(f"sparsellm {command}: starting", file=sys.stderr, flush=True)
    end_with_torchrun()
    sys.exit(_written(lambda: _interruptible(command, arguments, program)))


def _show(text: str) -> NoReturn:
    """Print `text`, the program's only result, and exit."""
    outlast(result=True)
    sys.exit(_written(lambda: print(text)) or 0)


def _written(work: Callable[[], int | None]) -> int | None:
    """The exit code that `work()` returns; if its result cannot be written to standard output, the code for that."""
    try:
        code = work()
        sys.stdout.flush()
        return code
    except OutputLost as lost:
        if not lost.unread:
            print(f"sparsellm: {lost}", file=sys.stderr)
        return lost.exit_code


def _interruptible(command: str, arguments: list[str], program: str) -> int:
    """Run `command` and return its exit code, or INTERRUPTED after a SIGINT that the command does not handle."""

    def say() -> None:
        if int(os.environ.get("RANK", "0")) == 0:
            print(
                f"\nsparsellm {command}: interrupted; run the same command to start again", file=sys.stderr, flush=True
            )

    def end_at_once(_number: int, _frame: FrameType | None) -> None:
        say()
        os._exit(INTERRUPTED)

    interrupts, say_dropped = [], sys.unraisablehook

    def interrupt(number: int, frame: FrameType | None) -> None:
        interrupts.append(number)
        # A bare `except` in a library may catch the KeyboardInterrupt, and the command would go on.
        signal.signal(signal.SIGALRM, end_at_once)
        signal.setitimer(signal.ITIMER_REAL, SECONDS_AFTER_AN_INTERRUPT)
        signal.default_int_handler(number, frame)

    def end_if_dropped(dropped: "sys.UnraisableHookArgs") -> None:
        """End the process if Python drops a KeyboardInterrupt, as it does with all exceptions in finalizers."""
        if issubclass(dropped.exc_type, KeyboardInterrupt):
            end_at_once(signal.SIGINT, None)
        say_dropped(dropped)

    heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # a background process may ignore SIGINT
    try:
        # During imports, SIGINT ends the process at once, because libraries turn KeyboardInterrupt into other errors.
        if heard:
            signal.signal(signal.SIGINT, end_at_once)
        with needed_by(program):
            with without_garbage_collection():
                from sparsellm.config.command import refused

                if refused(command, arguments):
                    return 2
                module = importlib.import_module(f"sparsellm.commands.{command}")
            if heard:
                signal.signal(signal.SIGINT, interrupt)
                sys.unraisablehook = end_if_dropped
            return module.main(arguments, program)
    except KeyboardInterrupt:
        say()
        return INTERRUPTED
    except PackageMissing as missing:
        print(f"sparsellm: {missing}", file=sys.stderr)
        return 1
    except Exception:
        if not interrupts:
            raise
        say()  # a library turned the interrupt into another error, for example during an import
        return INTERRUPTED
    finally:
        sys.unraisablehook = say_dropped
        signal.setitimer(signal.ITIMER_REAL, 0)
