"""The Triton kernels against compiled dense PyTorch, on recorded patterns, in one process on one GPU.

    python -m scripts.benchmarks.bench_triton --activations DIR [--m 16384 131072] [--patterns layer1 ...] [--kernels]
    python -m scripts.benchmarks.bench_triton --activations DIR --try sampled=128,64,8,3 gathered=256,64,8,4 resident=1

Lines for each M and pattern (patterns.py): the mean union of 128 tokens, in their own order and ordered;
the times of compiled dense PyTorch and of the tile engine in Triton, as the policy orders and the other way, and of the
dense engine as a layer runs it there; their ratio, and the errors of y against float64 over those of dense PyTorch, on
2,048 tokens; forward, and, up to --training-m tokens, forward and backward; and which engine `auto` takes for what was
counted. --kernels: the time of each kernel of one pass, and how many times it was launched if not once. --try: block
sizes in the place of those of sparsellm/ops/triton/tuning.py, each as columns, depth, warps and stages; several values
of one name are measured one after the other, against the same base.

Times are medians of alternating CUDA events (sparsellm/ops/gpu_timing.py), on copies of the inputs that take turns.
"""

import argparse
from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import torch
from torch import Tensor

from scripts.benchmarks import patterns
from scripts.benchmarks.ffn_training import Step, forward_backward
from scripts.benchmarks.patterns import dense_gated
from sparsellm.inference.engine_choice import EngineChoice, NeuronMajor
from sparsellm.ops import Plan, backend, choose_engine, choose_training_engine, dispatch, feedforward
from sparsellm.ops.gpu_timing import alternating_ms
from sparsellm.ops.triton import engines, tuning
from sparsellm.ops.twell import TOKEN_TILE, tiles

TILE, DENSE = Plan.of("tile"), Plan.of("dense")
ERROR_TOKENS = 2048
NAMES = ("sparse", "layer1", "layer4", "layer7")


def variants(tries: list[str]) -> dict[str, tuning.Tuning]:
    """The block sizes to measure by name: those of the device, and each of `tries` in the place of one of them."""
    device = torch.device("cuda", torch.cuda.current_device())
    base = tuning.of(device)[0]
    found = {"tile": base}
    for text in tries:
        name, values = text.split("=")
        numbers = [int(value) for value in values.split(",")]
        found[text] = base._replace(**{name: tuning.Shape(*numbers) if len(numbers) > 1 else numbers[0]})
    return found


def tuned(sizes: tuning.Tuning, call: Callable[[int], object]) -> Callable[[int], object]:
    """`call` with these block sizes."""
    programs = sizes.resident * torch.cuda.get_device_properties(0).multi_processor_count

    def run(i: int) -> object:
        with patch.object(tuning, "of", lambda _: (sizes, programs)):
            return call(i)

    return run


def ordering(orders: bool, call: Callable[[int], object]) -> Callable[[int], object]:
    """`call` with tokens ordered or not, whatever the policy says."""

    def run(i: int) -> object:
        with patch.object(dispatch, "orders", lambda _: orders):
            return call(i)

    return run


def both_ways(
    m: int, saving: bool, sizes: dict[str, tuning.Tuning], call: Callable[[int], object]
) -> dict[str, Callable]:
    """The variants of `call` on m tokens by name: with each of `sizes`, and not as the policy orders."""
    found, orders = {text: tuned(each, call) for text, each in sizes.items()}, engines.orders(m, saving)
    found["not ordered" if orders else "ordered"] = ordering(not orders, call)
    return found


def by_kernel(call: Callable[[int], object], calls: int = 5) -> str:
    """The milliseconds in one call of every kernel of at least 1 us, the longest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for i in range(calls):
            call(i)
        torch.cuda.synchronize()
    rows = [(e.self_device_time_total / calls / 1e3, e.key[:40], e.count // calls) for e in profile.key_averages()]
    rows = sorted((row for row in rows if row[0] >= 1e-3), reverse=True)
    return "    " + "  ".join(f"{name}{f' x{count}' if count > 1 else ''} {ms:.3f}" for ms, name, count in rows)


def show(what: str, name: str, times: dict[str, float | Exception], note: str) -> None:
    base = times["torch compiled"]
    for variant, ms in times.items():
        if isinstance(ms, Exception):
            print(f"{what:<20} {name:<8} {variant:<28} FAILED {' '.join(str(ms).split())[:300]}", flush=True)
        elif variant != "torch compiled" and not isinstance(base, Exception):
            print(
                f"{what:<20} {name:<8} {variant:<28} {ms:8.3f} ms, dense {base:8.3f}: {base / ms:6.3f} x  {note}",
                flush=True,
            )


def error_ratio(x: Tensor, weights: list[Tensor], w_down_t: Tensor) -> float:
    at = torch.arange(0, len(x), max(1, len(x) // ERROR_TOKENS), device=x.device)
    exact = dense_gated(*(t.double() for t in (x[at], *weights)))
    ours, theirs = engines.forward(x, *weights, TILE, w_down_t, False)[0][at], dense_gated(x, *weights)[at]
    return float((ours.double() - exact).norm() / (theirs.double() - exact).norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--m", type=int, nargs="+", default=(16_384, 131_072), help="tokens; 16384 131072 by default")
    parser.add_argument("--training-m", type=int, default=16_384, help="up to so many, forward and backward, too")
    parser.add_argument("--patterns", nargs="+", default=NAMES, choices=patterns.PATTERNS, metavar="NAME")
    parser.add_argument("--try", dest="tries", nargs="+", default=[], metavar="NAME=COLUMNS,DEPTH,WARPS,STAGES")
    parser.add_argument("--kernels", action="store_true", help="the time of each kernel")
    parser.add_argument("--budget-ms", type=float, default=60, help="measured time per variant, M and pattern")
    patterns.add_activations(parser)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("a CUDA GPU is needed")
    backend.load("triton")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, K {patterns.K}, N {patterns.N}, bfloat16")
    sizes, compiled = variants(args.tries), torch.compile(dense_gated, dynamic=False)
    always_dense = EngineChoice("dense")
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    for name in args.patterns:
        block = patterns.build(name, max(args.m), "cuda", args.activations)
        weights = [block.w_gate, block.w_up, block.w_down]
        w_down_t = NeuronMajor.of(block.w_down, None).weight
        for m in sorted(args.m):
            x = block.x[:m]
            copies = [x, *(x.clone() for _ in range(2 * l2 // x.nbytes))]

            def forward(i: int, copies: list[Tensor] = copies, weights: list = weights, turned=w_down_t) -> object:
                return engines.forward(copies[i % len(copies)], *weights, TILE, turned, False)

            def base(i: int, copies: list[Tensor] = copies, weights: list = weights) -> object:
                return compiled(copies[i % len(copies)], *weights)

            def dense(i: int, copies: list[Tensor] = copies, weights: list = weights) -> object:
                return always_dense.output(copies[i % len(copies)], *weights)

            with torch.no_grad():
                own, ordered = (int(ordering(way, forward)(0)[3][3]) / tiles(m, TOKEN_TILE) for way in (False, True))
                print(f"union {m:,}, {name}: {own:,.0f} neurons in the tokens' own order, {ordered:,.0f} ordered")
                nnz, *_, union = forward(0)[3].tolist()
                counted = m, patterns.K, patterns.N, nnz, union
                alone, in_training = choose_engine(*counted), choose_training_engine(*counted)
                print(f"auto {m:,}, {name}: {alone.name} forward, {in_training.name} where a backward pass follows")
                calls = {"torch compiled": base, **both_ways(m, False, sizes, forward), "dense": dense}
                times = alternating_ms(calls, args.budget_ms)
                note = f"error {error_ratio(x, weights, w_down_t):.2f} of dense"
                show(f"forward {m:,}", name, times, note)
                if args.kernels:
                    print(by_kernel(forward))
            if m > args.training_m:
                continue
            dy = torch.randn(x.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(0)).bfloat16()
            dl1 = torch.tensor(2e-5 / m, device="cuda")
            leaves = [t.detach().clone().requires_grad_() for t in (x, *weights)]
            steps = [Step([copy.detach().clone().requires_grad_(), *leaves[1:]], dy, dl1) for copy in copies]

            def step(i: int, plan: Plan = TILE, steps: list[Step] = steps) -> object:
                return forward_backward(lambda *inputs: feedforward(*inputs, plan), steps[i % len(steps)])

            def base_step(i: int, steps: list[Step] = steps) -> object:
                return forward_backward(compiled, steps[i % len(steps)])

            calls = {"torch compiled": base_step, **both_ways(m, True, sizes, step), "dense": partial(step, plan=DENSE)}
            show(f"and backward {m:,}", name, alternating_ms(calls, args.budget_ms), "")
            if args.kernels:
                print(by_kernel(step))
            del steps, leaves, calls


if __name__ == "__main__":
    main()
