"""Which engine computes each feedforward layer in training, decided from what earlier steps counted.

Steps s = 1, 9, 17, ... (every DECIDE_EVERY steps) are counted: their counts are summed over the ranks, copied to the
host without blocking, and decide the plans right before step s + DELAY. The host then waits for step s, while the
device has step s + 1 to do. So all ranks decide alike, and always before the same steps. A run that is stopped between
the count and the decision decides as if it had not been: `state` holds the counts.

Engines are chosen by what was measured on rank 0's GPU: by `sparsellm calibrate`, or as the run begins (`begin`). Where
nothing was measured, the package's constants choose. `state` has what the run began with, and a resume goes by it,
whatever was measured since.

A counted step that is skipped, because its gradient is not finite, decides nothing: plans stay as they are until the
next counted one. Whether it was is decided on the device, and travels with the counts.

A plan is dense or tile, and how much room the tile engine has. Where a micro-batch has more nonzeros than that, its
result is exact all the same, `rest_calls` counts it, and the next decision makes the room larger.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sparsellm.config import ModelConfig, RuntimeConfig, TrainingConfig
from sparsellm.distributed.groups import Ranks, on_main
from sparsellm.model import Decoder
from sparsellm.ops import Engine, Plan, backend
from sparsellm.policy import Policy, first_use
from sparsellm.policy.costs import TILE_MAX_NONZEROS, Costs, room_for
from sparsellm.policy.packaged import is_shipped
from sparsellm.runs.metrics import StepSums, to_host
from sparsellm.system.console import is_main_rank, warn

DECIDE_EVERY = 8  # steps
DELAY = 2  # steps
SKIPPED = -1.0  # in place of every count


@dataclass
class Counts:
    """What a step counted over all ranks, possibly still being computed; `read` waits for it."""

    step: int
    # float64 [3, L]: nonzeros; union; the nonzeros per token of the fullest micro-batch. SKIPPED if the step was.
    on_host: Tensor
    copied: torch.cuda.Event | None

    def read(self) -> list[list[float]]:
        if self.copied is not None:
            self.copied.synchronize()
        return self.on_host.tolist()


class Plans:
    """The training plans of an accelerated decoder's layers: dense until something has been counted."""

    def __init__(
        self, model: ModelConfig, training: TrainingConfig, runtime: RuntimeConfig, decoder: Decoder, ranks: Ranks
    ) -> None:
        self.ranks, self.calibrate, self.resumed = ranks, runtime.calibrate, False
        self.layer = model.hidden_size, model.intermediate_size  # K, N
        self.sequences, self.sequence_length = training.batch_size // ranks.world_size, training.sequence_length
        given = runtime.micro_batch_size
        self.resize(self.sequences if isinstance(given, str) else given)
        self.tokens_per_step = training.tokens_per_step
        self.tensors = [Plan().tensor() for _ in decoder.layers]  # what the layers read at every call
        self.blocks: list[Any] = [layer.mlp for layer in decoder.layers]
        for block, tensor in zip(self.blocks, self.tensors, strict=True):
            block.training_plan = tensor
        self._choose_by(None)
        self.counts: Counts | None = None  # not decided yet
        self.idle = False  # whether the layers are PyTorch's for the time being (training/relu_annealing.py)

    @property
    def plans(self) -> list[Plan | None]:
        """In effect, by layer; None: PyTorch's."""
        return [None if self.idle else Plan.read(tensor) for tensor in self.tensors]

    @property
    def engines(self) -> list[str]:
        """The names of the engines in effect, by layer."""
        return ["torch" if plan is None else plan.engine.name for plan in self.plans]

    def begin(self) -> None:
        """For a run that begins: choose by what was measured of rank 0's GPU, by rank 0 now if need be. Collective."""
        self._choose_by(on_main(self.ranks, self._measured))

    def _measured(self) -> dict[str, Any] | None:
        if not backend.loaded():
            return None
        missing = [self.layer] if self.calibrate else []
        costs = first_use.policy_for([self.layer], self.ranks.device, missing).measured.get(self.layer)
        return None if costs is None else costs.as_json()

    def _choose_by(self, costs: dict[str, Any] | None) -> None:
        """costs: as JSON has them; None: the package's. Validation chooses by them, too."""
        measured = {} if costs is None else {self.layer: Costs.of_json(costs)}
        self.policy = Policy(measured=measured)
        for block in self.blocks:
            block.policy = self.policy

    def _costs(self) -> dict[str, Any] | None:
        measured = self.policy.measured.get(self.layer)
        return None if measured is None else measured.as_json()

    def chosen_by(self) -> str | None:
        """By what engines are chosen, for people; None where the package's constants are of this GPU and layer."""
        measured = self.layer in self.policy.measured
        if self.resumed:
            return f"chosen by {'what was measured' if measured else 'the constants of an H200'}, as when the run began"
        if not measured and is_shipped(self.policy.kernels, *self.layer):
            return None
        return f"chosen by {self.policy.chosen_by(*self.layer)}"

    def resize(self, size: int) -> None:
        """Decide from here on for micro-batches of `size` sequences."""
        micro_batches = math.ceil(self.sequences / size)
        self.tokens = self.sequences * self.sequence_length // micro_batches  # of the mean micro-batch

    def before(self, step: int) -> bool:
        """Decide, if `step` is one to decide before, and say whether it did. Waits then for the step DELAY before."""
        if self.counts is None or step != self.counts.step + DELAY:
            return False
        counts, self.counts = self.counts.read(), None
        if counts[0][0] == SKIPPED:
            return False
        share = self.tokens / self.tokens_per_step
        for tensor, nnz, union, fullest in zip(self.tensors, *counts, strict=True):
            plan = Plan.read(tensor)
            engine = self.policy.choose_training_engine(
                self.tokens, *self.layer, nnz * share, union * share, current=plan.engine
            )
            if fullest > TILE_MAX_NONZEROS:
                engine = Engine.dense  # without room, one such micro-batch takes far longer than all others win
            tensor.copy_(Plan(engine, room_for(fullest)).tensor())
        return True

    def after(self, step: int, sums: StepSums, counts: Tensor) -> None:
        """Send what `step` counted, if it is one to decide from. Collective.

        `counts`: 0-d bool on the device, the same on all ranks: whether the step was not skipped.
        """
        if self.idle or step % DECIDE_EVERY != 1:
            return
        summed, fullest = torch.stack([sums.nnz, sums.union]).double(), sums.fullest.clone()
        dist.all_reduce(summed)
        dist.all_reduce(fullest, op=dist.ReduceOp.MAX)
        counted = torch.cat([summed, fullest[None]])
        self.counts = Counts(step, *to_host(torch.where(counts, counted, SKIPPED)))

    def state(self) -> dict[str, Any]:
        """All that the next steps depend on, for JSON. Waits for counts that are under way."""
        counts = None if self.counts is None else {"step": self.counts.step, "values": self.counts.read()}
        return {"plans": [tensor.tolist() for tensor in self.tensors], "counts": counts, "costs": self._costs()}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on as `state` says, until the next decision; micro-batches of another size, too, get the same results.
        Collective."""
        for tensor, (engine, room) in zip(self.tensors, state["plans"], strict=True):
            tensor.copy_(Plan(Engine(engine), room).tensor())
        costs = state["costs"]  # None: the package's constants
        if costs is None or costs["kernels"] == backend.loaded():
            self._choose_by(costs)
            self.resumed = costs is not None or not is_shipped(self.policy.kernels, *self.layer)
        else:
            self.begin()
            if is_main_rank():
                here = "what was measured here" if self._costs() else "an H200's constants"
                warn(
                    f"the run chose engines by what was measured on {backend.NAMES[costs['kernels']]}, which do not"
                    f" compute here: from here on it chooses by {here}"
                )
        counts = state["counts"]
        if counts is not None:
            self.counts = Counts(counts["step"], torch.tensor(counts["values"], dtype=torch.float64), None)
