"""Forward speed of a whole 1.5B model, stock Hugging Face Llama with ReLU, before and after `sparsellm.accelerate`.

    python -m scripts.bench_model --activations DIR [--mean 36] [--locality 0.5] [--json OUT]

Weights are random, yet every neuron fires at a rate that was recorded: layer l of L takes the rates of recorded layer
floor(8 l / L), all times one factor if --mean says what they should average to. Without --activations, lognormal rates
(scripts/ffn_patterns.py). How (`shape_to_rates`): the embedding holds a constant direction, a token's own vector of
heavy-tailed length, and, for --locality above 0, a vector that it shares with a cluster of the vocabulary; texts stay
inside one cluster for 48 tokens. In one calibrating forward pass each gate then becomes w_i - t_i e, with e the mean
direction of the layer's input and t_i the quantile at which neuron i fires as often as it should.

Independent tokens share few neurons, so the union of 128 tokens is larger than real text's, and the tile engine slower:
the printed union says by how much, and --locality narrows it.

Measured: the hidden states of --batch x --length tokens, without logits. Eager and with compiled layers; all variants
share one set of weights and alternate. Each engine choice needs statistics of earlier calls: hence the warm-up.
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

CONFIG = {
    "vocab_size": 49_152,
    "hidden_size": patterns.K,
    "intermediate_size": patterns.N,
    "num_hidden_layers": 28,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
    "hidden_act": "relu",
    "tie_word_embeddings": True,
}
CALIBRATION = 16_384  # tokens, as many as were recorded
CLUSTERS = 64  # of the vocabulary: few, so that the calibration sees each of them often
CLUSTER_RUN = 48  # tokens
DEFAULT_MEAN = 36.0  # nonzeros per token, where nothing recorded says otherwise
WARMUP = 4  # forward passes


def random_model(config: dict, device: str, locality: float, seed: int) -> nn.Module:
    """A bfloat16 LlamaForCausalLM with attention by sdpa, its embedding as this file's contract says.

    What layers add to the residual stream is small beside the embedding, as in a trained model's first steps: the
    output projections are initialised with 0.02 / sqrt(2 L).
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    hub_config = LlamaConfig(**config, attn_implementation="sdpa", use_cache=False)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = LlamaForCausalLM(hub_config).eval()
    finally:
        torch.set_default_dtype(before)
    std = patterns.WEIGHT_STD
    for layer in model.model.layers:
        for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
            projection.weight.data.normal_(0, std / (2 * len(model.model.layers)) ** 0.5)
    embedding = model.model.embed_tokens.weight.data
    vocabulary, width = embedding.shape
    own, centre = torch.randn_like(embedding), torch.randn(CLUSTERS, width, device=device).to(embedding)
    shared = centre[torch.arange(vocabulary, device=device) % CLUSTERS]
    length = torch.exp(patterns.TOKEN_SIGMA * torch.randn(vocabulary, 1, device=device))
    token = (1 - locality) ** 0.5 * own + locality**0.5 * shared
    constant = width**0.5 * nn.functional.normalize(torch.randn(width, device=device), dim=0)
    embedding.copy_(token * length + constant)
    return model


def random_text(sequences: int, length: int, vocabulary: int, device: str, locality: float, seed: int) -> Tensor:
    """int64 [sequences, length]; for locality above 0, runs of 48 tokens come from one cluster."""
    generator = torch.Generator(device).manual_seed(seed)
    tokens = torch.randint(vocabulary, (sequences, length), device=device, generator=generator)
    if not locality:
        return tokens
    runs = -(-length // CLUSTER_RUN)
    cluster = torch.randint(CLUSTERS, (sequences, runs), device=device, generator=generator)
    cluster = cluster.repeat_interleave(CLUSTER_RUN, dim=1)[:, :length]
    return (tokens // CLUSTERS * CLUSTERS + cluster).clamp_(max=vocabulary - 1)


def layer_rates(layers: int, neurons: int, activations: Path | None, mean: float | None) -> np.ndarray:
    """float64 [L, N]: how often each neuron should fire."""
    if activations is None:
        return np.stack([patterns.firing_rates(mean or DEFAULT_MEAN, neurons, seed) for seed in range(layers)])
    rates = patterns.recorded_rates(activations, neurons)
    rates = rates[np.arange(layers) * len(rates) // layers]
    return rates if mean is None else patterns.scaled_rates(rates, mean)


@torch.no_grad()
def shape_to_rates(model: nn.Module, tokens: Tensor, rates: np.ndarray) -> None:
    """Shift each layer's gate weight, in order, in one forward pass over `tokens`, so that neurons fire at `rates`."""

    def calibrate(mlp: nn.Module, wanted: Tensor):
        def before(_, args: tuple) -> None:
            x = args[0].flatten(0, 1).float()
            e = nn.functional.normalize(x.mean(0), dim=0)
            w = mlp.gate_proj.weight.data.float()
            w -= torch.outer(w @ e, e)
            along = (x @ e).clamp_(min=1e-3)
            # A neuron fires where w x > t e x, that is where this is above t: as many tokens as wanted are above.
            ratio = ((x @ w.T) / along[:, None]).T.sort(dim=1, descending=True).values
            count = (wanted * len(x)).round().long().clamp_(max=len(x) - 1)
            above = ratio.gather(1, (count - 1).clamp_(min=0)[:, None])[:, 0]
            below = ratio.gather(1, count[:, None])[:, 0]
            never = 2 * ratio[:, 0].abs() + 1
            t = torch.where(count > 0, (above + below) / 2, never)
            mlp.gate_proj.weight.data.copy_(w - torch.outer(t, e))

        return before

    device = tokens.device
    handles = [
        layer.mlp.register_forward_pre_hook(calibrate(layer.mlp, torch.from_numpy(wanted).float().to(device)))
        for layer, wanted in zip(model.model.layers, rates, strict=True)
    ]
    hidden(model, tokens)
    for handle in handles:
        handle.remove()


@torch.no_grad()
def firing_statistics(model: nn.Module, tokens: Tensor) -> tuple[list[float], list[float]]:
    """Per layer: nonzeros per token, and union of 128 consecutive tokens."""
    found = []

    def count(mlp: nn.Module, args: tuple) -> None:
        found.append(patterns.counts(args[0].flatten(0, 1), mlp.gate_proj.weight))

    handles = [layer.mlp.register_forward_pre_hook(count) for layer in model.model.layers]
    hidden(model, tokens)
    for handle in handles:
        handle.remove()
    tiles = -(-tokens.numel() // patterns.TOKEN_TILE)
    return [nnz / tokens.numel() for nnz, _ in found], [union / tiles for _, union in found]


@torch.no_grad()
def hidden(model: nn.Module, tokens: Tensor) -> Tensor:
    """The last hidden states, without logits."""
    return model.model(input_ids=tokens, use_cache=False).last_hidden_state


def sharing_copy(model: nn.Module) -> nn.Module:
    """A copy of the modules that holds the same parameters."""
    return copy.deepcopy(model, memo={id(parameter): parameter for parameter in model.parameters()})


def variants(model: nn.Module) -> dict[str, nn.Module | Exception]:
    """The same model, dense and accelerated, eager and with compiled layers."""
    torch._dynamo.config.recompile_limit = 2 * len(model.model.layers)  # should layers not share their code
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
        except Exception as error:  # said in its line; the others go on
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
    parser.add_argument("--activations", type=Path, help="folder of recorded activations")
    parser.add_argument("--mean", type=float, help="nonzeros per token, averaged over layers (default: as recorded)")
    parser.add_argument("--locality", type=float, default=0.0, help="0 to 1: what tokens of a cluster share")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=CONFIG["num_hidden_layers"])
    parser.add_argument("--seconds", type=float, default=5, help="measured time per variant")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="OUT")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("a CUDA GPU is needed")

    config = CONFIG | {"num_hidden_layers": args.layers}
    rates = layer_rates(args.layers, patterns.N, args.activations, args.mean)
    if args.activations is None:
        print("no --activations: lognormal rates instead of recorded ones")
    model = random_model(config, "cuda", args.locality, args.seed)

    def text(sequences: int, seed: int) -> Tensor:
        return random_text(sequences, args.length, config["vocab_size"], "cuda", args.locality, seed)

    sample_sequences = -(-CALIBRATION // args.length)
    shape_to_rates(model, text(sample_sequences, args.seed + 1), rates)
    tokens = text(args.batch, args.seed + 2)
    nonzeros, unions = firing_statistics(model, tokens[:sample_sequences])
    parameters = sum(p.numel() for p in model.parameters())
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}: {parameters / 1e9:.2f}B parameters, "
        f"{args.layers} layers, {args.batch} x {args.length} tokens, bfloat16, hidden states only"
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
