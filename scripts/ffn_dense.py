"""The base that the feedforward operator is measured against: the same layers in dense PyTorch."""

import torch
from torch import Tensor

BASES = ("torch eager", "torch compiled")


def dense_gated(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
    return (torch.relu(x @ w_gate.T) * (x @ w_up.T)) @ w_down.T


def dense_nongated(x: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
    return torch.relu(x @ w_up.T) @ w_down.T
