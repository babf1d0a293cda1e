"""Accuracy on downstream tasks during training, without changing the training.

The scores equal those of the checkpoint that the run would save at this step, in the run's precision. A Hugging Face
model that shares the decoder's weights computes them. That model is not compiled, because its sequences have many
lengths, and it has feedforward blocks of its own, so that the compiled layers and the engine choices of validation stay
as they are.

A failure costs only the score, as long as all ranks learn of the failure at the same point. For a sharded model, the
weights are gathered first, with one collective per weight. A rank that failed between two collectives would run another
collective than the other ranks, so memory for all weights is allocated before the first collective: if that fails, all
ranks learn of it, and training continues. A failure between two weights ends the run (GatherFailed).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from sparsellm.config import (
    Activation,
    ConfigError,
    EvaluationConfig,
    ModelConfig,
    Precision,
    RuntimeConfig,
    takes_kernels,
)
from sparsellm.data import Data
from sparsellm.distributed.groups import Ranks, first_error, on_main, whole
from sparsellm.evaluation import tasks
from sparsellm.hf import conversion, hub, pretrained
from sparsellm.model import Decoder
from sparsellm.system.console import warn
from sparsellm.system.errors import SparsellmError, one_line

T = TypeVar("T")


class GatherFailed(SparsellmError, RuntimeError):
    """This rank, perhaps alone, failed while gathering the weights. The other ranks wait for it in a collective."""


def mistakes(evaluation: EvaluationConfig) -> list[str]:
    """Error messages for `evaluation`, as far as they can be known before any work; empty if there are none."""
    if not evaluation.every:
        return []
    if evaluation.tasks == tasks.NONE:
        return ["evaluation.tasks is none: evaluation.every=0 disables evaluation during training"]
    found = tasks.mistakes(evaluation.tasks, evaluation.data_dir, "evaluation.")
    if not found and evaluation.data_dir is not None:
        for name in tasks.chosen(evaluation.tasks):
            try:
                tasks.local_rows(name, evaluation.data_dir)
            except tasks.TaskUnavailable as error:
                found.append(_without(name, error))
    return found


def load(
    evaluation: EvaluationConfig, model: ModelConfig, activation: Activation, runtime: RuntimeConfig, ranks: Ranks
) -> "LiveEvaluation | None":
    """Load the tasks of `evaluation`; None if `every` is 0. Collective. Raises ConfigError on all ranks on failure."""
    if not evaluation.every:
        return None
    loaded, found = [], []
    names = tasks.chosen(evaluation.tasks)
    looks = evaluation.data_dir is None
    reached = looks and on_main(ranks, lambda: hub.answers(f"the rows of {', '.join(names)}"))
    with hub.offline(not reached):
        for name in names:
            try:
                loaded.append(tasks.load_on_all(name, evaluation.data_dir, ranks))
            except tasks.TaskUnavailable as error:
                found.append(_without(name, error))
    if found and looks and not reached:
        missing = ", ".join(name for name in names if name not in [task.name for task in loaded])
        found = [
            f"evaluation.tasks: the hub does not answer, and the rows of {missing} are not cached on this machine:"
            " connect it, give local rows with evaluation.data_dir=DIR, or disable evaluation with evaluation.every=0"
        ]
    if found:
        raise ConfigError(found)
    for task in loaded if ranks.is_main else []:
        if task.note is not None:
            warn(f"evaluation of {task.name}: {task.note}")
    return LiveEvaluation(evaluation, model, activation, runtime, ranks, loaded)


def _without(name: str, error: tasks.TaskUnavailable) -> str:
    return f"evaluation.tasks: {name} cannot be scored: {error}; choose others with evaluation.tasks=[...]"


@dataclass(frozen=True)
class LiveEvaluation:
    """The tasks of a run, scored repeatedly. All ranks call `scores` together."""

    evaluation: EvaluationConfig
    model: ModelConfig
    activation: Activation
    runtime: RuntimeConfig
    ranks: Ranks
    loaded: list[tasks.LoadedTask]

    def scores(self, step: int, decoder: Decoder, data: Data) -> dict[str, float | None]:
        """Each task's score and their "mean", the same on all ranks; None, with a warning, for a failure."""
        from sparsellm.evaluation import downstream

        limit = self.evaluation.limit
        found: dict[str, float | None] = {task.name: None for task in self.loaded}
        with hub.offline(self.evaluation.data_dir is not None):
            lm: Any = None
            if (weights := self._weights(step, decoder)) is not None:
                lm = self._attempt(step, "the model", partial(self._lm, weights, data, decoder))
            if lm is not None:
                lm.builder.announce(self.loaded, limit)
            for task in [] if lm is None else self.loaded:
                scored = self._attempt(step, task.name, partial(downstream.score, lm, task, limit))
                found[task.name] = None if scored is None else scored[0]["score"]
        scores = [score for score in found.values() if score is not None]
        return {**found, "mean": sum(scores) / len(scores) if len(scores) == len(found) else None}

    def _weights(self, step: int, decoder: Decoder) -> dict[str, Tensor] | None:
        """The decoder's gathered weights; None, with a warning, if some rank lacks memory for them. Collective.

        Raises GatherFailed if gathering fails on this rank.
        """
        shards = decoder.state_dict()
        torch.cuda.empty_cache()  # batch_size=auto counts free GPU memory
        if self._attempt(step, "the model", partial(self._take_memory, shards)) is None:
            return None
        try:
            return {name: whole(shard) for name, shard in shards.items()}
        except Exception as error:
            raise GatherFailed(
                f"step {step:,}: gathering the weights to evaluate them failed ({one_line(error)}),"
                " and no rank can continue without the others. Run the same command"
                " to resume from the newest checkpoint; evaluation.every=0 disables evaluation"
            ) from error

    def _take_memory(self, shards: dict[str, Tensor]) -> int:
        """Bytes that the gathered weights take. Makes torch's allocator reserve them, plus room for gathering."""
        from torch.distributed.tensor import DTensor  # slow to import: a second

        sizes = [shard.nbytes for shard in shards.values() if isinstance(shard, DTensor)]
        needed = sum(sizes) + 2 * max(sizes, default=0)  # a gathered weight is copied if its shards are uneven
        torch.empty(needed, dtype=torch.uint8, device=self.ranks.device)
        return needed

    def _lm(self, weights: dict[str, Tensor], data: Data, decoder: Decoder) -> Any:
        """A SharedLM of the decoder's `weights`, with its feedforward blocks on the kernels that validation uses."""
        from sparsellm.evaluation.downstream import SharedLM
        from sparsellm.inference.accelerate import accelerate, policy_of

        torch.cuda.empty_cache()  # batch_size=auto counts free GPU memory
        runtime = self.runtime
        model = conversion.view(weights, self.model, self.activation, data.end_of_text_id)
        if takes_kernels(runtime, self.activation, self.ranks.device.type):
            accelerate(model, runtime.kernels.name, calibrate=False, policy=policy_of(decoder))  # the run's own policy
        tokenizer = pretrained.read_tokenizer(data.tokenizer_folder, self.model.vocab_size)
        autocast = torch.bfloat16 if runtime.precision == Precision.bfloat16 else None
        return SharedLM(model, tokenizer, self.ranks, self.evaluation.batch_size, autocast)

    def _attempt(self, step: int, what: str, work: Callable[[], T]) -> T | None:
        """The result of `work`; None, with a warning, if it fails on some rank. Collective."""
        result = error = None
        try:
            result = work()
        except Exception as exception:  # any kind of error: a failed score must not stop training
            error = one_line(exception)
        if (error := first_error(error)) is None:
            return result
        if self.ranks.is_main:
            warn(f"step {step:,}: evaluating {what} failed; training continues: {error}")
        return None
