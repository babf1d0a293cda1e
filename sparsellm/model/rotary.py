"""Rotary positions: each pair of a head's numbers turns with its position, at a frequency of its own.

Frequencies are theta^(-2 i / D) of pair i, and a model that was trained on short sequences can be given lower ones for
longer sequences, as `rope_parameters` says; the formulas are those of transformers. Letters: T positions, D head width.
"""

import math

import torch
from torch import Tensor

from sparsellm.config import ModelConfig, RopeParameters, RopeType


def rotary_tables(length: int, config: ModelConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin [T, D] float32, halves repeated (Llama's layout, not interleaved)."""
    frequencies, factor = _frequencies(config, device)
    angles = torch.outer(torch.arange(length, dtype=torch.float32, device=device), frequencies)
    angles = torch.cat([angles, angles], -1)
    if factor == 1:
        return angles.cos(), angles.sin()
    return angles.cos() * factor, angles.sin() * factor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., D] rotated by its position; computed in float32, returned in the dtype of x."""
    first, second = x.float().chunk(2, -1)
    return (x * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)


def _frequencies(config: ModelConfig, device: torch.device) -> tuple[Tensor, float]:
    """Radians by position [D / 2] float32, and what cos and sin are multiplied by."""
    rope, pairs = config.rope_parameters, torch.arange(0, config.head_width, 2, dtype=torch.float32, device=device)
    plain = config.rope_theta ** -(pairs / config.head_width)
    if rope.rope_type == RopeType.default:
        return plain, 1.0
    assert rope.factor is not None
    if rope.rope_type == RopeType.linear:
        return plain / rope.factor, 1.0
    kept, factor = _kept_by_yarn(config, device) if rope.rope_type == RopeType.yarn else _kept_by_llama3(rope, plain)
    return plain / rope.factor * (1 - kept) + plain * kept, factor


def _kept_by_llama3(rope: RopeParameters, plain: Tensor) -> tuple[Tensor, float]:
    """By how much each frequency stays, 0 to 1: by its rotations within the context that the model was trained on."""
    assert rope.original_max_position_embeddings is not None
    assert rope.low_freq_factor is not None
    assert rope.high_freq_factor is not None
    rotations = rope.original_max_position_embeddings / (2 * math.pi) * plain
    kept = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return kept.clamp(0, 1), 1.0


def _kept_by_yarn(config: ModelConfig, device: torch.device) -> tuple[Tensor, float]:
    """The same, in a straight line over the pairs between those of beta_fast and of beta_slow rotations; and a factor
    for cos and sin, which makes attention sharper."""
    rope, width, theta = config.rope_parameters, config.head_width, config.rope_theta
    assert rope.original_max_position_embeddings is not None
    assert rope.factor is not None

    def pair(rotations: float) -> float:
        """Which pair turns so often within the context that the model was trained on."""
        return (
            width * math.log(rope.original_max_position_embeddings / (rotations * 2 * math.pi)) / (2 * math.log(theta))
        )

    def sharpness(weight: float) -> float:
        return 0.1 * weight * math.log(rope.factor) + 1

    first, last = pair(rope.beta_fast or 32), pair(rope.beta_slow or 1)
    if rope.truncate is not False:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    if first == last:
        last += 0.001
    pairs = torch.arange(width // 2, dtype=torch.float32, device=device)
    kept = 1 - ((pairs - first) / (last - first)).clamp(0, 1)
    if rope.attention_factor is not None:
        return kept, rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return kept, sharpness(rope.mscale) / sharpness(rope.mscale_all_dim)
    return kept, sharpness(1)
