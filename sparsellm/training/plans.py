"""Chooses the engine of each feedforward layer in training, from the nonzero counts of earlier steps (DESIGN §4).

The counts of steps s = 1, 9, 17, ... (every DECIDE_EVERY steps) decide the plans right before step s + DELAY, on all
ranks alike (policy/training.py). `state` holds counts that no decision has used yet, so a run that was stopped
before the decision resumes identically.

Engines are chosen by costs measured on rank 0's GPU, by `sparsellm calibrate` or when the run starts (`begin`); without
measurements, by the package's constants. `state` holds these costs, and a resumed run uses them even if `calibrate` has
measured other costs since. They are costs of bfloat16: with runtime.float8=all the tile engine is faster than they
say, so a layer whose nonzeros fall reaches it a few steps later than it could.
"""

import math
from typing import Any

import torch
from torch import Tensor

from sparsellm.config import Float8, ModelConfig, RuntimeConfig, TrainingConfig
from sparsellm.distributed.groups import Ranks, on_main
from sparsellm.model import Decoder
from sparsellm.ops import Engine, Plan, backend
from sparsellm.ops.host_copy import to_host
from sparsellm.policy import Policy, first_use
from sparsellm.policy.costs import Costs
from sparsellm.policy.packaged import is_shipped
from sparsellm.policy.training import DECIDE_EVERY, DELAY, Counts, over_ranks
from sparsellm.runs.step_metrics import StepSums

SKIPPED = -1.0  # replaces every count of a skipped step


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
        self.tensors = [Plan().tensor() for _ in decoder.layers]  # each layer reads its tensor in every call
        self.blocks: list[Any] = [layer.mlp for layer in decoder.layers]
        for block, tensor in zip(self.blocks, self.tensors, strict=True):
            block.training_plan = tensor
            block.trains_in_float8 = runtime.float8 == Float8.all
        self._choose_by(None)
        # Counts that no decision has used yet, float64 [3, L]: nonzeros; union; nonzeros per token of the fullest
        # micro-batch. All are SKIPPED if the step was skipped.
        self.counts: Counts | None = None
        self.idle = False  # whether PyTorch computes the layers, while training/relu_annealing.py mixes SiLU and ReLU

    @property
    def plans(self) -> list[Plan | None]:
        """The current plan of each layer; None if PyTorch computes it."""
        return [None if self.idle else Plan.read(tensor) for tensor in self.tensors]

    def weights(self) -> list[Tensor]:
        """The weights of the layers that the operator computes."""
        planned = [block for plan, block in zip(self.plans, self.blocks, strict=True) if plan is not None]
        return [weight for block in planned for weight in block.parameters()]

    @property
    def engines(self) -> list[str]:
        """The name of each layer's current engine."""
        return ["torch" if plan is None else plan.engine.name for plan in self.plans]

    def begin(self) -> None:
        """Start a new run with the costs of rank 0's GPU, measured now if they are not cached. Collective."""
        self._choose_by(on_main(self.ranks, self._measured_costs))

    def _measured_costs(self) -> Costs | None:
        if not backend.loaded():
            return None
        missing = [self.layer] if self.calibrate else []
        return first_use.policy_for([self.layer], self.ranks.device, missing).measured.get(self.layer)

    def _choose_by(self, costs: Costs | None) -> None:
        """Choose engines by `costs`, or by the package's constants if None, in training and in validation."""
        self.policy = Policy(measured={} if costs is None else {self.layer: costs})
        for block in self.blocks:
            block.choice.policy = self.policy

    def chosen_by(self) -> str | None:
        """Says which costs choose the engines. None for the package's constants, if they fit this GPU and layer."""
        measured = self.layer in self.policy.measured
        if self.resumed:
            return f"chosen by {'measured costs' if measured else 'the constants of an H200'}, as when the run started"
        if not measured and is_shipped(self.policy.kernels, *self.layer):
            return None
        return f"chosen by {self.policy.chosen_by(*self.layer)}"

    def resize(self, size: int) -> None:
        """Choose engines for micro-batches of `size` sequences from now on."""
        micro_batches = math.ceil(self.sequences / size)
        self.tokens = self.sequences * self.sequence_length // micro_batches  # mean tokens per micro-batch

    def before(self, step: int) -> bool:
        """Decide the plans if due before `step`. Returns whether they were decided. Waits for step - DELAY to end."""
        if self.counts is None or step != self.counts.step + DELAY:
            return False
        counts, self.counts = self.counts.read(), None
        if counts[0][0] == SKIPPED:
            return False
        share = self.tokens / self.tokens_per_step
        for tensor, nnz, union, fullest in zip(self.tensors, *counts, strict=True):
            plan = self.policy.training_plan(
                self.tokens, *self.layer, nnz * share, union * share, fullest, Plan.read(tensor)
            )
            tensor.copy_(plan.tensor())
        return True

    def after(self, step: int, sums: StepSums, finite: Tensor) -> None:
        """Every DECIDE_EVERY steps, start copying the step's nonzero counts to the host. Collective.

        `finite`: 0-d bool on the device, the same on all ranks. False if the step was skipped because its gradient was
        not finite, so that its counts are meaningless.
        """
        if self.idle or step % DECIDE_EVERY != 1:
            return
        counts = over_ranks(torch.stack([sums.nnz, sums.union]).double(), sums.fullest.clone())
        self.counts = Counts(step, *to_host(torch.where(finite, counts, SKIPPED)))

    def state(self) -> dict[str, Any]:
        """The state that the next steps depend on, JSON-serializable. Waits for counts that are still being copied."""
        counts = None if self.counts is None else {"step": self.counts.step, "values": self.counts.read()}
        costs = self.policy.measured.get(self.layer)
        return {
            "plans": [tensor.tolist() for tensor in self.tensors],
            "counts": counts,
            "costs": None if costs is None else costs.as_json(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned. Collective."""
        for tensor, (engine, room) in zip(self.tensors, state["plans"], strict=True):
            tensor.copy_(Plan(Engine(engine), room).tensor())
        costs = state["costs"]  # None: the package's constants
        if costs is None or costs["kernels"] == backend.loaded():
            self._choose_by(None if costs is None else Costs.of_json(costs))
            self.resumed = costs is not None or not is_shipped(self.policy.kernels, *self.layer)
        else:
            self.begin()
            chosen_by = "the costs measured here" if self.policy.measured else "an H200's constants"
            self.ranks.say(
                f"sparsellm: the run chose engines by costs of {backend.NAMES[costs['kernels']]}, which are not used"
                f" here: from now on it chooses by {chosen_by}"
            )
        if (counts := state["counts"]) is not None:
            self.counts = Counts(counts["step"], torch.tensor(counts["values"], dtype=torch.float64), None)
