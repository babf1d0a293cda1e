"""Faster inference: the feedforward blocks of a loaded model, computed by the sparse kernels.

    accelerate(model)    switch every block to the operator of sparsellm.ops; weights, names and state_dict stay
    restore(model)       put the model's own blocks back

For our Decoder and for Hugging Face models with blocks as sparsellm.model.acceptance describes them: Llama, Qwen or
Mistral with hidden_act relu, Arcee with relu. Results are the dense model's but for rounding. The sparse engines take
bfloat16 on a Hopper GPU, without gradients (torch.no_grad, torch.inference_mode); other calls take the dense one. In
training mode, calls with gradients follow `SparseFeedForward.training_plan`: until a trainer sets it, they are computed
as PyTorch does it.

Each block decides which engine runs, dense, row or tile, from what its earlier calls counted
(sparsellm.model.engine_choice); `engine=` fixes it. An accelerated model compiles as any other, whole or by layer: what
is decided is data of the operator, in no hook, and recompiles nothing.
"""

import torch
from torch import Tensor, nn

from sparsellm.model.acceptance import OWN, feedforward_blocks, kind
from sparsellm.model.engine_choice import EngineChoice, register, sparse_engines_take
from sparsellm.ops import ENGINES, FeedForwardOutput, Plan, build, feedforward
from sparsellm.ops.feedforward import check, in_autocast, output_of


@torch.inference_mode(False)  # tensors made in inference mode could not be written outside of it
def accelerate(model: nn.Module, kernels: str = "auto", engine: str | None = None) -> nn.Module:
    """Switch the feedforward blocks inside `model` to the operator, in place, and return `model`.

    kernels: "cuda" raises KernelsUnavailable where the CUDA kernels cannot run; "auto" says so once and leaves the
    model as it is; "torch" is the operator's PyTorch reference. engine: "dense", "row" or "tile" for every call,
    instead of the choice by measurement. Raises ValueError, having changed nothing, for a block that the operator does
    not compute.
    """
    if kernels not in ("auto", "cuda", "torch"):
        raise ValueError(f"kernels is {kernels!r}: it should be 'auto', 'cuda' or 'torch'")
    if engine is not None and (engine not in ENGINES or kernels == "torch"):
        raise ValueError(
            f"engine is {engine!r} with kernels={kernels!r}: it should be None, or one of {', '.join(ENGINES)} with"
            " kernels='auto' or 'cuda'"
        )
    if any(isinstance(module, SparseFeedForward) for module in model.modules()):
        raise ValueError(f"this {kind(model)} is accelerated already: call sparsellm.restore(model) first")
    originals = feedforward_blocks(model)
    if kernels == "auto" and not build.available()[0]:
        return model
    if kernels == "cuda":
        build.load()
    _replace(model, {block: SparseFeedForward(block, kernels == "torch", engine) for block in originals})
    return model


def restore(model: nn.Module) -> nn.Module:
    """Undo `accelerate`: the model's own blocks, with the weights of this moment. Returns `model`."""
    _replace(model, {block: block.take_back() for block in model.modules() if isinstance(block, SparseFeedForward)})
    return model


def _replace(model: nn.Module, replacements: dict[nn.Module, nn.Module]) -> None:
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child in replacements:
                setattr(parent, name, replacements[child])


class SparseFeedForward(nn.Module):
    """A feedforward block on the operator. x [..., K] -> y [..., K], or FeedForwardOutput where the original's is.

    Its children are the original's. Beside them it owns what no state_dict holds: the choice of its engine, and the
    handle by which compiled code finds that choice. Neither serves training, where `training_plan` decides, which is
    its setter's: compiled code reads it at every call, so write into it.
    """

    def __init__(self, original: nn.Module, traced: bool, engine: str | None) -> None:
        super().__init__()
        self.original = (original,)  # in a tuple, or it would be a child
        for name, child in original.named_children():
            self.add_module(name, child)
        self.training = original.training
        self.gated, self.returns_statistics = hasattr(original, "gate_proj"), isinstance(original, OWN)
        self.traced = traced
        self.training_plan: Tensor | None = None  # None: the traced reference
        self.choice = EngineChoice(engine)
        weight = self.down_proj.weight
        self.register_buffer("handle", torch.zeros(1, dtype=torch.uint8, device=weight.device), persistent=False)
        register(self.handle, self.choice)
        if not (traced or self.training or engine == "dense") and sparse_engines_take(weight):
            self.choice.neuron_major(weight)  # not in the first call, which may be of a graph with memory of its own

    def forward(self, x: Tensor) -> Tensor | FeedForwardOutput:
        rows = x.reshape(-1, x.shape[-1])
        weights = self._weight("gate_proj") if self.gated else None, self._weight("up_proj"), self._weight("down_proj")
        if torch.is_grad_enabled() or self.traced:
            out = feedforward(rows, *weights, self._plan())
            y = out.y.view(x.shape)
            return out._replace(y=y) if self.returns_statistics else y
        rows, cast = in_autocast(rows)
        check(rows, *weights, cast)
        compiling = torch.compiler.is_compiling()
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
        """The plan of a call with gradients; None: the traced reference."""
        if self.traced or self.training:
            return self.training_plan if self.training and torch.is_grad_enabled() else None
        return Plan.of(self.choice.engine or "dense")  # not every engine that may be chosen has a backward

    def _weight(self, name: str) -> Tensor:
        linear = self._modules[name]  # not by nn.Module's __getattr__, which takes a microsecond for each
        if type(linear) is not nn.Linear:
            raise ValueError(
                f"{name} of an accelerated block has become {kind(linear)}: it should be nn.Linear, so call"
                " sparsellm.restore(model) before changing its modules"
            )
        return linear._parameters["weight"]

    def _apply(self, fn, recurse: bool = True) -> nn.Module:
        """`to`, `cuda` and the like move the handle, too."""
        super()._apply(fn, recurse)
        register(self.handle, self.choice)
        return self

    def __setstate__(self, state: dict) -> None:
        """A copy has a handle and a choice of its own."""
        super().__setstate__(state)
        register(self.handle, self.choice)

    def take_back(self) -> nn.Module:
        """The original, with the children and the mode of this moment."""
        original = self.original[0]
        for name, child in self.named_children():
            setattr(original, name, child)
        original.training = self.training
        return original
