"""Calls functions that take single groups of keys with a whole configuration."""

from pathlib import Path

from sparsellm import data
from sparsellm.config import Config
from sparsellm.data import Request
from sparsellm.distributed.groups import Ranks
from sparsellm.evaluation import live
from sparsellm.runs import folder
from sparsellm.runs.curves import Curves
from sparsellm.training.memory import UNSHARED, Sharing, StepMemory


def mistakes(config: Config, typed=()) -> list[str]:
    return data.mistakes(Request.of(config), config.run, typed)


def prepare(config: Config) -> data.Manifest:
    return data.prepare(Request.of(config))


def open_data(config: Config, ranks: Ranks) -> data.Data:
    workers = config.runtime.data_workers
    return data.open_data(Request.of(config), config.run, config.logging.validation_samples, workers, ranks)


def open_validation(config: Config, tokenizer_folder: Path, run: Path):
    return data.open_validation(Request.of(config), config.logging.validation_samples, tokenizer_folder, run)


def live_evaluation(config: Config, ranks: Ranks, loaded=None) -> live.LiveEvaluation | None:
    """Its tasks as `loaded`; None: as the configuration asks."""
    groups = config.evaluation, config.model, config.sparsity.activation, config.runtime, ranks
    return live.load(*groups) if loaded is None else live.LiveEvaluation(*groups, loaded)


def room_mistakes(config: Config) -> list[str]:
    return folder.room_mistakes(
        config.run, config.hf_dtype, config.model, config.training, config.optimizer, config.sparsity
    )


def curves_of(config: Config) -> Curves:
    return Curves(
        config.run.folder.name, config.training.tokens_per_step, config.model.intermediate_size,
        config.sparsity.dead_after_tokens, config.optimizer.warmup_steps, config.data.mix_names,
        taught=config.distill.teacher is not None,
    )  # fmt: skip


def step_memory(config: Config, world_size: int = 1, sharing: Sharing = UNSHARED) -> StepMemory:
    training, activation = config.training, config.sparsity.activation
    return StepMemory(
        config.model, activation, config.runtime, training.batch_size // world_size, training.sequence_length,
        world_size, sharing, taught=config.distill.teacher is not None, muon=config.optimizer.muon,
    )  # fmt: skip
