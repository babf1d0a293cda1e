"""The micro-batch size, in sequences per rank, and whether layers are recomputed in the backward pass.

`runtime.micro_batch_size` is a number, or `auto`: the largest size that fits. `runtime.recompute` is true, false, or
`auto`: recompute if the larger micro-batches that then fit are estimated to save more time than recomputation costs.
docs/TRAINING.md, "Micro-batch size and memory", describes how `auto` chooses a size that divides the rank's share of
the global batch, grows it once layers are sparse, and halves it when memory runs out. A step's gradients are sums over
the tokens of the global batch (training/loop.py), so the size only changes rounding. Recomputation changes nothing.

All ranks make the same decisions, because they use the same plans and the limits agreed on at the start. Only two
things wait for the device: the forward and backward passes that check a size, and the release of cached blocks after
plans changed while memory is tight. The passes leave no trace: gradients are cleared, random states restored, and
counts ignored. The size grows only once, so at most two sizes are compiled.

Deterministic runs rely on the estimate alone and never increase the size. Sharded runs also rely on the estimate, but
may increase the size: a check would contain collectives, which a rank that runs out of memory would never reach. On a
CPU, `auto` does not measure memory and chooses at most CPU_SEQUENCES.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from sparsellm.config import FLOAT32, Shard
from sparsellm.distributed.groups import Ranks, gather, on_main
from sparsellm.model import Decoder
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
WORTH = 0.01  # fraction of a step's time that a larger size must save: it compiles anew and needs more memory
MARGIN = 0.02  # fraction of the estimated memory that is reserved for fragmentation
# If less than this fraction of the estimate is free, casts are not shared, and cached blocks are released when plans
# change.
TIGHT = 0.1
RECOMPUTING = 4 / 3  # time of a step that recomputes: two forward passes and a backward pass are 8 FLOP instead of 6
# Each micro-batch also casts weights, adds gradients and communicates, which takes as long as computing this many
# tokens; less since micro-batches share casts, which was not measured. Solved from pairs of measured speeds: two sizes
# of 1.5B and of 2B, and the three values of runtime.shard for 1.5B and 7B on two GPUs (docs/RESULTS.md, "Sharded
# training" and "Dense training"). They predict the speed of 2B that recomputes, 0.79 of the speed without
# recomputation, to 1%.
PER_MICRO_BATCH = {Shard.none: 800, Shard.optimizer: 1_400, Shard.full: 2_600}


class MicroBatchError(SparsellmError, RuntimeError):
    """No size fits, or the size recorded by an earlier start cannot be read. Raised on all ranks."""


class OutOfMemory(MicroBatchError):
    """This rank, perhaps alone, ran out of memory inside a step. Other ranks may be waiting for it in a collective."""


class Setting(NamedTuple):
    """How a step computes: sequences per micro-batch, and whether layers are recomputed in the backward pass."""

    size: int
    recompute: bool = False

    def __str__(self) -> str:
        return f"{self.size}{' with recomputation' if self.recompute else ''}"


class Growing(NamedTuple):
    """A faster setting that would fit, and the number of consecutive plan decisions at which it did."""

    setting: Setting
    decisions: int


def _remedy(setting: Setting) -> str:
    return f"use {'' if setting.recompute else 'runtime.recompute=true or '}a shorter training.sequence_length"


class MicroBatch:
    """Chooses `setting`, the micro-batch size and the recomputation of a run's steps."""

    def __init__(
        self,
        memory: StepMemory,
        ranks: Ranks,
        folder: Path,
        gpu: Gpu | None,
        plans: Plans | None,
        decoder: Decoder,
        passes: Callable[[Tensor, int], object],
        drop_gradients: Callable[[], None],
    ) -> None:
        """`folder`: the run's folder. `gpu`: None on a CPU. `plans`: None if PyTorch traces the layers.

        `passes(tokens, size)`: runs forward and backward over tokens [B, T + 1], `size` sequences at a time, without
        collectives.
        """
        self.memory, self.ranks, self.folder, self.gpu, self.plans = memory, ranks, folder, gpu, plans
        self.decoder, self.passes, self.drop_gradients, self.share = decoder, passes, drop_gradients, memory.share
        given, recompute = memory.runtime.micro_batch_size, memory.runtime.recompute
        self.auto = given == AUTO
        self.recompute = [True, False] if self.auto and recompute == AUTO else [recompute is True]  # what may be chosen
        self.setting = Setting(self.share if isinstance(given, str) else min(given, self.share), recompute is True)
        decoder.recompute = self.setting.recompute
        self.first = self.setting  # initial setting, which fits even if all layers are dense
        self.grown: Setting | None = None  # the faster setting, once the run has grown
        self.growing = Growing(self.setting, 0)
        self.most: int | None = None  # maximum size, set after a larger size ran out of memory in a step
        self.limit: int | None = None  # bytes that a process may use on its GPU, minimum over ranks
        self.capacity: int | None = None  # bytes that `_needed` must not exceed; None: the size does not grow
        self.peak: int | None = None  # bytes, measured at the start
        self.room: int | None = None  # bytes that a step may need with shared casts; None: casts are not shared
        self.tried: set[int] = set()  # sizes that have been compiled
        self.restored = False  # whether the size comes from a checkpoint
        self.teacher_bytes = 0  # memory of the teacher, in addition to the trained model's
        self.decided_for: Sequence[Plan | None] = []  # the plans at the last decision

    @property
    def size(self) -> int:
        """The micro-batch size of the next step."""
        return self.setting.size

    def choose(self) -> None:
        """Choose the setting when a run starts or resumes. Collective. Raises MicroBatchError if none fits."""
        if self.auto:
            self._choose()
        if self.gpu is not None:
            now = min(gather(self.gpu.available()))
            # Without measured passes, something must be left for what the estimate does not count.
            self.room = now - UNMEASURED if self.capacity is None else min(now, self.capacity)

    def _choose(self) -> None:
        """`choose`, if the size is `auto`."""
        self._read_record()
        if self.gpu is None:
            if not self.restored:
                size = max(size for size in self._sizes() if size <= CPU_SEQUENCES)
                self._take_first(Setting(size, self.memory.runtime.recompute is True))
            return
        limit = min(gather(self.gpu.limit))
        if limit != self.limit:  # a new run, or a checkpoint from another GPU or another limit
            self.limit, self.capacity, self.restored = limit, None, False
        if self.memory.runtime.deterministic:
            if not self.restored:
                self._take_first(self._fastest(limit - UNMEASURED, self._settings()))
            return
        if self.ranks.world_size > 1:  # NCCL allocates its buffers on first use, so use it before measuring memory
            count = self.memory.runtime.ddp_bucket_mb * 2**20 // FLOAT32
            dist.all_reduce(torch.zeros(count, device=self.ranks.device))
        available = min(gather(self.gpu.available()))
        setting = self.setting if self.restored else self._fastest(available, self._settings())
        left_out = 0  # bytes of the measured peak that the estimate misses; assumed to be the same at any size
        if self.memory.sharing == UNSHARED:
            setting = self._check(setting)
            assert self.peak is not None
            left_out = self.peak - self._needed(setting)
            self.gpu.hold()  # again, because the passes have loaded kernels, whose code counts towards the limit
        if not self.restored:
            self._take_first(setting)
        if self.capacity is None:
            self.capacity = min(gather(self.gpu.available() - left_out))

    def _check(self, setting: Setting) -> Setting:
        """The fastest setting, from `setting` down, with which passes over random tokens fit in memory on all ranks."""
        assert self.gpu is not None
        others = self._settings()
        while True:
            size, recompute = setting
            # Up to two micro-batches, because memory peaks when the second adds to the gradients of the first.
            shape = min(2 * size, self.share), self.memory.sequence_length + 1
            generator = torch.Generator().manual_seed(0)
            self.peak = self._peak(setting, torch.randint(self.memory.model.vocab_size, shape, generator=generator))
            if None not in gather(self.peak):
                return setting
            needed = self._needed(setting)
            # With accumulation, fewer sequences may be estimated to need more memory, so sizes are compared first.
            others = [
                other for other in others
                if (other.recompute == recompute and other.size < size)
                or (other.recompute != recompute and self._needed(other) < needed)
            ]  # fmt: skip
            if not others:
                raise MicroBatchError(
                    f"not even one sequence fits: training needs {needed / GIB:,.1f} GiB with micro-batch {setting},"
                    f" and this GPU has {self.gpu.available() / GIB:,.1f} GiB for it: {_remedy(setting)}"
                )
            smaller = min(others, key=self._time)
            self.ranks.say(f"sparsellm: micro-batch {setting} ran out of memory; trying {smaller}")
            torch._dynamo.reset()  # graphs of many sizes would exceed dynamo's limit
            setting, self.restored, self.capacity = smaller, False, None

    def _take_first(self, setting: Setting) -> None:
        self.first, self.grown, self.growing = setting, None, Growing(setting, 0)
        self._take(setting)

    def _take(self, setting: Setting) -> None:
        self.setting, self.decoder.recompute = setting, setting.recompute
        if self.plans is not None:
            self.plans.resize(setting.size)

    def _sizes(self) -> list[int]:
        """The possible sizes: divisors of `share`, ascending."""
        most = min(self.most or self.share, max(1, MOST_TOKENS // self.memory.sequence_length))
        return [size for size in range(1, most + 1) if self.share % size == 0]

    def _settings(self) -> list[Setting]:
        """The possible settings, beginning with the one that needs the least memory."""
        return [Setting(size, recompute) for size in self._sizes() for recompute in self.recompute]

    def _plans(self) -> Sequence[Plan | None]:
        return [None] * self.memory.model.num_layers if self.plans is None else self.plans.plans

    def ffn_saved_bytes(self) -> int | None:
        """The result of `StepMemory.ffn_saved_bytes` for the current setting and plans."""
        return self.memory.ffn_saved_bytes(self.size, self._plans(), self.setting.recompute)

    def usage(self, setting: Setting) -> Usage:
        """The estimated memory of a step with `setting` and the current plans."""
        return self.memory.usage(setting.size, self._plans(), setting.recompute)

    @property
    def shares_casts(self) -> bool:
        """Whether the micro-batches of the next step share casts of weights: if there are several, and memory for the
        casts with a fraction TIGHT of the estimate to spare. So casts never make the size smaller."""
        if self.room is None or self.size == self.share:
            return False
        casts = self.memory.shared_casts(self._plans())
        return casts > 0 and (self._needed(self.setting) + casts) * (1 + TIGHT) <= self.room

    def _needed(self, setting: Setting) -> int:
        return self.usage(setting).total + self.teacher_bytes

    def _time(self, setting: Setting) -> float:
        """Estimated time per token, relative to large micro-batches without recomputation."""
        shard = Shard.none if self.memory.sharing == UNSHARED else self.memory.runtime.shard
        tokens = setting.size * self.memory.sequence_length
        return (RECOMPUTING if setting.recompute else 1) + PER_MICRO_BATCH[shard] / tokens

    def _worth(self, setting: Setting) -> bool:
        """Whether `setting` is estimated to save WORTH of the time of the current setting."""
        return self._time(self.setting) >= (1 + WORTH) * self._time(setting)

    def _fastest(self, available: int, settings: list[Setting]) -> Setting:
        """The fastest of `settings` whose estimate plus MARGIN is at most `available` bytes, or the first of them."""
        fitting = [setting for setting in settings if self._needed(setting) * (1 + MARGIN) <= available]
        return min(fitting, key=self._time, default=settings[0])

    def _peak(self, setting: Setting, tokens: Tensor) -> int | None:
        """Peak bytes of a step's passes over `tokens` with `setting`; None if memory ran out."""
        assert self.gpu is not None

        def passes() -> None:
            self.passes(tokens, setting.size)
            self.drop_gradients()

        self.decoder.recompute = setting.recompute
        room, self.room = self.room, None
        self.tried.add(setting.size)
        device = self.ranks.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            peak = self.gpu.peak_of(passes)
        self.decoder.recompute, self.room = self.setting.recompute, room
        self.drop_gradients()
        give_back()
        return peak

    def decided(self, step: int, tokens: Tensor) -> None:
        """Change the setting, depending on the plans that were just decided. All ranks do so at the same steps.

        `tokens`: this rank's tokens of the upcoming `step`, [B, T + 1].
        """
        if self.capacity is None:
            return
        if self.decided_for != (current := list(self._plans())):
            self.decided_for = current
            # Layers now save tensors of other sizes. Cached blocks of the old sizes may leave no room for them.
            if self._needed(self.setting) * (1 + TIGHT) > self.capacity:
                give_back()
        if self.grown is not None:
            setting = self._fastest(self.capacity, [self.first, self.grown])
            if setting != self.setting:
                self.ranks.say(f"sparsellm: step {step:,}: memory allows a micro-batch of {setting} again")
                self._take(setting)
            return
        settings = [setting for setting in self._settings() if len(self.tried) < 2 or setting.size in self.tried]
        setting = min(self.setting, self._fastest(self.capacity, settings), key=self._time)
        decisions = self.growing.decisions + 1 if setting == self.growing.setting else 1
        self.growing = Growing(setting, decisions)
        plans = [plan for plan in self._plans() if plan is not None]
        sparse = sum(plan.engine == Engine.tile for plan in plans)
        if self._worth(setting) and decisions >= SETTLED and 2 * sparse > len(plans):
            self._grow(step, setting, tokens)

    def _grow(self, step: int, setting: Setting, tokens: Tensor) -> None:
        give_back()  # otherwise the cached blocks of the current size would fragment memory
        said = f"sparsellm: step {step:,}: "
        if self.memory.sharing == UNSHARED and None in gather(self._peak(setting, tokens[: 2 * setting.size])):
            self.grown = self.setting  # so that no other setting is tried
            kept = f"was estimated to fit but ran out of memory; keeping {self.setting}"
            self.ranks.say(f"{said}micro-batch {setting} {kept}")
            return
        self.ranks.say(f"{said}layers are sparse: micro-batch {self.setting} -> {setting}")
        self.grown = setting
        self._take(setting)

    def run(self, step: int, accumulate: Callable[[int], StepSums]) -> StepSums:
        """Run `accumulate(size)` for `step`. If memory runs out, retry without shared casts, then with half the size,
        or raise OutOfMemory."""
        while True:
            shared = self.shares_casts
            try:
                return accumulate(self.size)
            except torch.OutOfMemoryError:
                pass  # memory is freed below, because the exception's frames hold tensors
            self.drop_gradients()
            give_back()
            what = f"step {step:,}: out of memory with micro-batch {self.size}"
            if shared and self.ranks.world_size == 1:
                self.room = None
                warn(f"{what}: repeating the step; from now on, each micro-batch casts the weights again")
            else:
                self._halve(what)

    def _halve(self, what: str) -> None:
        if not self.auto:
            raise OutOfMemory(
                f"{what}, set by runtime.micro_batch_size: run the same command with half of it, or with auto, to"
                " resume from the newest checkpoint"
            )
        smaller = [size for size in self._sizes() if 2 * size <= self.size]
        if not smaller:
            raise OutOfMemory(f"{what}: {_remedy(self.setting)}")
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
        self.most, self.room = smaller[-1], None
        torch._dynamo.reset()  # graphs of many sizes would exceed dynamo's limit
        self._take_first(Setting(smaller[-1], self.setting.recompute))
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
        # `grown` counts even if unused now: it may return.
        if max(setting.size for setting in (self.setting, self.grown) if setting is not None) > self.most:
            self.restored = False

    def state(self) -> dict[str, Any] | None:
        """The state that later steps depend on, JSON-serializable. None unless the size is `auto`."""
        if not self.auto:
            return None
        return {
            "share": self.share, "size": self.setting, "first": self.first, "grown": self.grown, "most": self.most,
            "limit": self.limit, "capacity": self.capacity, "growing": self.growing,
        }  # fmt: skip

    def restore(self, state: dict[str, Any] | None) -> None:
        """Restore what `state` returned, if the size is `auto`, each rank has as many sequences as before, and
        runtime.recompute still allows the saved settings."""
        if not self.auto or state is None or state["share"] != self.share:
            return

        def setting(saved: Any) -> Setting:
            # Before runtime.recompute=auto existed, checkpoints held sizes alone.
            return Setting(saved, self.memory.runtime.recompute is True) if isinstance(saved, int) else Setting(*saved)

        now, first = setting(state["size"]), setting(state["first"])
        grown = None if state["grown"] is None else setting(state["grown"])
        if not {now.recompute, first.recompute, (grown or first).recompute} <= set(self.recompute):
            return
        growing, decisions = state["growing"]
        self.first, self.grown, self.growing = first, grown, Growing(setting(growing), decisions)
        self.most, self.limit, self.capacity = state["most"], state["limit"], state["capacity"]
        self.restored = True
        self.tried = {now.size, first.size}
        self._take(now)

    def __str__(self) -> str:
        """The size, and a breakdown of memory in GiB, which is an estimate unless passes were measured."""
        recomputing = ", with recomputation" if self.setting.recompute else ""
        said = f"{self.size} of {quantity(self.share, 'sequence')}{recomputing}"
        if self.gpu is None:
            return said
        found, peak, available = self.usage(self.setting), self.peak, self.gpu.available()
        casts = self.memory.shared_casts(self._plans()) if self.shares_casts else 0
        missed = 0 if peak is None else peak - found.total - self.teacher_bytes
        total = found.total + missed + casts + self.teacher_bytes
        parts = {
            "weights": found.weights, "optimizer": found.optimizer, "gradients": found.gradients,
            "buckets": found.buckets, "activations": found.activations + missed,
        }  # fmt: skip
        if casts:
            parts["bfloat16 weights"] = casts
        if self.teacher_bytes:
            parts["teacher"] = self.teacher_bytes
        said += ": " + ", ".join(f"{name} {size / GIB:,.1f}" for name, size in parts.items())
        left = (available - total) / GIB
        said += f" GiB; {'estimated ' * (peak is None)}peak {total / GIB:,.1f} GiB of {available / GIB:,.1f} GiB"
        return f"{said} ({abs(left):,.1f} GiB {'free' if left >= 0 else 'too much'})"
