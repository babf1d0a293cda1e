"""What fires in a checkpoint, token by token, as files from which the benchmarks in scripts/ shape their inputs.

    python -m sparsellm.analyze checkpoint=PATH recordings=FOLDER
    python -m scripts.benchmarks.bench_ffn --activations FOLDER

FOLDER/
  firing_patterns.npz           neurons: N; and of each layer i layer{i}_row_counts [M], how many neurons fired on each
                                token, and layer{i}_cols [their sum], which ones, token by token in ascending order
  layer4_input_bf16.npy         [at most 4,096 tokens, K]: what layer 4 reads. int16, the bits of bfloat16
  layer4_gate_weight_bf16.npy   [N, K]: its weight that decides what fires. int16, the bits of bfloat16

M: the first 16,384 tokens that the analysis reads, or all, in whole sequences. A model of four layers or fewer has no
layer 4, and the last two files are left out.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from sparsellm.inference.matching import feedforward_blocks
from sparsellm.system.files import whole

if TYPE_CHECKING:  # transformers' modelling takes two seconds to import: a refusal need not wait for it
    from transformers import PreTrainedModel

FIRING = "firing_patterns.npz"
LAYER = 4  # of which input and gate weight are recorded
INPUT, GATE_WEIGHT = f"layer{LAYER}_input_bf16.npy", f"layer{LAYER}_gate_weight_bf16.npy"
TOKENS, INPUT_TOKENS = 16_384, 4_096  # at most


def other_recordings(folder: Path) -> list[str]:
    """The names of recordings in `folder` that a new one would lie beside: the scripts take a folder of one."""
    return sorted(path.name for path in folder.glob("firing_patterns*.npz") if path.name != FIRING)


@torch.no_grad()
def write(
    folder: Path,
    model: "PreTrainedModel",
    blocks: Tensor,
    batch_size: int,
    advance: Callable[[int], object] = lambda _: None,
) -> None:
    """Let `model` read the first of `blocks` (int64 [S, T]), `batch_size` sequences at once, and write what fires.

    advance(sequences) is called after each forward pass. Raises OSError.
    """
    layers: list[Any] = [*feedforward_blocks(model)]
    neurons = layers[0].up_proj.out_features
    count_type = np.uint16 if neurons < 2**16 else np.uint32  # the columns, N - 1 at most, always fit in 16 bits
    row_counts: list[list[np.ndarray]] = [[] for _ in layers]
    columns: list[list[np.ndarray]] = [[] for _ in layers]
    inputs: list[Tensor] = []

    def see(layer: int, output: Tensor) -> None:
        active = output.flatten(0, -2) != 0
        row_counts[layer].append(active.sum(1).cpu().numpy().astype(count_type))
        columns[layer].append(active.nonzero()[:, 1].cpu().numpy().astype(np.uint16))

    hooks = [
        block.act_fn.register_forward_hook(lambda _block, _inputs, output, layer=layer: see(layer, output))
        for layer, block in enumerate(layers)
    ]
    if len(layers) > LAYER:
        hooks.append(
            layers[LAYER].register_forward_pre_hook(
                lambda _block, args: inputs.append(args[0].flatten(0, -2).bfloat16().cpu())
            )
        )
    try:
        for batch in blocks[: recorded_sequences(blocks)].split(batch_size):
            model.base_model(input_ids=batch.to(model.device), use_cache=False)
            advance(len(batch))
    finally:
        for hook in hooks:
            hook.remove()

    arrays: dict[str, Any] = {"neurons": np.array(neurons)}
    for layer in range(len(layers)):
        arrays[f"layer{layer}_row_counts"] = np.concatenate(row_counts[layer])
        arrays[f"layer{layer}_cols"] = np.concatenate(columns[layer])
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
            (folder / name).unlink(missing_ok=True)  # of an earlier recording, of another model


def recorded_sequences(blocks: Tensor) -> int:
    """How many of `blocks` are recorded, the first ones: as many whole sequences as TOKENS has, at least one."""
    return min(len(blocks), max(1, TOKENS // blocks.shape[1]))
