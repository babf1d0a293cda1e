"""A run's folder: runs/NAME/{config.yaml, metrics.jsonl, checkpoints/, plots/, wandb/}. One process group writes it."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from sparsellm.config import Config, ConfigError, definition, load, save
from sparsellm.distributed import Ranks, main_first
from sparsellm.run_layout import CHECKPOINTS, COMMITTED, CONFIG, checkpoint

__all__ = ["CHECKPOINTS", "CONFIG", "RunFolderError", "checkpoint", "claim", "is_finished", "mistakes", "open_folder"]

LOCK = "lock"


class RunFolderError(RuntimeError):
    """The folder cannot be used: it cannot be written, or another process is using it."""


def path_of(config: Config) -> Path:
    return Path(config.run.root, config.run.name)


def mistakes(config: Config) -> list[str]:
    """The keys in which a run of this name, begun earlier, differs from `config`: such a run is not resumed."""
    path = path_of(config) / CONFIG
    if config.run.restart or not path.is_file():
        return []
    try:
        before, now = definition(load(path)), definition(config)
    except ConfigError as error:
        return [f"{path} is not a configuration of this version: {'; '.join(error.mistakes)}; choose another run.name"]
    return [
        f"{key} is {now[key]!r}, and run {config.run.name} was begun with {before.get(key)!r}:"
        " choose another run.name, or add run.restart=true"
        for key in now
        if now[key] != before.get(key)
    ]


def is_finished(config: Config) -> bool:
    """Whether the run that `config` names has saved its last step."""
    return not config.run.restart and (checkpoint(path_of(config), config.training.steps) / COMMITTED).is_file()


@contextmanager
def open_folder(config: Config, ranks: Ranks) -> Iterator[tuple[Config, Path]]:
    """Make the run's folder if need be, with its config.yaml, and keep other processes out of it. Collective.

    Yields `config` with the name that the run got, and the folder: with run.restart a new one, NAME-2, NAME-3, ...
    where NAME is taken. Raises RunFolderError.
    """
    held, name = None, [config.run.name]
    with main_first(ranks):
        if ranks.is_main:
            folder, number = path_of(config), 2
            while config.run.restart and folder.exists():
                folder, number = Path(config.run.root, f"{config.run.name}-{number}"), number + 1
            name = [folder.name]
            held = claim(folder)
            save(replace(config, run=replace(config.run, name=folder.name)), folder / CONFIG)
    dist.broadcast_object_list(name, src=0)
    config = replace(config, run=replace(config.run, name=name[0]))
    try:
        yield config, path_of(config)
    finally:
        if held is not None:
            held.close()


def claim(folder: Path):
    """The folder's lock, an open file; the system releases it with the process, however that ends.

    Raises RunFolderError if another process holds it, or the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("w")
    except OSError as error:
        raise RunFolderError(f"{folder} cannot be written: {error}; choose another run.root") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RunFolderError(
            f"{folder} is in use: the same run is going on in another process. Wait for it, or add run.restart=true"
        ) from None
    return file
