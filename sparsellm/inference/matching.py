"""Finds the feedforward blocks of a model that the operators of sparsellm.ops can compute.

    gated      down(relu(gate(x)) * up(x))    children gate_proj, up_proj, down_proj and act_fn, as in Llama
    non-gated  down(relu(up(x)))              the same without gate_proj, as in Arcee

All other blocks are refused by name: other activations, biases, extra children or tensors, hooks, linears that are not
plain nn.Linear. A block with the right children may still compute something else, such as scaling or clipping, so each
block is also tested on random tokens.
"""

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from sparsellm.model.decoder import GatedFeedForward, NonGatedFeedForward, SiluFeedForward
from sparsellm.ops import MAX_COLUMNS, MULTIPLE, feedforward
from sparsellm.ops.feedforward import DTYPES

OWN = (GatedFeedForward, NonGatedFeedForward)  # blocks without act_fn, which return y and statistics
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
# Relative tolerance for a few bfloat16 operations, each with a rounding error of up to 0.4%.
PROBE_TOKENS, PROBE_TOLERANCE = 8, 0.05


def feedforward_blocks(model: nn.Module) -> list[nn.Module]:
    """The feedforward blocks inside `model`. Raises ValueError for the first block that the operator does not compute,
    and for a model without blocks."""
    found = []
    for name, module in model.named_modules():
        if not name or not {"up_proj", "down_proj"} <= module._modules.keys():
            continue
        for problem in _problems(name, module):
            raise ValueError(problem)
        if not isinstance(module, OWN):
            _probe(name, module)
        found.append(module)
    if not found:
        raise ValueError(
            f"{kind(model)} has no feedforward block: it should hold modules with up_proj and down_proj, as Llama and"
            " Arcee models do"
        )
    return found


def kind(thing: object) -> str:
    """The name of an object's class, for messages."""
    return type(thing).__name__


def _problems(name: str, module: nn.Module) -> Iterator[str]:
    """Reasons why `module` is not a supported block. Each check assumes that earlier ones passed, so only the first
    reason is reliable."""
    projections = {p: getattr(module, p) for p in PROJECTIONS if p in module._modules}
    if isinstance(module, SiluFeedForward):
        yield f"the activation of {name} is SiLU: it should be ReLU, whose zeros are exact"
    elif not isinstance(module, OWN) and not isinstance(activation := getattr(module, "act_fn", None), nn.ReLU):
        yield (
            f"the activation {name}.act_fn is {kind(activation)}: it should be ReLU. Create or load the model"
            " with hidden_act='relu'; `sparsellm train init_from=MODEL` turns a trained SiLU model into a ReLU model"
        )
    held = module._modules.keys() | module._parameters.keys() | module._buffers.keys()
    if others := sorted(held - projections.keys() - {"act_fn"}):
        yield f"{name} also has {', '.join(others)}: it should have no more than {', '.join(PROJECTIONS)} and act_fn"
    if any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in module.modules()):
        yield f"{name} has hooks, which would not run: it should have none, so remove them first"

    for full, linear in ((f"{name}.{p}", linear) for p, linear in projections.items()):
        weight: Any = getattr(linear, "weight", None)
        if type(linear) is not nn.Linear or type(weight) is not nn.Parameter or weight.dim() != 2:
            yield (
                f"{full} is {kind(linear)} with a weight of type {kind(weight)}: it should be a plain nn.Linear,"
                " neither quantised nor sharded nor adapted"
            )
        if linear.bias is not None:
            yield f"{full} has a bias: it should have none"
        if weight.is_meta and not isinstance(module, OWN):  # OWN blocks may be accelerated before `to_empty`
            yield f"{full}.weight is on the meta device: it should be loaded, not offloaded"
        if weight.is_inference():
            yield f"{full}.weight was created in inference mode: it should be loaded outside of torch.inference_mode()"
        if weight.dtype not in DTYPES:
            yield (
                f"{full}.weight is {weight.dtype}: it should be torch.bfloat16, or torch.float32 to train under"
                " autocast; call model.to(torch.bfloat16) or model.to(torch.float32)"
            )

    neurons, width = projections["up_proj"].weight.shape
    for what, size in (("in_features", width), ("out_features", neurons)):
        if size % MULTIPLE or not 0 < size <= MAX_COLUMNS:
            yield f"{name}.up_proj.{what} is {size}: it should be a multiple of {MULTIPLE} up to {MAX_COLUMNS}"
    for p, linear in projections.items():
        expected = [width, neurons] if p == "down_proj" else [neurons, width]
        if list(linear.weight.shape) != expected:
            yield f"{name}.{p}.weight is {list(linear.weight.shape)}: it should be {expected} to match {name}.up_proj"


@torch.no_grad()
def _probe(name: str, module: nn.Module) -> None:
    """Raise ValueError unless the module computes what the operator does on random tokens."""
    gated = "gate_proj" in module._modules
    weights = [getattr(module, p).weight if p in module._modules else None for p in PROJECTIONS]
    gate, up, down = cast(tuple[Tensor | None, Tensor, Tensor], weights)
    x = torch.randn(PROBE_TOKENS, up.shape[1], generator=torch.Generator().manual_seed(0)).to(up)
    ours, expected = feedforward(x, gate, up, down, plan=None).y, module(x[None])[0]
    if not (ours - expected).norm() <= PROBE_TOLERANCE * ours.norm():
        formula = "down(relu(gate(x)) * up(x))" if gated else "down(relu(up(x)))"
        raise ValueError(f"{name}, a {kind(module)}, computes something else: it should compute {formula}")
