"""Forward speed and energy of whole models, stock Hugging Face ones with ReLU, before and after `sparsellm.accelerate`.

    python -m scripts.benchmarks.bench_model --activations DIR [--mean 36] [--locality 0.5] [--json OUT]
    python -m scripts.benchmarks.bench_model --activations DIR --mean 36 --layers 8 18 28 38 --compiled  # four sizes
    python -m scripts.benchmarks.bench_model --activations DIR --mean 36 --non-gated --compiled          # 1.5B, N 8,448
    python -m scripts.benchmarks.bench_model model=qwen3_8b model.num_layers=8 --mean 80 --batch 8

The model is the Llama of 1.5B parameters, or set by overrides `model=` and `model.`, in its own class. Weights are
random, but every neuron fires at a recorded rate (shaped_models.py); with --mean, rates are scaled to average to it.
Tokens are random, so the union of 128 tokens, which is printed, is larger than in real text, and the tile engine
slower; --locality makes it smaller.

Times the hidden states of --batch x --length tokens, without logits, eager and with compiled layers. All variants share
one set of weights and alternate. A warm-up comes first, because engines are chosen from counts of earlier calls. Energy
is the GPU's by NVML's counter, per token. Ratios are to the fastest dense variant.
"""

import argparse
import copy
import gc
import time
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from scripts.benchmarks import harness, patterns
from scripts.benchmarks.harness import cell
from scripts.benchmarks.shaped_models import (
    CALIBRATION,
    firing_statistics,
    hidden,
    layer_rates,
    random_text,
    shape_embedding,
    shape_outputs,
    shape_to_rates,
)
from sparsellm.benchmark.timing import alternate, wait_for
from sparsellm.config import Activation, ModelConfig, from_overrides
from sparsellm.hf import conversion
from sparsellm.ops import backend
from sparsellm.policy import first_use

MODEL = ModelConfig()  # 1.5B
NON_GATED_NEURONS = 8448  # same parameter count as a gated model with patterns.N
WARMUP = 4  # forward passes
VARIANTS = ("dense eager", "sparse eager", "dense compiled", "sparse compiled")


def random_model(model: ModelConfig, device: str, locality: float, seed: int) -> nn.Module:
    """A bfloat16 transformers model with ReLU and sdpa attention, ready for `shape_to_rates`."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    config = conversion.stock_config(model, Activation.relu, 0, torch.bfloat16)
    config.use_cache = False
    with torch.device(device):
        made = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", trust_remote_code=False).eval()
    shape_outputs(made.model.layers, patterns.WEIGHT_STD)
    shape_embedding(made.model.embed_tokens.weight.data, locality)
    return made


def sharing_copy(model: nn.Module) -> nn.Module:
    """A copy of the model's modules that shares its parameters."""
    return copy.deepcopy(model, memo={id(parameter): parameter for parameter in model.parameters()})


def variants(model: nn.Module, names: tuple[str, ...]) -> dict[str, nn.Module | Exception]:
    """Each variant of `model`, or the exception that creating it raised."""
    # Enough even if the layers did not share their code.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 2 * len(model.model.layers))
    found: dict[str, nn.Module | Exception] = {}
    for name in names:
        try:
            each = sharing_copy(model)
            if name.startswith("sparse"):
                import sparsellm

                each = sparsellm.accelerate(each)
            if name.endswith("compiled"):
                for layer in each.model.layers:
                    layer.compile(dynamic=False)
            found[name] = each
        except Exception as error:  # printed in the variant's line; the others continue
            found[name] = error
    return found


def warmed(models: dict[str, nn.Module | Exception], tokens: Tensor, sample: Tensor) -> dict[str, Tensor | Exception]:
    """Each variant's hidden states of `sample` after WARMUP runs, or its exception."""
    found: dict[str, Tensor | Exception] = {}
    for name, model in models.items():
        start = time.perf_counter()
        try:
            if isinstance(model, Exception):
                raise model
            for _ in range(WARMUP):
                hidden(model, tokens)
            found[name] = hidden(model, sample).float() if "compiled" not in name else None
        except Exception as error:
            found[name] = error
        wait_for(tokens.device)
        print(f"warm-up of {name}: {time.perf_counter() - start:.1f} s", flush=True)
    return found


def measure(config: ModelConfig, args: argparse.Namespace, device: str) -> dict[str, Any]:
    """Measure a model, print a line per variant, and return the results."""
    layers = config.num_layers
    model = random_model(config, device, args.locality, args.seed)

    def text(sequences: int, seed: int) -> Tensor:
        return random_text(sequences, args.length, config.vocab_size, device, args.locality, seed)

    sample_sequences = -(-CALIBRATION // args.length)
    rates = layer_rates(layers, config.intermediate_size, args.activations, args.mean)
    shape_to_rates(model, text(sample_sequences, args.seed + 1), rates)
    tokens = text(args.batch, args.seed + 2)
    nonzeros, unions = firing_statistics(model, tokens[:sample_sequences])
    parameters = sum(p.numel() for p in model.parameters())
    print(
        f"{parameters / 1e9:.2f}B parameters, {layers} layers{', not gated' * (not config.gated)}, {args.batch} x"
        f" {args.length} tokens, bfloat16, hidden states only"
    )
    print(harness.listed("nonzeros per token", nonzeros), harness.listed("union of 128 tokens", unions), sep="\n")

    models = variants(model, VARIANTS[2:] if args.compiled else VARIANTS)
    states = warmed(models, tokens, tokens[:1])

    def work(each: nn.Module) -> int:
        hidden(each, tokens)
        return tokens.numel()

    works = {name: partial(work, models[name]) for name, state in states.items() if not isinstance(state, Exception)}
    rates_found = alternate(works, args.seconds, tokens.device)
    result = {
        "parameters": parameters, "layers": layers, "gated": config.gated,
        "tokens": tokens.numel(), "mean": args.mean, "locality": args.locality, "nonzeros_per_layer": nonzeros,
        "union_per_layer": unions, "variants": {},
    }  # fmt: skip
    best = max((found["tokens_per_s"] for name, found in rates_found.items() if name.startswith("dense")), default=None)
    for name, state in states.items():
        if isinstance(state, Exception):
            print(f"  {name:<16} FAILED {type(state).__name__}: {' '.join(str(state).split())[:200]}")
            result["variants"][name] = {"failure": str(state)}
            continue
        row = rates_found[name]
        result["variants"][name] = row
        line = f"  {name:<16}{row['tokens_per_s'] / 1e3:>9.1f} tokens/ms"
        if row["mj_per_token"] is not None:
            line += f"{row['mj_per_token']:>8.2f} mJ/token"
        if best:
            row["speedup"] = row["tokens_per_s"] / best
            line += f"{row['speedup']:>8.3f}x best dense"
        if name == "sparse eager" and isinstance(reference := states["dense eager"], Tensor):
            row["difference"] = float((state - reference).norm() / reference.norm())
            line += f"   hidden states differ from dense by {row['difference']:.2e}"
        print(line, flush=True)
    return result


def summary(results: list[dict[str, Any]]) -> list[dict[str, str]]:
    """A row for each model: its fastest sparse variant compared with its fastest dense one."""
    found = []
    for result in results:
        rows = [(name, row) for name, row in result["variants"].items() if "failure" not in row]
        kinds = [[row for name, row in rows if name.startswith(kind)] for kind in ("dense", "sparse")]
        if not all(kinds):
            continue
        dense, sparse = (max(kind, key=lambda row: row["tokens_per_s"]) for kind in kinds)
        energies = dense["mj_per_token"], sparse["mj_per_token"]
        found.append({
            "parameters": f"{result['parameters'] / 1e9:.2f}B",
            "nonzeros": f"{np.mean(result['nonzeros_per_layer']):.1f}",
            "dense tokens/ms": f"{dense['tokens_per_s'] / 1e3:.1f}",
            "sparse tokens/ms": f"{sparse['tokens_per_s'] / 1e3:.1f}",
            "speedup": f"{sparse['tokens_per_s'] / dense['tokens_per_s']:.3f}x",
            "dense mJ/token": cell(energies[0], ".2f"), "sparse mJ/token": cell(energies[1], ".2f"),
            "energy": "-" if None in energies else f"{energies[1] / energies[0] - 1:+.1%}",
        })  # fmt: skip
    return found


def main() -> None:
    parser = harness.parser(__doc__)
    patterns.add_activations(parser)
    parser.add_argument("--mean", type=float, help="nonzeros per token, averaged over layers (default: as recorded)")
    patterns.add_locality(parser)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("overrides", nargs="*", help="overrides of the model, as for `train`")
    parser.add_argument(
        "--layers", type=int, nargs="+", help="numbers of layers to measure, instead of the model's own"
    )
    parser.add_argument("--non-gated", action="store_true", help=f"not gated, with N {NON_GATED_NEURONS:,}")
    parser.add_argument("--compiled", action="store_true", help="only with compiled layers")
    parser.add_argument("--seconds", type=float, default=5, help="measured time per variant")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_intermixed_args()
    print(harness.gpu())
    if args.activations is None:
        print("no --activations: lognormal rates instead of recorded ones")
    results = []
    config = from_overrides(["model=1p5b", *args.overrides]).model
    if args.non_gated:
        config = replace(config, gated=False, intermediate_size=NON_GATED_NEURONS)
    for layers in args.layers or [config.num_layers]:
        result = measure(replace(config, num_layers=layers), args, "cuda")
        results.append({"gpu": torch.cuda.get_device_name()} | result)
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()
    if backend.loaded():
        shape = config.hidden_size, config.intermediate_size
        print(f"engines are chosen by {first_use.policy_for([shape], torch.device('cuda')).chosen_by(*shape)}")
    harness.table(summary(results))
    harness.write(args.json, results)
    failures = sum("failure" in row for result in results for row in result["variants"].values())
    if failures:
        raise SystemExit(f"{failures} variants failed")


if __name__ == "__main__":
    main()
