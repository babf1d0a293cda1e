"""`generate()` of a whole 1.5B model, stock Hugging Face Llama with ReLU, before and after `sparsellm.accelerate`.

    python -m scripts.bench_generate --activations DIR [--mean 36] [--batches 1 16 64] [--modes ours] [--json OUT]

Weights are random, yet every neuron fires at a rate that was recorded (scripts/shaped_firing.py), all times one factor
so that they average to --mean. Modes: `eager`, transformers' default; `static`, cache_implementation="static", for
which transformers compiles the decoding step and replays it as a CUDA graph; `ours`, the same weights in
sparsellm.Generator, whose dense side is compiled too.

Per mode and batch: time to the first token (a call for one token), milliseconds per further token, tokens per second
of the whole call, of --prompt tokens of prompt and --new of new ones, which are prescribed (`ours`: drawn from the
whole vocabulary at random), and which engines the layers have chosen for few tokens in the end. Wall-clock medians of
calls that alternate between the two models, which share one set of weights; the first calls, which compile and let
engines be chosen, are not timed.
"""

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import LogitsProcessor, LogitsProcessorList

import sparsellm
from scripts import ffn_patterns as patterns
from scripts.bench_model import MODEL, random_model, sharing_copy
from scripts.shaped_firing import CALIBRATION, firing_statistics, layer_rates, random_text, shape_to_rates
from sparsellm.config import Activation
from sparsellm.model import Decoder
from sparsellm.model.accelerate import SparseFeedForward
from sparsellm.model.generation import Generator, Sampling

WARMUP = 3  # calls that are not timed


class Follow(LogitsProcessor):
    """Makes every sequence go on as `text` [B, T + new] does. Tokens that a random model likes best are few and fire
    otherwise than those that it was shaped with."""

    def __init__(self, text: Tensor) -> None:
        self.text = text

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        chosen = self.text[:, input_ids.shape[1]].unsqueeze(1)
        return torch.full_like(scores, -torch.inf).scatter_(1, chosen, 0.0)


def generation(model: nn.Module, mode: str, text: Tensor, prompt: int) -> Callable[[int], Tensor]:
    """call(new): the first `prompt` tokens of each sequence of `text`, and `new` generated ones, [B, prompt + new]."""
    settings = {"do_sample": False, "pad_token_id": 0, "use_cache": True}
    if mode == "static":
        settings["cache_implementation"] = "static"
    ids = text[:, :prompt]
    mask, follow = torch.ones_like(ids), LogitsProcessorList([Follow(text)])
    return lambda new: model.generate(
        ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, logits_processor=follow, **settings
    )


def generator(model: nn.Module, kernels: str | None) -> Generator:
    """The same weights in a generator of our own."""
    with torch.device("meta"):
        decoder = Decoder(replace(MODEL, num_layers=len(model.model.layers)), Activation.relu)
    decoder.load_state_dict({name: p.detach() for name, p in model.model.state_dict().items()}, assign=True)
    return Generator(decoder, dtype=torch.bfloat16, kernels=kernels)


def own_generation(made: Generator, text: Tensor, prompt: int) -> Callable[[int], list]:
    prompts = text[:, :prompt].tolist()
    return lambda new: list(made.stream(prompts, new, Sampling(temperature=1e4)))


def seconds(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(calls: dict[str, Callable[[int], Tensor]], new: int, rounds: int) -> dict[str, dict[str, float]]:
    """By name of a model: seconds of the first token and of the whole call, medians of alternating rounds."""
    for call in calls.values():
        for _ in range(WARMUP):
            call(new)
        call(1)
    times = {name: {"first": [], "whole": []} for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name]["first"].append(seconds(lambda call=call: call(1)))
            times[name]["whole"].append(seconds(lambda call=call: call(new)))
    return {name: {of: statistics.median(found) for of, found in each.items()} for name, each in times.items()}


def engines(model: nn.Module) -> str:
    """How many layers have chosen which engine for calls of few tokens."""
    chosen = Counter(m.choice.plans[0].engine.name for m in model.modules() if isinstance(m, SparseFeedForward))
    return ", ".join(f"{name} {count}" for name, count in sorted(chosen.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    patterns.add_activations(parser)
    parser.add_argument("--mean", type=float, default=36.0, help="nonzeros per token, averaged over layers")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--modes", nargs="+", default=["eager", "static", "ours"], choices=["eager", "static", "ours"])
    parser.add_argument("--prompt", type=int, default=128, help="tokens")
    parser.add_argument("--new", type=int, default=64, help="tokens")
    parser.add_argument("--layers", type=int, default=MODEL.num_layers)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="OUT")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("a CUDA GPU is needed")

    model = random_model(replace(MODEL, num_layers=args.layers), "cuda", locality=0.5, seed=0)

    def text(sequences: int, length: int, seed: int) -> Tensor:
        return random_text(sequences, length, MODEL.vocab_size, "cuda", 0.5, seed)

    calibration = text(CALIBRATION // 2048, 2048, seed=1)
    shape_to_rates(model, calibration, layer_rates(args.layers, patterns.N, args.activations, args.mean))
    nonzeros, _ = firing_statistics(model, calibration[:2])
    parameters = sum(p.numel() for p in model.parameters())
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}: {parameters / 1e9:.2f}B parameters, bfloat16,"
        f" {sum(nonzeros) / len(nonzeros):.1f} nonzeros per token, {args.prompt} tokens of prompt, {args.new} new"
    )
    models = {"dense": model, "accelerated": sparsellm.accelerate(sharing_copy(model), "cuda")}
    results = []
    own = {}
    if "ours" in args.modes:
        own = {"dense": generator(model, None), "accelerated": generator(model, "cuda")}
    for mode in args.modes:
        for batch in args.batches:
            given = text(batch, args.prompt + args.new, seed=2)
            torch._dynamo.reset()
            calls = {name: generation(each, mode, given, args.prompt) for name, each in models.items()}
            if mode == "ours":
                calls = {name: own_generation(each, given, args.prompt) for name, each in own.items()}
            accelerated = own["accelerated"].decoder if mode == "ours" else models["accelerated"]
            times = measure(calls, args.new, args.rounds)
            line = f"{mode:<7} batch {batch:<4}"
            for name, found in times.items():
                further = 1e3 * (found["whole"] - found["first"]) / (args.new - 1)
                rate = batch * args.new / found["whole"]
                first = 1e3 * found["first"]
                line += f"{name} {first:8.1f} ms to the first, {further:6.2f} ms each, {rate:8,.0f} tokens/s; "
                results.append({"mode": mode, "batch": batch, "model": name, **found, "tokens_per_s": rate})
            ratio = times["dense"]["whole"] / times["accelerated"]["whole"]
            print(f"{line}{ratio:.3f}x; layers: {engines(accelerated)}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
