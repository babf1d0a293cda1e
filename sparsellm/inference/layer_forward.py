"""The decoder's layers during generation: for prompts, and for one token per sequence.

On a GPU each layer is a few kernel launches, without torch.compile, whose compilation takes longer than it saves in one
generation. Triton kernels (sparsellm.inference.kernels) compute the pointwise work between the matmuls, and the matmuls
of a single token. On a CPU, PyTorch's operators compute the same.

The residual stream is passed as two parts: x, and the previous layer's output y, which is still to be added. So one
kernel computes the sum and the following norm, and for a single token the following matmul too.

Letters: B sequences, R tokens of a call over all sequences, T length of the longest sequence, S cache positions, K
model width, H heads of width D, H_kv key/value heads, each shared by H / H_kv query heads. Numerics: sums, norms,
rotation and activations are float32; normalised inputs, rotated heads, activated gates and the results of matmuls are
rounded to the dtype of the weights. Matrices may be e4m3 (weight-only FP8); rounding is then to the dtype of the
activations.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsellm.model.decoder import (
    Attention,
    DecoderLayer,
    GatedFeedForward,
    NonGatedFeedForward,
    RMSNorm,
    SiluFeedForward,
    causal_attention,
    rotate,
)
from sparsellm.ops import backend
from sparsellm.ops.borders import FEW_TOKENS
from sparsellm.ops.compiler import KernelsUnavailable
from sparsellm.ops.float8_gate import Float8Rows
from sparsellm.ops.float8_weights import round_weight

Caches = tuple[Tensor, Tensor]  # one layer's keys and values [B, S, H_kv, D]
Tables = tuple[Tensor, Tensor]  # cos and sin of each position [S, D] float32, halves repeated


Matrix = Tensor | Float8Rows  # a weight [N, K]


class Weights(NamedTuple):
    """The matrices of a layer, with the query, key and value projections merged: one matmul instead of three."""

    heads: Matrix  # [(H + 2 H_kv) D, K]
    bias: Tensor | None  # [(H + 2 H_kv) D], in the dtype of the activations
    out: Matrix  # [K, H D]
    first: Matrix | None  # [N, K]: the gate, or the up projection without a gate; None: the block computes itself
    up: Matrix | None  # [N, K]: the up projection beside a gate
    down: Matrix | None  # [K, N]

    @classmethod
    def of(cls, layer: DecoderLayer, float8: bool) -> Self:
        """The weights of `layer`, whose own query, key and value weights become views of the merged one. float8:
        rounded to e4m3 (sparsellm.ops.float8_weights); the layer's own are then empty, so that each is stored once."""
        attention, block = layer.self_attn, layer.mlp
        projections = attention.q_proj, attention.k_proj, attention.v_proj
        heads = torch.cat([proj.weight for proj in projections])
        for proj, part in zip(projections, heads.split([len(proj.weight) for proj in projections]), strict=True):
            proj.weight.data = part
        biases: list[Tensor] = [proj.bias for proj in projections if proj.bias is not None]
        bias = torch.cat(biases).to(heads.dtype) if biases else None
        first: Tensor | None = None
        up: Tensor | None = None
        down: Tensor | None = None
        if isinstance(block, GatedFeedForward):
            first, up, down = block.gate_proj.weight, block.up_proj.weight, block.down_proj.weight
        elif isinstance(block, NonGatedFeedForward):
            first, down = block.up_proj.weight, block.down_proj.weight

        def made(matrix: Tensor | None) -> Any:
            return round_weight(matrix) if float8 and matrix is not None else matrix

        found = cls(made(heads), bias, made(attention.o_proj.weight), made(first), made(up), made(down))
        for linear in layer.modules() if float8 else ():
            if isinstance(linear, nn.Linear):
                linear.weight.data = linear.weight.new_empty(0)
        return found


class Places(NamedTuple):
    """Where the R prompt tokens are: packed one sequence after the other, and padded to [B, T] for attention."""

    lengths: Tensor  # [B] int64
    ends: Tensor  # [B] int64: end of each sequence among the R tokens
    longest: int  # T
    padded: Tensor | None  # [R] int64: index of each token among B T; None: equal lengths, no padding

    @classmethod
    def of(cls, lengths: Tensor, longest: int, tokens: int) -> Self:
        """lengths [B] int64. longest, tokens: T and R; computing them from `lengths` would make the host wait."""
        ends, padded = lengths.cumsum(0), None
        if tokens < len(lengths) * longest:
            # Sequence b starts at b T when padded, and at the sum of the earlier lengths when packed.
            shifts = torch.arange(len(lengths), device=lengths.device) * longest - (ends - lengths)
            padded = torch.arange(tokens, device=lengths.device)
            padded += shifts.repeat_interleave(lengths, output_size=tokens)
        return cls(lengths, ends, longest, padded)


def of_prompts(
    layer: DecoderLayer, weights: Weights, x: Tensor, y: Tensor, tables: Tables, places: Places, caches: Caches
) -> tuple[Tensor, Tensor]:
    """One layer on prompt tokens: x and y [R, K] -> x and y after the layer. Writes keys and values to the caches."""
    x, heads = _heads(layer, weights, x, y)
    queries = _placed(layer.self_attn, heads, tables, places, caches)
    q, k, v = (part[:, : places.longest].transpose(1, 2) for part in (queries, *caches))
    found = causal_attention(q, k, v).transpose(1, 2).flatten(0, 1)
    return _after_attention(layer, weights, x, found if places.padded is None else found[places.padded])


def of_step(
    layer: DecoderLayer, weights: Weights, x: Tensor, y: Tensor, tables: Tables, lengths: Tensor, caches: Caches
) -> tuple[Tensor, Tensor]:
    """One layer on one token per sequence: x and y [B, K] -> x and y after the layer. Appends a position to the caches,
    which hold `lengths` [B] int64 positions."""
    x, heads = _heads(layer, weights, x, y)
    return _after_attention(layer, weights, x, _attend(layer.self_attn, heads, tables, lengths, caches))


def sum_norm(x: Tensor, y: Tensor, norm: RMSNorm, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [R, K] float32, y [R, K] of any dtype -> (x + y float32, its norm in `dtype`)."""
    if by_kernels(x):
        return _kernels().sum_norm(x, y, norm.weight, norm.eps, dtype)
    x = x + y
    return x, norm(x).to(dtype)


@contextmanager
def attention_of_any_shape(device: torch.device) -> Iterator[None]:
    """Disable cuDNN's attention, which PyTorch prefers on Hopper but which costs 43 ms of host time for each new shape:
    prompts have many shapes. For a repeated shape, cuDNN would be faster (0.67 ms instead of 1.22 ms per layer for 16
    prompts of 2,000 tokens). The setting is process-wide, so threads must take turns, and attention calls elsewhere in
    the process run without cuDNN in the meantime.
    """
    if device.type != "cuda":
        yield
        return
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def by_kernels(x: Tensor) -> bool:
    """Whether Triton kernels, rather than PyTorch's operators, process x."""
    return x.is_cuda


def _kernels() -> ModuleType:
    from sparsellm.inference import kernels  # imported here, because a CPU machine may lack triton

    return kernels


def require_kernels(x: Tensor) -> None:
    """Raises KernelsUnavailable if x is on a GPU that cannot run the Triton kernels."""
    if not by_kernels(x) or torch.version.hip is not None:
        return
    with torch.cuda.device_of(x):
        try:
            backend.check("triton")
        except KernelsUnavailable as error:
            raise KernelsUnavailable(
                f"generating text on a GPU needs Triton kernels, which do not run here: {error}; use device=cpu"
            ) from error


def _heads(layer: DecoderLayer, weights: Weights, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """x and y [R, K] -> (x + y, heads [R, H + 2 H_kv, D])."""
    norm = layer.input_layernorm
    if len(x) == 1 and by_kernels(x):
        x, heads = _kernels().multiply(weights.heads, x, y, norm.weight, norm.eps, weights.bias)
    else:
        x, normed = sum_norm(x, y, norm, y.dtype)
        heads = product(normed, weights.heads, weights.bias)
    return x, heads.view(len(x), -1, layer.self_attn.head_dim)


def _positioned(attention: Attention, heads: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """heads [..., H + 2 H_kv, D], cos and sin [..., 1, D] -> rotated queries [..., H, D], rotated keys and values
    [..., H_kv, D]."""
    q, k, v = heads.split(attention.heads, -2)
    if attention.q_norm is not None:
        return *attention.positioned(q, k, cos, sin), v
    rotated = rotate(heads[..., : -v.shape[-2], :], cos, sin).to(heads.dtype)  # q and k at once: half as many launches
    return *rotated.split(attention.heads[:2], -2), v


def _norms(attention: Attention) -> tuple[Tensor, Tensor, float] | None:
    """The weights and eps of qk_norm for the kernels; None without qk_norm."""
    if attention.q_norm is None or attention.k_norm is None:
        return None
    return attention.q_norm.weight, attention.k_norm.weight, attention.q_norm.eps


def _placed(attention: Attention, heads: Tensor, tables: Tables, places: Places, caches: Caches) -> Tensor:
    """heads [R, H + 2 H_kv, D] of prompts -> rotated queries [B, T, H, D]. Writes keys and values to the first T
    positions of the caches.

    Positions past a sequence's end are set to zero, in the caches too. No token attends to such positions, but
    attention multiplies their values by zero, which gives NaN if memory of an earlier stream holds NaN.
    """
    if by_kernels(heads):
        return _kernels().place(heads, _norms(attention), *tables, places.ends, places.lengths, places.longest, *caches)
    (keys, values), longest = caches, places.longest
    if places.padded is not None:
        heads = heads.new_zeros(len(keys) * longest, *heads.shape[1:]).index_copy_(0, places.padded, heads)
    cos, sin = (table[:longest, None] for table in tables)
    queries, keys[:, :longest], values[:, :longest] = _positioned(
        attention, heads.unflatten(0, (len(keys), longest)), cos, sin
    )
    return queries


def _attend(attention: Attention, heads: Tensor, tables: Tables, lengths: Tensor, caches: Caches) -> Tensor:
    """Attention of one token per sequence, heads [B, H + 2 H_kv, D] -> [B, H, D]. Appends keys and values to the
    caches."""
    if by_kernels(heads):
        return _kernels().attend_to_the_past(heads, _norms(attention), *tables, lengths, *caches)
    keys, values = caches
    cos, sin = (table[lengths, None] for table in tables)
    q, k, v = _positioned(attention, heads, cos, sin)
    rows, positions = (torch.arange(n, device=heads.device) for n in keys.shape[:2])
    keys[rows, lengths], values[rows, lengths] = k, v
    there = positions <= lengths[:, None]
    # The query heads that share a key head are passed as if they were query positions: [B, H_kv, H / H_kv, D].
    queries, past = q.unflatten(1, (keys.shape[2], -1)), (keys.transpose(1, 2), values.transpose(1, 2))
    return F.scaled_dot_product_attention(queries, *past, attn_mask=there[:, None, None]).flatten(1, 2)


def _after_attention(layer: DecoderLayer, weights: Weights, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """x [R, K], attention output y [R, H, D] -> (x + the projected y, the feedforward block's output [R, K], which is
    still to be added)"""
    norm, block = layer.post_attention_layernorm, layer.mlp
    y = product(y.flatten(1), weights.out)
    first, up, down = weights.first, weights.up, weights.down
    if first is None or down is None:
        x, normed = sum_norm(x, y, norm, y.dtype)
        return x, cast(Tensor, block(normed))
    activation = "silu" if isinstance(block, SiluFeedForward) else "relu"
    if len(x) == 1 and by_kernels(x):
        x, h = _kernels().multiply(first, x, y, norm.weight, norm.eps, activation=activation, up=up)
    else:
        x, normed = sum_norm(x, y, norm, y.dtype)
        h = _activated(product(normed, first), None if up is None else product(normed, up), activation)
    return x, product(h, down)


def product(x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
    """x [R, K], weight [N, K], bias [N] -> [R, N]."""
    if by_kernels(x) and len(x) == 1:
        return _kernels().multiply(weight, x, bias=bias)[1]
    if isinstance(weight, Float8Rows):
        if by_kernels(x) and len(x) <= FEW_TOKENS:
            return _kernels().multiply_few(weight, x, bias)
        weight = weight.to(x.dtype)
    return F.linear(x, weight, bias)


def _activated(gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
    """act(gate) * up, or act(gate) alone [R, N]. activation: "relu" or "silu"."""
    if by_kernels(gate):
        return _kernels().activate(gate, up, activation)
    gate = F.silu(gate) if activation == "silu" else F.relu(gate)
    return gate if up is None else gate * up
