"""Records which neurons of a checkpoint fire on each token, as inputs for the benchmarks in scripts/.

    python -m sparsellm.analyze checkpoint=PATH recordings=FOLDER
    python -m scripts.benchmarks.bench_ffn --activations FOLDER

FOLDER/
  firing_patterns.npz           neurons: N; for each layer i: layer{i}_row_counts [M], the number of neurons that fired
                                on each token, and layer{i}_cols [sum of the counts], the indices of these neurons,
                                token by token, ascending within a token
  layer4_input_bf16.npy         [at most 4,096 tokens, K]: input of layer 4. int16, the bits of bfloat16
  layer4_gate_weight_bf16.npy   [N, K]: weight that decides which neurons fire. int16, the bits of bfloat16

M: at most the first 16,384 tokens that the analysis reads, in whole sequences. The last two files are omitted for a
model of four layers or fewer, which has no layer 4.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from sparsellm.analysis.activity import passes
from sparsellm.inference.matching import feedforward_blocks
from sparsellm.system.files import whole

if TYPE_CHECKING:  # deferred: importing transformers' models takes two seconds
    from transformers import PreTrainedModel

FIRING = "firing_patterns.npz"
LAYER = 4  # the layer whose input and gate weight are recorded
INPUT, GATE_WEIGHT = f"layer{LAYER}_input_bf16.npy", f"layer{LAYER}_gate_weight_bf16.npy"
TOKENS, INPUT_TOKENS = 16_384, 4_096  # maximum tokens of the firing patterns and of the layer's input


@torch.no_grad()
def write(
    folder: Path,
    model: "PreTrainedModel",
    blocks: Tensor,
    batch_size: int,
    advance: Callable[[int], object] = lambda _: None,
) -> None:
    """Let `model` read the first of `blocks` (int64 [S, T]), `batch_size` sequences at a time, and write what fires.

    advance(sequences) is called after each forward pass. Raises OSError if a file cannot be written.
    """
    layers: list[Any] = [*feedforward_blocks(model)]
    neurons = layers[0].up_proj.out_features
    # Column indices are at most N - 1 and always fit in 16 bits; counts are at most N.
    count_type = np.uint16 if neurons < 2**16 else np.uint32
    row_counts: list[list[np.ndarray]] = [[] for _ in layers]
    columns: list[list[np.ndarray]] = [[] for _ in layers]
    inputs: list[Tensor] = []

    def see(layer: int, _activation: nn.Module, _inputs: tuple, output: Tensor) -> None:
        active = output.flatten(0, -2) != 0
        row_counts[layer].append(active.sum(1).cpu().numpy().astype(count_type))
        columns[layer].append(active.nonzero()[:, 1].cpu().numpy().astype(np.uint16))

    def keep(_block: nn.Module, args: tuple) -> None:
        inputs.append(args[0].flatten(0, -2).bfloat16().cpu())

    hooks = [block.act_fn.register_forward_hook(partial(see, layer)) for layer, block in enumerate(layers)]
    hooks += [block.register_forward_pre_hook(keep) for block in layers[LAYER : LAYER + 1]]
    for batch in passes(model, blocks[: recorded_sequences(blocks)], batch_size, hooks):
        advance(len(batch))

    arrays: dict[str, Any] = {"neurons": np.array(neurons)}
    arrays |= {f"layer{i}_row_counts": np.concatenate(parts) for i, parts in enumerate(row_counts)}
    arrays |= {f"layer{i}_cols": np.concatenate(parts) for i, parts in enumerate(columns)}
    with whole(folder / FIRING) as file:
        np.savez_compressed(file, **arrays)
    bits = {}
    if inputs:
        block = layers[LAYER]
        weight = (block.gate_proj if hasattr(block, "gate_proj") else block.up_proj).weight
        bits = {INPUT: torch.cat(inputs)[:INPUT_TOKENS], GATE_WEIGHT: weight.detach().bfloat16().cpu()}
    for name in (INPUT, GATE_WEIGHT):
        if name in bits:
            with whole(folder / name) as file:
                np.save(file, bits[name].view(torch.int16).numpy())
        else:
            (folder / name).unlink(missing_ok=True)  # left by an earlier recording of another model


def recorded_sequences(blocks: Tensor) -> int:
    """The number of leading `blocks` to record: as many whole sequences as fit in TOKENS, at least one."""
    return min(len(blocks), max(1, TOKENS // blocks.shape[1]))
