"""Rotary position embedding: each pair of a head's dimensions is rotated by position times the pair's frequency.

The frequency of pair i is theta^(-2 i / D). `rope_parameters` lowers frequencies to extend a model trained on short
sequences to longer ones, with the formulas of transformers. Letters: T positions, D head width.
"""

import math
from typing import Any

import torch
from torch import Tensor

from sparsellm.config import ModelConfig, RopeParameters, RopeType


def rotary_tables(length: int, config: ModelConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin [T, D] float32, halves repeated (Llama's layout, not interleaved)."""
    frequencies, factor = _frequencies(config, device)
    angles = torch.outer(torch.arange(length, dtype=torch.float32, device=device), frequencies)
    angles = torch.cat([angles, angles], -1)
    return angles.cos() * factor, angles.sin() * factor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., D] rotated by the angles of its position: computed in float32, returned in the dtype of x."""
    first, second = x.float().chunk(2, -1)
    return (x * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)


def _frequencies(config: ModelConfig, device: torch.device) -> tuple[Tensor, float]:
    """Radians per position [D / 2] float32, and the factor that multiplies cos and sin."""
    rope: Any = config.rope_parameters  # the rules of config/ require the keys that each type reads
    pairs = torch.arange(0, config.head_width, 2, dtype=torch.float32, device=device)
    plain = config.rope_theta ** -(pairs / config.head_width)
    if rope.rope_type == RopeType.default:
        return plain, 1.0
    if rope.rope_type == RopeType.linear:
        return plain / rope.factor, 1.0
    # The share of each original frequency that is kept, 0 to 1, depends on its rotations within the training context.
    rotations = rope.original_max_position_embeddings / (2 * math.pi)  # rotations of pair 0
    if rope.rope_type == RopeType.llama3:
        low, high, sharpening = rope.low_freq_factor, rope.high_freq_factor, 1.0
        kept = ((plain * rotations - low) / (high - low)).clamp(0, 1)
    else:
        kept, sharpening = _kept_by_yarn(rope, config, rotations, device), _sharpening(rope, rope.factor)
    return plain / rope.factor * (1 - kept) + plain * kept, sharpening


def _kept_by_yarn(rope: RopeParameters, config: ModelConfig, rotations: float, device: torch.device) -> Tensor:
    """The kept share of each original frequency: a linear ramp over the pairs that have between beta_fast and beta_slow
    rotations within the training context. `rotations`: the rotations of pair 0."""
    width = config.head_width

    def pair(wanted: float) -> float:
        """The (fractional) pair with `wanted` rotations. Pair i has theta^(2 i / D) times fewer than pair 0."""
        return width * math.log(rotations / wanted) / (2 * math.log(config.rope_theta))

    first, last = pair(rope.beta_fast or 32), pair(rope.beta_slow or 1)
    if rope.truncate is not False:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    if first == last:
        last += 0.001
    pairs = torch.arange(width // 2, dtype=torch.float32, device=device)
    return 1 - ((pairs - first) / (last - first)).clamp(0, 1)


def _sharpening(rope: RopeParameters, factor: float) -> float:
    """Yarn's factor for cos and sin, which keeps attention over more positions equally sharp."""

    def by(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1

    if rope.attention_factor is not None:
        return rope.attention_factor
    return by(rope.mscale) / by(rope.mscale_all_dim) if rope.mscale and rope.mscale_all_dim else by(1)
