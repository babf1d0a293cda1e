"""Chooses the engine of each feedforward layer in training, from the counts of earlier steps.

Steps s = 1, 9, 17, ... (every DECIDE_EVERY steps) are counted: their counts are summed over ranks, copied to the host
without blocking, and decide the plans right before step s + DELAY. The host then waits for step s while the device is
busy with step s + 1. So all ranks make the same decision, always before the same steps. `state` holds the counts, so a
run stopped between count and decision resumes identically.

Engines are chosen from costs measured on rank 0's GPU, by `sparsellm calibrate` or when the run starts (`begin`);
without measurements, from the package's constants. `state` holds the costs with which the run started, and a resume
uses them, even if others were measured since.

A counted step that is skipped because of a non-finite gradient decides nothing: plans stay the same until the next
counted step. The skip is decided on the device and travels with the counts.

A plan is dense, or tile with a capacity. If a micro-batch has more nonzeros than the capacity, its result is still
exact (overflow path), `rest_calls` counts it, and the next decision raises the capacity.
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
SKIPPED = -1.0  # replaces every count of a skipped step


@dataclass
class Counts:
    """The counts of a step over all ranks, possibly still in flight; `read` waits for them."""

    step: int
    # float64 [3, L]: nonzeros; union; nonzeros per token of the fullest micro-batch. SKIPPED for a skipped step.
    on_host: Tensor
    copied: torch.cuda.Event | None

    def read(self) -> list[list[float]]:
        if self.copied is not None:
            self.copied.synchronize()
        return self.on_host.tolist()


class Plans:
    """The training plans of an accelerated decoder's layers: dense until the first counts arrive."""

    def __init__(
        self, model: ModelConfig, training: TrainingConfig, runtime: RuntimeConfig, decoder: Decoder, ranks: Ranks
    ) -> None:
        self.ranks, self.calibrate, self.resumed = ranks, runtime.calibrate, False
        self.layer = model.hidden_size, model.intermediate_size  # K, N
        self.sequences, self.sequence_length = training.batch_size // ranks.world_size, training.sequence_length
        given = runtime.micro_batch_size
        self.resize(self.sequences if isinstance(given, str) else given)
        self.tokens_per_step = training.tokens_per_step
        self.tensors = [Plan().tensor() for _ in decoder.layers]  # read by the layers in every call
        self.blocks: list[Any] = [layer.mlp for layer in decoder.layers]
        for block, tensor in zip(self.blocks, self.tensors, strict=True):
            block.training_plan = tensor
        self._choose_by(None)
        self.counts: Counts | None = None  # pending decision
        self.idle = False  # whether PyTorch computes the layers for now (training/relu_annealing.py)

    @property
    def plans(self) -> list[Plan | None]:
        """The current plans by layer; None: PyTorch."""
        return [None if self.idle else Plan.read(tensor) for tensor in self.tensors]

    @property
    def engines(self) -> list[str]:
        """The names of the current engines by layer."""
        return ["torch" if plan is None else plan.engine.name for plan in self.plans]

    def begin(self) -> None:
        """Start a new run with the costs of rank 0's GPU, which rank 0 measures if they are not cached. Collective."""
        self._choose_by(on_main(self.ranks, self._measured))

    def _measured(self) -> dict[str, Any] | None:
        if not backend.loaded():
            return None
        missing = [self.layer] if self.calibrate else []
        costs = first_use.policy_for([self.layer], self.ranks.device, missing).measured.get(self.layer)
        return None if costs is None else costs.as_json()

    def _choose_by(self, costs: dict[str, Any] | None) -> None:
        """Use `costs` (as JSON; None: the package's) to choose engines, also in validation."""
        measured = {} if costs is None else {self.layer: Costs.of_json(costs)}
        self.policy = Policy(measured=measured)
        for block in self.blocks:
            block.choice.policy = self.policy

    def _costs(self) -> dict[str, Any] | None:
        measured = self.policy.measured.get(self.layer)
        return None if measured is None else measured.as_json()

    def chosen_by(self) -> str | None:
        """Names the costs that choose engines, for messages; None if the package's own fit this GPU and layer."""
        measured = self.layer in self.policy.measured
        if self.resumed:
            return f"chosen by {'measured costs' if measured else 'the constants of an H200'}, as when the run started"
        if not measured and is_shipped(self.policy.kernels, *self.layer):
            return None
        return f"chosen by {self.policy.chosen_by(*self.layer)}"

    def resize(self, size: int) -> None:
        """Set the micro-batch size, in sequences, for which engines are chosen."""
        micro_batches = math.ceil(self.sequences / size)
        self.tokens = self.sequences * self.sequence_length // micro_batches  # tokens of the mean micro-batch

    def before(self, step: int) -> bool:
        """Decide if a decision is due before `step`, which waits for step - DELAY. Returns whether it decided."""
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
                engine = Engine.dense  # one overflowing micro-batch costs more than all others gain
            tensor.copy_(Plan(engine, room_for(fullest)).tensor())
        return True

    def after(self, step: int, sums: StepSums, counts: Tensor) -> None:
        """Every DECIDE_EVERY steps, start copying the step's nonzero counts to the host. Collective.

        `counts`: 0-d bool on the device, the same on all ranks: whether the counts are valid. False if the step was
        skipped.
        """
        if self.idle or step % DECIDE_EVERY != 1:
            return
        summed, fullest = torch.stack([sums.nnz, sums.union]).double(), sums.fullest.clone()
        dist.all_reduce(summed)
        dist.all_reduce(fullest, op=dist.ReduceOp.MAX)
        counted = torch.cat([summed, fullest[None]])
        self.counts = Counts(step, *to_host(torch.where(counts, counted, SKIPPED)))

    def state(self) -> dict[str, Any]:
        """The state that the next steps depend on, JSON-serializable. Waits for counts in flight."""
        counts = None if self.counts is None else {"step": self.counts.step, "values": self.counts.read()}
        return {"plans": [tensor.tolist() for tensor in self.tensors], "counts": counts, "costs": self._costs()}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore `state`; results do not depend on the micro-batch size. Collective."""
        for tensor, (engine, room) in zip(self.tensors, state["plans"], strict=True):
            tensor.copy_(Plan(Engine(engine), room).tensor())
        costs = state["costs"]  # None: the package's constants
        if costs is None or costs["kernels"] == backend.loaded():
            self._choose_by(costs)
            self.resumed = costs is not None or not is_shipped(self.policy.kernels, *self.layer)
        else:
            self.begin()
            if is_main_rank():
                here = "the costs measured here" if self._costs() else "an H200's constants"
                warn(
                    f"the run chose engines by costs of {backend.NAMES[costs['kernels']]}, which are not used here:"
                    f" now it chooses by {here}"
                )
        counts = state["counts"]
        if counts is not None:
            self.counts = Counts(counts["step"], torch.tensor(counts["values"], dtype=torch.float64), None)
