"""Measures how much the kernels speed up each feedforward layer, on the inputs that the layer gets in the model."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sparsellm.analysis.activity import passes
from sparsellm.inference.matching import PROJECTIONS, feedforward_blocks
from sparsellm.ops import Plan, backend
from sparsellm.ops.feedforward import forward
from sparsellm.ops.gpu_timing import alternating_ms
from sparsellm.ops.reference import union
from sparsellm.ops.twell import TOKEN_TILE, tiles
from sparsellm.policy import Policy, first_use
from sparsellm.policy.costs import room_for

if TYPE_CHECKING:  # deferred: importing transformers' models takes two seconds
    from transformers import PreTrainedModel

TOKENS = 16_384  # upper bound, in whole sequences; enough to fill the GPU
ROUNDS = 20

Candidates = dict[str, Callable[[int], object]]  # name -> one run, given the number of the round


def layer_speeds(model: "PreTrainedModel", blocks: Tensor) -> list[dict[str, Any]]:
    """One row per layer, in bfloat16, on the first `TOKENS` tokens of `blocks` (int64 [S, T]).

    {"layer", "tokens", "nonzeros" per token and "union" per tile, "engine": the one that an accelerated model chooses,
    "dense_ms": the time of eager or compiled PyTorch, whichever is faster, "engine_ms", "speedup"}
    """
    rows: list[dict[str, Any]] = []

    def measure(block: nn.Module, inputs: tuple) -> None:
        rows.append({"layer": len(rows), **layer_speed(block, inputs[0].flatten(0, -2), policy)})

    batch, found = blocks[: max(1, TOKENS // blocks.shape[1])], feedforward_blocks(model)
    policy = Policy()
    if backend.loaded():
        sizes = {block.get_parameter("down_proj.weight").shape for block in found}
        policy = first_use.policy_for([(width, neurons) for width, neurons in sizes], model.device)
    with torch.no_grad():
        for _ in passes(model, batch, len(batch), [block.register_forward_pre_hook(measure) for block in found]):
            pass
    return rows


def layer_speed(block: nn.Module, x: Tensor, policy: Policy) -> dict[str, Any]:
    """The row of one layer on its inputs x [M, K]."""
    gated = hasattr(block, "gate_proj")
    tensors = [t.detach().bfloat16() for t in (x, *(getattr(block, p).weight for p in PROJECTIONS[not gated :]))]
    x, weights = tensors[0], tensors[1:]
    w_gate, w_up = weights[:2] if gated else (None, weights[0])
    active = torch.relu(x @ weights[0].T) != 0
    (tokens, neurons), width = active.shape, x.shape[1]
    nonzeros, unions = int(active.sum()), int(union(active))
    plan = Plan(policy.choose_engine(tokens, width, neurons, nonzeros, unions), room_for(nonzeros / tokens))
    w_down_t = weights[-1].T.contiguous()
    dense = dense_gated if gated else dense_nongated
    compiled = torch.compile(dense, dynamic=False)
    times = gpu_milliseconds(
        {
            "eager": lambda _: dense(x, *weights),
            "compiled": lambda _: compiled(x, *weights),
            "engine": lambda _: forward(x, w_gate, w_up, weights[-1], plan, w_down_t, False),
        }
    )
    dense_ms = min(times["eager"], times["compiled"])
    return {
        "tokens": tokens,
        "nonzeros": nonzeros / tokens,
        "union": unions / tiles(tokens, TOKEN_TILE),
        "engine": plan.engine.name,
        "dense_ms": dense_ms,
        "engine_ms": times["engine"],
        "speedup": dense_ms / times["engine"],
    }


def gpu_milliseconds(candidates: Candidates) -> dict[str, float]:
    """The median time of each candidate on the GPU. Exceptions of candidates propagate."""
    found: dict[str, float] = {}
    for name, ms in alternating_ms(candidates, least=ROUNDS, most=ROUNDS).items():
        if isinstance(ms, Exception):
            raise ms
        found[name] = ms
    return found


def dense_gated(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
    return (torch.relu(x @ w_gate.T) * (x @ w_up.T)) @ w_down.T


def dense_nongated(x: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
    return torch.relu(x @ w_up.T) @ w_down.T
