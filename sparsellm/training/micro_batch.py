"""How many sequences a rank computes at a time: `runtime.micro_batch_size`, a number, or `auto` for what fits.

Sums over the tokens of the global batch make a step's gradients (training/loop.py), so the size of a micro-batch
changes rounding and nothing else. `auto` takes sizes that divide the rank's share of the global batch:

    the start    The largest size whose memory fits, by arithmetic (training/memory.py). Real forward and backward
                 passes check it, compiled as they will run; where they run out of memory on some rank, all ranks take
                 the next smaller size.
    growth       Sparse engines keep less, so later a larger size may fit. It is taken, after real passes, once the same
                 size has fitted at SETTLED decisions of the plans in a row and most layers are sparse. This happens
                 once, so at most two sizes are compiled. Should layers become dense again, so that it no longer fits,
                 the step goes back to the size of the start, and returns when it fits again.
    out of memory inside a step    One process computes the step again with half the size. Several ranks cannot, for
                 the others wait inside a collective: the run's folder gets the half, which the next start keeps to.

All ranks decide alike, from numbers that they agreed upon at the start and from plans, which are the same everywhere;
nothing waits for the device but the passes that check a size. The passes leave no trace: gradients are dropped, random
states restored, and counts never taken. A checkpoint holds the size, and for how many decisions a larger one has
fitted.

A deterministic run decides by arithmetic alone, and never grows. A run whose ranks share weights, gradients or
optimizer states decides by arithmetic alone, too, but may grow. Real passes would contain collectives there: a rank
that runs out of memory would never reach them, and the others would wait for it. On a CPU, whose memory is not
measured, `auto` is up to CPU_SEQUENCES.
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
from sparsellm.runs.metrics import StepSums
from sparsellm.system import regular
from sparsellm.system.console import warn
from sparsellm.system.errors import SparsellmError
from sparsellm.system.files import write_whole
from sparsellm.training.memory import GIB, UNMEASURED, UNSHARED, Gpu, StepMemory, Usage, give_back
from sparsellm.training.plans import Plans

AUTO = "auto"
RECORD = "micro_batch.json"  # in the run's folder, once several ranks have run out of memory
CPU_SEQUENCES = 16  # at most
MOST_TOKENS = 131_072  # of a micro-batch: more was never measured, and gains little
SETTLED = 4  # decisions of the plans, 32 steps
MARGIN = 0.02  # of the memory that a size needs by arithmetic, for what its allocations leave unused between them
# Minimum tokens per micro-batch when sharded: 4,096 was measured to be too few for the communication (docs/dev/LOG.md).
FEW_TOKENS = 8_192
LESS = "runtime.recompute=true or a shorter training.sequence_length needs less"


class MicroBatchError(SparsellmError, RuntimeError):
    """No size fits, or the size of an earlier start cannot be read. The same on all ranks."""


class OutOfMemory(MicroBatchError):
    """This rank, perhaps alone, ran out of memory inside a step. Others may wait for it inside a collective."""


class Growing(NamedTuple):
    """The size that would fit, and at how many decisions in a row it would have."""

    size: int
    decisions: int


class MicroBatch:
    """The sequences that each rank computes at a time, `size`, in every step of a run."""

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
        """`folder`: the run's. `gpu`: None on a CPU. `plans`: None where PyTorch traces the layers.

        `passes(tokens, size)`: forward and backward of tokens [B, T + 1], `size` sequences at a time, without any
        collective.
        """
        self.memory, self.ranks, self.folder, self.gpu, self.plans = memory, ranks, folder, gpu, plans
        self.passes, self.drop_gradients, self.share = passes, drop_gradients, memory.share
        given = memory.runtime.micro_batch_size
        self.auto = given == AUTO
        self.size = self.share if isinstance(given, str) else min(given, self.share)
        self.first = self.size  # that of the start, which fits even when all layers are dense
        self.grown: int | None = None
        self.growing = Growing(self.size, 0)
        self.most: int | None = None  # the largest size that is tried, once a larger one has run out of memory
        # Bytes, on the rank that has least.
        self.limit: int | None = None  # of the GPU, that the process may take
        self.capacity: int | None = None  # that a step may need by arithmetic (`_needed`); None: the size does not grow
        self.peak: int | None = None  # bytes, measured at the start
        self.tried: set[int] = set()  # sizes that were compiled
        self.restored = False
        self.beside = 0  # bytes that the process holds in addition to the model that it trains: a teacher's

    # The start.

    def choose(self) -> None:
        """Choose the size of a run that starts or goes on. Collective. Raises MicroBatchError if none fits."""
        if not self.auto:
            return
        self._read_record()
        if self.gpu is None:
            if not self.restored:
                self._take_first(max(size for size in self._sizes() if size <= CPU_SEQUENCES))
            return
        limit = min(gather(self.gpu.limit))
        if limit != self.limit:  # another GPU than the checkpoint's, or more or less of it
            self.limit, self.capacity, self.restored = limit, None, False
        if self.memory.runtime.deterministic:
            if not self.restored:
                self._take_first(self._largest(limit - UNMEASURED, self._sizes()))
            return
        self._use_all_libraries()
        available = min(gather(self.gpu.available()))
        size = self.size if self.restored else self._largest(available, self._sizes())
        # Bytes at the measured peak that the arithmetic does not count; assumed to be as many at any size.
        left_out = 0
        if self.memory.sharing == UNSHARED:
            size = self._check(size)
            assert self.peak is not None
            left_out = self.peak - self._needed(size)
            self.gpu.hold()  # again: the kernels' code that the passes have loaded counts towards the limit
        if not self.restored:
            self._take_first(size)
            self._advise(available)
        if self.capacity is None:
            self.capacity = min(gather(self.gpu.available() - left_out))

    def _use_all_libraries(self) -> None:
        """Let NCCL take, before memory is measured, the buffers that it takes when it is first used."""
        if self.ranks.world_size > 1:
            count = self.memory.runtime.ddp_bucket_mb * 2**20 // FLOAT32
            dist.all_reduce(torch.zeros(count, device=self.ranks.device))

    def _check(self, size: int) -> int:
        """`size`, or the largest smaller one, with which real passes fit on all ranks."""
        sizes = self._sizes()
        while True:
            self.peak = self._peak(size, self._random_tokens(size))
            if None not in gather(self.peak):
                return size
            smaller = [other for other in sizes if other < size]
            if not smaller:
                raise MicroBatchError(self._nothing_fits())
            self.ranks.say(f"sparsellm: micro-batch {size} ran out of memory; trying {smaller[-1]}")
            torch._dynamo.reset()  # a graph for each size would add up to more than it keeps
            size, self.restored, self.capacity = smaller[-1], False, None

    def _advise(self, available: int) -> None:
        """Say so where shards leave room for few tokens at a time, and recomputation would leave it for more.

        With each micro-batch shards send gradients, and with `full` weights too, however few its tokens are.
        """
        runtime, tokens = self.memory.runtime, self.size * self.memory.sequence_length
        if self.memory.sharing == UNSHARED or runtime.recompute or tokens >= FEW_TOKENS:
            return
        recomputing = replace(self.memory, runtime=replace(runtime, recompute=True))
        more = self._largest(available, self._sizes(), recomputing)
        if more > self.size:
            self.ranks.say(
                f"sparsellm: micro-batches of {tokens:,} tokens are small for what shards send with each of them;"
                f" runtime.recompute=true has room for {more} sequences instead of {self.size}, and may be faster"
            )

    def _take_first(self, size: int) -> None:
        self.first, self.grown, self.growing = size, None, Growing(size, 0)
        self._take(size)

    def _take(self, size: int) -> None:
        self.size = size
        if self.plans is not None:
            self.plans.resize(size)

    def _sizes(self) -> list[int]:
        """What divides the share, ascending."""
        most = min(self.most or self.share, max(1, MOST_TOKENS // self.memory.sequence_length))
        return [size for size in range(1, most + 1) if self.share % size == 0]

    def _plans(self) -> Sequence[Plan | None]:
        return [None] * self.memory.model.num_layers if self.plans is None else self.plans.plans

    def usage(self, size: int, memory: StepMemory | None = None) -> Usage:
        """The memory of a step with micro-batches of `size`, with the plans in effect. memory: None: the run's."""
        return (memory or self.memory).usage(size, self._plans())

    def _needed(self, size: int, memory: StepMemory | None = None) -> int:
        return self.usage(size, memory).total + self.beside

    def _largest(self, available: int, sizes: list[int], memory: StepMemory | None = None) -> int:
        """The largest of `sizes` that fits by arithmetic; the smallest if none does. memory: None: the run's."""
        fitting = [size for size in sizes if self._needed(size, memory) * (1 + MARGIN) <= available]
        return max(fitting, default=sizes[0])

    def _peak(self, size: int, tokens: Tensor) -> int | None:
        """Bytes at the peak of a step's passes over `tokens`, `size` sequences at a time; None: out of memory."""
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

    def _random_tokens(self, size: int) -> Tensor:
        """Two micro-batches, for memory is at its peak when the second adds to the gradients of the first; one, if a
        step has no more."""
        generator = torch.Generator().manual_seed(0)
        shape = min(2 * size, self.share), self.memory.sequence_length + 1
        return torch.randint(self.memory.model.vocab_size, shape, generator=generator)

    def _nothing_fits(self) -> str:
        assert self.gpu is not None
        needed = self._needed(1) / GIB
        return (
            f"not one sequence fits: training needs {needed:,.1f} GiB with micro-batch 1, and this GPU has"
            f" {self.gpu.available() / GIB:,.1f} GiB for it: {LESS}"
        )

    # Growth.

    def decided(self, step: int, tokens: Tensor) -> None:
        """Grow or go back, if the plans that were just decided ask for it; the same on all ranks, at the same steps.

        `tokens`: this rank's of `step`, which is about to be taken, [B, T + 1].
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
        give_back()  # blocks of the present size would be in the way of larger ones
        said = f"sparsellm: step {step:,}: "
        if self.memory.sharing == UNSHARED and None in gather(self._peak(size, tokens[: 2 * size])):
            self.most = self.size
            self.ranks.say(f"{said}micro-batch {size} was estimated to fit but ran out of memory; keeping {self.size}")
            return
        self.ranks.say(f"{said}layers are sparse: micro-batch {self.size} -> {size}")
        self.grown = size
        self._take(size)

    # Out of memory.

    def run(self, step: int, accumulate: Callable[[int], StepSums]) -> StepSums:
        """`accumulate(size)` for `step`; on one process again with half the size if memory runs out. Raises
        OutOfMemory."""
        while True:
            try:
                return accumulate(self.size)
            except torch.OutOfMemoryError:
                pass  # memory is freed after this block, for while the exception lives its frames hold tensors
            self.drop_gradients()
            give_back()
            self._halve(f"step {step:,}: out of memory with micro-batch {self.size}")

    def _halve(self, what: str) -> None:
        if not self.auto:
            raise OutOfMemory(
                f"{what}, as runtime.micro_batch_size says: half of it, or auto, needs less; the same command with that"
                " resumes from the newest checkpoint"
            )
        smaller = [size for size in self._sizes() if 2 * size <= self.size]
        if not smaller:
            raise OutOfMemory(f"{what}: {LESS}")
        if self.ranks.world_size > 1:
            record = {"most": smaller[-1], "because": f"rank {self.ranks.rank}, {what}"}
            path = self.folder / RECORD
            try:
                write_whole(path, json.dumps(record).encode())
            except OSError as error:
                raise OutOfMemory(
                    f"{what}. {path}, by which the next start would take {smaller[-1]}, cannot be written"
                    f" ({error.strerror}): give it runtime.micro_batch_size={smaller[-1]}"
                ) from error
            raise OutOfMemory(
                f"{what}. Started again, by torchrun --max-restarts or by the same command, the run goes on from the"
                f" newest checkpoint with micro-batch {smaller[-1]}"
            )
        self.most = smaller[-1]
        torch._dynamo.reset()  # as in `_check`, for validation has the new size, too
        self._take_first(smaller[-1])
        warn(f"{what}: repeating the step with {self.size}")

    def _read_record(self) -> None:
        """Keep to what an earlier start of several ranks found out."""
        path = self.folder / RECORD

        def read() -> int | None:
            if not path.exists():
                return None
            try:
                record = json.loads(regular.content(path))
                most, because = int(record["most"]), record["because"]
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise MicroBatchError(
                    f"{path} cannot be read ({error}): it says how many sequences fit. Remove it to find that out again"
                ) from error
            warn(f"micro-batch at most {most}: {because} ({path}; without it all sizes are tried)")
            return most

        most = on_main(self.ranks, read)
        if most is None:
            return
        self.most = min(most, self.most or most)
        if max(self.size, self.grown or 0) > self.most:  # it may have gone back, and would return
            self.restored = False

    # What a checkpoint holds, and what people see.

    def state(self) -> dict[str, Any] | None:
        """All that later steps depend on, for JSON; None where the size was given."""
        if not self.auto:
            return None
        return {
            "share": self.share, "size": self.size, "first": self.first, "grown": self.grown, "most": self.most,
            "limit": self.limit, "capacity": self.capacity, "growing": self.growing,
        }  # fmt: skip

    def restore(self, state: dict[str, Any] | None) -> None:
        """Go on as `state` says, if the size is not given, and each rank has as many sequences as then."""
        if not self.auto or state is None or state["share"] != self.share:
            return
        self.first, self.grown, self.most = state["first"], state["grown"], state["most"]
        self.limit, self.capacity, self.growing = state["limit"], state["capacity"], Growing(*state["growing"])
        self.restored = True
        self.tried = {state["size"], self.first}
        self._take(state["size"])

    def __str__(self) -> str:
        """Its sequences, and what memory is used for, in GiB; by arithmetic, where no passes were measured."""
        said = f"{self.size} of {self.share} sequences at a time"
        if self.gpu is None:
            return said
        found, peak, available = self.usage(self.size), self.peak, self.gpu.available()
        total = found.total + self.beside if peak is None else peak
        parts = {
            "weights": found.weights, "optimizer": found.optimizer, "gradients": found.gradients,
            "buckets": found.buckets, "activations": found.activations + total - found.total - self.beside,
        }  # fmt: skip
        if self.beside:
            parts["teacher"] = self.beside
        said += ": " + ", ".join(f"{name} {size / GIB:,.1f}" for name, size in parts.items())
        left = (available - total) / GIB
        said += f" GiB; {'estimated ' * (peak is None)}peak {total / GIB:,.1f} GiB of {available / GIB:,.1f} GiB"
        return f"{said} ({abs(left):,.1f} GiB {'free' if left >= 0 else 'too much'})"
