"""Accelerates a loaded model: computes its feedforward blocks with the sparse kernels, in inference or in training.

`accelerate` works on our Decoder and on Hugging Face models with the blocks that sparsellm.inference.matching
describes: Llama, Qwen or Mistral with hidden_act relu, Arcee with relu. Results differ from the original model's by
rounding only. Weights, names and state_dict stay the same.

Each block chooses the engine of a call (dense, row or tile) from the counts of its earlier calls
(inference/engine_choice.py) and from the costs of the engines on this GPU model. If the costs are not known for layers
of this shape, `accelerate` measures them once, in a few seconds (sparsellm.policy). `engine=` fixes the engine. Sparse
engines compute calls in bfloat16 on a GPU without gradients (torch.no_grad, torch.inference_mode), and with
`training=True` also calls with gradients; all other calls run dense.

Tokens hidden by the attention mask, such as padding, fire no neurons (sparsellm.inference.padding).

An accelerated model compiles like any other, whole or by layer. The choice of engine is data that the operator reads at
run time, so a new choice recompiles nothing.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from sparsellm.inference.engine_choice import sparse_engines_take
from sparsellm.inference.feedforward import SparseFeedForward
from sparsellm.inference.matching import feedforward_blocks, kind
from sparsellm.inference.padding import spare_padding, stop_sparing
from sparsellm.ops import ENGINES, backend, float8_gate
from sparsellm.ops import float8 as torchao
from sparsellm.ops.borders import MANY_TOKENS
from sparsellm.policy import Policy, first_use
from sparsellm.policy.training import TrainingChoice
from sparsellm.system.console import warn

FLOAT8_GATE = f"the gate product of calls of at least {MANY_TOKENS:,} tokens that the tile engine computes"


def is_accelerated(model: nn.Module) -> bool:
    return any(isinstance(module, SparseFeedForward) for module in model.modules())


@torch.inference_mode(False)  # tensors created in inference mode cannot be written outside of inference mode
def accelerate(
    model: nn.Module,
    kernels: str = "auto",
    engine: str | None = None,
    calibrate: bool = True,
    policy: Policy | None = None,
    training: bool = False,
    float8: bool | Literal["gate"] = False,
) -> nn.Module:
    """Switch the feedforward blocks inside `model` to the operator, in place.

    Args:
        kernels: "auto" takes the CUDA kernels on a Hopper GPU and the Triton kernels on another CUDA GPU. If these
            kernels cannot run, a message says so once, and the model stays as it is; with `training`, it computes as
            with "torch". "cuda" and "triton" require those kernels. "torch" computes every call with the operator's
            PyTorch reference.
        engine: "dense", "row" or "tile" for every call, instead of each block's own choice. Not with `training`.
        calibrate: Measure what the engines cost, if the model is in bfloat16 on a GPU and its layer shapes have not
            been measured on this GPU model. If not measured, constants of an H200 choose the engines.
        policy: The policy that chooses engines. By default a new one, from the measured costs.
        training: Let each block also compute calls with gradients on the engines, and choose them at the steps of the
            optimizer, as SparseFeedForward does. `l1_loss` gives the L1 term. Call this before the model is wrapped
            (DDP, FSDP2) or compiled.
        float8: Compute attention's projections in FP8 by torchao, and the gate product of the tile engine, from 1,536
            tokens on, in FP8 by the CUDA kernels. Values are rounded to e4m3 with a scale per token and per row of a
            weight; every neuron that fires after this rounding is computed. `restore` leaves attention in FP8. Needs
            the CUDA kernels and the package torchao. "gate": only the gate product, without torchao.

    Returns:
        `model`.

    Raises:
        KernelsUnavailable: The required kernels cannot run here.
        TypeError: `model` is no module, for example a path.
        ValueError: The operator does not support a block, or this process already uses other kernels. The model is
            unchanged.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model is {model!r}: it should be a loaded model, such as from_pretrained(PATH) of transformers"
        )
    if kernels not in ("auto", "cuda", "triton", "torch"):
        raise ValueError(f"kernels is {kernels!r}: it should be 'auto', 'cuda', 'triton' or 'torch'")
    if engine is not None and (engine not in ENGINES or kernels == "torch"):
        raise ValueError(
            f"engine is {engine!r} with kernels={kernels!r}: it should be None, or one of {', '.join(ENGINES)} with"
            " kernels='auto', 'cuda' or 'triton'"
        )
    if engine is not None and training:
        raise ValueError(f"engine is {engine!r} with training=True: it should be None")
    if float8 not in (False, True, "gate"):
        raise ValueError(f"float8 is {float8!r}: it should be True, False or 'gate'")
    if float8 and (training or kernels in ("triton", "torch")):
        raise ValueError(
            f"float8 is {float8!r} with kernels={kernels!r} and training={training}: it should be False, because only"
            " the CUDA kernels multiply in FP8, and only without gradients (runtime.float8 trains attention in FP8)"
        )
    if any(isinstance(module, SparseFeedForward) and module.original == (None,) for module in model.modules()):
        raise ValueError(
            f"this {kind(model)} has a SparseFeedForward made by its sizes: it should have none, because such a layer"
            " chooses its engines without sparsellm.accelerate"
        )
    if is_accelerated(model):
        raise ValueError(f"this {kind(model)} is accelerated already: call sparsellm.restore(model) first")
    originals = feedforward_blocks(model)
    if float8:
        kernels = "cuda"  # "auto" would leave the model in bfloat16 where the kernels are unavailable
    if kernels == "auto" and not backend.available()[0]:
        if not training:
            return model
        kernels = "torch"
    if kernels in ("cuda", "triton"):
        backend.load(kernels)
    if float8:
        _check_float8(model, originals, float8)
    # A layer in training measures again before its first decision, because the model may still be on a CPU now.
    measures = calibrate and policy is None
    if policy is None and backend.loaded() and engine is None and kernels != "torch":
        policy = _policy_for([block.get_parameter("down_proj.weight") for block in originals], calibrate)
    of_all = kernels == "torch", engine, policy or Policy()
    _replace(
        model,
        {
            block: SparseFeedForward.around(
                block, *of_all, TrainingChoice(measures) if training else None, bool(float8)
            )
            for block in originals
        },
    )
    spare_padding(model)
    if float8 == "gate":
        warn(f"FP8: {FLOAT8_GATE}; everything else, such as attention and decoding steps, stays bfloat16")
    elif float8:
        for name, module in model.named_modules():
            if name.endswith("self_attn"):
                torchao.quantize_linears(module)
        warn(f"FP8: attention's projections, and {FLOAT8_GATE}; everything else stays bfloat16")
    return model


def _check_float8(model: nn.Module, blocks: list[nn.Module], float8: bool | Literal["gate"]) -> None:
    """Raise ValueError if this machine, a block or the model's attention has no FP8 products."""
    if float8 != "gate":
        if (obstacle := torchao.obstacle()) is not None:
            raise ValueError(f"float8 is True: it should be False here, because {obstacle}")
        attention = [module for name, module in model.named_modules() if name.endswith("self_attn")]
        if not attention:
            raise ValueError(f"this {kind(model)} has no module `self_attn`: float8 should be False")
        for name, linear in (found for module in attention for found in module.named_modules()):
            if isinstance(linear, nn.Linear) and any(size % torchao.MULTIPLE for size in linear.weight.shape):
                raise ValueError(
                    f"{name}.weight of the attention is {list(linear.weight.shape)}: for float8=True both sizes should"
                    f" be multiples of {torchao.MULTIPLE}"
                )
    for block in blocks:
        weight = block.get_parameter("up_proj.weight")
        if not sparse_engines_take(weight):
            raise ValueError(
                f"a block is {weight.dtype} on {weight.device}: for float8={float8!r} it should be torch.bfloat16 on a"
                " GPU"
            )
        if weight.shape[1] % float8_gate.MULTIPLE:
            raise ValueError(
                f"a block's hidden size is {weight.shape[1]}: for float8={float8!r} it should be a multiple of"
                f" {float8_gate.MULTIPLE}"
            )


def _policy_for(weights: list[Tensor], calibrate: bool) -> Policy:
    """The policy for layers with these W_d, from cached costs. Layers without costs are measured if `calibrate`."""
    computing = {(w.shape[0], w.shape[1]): w for w in weights if sparse_engines_take(w)}
    first = next(iter(computing.values()), weights[0])
    with torch.cuda.device_of(first):  # costs are measured and cached for the current GPU's model
        layers = dict.fromkeys((w.shape[0], w.shape[1]) for w in weights)
        return first_use.policy_for(layers, first.device, computing if calibrate else ())


def policy_of(model: nn.Module) -> Policy | None:
    """The policy that chooses an accelerated model's engines; None for other models."""
    return next((block.choice.policy for block in model.modules() if isinstance(block, SparseFeedForward)), None)


def l1_loss(model: nn.Module) -> Tensor:
    """The L1 term to add to the loss of a model that trains on the operator: the sum of |h| over neurons and layers,
    averaged over the tokens of the last forward pass, padding included. 0-d, with a gradient until the
    optimizer's step. Layers that the model has skipped since the last step (LayerDrop) are left out.

    `model` contains SparseFeedForward layers, its own or those of `accelerate(model, training=True)`, and may be
    wrapped. This is the sum that `sparsity.l1_normalization=sum` multiplies by `sparsity.l1_coefficient` in our
    trainer. Raises ValueError for a model without such layers, and RuntimeError before the first forward pass with
    gradients, or in evaluation (SparseFeedForward.l1).
    """
    layers = [module for module in model.modules() if isinstance(module, SparseFeedForward)]
    if not layers:
        raise ValueError(
            f"{kind(model)} has no SparseFeedForward: build the model with sparsellm.SparseFeedForward layers, or call"
            " sparsellm.accelerate(model, training=True) first"
        )
    called = [layer for layer in layers if layer.in_training is None or layer.in_training.is_new] or layers
    terms = [layer.l1() for layer in called]
    return torch.stack([term.to(terms[0].device) for term in terms]).sum()


def restore(model: nn.Module) -> nn.Module:
    """Undo `accelerate`: put the model's own blocks back, with their current weights. Returns `model`."""
    _replace(model, {block: block.take_back() for block in model.modules() if isinstance(block, SparseFeedForward)})
    stop_sparing(model)
    return model


def _replace(model: nn.Module, replacements: dict[nn.Module, nn.Module]) -> None:
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child in replacements:
                setattr(parent, name, replacements[child])
