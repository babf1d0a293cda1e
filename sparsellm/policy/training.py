"""Chooses the engines of layers in training, from the nonzero counts of earlier steps (DESIGN §4).

Every DECIDE_EVERY steps, the nonzeros of a step s are summed over the ranks and copied to the host without blocking.
These counts decide the plans of step s + DELAY and later. Right before that step, the host waits for step s while the
device still computes step s + 1. So all ranks make the same decisions before the same steps.

Our trainer schedules this itself (training/plans.py). In any other training loop, torch reports the steps: when
`Optimizer.step` ends, the layers whose weights the optimizer updates count or decide (`choose_in_training`). Plans
change only between steps, because a recomputation must find the plan of its forward pass. A step in which no layer ran
Python code, such as the replay of a CUDA graph, is not counted.
"""

import weakref
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from sparsellm.ops import FeedForwardOutput, Plan, backend
from sparsellm.ops.host_copy import to_host
from sparsellm.policy import first_use

DECIDE_EVERY = 8  # steps
DELAY = 2  # steps


@dataclass
class Counts:
    """The counts of a step over all ranks. `read` waits until the device has copied them to the host."""

    step: int
    on_host: Tensor
    copied: torch.cuda.Event | None

    def read(self) -> list[list[float]]:
        if self.copied is not None:
            self.copied.synchronize()
        return self.on_host.tolist()


def over_ranks(summed: Tensor, fullest: Tensor) -> Tensor:
    """The counts of a step over all ranks, [S + 1, L] float64. Collective. summed [S, L]: counts to be added up;
    fullest [L]: nonzeros per token of the fullest micro-batch, of which the maximum is taken."""
    dist.all_reduce(summed)
    dist.all_reduce(fullest, op=dist.ReduceOp.MAX)
    return torch.cat([summed, fullest[None]])


class Call(NamedTuple):
    """What a layer counted in a call: `tokens`, and the fields of FeedForwardOutput."""

    tokens: int
    l1: Tensor
    nnz: Tensor
    fired: Tensor
    rest_calls: Tensor
    union: Tensor


class TrainingChoice:
    """A layer's plan in training loops other than our trainer, and the layer's last call with gradients."""

    def __init__(self, calibrate: bool) -> None:
        """calibrate: Measure the engines on this GPU before the first decision, unless their costs are cached."""
        self.calibrate = calibrate
        self.plan = Plan().tensor()  # the layer reads this tensor in every call
        self.last: Call | None = None
        self.is_new = False  # whether `last` belongs to the current step

    def record(self, tokens: int, out: FeedForwardOutput) -> None:
        self.last, self.is_new = Call(tokens, out.l1, out.nnz, out.fired, out.rest_calls, out.union), True

    def end_step(self) -> None:
        """Free the graph of the step's last call, which the L1 term holds. The values stay."""
        if self.is_new and self.last is not None:
            self.last = self.last._replace(l1=self.last.l1.detach())
        self.is_new = False

    def __getstate__(self) -> dict[str, Any]:
        """The state of a copy of the layer. `last` belongs to the original's autograd graph, which cannot be copied."""
        return {"calibrate": self.calibrate, "plan": self.plan.clone()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        TrainingChoice.__init__(self, state["calibrate"])
        self.plan = state["plan"]


class Steps:
    """At an optimizer's steps, chooses engines for the `layers` (SparseFeedForward) whose weights it updates."""

    def __init__(self, layers: list[Any]) -> None:
        self.layers, self.step = layers, 0
        self.shapes = [(layer.down_proj.weight.shape[0], layer.down_proj.weight.shape[1]) for layer in layers]  # K, N
        self.ranks = 1  # number of ranks that decide together
        self.counts: Counts | None = None  # counts that no decision has used yet

    def ended(self) -> None:
        """Called at the end of each step: counts or decides if due. Collective."""
        choices = [layer.in_training for layer in self.layers]
        if not any(choice.is_new for choice in choices):
            return
        self.step += 1
        with torch.cuda.device_of(self.layers[0].down_proj.weight):  # NCCL and measurements use the current device
            if self.step == 1:
                self._begin()
            if self.counts is not None and self.step + 1 == self.counts.step + DELAY:
                self._decide(self.counts.read())
                self.counts = None
            elif self.step % DECIDE_EVERY == 1:
                self._count(choices)

    def _begin(self) -> None:
        """Find the costs of the engines. If all ranks have the same kernels and layers, all decide together, by rank
        0's costs. Otherwise each rank decides alone. Collective."""
        first = self.layers[0]
        self.policy = first.choice.policy
        if first.in_training.calibrate and backend.loaded():
            self.policy = first_use.policy_for(self.shapes, first.down_proj.weight.device, self.shapes)
        if dist.is_initialized() and dist.get_world_size() > 1:
            found: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(found, (backend.loaded(), self.shapes, self.policy))
            if all(theirs[:2] == found[0][:2] for theirs in found):
                self.ranks, self.policy = len(found), found[0][2]
        for layer in self.layers:
            layer.choice.policy = self.policy

    def _count(self, choices: list[TrainingChoice]) -> None:
        """Start copying the counts of each layer's last call to the host. Collective."""
        device, counts = self.layers[0].down_proj.weight.device, []
        for choice in choices:
            zero = torch.zeros((), dtype=torch.int64, device=device)
            of_layer = [zero] * 3
            if choice.is_new and choice.last is not None:
                of_layer = [zero + choice.last.tokens, choice.last.nnz.to(device), choice.last.union.to(device)]
            counts.append(torch.stack(of_layer))
        summed = torch.stack(counts, 1).double()
        fullest = summed[1] / summed[0].clamp(min=1)
        together = over_ranks(summed, fullest) if self.ranks > 1 else torch.cat([summed, fullest[None]])
        self.counts = Counts(self.step, *to_host(together))

    def _decide(self, counts: list[list[float]]) -> None:
        for layer, shape, tokens, nnz, union, fullest in zip(self.layers, self.shapes, *counts, strict=True):
            if tokens:  # a layer without calls in the counted step keeps its plan
                plan, mean = layer.in_training.plan, [value / self.ranks for value in (tokens, nnz, union)]
                chosen = self.policy.training_plan(int(mean[0]), *shape, *mean[1:], fullest, Plan.read(plan))
                plan.copy_(chosen.tensor())


# Layers in the order of their construction, which is the same on all ranks, and the steps of each optimizer.
_layers: weakref.WeakKeyDictionary[nn.Module, None] = weakref.WeakKeyDictionary()
_steps: weakref.WeakKeyDictionary[Optimizer, Steps] = weakref.WeakKeyDictionary()
# The optimizer that is stepping. ZeroRedundancyOptimizer steps an inner optimizer, which updates different weights on
# each rank. All ranks must decide about the same layers, so the steps of an inner optimizer are ignored.
_stepping: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def choose_in_training(layer: nn.Module) -> None:
    """Let `layer` choose its engine from now on, at the steps of the torch.optim optimizer that updates its weights."""
    _layers[layer] = None
    _listen()


def stop_choosing(layer: nn.Module) -> None:
    """Undo `choose_in_training`."""
    _layers.pop(layer, None)


@cache
def _listen() -> None:
    # `disable` imports Dynamo, so it is not called at import time.
    register_optimizer_step_pre_hook(torch.compiler.disable(_before_step))
    register_optimizer_step_post_hook(torch.compiler.disable(_after_step))


def _before_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    if not _stepping:
        _stepping.add(optimizer)


def _after_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    if optimizer not in _stepping:
        return
    _stepping.remove(optimizer)
    if in_backward():
        return
    updated = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    layers: list[Any] = [layer for layer in _layers if id(layer.get_parameter("down_proj.weight")) in updated]
    capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    if layers and takes_kernels(layers[0].down_proj.weight) and not capturing:
        if optimizer not in _steps or _steps[optimizer].layers != layers:
            _steps[optimizer] = Steps(layers)
        _steps[optimizer].ended()
    for layer in layers:
        layer.in_training.end_step()


def in_backward() -> bool:
    """Whether autograd is in a backward pass: a forward pass then is a recomputation."""
    return torch._C._current_graph_task_id() != -1


def takes_kernels(weight: Tensor) -> bool:
    """Whether kernels may compute with `weight`, possibly after autocast to bfloat16. If not, no engine is chosen."""
    return weight.is_cuda
