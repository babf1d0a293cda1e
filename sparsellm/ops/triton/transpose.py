"""Transposes matrices, because the sparse engines read W_d, and write its gradient, with a row per neuron. (torch needs
about six times as long to copy a transposed bfloat16 matrix as it takes to move the bytes.)"""

import triton
import triton.language as tl
from torch import Tensor, dtype

from sparsellm.ops.twell import tiles

BLOCK = 64


@triton.jit
def transpose(a, out, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """out [COLUMNS, ROWS] = a^T, in the dtype of out. Program (i, j): BLOCK rows and BLOCK columns of a."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = row.to(tl.int64)[:, None] * COLUMNS + column[None, :]
    values = tl.load(a + at, mask=(row < ROWS)[:, None] & (column < COLUMNS)[None, :], other=0.0)
    to = out + column.to(tl.int64)[:, None] * ROWS + row[None, :]
    inside = (column < COLUMNS)[:, None] & (row < ROWS)[None, :]
    tl.store(to, tl.trans(values.to(out.dtype.element_ty)), mask=inside)


def transposed(matrix: Tensor, to: dtype) -> Tensor:
    """A new contiguous matrix^T in the dtype `to`; matrix [rows, columns] must be contiguous."""
    rows, columns = matrix.shape
    out = matrix.new_empty((columns, rows), dtype=to)
    transpose[tiles(rows, BLOCK), tiles(columns, BLOCK)](matrix, out, ROWS=rows, COLUMNS=columns, BLOCK=BLOCK)
    return out
