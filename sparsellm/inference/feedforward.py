"""A feedforward layer on the operator, created from sizes or around a model's block (`sparsellm.accelerate`).

Without gradients, the layer chooses engines by its `EngineChoice`. With gradients, one of these decides:

    our trainer             writes into the layer's `training_plan`
    the layer itself        `in_training`, at the steps of the optimizer (sparsellm.policy.training)
    neither                 PyTorch computes the call in training mode, and the dense engine in evaluation mode

Both kinds of plans are tensors that compiled code holds as inputs, so a new plan recompiles nothing.
"""

from collections.abc import Callable
from typing import Any, Self, TypeGuard

import torch
from torch import Tensor, nn

from sparsellm.inference.engine_choice import MANY, EngineChoice, kind_of, register, sparse_engines_take
from sparsellm.inference.matching import OWN, PROJECTIONS, kind
from sparsellm.ops import MAX_COLUMNS, MULTIPLE, FeedForwardOutput, Plan, backend, cuda, feedforward, float8_gate
from sparsellm.ops.feedforward import check, in_autocast, output_of
from sparsellm.ops.float8_gate import Float8Rows
from sparsellm.policy import Policy
from sparsellm.policy.training import Call, TrainingChoice, choose_in_training, in_backward, stop_choosing


class SparseFeedForward(nn.Module):
    """The feedforward layer of Llama with ReLU, y = down(relu(gate(x)) * up(x)), on the sparse kernels.

    x [..., K] -> y [..., K]. The parameters are those of transformers' `LlamaMLP`: gate_proj, up_proj and down_proj,
    without biases. Keep the parameters in float32 and train under autocast, or convert the layer to bfloat16: the
    sparse engines compute in bfloat16 on a GPU, and PyTorch computes all other calls. docs/TRAINING.md says how the
    layer works with DDP, FSDP2, activation checkpointing, torch.compile and CUDA graphs.

    The layer starts on dense kernels, and switches to sparse kernels as soon as its own counts say that sparse kernels
    are faster. The layer chooses at the steps of the torch.optim optimizer that updates its weights. The ranks of the
    default process group, if there is one, count and choose together, so each rank must train all layers.

    Args:
        hidden: K, a multiple of 8.
        intermediate: N, the number of neurons, a multiple of 8.
        gated: If False, y = down(relu(up(x))), and there is no gate_proj.
        activation: Only "relu" is supported, because its zeros are exact.

    Raises:
        ValueError: A size or the activation is not supported.
    """

    down_proj: nn.Linear
    handle: Tensor

    def __init__(self, hidden: int, intermediate: int, gated: bool = True, activation: str = "relu") -> None:
        if activation != "relu":
            raise ValueError(f"activation is {activation!r}: it should be 'relu', whose zeros are exact")
        for name, size in (("hidden", hidden), ("intermediate", intermediate)):
            if size % MULTIPLE or not 0 < size <= MAX_COLUMNS:
                raise ValueError(f"{name} is {size}: it should be a multiple of {MULTIPLE} up to {MAX_COLUMNS}")
        super().__init__()
        for name in PROJECTIONS if gated else PROJECTIONS[1:]:
            sizes = (intermediate, hidden) if name == "down_proj" else (hidden, intermediate)
            self.add_module(name, nn.Linear(*sizes, bias=False))
        self._choose(None, False, None, Policy(), TrainingChoice(calibrate=True))

    @classmethod
    def around(
        cls,
        original: nn.Module,
        traced: bool,
        engine: str | None,
        policy: Policy,
        in_training: TrainingChoice | None,
        float8: bool = False,
    ) -> Self:
        """A layer with the children of `original`, so that names and state_dict stay the same.

        traced: PyTorch computes every call. engine: the engine of every call without gradients; None: `policy` chooses.
        in_training: chooses the engine of calls with gradients. float8: as in EngineChoice.
        """
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        for name, child in original.named_children():
            layer.add_module(name, child)
        layer.training = original.training
        layer._choose(original, traced, engine, policy, in_training, float8)
        return layer

    def _choose(
        self,
        original: nn.Module | None,
        traced: bool,
        engine: str | None,
        policy: Policy,
        in_training: TrainingChoice | None,
        float8: bool = False,
    ) -> None:
        # The block that this layer replaces, or None. A plain attribute would register the block as a child.
        self.original = (original,)
        self.gated, self.returns_statistics = "gate_proj" in self._modules, isinstance(original, OWN)
        self.traced, self.in_training = traced, in_training
        # Set once by our trainer, which writes each new plan into the tensor; compiled code would miss a new tensor.
        self.training_plan: Tensor | None = None
        # Set by our trainer too: the tile engine computes the gate product in FP8. Validation then takes
        # `training_plan` as well, so that it rounds what training rounds.
        self.trains_in_float8 = False
        # A layer that trains keeps no second copy of W_d: the copy would cost memory, and FSDP2 fills a gathered weight
        # without changing its version, so the copy would go stale unnoticed.
        self.choice = EngineChoice(engine, policy, copies=in_training is None, float8=float8)
        weight = self.down_proj.weight
        # Compiled code finds `choice` by the address of this tensor.
        self.register_buffer("handle", torch.zeros(1, dtype=torch.uint8, device=weight.device), persistent=False)
        self._register()
        if self.choice.copies and not (traced or self.training or engine == "dense") and sparse_engines_take(weight):
            self.choice.neuron_major(weight)  # copies now, because the first call may be captured in a CUDA graph
            if float8:
                self.choice.float8_weight(self._weight("gate_proj" if self.gated else "up_proj"))

    def _register(self) -> None:
        register(self.handle, self.choice)
        if self.in_training is not None:
            choose_in_training(self)
            torch.compiler.assume_constant_result(_kernels_run)  # not at import time, because this call imports Dynamo

    def forward(self, x: Tensor) -> Tensor | FeedForwardOutput:
        weights = self._weight("gate_proj") if self.gated else None, self._weight("up_proj"), self._weight("down_proj")
        compiling, gradients = torch.compiler.is_compiling(), torch.is_grad_enabled()
        if not (compiling or gradients or self.traced or self.returns_statistics):
            y = self.choice.output_as_before(x, *weights)
            if y is not None:
                return y
        rows, cast = in_autocast(x.reshape(-1, x.shape[-1]))
        traced = self.traced or (self.in_training is not None and sparse_engines_take(rows) and not _kernels_run())
        if gradients or traced or self.trains_in_float8:
            gate_input = _in_float8(rows.detach()) if self.trains_in_float8 else None
            out = feedforward(rows, *weights, self._plan(rows, traced), gate_input)
            if self.in_training is not None and gradients and (compiling or not in_backward()):
                self.in_training.record(len(rows), out)
            y = out.y.view(x.shape)
            return out._replace(y=y) if self.returns_statistics else y
        check(rows, *weights, cast)
        rounding = compiling and self.choice.float8 and kind_of(len(rows)) == MANY
        rounded = float8_gate.quantize_rows(rows) if rounding else (None, None)  # fused with what computes x
        if not self.returns_statistics:
            if compiling:
                return torch.ops.sparsellm.chosen_output(rows, *weights, self.handle, *rounded).view(x.shape)
            return self.choice.output(rows, *weights).view(x.shape)
        if compiling:
            y, l1, fired, counts = torch.ops.sparsellm.chosen_feedforward(rows, *weights, self.handle, *rounded)
        else:
            y, l1, fired, counts = self.choice.run(rows, *weights)
        return output_of(y.view(x.shape), l1, fired, counts)

    def _plan(self, rows: Tensor, traced: bool) -> Plan | Tensor | None:
        """The plan of a call with gradients, or of any call if `traced`; None means the traced reference."""
        if self.in_training is not None:
            return None if traced or not sparse_engines_take(rows) else self.in_training.plan
        if self.trains_in_float8:
            return self.training_plan
        if traced or self.training:
            return self.training_plan if self.training and torch.is_grad_enabled() else None
        return Plan.of(self.choice.engine or "dense")  # the chosen plan may be row, which has no backward

    def l1(self) -> Tensor:
        """The L1 term of the last call with gradients: the sum of |h| over neurons, averaged over tokens. 0-d float32,
        with a gradient until the optimizer's step.

        Raises:
            RuntimeError: The layer has had no call with gradients, or the optimizer's step is over and torch.no_grad is
                on, as in evaluation. Evaluation does not measure the term.
        """
        call = self._last()
        assert self.in_training is not None
        if not (torch.is_grad_enabled() or self.in_training.is_new):
            raise RuntimeError(
                "the L1 term is read under torch.no_grad after the optimizer's step: it should be read in training,"
                " because evaluation does not measure it. counts()['l1'] is a layer's value of the last training call"
            )
        return call.l1 / max(call.tokens, 1)

    def counts(self) -> dict[str, float | str]:
        """What the last call with gradients counted on this rank, for logging. Waits for the device.

        Keys: `engine`, the engine of the next call, "dense" or "tile"; `nonzeros`: nonzero activations per token;
        `fired`: fraction of neurons that were active for any token; `l1`: the value of `l1()`; `rest_calls`: 1 if the
        nonzeros exceeded the lists of the tile engine, which makes some tokens slower, else 0. Raises RuntimeError
        before the first such call.
        """
        call = self._last()
        assert self.in_training is not None
        # float64, because float32 rounds large counts
        counted = [call.nnz.double(), call.fired.double().mean(), call.l1, call.rest_calls]
        nnz, fired, l1, rest_calls = torch.stack(counted).tolist()
        tokens, engine = max(call.tokens, 1), Plan.read(self.in_training.plan).engine.name
        return {"engine": engine, "nonzeros": nnz / tokens, "fired": fired, "l1": l1 / tokens, "rest_calls": rest_calls}

    def _last(self) -> Call:
        if self.in_training is None:
            raise RuntimeError(
                "this layer does not train: sparsellm.accelerate should be called with training=True. Call"
                " sparsellm.restore(model), then sparsellm.accelerate(model, training=True)"
            )
        if self.in_training.last is None:
            raise RuntimeError(
                "this layer has no call with gradients yet: it should be called first, outside of torch.no_grad."
                " Activation checkpointing needs use_reentrant=False; with the Trainer of transformers, set"
                ' gradient_checkpointing_kwargs={"use_reentrant": False}'
            )
        return self.in_training.last

    def _weight(self, name: str) -> Tensor:
        # Read nn.Module's dicts directly, because nn.Module.__getattr__ is slow, and blocks are called often.
        linear = self._modules[name]
        if type(linear) is not nn.Linear and not (self.original == (None,) and _computes_as_linear(linear)):
            raise ValueError(
                f"{name} of an accelerated block is now {kind(linear)}: it should be nn.Linear; call"
                " sparsellm.restore(model) before replacing its modules"
            )
        return linear._parameters["weight"]  # type: ignore[return-value]  # a cast() would cost time

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Moves the block, as nn.Module does for `to` or `cuda`, registers the handle at the handle's new address, and
        forgets which weights were checked."""
        super()._apply(fn, recurse)
        self._register()
        self.choice.checked = None
        return self

    def _replicate_for_data_parallel(self) -> Self:
        """nn.DataParallel calls this method. Its replicas would overwrite each other's counts and L1 term."""
        raise RuntimeError(
            "a SparseFeedForward is replicated by nn.DataParallel: it should have one process per GPU; start with"
            " `torchrun --nproc_per_node N`, or make one GPU visible with CUDA_VISIBLE_DEVICES=0"
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores a copy, and registers the copy's own handle for its own choice."""
        super().__setstate__(state)
        self._register()

    def take_back(self) -> nn.Module:
        """The original block, with this block's current children and training mode; this layer if it replaces none."""
        (original,) = self.original
        if original is None:
            return self
        stop_choosing(self)
        for name, child in self.named_children():
            setattr(original, name, child)
        original.training = self.training
        return original


def _computes_as_linear(module: Any) -> TypeGuard[nn.Linear]:
    """Whether `module` is of a subclass of nn.Linear, such as torchtitan's, that adds nothing to the forward pass."""
    if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
        return False
    return "weight" in module._parameters and not module._forward_pre_hooks  # neither parametrized nor sharded


def _in_float8(rows: Tensor) -> Float8Rows:
    """x [M, K], bfloat16, in FP8. Compiled code fuses the rounding with what computes x."""
    return float8_gate.quantize_rows(rows) if torch.compiler.is_compiling() else cuda.quantize_rows(cuda.readable(rows))


def _kernels_run() -> bool:
    """Whether this GPU's kernels can run here; loads them if so. Compiled code calls this once, during tracing."""
    return backend.available()[0]
