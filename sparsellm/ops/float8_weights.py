"""Weights stored in FP8 (e4m3) for text generation; activations stay as they are.

A matrix is rounded with a scale per row, which is a power of two: the smallest with which the row's largest magnitude
is at most 448, the largest e4m3 number. So the rounded matrix is exact in bfloat16 as well: a kernel that reads e4m3
multiplies by the same numbers as a product of the matrix in bfloat16.

Letters: K model width, N neurons, R rows of any matrix.
"""

from typing import NamedTuple, Self

import torch
from torch import Tensor

from sparsellm.ops.float8_gate import SMALLEST, Float8Rows

MULTIPLE = 16  # K must be a multiple of this: the kernels read rows in units of 16 bytes
MAX_WIDTH = 4096  # the largest K of the row engine for few tokens (kernels/portable/row/cluster.cuh)
_BIAS, _MANTISSA_BITS = 127, 23  # of float32


def round_weight(matrix: Tensor) -> Float8Rows:
    """`matrix` [R, K], finite, rounded to e4m3."""
    largest = matrix.detach().abs().amax(1).float().clamp(min=SMALLEST)
    mantissa, exponent = torch.frexp(largest)  # 448 is 0.875 times 2^9
    exponent = exponent - 9 + (mantissa > 0.875)
    scales = (exponent + _BIAS).to(torch.int32).bitwise_left_shift(_MANTISSA_BITS).view(torch.float32)
    return Float8Rows((matrix.detach().float() / scales[:, None]).to(torch.float8_e4m3fn).contiguous(), scales)


class Float8Layer(NamedTuple):
    """The e4m3 weights of a feedforward layer for the sparse engines, each stored once.

    A row of w_down_t has no scale of its own: its scale is a factor of the scales of w_up. So h, as a kernel computes
    it, includes the scale, and y is the same.
    """

    w_gate: Float8Rows | None  # [N, K]; None: h = relu(x w_up^T)
    w_up: Float8Rows  # [N, K]
    w_down_t: Tensor  # e4m3 [N, K]

    @classmethod
    def of(cls, w_gate: Tensor | None, w_up: Tensor, w_down: Tensor) -> Self:
        """The layer of w_gate and w_up [N, K] and w_down [K, N], rounded."""
        up, down = round_weight(w_up), round_weight(w_down.t())
        gate = None if w_gate is None else round_weight(w_gate)
        return cls(gate, Float8Rows(up.values, up.scales * down.scales), down.values)

    @property
    def thresholded(self) -> Float8Rows:
        """The weight whose product passes the ReLU."""
        return self.w_up if self.w_gate is None else self.w_gate

    def to(self, dtype: torch.dtype) -> tuple[Tensor | None, Tensor, Tensor]:
        """(w_gate, w_up, w_down_t [N, K]) in `dtype`, exact in bfloat16 and wider."""
        w_gate = None if self.w_gate is None else self.w_gate.to(dtype)
        return w_gate, self.w_up.to(dtype), self.w_down_t.to(dtype)
