"""What FP8 does to a trained model: held-out loss, nonzeros, and the neurons that fire.

    python -m scripts.benchmarks.bench_float8_quality runs/NAME [--text FILE] [--sequences 512] [--json OUT]

All variants read the same sequences, of --text or of the run's held-out text. `bf16` is the model on the kernels,
`dense FP8` has every linear layer of the decoder by torchao with scales per row, `sparse FP8` is
accelerate(float8=True), and `FP8 gate` is accelerate(float8="gate"). Weights are the run's float32 weights, rounded.
Printed for each: cross entropy in nats per token, its difference from bf16 with the standard error over batches,
nonzeros per token (mean over layers), and the firing decisions that differ from those of bf16, as a share of the
neurons that fire in bf16 and of all neurons. A layer's input is the variant's own, so differences of earlier layers
count. Without torchao, only bf16 and the gate are measured.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from scripts.benchmarks import harness
from sparsellm.analysis import text
from sparsellm.evaluation.perplexity import round_linears
from sparsellm.inference.accelerate import accelerate
from sparsellm.model import Decoder
from sparsellm.ops import cuda, float8, float8_gate, twell
from sparsellm.ops.borders import MANY_TOKENS
from sparsellm.runs.locate import locate
from sparsellm.runs.precision import load_float32
from sparsellm.training.float8 import LinearFeedForward

BATCH = 4  # sequences per forward pass; the standard error is over batches
Gate = Callable[[Any, Tensor], Tensor]  # (feedforward block, its input [M, K] in bfloat16) -> what fires, bool [M, N]


def thresholded(block: Any) -> Any:
    return block.gate_proj if hasattr(block, "gate_proj") else block.up_proj


def gate_of_modules(block: Any, x: Tensor) -> Tensor:
    return thresholded(block)(x) > 0


def gate_in_float8(block: Any, x: Tensor) -> Tensor:
    weight = thresholded(block).weight
    if not x.is_cuda:
        return float8_gate.gate(*map(float8_gate.quantize_rows, (x, weight))) > 0
    return twell.unpack(cuda.gate_pack_float8(cuda.quantize_rows(x), cuda.quantize_rows(weight)), len(weight)) > 0


def on_kernels(decoder: Any, setting: bool | str) -> None:
    accelerate(decoder, "cuda", "tile", float8=setting)


def dense(decoder: Any) -> None:
    for layer in decoder.layers:
        layer.mlp = LinearFeedForward(layer.mlp)
        layer.mlp.register_forward_pre_hook(lambda _, inputs: (inputs[0].bfloat16(),))
        float8.quantize_linears(layer)


# How to prepare a decoder, and what its blocks' gates compute, by variant. The first is the reference.
VARIANTS: dict[str, tuple[Callable[[Any], None], Gate]] = {
    "bf16": (partial(on_kernels, setting=False), gate_of_modules),
    "dense FP8": (dense, gate_of_modules),
    "sparse FP8": (partial(on_kernels, setting=True), gate_in_float8),
    "FP8 gate": (partial(on_kernels, setting="gate"), gate_in_float8),
}


class Variant:
    def __init__(self, prepare: Callable[[Any], None], gate: Gate, made: tuple, device: str) -> None:
        config, activation, weights = made
        self.decoder: Any = Decoder(config, activation)
        self.decoder.load_state_dict(weights)
        self.decoder.to(device).eval()
        round_linears(self.decoder)
        prepare(self.decoder)
        self.fired: list[Tensor] = []  # by layer, of the last batch
        for layer in self.decoder.layers:
            layer.mlp.register_forward_pre_hook(
                lambda block, inputs: self.fired.append(gate(block, inputs[0].flatten(0, -2).bfloat16()))
            )
        self.losses: list[float] = []  # by batch, summed over its tokens
        self.nonzeros = self.differing = 0

    def read(self, block: Tensor) -> None:
        self.fired.clear()
        with torch.autocast(block.device.type, torch.bfloat16):
            self.losses.append(self.decoder(block[:, :-1], block[:, 1:]).ce.item())
        self.nonzeros += sum(int(fired.sum()) for fired in self.fired)

    def compare(self, reference: "Variant") -> None:
        pairs = zip(self.fired, reference.fired, strict=True)
        self.differing += sum(int((ours ^ theirs).sum()) for ours, theirs in pairs)


@torch.no_grad()
def measure(made: tuple, blocks: Tensor, names: list[str], device: str) -> dict[str, dict[str, float]]:
    """Each variant's numbers on `blocks` int64 [S, T]. `made`: configuration, activation and float32 weights."""
    config, *_ = made
    variants = {name: Variant(*VARIANTS[name], made, device) for name in names}
    reference, sizes = variants[names[0]], []
    for batch in blocks.split(BATCH):
        for variant in variants.values():
            variant.read(batch.to(device))
            variant.compare(reference)
        sizes.append(batch[:, 1:].numel())
    tokens, counts = sum(sizes), torch.tensor(sizes, dtype=torch.float64)
    found = {}
    for name, variant in variants.items():
        losses = torch.tensor([variant.losses, reference.losses], dtype=torch.float64)
        apart = (losses[0] - losses[1]) / counts
        found[name] = {
            "cross_entropy": float(losses[0].sum() / tokens),
            "difference": float((losses[0] - losses[1]).sum() / tokens),
            "standard_error": float(apart.std() / len(sizes) ** 0.5),  # NaN for one batch
            "nonzeros": variant.nonzeros / tokens / config.num_layers,
            "differing_of_firing": variant.differing / reference.nonzeros,
            "differing_of_all": variant.differing / (tokens * config.num_layers * config.intermediate_size),
            "tokens": tokens,
        }
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("checkpoint", help="a run, a checkpoint or an hf/ folder with ReLU")
    parser.add_argument("--text", help="plain text, jsonl or parquet; default: the run's held-out text")
    parser.add_argument("--sequences", type=int, default=512, help="maximum number of sequences")
    args = parser.parse_args(arguments)
    checkpoint = locate(args.checkpoint)
    if args.text is None and checkpoint.run is None:
        parser.error(f"{args.checkpoint} belongs to no run: it needs --text FILE")
    print(harness.gpu())
    device, names = "cuda", list(VARIANTS)
    if (reason := float8.obstacle()) is not None:
        print(f"only bf16 and the gate: {reason}")
        names = ["bf16", "FP8 gate"]
    made = load_float32(checkpoint)
    config = made[0]
    blocks = text.blocks(checkpoint, args.text, config.vocab_size, config.context_length, args.sequences)
    blocks = blocks[: max(1, len(blocks) // BATCH) * BATCH]  # whole batches
    if (tokens := blocks[:BATCH, 1:].numel()) < MANY_TOKENS:
        parser.error(f"a batch has {tokens:,} tokens: the FP8 gate needs {MANY_TOKENS:,}; use a longer text")
    found = measure(made, blocks, names, device)
    print(f"{checkpoint.title}: {found['bf16']['tokens']:,} tokens in sequences of {blocks.shape[1]:,}")
    harness.table(
        {
            "variant": name, "cross entropy": f"{row['cross_entropy']:.5f}", "difference": f"{row['difference']:+.5f}",
            "+-": f"{row['standard_error']:.5f}", "nonzeros": f"{row['nonzeros']:.2f}",
            "differ, of firing": f"{row['differing_of_firing']:.2%}", "of all": f"{row['differing_of_all']:.3%}",
        }
        for name, row in found.items()
    )  # fmt: skip
    harness.write(args.json, {"checkpoint": args.checkpoint, "device": device, "variants": found})


if __name__ == "__main__":
    main()
