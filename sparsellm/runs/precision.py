"""Decides the dtype in which a command runs a checkpoint, and loads a checkpoint's full-precision weights."""

import warnings
from contextlib import suppress

import torch
from torch import Tensor

from sparsellm.config import Activation, ConfigError, Dtype, Kernels, ModelConfig, load
from sparsellm.hf import conversion, pretrained
from sparsellm.model.dtypes import DTYPES
from sparsellm.ops import backend
from sparsellm.runs.layout import CONFIG, HF, STATE
from sparsellm.runs.locate import Checkpoint, CheckpointNotFound
from sparsellm.system.console import warn_on_main


def default_on(device: str) -> str:
    """The reason that commands print for their default dtype, which is bfloat16 on a GPU and float32 on a CPU."""
    return f"the default on a {'GPU' if device == 'cuda' else 'CPU'}"


def obstacle(kernels: Kernels, device: str) -> str | None:
    """Why feedforward layers run in PyTorch, whatever the model; None if kernels may run them."""
    if kernels == Kernels.torch:
        return "kernels=torch"
    return "they need a CUDA GPU" if device == "cpu" and not kernels.demanded else None


def computed_in(asked: Dtype, checkpoint: Checkpoint) -> tuple[torch.dtype, str]:
    """Returns (dtype of weights and activations, reason). The dtype is the requested one, else the run's precision,
    else that of the stored weights.

    Raises BrokenModel if the stored weights cannot be read, and OSError if the hub cannot be read.
    """
    if asked != Dtype.auto:
        return getattr(torch, asked.name), f"dtype={asked.name}"
    with suppress(ConfigError, OSError):  # a damaged config.yaml does not make the weights unusable
        if checkpoint.run is not None:
            return DTYPES[load(checkpoint.run / CONFIG).runtime.precision], "as the run trained"
    return pretrained.stored_dtype(checkpoint.model), "as stored"


def computation(dtype: torch.dtype, why: str, obstacle: str | None, kernels: str | None = None) -> str:
    """A line that says in which dtype, and with which kernels, a command runs a model. `obstacle`: why feedforward
    layers run in PyTorch; None if they run on `kernels` (default: the kernels loaded in this process)."""
    kernels = kernels or backend.loaded()
    engines = f"none ({obstacle})" if obstacle else f"{kernels} (available on this GPU)"
    return f"dtype {dtype_name(dtype)} ({why}), kernels {engines}"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def load_float32(checkpoint: Checkpoint) -> tuple[ModelConfig, Activation, dict[str, Tensor]]:
    """Like `conversion.load`, but with the float32 weights from state/ if hf/ holds rounded ones.

    Raises ValueError and OSError as `conversion.load` does, and CheckpointNotFound if state/ is damaged.
    """
    # Deferred: these imports take a second, and most commands do not need them.
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    from sparsellm.runs.snapshot import MODEL_PREFIX
    from sparsellm.runs.state_reader import StateReader

    if not checkpoint.has_checksums or pretrained.stored_dtype(checkpoint.model) == torch.float32:
        return conversion.load(checkpoint.model)
    assert checkpoint.folder is not None  # because the checkpoint has checksums
    state = checkpoint.folder / STATE
    if not state.is_dir():
        warn_on_main(f"{checkpoint} has no {STATE}/: its weights are those of {HF}/, which are rounded to bfloat16")
        return conversion.load(checkpoint.model)
    checkpoint.verify(STATE)
    config, activation = conversion.architecture(checkpoint.model)
    reader = StateReader(state)
    weights = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.described().items()
        if name.startswith(MODEL_PREFIX)
    }
    try:
        with warnings.catch_warnings(action="ignore"):  # torch warns about loading in a single process
            dcp.load(weights, storage_reader=reader, no_dist=True)
    except CheckpointException as error:  # a BaseException that wraps the ranks' exceptions, including interrupts
        for reason, _ in error.failures.values():
            if isinstance(reason, KeyboardInterrupt):
                raise reason from None
        raise CheckpointNotFound(
            f"checkpoint {checkpoint} cannot be read: {error}; choose another checkpoint"
        ) from error
    if broken := pretrained.not_finite(weights):
        raise CheckpointNotFound(f"checkpoint {checkpoint} has values that are not finite in {', '.join(broken[:4])}")
    return config, activation, {name.removeprefix(MODEL_PREFIX): weight for name, weight in weights.items()}
