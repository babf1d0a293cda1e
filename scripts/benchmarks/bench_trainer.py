r"""Training steps in the `Trainer` of transformers: dense feedforward blocks, and `accelerate(model, training=True)`.

    python -m scripts.benchmarks.shaped_checkpoint SHAPED model=1p5b --mean 36 --locality 0.6
    python -m scripts.benchmarks.bench_trainer SHAPED/hf --text SHAPED/text.txt [--compile] [--micro-batches 4 8]

Both variants train CHECKPOINT in float32 under bfloat16 autocast with AdamW on the same text, at a learning rate of 0,
so that the sparsity stays. The sparse variant adds the L1 term to the loss. A step is one micro-batch. Each variant is
measured after --warmup steps, in which the layers choose their engines. --compile: `torch_compile=True` for both.

The same step in our own trainer:

    python -m scripts.benchmarks.bench_train experiment=1p5b training.batch_size=8 runtime.micro_batch_size=8 \
        data=stdlib_docs --firing 36 --locality 0.6 --soon --variant runtime.kernels=torch \
        --variant runtime.kernels=auto
"""

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainerCallback, TrainingArguments

import sparsellm
from scripts.benchmarks import harness
from scripts.benchmarks.harness import cell
from sparsellm.analysis import text
from sparsellm.benchmark.timing import energy_mj
from sparsellm.inference.feedforward import SparseFeedForward
from sparsellm.training.memory import GIB, give_back

L1_COEFFICIENT = 2e-5


class SparseTrainer(Trainer):
    def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor], *_: Any, **options: Any) -> Tensor:
        loss = super().compute_loss(model, inputs, **options)
        assert isinstance(loss, Tensor)
        return loss + L1_COEFFICIENT * sparsellm.l1_loss(model)


class Clock(TrainerCallback):
    """Seconds, energy and memory from the end of step `first` to the end of training."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.seconds = self.millijoules = 0.0

    def _read(self) -> tuple[float, float]:
        energy = energy_mj(torch.device("cuda"))  # waits for the GPU
        return time.perf_counter(), float("nan") if energy is None else energy

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.first:
            torch.cuda.reset_peak_memory_stats()
            self.began = self._read()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seconds, self.millijoules = (end - begin for begin, end in zip(self.began, self._read(), strict=True))


def measured(
    checkpoint: Path, sequences: Tensor, sparse: bool, micro_batch: int, compiled: bool, warmup: int, steps: int
) -> dict[str, Any]:
    """Train one variant, and return its speed, memory and energy, or only that it ran out of memory."""
    found: dict[str, Any] = {
        "variant": "sparse" if sparse else "dense",
        "micro_batch": micro_batch,
        "compiled": compiled,
    }
    torch.compiler.reset()
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    if sparse:
        sparsellm.accelerate(model, kernels="auto", training=True)
    clock = Clock(warmup)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=warmup + steps, per_device_train_batch_size=micro_batch, learning_rate=0.0, bf16=True,
            torch_compile=compiled, optim="adamw_torch_fused", report_to="none", logging_strategy="no",
            save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        rows = [{"input_ids": row, "labels": row} for row in sequences]
        trainer = (SparseTrainer if sparse else Trainer)(model, arguments, train_dataset=rows, callbacks=[clock])
        try:
            trainer.train()
        except torch.OutOfMemoryError:
            return found | {"out_of_memory": True}
    tokens = steps * micro_batch * sequences.shape[1]
    layers = [module.counts() for module in model.modules() if isinstance(module, SparseFeedForward)]
    return found | {
        "out_of_memory": False,
        "tokens_per_s": tokens / clock.seconds,
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "mj_per_token": clock.millijoules / tokens,
        "layers": layers,
    }


def rows(found: list[dict[str, Any]]) -> list[dict[str, str]]:
    """A row per measurement. Ratios are to the dense variant at the same micro-batch."""
    dense = {row["micro_batch"]: row for row in found if row["variant"] == "dense"}
    table = []
    for row in found:
        line = {"variant": row["variant"], "micro": str(row["micro_batch"])}
        table.append(line)
        if row["out_of_memory"]:
            line["tokens/s"] = "OOM"
            continue
        base = dense[row["micro_batch"]]
        ratio = None if base["out_of_memory"] else row["tokens_per_s"] / base["tokens_per_s"]
        line |= {
            "tokens/s": f"{row['tokens_per_s']:,.0f}", "ratio": cell(ratio, ".3f"),
            "peak GiB": f"{row['peak_bytes'] / GIB:.1f}", "mJ/token": f"{row['mj_per_token']:.2f}",
        }  # fmt: skip
    return table


def main(arguments: list[str] | None = None) -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="a transformers model with ReLU blocks")
    parser.add_argument("--text", type=Path, required=True, metavar="FILE", help="the text to train on")
    parser.add_argument("--compile", action="store_true", help="compile both variants")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[8], metavar="SIZE", help="sequences per step")
    parser.add_argument("--length", type=int, default=2048, help="tokens per sequence")
    parser.add_argument("--warmup", type=int, default=22, help="steps, which include two choices of engines")
    parser.add_argument("--steps", type=int, default=16, help="measured steps")
    args = parser.parse_intermixed_args(arguments)
    print(harness.gpu())
    tokenizer = AutoTokenizer.from_pretrained(args.checkpoint, trust_remote_code=False)
    sequences = text.of_file(args.text, tokenizer, 64, args.length)
    found = []
    for size in args.micro_batches:
        for sparse in (False, True):
            found.append(measured(args.checkpoint, sequences, sparse, size, args.compile, args.warmup, args.steps))
            give_back()
    print("compiled by torch.compile" if args.compile else "not compiled")
    harness.table(rows(found))
    for row in found:
        if row.get("layers"):
            engines = " ".join(layer["engine"] for layer in row["layers"])
            mean = sum(layer["nonzeros"] for layer in row["layers"]) / len(row["layers"])
            print(f"engines at micro-batch {row['micro_batch']}: {engines}; {mean:.1f} nonzeros per token")
    harness.write(args.json, {"checkpoint": str(args.checkpoint), "length": args.length, "runs": found})


if __name__ == "__main__":
    main()
