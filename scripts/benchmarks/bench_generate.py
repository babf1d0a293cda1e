"""Text generation with a whole model, dense and accelerated, in all modes of transformers and with sparsellm.Generator.

    python -m scripts.benchmarks.bench_generate --activations DIR [--mean 36] [--layers 28] [--json OUT]
    python -m scripts.benchmarks.bench_generate --checkpoint PATH --text FILE [--modes ours static] [--batches 1 64] ...

The weights are random, with every neuron firing at a recorded rate (shaped_models.py), scaled so that rates average to
--mean; or they come from a checkpoint, with prompts from a text FILE.

Modes, in which dense and accelerated alternate on one set of weights:
  eager    transformers' default
  static   cache_implementation="static": transformers compiles the decoding step and replays it as a CUDA graph
  batched  generate_batch, transformers' continuous batching; the manager is kept from call to call
  ours     sparsellm.Generator; its dense side has the same kernels except in the feedforward blocks

Printed for each case: the time to the first token (a call for one token, so the prefill), the time of each further
token, tokens per second of the whole call, energy per new token of the whole call (NVML's counter), and for each
further step
  of peak  what must be read (the weights, with sparse engines only the rows of neurons that fire; keys and values), by
           the speed of a copy on this GPU, as a share of the measured time
  ffn      all feedforward blocks alone, on inputs of this batch, captured in one CUDA graph
  attn     kernels of attention itself, by name, without its projections
  other    all other kernels: projections, norms, head, choice of the token
  host     the rest: the device waits for the host
and the engines that layers chose for this batch. Medians of --rounds; the first calls, which compile and choose
engines, are not timed. No case starts after --minutes; skipped cases are listed.

`eager` and `static` follow a given text, because the greedy tokens of a random model are few and fire differently from
those that it was shaped with; `batched` and `ours` sample from the whole vocabulary, for a checkpoint at temperature 1.
"""

import argparse
import gc
import itertools
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import ContinuousBatchingConfig, GenerationConfig, LogitsProcessor, LogitsProcessorList

import sparsellm
from scripts.benchmarks import harness, patterns
from scripts.benchmarks.bench_model import MODEL, random_model, sharing_copy
from scripts.benchmarks.harness import cell
from scripts.benchmarks.shaped_models import CALIBRATION, blocks, gate, layer_rates, random_text, shape_to_rates
from sparsellm.benchmark.timing import Stopwatch, rate, wait_for
from sparsellm.config import Activation
from sparsellm.hf import conversion
from sparsellm.hf.pretrained import read_model, read_tokenizer
from sparsellm.inference.accelerate import SparseFeedForward, policy_of
from sparsellm.inference.engine_choice import EngineChoice
from sparsellm.inference.generation import CACHE_MULTIPLE, Generator, Sampling
from sparsellm.model import Decoder
from sparsellm.ops import Engine
from sparsellm.runs.locate import locate

MODES = ("eager", "static", "batched", "ours")
WARMUP = 2  # whole calls that are not timed
PROFILED = 9  # tokens of the calls whose kernels are summed
ATTENTION = re.compile("sdpa|fmha|flash|attention|^(attend|join)$", re.IGNORECASE)  # names of kernels
MEMORY = 0.3  # fraction of free memory for the cache of each model in continuous batching
LOCALITY = 0.5
Call = Callable[[int], object]  # generates this many new tokens per sequence


class Case(NamedTuple):
    mode: str
    batch: int  # sequences
    context: int  # tokens of each prompt


class Follow(LogitsProcessor):
    """Forces every sequence to continue like `text` [B, T + new]."""

    def __init__(self, text: Tensor) -> None:
        self.text = text

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        chosen = self.text[:, input_ids.shape[1]].unsqueeze(1)
        return torch.full_like(scores, -torch.inf).scatter_(1, chosen, 0.0)


# Models.


def as_generator(model: Any, kernels: str | None) -> Generator:
    """A sparsellm.Generator with the same weights."""
    config = conversion.config_of(model.config, model.config.name_or_path)
    weights = {name.removeprefix(conversion.PREFIX): tensor for name, tensor in model.state_dict().items()}
    with torch.device("meta"):
        decoder = Decoder(config, Activation[model.config.hidden_act])
    decoder.load_state_dict({name: weights[name].detach() for name in decoder.state_dict()}, assign=True)
    return Generator(decoder, dtype=model.dtype, kernels=kernels)


def calls(case: Case, models: dict[str, Any], text: Tensor, temperature: float) -> dict[str, Call]:
    """Maps each model name to a function that generates from the first tokens of `text` [B, T + new]."""
    prompts = text[:, : case.context]
    if case.mode == "ours":
        drawn, lists = Sampling(temperature), prompts.tolist()
        return {name: lambda new, made=made: list(made.stream(lists, new, drawn)) for name, made in models.items()}
    if case.mode == "batched":
        return {name: _batched(model, prompts.tolist(), temperature) for name, model in models.items()}
    settings: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "use_cache": True}
    if case.mode == "static":
        settings["cache_implementation"] = "static"
    mask, follow = torch.ones_like(prompts), LogitsProcessorList([Follow(text)])

    def generating(model: Any) -> Call:
        return lambda new: model.generate(
            prompts, attention_mask=mask, max_new_tokens=new, logits_processor=follow, **settings
        )

    return {name: generating(model) for name, model in models.items()}


def _batched(model: Any, prompts: list[list[int]], temperature: float) -> Call:
    cache = ContinuousBatchingConfig(max_memory_percent=MEMORY)

    def call(new: int) -> object:
        config = GenerationConfig(
            max_new_tokens=new, do_sample=True, temperature=temperature, top_k=0, eos_token_id=-1, pad_token_id=0
        )
        return model.generate_batch(
            prompts, config, cache, max_new_tokens=new, persistent_manager=True, progress_bar=False
        )

    return call


@contextmanager
def cleared(models: dict[str, Any]) -> Iterator[None]:
    """Clear everything that calls have compiled, captured and cached on exit."""
    try:
        yield
    finally:
        for model in models.values():
            if isinstance(model, Generator):
                model._idle.clear()
            else:
                model.__dict__.pop("_compiled_call", None)
                model._previous_max_cache_length = -1
                if hasattr(model, "_cached_continuous_batching_manager"):
                    model.destroy_cached_continuous_batching_manager()
        torch._dynamo.reset()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


# Measuring.


def measure(works: dict[str, Call], case: Case, new: int, rounds: int, device: torch.device) -> dict[str, dict]:
    """For each model name, the `rate` of whole calls, "first_ms" and "each_ms": medians over alternating rounds."""
    for call in works.values():
        for _ in range(WARMUP):
            call(new)
        call(1)
    first: dict[str, list[float]] = {name: [] for name in works}
    whole: dict[str, list] = {name: [] for name in works}
    for _ in range(rounds):
        for name, call in works.items():
            watch = Stopwatch(device)
            call(1)
            first[name].append(watch.stop(case.batch).seconds)
            watch = Stopwatch(device)
            call(new)
            whole[name].append(watch.stop(case.batch * new))
    found = {}
    for name in works:
        until_first, all_of_it = (statistics.median(times) for times in (first[name], [s.seconds for s in whole[name]]))
        found[name] = rate(whole[name]) | {
            "first_ms": 1e3 * until_first,
            "each_ms": 1e3 * (all_of_it - until_first) / (new - 1),
        }
    return found


def kernel_ms(call: Call) -> dict[str, float] | None:
    """{"attention", "all"}: milliseconds of kernels per further token; None if no kernel was seen."""

    def summed(new: int) -> Counter[str]:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            call(new)
            torch.cuda.synchronize()
        found: Counter[str] = Counter()
        for event in profile.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                for kind in ("all", "attention") if ATTENTION.search(event.name) else ("all",):
                    found[kind] += event.time_range.elapsed_us() / 1e3
        return found

    if not torch.cuda.is_available():
        return None
    one, several = summed(1), summed(PROFILED)
    if not several:
        return None
    return {kind: (several[kind] - one[kind]) / (PROFILED - 1) for kind in ("all", "attention")}


@torch.no_grad()
def block_inputs(model: nn.Module, text: Tensor) -> list[Tensor]:
    """The input of each feedforward block for the last token of each sequence, [B, 1, K]."""
    found: list[Tensor] = []
    hooks = [
        block.register_forward_pre_hook(lambda _block, args: found.append(args[0][:, -1:].clone()))
        for block in blocks(model)
    ]
    model.model(input_ids=text, use_cache=False)
    for hook in hooks:
        hook.remove()
    return found


@torch.no_grad()
def feedforward_ms(model: nn.Module, inputs: list[Tensor]) -> float | None:
    """Median time of several replays of a CUDA graph of all blocks."""
    if not inputs[0].is_cuda:
        return None

    def run() -> None:
        for block, x in zip(blocks(model), inputs, strict=True):
            block(x)

    for _ in range(WARMUP + 1):  # their counts choose the engines
        for block in blocks(model):
            if isinstance(block, SparseFeedForward):
                block.choice.calls = [0] * len(block.choice.calls)  # make the next call be counted
        run()
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(10):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


@torch.no_grad()
def must_read(model: Any, inputs: list[Tensor], positions: int, engines: Counter[str]) -> float:
    """Bytes to read for one further token per sequence, after `positions` positions. `engines`: number of layers per
    engine; for layers on the row engine only the rows of W_up and W_down of firing neurons count."""
    size = model.dtype.itemsize
    matrices = [[p.numel() for p in block.parameters()] for block in blocks(model)]
    embedding = model.get_input_embeddings().weight
    others = sum(p.numel() for p in model.parameters()) - sum(map(sum, matrices))
    if not model.config.tie_word_embeddings:
        others -= embedding.numel()  # only a few of its rows are read
    feedforward = 0.0
    for block, x, numbers in zip(blocks(model), inputs, matrices, strict=True):
        weight = gate(block)
        firing = (x.flatten(0, 1) @ weight.T > 0).any(0).float().mean().item()
        sparse = weight.numel() + firing * (sum(numbers) - weight.numel())
        share = engines[Engine.row.name] / len(matrices)
        feedforward += share * sparse + (1 - share) * sum(numbers)
    heads = model.config.num_key_value_heads * (embedding.shape[1] // model.config.num_attention_heads)
    cache = inputs[0].shape[0] * positions * 2 * heads * len(matrices)
    return size * (others + feedforward + cache)


def copy_speed(device: torch.device) -> float | None:
    """Bytes per second that a large copy reads and writes."""
    if device.type != "cuda":
        return None
    source, target = (torch.empty(1 << 30, dtype=torch.uint8, device=device) for _ in range(2))
    target.copy_(source)
    wait_for(device)
    start = time.perf_counter()
    for _ in range(10):
        target.copy_(source)
    wait_for(device)
    return 20 * source.numel() / (time.perf_counter() - start)


def engines_of(model: nn.Module, tokens: int) -> Counter[str]:
    """The number of layers per chosen engine for calls of `tokens` tokens."""
    choices = [block.choice for block in model.modules() if isinstance(block, SparseFeedForward)]
    return Counter(_chosen(choice, tokens) for choice in choices)


def _chosen(choice: EngineChoice, tokens: int) -> str:
    plan, _ = choice._plan(torch.empty(tokens, 8, dtype=torch.bfloat16, device="cuda"))
    return plan.engine.name


# Printing.

HEADER = (
    f"{'mode':<8}{'batch':>6}{'context':>8}  {'model':<12}{'first ms':>9}{'each ms':>9}{'tokens/s':>10}{'mJ/token':>9}"
    f"{'of peak':>8}{'ffn':>7}{'attn':>7}{'other':>7}{'host':>7}"
)


def line(case: Case, name: str, row: dict[str, Any]) -> str:
    times = "".join(f"{cell(row[key], '.2f'):>7}" for key in ("ffn_ms", "attention_ms", "other_ms", "host_ms"))
    return (
        f"{case.mode:<8}{case.batch:>6}{case.context:>8}  {name:<12}{row['first_ms']:>9.1f}{row['each_ms']:>9.2f}"
        f"{row['tokens_per_s']:>10,.0f}{cell(row['mj_per_token'], '.1f'):>9}{cell(row['of_peak'], '.0%'):>8}{times}"
    )


def parts(row: dict[str, Any], kernels: dict[str, float] | None, ffn: float | None) -> dict[str, float | None]:
    """The parts of a further token's time, in milliseconds."""
    if kernels is None or ffn is None:
        return {"ffn_ms": ffn, "attention_ms": None, "other_ms": None, "host_ms": None}
    other = kernels["all"] - kernels["attention"] - ffn
    return {
        "ffn_ms": ffn,
        "attention_ms": kernels["attention"],
        "other_ms": max(0.0, other),
        "host_ms": max(0.0, row["each_ms"] - kernels["all"]),
    }


def run_case(
    case: Case,
    models: dict[str, Any],
    stock: dict[str, Any],
    text: Tensor,
    args: argparse.Namespace,
    speed: float | None,
) -> dict[str, dict[str, Any]]:
    """Measure one case, print it, and return its rows by model name. stock: the transformers models."""
    device = text.device
    with cleared(models):
        works = calls(case, models, text, args.temperature)
        rows = measure(works, case, args.new, args.rounds, device)
        inputs = block_inputs(stock["dense"], text[:, : min(case.context, 128)])
        for name, row in rows.items():
            chosen = models[name].decoder if case.mode == "ours" else models[name]
            engines = engines_of(chosen, case.batch) if device.type == "cuda" else Counter()
            ffn = feedforward_ms(stock[name], inputs) if args.parts else None
            row |= parts(row, kernel_ms(works[name]) if args.parts else None, ffn)
            needed = must_read(stock[name], inputs, case.context + args.new // 2, engines)
            row["of_peak"] = None if speed is None else needed / speed / (row["each_ms"] / 1e3)
            row["engines"] = dict(engines)
            print(line(case, name, row), flush=True)
    ratio = rows["accelerated"]["tokens_per_s"] / rows["dense"]["tokens_per_s"]
    print(f"{'':24}{ratio:.3f}x; layers: {', '.join(f'{e} {n}' for e, n in rows['accelerated']['engines'].items())}")
    return rows


def read(args: argparse.Namespace) -> tuple[Any, Callable[[int, int], Tensor]]:
    """The model on the GPU, and a function that returns texts [sequences, length]."""
    if args.checkpoint:
        path = locate(args.checkpoint).model
        model = read_model(path, torch.bfloat16).cuda().eval()
        tokenizer = read_tokenizer(path, model.config.vocab_size)
        ids = torch.tensor(tokenizer(args.text.read_text("utf-8")).input_ids, device="cuda")

        def given(sequences: int, length: int) -> Tensor:
            return ids.repeat(-(-sequences * length // len(ids)))[: sequences * length].view(sequences, length)

        return model, given
    model = random_model(replace(MODEL, num_layers=args.layers), "cuda", LOCALITY, seed=0)

    def drawn(sequences: int, length: int, seed: int = 2) -> Tensor:
        return random_text(sequences, length, MODEL.vocab_size, "cuda", LOCALITY, seed)

    rates = layer_rates(args.layers, patterns.N, args.activations, args.mean)
    shape_to_rates(model, drawn(CALIBRATION // 2048, 2048, seed=1), rates)
    return model, drawn


def main() -> None:
    parser = harness.parser(__doc__)
    patterns.add_activations(parser)
    parser.add_argument("--mean", type=float, default=36.0, help="nonzeros per token, averaged over layers")
    parser.add_argument("--layers", type=int, default=MODEL.num_layers)
    parser.add_argument("--checkpoint", help="a run, an hf/ folder or a hub name; needs --text")
    parser.add_argument(
        "--text", type=Path, metavar="FILE", help="plain text, from which a checkpoint's prompts are cut"
    )
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64], help="sequences; measured are 1 4 16 64 256")
    parser.add_argument(
        "--contexts", type=int, nargs="+", default=[128], help="tokens of a prompt: 128, or 1984 to fill 2,048"
    )
    parser.add_argument("--new", type=int, default=64, help="tokens")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=3.0, help="start no case after this time")
    parser.add_argument("--no-parts", dest="parts", action="store_false", help="do not break down the time")
    args = parser.parse_args()
    if (args.checkpoint is None) != (args.text is None):
        parser.error("--checkpoint and --text are given together")
    if args.new < PROFILED:
        parser.error(f"--new is {args.new}: it should be at least {PROFILED}")
    if "ours" in args.modes and any(
        -(-(context + 1) // CACHE_MULTIPLE) != -(-(context + args.new) // CACHE_MULTIPLE) for context in args.contexts
    ):
        parser.error(
            f"--new is {args.new} with --contexts {args.contexts}: in the mode `ours`, calls for one token and for all"
            f" should share memory; give contexts that are multiples of {CACHE_MULTIPLE}, and no more new tokens than"
            " that"
        )
    print(harness.gpu(), flush=True)
    start, device = time.perf_counter(), torch.device("cuda")
    args.temperature = 1.0 if args.checkpoint else 1e4
    model, text = read(args)
    stock = {"dense": model, "accelerated": sparsellm.accelerate(sharing_copy(model), "cuda")}
    own = {}
    if "ours" in args.modes:
        own = {"dense": as_generator(model, None), "accelerated": as_generator(model, "cuda")}
    speed = copy_speed(device)
    parameters, layers = sum(p.numel() for p in model.parameters()), blocks(model)
    sample = block_inputs(model, text(256, 128))
    nonzeros = sum((x @ gate(block).T > 0).sum().item() for x, block in zip(sample, layers, strict=True))
    print(
        f"{parameters / 1e9:.2f}B parameters, bfloat16, {nonzeros / len(layers) / 256:.1f} nonzeros per token,"
        f" {args.new} new tokens, copies {speed / 1e12:.2f} TB/s"
        "; engines are chosen by"
        f" {policy_of(stock['accelerated']).chosen_by(model.config.hidden_size, model.config.intermediate_size)}"
    )
    print(HEADER)
    results, left_out = [], []
    for context, batch, mode in itertools.product(sorted(args.contexts), args.batches, args.modes):
        case = Case(mode, batch, context)
        if time.perf_counter() - start > 60 * args.minutes:
            left_out.append(case)
            continue
        try:
            given = text(batch, context + args.new)
            rows = run_case(case, own if mode == "ours" else stock, stock, given, args, speed)
        except torch.OutOfMemoryError as error:
            print(f"{mode:<8}{batch:>6}{context:>8}  out of memory: {str(error).split('. ')[0]}")
            continue
        results += [case._asdict() | {"model": name} | row for name, row in rows.items()]
    if left_out:
        said = ", ".join(f"{case.mode} {case.batch} x {case.context}" for case in left_out)
        print(f"skipped after --minutes {args.minutes:g}: {said}")
    harness.write(args.json, results)


if __name__ == "__main__":
    main()
