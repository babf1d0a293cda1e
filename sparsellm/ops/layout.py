"""W_d as the sparse engines read it: neuron-major, one contiguous row of K values for each neuron.

Stored weights keep Hugging Face's layout, w_down [K, N]. `neuron_major(w_down)` makes the other one; its caller owns it
and makes it anew whenever w_down has changed. The two cannot drift apart unnoticed: the copy carries where w_down lay
and its version, which every in-place change raises, and an operator refuses a copy that does not match its w_down.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class NeuronMajor(NamedTuple):
    weight: Tensor  # [N, K], contiguous, the dtype of w_down
    stamp: Tensor  # int64 [2] on the CPU: data_ptr and version of w_down
    source: Tensor  # w_down itself, kept alive so that no other tensor can take its place in memory


def neuron_major(w_down: Tensor) -> NeuronMajor:
    """w_down [K, N], transposed; without gradients. Raises ValueError for a tensor made in inference mode."""
    if w_down.dim() != 2:
        raise ValueError(f"w_down is {list(w_down.shape)}: it should be [K, N]")
    if w_down.is_inference():
        raise ValueError(
            "w_down was made in inference mode, where tensors have no version to tell a stale copy by: make w_down"
            " outside of torch.inference_mode()"
        )
    source = w_down.detach()
    return NeuronMajor(source.t().contiguous(), torch.tensor(_identity(w_down)), source)


def check_fresh(weight: Tensor, stamp: Tensor, w_down: Tensor) -> None:
    """Raise ValueError unless `weight` and `stamp` of a NeuronMajor are w_down's [K, N] of this moment."""
    for name, is_, should_be in (
        ("w_down_t.weight", list(weight.shape), list(reversed(w_down.shape))),
        ("w_down_t.weight.dtype", weight.dtype, w_down.dtype),
        ("w_down_t.weight.device", weight.device, w_down.device),
    ):
        if is_ != should_be:
            raise ValueError(f"{name} is {is_}: it should be {should_be}, by w_down; make it with neuron_major(w_down)")
    if not weight.is_contiguous() or stamp.device.type != "cpu" or stamp.tolist() != _identity(w_down):
        raise ValueError(
            "w_down_t is stale: w_down has changed in place since, or is another tensor; make it anew with"
            " neuron_major(w_down)"
        )


def _identity(w_down: Tensor) -> list[int]:
    return [w_down.data_ptr(), -1 if w_down.is_inference() else w_down._version]
