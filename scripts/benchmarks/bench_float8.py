"""What FP8 gains: the gate product, one feedforward layer, and a whole model, dense and sparse, in one process.

    python -m scripts.benchmarks.bench_float8 [--parts gate layer model] [--m 16384] [--neurons 5632 11264]
    python -m scripts.benchmarks.bench_float8 --parts model --experiment 0p5b 1p5b --sequences 64 --mean 36
    python -m scripts.benchmarks.bench_float8 --parts model --settings torchao

Dense FP8 is torchao's, with a scale per token and per row of a weight. Weights are random and fire as `--mean` says
(patterns.py, shaped_models.py). `gate` compares products of M x K with N x K: cuBLAS's in bfloat16 and FP8, and
gate_pack in both; rounding x to FP8 is timed apart. `layer` is y of one layer; `error` is ||y - ref|| / ||ref|| against
float64 on 2,048 tokens. `model` is a forward pass of a `transformers` model up to its hidden states, its layers
compiled; each variant's first time is printed as soon as it is compiled. Sparse layers always take the tile engine.
`--settings torchao` compiles every variant with the inductor settings that torchao sets by default, which tune Triton
kernels; otherwise all have inductor's own.

Times of gates and layers are medians of alternating CUDA events (sparsellm/ops/gpu_timing.py). Models run in turns; an
energy is that of the whole GPU (sparsellm/benchmark/timing.py).
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from scripts.benchmarks import harness, patterns, shaped_models
from sparsellm.analysis.speed import dense_gated
from sparsellm.benchmark.phases import sharing_copy
from sparsellm.benchmark.timing import alternate
from sparsellm.config import from_overrides
from sparsellm.hf import conversion
from sparsellm.inference.accelerate import accelerate
from sparsellm.ops import Plan, backend, cuda, float8
from sparsellm.ops.feedforward import forward
from sparsellm.ops.gpu_timing import alternating_ms

COPIES = 2  # of the inputs, used in turn, so that no call finds its tensors in L2
ERROR_TOKENS = 2048
BUDGET_MS = 120
MODEL_SECONDS = 5  # per variant
LENGTH = 2048  # tokens per sequence of a model


def shown(title: str, calls: dict[str, Callable[[int], object]], base: str, budget: float, tokens: int) -> dict:
    """Time the calls in alternation, print a table, and return {name: milliseconds, or the error as text}."""
    times = alternating_ms(calls, budget)
    print(f"\n{title}")
    rows = []
    for name in calls:
        ms = times[name]
        if isinstance(ms, Exception):
            rows.append({"variant": name, "failure": f"{type(ms).__name__}: {' '.join(str(ms).split())[:200]}"})
            continue
        row = {"variant": name, "ms": f"{ms:.4f}", "tokens/ms": f"{tokens / ms:.1f}"}
        if not isinstance(of_base := times[base], Exception):
            row[f"speedup over {base}"] = f"{of_base / ms:.3f}"
        rows.append(row)
    harness.table(rows)
    return {name: str(ms) if isinstance(ms, Exception) else ms for name, ms in times.items()}


def scaled_mm(x: cuda.Float8Rows, w: cuda.Float8Rows) -> Tensor:
    return torch._scaled_mm(
        x.values, w.values.T, scale_a=x.scales[:, None], scale_b=w.scales[None], out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )  # fmt: skip


def of_gate(blocks: list[patterns.Block]) -> dict:
    rounded = [(cuda.quantize_rows(block.x), cuda.quantize_rows(block.w_gate)) for block in blocks]
    m, n = len(blocks[0].x), len(blocks[0].w_gate)
    calls: dict[str, Callable[[int], object]] = {
        "gate_pack": lambda i: cuda.gate_pack(blocks[i % COPIES].x, blocks[i % COPIES].w_gate),
        "gate_pack FP8": lambda i: cuda.gate_pack_float8(*rounded[i % COPIES]),
        "round x to FP8": lambda i: cuda.quantize_rows(blocks[i % COPIES].x),
        "cuBLAS": lambda i: blocks[i % COPIES].x @ blocks[i % COPIES].w_gate.T,
        "cuBLAS FP8": lambda i: scaled_mm(*rounded[i % COPIES]),
    }
    return shown(f"Gate, M {m:,}, K {patterns.K}, N {n:,}", calls, "gate_pack", BUDGET_MS, m)


def linear(weight: Tensor) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    made.weight = nn.Parameter(weight, requires_grad=False)
    return made


class DenseLayer(nn.Module):
    """relu(gate) * up, then down, in plain linear layers, which torchao can convert."""

    def __init__(self, block: patterns.Block) -> None:
        super().__init__()
        self.gate, self.up, self.down = (linear(weight) for weight in (block.w_gate, block.w_up, block.w_down))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.gate(x).relu() * self.up(x))


def of_layer(blocks: list[patterns.Block]) -> dict:
    m, n = len(blocks[0].x), len(blocks[0].w_gate)
    turned = [block.w_down.T.contiguous() for block in blocks]
    gates = [cuda.quantize_rows(block.w_gate) for block in blocks]
    dense, in_float8 = ([DenseLayer(block) for block in blocks] for _ in range(2))
    for layer in in_float8:
        float8.quantize_linears(layer)
    for layer in (*dense, *in_float8):
        layer.compile(dynamic=False)
    plan = Plan.of("tile")

    def sparse(i: int) -> Tensor:
        b, w_down_t = blocks[i % COPIES], turned[i % COPIES]
        return forward(b.x, b.w_gate, b.w_up, b.w_down, plan, w_down_t, False)[0]

    def sparse_float8(i: int) -> Tensor:
        b, w_down_t, gate = blocks[i % COPIES], turned[i % COPIES], gates[i % COPIES]
        return cuda.float8_forward(b.x, b.w_gate, b.w_up, w_down_t, gate, plan.room)[0]

    calls: dict[str, Callable[[int], Any]] = {
        "dense": lambda i: dense[i % COPIES](blocks[i % COPIES].x),
        "dense FP8": lambda i: in_float8[i % COPIES](blocks[i % COPIES].x),
        "sparse": sparse,
        "sparse, FP8 gate": sparse_float8,
    }
    found = shown(f"Layer, M {m:,}, K {patterns.K}, N {n:,}", calls, "dense", BUDGET_MS, m)
    block = blocks[0]
    right = dense_gated(*(t.double() for t in (block.x[:ERROR_TOKENS], block.w_gate, block.w_up, block.w_down)))
    errors = {
        name: float((call(0)[:ERROR_TOKENS].double() - right).norm() / right.norm())
        for name, call in calls.items()
        if not isinstance(found[name], str)
    }
    print("error: " + ", ".join(f"{name} {error:.2e}" for name, error in errors.items()))
    return {"ms": found, "errors": errors}


def of_model(experiment: str, args: argparse.Namespace) -> dict:
    """{variant: {"tokens_per_s", "spread", "mj_per_token"}}"""
    config = from_overrides([f"experiment={experiment}"])
    model, length = config.model, min(LENGTH, config.model.context_length)
    rates = shaped_models.layer_rates(model.num_layers, model.intermediate_size, None, args.mean)

    def text(sequences: int, seed: int) -> Tensor:
        return shaped_models.random_text(sequences, length, model.vocab_size, "cuda", args.locality, seed)

    decoder = shaped_models.shaped_decoder(config, text(shaped_models.CALIBRATION // length, 1), rates, args.locality)
    weights = {name: weight.bfloat16() for name, weight in decoder.state_dict().items()}
    del decoder
    stock = conversion.view(weights, model, config.sparsity.activation, 0)
    tokens = text(args.sequences, 2)

    def variant(prepare: Callable[[Any], object]) -> Callable[[], int]:
        made = sharing_copy(stock)
        prepare(made)
        for layer in made.model.layers:
            layer.compile(dynamic=False)

        def work() -> int:
            made.base_model(input_ids=tokens, use_cache=False)
            return tokens.numel()

        return work

    def attention(made: Any) -> None:
        accelerate(made, "cuda", "tile")
        for layer in made.model.layers:
            float8.quantize_linears(layer.self_attn)

    prepared: dict[str, Callable[[Any], object]] = {
        "dense": lambda made: None,
        "sparse": lambda made: accelerate(made, "cuda", "tile"),
        "sparse, FP8 attention and gate": lambda made: accelerate(made, "cuda", "tile", float8=True),
        "sparse, FP8 attention": attention,
        "dense FP8": lambda made: float8.quantize_linears(made.model.layers),
    }
    works = {}
    for name, prepare in prepared.items():
        work = variant(prepare)
        started = time.perf_counter()
        for _ in range(2):  # the first run compiles
            before = time.perf_counter()
            work()
            torch.cuda.synchronize()
        now = time.perf_counter()
        rate = tokens.numel() / (now - before) / 1e3
        print(f"{name}: {rate:.1f} tokens/ms, compiled in {before - started:.0f} s", flush=True)
        works[name] = work
    found = alternate(works, MODEL_SECONDS, torch.device("cuda"))
    print(f"\nModel {experiment}, {args.sequences} x {length} tokens, {args.mean:g} nonzeros")
    dense = found["dense"]
    harness.table(
        {
            "variant": name,
            "tokens/ms": f"{row['tokens_per_s'] / 1e3:.1f}",
            "speedup over dense": f"{row['tokens_per_s'] / dense['tokens_per_s']:.3f}",
            "spread": f"{row['spread']:.1%}",
            "mJ/token": harness.cell(row["mj_per_token"], ".3f"),
        }
        for name, row in found.items()
    )
    return found


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--parts", nargs="+", choices=("gate", "layer", "model"), default=("gate", "layer", "model"))
    parser.add_argument("--m", type=int, default=16_384, help="tokens of the gate and the layer")
    parser.add_argument("--neurons", type=int, nargs="+", default=(5632, 11_264), help="of the gate and the layer")
    parser.add_argument("--mean", type=float, default=shaped_models.DEFAULT_MEAN, help="nonzeros per token")
    parser.add_argument("--experiment", nargs="+", default=("1p5b",), help="which models")
    parser.add_argument("--settings", choices=("inductor", "torchao"), default="inductor", help="of compiled models")
    parser.add_argument("--sequences", type=int, default=64, help=f"sequences of {LENGTH:,} tokens for the model")
    patterns.add_locality(parser)
    args = parser.parse_args()
    print(harness.gpu(), flush=True)
    backend.load("cuda")
    if args.settings == "torchao":
        from torchao.quantization.utils import recommended_inductor_config_setter

        recommended_inductor_config_setter()
    results: dict[str, Any] = {}
    with torch.no_grad():
        for neurons in args.neurons if {"gate", "layer"} & set(args.parts) else ():
            made = [patterns.synthetic(args.mean, args.m, patterns.K, neurons, "cuda", seed) for seed in range(COPIES)]
            for part, measure in (("gate", of_gate), ("layer", of_layer)):
                if part in args.parts:
                    results[f"{part} {neurons}"] = measure(made)
        for experiment in args.experiment if "model" in args.parts else ():
            results[f"model {experiment}"] = of_model(experiment, args)
            harness.write(args.json, results)  # after each model, so that a later failure loses none
    harness.write(args.json, results)


if __name__ == "__main__":
    main()
