"""The feedforward operators against the best dense PyTorch, for many firing patterns, in one process on one GPU.

    python -m scripts.benchmarks.bench_ffn --activations DIR [--m 2048 16384] [--patterns layer1 ...] [--json OUT]
    python -m scripts.benchmarks.bench_ffn --activations DIR --decode [--m 1 4 16 64]  few tokens, as CUDA graphs
    python -m scripts.benchmarks.bench_ffn --activations DIR --training [--m 16384]    forward and backward
    python -m scripts.benchmarks.bench_ffn --patterns heavy0 heavy1 heavy5 heavy10 heavy25 heavy50 heavy100 --m 16384
                                                       speed against the share of heavy tokens
    python -m scripts.benchmarks.bench_ffn --patterns synthetic36 --neurons 5632 11264 16384 ...       wider layers
    python -m scripts.benchmarks.bench_ffn --kernels triton ...                        Triton kernels instead of CUDA
    python -m scripts.benchmarks.bench_ffn --nongated ...                              relu(x W_u^T) W_d^T

For each M and pattern (patterns.py), one line per variant: its time; its speedup over the best dense PyTorch, eager or
compiled (for the gate alone: its time relative to cuBLAS's gate GEMM); and the error ||y - ref|| / ||ref|| of its
output against float64, on at most 2,048 evenly spaced tokens, relative to the error of eager dense PyTorch. `row`,
`tile` and `dense` are the operator's engines, as an accelerated model calls them; `auto` is the engine that the policy
chooses from the counts of an earlier call.

With --training, the time covers y and the gradients of y . dy + dl1 l1 with respect to x and every weight (dense
PyTorch has no l1). Errors are of y and of each gradient on all tokens, with dl1 = 0. Each line also has the bytes saved
for backward in addition to x and the weights. `torch ours` is the operator's traced reference, compiled; `auto` is the
engine that a layer in training reaches from dense in two decisions.

With --decode, the M tokens are evenly spaced among 16,384 of the pattern: the tokens of a decoding batch belong to
different sequences, and the first tokens of a sequence fire more neurons.

Times are medians of alternating CUDA events (sparsellm/ops/gpu_timing.py). Calls use copies of the inputs and weights
in turn, so that no call finds its tensors in L2. A variant that fails shows its error, the others continue, and the
exit code is 1.
"""

import argparse
import itertools
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from scripts.benchmarks import harness, patterns
from scripts.benchmarks.patterns import BASES
from sparsellm.analysis.speed import dense_gated, dense_nongated
from sparsellm.ops import Engine, FeedForwardOutput, Plan, backend, cuda, feedforward, reference
from sparsellm.ops.feedforward import forward
from sparsellm.ops.gpu_timing import alternating_ms
from sparsellm.policy import Policy

ERROR_TOKENS = 2048
FORWARD_TOKENS, TRAINING_TOKENS, DECODE_TOKENS = (2048, 16_384, 131_072), (16_384,), (1, 4, 16, 64)
DECODE_SETS, DECODE_CALLS = 8, 16  # number of copies of the weights; calls in one CUDA graph
DECODE_FROM = 16_384  # tokens of a pattern from which a decoding batch is drawn
GATES = ("cuBLAS gate", "gate_pack")
BUDGET_MS = 120  # measured time per variant, M and pattern
L1_COEFFICIENT = 2e-5  # the trainer's default; dl1 is the coefficient divided by the number of tokens
Call = Callable[[int], object]  # call i uses copy i of the inputs, modulo the number of copies


class Step(NamedTuple):
    """The inputs of one forward and backward pass."""

    leaves: list[Tensor]  # x and the weights, bfloat16, with requires_grad
    dy: Tensor  # [M, K], same dtype as x
    dl1: Tensor  # 0-d float32


@cache
def compiled(gated: bool, ours: bool = False) -> Callable:
    """The dense PyTorch layer, compiled; with ours=True, the operator's traced reference, compiled."""
    return torch.compile(operator(gated, None) if ours else dense_layer(gated), dynamic=False)


def dense_layer(gated: bool) -> Callable[..., Tensor]:
    return dense_gated if gated else dense_nongated


def operator(gated: bool, plan: Tensor | None) -> Callable[..., FeedForwardOutput]:
    missing = () if gated else (None,)
    return lambda x, *weights: feedforward(x, *missing, *weights, plan)


def measure(args: argparse.Namespace, name: str, block: patterns.Block, tokens: int) -> dict:
    """Measures one pattern at one number of tokens. Returns the results, with a row per variant."""
    x = spread(block.x, tokens) if args.decode else block.x[:tokens]
    weights = [block.w_gate, block.w_up, block.w_down] if args.gated else [block.w_gate, block.w_down]
    nnz, union = patterns.counts(x, block.w_gate)
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    copies = DECODE_SETS if args.decode else max(1, -(-2 * l2_bytes // (x.nbytes + block.w_gate.nbytes)))
    if args.training:
        variants, engine = training_variants(x, weights, copies)
    else:
        variants, engine = forward_variants(x, weights, copies, args.decode, nnz, union)
    return {
        "tokens": tokens, "neurons": len(block.w_gate), "pattern": name, "note": block.note, "gated": args.gated,
        "training": args.training, "nonzeros_per_token": nnz / tokens,
        "union_per_128": union / -(-tokens // patterns.TOKEN_TILE), "auto": engine, "variants": rows(variants, engine),
    }  # fmt: skip


def forward_variants(
    x: Tensor, weights: list[Tensor], copies: int, decode: bool, nnz: int, union: int
) -> tuple[dict, str]:
    """Returns ({variant of a forward pass: measurements}, the engine that the policy chooses). `nnz` and `union` are
    used only if the engines that count nonzeros cannot run."""
    gated = len(weights) == 3
    sets = [[x, *weights]] + [[t.clone() for t in (x, *weights)] for _ in range(copies - 1)]
    turned = [each[-1].T.contiguous() for each in sets]
    missing, eager = () if gated else (None,), dense_layer(gated)

    def dense(f: Callable[..., Tensor]) -> Call:
        return lambda i: f(*sets[i % copies])

    def engine(name: str) -> Call:
        plan = Plan.of(name)

        def call(i: int) -> object:
            x, *weights = sets[i % copies]
            return forward(x, *missing, *weights, plan, turned[i % copies], False)

        return call

    calls = {"torch eager": dense(eager), "torch compiled": dense(compiled(gated))}
    calls["cuBLAS gate"] = lambda i: sets[i % copies][0] @ sets[i % copies][1].T
    if backend.loaded() != "triton":
        calls["gate_pack"] = lambda i: cuda.gate_pack(*sets[i % copies][:2])
    calls |= {name: engine(name) for name in ("row", "tile", "dense")}
    if decode:
        graphs, times = captured(calls)
        for name, ms in alternating_ms(graphs, BUDGET_MS).items():
            times[name] = ms if isinstance(ms, Exception) else ms / DECODE_CALLS
    else:
        times = alternating_ms(calls, BUDGET_MS)
    times = {name: times[name] for name in calls}
    at = torch.arange(0, len(x), max(1, -(-len(x) // ERROR_TOKENS)), device=x.device)
    right = eager(*(t.double() for t in (x[at], *weights)))

    def details(name: str) -> dict:
        if name in GATES:
            return {}
        out = calls[name](0)
        if isinstance(out, Tensor):
            return {"errors": {"y": error(out[at], right)}}
        return {"errors": {"y": error(out[0][at], right)}, "overflow_tiles": int(out[3][-1])}

    for name in ("tile", "row"):
        if not isinstance(times[name], Exception):
            nnz, *_, union, _ = calls[name](0)[3].tolist()
            break
    return measured(times, details), Policy().choose_engine(*x.shape, len(weights[0]), nnz, union).name


def training_variants(x: Tensor, weights: list[Tensor], copies: int) -> tuple[dict, str]:
    """Returns ({variant of forward and backward: measurements}, the engine that the policy chooses)."""
    gated = len(weights) == 3
    dy = torch.randn(x.shape, device=x.device, generator=torch.Generator(x.device).manual_seed(0)).bfloat16()
    dl1 = torch.tensor(L1_COEFFICIENT / len(x), device=x.device)
    steps = [Step([t.clone().requires_grad_() for t in (x, *weights)], dy.clone(), dl1) for _ in range(copies)]
    forwards = {
        "torch eager": dense_layer(gated), "torch compiled": compiled(gated), "torch ours": compiled(gated, ours=True),
        **{name: operator(gated, Plan.of(name).tensor()) for name in ("tile", "dense")},
    }  # fmt: skip

    def run(forward: Callable) -> Call:
        return lambda i: forward_backward(forward, steps[i % copies])

    times = alternating_ms({name: run(forward) for name, forward in forwards.items()}, BUDGET_MS)
    times = {name: times[name] for name in forwards}
    step = steps[0]._replace(dl1=torch.zeros_like(dl1))
    right = exact(step)
    names = ("y", "dx", *(("dw_gate",) if gated else ()), "dw_up", "dw_down")

    def details(name: str) -> dict:
        found = zip(names, forward_backward(forwards[name], step), right, strict=True)
        return {
            "errors": {result: error(ours, theirs) for result, ours, theirs in found},
            "saved_mib": saved_by(forwards[name], step.leaves) / 2**20,
            **({"overflow_tiles": int(forwards[name](*step.leaves).overflow_tiles)} if name == "tile" else {}),
        }

    found, engine = measured(times, details), Engine.dense
    for _ in range(2):  # two decisions, starting from dense, each from the current engine's counts
        if not isinstance(times[engine.name], Exception):
            out = forwards[engine.name](*step.leaves)
            size = *x.shape, weights[-1].shape[1]
            engine = Policy().choose_training_engine(*size, int(out.nnz), int(out.union), engine)
    return found, engine.name


def spread(x: Tensor, tokens: int) -> Tensor:
    """`tokens` evenly spaced rows of x: row a third of the way into each of `tokens` equal intervals."""
    return x[(3 * torch.arange(tokens, device=x.device) + 1) * len(x) // (3 * tokens)]


def captured(calls: dict[str, Call]) -> tuple[dict[str, Call], dict[str, Exception]]:
    """Returns ({candidate: function that replays a CUDA graph of DECODE_CALLS calls}, {candidate: error} for those that
    cannot be captured)."""
    graphs, failed = {}, {}
    for name, call in calls.items():
        try:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for i in range(2):
                    call(i)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for i in range(DECODE_CALLS):
                    call(i)
            graphs[name] = lambda _, graph=graph: graph.replay()
        except Exception as error:
            failed[name] = error
    return graphs, failed


def forward_backward(forward: Callable[..., Tensor | FeedForwardOutput], step: Step) -> list[Tensor]:
    """y, and the gradients with respect to the leaves of y . dy + dl1 l1, or of y . dy if `forward` returns only y."""
    with torch.enable_grad():
        out = forward(*step.leaves)
        if isinstance(out, Tensor):
            return [out.detach(), *torch.autograd.grad(out, step.leaves, step.dy)]
        return [out.y.detach(), *torch.autograd.grad((out.y, out.l1), step.leaves, (step.dy, step.dl1))]


def exact(step: Step) -> list[Tensor]:
    """The results of `forward_backward` in float64, computed for CHUNK tokens at a time to save memory."""
    x, *weights = (t.detach() for t in step.leaves)
    weights = [w.double() for w in weights]
    w_gate, w_up, w_down = weights if len(weights) == 3 else [None, *weights]
    sums = [torch.zeros_like(w) for w in weights]
    ys, dxs = [], []
    for x_part, dy_part in zip(x.split(patterns.CHUNK), step.dy.split(patterns.CHUNK), strict=True):
        x_part, dy_part = x_part.double(), dy_part.double()
        y, _, _, _, *planes = reference.forward(x_part, w_gate, w_up, w_down)
        dx, *dws = reference.backward(x_part, w_gate, w_up, w_down, planes, dy_part, step.dl1.double())
        ys.append(y)
        dxs.append(dx)
        for total, dw in zip(sums, dws, strict=True):
            total += dw
    return [torch.cat(ys), torch.cat(dxs), *sums]


def saved_by(forward: Callable[..., Tensor | FeedForwardOutput], leaves: list[Tensor]) -> int:
    """Bytes that forward saves for backward, except the leaves. A storage that is saved twice counts once."""
    found = {}

    @torch.compiler.disable  # otherwise torch.compile would trace this hook as part of a compiled forward
    def keep(tensor: Tensor) -> Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = forward(*leaves)
    of_leaves = {leaf.untyped_storage().data_ptr() for leaf in leaves}
    del out  # not earlier: while `out` lives, no saved storage is freed, so addresses identify storages
    return sum(size for at, size in found.items() if at not in of_leaves)


def error(found: Tensor, right: Tensor) -> float:
    return float((found.double() - right).norm() / right.norm())


def measured(times: dict[str, float | Exception], details: Callable[[str], dict]) -> dict[str, dict]:
    """{variant: its time and `details`}; for variants that failed, the error under `failure`."""
    found: dict[str, dict] = {}
    for name, ms in times.items():
        found[name] = {}
        try:
            if isinstance(ms, Exception):
                raise ms
            found[name] = {"ms": ms}
            found[name] |= details(name)
        except Exception as error:
            found[name]["failure"] = f"{type(error).__name__}: {error}"
    return found


def rows(variants: dict[str, dict], engine: str) -> list[dict]:
    """A row per variant, including `auto`: measurements, ratio to the baseline, and errors relative to those of eager
    dense PyTorch."""
    dense = min((variants[name]["ms"] for name in BASES if "ms" in variants[name]), default=None)
    gate = variants.get("cuBLAS gate", {}).get("ms")
    eager_errors = variants["torch eager"].get("errors")
    found = []
    for name in [*variants, "auto"]:
        row = {"variant": f"auto: {engine}" if name == "auto" else name}
        row |= variants[engine if name == "auto" else name]
        if "ms" in row and name in GATES and gate:
            row["of_gate"] = row["ms"] / gate
        elif "ms" in row and name not in GATES and dense:
            row["speedup"] = dense / row["ms"]
        if "errors" in row and eager_errors and name != "torch eager":
            row["of_dense_errors"] = {key: error / eager_errors[key] for key, error in row["errors"].items()}
        found.append(row)
    return found


def show(result: dict) -> None:
    print(
        f"\nM {result['tokens']:,} N {result['neurons']:,} {result['pattern']}:"
        f" {result['nonzeros_per_token']:.1f} nonzeros per token, union of 128 tokens"
        f" {result['union_per_128']:,.0f}{'; ' * bool(result['note'])}{result['note']}"
    )
    forms = {"ms": ".4f", "speedup": ".3f", "of_gate": ".3f", "saved_mib": ",.1f", "overflow_tiles": ","}
    lines = []
    for row in result["variants"]:
        line = {"variant": row["variant"]} | {key: format(row[key], form) for key, form in forms.items() if key in row}
        for key, title, form in (("errors", "error", ".2e"), ("of_dense_errors", "error / dense error", ".2f")):
            line[title] = " ".join(f"{name} {error:{form}}" for name, error in row.get(key, {}).items())
        if "failure" in row:
            line["failure"] = f"FAILED {' '.join(row['failure'].split())[:200]}"
        lines.append(line)
    harness.table(lines)


def summary(results: list[dict]) -> None:
    """Print a line for each result. `worst error`: the largest error of any variant other than dense PyTorch, relative
    to the error of eager dense PyTorch."""
    lines = []
    for result in results:
        by = {row["variant"]: row for row in result["variants"]}
        dense = min((by[name] for name in BASES if "ms" in by[name]), key=lambda row: row["ms"], default={})
        ratios = [r for name, row in by.items() if name not in BASES for r in row.get("of_dense_errors", {}).values()]
        line = {
            "M": f"{result['tokens']}", "N": f"{result['neurons']}", "pattern": result["pattern"],
            "nonzeros": f"{result['nonzeros_per_token']:.1f}", "union": f"{result['union_per_128']:.0f}",
            "dense ms": harness.cell(dense.get("ms"), ".3f"),
        }  # fmt: skip
        if "gate_pack" in by:
            line["gate"] = harness.cell(by["gate_pack"].get("of_gate"), ".2f")
        for name, row in by.items():
            if name not in (*BASES, *GATES):
                line[name] = harness.cell(row.get("speedup"), ".2f")
        line["auto"] = f"{result['auto']} {line.pop('auto: ' + result['auto'])}"
        if "overflow_tiles" in by["tile"]:
            line["overflow tiles"] = f"{by['tile']['overflow_tiles']}"
        line["worst error"] = f"{torch.tensor(ratios).max():.2f}" if ratios else "-"  # NaN if any ratio is NaN
        if result["training"]:
            line["saved MiB: dense"] = harness.cell(dense.get("saved_mib"), ".0f")
            line["tile's"] = harness.cell(by["tile"].get("saved_mib"), ".0f")
        lines.append(line)
    print()
    harness.table(lines)


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--m", type=int, nargs="+",
                        help=f"tokens: {FORWARD_TOKENS} by default, {TRAINING_TOKENS} with --training, {DECODE_TOKENS}"
                        " with --decode")  # fmt: skip
    parser.add_argument("--patterns", nargs="+", default=patterns.PATTERNS, metavar="NAME",
                        type=patterns.pattern_name,
                        help=f"some of {' '.join(patterns.PATTERNS)} (default: all of these), of"
                        f" {' '.join(patterns.HEAVY)}, or synthetic with any mean, such as synthetic36")  # fmt: skip
    parser.add_argument("--neurons", type=int, nargs="+", default=[patterns.N], metavar="N",
                        help=f"N of the layer (default: {patterns.N}); recorded patterns: the recording's")  # fmt: skip
    patterns.add_activations(parser)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--decode", action="store_true", help="few tokens, as CUDA graphs")
    mode.add_argument("--training", action="store_true", help="forward and backward")
    parser.add_argument("--kernels", choices=("auto", "cuda", "triton"), default="auto")
    parser.add_argument("--nongated", dest="gated", action="store_false", help="relu(x W_u^T) W_d^T")
    args = parser.parse_args()
    print(f"{harness.gpu()}, K {patterns.K}, bfloat16")
    try:
        backend.load(args.kernels)
    except Exception as error:  # variants that need the kernels will report the error
        print(f"the kernels did not load: {error}")

    results, broken = [], []
    default = TRAINING_TOKENS if args.training else DECODE_TOKENS if args.decode else FORWARD_TOKENS
    sizes = sorted(args.m or default)
    # torch.compile compiles anew for each shape, and beyond this limit would run eager code under the name "compiled".
    shapes = len(sizes) * len(args.neurons)
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 2 * shapes)
    with torch.no_grad():
        for name, neurons in itertools.product(args.patterns, args.neurons):
            try:
                most = DECODE_FROM if args.decode else max(sizes)
                block = patterns.build(name, most, "cuda", args.activations, neurons=neurons)
                for tokens in sizes:
                    results.append(measure(args, name, block, tokens))
                    show(results[-1])
            except patterns.MissingRecording as problem:
                print(f"\n{name}, N {neurons:,}: skipped: {problem}")
            except Exception as error:  # if one measurement fails, still print the others
                broken.append((name, neurons))
                print(f"\n{name}, N {neurons:,}: FAILED {type(error).__name__}: {error}", flush=True)
    if not results and not broken:
        raise SystemExit("no pattern was measured")
    if results:
        summary(results)
    harness.write(args.json, {"gpu": torch.cuda.get_device_name(), "results": results})
    failures = sum("failure" in row for result in results for row in result["variants"])
    if failures or broken:
        raise SystemExit(f"{failures} variants and {len(broken)} patterns failed")


if __name__ == "__main__":
    main()
