"""The gate product in FP8, relu(x w^T) of matrices rounded to e4m3: its rounding, and a reference in PyTorch.

A matrix is rounded with a scale per row: a token of x, a neuron of w. Numerics: a row's scale is its largest magnitude
divided by 448, the largest e4m3 number; values are divided by the scale and rounded to e4m3 once. The kernels sum
products on tensor cores, whose e4m3 sums keep fewer bits than float32, multiply each sum by both scales in float32, and
round to bfloat16 once, after the ReLU. What is not zero then fires, and is computed.
"""

from typing import NamedTuple

import torch
from torch import Tensor

MULTIPLE = 16  # K must be a multiple of this: the kernels copy rows of 16-byte units
LARGEST = torch.finfo(torch.float8_e4m3fn).max
SMALLEST = 1e-12  # the smallest magnitude that a scale is computed from, so that a row of zeros has a positive scale


class Float8Rows(NamedTuple):
    """A matrix whose row r is scales[r] times values[r]."""

    values: Tensor  # [R, K] float8_e4m3fn
    scales: Tensor  # [R] float32

    def to(self, dtype: torch.dtype) -> Tensor:
        """The matrix in `dtype`."""
        return self.values.to(dtype).mul_(self.scales.to(dtype)[:, None])

    def exact(self) -> Tensor:
        """The matrix in float64."""
        return self.values.double() * self.scales.double()[:, None]


def quantize_rows(matrix: Tensor) -> Float8Rows:
    """`matrix` [R, K] rounded to e4m3. The kernels' `sparsellm.ops.cuda.quantize_rows` gives the
    same bits, except in rows with NaN, where its scale is finite and only the NaN values are NaN."""
    scales = matrix.float().abs().amax(1, keepdim=True).clamp(min=SMALLEST) * (1 / LARGEST)
    values = (matrix.float() * scales.reciprocal()).clamp(-LARGEST, LARGEST)
    return Float8Rows(values.to(torch.float8_e4m3fn), scales[:, 0])


def gate(x: Float8Rows, w: Float8Rows) -> Tensor:
    """relu(x w^T) [M, N] bfloat16, with float32 sums."""
    sums = x.values.float() @ w.values.float().T
    return torch.relu(sums * (x.scales[:, None] * w.scales)).bfloat16()
