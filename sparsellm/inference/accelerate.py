"""Accelerates inference: computes the feedforward blocks of a loaded model with the sparse kernels.

`accelerate` works on our Decoder and on Hugging Face models with the blocks that sparsellm.inference.matching
describes: Llama, Qwen or Mistral with hidden_act relu, Arcee with relu. Results differ from the original model's by
rounding only. Weights, names and state_dict stay the same.

Each block chooses the engine of a call (dense, row or tile) from the counts of its earlier calls
(inference/engine_choice.py) and from the costs of the engines on this GPU model. If the costs are not known for layers
of this shape, `accelerate` measures them once, in a few seconds (sparsellm.policy). `engine=` fixes the engine. Sparse
engines compute calls in bfloat16 on a GPU without gradients (torch.no_grad, torch.inference_mode); all other calls run
dense. In training mode, `SparseFeedForward.training_plan` decides calls with gradients; until a trainer sets that plan,
PyTorch computes these calls.

Tokens hidden by the attention mask, such as padding, fire no neurons (sparsellm.inference.padding).

An accelerated model compiles like any other, whole or by layer. The choice of engine is data that the operator reads at
run time, so a new choice recompiles nothing.
"""

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn

from sparsellm.inference.engine_choice import EngineChoice, register, sparse_engines_take
from sparsellm.inference.matching import OWN, feedforward_blocks, kind
from sparsellm.inference.padding import spare_padding, stop_sparing
from sparsellm.ops import ENGINES, FeedForwardOutput, Plan, backend, feedforward
from sparsellm.ops.feedforward import check, in_autocast, output_of
from sparsellm.policy import Policy, first_use


def is_accelerated(model: nn.Module) -> bool:
    return any(isinstance(module, SparseFeedForward) for module in model.modules())


@torch.inference_mode(False)  # tensors created in inference mode cannot be written outside of inference mode
def accelerate(
    model: nn.Module,
    kernels: str = "auto",
    engine: str | None = None,
    calibrate: bool = True,
    policy: Policy | None = None,
) -> nn.Module:
    """Switch the feedforward blocks inside `model` to the operator, in place.

    Args:
        kernels: "auto" takes the CUDA kernels on a Hopper GPU and the Triton kernels on another CUDA GPU. If these
            kernels cannot run, a message says so once, and the model stays as it is. "cuda" and "triton" demand the
            named kernels. "torch" computes every call by the operator's PyTorch reference.
        engine: "dense", "row" or "tile" for every call, instead of each block's own choice.
        calibrate: Measure what the engines cost, if the model is in bfloat16 on a GPU and its layer shapes have not
            been measured on this GPU model. If not measured, constants of an H200 choose the engines.
        policy: The policy that chooses engines. By default a new one, from the measured costs.

    Returns:
        `model`.

    Raises:
        KernelsUnavailable: The demanded kernels cannot run here.
        ValueError: A block is not one that the operator computes, or this process already computes on other kernels.
            The model is unchanged.
    """
    if kernels not in ("auto", "cuda", "triton", "torch"):
        raise ValueError(f"kernels is {kernels!r}: it should be 'auto', 'cuda', 'triton' or 'torch'")
    if engine is not None and (engine not in ENGINES or kernels == "torch"):
        raise ValueError(
            f"engine is {engine!r} with kernels={kernels!r}: it should be None, or one of {', '.join(ENGINES)} with"
            " kernels='auto', 'cuda' or 'triton'"
        )
    if is_accelerated(model):
        raise ValueError(f"this {kind(model)} is accelerated already: call sparsellm.restore(model) first")
    originals = feedforward_blocks(model)
    if kernels == "auto" and not backend.available()[0]:
        return model
    if kernels in ("cuda", "triton"):
        backend.load(kernels)
    if policy is None and backend.loaded() and engine is None and kernels != "torch":
        policy = _policy_for([block.get_parameter("down_proj.weight") for block in originals], calibrate)
    policy = policy or Policy()
    _replace(model, {block: SparseFeedForward(block, kernels == "torch", engine, policy) for block in originals})
    spare_padding(model)
    return model


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


class SparseFeedForward(nn.Module):
    """A feedforward block on the operator. x [..., K] -> y [..., K], or FeedForwardOutput if the original returns that.

    The block has the original's children, so names and state_dict stay the same. Outside the state_dict, the block owns
    its engine choice and the handle through which compiled code finds that choice. Training uses neither: there the
    tensor `training_plan` decides. A trainer sets `training_plan` once and writes each new plan into that tensor,
    because compiled code holds the tensor as an input and would not see a new one.
    """

    down_proj: nn.Linear
    handle: Tensor

    def __init__(self, original: nn.Module, traced: bool, engine: str | None, policy: Policy) -> None:
        super().__init__()
        self.original = (original,)  # in a tuple, because a plain attribute would register it as a child
        for name, child in original.named_children():
            self.add_module(name, child)
        self.training = original.training
        self.gated, self.returns_statistics = hasattr(original, "gate_proj"), isinstance(original, OWN)
        self.traced = traced
        self.training_plan: Tensor | None = None  # None: the traced reference
        self.choice = EngineChoice(engine, policy)
        weight = self.down_proj.weight
        self.register_buffer("handle", torch.zeros(1, dtype=torch.uint8, device=weight.device), persistent=False)
        register(self.handle, self.choice)
        if not (traced or self.training or engine == "dense") and sparse_engines_take(weight):
            self.choice.neuron_major(weight)  # copies now, because the first call may be captured in a CUDA graph

    def forward(self, x: Tensor) -> Tensor | FeedForwardOutput:
        weights = self._weight("gate_proj") if self.gated else None, self._weight("up_proj"), self._weight("down_proj")
        compiling, gradients = torch.compiler.is_compiling(), torch.is_grad_enabled()
        if not (compiling or gradients or self.traced or self.returns_statistics):
            y = self.choice.output_as_before(x, *weights)
            if y is not None:
                return y
        rows = x.reshape(-1, x.shape[-1])
        if gradients or self.traced:
            out = feedforward(rows, *weights, self._plan())
            y = out.y.view(x.shape)
            return out._replace(y=y) if self.returns_statistics else y
        rows, cast = in_autocast(rows)
        check(rows, *weights, cast)
        if not self.returns_statistics:
            if compiling:
                return torch.ops.sparsellm.chosen_output(rows, *weights, self.handle).view(x.shape)
            return self.choice.output(rows, *weights).view(x.shape)
        if compiling:
            y, l1, fired, counts = torch.ops.sparsellm.chosen_feedforward(rows, *weights, self.handle)
        else:
            y, l1, fired, counts = self.choice.run(rows, *weights)
        return output_of(y.view(x.shape), l1, fired, counts)

    def _plan(self) -> Plan | Tensor | None:
        """The plan of a call with gradients, or of any call if `traced`; None means the traced reference."""
        if self.traced or self.training:
            return self.training_plan if self.training and torch.is_grad_enabled() else None
        return Plan.of(self.choice.engine or "dense")  # the chosen plan may be row, which has no backward

    def _weight(self, name: str) -> Tensor:
        # Read nn.Module's dicts directly, because nn.Module.__getattr__ is slow, and blocks are called often.
        linear = self._modules[name]
        if type(linear) is not nn.Linear:
            raise ValueError(
                f"{name} of an accelerated block is now {kind(linear)}: it should be nn.Linear; call"
                " sparsellm.restore(model) before replacing its modules"
            )
        return linear._parameters["weight"]  # type: ignore[return-value]  # a cast() would cost time

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Moves the block, as nn.Module does for `to` or `cuda`, registers the handle at the handle's new address, and
        forgets which weights were checked."""
        super()._apply(fn, recurse)
        register(self.handle, self.choice)
        self.choice.checked = None
        return self

    def __setstate__(self, state: dict) -> None:
        """Restores a copy, and registers the copy's own handle for its own choice."""
        super().__setstate__(state)
        register(self.handle, self.choice)

    def take_back(self) -> nn.Module:
        """The original block, with this block's current children and training mode."""
        original = self.original[0]
        for name, child in self.named_children():
            setattr(original, name, child)
        original.training = self.training
        return original
