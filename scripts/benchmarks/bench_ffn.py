"""The feedforward operators against the best dense PyTorch, for many firing patterns, in one process on one GPU.

    python -m scripts.benchmarks.bench_ffn --activations DIR [--m 2048 16384] [--patterns layer1 ...] [--json OUT]
    python -m scripts.benchmarks.bench_ffn --activations DIR --decode [--m 1 4 16 64]  few tokens, as CUDA graphs
    python -m scripts.benchmarks.bench_ffn --activations DIR --training [--m 16384]    forward and backward
    python -m scripts.benchmarks.bench_ffn --nongated ...                     relu(x W_u^T) W_d^T

For each M and pattern (patterns.py), one line per variant: its time; how many times as fast as the best
dense PyTorch it is, eager or compiled (the gate's line: its time over that of cuBLAS's gate product); and the error
||y - ref|| / ||ref|| of its output against float64, on at most 2,048 evenly spaced tokens, with its ratio to the error
of eager dense PyTorch. `row`, `tile` and `dense` are the operator's engines, as an accelerated model calls them; `auto`
is the engine that sparsellm.ops chooses from the counts of an earlier call.

With --training, one line per variant: the time of y and of the gradients of y . dy + dl1 l1 by x and every weight
(dense PyTorch has no l1); with dl1 = 0, the error of y and of each gradient on all tokens, and its ratio to that of
eager dense PyTorch; what is saved for backward beyond x and the weights; and how far memory rises. `torch ours` is the
operator's traced reference, compiled; `auto` is the engine that a layer in training reaches from dense in two
decisions.

With --decode, the M tokens are evenly spaced among 16,384 of the pattern. The tokens of a decoding batch belong to
different sequences, and are not the first ones, which fire more neurons.

Times are medians of alternating CUDA events (sparsellm/ops/gpu_timing.py). Copies of inputs and weights take turns, so
that a call does not find its own in L2. A variant that fails shows its error, the others go on, and the exit code is 1.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from scripts.benchmarks import ffn_training, patterns
from scripts.benchmarks.patterns import BASES, dense_gated, dense_nongated
from sparsellm.inference.engine_choice import NeuronMajor
from sparsellm.ops import Plan, choose_engine
from sparsellm.ops.feedforward import forward
from sparsellm.ops.gpu_timing import alternating_ms

ERROR_TOKENS = 2048
FORWARD_TOKENS, TRAINING_TOKENS, DECODE_TOKENS = (2048, 16_384, 131_072), (16_384,), (1, 4, 16, 64)
DECODE_SETS, DECODE_CALLS = 8, 16  # weight sets; calls in one graph
DECODE_FROM = 16_384  # tokens of a pattern among which those of a decoding batch are spread
GATES = ("cuBLAS gate", "gate_pack")


class Inputs:
    """One copy of a layer's input and weights, in the forms that the candidates take."""

    def __init__(self, x: Tensor, block: patterns.Block, gated: bool, copy: bool) -> None:
        weights = (block.w_gate, block.w_up, block.w_down) if gated else (block.w_gate, block.w_down)
        self.x, *self.weights = (t.clone() if copy else t for t in (x, *weights))
        self.layer = self.weights if gated else (None, *self.weights)
        self.w_down_t = NeuronMajor.of(self.weights[-1], None).weight


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.eager = dense_gated if args.gated else dense_nongated
        self.compiled = torch.compile(self.eager, dynamic=False)
        self.l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size

    def candidates(self, inputs: list[Inputs]) -> dict[str, Callable[[int], object]]:
        """What is timed, by name. Call i of a candidate takes inputs i, i modulo their number."""

        def at(i: int) -> Inputs:
            return inputs[i % len(inputs)]

        def block(f: Callable) -> Callable[[int], Tensor]:
            return lambda i: f(at(i).x, *at(i).weights)

        def engine(name: str) -> Callable[[int], tuple]:
            plan = Plan.of(name)
            return lambda i: forward(at(i).x, *at(i).layer, plan, at(i).w_down_t, False)

        return {
            "torch eager": block(self.eager),
            "torch compiled": block(self.compiled),
            "cuBLAS gate": lambda i: at(i).x @ at(i).weights[0].T,
            "gate_pack": lambda i: gate_pack(at(i).x, at(i).weights[0]),
            **{name: engine(name) for name in ("row", "tile", "dense")},
        }

    def measure(self, name: str, block: patterns.Block, tokens: int) -> dict:
        """The result for one pattern and number of tokens: what was measured, and a row for each variant."""
        x = spread(block.x, tokens) if self.args.decode else block.x[:tokens]
        each = (x.nbytes + block.w_gate.nbytes) if not self.args.decode else 0
        copies = DECODE_SETS if self.args.decode else max(1, -(-2 * self.l2_bytes // each))
        inputs = [Inputs(x, block, self.args.gated, copy=copies > 1) for _ in range(copies)]
        nnz, union = patterns.counts(x, block.w_gate)
        calls = self.candidates(inputs)
        if self.args.decode:
            timed, failed = captured(calls)
            times = {**alternating_ms(timed), **failed}
            times = {n: t if isinstance(t, Exception) else t / DECODE_CALLS for n, t in times.items()}
            times = {n: times[n] for n in calls}
        else:
            measured = alternating_ms(calls, self.args.budget_ms)
            times = {n: measured[n] for n in calls}
        errors = self.errors(inputs[0], {n: calls[n] for n in calls if n not in GATES}, times)
        engine = self.automatic(calls, times, tokens, nnz, union)
        result = {
            "tokens": tokens, "pattern": name, "note": block.note, "gated": self.args.gated,
            "nonzeros_per_token": nnz / tokens, "union_per_128": union / -(-tokens // patterns.TOKEN_TILE),
            "auto": engine, "variants": rows(times, errors, engine),
        }  # fmt: skip
        return result

    def errors(self, inputs: Inputs, blocks: dict, times: dict) -> dict[str, float | Exception]:
        tokens = len(inputs.x)
        at = torch.arange(0, tokens, max(1, -(-tokens // ERROR_TOKENS)), device=inputs.x.device)
        reference = self.eager(*(t.double() for t in (inputs.x[at], *inputs.weights)))
        found: dict[str, float | Exception] = {}
        for name, call in blocks.items():
            if isinstance(times[name], Exception):
                continue
            try:
                out = call(0)
                y = (out if isinstance(out, Tensor) else out[0])[at]
                found[name] = float((y.double() - reference).norm() / reference.norm())
            except Exception as error:
                found[name] = error
        return found

    def automatic(self, calls: dict, times: dict, tokens: int, nnz: int, union: int) -> str | None:
        """The engine that the policy chooses from what tile or row counts; if neither runs, from nnz and union."""
        for name in ("tile", "row"):
            if not isinstance(times[name], Exception):
                nnz, *_, union = calls[name](0)[3].tolist()
                break
        width, neurons = patterns.K, patterns.N
        return choose_engine(tokens, width, neurons, nnz, union).name


def spread(x: Tensor, tokens: int) -> Tensor:
    """`tokens` evenly spaced rows of x, each a third of the way into its share of the rows."""
    return x[(3 * torch.arange(tokens, device=x.device) + 1) * len(x) // (3 * tokens)]


def gate_pack(x: Tensor, w: Tensor):
    from sparsellm.ops import cuda

    return cuda.gate_pack(x, w)


def captured(calls: dict[str, Callable[[int], object]]) -> tuple[dict, dict[str, Exception]]:
    """(each candidate as the replay of a CUDA graph of DECODE_CALLS calls, the error of each that was not captured)."""
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


def rows(times: dict, errors: dict, engine: str | None) -> list[dict]:
    """One dict per variant: ms, ratio to its base, error, error ratio to eager dense, or what failed."""
    dense = [t for t in (times[name] for name in BASES) if not isinstance(t, Exception)]
    gate = times["cuBLAS gate"]
    bases = {"block": min(dense, default=None), "gate": None if isinstance(gate, Exception) else gate}
    found = []
    for name in [*times, "auto"]:
        of = engine if name == "auto" else name
        time, error = times[of], errors.get(of)
        row: dict = {"variant": f"auto: {engine}" if name == "auto" else name}
        failure = next((e for e in (time, error) if isinstance(e, Exception)), None)
        if not isinstance(time, Exception):
            row["ms"] = time
            if name in GATES and bases["gate"]:
                row["of_gate"] = time / bases["gate"]
            elif bases["block"]:
                row["speedup"] = bases["block"] / time
        if isinstance(error, float):
            row["error"] = error
            base = errors.get("torch eager")
            if isinstance(base, float) and base:
                row["of_dense_error"] = error / base
        if failure is not None:
            row["failure"] = f"{type(failure).__name__}: {failure}"
        found.append(row)
    return found


def show(result: dict) -> None:
    note = f"; {result['note']}" if result["note"] else ""
    print(
        f"\nM {result['tokens']:,} {result['pattern']}: {result['nonzeros_per_token']:.1f} nonzeros per token, "
        f"union of 128 tokens {result['union_per_128']:,.0f}{note}"
    )
    for row in result["variants"]:
        line = f"  {row['variant']:<15}"
        if "ms" in row:
            line += f"{row['ms']:>10.4f} ms"
        if "speedup" in row:
            line += f"{row['speedup']:>8.3f}x dense"
        elif "of_gate" in row:
            line += f"{row['of_gate']:>8.3f} of gate"
        if "error" in row:
            line += f"   error {row['error']:.2e}"
        if "of_dense_error" in row:
            line += f" = {row['of_dense_error']:.2f} of dense"
        if "of_dense_errors" in row:
            errors = (f"{name} {ratio:.2f}" for name, ratio in row["of_dense_errors"].items())
            line += f"   errors of dense's: {' '.join(errors)}"
        elif "errors" in row:
            line += f"   errors: {' '.join(f'{name} {error:.2e}' for name, error in row['errors'].items())}"
        if "saved_mib" in row:
            line += f"   saved {row['saved_mib']:,.1f} MiB"
        if "peak_mib" in row:
            line += f"   peak {row['peak_mib']:,.0f} MiB"
        if "failure" in row:
            line += f"   FAILED {' '.join(row['failure'].split())[:200]}"
        print(line, flush=True)


def summary(results: list[dict]) -> None:
    print(f"\n{'M':>8} {'pattern':<14}{'nonzeros':>9}{'union':>7}{'dense ms':>10}{'gate':>7}", end="")
    print(f"{'row':>8}{'tile':>8}{'dense':>8}  {'auto':<12}{'error':>7}")
    for result in results:
        by = {row["variant"]: row for row in result["variants"]}
        auto = by[f"auto: {result['auto']}"]
        dense = min((by[name]["ms"] for name in BASES if "ms" in by[name]), default=float("nan"))

        def number(row: dict, key: str) -> str:
            return f"{row[key]:.2f}" if key in row else "-"

        print(
            f"{result['tokens']:>8} {result['pattern']:<14}{result['nonzeros_per_token']:>9.1f}"
            f"{result['union_per_128']:>7.0f}{dense:>10.3f}{number(by['gate_pack'], 'of_gate'):>7}"
            + "".join(f"{number(by[name], 'speedup'):>8}" for name in ("row", "tile", "dense"))
            + f"  {result['auto'] + ' ' + number(auto, 'speedup'):<12}{number(auto, 'of_dense_error'):>7}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--m", type=int, nargs="+",
                        help=f"tokens: {FORWARD_TOKENS} by default, {TRAINING_TOKENS} with --training, {DECODE_TOKENS}"
                        " with --decode")  # fmt: skip
    parser.add_argument("--patterns", nargs="+", default=patterns.PATTERNS, choices=patterns.PATTERNS, metavar="NAME",
                        help=f"of {' '.join(patterns.PATTERNS)}; all by default")  # fmt: skip
    patterns.add_activations(parser)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--decode", action="store_true", help="few tokens, as CUDA graphs")
    mode.add_argument("--training", action="store_true", help="forward and backward")
    parser.add_argument("--gated", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--nongated", dest="gated", action="store_false")
    parser.add_argument("--budget-ms", type=float, default=120, help="measured time per variant, M and pattern")
    parser.add_argument("--json", type=Path, metavar="OUT")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("a CUDA GPU is needed")
    from sparsellm.ops import build

    try:
        build.load()
    except Exception as error:  # each variant that needs the kernels will raise it again
        print(f"the kernels did not load: {error}")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, K {patterns.K}, N {patterns.N}, bfloat16")

    results, broken, bench = [], [], (ffn_training.Bench if args.training else Bench)(args)
    default = TRAINING_TOKENS if args.training else DECODE_TOKENS if args.decode else FORWARD_TOKENS
    sizes = sorted(args.m or default)
    with torch.no_grad():
        for name in args.patterns:
            if problem := patterns.obstacle(name, args.activations):
                print(f"\n{name}: skipped, for {problem}")
                continue
            try:
                block = patterns.build(name, DECODE_FROM if args.decode else max(sizes), "cuda", args.activations)
                for tokens in sizes:
                    results.append(bench.measure(name, block, tokens))
                    show(results[-1])
            except Exception as error:  # a whole table failed: the others are still worth printing
                broken.append(name)
                print(f"\n{name}: FAILED {type(error).__name__}: {error}", flush=True)
    if results:
        (ffn_training.summary if args.training else summary)(results)
    if args.json:
        args.json.write_text(json.dumps({"gpu": torch.cuda.get_device_name(), "results": results}, indent=1))
    if not results and not broken:
        raise SystemExit("no pattern was measured")
    failures = sum("failure" in row for result in results for row in result["variants"])
    if failures or broken:
        raise SystemExit(f"{failures} variants and {len(broken)} patterns failed")


if __name__ == "__main__":
    main()
