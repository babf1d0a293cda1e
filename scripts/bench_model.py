"""Forward speed of a whole stock Hugging Face model with ReLU, before and after `sparsellm.accelerate`.

    python -m scripts.bench_model --activations DIR [--mean 36] [--locality 0.5] [--json OUT]
    python -m scripts.bench_model model=qwen3_8b model.num_layers=8 --mean 80 --batch 8

The model is the Llama of 1.5B parameters, or what overrides `model=` and `model.` say, in its own class.
Weights are random, yet every neuron fires at a recorded rate (scripts/shaped_firing.py); with --mean, all rates are
multiplied by one factor so that they average to it. Tokens are random, so the union of 128 tokens, which is printed, is
larger than in real text, and the tile engine slower; --locality makes it smaller.

Timed are the hidden states of --batch x --length tokens, without logits, eager and with compiled layers. All variants
share one set of weights, and take turns. A warm-up comes first, because engines are chosen from counts of earlier
calls.
"""

import argparse
import copy
import json
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from scripts import ffn_patterns as patterns
from scripts.gpu_timing import alternating_ms
from scripts.shaped_firing import (
    CALIBRATION,
    firing_statistics,
    hidden,
    layer_rates,
    random_text,
    shape_embedding,
    shape_outputs,
    shape_to_rates,
)
from sparsellm.config import Activation, ModelConfig, from_overrides
from sparsellm.model import huggingface

MODEL = ModelConfig()  # 1.5B
WARMUP = 4  # forward passes


def random_model(model: ModelConfig, device: str, locality: float, seed: int) -> nn.Module:
    """A bfloat16 model of transformers with ReLU and attention by sdpa, ready for `shape_to_rates`."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    config = huggingface.stock_config(model, Activation.relu, 0, torch.bfloat16)
    config.use_cache = False
    with torch.device(device):
        made = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", trust_remote_code=False).eval()
    shape_outputs(made.model.layers, patterns.WEIGHT_STD)
    shape_embedding(made.model.embed_tokens.weight.data, locality)
    return made


def sharing_copy(model: nn.Module) -> nn.Module:
    """A copy of the model's modules; the parameters are not copied, but shared."""
    return copy.deepcopy(model, memo={id(parameter): parameter for parameter in model.parameters()})


def variants(model: nn.Module) -> dict[str, nn.Module | Exception]:
    """`model` dense and accelerated, eager and with compiled layers; or what making the variant raised."""
    torch._dynamo.config.recompile_limit = 2 * len(model.model.layers)  # enough even if layers did not share their code
    found: dict[str, nn.Module | Exception] = {}
    for name in ("dense eager", "dense compiled", "sparse eager", "sparse compiled"):
        try:
            each = sharing_copy(model)
            if name.startswith("sparse"):
                import sparsellm

                each = sparsellm.accelerate(each)
            if name.endswith("compiled"):
                for layer in each.model.layers:
                    layer.compile(dynamic=False)
            found[name] = each
        except Exception as error:  # main() prints it in the variant's line; the others go on
            found[name] = error
    return found


def warmed(models: dict[str, nn.Module | Exception], tokens: Tensor, sample: Tensor) -> dict[str, Tensor | Exception]:
    """Each variant's hidden states of `sample`, after it has run WARMUP times, or what it raised."""
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
        torch.cuda.synchronize()
        print(f"warm-up of {name}: {time.perf_counter() - start:.1f} s", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    patterns.add_activations(parser)
    parser.add_argument("--mean", type=float, help="nonzeros per token, averaged over layers (default: as recorded)")
    parser.add_argument("--locality", type=float, default=0.0, help="0 to 1: what tokens of a cluster share")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("overrides", nargs="*", help="of the model, as `train` takes them")
    parser.add_argument("--layers", type=int, help="as many, instead of the model's")
    parser.add_argument("--seconds", type=float, default=5, help="measured time per variant")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="OUT")
    args = parser.parse_intermixed_args()
    if not torch.cuda.is_available():
        raise SystemExit("a CUDA GPU is needed")

    config = from_overrides(["model=1p5b", *args.overrides]).model
    config.num_layers = args.layers or config.num_layers
    rates = layer_rates(config.num_layers, config.intermediate_size, args.activations, args.mean)
    if args.activations is None:
        print("no --activations: lognormal rates instead of recorded ones")
    model = random_model(config, "cuda", args.locality, args.seed)

    def text(sequences: int, seed: int) -> Tensor:
        return random_text(sequences, args.length, config.vocab_size, "cuda", args.locality, seed)

    sample_sequences = -(-CALIBRATION // args.length)
    shape_to_rates(model, text(sample_sequences, args.seed + 1), rates)
    tokens = text(args.batch, args.seed + 2)
    nonzeros, unions = firing_statistics(model, tokens[:sample_sequences])
    parameters = sum(p.numel() for p in model.parameters())
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}: {parameters / 1e9:.2f}B parameters, "
        f"{config.num_layers} layers, {args.batch} x {args.length} tokens, bfloat16, hidden states only"
    )
    print(f"nonzeros per token: mean {np.mean(nonzeros):.1f}, by layer", *(f"{value:.0f}" for value in nonzeros))
    print(f"union of 128 tokens: mean {np.mean(unions):,.0f}, by layer", *(f"{value:.0f}" for value in unions))

    models = variants(model)
    states = warmed(models, tokens, tokens[:1])
    calls = {
        name: (lambda _, model=models[name]: hidden(model, tokens))
        for name, state in states.items()
        if not isinstance(state, Exception)
    }
    times = {name: state for name, state in states.items() if isinstance(state, Exception)}
    times |= alternating_ms(calls, 1e3 * args.seconds, least=3, most=20)
    reference = states["dense eager"]
    result = {
        "gpu": torch.cuda.get_device_name(), "parameters": parameters, "tokens": tokens.numel(), "mean": args.mean,
        "locality": args.locality, "nonzeros_per_layer": nonzeros, "union_per_layer": unions, "variants": {},
    }  # fmt: skip
    best = {
        kind: min((ms for name, ms in times.items() if name.startswith(kind) and isinstance(ms, float)), default=None)
        for kind in ("dense", "sparse")
    }
    for name in models:
        ms = times[name]
        if isinstance(ms, Exception):
            print(f"  {name:<16} FAILED {type(ms).__name__}: {' '.join(str(ms).split())[:200]}")
            result["variants"][name] = {"failure": str(ms)}
            continue
        row = {"ms": ms, "tokens_per_ms": tokens.numel() / ms}
        line = f"  {name:<16}{ms:>9.1f} ms{row['tokens_per_ms']:>9.1f} tokens/ms"
        if best["dense"]:
            row["speedup"] = best["dense"] / ms
            line += f"{row['speedup']:>8.3f}x best dense"
        if name == "sparse eager" and isinstance(reference, Tensor):
            row["difference"] = float((states[name] - reference).norm() / reference.norm())
            line += f"   hidden states differ from dense by {row['difference']:.2e}"
        result["variants"][name] = row
        print(line)
    if best["dense"] and best["sparse"]:
        print(f"best sparse against best dense: {best['dense'] / best['sparse']:.3f}x")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))
    failures = sum(isinstance(ms, Exception) for ms in times.values())
    if failures:
        raise SystemExit(f"{failures} variants failed")


if __name__ == "__main__":
    main()
