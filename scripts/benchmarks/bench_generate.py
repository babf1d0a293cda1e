"""Text generation with a checkpoint, dense and accelerated, with transformers' `generate` and with sparsellm.Generator.

    python -m scripts.benchmarks.bench_generate --checkpoint PATH --text FILE [--batches 1 64] [--float8] [--json OUT]

Prompts are cut from the text. The untrained checkpoint and the text of shaped_checkpoint.py serve as well, with
--temperature 1e4: tokens are then drawn from the whole vocabulary, so neurons fire as often as on the text with which
the model was shaped.

Modes, in which dense and accelerated layers alternate on the same weights:
  eager    transformers' default
  static   cache_implementation="static": transformers compiles the decoding step and replays it as a CUDA graph
  ours     sparsellm.Generator; its dense side has the same kernels except in the feedforward blocks. --float8 adds both
           sides with weights in FP8 (weight-only, e4m3)
`eager` and `static` continue each prompt as the text does; `ours` samples at --temperature.

Printed for each case: the time of a call for one token, which is nearly all prefill; the time of each further token;
tokens per second and energy per new token of the whole call (NVML's counter); the speedup of both over the dense model
and, with --float8, of the steps over the dense model in FP8; and the share of peak bandwidth: the time
to copy as many bytes as a further token must read (the weights, with the row engine only the rows of neurons that fire;
keys and values), relative to its measured time. Then the engines that the accelerated layers chose. All times are
medians of --rounds; the first calls, which compile and choose engines, are not timed.
"""

import gc
import itertools
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import LogitsProcessor, LogitsProcessorList

import sparsellm
from scripts.benchmarks import harness
from scripts.benchmarks.harness import cell
from scripts.benchmarks.shaped_models import gate
from sparsellm.benchmark import phases
from sparsellm.benchmark.phases import Side
from sparsellm.benchmark.subject import Subject
from sparsellm.benchmark.timing import Sample, Stopwatch, rate, wait_for
from sparsellm.config import BenchmarkConfig
from sparsellm.inference.accelerate import policy_of
from sparsellm.inference.feedforward import SparseFeedForward
from sparsellm.inference.float8_feedforward import Float8FeedForward
from sparsellm.inference.generation import CACHE_MULTIPLE, Generator, Sampling
from sparsellm.ops import Engine, backend
from sparsellm.runs.locate import locate

MODES = ("eager", "static", "ours")
FLOAT8 = ", FP8"  # after the name of a model whose weights are in FP8
WARMUP = 2  # number of untimed calls before the timed ones
Call = Callable[[int], object]  # takes the number of new tokens to generate per sequence


class Case(NamedTuple):
    mode: str
    batch: int  # number of sequences
    context: int  # tokens per prompt


class Follow(LogitsProcessor):
    """Forces every sequence to continue like `text` [B, T + new]."""

    def __init__(self, text: Tensor) -> None:
        self.text = text

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        chosen = self.text[:, input_ids.shape[1]].unsqueeze(1)
        return torch.full_like(scores, -torch.inf).scatter_(1, chosen, 0.0)


def calls(case: Case, models: dict[str, Any], text: Tensor, temperature: float) -> dict[str, Call]:
    """{model's name: function that generates from prompts, the first tokens of `text` [B, T + new]}"""
    prompts = text[:, : case.context]
    if case.mode == "ours":
        drawn, lists = Sampling(temperature), prompts.tolist()
        return {name: lambda new, made=made: list(made.stream(lists, new, drawn)) for name, made in models.items()}
    settings: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "use_cache": True}
    if case.mode == "static":
        settings["cache_implementation"] = "static"
    mask, follow = torch.ones_like(prompts), LogitsProcessorList([Follow(text)])

    def generating(model: Any) -> Call:
        return lambda new: model.generate(
            prompts, attention_mask=mask, max_new_tokens=new, logits_processor=follow, **settings
        )

    return {name: generating(model) for name, model in models.items()}


@contextmanager
def cleared(models: dict[str, Any]) -> Iterator[None]:
    """Context manager that, on exit, clears everything compiled, captured and cached by calls."""
    try:
        yield
    finally:
        for model in models.values():
            if isinstance(model, Generator):
                model._idle.clear()
            else:
                model.__dict__.pop("_compiled_call", None)
                model._previous_max_cache_length = -1
        torch._dynamo.reset()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def measure(works: dict[str, Call], batch: int, new: int, rounds: int, device: torch.device) -> dict[str, dict]:
    """{model's name: `rate` of whole calls, "first_ms" and "each_ms"}, medians over alternating rounds."""
    for call in works.values():
        for count in (*[new] * WARMUP, 1):
            call(count)
    samples: dict[str, dict[int, list[Sample]]] = {name: {1: [], new: []} for name in works}
    for _ in range(rounds):
        for name, call in works.items():
            for count, taken in samples[name].items():
                watch = Stopwatch(device)
                call(count)
                taken.append(watch.stop(batch * count))
    found = {}
    for name, taken in samples.items():
        first, whole = (1e3 * statistics.median(each.seconds for each in taken[count]) for count in (1, new))
        found[name] = rate(taken[new]) | {"first_ms": first, "each_ms": (whole - first) / (new - 1)}
    return found


@torch.no_grad()
def block_inputs(model: Any, text: Tensor) -> list[Tensor]:
    """For each feedforward block, its input [B, K] for the last token of each sequence."""
    found: list[Tensor] = []
    hooks = [
        layer.mlp.register_forward_pre_hook(lambda _block, args: found.append(args[0][:, -1].clone()))
        for layer in model.model.layers
    ]
    model.model(input_ids=text, use_cache=False)
    for hook in hooks:
        hook.remove()
    return found


@torch.no_grad()
def must_read(model: Any, inputs: list[Tensor], positions: int, engines: Counter[str], float8: bool = False) -> float:
    """Bytes to read for one further token per sequence, after `positions` positions. `engines`: number of layers per
    engine. float8: weights have one byte. For layers on the row engine, only the rows of W_up and W_down that belong to
    firing neurons count."""
    embedding, layers = model.get_input_embeddings().weight, model.model.layers
    numbers = float(sum(p.numel() for p in model.parameters()))
    if not model.config.tie_word_embeddings:
        numbers -= embedding.numel()  # only a few rows of the embedding are read
    for layer, x in zip(layers, inputs, strict=True):
        weight = gate(layer.mlp)
        silent = 1 - (x @ weight.T > 0).any(0).float().mean().item()
        others = sum(p.numel() for p in layer.mlp.parameters()) - weight.numel()
        numbers -= engines[Engine.row.name] / len(layers) * silent * others
    heads = model.config.num_key_value_heads * (embedding.shape[1] // model.config.num_attention_heads)
    cached = inputs[0].shape[0] * positions * 2 * heads * len(layers)
    return numbers * (1 if float8 else model.dtype.itemsize) + cached * model.dtype.itemsize


def copy_speed(device: torch.device) -> float:
    """Bytes per second, read plus written, in a large copy."""
    source, target = (torch.empty(1 << 30, dtype=torch.uint8, device=device) for _ in range(2))
    target.copy_(source)
    wait_for(device)
    start = time.perf_counter()
    for _ in range(10):
        target.copy_(source)
    wait_for(device)
    return 20 * source.numel() / (time.perf_counter() - start)


def engines_of(model: nn.Module, tokens: int) -> Counter[str]:
    """{engine: number of layers that chose it} for calls with `tokens` tokens on the GPU."""
    x = torch.empty(tokens, 8, dtype=torch.bfloat16, device="cuda")
    blocks = [block for block in model.modules() if isinstance(block, SparseFeedForward)]
    if in_float8 := sum(isinstance(block, Float8FeedForward) for block in model.modules()):
        return Counter({Engine.row.name: in_float8})  # of up to 64 tokens
    return Counter(block.choice._plan(x, block.up_proj.weight)[0].engine.name for block in blocks)


def run_case(
    case: Case, models: dict[str, Any], stock: Any, text: Tensor, rounds: int, temperature: float, speed: float | None
) -> list[dict[str, Any]]:
    """Measure one case, print the results, and return a row per model. `stock`: the dense transformers model. `speed`:
    this GPU's copy bandwidth in bytes/s; None on a CPU."""
    device, new = text.device, text.shape[1] - case.context
    with cleared(models):
        measured = measure(calls(case, models, text, temperature), case.batch, new, rounds, device)
        inputs = block_inputs(stock, text[:, : min(case.context, 128)])
        for name, row in measured.items():
            chosen = models[name].decoder if case.mode == "ours" else models[name]
            engines = engines_of(chosen, case.batch) if device.type == "cuda" else Counter()
            needed = must_read(stock, inputs, case.context + new // 2, engines, name.endswith(FLOAT8))
            row["of_peak"] = None if speed is None else needed / speed / (row["each_ms"] / 1e3)
            row["engines"] = dict(engines)
            for rival in ("dense", "accelerated", "dense" + FLOAT8):
                if rival in measured:
                    row[f"steps_over_{rival}"] = measured[rival]["each_ms"] / row["each_ms"]
    rows = [case._asdict() | {"model": name} | row for name, row in measured.items()]
    harness.table(
        {
            **{key: str(value) for key, value in case._asdict().items()}, "model": row["model"],
            "first ms": f"{row['first_ms']:.1f}", "each ms": f"{row['each_ms']:.2f}",
            "tokens/s": f"{row['tokens_per_s']:,.0f}", "mJ/token": cell(row["mj_per_token"], ".1f"),
            "of peak": cell(row["of_peak"], ".0%"),
            "speedup": f"{row['tokens_per_s'] / measured['dense']['tokens_per_s']:.3f}x",
            "of steps": f"{row['steps_over_dense']:.3f}x",
            **({"over dense FP8": f"{row['steps_over_dense' + FLOAT8]:.3f}x"} if "dense" + FLOAT8 in measured else {}),
            "layers": ", ".join(f"{engine} {count}" for engine, count in row["engines"].items()),
        }
        for row in rows
    )  # fmt: skip
    print(flush=True)
    return rows


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--checkpoint", required=True, help="a run, an hf/ folder or a hub name")
    parser.add_argument("--text", required=True, metavar="FILE", help="plain text, jsonl or parquet")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument(
        "--batches", type=int, nargs="+", default=[1, 64], help="sequences per call; published: 1, 16, 64"
    )
    parser.add_argument("--contexts", type=int, nargs="+", default=[128], help="prompt length; 1984 + 64 new is 2,048")
    parser.add_argument("--new", type=int, default=64, help="new tokens per sequence")
    parser.add_argument(
        "--temperature", type=float, default=1.0, help="of the mode `ours`; at 1e4, all tokens are equally likely"
    )
    parser.add_argument("--float8", action="store_true", help="also both sides of the mode `ours` with weights in FP8")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if args.float8 and "ours" not in args.modes:
        parser.error(f"--float8 with --modes {' '.join(args.modes)}: only `ours` has weights in FP8")
    if args.new < 2:
        parser.error(f"--new is {args.new}: it should be at least 2")
    if "ours" in args.modes and any(
        -(-(context + 1) // CACHE_MULTIPLE) != -(-(context + args.new) // CACHE_MULTIPLE) for context in args.contexts
    ):
        parser.error(
            f"--new is {args.new} with --contexts {args.contexts}: in the mode `ours`, calls for one token and for all"
            f" should share memory; --contexts should be multiples of {CACHE_MULTIPLE}, and --new at most"
            f" {CACHE_MULTIPLE}"
        )
    print(harness.gpu(), flush=True)
    backend.load("cuda")
    device, length = torch.device("cuda"), max(args.contexts) + args.new
    wanted = BenchmarkConfig(text=args.text, sequences=max(args.batches))
    subject = Subject.open(locate(args.checkpoint), wanted, length)
    sequences, found = subject.blocks.shape
    if (sequences, found) != (max(args.batches), length):
        parser.error(
            f"--text has {sequences} sequences of {found} tokens: it should have {max(args.batches)} of {length}"
        )
    stock = phases.stock_model(subject, device)
    models = {"dense": stock, "accelerated": sparsellm.accelerate(phases.sharing_copy(stock), "cuda")}
    own = {}
    if "ours" in args.modes:
        own = {
            name + (FLOAT8 if float8 else ""): phases.generator_of(Side(subject, name == "accelerated", float8), device)
            for name, float8 in itertools.product(models, (False, True) if args.float8 else (False,))
        }
    text, speed = subject.blocks.to(device), copy_speed(device)
    nonzeros = [(x @ gate(layer.mlp).T > 0).sum(1).float().mean().item()
                for x, layer in zip(block_inputs(stock, text[:, :128]), stock.model.layers, strict=True)]  # fmt: skip
    shape = subject.config.hidden_size, subject.config.intermediate_size
    print(
        f"{sum(p.numel() for p in stock.parameters()) / 1e9:.2f}B parameters, bfloat16,"
        f" {statistics.mean(nonzeros):.1f} nonzeros per token, {args.new} new tokens, copies {speed / 1e12:.2f} TB/s;"
        f" engines are chosen by {policy_of(models['accelerated']).chosen_by(*shape)}"
    )
    results = []
    for context, batch, mode in itertools.product(sorted(args.contexts), args.batches, args.modes):
        case, prompts = Case(mode, batch, context), text[:batch, : context + args.new]
        try:
            results += run_case(
                case, own if mode == "ours" else models, stock, prompts, args.rounds, args.temperature, speed
            )
        except torch.OutOfMemoryError as error:
            print(f"{mode}, {batch} x {context}: out of memory: {str(error).split('. ')[0]}")
        harness.write(args.json, results)  # after each case, so that a run that is stopped keeps what it measured


if __name__ == "__main__":
    main()
