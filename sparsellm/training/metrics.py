"""What a step measured, from sums on the device to rows of metrics.jsonl.

A row holds its own step's values over the whole global batch. The numbers are reduced and copied without blocking, and
read once the next step is under way, so that logging never makes the device wait. With them travels the wish of any
rank to stop: all ranks read the same sum at the same step.
"""

import json
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from sparsellm.config import Config
from sparsellm.model import DecoderOutput

PEAK_FLOPS = {"H100": 989e12, "H200": 989e12}  # dense bfloat16, by name of GPU (DESIGN §6)

METRICS = "metrics.jsonl"


def mfu(tokens_per_s: float, parameters: int, layers: int, sequence_length: int, width: int, peak: float) -> float:
    """Model FLOP utilisation (DESIGN §6); `peak` is the FLOP/s of all devices together. Sparse runs count as dense."""
    return tokens_per_s * (6 * parameters + 6 * layers * sequence_length * width) / peak


class StepSums:
    """The sums of one optimizer step over this rank's micro-batches, on the device."""

    def __init__(self) -> None:
        self.ce: Tensor | None = None
        self.l1 = self.nnz = self.fired = self.overflow = self.union = None
        self.fullest: Tensor | None = None  # float64 [L]: the largest nonzeros per token of a micro-batch

    def add(self, out: DecoderOutput, tokens: int) -> None:
        """`out` is of a micro-batch of so many tokens."""
        fullest = None if out.nnz is None else out.nnz.double() / tokens
        if self.ce is None:
            self.ce = out.ce.detach().double()
            if out.l1 is not None:
                self.l1, self.nnz = out.l1.detach().double(), out.nnz
                self.fired, self.overflow, self.union = out.fired, out.overflow, out.union
                self.fullest = fullest
            return
        self.ce += out.ce.detach()
        if out.l1 is not None:
            self.l1 += out.l1.detach()
            self.nnz += out.nnz
            self.fired |= out.fired
            self.overflow += out.overflow
            self.union += out.union
            self.fullest = torch.maximum(self.fullest, fullest)


class StepClock:
    """How long a step takes from asking for its data on; on a GPU by the device's own clock, gaps included."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.peak_memory: int | None = None  # bytes; a CPU's allocator keeps no such count
        self._asked = time.perf_counter()
        if self.cuda:
            torch.cuda.reset_peak_memory_stats(device)
            self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._begin.record()

    def data_is_here(self) -> None:
        self.data_wait = time.perf_counter() - self._asked  # seconds of the host, during which the device may work

    def stop(self) -> None:
        if self.cuda:
            self._end.record()
            self.peak_memory = torch.cuda.max_memory_allocated()
        else:
            self._stopped = time.perf_counter()

    def seconds(self) -> float:
        """Waits for the end of the step, if it is still under way."""
        if self.cuda:
            self._end.synchronize()
            return self._begin.elapsed_time(self._end) / 1e3
        return self._stopped - self._asked


@dataclass
class StepReport:
    """One reduced step, possibly still being computed; `read` waits for it."""

    known: dict[str, Any]  # what the host knows already, by the name that it has in the row
    layers: int
    # float64 on the host: ce, stop, grad_norm, skipped, skipped_in_row, then l1, nnz, overflow, dead, reinitialized [L]
    sums: Tensor
    copied: torch.cuda.Event | None
    clock: StepClock

    def read(self) -> "StepValues":
        if self.copied is not None:
            self.copied.synchronize()
        ce, stop, grad_norm, skipped, skipped_in_row, *rest = self.sums.tolist()
        per_layer = [rest[i * self.layers : (i + 1) * self.layers] or None for i in range(5)]
        return StepValues(
            self.known, ce, stop > 0, grad_norm, int(skipped), int(skipped_in_row), *per_layer,
            seconds=self.clock.seconds(), peak_memory=self.clock.peak_memory, data_wait=self.clock.data_wait,
        )  # fmt: skip


@dataclass
class StepValues:
    """The numbers of one step over the whole global batch, on the host."""

    known: dict[str, Any]
    ce: float  # sum over tokens, in nats
    stop: bool  # some rank has been asked to stop
    grad_norm: float
    skipped: int  # non-finite steps so far
    skipped_in_row: int
    l1: list[float] | None  # per layer: sum of |h|
    nnz: list[float] | None  # per layer
    overflow: list[float] | None
    dead: list[float] | None
    reinitialized: list[float] | None  # so far
    seconds: float
    peak_memory: int | None
    data_wait: float


def reduce_step(
    sums: StepSums,
    silent_tokens: Tensor | None,
    dead_after_tokens: int,
    reinitialized: Tensor | None,
    optimizer_state: tuple[Tensor, Tensor, Tensor],
    stop: bool,
    known: dict[str, Any],
    clock: StepClock,
) -> StepReport:
    """Reduce one step's numbers over the ranks and start copying them to the host. Collective.

    `optimizer_state`: (gradient norm, skipped, skipped in a row), 0-d, the same on all ranks. `silent_tokens`: reduced,
    int64 [L, N], or None without a ReLU. `reinitialized`: int64 [L], the same on all ranks, or None where it is off.
    """
    ce = sums.ce
    summed = [ce.reshape(1), torch.full_like(ce, float(stop)).reshape(1)]
    if sums.l1 is not None:
        summed += [sums.l1, sums.nnz.double(), sums.overflow.double()]
    summed = torch.cat(summed)
    dist.all_reduce(summed)
    same = torch.stack([value.double() for value in optimizer_state])
    dead = [] if silent_tokens is None else [(silent_tokens >= dead_after_tokens).sum(1).double()]
    drawn = [] if reinitialized is None else [reinitialized.double()]
    packed = torch.cat([summed[:2], same, summed[2:], *dead, *drawn])
    return StepReport(known, 0 if sums.l1 is None else len(sums.l1), *to_host(packed), clock)


def to_host(tensor: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """Start copying to the host: (the copy, the event after which it is there; None: it is)."""
    if not tensor.is_cuda:
        return tensor, None
    on_host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()
    return on_host, copied


class HeldOut(NamedTuple):
    """What a validation found."""

    ce: float  # nats per token
    tokens: int  # that `ce` is the mean of


class Rows:
    """Turns step values into rows: one shape for all runs, null for what does not exist, never NaN."""

    def __init__(self, config: Config, parameters: int, world_size: int, device: torch.device) -> None:
        self.config, self.parameters, self.world_size = config, parameters, world_size
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        self.peak_flops = next((flops for gpu, flops in PEAK_FLOPS.items() if gpu in name), None)

    def row(
        self, values: StepValues, l1_denominator: int, held_out: HeldOut | None, scores: dict[str, float | None] | None
    ) -> dict[str, Any]:
        config, model = self.config, self.config.model
        step_tokens = config.training.batch_size * config.training.sequence_length
        ce = values.ce / step_tokens
        l1 = None if values.l1 is None else sum(values.l1) / step_tokens / l1_denominator
        nnz = None if values.nnz is None else [count / step_tokens for count in values.nnz]
        tokens_per_s = step_tokens / values.seconds
        utilisation = self.peak_flops and mfu(
            tokens_per_s, self.parameters, model.num_layers, config.training.sequence_length, model.hidden_size,
            self.peak_flops * self.world_size,
        )  # fmt: skip
        row = {
            "step": values.known["step"],
            "tokens": values.known["tokens"],
            "loss": ce if l1 is None else ce + values.known["l1_coefficient"] * l1,
            "ce": ce,
            "val_ce": held_out and held_out.ce,
            "val_tokens": held_out and held_out.tokens,
            "evaluation": scores,
            "l1": l1,
            "nnz_mean": None if nnz is None else sum(nnz) / len(nnz),
            "nnz_per_layer": nnz,
            "dead_per_layer": None if values.dead is None else [int(count) for count in values.dead],
            "reinitialized_per_layer": values.reinitialized and [int(count) for count in values.reinitialized],
            "lr": values.known["lr"],
            "l1_coefficient": values.known["l1_coefficient"],
            "grad_norm": values.grad_norm,
            "skipped_steps": values.skipped,
            "tokens_per_s": tokens_per_s,
            "mfu": utilisation,
            "peak_memory_bytes": values.peak_memory,
            "data_wait_fraction": values.data_wait / values.seconds,
            "overflow": None if values.overflow is None else int(sum(values.overflow)),
            "plan_per_layer": values.known["plan_per_layer"],
            "ffn_saved_bytes": values.known["ffn_saved_bytes"],
        }
        return {key: _finite_or_none(value) for key, value in row.items()}


def _finite_or_none(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite_or_none(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl; a last line that a kill cut short is left out."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


class MetricsFile:
    """metrics.jsonl, begun anew after the rows up to `last_step`: what a resumed run has not done yet is cut off."""

    def __init__(self, path: Path, last_step: int) -> None:
        kept = [row for row in read(path) if row["step"] <= last_step]
        partial = path.with_name(path.name + ".partial")
        partial.write_text("".join(json.dumps(row, allow_nan=False) + "\n" for row in kept))
        partial.replace(path)
        self._file = path.open("a")

    def write(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Bring the rows to disk: a checkpoint that is there has its rows there."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
