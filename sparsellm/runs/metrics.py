"""Metrics of training steps: summed on the device, reduced over ranks, and written as rows of metrics.jsonl.

A row holds one step's values over the global batch. They are reduced and copied asynchronously, and read while the next
step is running, so that logging never stalls the device. A rank's stop request is reduced together with the values, so
that all ranks see it at the same step.
"""

import itertools
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from sparsellm.config import (
    DistillConfig,
    ModelConfig,
    SparsityConfig,
    TrainingConfig,
    l1_denominator,
)
from sparsellm.model import DecoderOutput
from sparsellm.ops.host_copy import to_host
from sparsellm.runs.divergence import LossRange
from sparsellm.runs.mfu import mfu, peak_flops
from sparsellm.system import regular
from sparsellm.system.console import quantity, warn
from sparsellm.system.errors import SparsellmError, listed
from sparsellm.system.files import unused, write_whole

METRICS = "metrics.jsonl"
NAMED = "validation_ce/"  # the key validation_ce/NAME is the held-out cross entropy of the data.mix source NAME
LONGEST_ROW = 1 << 24  # bytes; a row for 100 layers has about 10,000. `history` stops reading at a longer line.
NAMED_PROBLEMS = 3  # maximum number of problems listed for a damaged file


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
    union: Any = None
    fullest: Any = None  # float64 [L]: maximum over micro-batches of nonzeros per token

    def add(self, out: DecoderOutput, tokens: int) -> None:
        """Add the output of a micro-batch of `tokens` tokens."""
        for name in ("ce", "kl", "l1"):
            value = getattr(out, name)
            self._combine(name, None if value is None else value.detach().double(), torch.add)
        for name in ("nnz", "wide_segments", "rest_calls", "union"):
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
    dead: list[float] | None = None
    reinitialized: list[float] | None = None


def reduce_step(
    sums: StepSums,
    silent_tokens: Tensor | None,
    dead_after_tokens: int,
    reinitialized: Tensor | None,
    optimizer_state: tuple[Tensor, Tensor, Tensor],
    stop: bool,
    mj_per_token: float,
    known: dict[str, Any],
    clock: StepClock,
) -> StepReport:
    """Reduce one step's values over the ranks and start copying them to the host. Collective.

    `optimizer_state`: (gradient norm, skipped, skipped in a row), 0-d, the same on all ranks. `silent_tokens`: int64
    [L, N], already reduced, or None for SiLU models. `reinitialized`: int64 [L], the same on all ranks, or None if
    disabled. `mj_per_token`: energy of this rank's GPU per token of the global batch.
    """
    summed = {
        "ce": sums.ce, "stop": torch.full_like(sums.ce, stop),
        "kl": torch.zeros_like(sums.ce) if sums.kl is None else sums.kl, "l1": sums.l1, "nnz": sums.nnz,
        "wide_segments": sums.wide_segments, "rest_calls": sums.rest_calls,
        "mj_per_token": torch.full_like(sums.ce, mj_per_token),
    }  # fmt: skip
    names = ("grad_norm", "skipped", "skipped_in_row")
    same: dict[str, Tensor | None] = dict(zip(names, optimizer_state, strict=True))
    same["dead"] = None if silent_tokens is None else (silent_tokens >= dead_after_tokens).sum(1)
    same["reinitialized"] = reinitialized
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


def scalars(row: dict[str, Any]) -> dict[str, float]:
    """A row's numbers by name, for tools that draw one curve per name. A layer's number is named KEY/LAYER."""
    flat: dict[str, float] = {}
    for key, value in row.items():
        if key == "plan_per_layer":
            flat["tile_layers"] = value.count("tile")
        elif isinstance(value, list):
            flat |= {f"{key}/{layer:02d}": each for layer, each in enumerate(value)}
        elif isinstance(value, dict):  # the same names as in WandbRun.evaluation
            named = {"step": row["step"], **value}
            flat |= {f"{key}/{name}": each for name, each in named.items() if each is not None}
        elif value is not None:
            flat[key] = value
    return flat


def _finite_or_none(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite_or_none(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class MetricsError(SparsellmError, RuntimeError):
    """metrics.jsonl is damaged or cannot be written."""


class Saved(NamedTuple):
    """Size and checksum of metrics.jsonl when a checkpoint was saved; stored in the checkpoint under "metrics"."""

    bytes: int
    xxh3: str  # checksum of the first `bytes` bytes


class History(NamedTuple):
    """The content of a metrics.jsonl file."""

    rows: list[dict[str, Any]]  # readable rows, ordered by step
    problems: list[str]  # everything else, with line numbers, except a last line truncated by a kill

    def report(self, path: Path) -> str:
        """A message that lists the problems in the file at `path`."""
        return f"{path} is damaged: {listed(self.problems, NAMED_PROBLEMS, '; ')}"


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


# Validators for each key's value, applied unless the value is null. Keys may be missing, except those in ALWAYS.
KINDS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(
        (
            "step", "tokens", "val_tokens", "skipped_steps", "wide_segments", "rest_calls", "micro_batch_size",
            "peak_memory_bytes", "ffn_saved_bytes",
        ),
        lambda value: type(value) is int and value >= 0,
    ),
    **dict.fromkeys(
        (
            "loss", "ce", "val_ce", "l1", "nnz_mean", "lr", "l1_coefficient", "grad_norm", "tokens_per_s", "mfu",
            "mj_per_token", "data_wait_fraction", "relu_share", "distill_kl",
        ),
        _is_number,
    ),
    **dict.fromkeys(
        ("nnz_per_layer", "dead_per_layer", "reinitialized_per_layer"),
        lambda value: type(value) is list and all(map(_is_number, value)),
    ),
    "plan_per_layer": lambda value: type(value) is list and all(type(engine) is str for engine in value),
    "evaluation": lambda value: type(value) is dict and "mean" in value and all(
        score is None or _is_number(score) for score in value.values()
    ),
}  # fmt: skip
ALWAYS = ("step",)
# Keys that summaries and curves need in every row.
NEVER_NULL = ("step", "tokens", "tokens_per_s", "l1_coefficient", "skipped_steps")
IN_EVERY_ROW = (
    *NEVER_NULL, "loss", "ce", "val_ce", "val_tokens", "evaluation", "nnz_mean", "nnz_per_layer", "dead_per_layer",
    "reinitialized_per_layer",
)  # fmt: skip


def history(
    path: Path, saved: Saved | None = None, needed: Sequence[str] = ALWAYS, layers: int | None = None
) -> History:
    """The rows in a metrics.jsonl file, and the problems found.

    `saved`: the file's size and checksum when a checkpoint was saved. `needed`: keys that every row must have.
    `layers`: the length that every list in a row must have. A missing file is a problem only if `saved` is not None.
    """
    rows: list[dict[str, Any]] = []
    problems: list[str] = []
    size, digest = 0, xxhash.xxh3_64()
    try:
        with regular.to_read(path) as file:
            for number in itertools.count(1):
                line = file.readline(LONGEST_ROW)
                if saved is not None:
                    digest.update(line[: max(0, saved.bytes - size)])
                size += len(line)
                if not line.endswith(b"\n"):  # the end of the file, or a last line truncated by a kill
                    if len(line) == LONGEST_ROW:
                        problems.append(
                            f"line {number}: it is longer than {LONGEST_ROW:,} bytes; later lines are not read"
                        )
                    break
                try:
                    row = _parsed(line[:-1], needed, layers)
                    if rows and row["step"] <= rows[-1]["step"]:
                        raise ValueError(f"its step {row['step']} comes after step {rows[-1]['step']}")
                    rows.append(row)
                except (ValueError, OverflowError) as error:  # OverflowError: an integer too large for a float
                    problems.append(f"line {number}: {error}")
    except FileNotFoundError:
        return History([], [] if saved is None else [f"the file is missing, but {saved.bytes:,} bytes were saved"])
    except OSError as error:
        return History([], [f"it cannot be read ({error.strerror})"])
    if saved is not None and digest.hexdigest() != saved.xxh3:
        if size < saved.bytes and len(line) < LONGEST_ROW:
            problems.append(f"it has {size:,} bytes, but {saved.bytes:,} were saved")
        elif not problems:
            problems.append(f"its first {saved.bytes:,} bytes differ from those that were saved")
    return History(rows, problems)


def _parsed(line: bytes, needed: Sequence[str], layers: int | None) -> dict[str, Any]:
    """Parse a row. Raises ValueError, naming the problem, if the line is not a valid row."""
    if not line.strip():
        raise ValueError("it is blank")
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start + 1} is not UTF-8") from None
    except (ValueError, RecursionError):
        raise ValueError("it is not JSON") from None
    if not isinstance(row, dict):
        raise ValueError(f"it holds a JSON {type(row).__name__}: it should hold an object")
    for key in dict.fromkeys((*ALWAYS, *needed)):
        if key not in row or (key in NEVER_NULL and row[key] is None):
            raise ValueError(f"it has no {key}")
    for key, is_right in (*KINDS.items(), *((key, _is_number) for key in row if key.startswith(NAMED))):
        value = row.get(key)
        fits = not isinstance(value, list) or layers in (None, len(value))
        if value is not None and not (is_right(value) and fits):
            raise ValueError(f"its {key} cannot be {value!r:.40}")
    return row


def telling(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows used by a model card, ordered by step: the last, the last validated and the last evaluated row.

    Rows with missing keys, which may exist after run.skip_damaged=true, are left out.
    """
    complete = [row for row in rows if all(key in row for key in IN_EVERY_ROW)]
    validated = [row for row in complete if row["val_ce"] is not None]
    evaluated = [row for row in complete if row["evaluation"]]
    last = {row["step"]: row for row in (*complete[-1:], *validated[-1:], *evaluated[-1:])}
    return sorted(last.values(), key=lambda row: row["step"])


def read(path: Path) -> list[dict[str, Any]]:
    """The rows in a metrics.jsonl file. Skips damaged lines with a warning, and silently a truncated last line."""
    found = history(path)
    if found.problems:
        warn(f"{found.report(path)}; these lines are skipped")
    return found.rows


class MetricsFile:
    """metrics.jsonl, truncated after the row for `last_step`, because a resumed run writes later rows again.

    Rows that cannot be written, because the disk is full, are kept in memory and retried with the next row. Another
    thread may read `telling`, the rows that the model card uses. `loss_range` covers the rows up to `last_step`.
    """

    def __init__(self, path: Path, last_step: int, saved: Saved | None = None, skip_damaged: bool = False) -> None:
        """`saved`: length and hash of the file, as stored in the checkpoint of `last_step`; None without a checkpoint.

        Raises MetricsError if rows up to `last_step` are damaged or missing. With `skip_damaged`, readable rows are
        kept, and the damaged file is renamed to metrics.jsonl.damaged, with a warning.
        """
        self.path = path
        found = history(path, saved)
        kept = [row for row in found.rows if row["step"] <= last_step]
        content = b""
        if saved is not None:
            with suppress(FileNotFoundError), regular.to_read(path) as file:
                content = file.read(min(saved.bytes, os.fstat(file.fileno()).st_size))
        if saved is not None and xxhash.xxh3_64_hexdigest(content) != saved.xxh3:
            what = found.report(path)
            if not skip_damaged:
                raise MetricsError(
                    f"{what}. The checkpoint to resume from is intact: restore the file, or continue with the"
                    f" {quantity(len(kept), 'readable row')} with run.skip_damaged=true, which keeps a copy of the"
                    " damaged file"
                )
            aside = unused(path.with_name(path.name + ".damaged"))
            if path.exists():
                path.rename(aside)
            warn(f"{what}; kept {quantity(len(kept), 'row')}, and renamed the damaged file to {aside.name}")
            content = b"".join(map(_line, kept))
        elif len(found.rows) > len(kept):
            cut = len(found.rows) - len(kept)
            warn(f"{path}: removed {quantity(cut, 'row')} that the resumed run will write again")
        write_whole(path, content)
        self._file = regular.to_write(path, "r+b", buffering=0)
        self._bytes, self._digest = len(content), xxhash.xxh3_64(content)  # size and hash of the file so far
        self.telling = telling(kept)
        self.loss_range = LossRange(kept)
        self.waiting: list[bytes] = []  # rows that could not be written yet

    def write(self, row: dict[str, Any]) -> None:
        """Append `row`. Raises OSError if the file cannot be written; `sync` or the next `write` retries the row."""
        self.waiting.append(_line(row))
        self.telling = telling([*self.telling, row])
        self._flush()

    def sync(self) -> None:
        """Sync all rows to disk. Call this before a checkpoint is written. Raises OSError if rows cannot be written."""
        self._flush()
        os.fsync(self._file.fileno())

    def is_gone(self) -> bool:
        """Whether the file was removed or replaced, which loses the rows written so far."""
        try:
            return not os.path.samestat(self.path.stat(), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return True

    def saved(self) -> Saved:
        return Saved(self._bytes, self._digest.hexdigest())

    def close(self) -> None:
        self._file.close()

    def _flush(self) -> None:
        while self.waiting:
            line = self.waiting[0]
            self._file.seek(self._bytes)
            written = 0
            try:
                while written < len(line):
                    written += self._file.write(line[written:])
            except OSError:
                self._file.truncate(self._bytes)  # no partial row
                raise
            del self.waiting[0]
            self._bytes += len(line)
            self._digest.update(line)


def _line(row: dict[str, Any]) -> bytes:
    return (json.dumps(row, allow_nan=False) + "\n").encode()
