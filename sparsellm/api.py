"""The Python API: the commands prepare_data, train and evaluate as functions that raise exceptions.

from sparsellm.api import Config, Generator, evaluate, train

run = train(Config.compose("experiment=smoke", "training.steps=100"))
scores = evaluate(run.folder, tasks=["piqa"])
text = Generator.load(run.model).text(["The water"], 64)
"""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, Self

from sparsellm import config as keys
from sparsellm import data
from sparsellm.config import ConfigError, EvaluateConfig, fingerprint
from sparsellm.config.compose import complete, composition, from_values
from sparsellm.evaluation.checkpoint import evaluate_checkpoint
from sparsellm.evaluation.record import record
from sparsellm.inference.generation import Generator
from sparsellm.system.console import warn
from sparsellm.system.errors import SparsellmError
from sparsellm.system.garbage_collection import without_garbage_collection
from sparsellm.system.processes import rank_mistake
from sparsellm.training import run as training
from sparsellm.training.run import Run

__all__ = ["Config", "ConfigError", "Generator", "Run", "SparsellmError", "evaluate", "prepare_data", "train"]


class Config(keys.Config):
    """A run's configuration: `config.training.steps` is the key `training.steps` on the command line.

    Config() has the defaults listed by `sparsellm train --help`. `compose` and `load` make configurations like the
    command line does. Fields may be changed, but this does not change a run name made by `compose`, so set
    `config.run.name` too, or pass the value to `compose`.
    """

    overrides: Sequence[str] = ()  # the command line passed to `compose`

    @classmethod
    def compose(cls, *overrides: str, config_dir: str | Path | None = None) -> Self:
        """The configuration that results from command-line overrides.

        Args:
            overrides: As on the command line: "experiment=smoke", "training.steps=100".
            config_dir: A folder with your own experiments and choices, as for --config-dir.

        Raises:
            ConfigError: If an override is refused; lists every mistake.
        """
        composed = composition([*([] if config_dir is None else [f"{keys.CONFIG_DIR}={config_dir}"]), *overrides])
        if composed.mistakes:
            raise ConfigError(list(dict.fromkeys(composed.mistakes)))
        for note in composed.notes:
            warn(note)
        found = cls(**vars(composed.config))
        found.overrides = composed.overrides
        return found

    @classmethod
    def load(cls, path: str | Path, *overrides: str, config_dir: str | Path | None = None) -> Self:
        """The configuration in a YAML file, such as runs/NAME/config.yaml, changed by `overrides`.

        Training with the unchanged config.yaml of a run resumes that run; with changes, it starts another run with its
        own name.

        Args:
            path: The YAML file, as for --config.
            overrides: As for `compose`.
            config_dir: As for `compose`.

        Raises:
            ConfigError: If the file cannot be read or is damaged, or for mistakes in the file or overrides; lists all.
        """
        return cls.compose(f"{keys.CONFIG}={path}", *overrides, config_dir=config_dir)


def train(config: keys.Config) -> Run:
    """Train a model, or resume the run named by `config.run.name`. Prints what `sparsellm train` prints.

    Checks everything before writing anything. SIGINT (Ctrl-C), SIGTERM and SIGHUP stop the run with a checkpoint;
    afterwards the process's own signal handlers are restored. Call this function in the main thread, on all ranks
    started by torchrun. If one of several ranks dies, hangs or runs out of memory, the processes of all ranks end with
    a message, as torchrun expects.

    Args:
        config: The configuration.

    Raises:
        ConfigError: If the configuration has mistakes; lists every one. Nothing has been written.
        SparsellmError: If the run cannot go on: damaged data or checkpoint, out of memory on a single rank, divergence.
        OSError: If a file cannot be written, mostly because the disk is full.
    """
    whole, typed = _checked(config)
    found = [] if (mistake := rank_mistake()) is None else [mistake]
    if threading.current_thread() is not threading.main_thread():
        found.append("train is called in a thread, where no signal can stop it: call it in the main thread")
    if found := found or training.check(whole, typed):
        raise ConfigError(list(dict.fromkeys(found)))
    return training.run(whole)


def prepare_data(config: keys.Config) -> Path:
    """Tokenize the text that a run with `config` reads, and return the folder with the tokens.

    Call this function again to continue after an interruption. If all tokens exist already, nothing is done.

    Args:
        config: The run's configuration.

    Raises:
        ConfigError: If the configuration has mistakes; lists every one.
        SparsellmError: If the text or the tokenizer cannot be read.
        OSError: If a file cannot be written, mostly because the disk is full.
    """
    whole, typed = _checked(config)
    if found := training.check_preparation(whole, typed):
        raise ConfigError(list(dict.fromkeys(found)))
    request = data.Request.of(whole)
    data.prepare(request)
    if found := data.mistakes(request, whole.run):  # errors that training would report
        raise ConfigError(found)
    return whole.data.folder


def _checked(config: keys.Config) -> tuple[keys.Config, list[str]]:
    """A complete copy of `config` with values of the right types, and the overrides from which `config` was composed.
    Raises ConfigError if values have wrong types."""
    if not isinstance(config, keys.Config):
        raise ConfigError([f"config is {config!r}: it should be a Config, for example Config.compose('{config}')"])
    typed = list(getattr(config, "overrides", ()))
    whole = from_values(dict(_values(config)), keys.Config)
    complete(whole.data, whole.run, whole.init_from, tokenizer_typed=bool(typed))
    whole.run.name = whole.run.name or f"run-{fingerprint(whole)}"
    return whole, typed


def _values(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(group.key, value) for every attribute of `config`, including attributes that are not keys."""
    for name, value in vars(config).items():
        if is_dataclass(value):
            yield from _values(value, f"{prefix}{name}.")
        elif f"{prefix}{name}" != "overrides":
            yield f"{prefix}{name}", value


def evaluate(checkpoint: str | Path, **settings: Any) -> dict[str, Any]:
    """Score a checkpoint on seven tasks and its held-out text, and write results.json.

    A task that cannot be scored is listed under "failed" and affects no other task.

    Args:
        checkpoint: A run (its last checkpoint), a checkpoint, an hf/ folder or a hub name.
        settings: The other keys of `sparsellm evaluate --help`, except export, for example tasks=["piqa"], limit=20.

    Returns:
        The contents of results.json. `sparsellm.evaluation.checkpoint.evaluate_checkpoint` lists its keys.

    Raises:
        ConfigError: If the settings have mistakes; lists every one. Nothing has been written.
        SparsellmError: If the checkpoint cannot be evaluated.
        OSError: If a file cannot be written, mostly because the disk is full.
    """
    config = from_values({"checkpoint": checkpoint, **settings}, EvaluateConfig)
    if config.export is not None:
        raise ConfigError(["export writes rows and scores nothing: use the command `sparsellm evaluate export=DIR`"])
    # Garbage collection over the requests and samples, millions of objects, would take a quarter of the time.
    with without_garbage_collection():
        return evaluate_checkpoint(config, record)
