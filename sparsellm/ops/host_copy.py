"""Asynchronous copies from the device to the host."""

import torch
from torch import Tensor


def to_host(tensor: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """Start copying `tensor` to the host: (the copy, the event that marks its completion; None on a CPU)."""
    if not tensor.is_cuda:
        return tensor, None
    on_host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(tensor.device))
    return on_host, copied
