"""The metrics of a training step: summed on the device, reduced over the ranks, and turned into a row.

A row holds one step's values over the global batch. They are reduced and copied asynchronously, and read while the next
step is running, so that logging never stalls the device. A rank's stop request is reduced together with the values, so
that all ranks see it at the same step. metrics.py writes the rows.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from sparsellm.config import DistillConfig, ModelConfig, SparsityConfig, TrainingConfig, l1_denominator
from sparsellm.model import DecoderOutput
from sparsellm.ops.host_copy import to_host
from sparsellm.runs.metrics import NAMED
from sparsellm.runs.mfu import mfu, peak_flops


class StepSums:
    """An optimizer step's sums over this rank's micro-batches, on the device; None before the first micro-batch.

    `kl` is also None without a teacher, and all sums except `ce` and `kl` are also None for SiLU models.
    """

    ce: Any = None  # float64, like kl and l1
    kl: Any = None
    l1: Any = None
    nnz: Any = None
    fired: Any = None
    wide_segments: Any = None
    rest_calls: Any = None
    overflow_tiles: Any = None
    union: Any = None
    fullest: Any = None  # float64 [L]: maximum over micro-batches of nonzeros per token

    def add(self, out: DecoderOutput, tokens: int) -> None:
        """Add the output of a micro-batch of `tokens` tokens."""
        for name in ("ce", "kl", "l1"):
            value = getattr(out, name)
            self._combine(name, None if value is None else value.detach().double(), torch.add)
        for name in ("nnz", "wide_segments", "rest_calls", "overflow_tiles", "union"):
            self._combine(name, getattr(out, name), torch.add)
        self._combine("fired", out.fired, torch.logical_or)
        self._combine("fullest", None if out.nnz is None else out.nnz.double() / tokens, torch.maximum)

    def _combine(self, name: str, value: Tensor | None, combine: Callable[[Tensor, Tensor], Tensor]) -> None:
        if value is not None:
            total = getattr(self, name)
            setattr(self, name, value if total is None else combine(total, value))


class StepClock:
    """Times a step from its request for data to its end. On a GPU, CUDA events time the step, including idle time."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.peak_memory: int | None = None  # bytes; unknown on a CPU
        self._asked = time.perf_counter()
        if self.cuda:
            torch.cuda.reset_peak_memory_stats(device)
            self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._begin.record()

    def data_is_here(self) -> None:
        self.data_wait = time.perf_counter() - self._asked  # seconds on the host; the device may be busy meanwhile

    def stop(self) -> None:
        if self.cuda:
            self._end.record()
            self.peak_memory = torch.cuda.max_memory_allocated()
        else:
            self._stopped = time.perf_counter()

    def seconds(self) -> float:
        """The step's duration. Waits for the step to end."""
        if self.cuda:
            self._end.synchronize()
            return self._begin.elapsed_time(self._end) / 1e3
        return self._stopped - self._asked


@dataclass
class StepReport:
    """One step's reduced values, possibly still being copied; `read` waits for them."""

    known: dict[str, Any]  # values that are already on the host, by row key
    shapes: dict[str, torch.Size]  # shapes of the fields of StepValues in `numbers`
    numbers: Tensor  # float64 on the host: the fields in the order of `shapes`, flattened and concatenated
    copied: torch.cuda.Event | None
    clock: StepClock

    def read(self) -> "StepValues":
        if self.copied is not None:
            self.copied.synchronize()
        pieces = self.numbers.split([shape.numel() for shape in self.shapes.values()])
        found: dict[str, Any] = {
            name: piece.view(shape).tolist() for (name, shape), piece in zip(self.shapes.items(), pieces, strict=True)
        }
        found |= {"stop": found["stop"] > 0, **{key: int(found[key]) for key in ("skipped", "skipped_in_row")}}
        clock = self.clock
        return StepValues(self.known, clock.seconds(), clock.peak_memory, clock.data_wait, **found)


@dataclass
class StepValues:
    """One step's values over the whole global batch, on the host."""

    known: dict[str, Any]
    # The next three are measured per rank (StepClock); rows hold the main rank's.
    seconds: float  # duration of the whole step, including the wait for data
    peak_memory: int | None  # bytes, the largest allocation during the step
    data_wait: float  # seconds
    ce: float  # sum over all ranks' tokens, in nats
    kl: float  # sum over all ranks' tokens, in nats; 0 without a teacher
    mj_per_token: float  # energy of all GPUs since the previous logged step; NaN if unknown
    stop: bool  # some rank was asked to stop
    grad_norm: float
    skipped: int  # non-finite steps so far
    skipped_in_row: int
    # Per layer; None for SiLU models. `reinitialized` counts from the start of the run, and is also None if disabled.
    l1: list[float] | None = None  # sum of |h|
    nnz: list[float] | None = None
    wide_segments: list[float] | None = None  # see FeedForwardOutput
    rest_calls: list[float] | None = None  # see FeedForwardOutput
    overflow_tiles: list[float] | None = None  # see FeedForwardOutput
    dead: list[float] | None = None
    reinitialized: list[float] | None = None


def reduce_step(
    sums: StepSums, same: dict[str, Tensor | None], stop: bool, mj_per_token: float, known: dict[str, Any],
    clock: StepClock,
) -> StepReport:  # fmt: skip
    """Reduce one step's values over the ranks and start copying them to the host. Collective.

    `same`: fields of StepValues that are the same on all ranks already. `mj_per_token`: energy of this rank's GPU per
    token of the global batch.
    """
    summed = {
        "ce": sums.ce, "stop": torch.full_like(sums.ce, stop),
        "kl": torch.zeros_like(sums.ce) if sums.kl is None else sums.kl, "l1": sums.l1, "nnz": sums.nnz,
        "wide_segments": sums.wide_segments, "rest_calls": sums.rest_calls,
        "overflow_tiles": sums.overflow_tiles,
        "mj_per_token": torch.full_like(sums.ce, mj_per_token),
    }  # fmt: skip
    total = _packed(summed)
    dist.all_reduce(total)
    shapes = {name: value.shape for name, value in (summed | same).items() if value is not None}
    return StepReport(known, shapes, *to_host(torch.cat([total, _packed(same)])), clock)


def _packed(values: dict[str, Tensor | None]) -> Tensor:
    return torch.cat([value.double().reshape(-1) for value in values.values() if value is not None])


class HeldOut(NamedTuple):
    """The result of a validation."""

    ce: float  # nats per token
    tokens: int  # number of tokens in the mean
    named: dict[str, float]  # cross entropy of each data.mix source


@dataclass(frozen=True)
class Rows:
    """Turns step values into rows: the same keys for all runs, null for missing values, never NaN."""

    model: ModelConfig
    training: TrainingConfig
    sparsity: SparsityConfig
    distill: DistillConfig
    sources: list[str]  # names of the data.mix sources
    world_size: int
    device: torch.device

    def row(self, values: StepValues) -> dict[str, Any]:
        """The row of a step, without validation and evaluation."""
        step_tokens = self.training.tokens_per_step
        ce = values.ce / step_tokens
        denominator = l1_denominator(self.sparsity.l1_normalization, self.model)
        l1 = None if values.l1 is None else sum(values.l1) / step_tokens / denominator
        distill, kl = self.distill, values.kl / step_tokens
        loss = ce if distill.teacher is None else ce + distill.weight * distill.temperature**2 * kl
        nnz = None if values.nnz is None else [count / step_tokens for count in values.nnz]
        tokens_per_s = step_tokens / values.seconds
        peak = peak_flops(self.device)
        utilisation = peak and mfu(tokens_per_s, self.model, self.training.sequence_length, peak * self.world_size)
        row = {
            "step": values.known["step"],
            "tokens": values.known["tokens"],
            "loss": loss if l1 is None else loss + values.known["l1_coefficient"] * l1,
            "ce": ce,
            **({} if distill.teacher is None else {"distill_kl": kl}),
            **self._scores(None, None),
            "l1": l1,
            "nnz_mean": None if nnz is None else sum(nnz) / len(nnz),
            "nnz_per_layer": nnz,
            "dead_per_layer": None if values.dead is None else [int(count) for count in values.dead],
            "reinitialized_per_layer": values.reinitialized and [int(count) for count in values.reinitialized],
            "lr": values.known["lr"],
            "l1_coefficient": values.known["l1_coefficient"],
            **({"relu_share": values.known["relu_share"]} if self.sparsity.relu_tokens else {}),
            "grad_norm": values.grad_norm,
            "skipped_steps": values.skipped,
            "tokens_per_s": tokens_per_s,
            "mfu": utilisation,
            "mj_per_token": values.mj_per_token,
            "peak_memory_bytes": values.peak_memory,
            "data_wait_fraction": values.data_wait / values.seconds,
            "wide_segments": None if values.wide_segments is None else int(sum(values.wide_segments)),
            "rest_calls": None if values.rest_calls is None else int(sum(values.rest_calls)),
            "overflow_tiles": None if values.overflow_tiles is None else int(sum(values.overflow_tiles)),
            "plan_per_layer": values.known["plan_per_layer"],
            "micro_batch_size": values.known["micro_batch_size"],
            "ffn_saved_bytes": values.known["ffn_saved_bytes"],
        }
        return {key: _finite_or_none(value) for key, value in row.items()}

    def scored(
        self, row: dict[str, Any], held_out: HeldOut | None, scores: dict[str, float | None] | None
    ) -> dict[str, Any]:
        """`row` with the results of a validation (`held_out`) and an evaluation (`scores`), None if not run."""
        return row | {key: _finite_or_none(value) for key, value in self._scores(held_out, scores).items()}

    def _scores(self, held_out: HeldOut | None, scores: dict[str, float | None] | None) -> dict[str, Any]:
        return {
            "val_ce": held_out and held_out.ce,
            "val_tokens": held_out and held_out.tokens,
            **{f"{NAMED}{name}": held_out and held_out.named[name] for name in self.sources},
            "evaluation": scores,
        }


def _finite_or_none(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite_or_none(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
