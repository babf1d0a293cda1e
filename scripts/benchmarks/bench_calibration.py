"""Tests engine choice by calibrated costs, at token counts and densities that the calibration did not time.

    python -m scripts.benchmarks.bench_calibration [--kernels cuda] [--layers 2048x5632 ...] [--m 1 2 ...] [--json FILE]

For each layer, it calibrates, prints how long that took, and then times every engine at each number of tokens and
density (a cell). For two policies, calibrated costs and the package's constants, it prints in how many cells the chosen
engine is within 5% of the fastest one, and the three worst cells. The --json file has each engine's measured and
predicted time. An engine whose predicted time exceeds SKIP times that of dense is not timed.
"""

import time
from typing import Any

import torch

from scripts.benchmarks import harness
from sparsellm.ops import backend
from sparsellm.ops.borders import MANY_TOKENS
from sparsellm.ops.plan import Engine
from sparsellm.policy import Policy, measure, report
from sparsellm.policy.costs import Costs, costs_at
from sparsellm.policy.layer import Call, Firing, Layer
from sparsellm.policy.measure import MANY_TRAINING_TOKENS

LAYERS = ("1024x4096", "2048x5632", "4096x11008", "5120x13824")
TOKENS = (1, 2, 7, 10, 32, 64, 96, 160, 320, 640, 900, 1400, 2048, 3000, 8192, 12_000, 30_000, 131_072)
SHARES = (0.001, 0.003, 0.0065, 0.013, 0.03, 0.055, 0.12, 0.3, 0.5)
SKEW = 1.1
SKIP = 4.0


def cells(layer: Layer, costs: Costs, tokens: int, training: bool) -> list[dict[str, Any]]:
    """One dict per density: counts, seconds by engine, and each policy's choice."""
    found = []
    size = tokens, layer.width, layer.neurons
    policies = {
        "calibrated": Policy(costs.kernels, {(layer.width, layer.neurons): costs}),
        "packaged": Policy(costs.kernels),
    }
    for share in SHARES:
        call = Call(tokens, Firing(share, SKEW), Engine.dense, training)
        nonzeros, union = layer.counts(call)
        at = costs_at(costs.training if training else costs.forward, tokens)
        dense = at[Engine.dense].fixed
        engines = [engine for engine in sorted(at) if at[engine].seconds(nonzeros, union) <= SKIP * dense]
        times = measure.gpu_milliseconds(layer, [call._replace(engine=engine) for engine in engines])
        if None in times:
            print(f"    {tokens:,} tokens do not fit into memory", flush=True)
            return found
        counted = nonzeros, union if tokens >= MANY_TOKENS else -1.0
        chosen = {
            name: (policy.choose_training_engine if training else policy.choose_engine)(*size, *counted).name
            for name, policy in policies.items()
        }
        found.append(
            {
                "tokens": tokens,
                "training": training,
                "nonzeros": nonzeros / tokens,
                "union": union,
                "predicted": {engine.name: at[engine].seconds(nonzeros, union) for engine in engines},
                "seconds": {engine.name: (ms or 0) / 1e3 for engine, ms in zip(engines, times, strict=True)},
                **chosen,
            }
        )
    return found


def slower(cell: dict[str, Any], policy: str) -> float:
    """How much slower than the fastest engine the engine chosen by `policy` is, as a fraction."""
    seconds = cell["seconds"]
    return seconds.get(cell[policy], SKIP * seconds["dense"]) / min(seconds.values()) - 1


def show(title: str, found: list[dict[str, Any]]) -> None:
    for policy in ("calibrated", "packaged"):
        worst = sorted(found, key=lambda cell: -slower(cell, policy))[:3]
        near = sum(slower(cell, policy) <= report.NEAR for cell in found)
        listed = "; ".join(
            f"{slower(cell, policy):.1%} at {cell['tokens']:,} tokens{' (training)' * cell['training']},"
            f" {cell['nonzeros']:.1f} nonzeros per token ({cell[policy]} is chosen)"
            for cell in worst
        )
        print(
            f"{title:<14} {policy:<10} {near:>4} of {len(found)} within {report.NEAR:.0%}; worst: {listed}",
            flush=True,
        )


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--kernels", choices=("cuda", "triton", "auto"), default="auto")
    parser.add_argument("--layers", nargs="+", default=LAYERS, metavar="KxN")
    parser.add_argument("--m", type=int, nargs="+", default=TOKENS, help="tokens")
    args = parser.parse_args()
    gpu = harness.gpu()
    backend.load(args.kernels)
    kernels = backend.loaded() or "cuda"
    print(f"{gpu}, {backend.NAMES[kernels]}")
    everything: list[dict[str, Any]] = []
    for name in args.layers:
        width, neurons = (int(size) for size in name.split("x"))
        torch.cuda.empty_cache()
        layer = Layer(width, neurons, max(*args.m, measure.SIZES[kernels][-1]), torch.device("cuda", 0), torch.bfloat16)
        started = time.monotonic()
        costs, times = measure.measure(kernels, layer)
        print(
            f"{name:<14} calibrated in {time.monotonic() - started:.1f} s; engines chosen for the timed calls: ",
            end="",
        )
        print(report.summary(report.choices(costs, times)), flush=True)
        found = [cell for tokens in args.m for cell in cells(layer, costs, tokens, training=False)]
        trained = [tokens for tokens in args.m if MANY_TRAINING_TOKENS <= tokens <= measure.TRAINING_SIZES[-1]]
        found += [cell for tokens in trained for cell in cells(layer, costs, tokens, training=True)]
        show(name, found)
        everything += [{"layer": name, **cell} for cell in found]
        del layer
    show("all layers", everything)
    harness.write(args.json, everything)


if __name__ == "__main__":
    main()
