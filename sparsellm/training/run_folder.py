"""A run's folder: runs/NAME/{config.yaml, metrics.jsonl, checkpoints/, plots/, wandb/}. One process group writes it."""

from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from sparsellm.config import Config, ConfigError, definition, load, save
from sparsellm.distributed import Ranks

CONFIG = "config.yaml"


def mistakes(config: Config) -> list[str]:
    """The keys in which a run of this name, begun earlier, differs from `config`: such a run is not resumed."""
    path = Path(config.run.root, config.run.name) / CONFIG
    if config.run.restart or not path.exists():
        return []
    try:
        before, now = definition(load(path)), definition(config)
    except ConfigError as error:
        return [f"{path} is not a configuration of this version: {'; '.join(error.mistakes)}; choose another run.name"]
    before["data.path"] = now["data.path"]  # data may move; other tokens are refused by their checksum
    return [
        f"{key} is {now[key]!r}, and run {config.run.name} was begun with {before.get(key)!r}:"
        " choose another run.name, or add run.restart=true"
        for key in now
        if now[key] != before.get(key)
    ]


def open_folder(config: Config, ranks: Ranks) -> tuple[Config, Path]:
    """The run's folder, made if need be, with its config.yaml; and `config` with the name that the run got. Collective.

    With run.restart the folder is a new one: NAME-2, NAME-3, ... where NAME is taken.
    """
    name = [config.run.name]
    if ranks.is_main:
        taken, number = Path(config.run.root, config.run.name), 2
        while config.run.restart and taken.exists():
            taken, number = Path(config.run.root, f"{config.run.name}-{number}"), number + 1
        name = [taken.name]
        taken.mkdir(parents=True, exist_ok=True)
        config = replace(config, run=replace(config.run, name=taken.name))
        save(config, taken / CONFIG)
    dist.broadcast_object_list(name, src=0)
    return replace(config, run=replace(config.run, name=name[0])), Path(config.run.root, name[0])
