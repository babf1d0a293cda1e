"""The micro-batch size, in sequences per rank: `runtime.micro_batch_size`, a number or `auto` (the largest that fits).

docs/TRAINING.md, "Micro-batch size and memory", describes how `auto` chooses a size that divides the rank's share of
the global batch, grows it once layers are sparse, and halves it when memory runs out. A step's gradients are sums over
the tokens of the global batch (training/loop.py), so the size only changes rounding.

All ranks make the same decisions, because they use the same plans and the limits agreed on at the start. Only the
forward and backward passes that check a size wait for the device. These passes leave no trace: gradients are cleared,
random states restored, and counts ignored. The size grows only once, so at most two sizes are compiled.

Deterministic runs rely on the estimate alone and never increase the size. Sharded runs also rely on the estimate, but
may increase the size: a check would contain collectives, which a rank that runs out of memory would never reach. On a
CPU, `auto` does not measure memory and chooses at most CPU_SEQUENCES.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from sparsellm.config import FLOAT32
from sparsellm.distributed.groups import Ranks, gather, on_main
from sparsellm.ops import Engine, Plan
from sparsellm.runs.step_metrics import StepSums
from sparsellm.system import regular
from sparsellm.system.console import quantity, warn
from sparsellm.system.errors import SparsellmError
from sparsellm.system.files import write_whole
from sparsellm.training.memory import GIB, UNMEASURED, UNSHARED, Gpu, StepMemory, Usage, give_back
from sparsellm.training.plans import Plans

AUTO = "auto"
RECORD = "micro_batch.json"  # in the run's folder, written when a run of several ranks has run out of memory
CPU_SEQUENCES = 16  # largest size on a CPU
MOST_TOKENS = 131_072  # maximum tokens per micro-batch; more was not measured, and should gain little
SETTLED = 4  # a larger size must fit at this many plan decisions in a row (32 steps) before it is used
MARGIN = 0.02  # fraction of the estimated memory that is reserved for fragmentation
# Minimum tokens per micro-batch of a sharded run: 4,096 were too few for its communication (docs/dev/LOG.md).
FEW_TOKENS = 8_192
LESS = "use runtime.recompute=true or a shorter training.sequence_length"


class MicroBatchError(SparsellmError, RuntimeError):
    """No size fits, or the size recorded by an earlier start cannot be read. Raised on all ranks."""


class OutOfMemory(MicroBatchError):
    """This rank, perhaps alone, ran out of memory inside a step. Other ranks may be waiting for it in a collective."""


class Growing(NamedTuple):
    """A larger size that would fit, and the number of consecutive plan decisions at which it did."""

    size: int
    decisions: int


class MicroBatch:
    """Chooses `size`, the micro-batch size of a run's steps."""

    def __init__(
        self,
        memory: StepMemory,
        ranks: Ranks,
        folder: Path,
        gpu: Gpu | None,
        plans: Plans | None,
        passes: Callable[[Tensor, int], object],
        drop_gradients: Callable[[], None],
    ) -> None:
        """`folder`: the run's folder. `gpu`: None on a CPU. `plans`: None if PyTorch traces the layers.

        `passes(tokens, size)`: runs forward and backward over tokens [B, T + 1], `size` sequences at a time, without
        collectives.
        """
        self.memory, self.ranks, self.folder, self.gpu, self.plans = memory, ranks, folder, gpu, plans
        self.passes, self.drop_gradients, self.share = passes, drop_gradients, memory.share
        given = memory.runtime.micro_batch_size
        self.auto = given == AUTO
        self.size = self.share if isinstance(given, str) else min(given, self.share)
        self.first = self.size  # initial size, which fits even if all layers are dense
        self.grown: int | None = None  # the larger size, once the run has grown
        self.growing = Growing(self.size, 0)
        self.most: int | None = None  # maximum size, set after a larger size ran out of memory
        self.limit: int | None = None  # bytes that a process may use on its GPU, minimum over ranks
        self.capacity: int | None = None  # bytes that `_needed` must not exceed; None: the size does not grow
        self.peak: int | None = None  # bytes, measured at the start
        self.tried: set[int] = set()  # sizes that have been compiled
        self.restored = False  # whether the size comes from a checkpoint
        self.teacher_bytes = 0  # memory of the teacher, in addition to the trained model's

    def choose(self) -> None:
        """Choose the size when a run starts or resumes. Collective. Raises MicroBatchError if none fits."""
        if not self.auto:
            return
        self._read_record()
        if self.gpu is None:
            if not self.restored:
                self._take_first(max(size for size in self._sizes() if size <= CPU_SEQUENCES))
            return
        limit = min(gather(self.gpu.limit))
        if limit != self.limit:  # a new run, or a checkpoint from another GPU or another limit
            self.limit, self.capacity, self.restored = limit, None, False
        if self.memory.runtime.deterministic:
            if not self.restored:
                self._take_first(self._largest(limit - UNMEASURED, self._sizes()))
            return
        if self.ranks.world_size > 1:  # NCCL allocates its buffers on first use, so use it before measuring memory
            count = self.memory.runtime.ddp_bucket_mb * 2**20 // FLOAT32
            dist.all_reduce(torch.zeros(count, device=self.ranks.device))
        available = min(gather(self.gpu.available()))
        size = self.size if self.restored else self._largest(available, self._sizes())
        left_out = 0  # bytes of the measured peak that the estimate misses; assumed to be the same at any size
        if self.memory.sharing == UNSHARED:
            size = self._check(size)
            assert self.peak is not None
            left_out = self.peak - self._needed(size)
            self.gpu.hold()  # again, because the passes have loaded kernels, whose code counts towards the limit
        if not self.restored:
            self._take_first(size)
            self._advise(available)
        if self.capacity is None:
            self.capacity = min(gather(self.gpu.available() - left_out))

    def _check(self, size: int) -> int:
        """The largest size, at most `size`, with which passes over random tokens fit in memory on all ranks."""
        assert self.gpu is not None
        while True:
            # Up to two micro-batches, because memory peaks when the second adds to the gradients of the first.
            shape = min(2 * size, self.share), self.memory.sequence_length + 1
            generator = torch.Generator().manual_seed(0)
            self.peak = self._peak(size, torch.randint(self.memory.model.vocab_size, shape, generator=generator))
            if None not in gather(self.peak):
                return size
            smaller = [other for other in self._sizes() if other < size]
            if not smaller:
                raise MicroBatchError(
                    f"not even one sequence fits: training needs {self._needed(1) / GIB:,.1f} GiB with micro-batch 1,"
                    f" and this GPU has {self.gpu.available() / GIB:,.1f} GiB for it: {LESS}"
                )
            self.ranks.say(f"sparsellm: micro-batch {size} ran out of memory; trying {smaller[-1]}")
            torch._dynamo.reset()  # graphs of many sizes would exceed dynamo's limit
            size, self.restored, self.capacity = smaller[-1], False, None

    def _advise(self, available: int) -> None:
        """Suggest recomputation if a sharded run has memory for only few tokens per micro-batch, because each
        micro-batch communicates all gradients (with runtime.shard=full also weights), however few tokens it has."""
        runtime, tokens = self.memory.runtime, self.size * self.memory.sequence_length
        if self.memory.sharing == UNSHARED or runtime.recompute or tokens >= FEW_TOKENS:
            return
        recomputing = replace(self.memory, runtime=replace(runtime, recompute=True))
        more = self._largest(available, self._sizes(), recomputing)
        if more > self.size:
            self.ranks.say(
                f"sparsellm: {tokens:,} tokens per micro-batch are few for the communication of a sharded model;"
                f" runtime.recompute=true allows micro-batch {more} instead of {self.size} and may be faster"
            )

    def _take_first(self, size: int) -> None:
        self.first, self.grown, self.growing = size, None, Growing(size, 0)
        self._take(size)

    def _take(self, size: int) -> None:
        self.size = size
        if self.plans is not None:
            self.plans.resize(size)

    def _sizes(self) -> list[int]:
        """The possible sizes: divisors of `share`, ascending."""
        most = min(self.most or self.share, max(1, MOST_TOKENS // self.memory.sequence_length))
        return [size for size in range(1, most + 1) if self.share % size == 0]

    def _plans(self) -> Sequence[Plan | None]:
        return [None] * self.memory.model.num_layers if self.plans is None else self.plans.plans

    def ffn_saved_bytes(self) -> int | None:
        """The result of `StepMemory.ffn_saved_bytes` for the current size and plans."""
        return self.memory.ffn_saved_bytes(self.size, self._plans())

    def usage(self, size: int, memory: StepMemory | None = None) -> Usage:
        """The estimated memory of a step with micro-batches of `size` sequences and the current plans."""
        return (memory or self.memory).usage(size, self._plans())

    def _needed(self, size: int, memory: StepMemory | None = None) -> int:
        return self.usage(size, memory).total + self.teacher_bytes

    def _largest(self, available: int, sizes: list[int], memory: StepMemory | None = None) -> int:
        """The largest of `sizes` whose estimate plus MARGIN is at most `available` bytes, or the smallest of them."""
        fitting = [size for size in sizes if self._needed(size, memory) * (1 + MARGIN) <= available]
        return max(fitting, default=sizes[0])

    def _peak(self, size: int, tokens: Tensor) -> int | None:
        """Peak bytes of a step's passes over `tokens` with micro-batches of `size`; None if memory ran out."""
        assert self.gpu is not None

        def passes() -> None:
            self.passes(tokens, size)
            self.drop_gradients()

        self.tried.add(size)
        device = self.ranks.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            peak = self.gpu.peak_of(passes)
        self.drop_gradients()
        give_back()
        return peak

    def decided(self, step: int, tokens: Tensor) -> None:
        """Grow or shrink the size, depending on the plans that were just decided. All ranks do so at the same steps.

        `tokens`: this rank's tokens of the upcoming `step`, [B, T + 1].
        """
        if self.capacity is None:
            return
        if self.grown is not None:
            size = self._largest(self.capacity, [self.first, self.grown])
            if size != self.size:
                self.ranks.say(f"sparsellm: step {step:,}: memory allows a micro-batch of {size} again")
                self._take(size)
            return
        sizes = [size for size in self._sizes() if len(self.tried) < 2 or size in self.tried]
        size = max(self.size, self._largest(self.capacity, sizes))
        decisions = self.growing.decisions + 1 if size == self.growing.size else 1
        self.growing = Growing(size, decisions)
        plans = [plan for plan in self._plans() if plan is not None]
        sparse = sum(plan.engine == Engine.tile for plan in plans)
        if size > self.size and decisions >= SETTLED and 2 * sparse > len(plans):
            self._grow(step, size, tokens)

    def _grow(self, step: int, size: int, tokens: Tensor) -> None:
        give_back()  # otherwise the cached blocks of the current size would fragment memory
        said = f"sparsellm: step {step:,}: "
        if self.memory.sharing == UNSHARED and None in gather(self._peak(size, tokens[: 2 * size])):
            self.most = self.size
            self.ranks.say(f"{said}micro-batch {size} was estimated to fit but ran out of memory; keeping {self.size}")
            return
        self.ranks.say(f"{said}layers are sparse: micro-batch {self.size} -> {size}")
        self.grown = size
        self._take(size)

    def run(self, step: int, accumulate: Callable[[int], StepSums]) -> StepSums:
        """Run `accumulate(size)` for `step`. If memory runs out, retry with half the size, or raise OutOfMemory."""
        while True:
            try:
                return accumulate(self.size)
            except torch.OutOfMemoryError:
                pass  # memory is freed below, because the exception's frames hold tensors
            self.drop_gradients()
            give_back()
            self._halve(f"step {step:,}: out of memory with micro-batch {self.size}")

    def _halve(self, what: str) -> None:
        if not self.auto:
            raise OutOfMemory(
                f"{what}, set by runtime.micro_batch_size: run the same command with half of it, or with auto, to"
                " resume from the newest checkpoint"
            )
        smaller = [size for size in self._sizes() if 2 * size <= self.size]
        if not smaller:
            raise OutOfMemory(f"{what}: {LESS}")
        if self.ranks.world_size > 1:
            path, because = self.folder / RECORD, f"rank {self.ranks.rank}, {what}"
            try:
                write_whole(path, json.dumps({"most": smaller[-1], "because": because}).encode())
            except OSError as error:
                raise OutOfMemory(
                    f"{what}. {path}, which limits the next start to {smaller[-1]}, cannot be written"
                    f" ({error.strerror}): set runtime.micro_batch_size={smaller[-1]}"
                ) from error
            raise OutOfMemory(
                f"{what}. Restarted, by torchrun --max-restarts or by the same command, the run resumes from the"
                f" newest checkpoint with micro-batch {smaller[-1]}"
            )
        self.most = smaller[-1]
        torch._dynamo.reset()  # graphs of many sizes would exceed dynamo's limit
        self._take_first(smaller[-1])
        warn(f"{what}: repeating the step with {self.size}")

    def _read_record(self) -> None:
        """Apply the maximum size recorded by an earlier start with several ranks."""
        path = self.folder / RECORD

        def read() -> int | None:
            if not path.exists():
                return None
            try:
                record = json.loads(regular.content(path))
                most, because = int(record["most"]), record["because"]
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise MicroBatchError(
                    f"{path} cannot be read ({error}): it limits the micro-batch size. Remove it to try all sizes again"
                ) from error
            warn(f"the micro-batch size is limited to {most}: {because} (remove {path} to try all sizes again)")
            return most

        most = on_main(self.ranks, read)
        if most is None:
            return
        self.most = min(most, self.most or most)
        if max(self.size, self.grown or 0) > self.most:  # `grown` counts even if unused now: it may return
            self.restored = False

    def state(self) -> dict[str, Any] | None:
        """The state that later steps depend on, JSON-serializable. None unless the size is `auto`."""
        if not self.auto:
            return None
        return {
            "share": self.share, "size": self.size, "first": self.first, "grown": self.grown, "most": self.most,
            "limit": self.limit, "capacity": self.capacity, "growing": self.growing,
        }  # fmt: skip

    def restore(self, state: dict[str, Any] | None) -> None:
        """Restore what `state` returned, if the size is `auto` and each rank has as many sequences as before."""
        if not self.auto or state is None or state["share"] != self.share:
            return
        self.first, self.grown, self.most = state["first"], state["grown"], state["most"]
        self.limit, self.capacity, self.growing = state["limit"], state["capacity"], Growing(*state["growing"])
        self.restored = True
        self.tried = {state["size"], self.first}
        self._take(state["size"])

    def __str__(self) -> str:
        """The size, and a breakdown of memory in GiB, which is an estimate unless passes were measured."""
        said = f"{self.size} of {quantity(self.share, 'sequence')}"
        if self.gpu is None:
            return said
        found, peak, available = self.usage(self.size), self.peak, self.gpu.available()
        total = found.total + self.teacher_bytes if peak is None else peak
        parts = {
            "weights": found.weights, "optimizer": found.optimizer, "gradients": found.gradients,
            "buckets": found.buckets, "activations": found.activations + total - found.total - self.teacher_bytes,
        }  # fmt: skip
        if self.teacher_bytes:
            parts["teacher"] = self.teacher_bytes
        said += ": " + ", ".join(f"{name} {size / GIB:,.1f}" for name, size in parts.items())
        left = (available - total) / GIB
        said += f" GiB; {'estimated ' * (peak is None)}peak {total / GIB:,.1f} GiB of {available / GIB:,.1f} GiB"
        return f"{said} ({abs(left):,.1f} GiB {'free' if left >= 0 else 'too much'})"
