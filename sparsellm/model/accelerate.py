"""Faster inference: the feedforward blocks of a loaded model, computed by the sparse kernels.

    accelerate(model)    switch every block to the operator of sparsellm.ops; weights, names and state_dict stay
    restore(model)       put the model's own blocks back

For our Decoder and for Hugging Face models with blocks as sparsellm.model.acceptance describes them: Llama, Qwen or
Mistral with hidden_act relu, Arcee with relu. Results are the dense model's but for rounding. The sparse engines take
bfloat16 on a Hopper GPU, without gradients (torch.no_grad, torch.inference_mode); other calls take the dense one. In
training mode, calls with gradients follow `SparseFeedForward.training_plan`: until a trainer sets it, they are computed
as PyTorch does it.

Each block decides which engine runs, dense, row or tile, from what its earlier calls counted, separately for calls of
few tokens (decoding) and of many; between the two it stays dense (sparsellm.ops.dispatch). The host never waits: counts
travel one copy at a time, sent when a forward pass ends and read when a later one begins. So the choice, and with it
the last bits, may differ from run to run; `engine=` fixes it. While a CUDA graph is captured nothing is chosen: it
keeps the engines it was captured with.
Plans are data, so a new choice recompiles nothing. Sending and reading happen outside of compiled code, in hooks of the
model and of its stack of layers: torch.compile(model) breaks its graph at both ends of the model; for fullgraph=True,
accelerate what torch.compile returns; a stack compiled as a whole and called by itself chooses nothing.
"""

from functools import lru_cache
from warnings import warn

import torch
from torch import Tensor, nn

from sparsellm.model.acceptance import OWN, feedforward_blocks, kind
from sparsellm.ops import (
    ENGINES,
    FeedForwardOutput,
    build,
    choose_engine,
    gated_ffn,
    neuron_major,
    nongated_ffn,
    plan_of,
)
from sparsellm.ops.dispatch import FEW_TOKENS, MANY_TOKENS, room_for
from sparsellm.ops.layout import check_fresh

ATTRIBUTE = "_sparsellm_dispatch"  # of an accelerated model: its Dispatch


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
    blocks = {original: SparseFeedForward(original, kernels == "torch", engine) for original in originals}
    stack = _stack(model, originals)
    _replace(model, blocks)
    if kernels != "torch":
        vars(model)[ATTRIBUTE] = Dispatch(model, stack, list(blocks.values()))
    return model


def restore(model: nn.Module) -> nn.Module:
    """Undo `accelerate`: the model's own blocks, with the weights of this moment. Returns `model`."""
    modules = list(model.modules())
    for module in modules:
        if dispatch := vars(module).pop(ATTRIBUTE, None):
            dispatch.detach()
    _replace(model, {block: block.take_back() for block in modules if isinstance(block, SparseFeedForward)})
    return model


def _stack(model: nn.Module, blocks: list[nn.Module]) -> nn.Module:
    """The innermost module with a forward pass of its own that holds all `blocks`, such as a LlamaModel."""
    holders = [m for m in model.modules() if m not in blocks and set(blocks) <= set(m.modules())]  # from outside in
    return next((m for m in reversed(holders) if not isinstance(m, nn.ModuleList | nn.ModuleDict)), model)


def _replace(model: nn.Module, replacements: dict[nn.Module, nn.Module]) -> None:
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child in replacements:
                setattr(parent, name, replacements[child])


class SparseFeedForward(nn.Module):
    """A feedforward block on the operator. x [..., K] -> y [..., K], or FeedForwardOutput where the original's is.

    Its children are the original's. Beside them it owns what no state_dict holds: a plan for few tokens and one for
    many, the neuron-major copy of W_d, and the counts of its latest call. None of these serve training, where
    `training_plan` decides, which is its setter's: read at every call, so write into it.
    """

    def __init__(self, original: nn.Module, traced: bool, engine: str | None) -> None:
        super().__init__()
        self.original = (original,)  # in a tuple, or it would be a child
        for name, child in original.named_children():
            self.add_module(name, child)
        self.training = original.training
        self.gated, self.returns_statistics = hasattr(original, "gate_proj"), isinstance(original, OWN)
        self.traced, self.engine = traced, engine
        self.training_plan: Tensor | None = None  # None: the traced reference
        # Until measured, single tokens are taken to be sparse and batches to be dense.
        self.plans, self.dense = (plan_of(engine or "row"), plan_of(engine or "dense")), plan_of("dense")
        self.w_down_t = None
        self.counts: Tensor | None = None  # int64 [2], on its device: nnz and union of the latest call
        self.tokens = 0  # of that call; 0: it had no choice and was not counted, or its counts were sent

    def forward(self, x: Tensor) -> Tensor | FeedForwardOutput:
        rows = x.reshape(-1, x.shape[-1])
        gradients = torch.is_grad_enabled()
        learning = self.training and gradients
        plan = self.training_plan if learning else self._plan(rows, gradients)
        counting = plan is not None and not learning
        if counting and not torch.compiler.is_compiling():
            self.prepare()
        up, down = self._weight("up_proj"), self._weight("down_proj")
        w_down_t = self.w_down_t if counting else None
        if self.gated:
            out = gated_ffn(rows, self._weight("gate_proj"), up, down, plan, w_down_t)
        else:
            out = nongated_ffn(rows, up, down, plan, w_down_t)
        if counting and self.counts is not None:
            self.tokens = rows.shape[0] if has_choice(rows.shape[0]) else 0
            if self.tokens:
                torch.stack((out.nnz, out.union), out=self.counts)
        y = out.y.view(x.shape)
        return out._replace(y=y) if self.returns_statistics else y

    def _weight(self, name: str) -> Tensor:
        linear = getattr(self, name)
        if type(linear) is not nn.Linear:
            raise ValueError(
                f"{name} of an accelerated block has become {kind(linear)}: it should be nn.Linear, so call"
                " sparsellm.restore(model) before changing its modules"
            )
        return linear.weight

    def _plan(self, rows: Tensor, gradients: bool) -> Tensor | None:
        """The plan of a call outside of training; None: the traced reference."""
        if self.traced:
            return None
        if gradients and self.engine is None:
            return self.dense  # not every engine that may be chosen has a backward
        device, dtype = rows.device.type, rows.dtype
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        m = rows.shape[0]
        if self.engine is None and not (has_choice(m) and sparse_engines_take(device, dtype)):
            return self.dense
        return self.plans[int(m >= MANY_TOKENS)]  # torch 2.11 compiles no other index

    def prepare(self) -> None:
        """Before a call: a neuron-major W_d of the weight as it is now, and room for the counts beside it."""
        if self.traced or _is_capturing():
            return
        weight = self.down_proj.weight
        if self.engine == "dense" or not sparse_engines_take(weight.device.type, weight.dtype):
            self.w_down_t = None
        elif not self._is_fresh(weight):
            self.w_down_t = None  # its memory is free for the new one
            with torch.inference_mode(False):
                self.w_down_t = neuron_major(weight)
        if self.engine is None and (self.counts is None or self.counts.device != weight.device):
            with torch.inference_mode(False):
                self.counts, self.tokens = torch.zeros(2, dtype=torch.int64, device=weight.device), 0

    def _is_fresh(self, weight: Tensor) -> bool:
        if self.w_down_t is None:
            return False
        try:
            check_fresh(self.w_down_t.weight, self.w_down_t.stamp, weight)
        except ValueError:
            return False
        return True

    def decide(self, tokens: int, nnz: int, union: int) -> None:
        """Choose the engine for calls as large as one of `tokens` tokens (`has_choice`) that gave these counts."""
        neurons, width = self.up_proj.weight.shape
        plan = self.plans[int(tokens >= MANY_TOKENS)]
        engine = choose_engine(tokens, width, neurons, nnz, union, current=int(plan[0]))
        plan.copy_(plan_of(ENGINES[engine], room=room_for(nnz / tokens)))

    def take_back(self) -> nn.Module:
        """The original, with the children and the mode of this moment."""
        original = self.original[0]
        for name, child in self.named_children():
            setattr(original, name, child)
        original.training = self.training
        return original


class Dispatch:
    """The hooks of an accelerated model: ready its blocks, read what has arrived, send what was counted."""

    def __init__(self, model: nn.Module, stack: nn.Module, blocks: list[SparseFeedForward]) -> None:
        self.blocks = blocks
        self.sent: tuple[Tensor, list] | None = None  # counts [blocks, 2]; of which blocks and tokens
        self.arrival: torch.cuda.Event | None = None  # of what is sent; None: it is there
        self.hooks = [model.register_forward_pre_hook(self.before), model.register_forward_hook(self.after)]
        if stack is not model:  # it may be called by itself
            self.hooks.append(stack.register_forward_pre_hook(self.before_stack))
            self.hooks.append(stack.register_forward_hook(self.after_stack))

    def detach(self) -> None:
        for hook in self.hooks:
            hook.remove()

    def before_stack(self, stack: nn.Module, inputs: tuple) -> None:
        if not torch.compiler.is_compiling():
            self.before(stack, inputs)

    def after_stack(self, stack: nn.Module, inputs: tuple, output: object) -> None:
        if not torch.compiler.is_compiling():
            self.after(stack, inputs, output)

    @torch.compiler.disable
    def before(self, model: nn.Module, _inputs: tuple) -> None:
        if not _is_capturing() and not (model.training and torch.is_grad_enabled()):
            self._read()

    @torch.inference_mode(False)  # which enables gradients: that question comes before
    def _read(self) -> None:
        for block in self.blocks:
            block.prepare()
        weight = self.blocks[0].down_proj.weight
        if weight.is_cuda and weight.dtype != torch.bfloat16 and not torch.is_autocast_enabled("cuda"):
            _say_dense(weight.dtype)
        if self.sent is not None and (self.arrival is None or self.arrival.query()):
            (counts, counted), self.sent = self.sent, None
            for (block, m), (nnz, union) in zip(counted, counts.tolist(), strict=True):
                block.decide(m, nnz, union)

    @torch.compiler.disable
    @torch.inference_mode(False)
    def after(self, _model: nn.Module, _inputs: tuple, _output: object) -> None:
        counted = [(block, block.tokens) for block in self.blocks if block.tokens]
        if _is_capturing() or self.sent is not None or not counted:
            return
        device = counted[0][0].counts.device
        counts = torch.stack([block.counts.to(device, non_blocking=True) for block, _ in counted])
        if counts.is_cuda:
            counts = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True).copy_(counts, non_blocking=True)
            self.arrival = torch.cuda.Event()
            self.arrival.record(torch.cuda.current_stream(device))
        self.sent = counts, counted
        for block, _ in counted:
            block.tokens = 0


def has_choice(tokens: int) -> bool:
    """Whether a call of so many tokens may take a sparse engine: few may, and many; between the two it stays dense."""
    return not FEW_TOKENS < tokens < MANY_TOKENS


def sparse_engines_take(device_type: str, dtype: torch.dtype) -> bool:
    return device_type == "cuda" and dtype == torch.bfloat16


def _is_capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


@lru_cache
def _say_dense(dtype: torch.dtype) -> None:
    warn(
        f"the accelerated model's weights are {dtype}, so its feedforward blocks run dense: the sparse kernels compute"
        " in bfloat16; load it with dtype=torch.bfloat16",
        stacklevel=2,
    )
