"""bench_ffn --training: times, errors and memory of forward and backward, of the operator and of dense PyTorch."""

import argparse
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from scripts.benchmarks import patterns
from scripts.benchmarks.patterns import BASES, dense_gated, dense_nongated
from sparsellm.ops import (
    Engine,
    FeedForwardOutput,
    Plan,
    choose_training_engine,
    feedforward,
    reference,
)
from sparsellm.ops.gpu_timing import alternating_ms

L1_COEFFICIENT = 2e-5  # the trainer's default; dl1 is this over the number of tokens
MIB = 2**20


class Step(NamedTuple):
    """The inputs of one forward and backward pass."""

    leaves: list[Tensor]  # x and the weights, bfloat16, with requires_grad
    dy: Tensor  # [M, K], the dtype of x
    dl1: Tensor  # 0-d float32


def forward_backward(forward: Callable[..., Tensor | FeedForwardOutput], step: Step) -> list[Tensor]:
    """y, and the gradients by the leaves: of y . dy + dl1 l1, or, where `forward` returns y alone, of y . dy."""
    with torch.enable_grad():
        out = forward(*step.leaves)
        if isinstance(out, Tensor):
            return [out.detach(), *torch.autograd.grad(out, step.leaves, step.dy)]
        return [out.y.detach(), *torch.autograd.grad((out.y, out.l1), step.leaves, (step.dy, step.dl1))]


def exact(step: Step) -> list[Tensor]:
    """The results of `forward_backward` in float64; CHUNK tokens are computed at a time, for memory."""
    x, *weights = (t.detach() for t in step.leaves)
    gated = len(weights) == 3
    forward = reference.gated_forward if gated else reference.nongated_forward
    backward = reference.gated_backward if gated else reference.nongated_backward
    weights = [w.double() for w in weights]
    sums = [torch.zeros_like(w) for w in weights]
    ys, dxs = [], []
    for x_part, dy_part in zip(x.split(patterns.CHUNK), step.dy.split(patterns.CHUNK), strict=True):
        x_part, dy_part = x_part.double(), dy_part.double()
        y, *_ = outputs = forward(x_part, *weights)
        dx, *dws = backward(x_part, *weights, *outputs[4:], dy_part, step.dl1.double())
        ys.append(y)
        dxs.append(dx)
        for total, dw in zip(sums, dws, strict=True):
            total += dw
    return [torch.cat(ys), torch.cat(dxs), *sums]


def saved_by(forward: Callable[..., Tensor | FeedForwardOutput], leaves: list[Tensor]) -> int:
    """The bytes that forward saves for backward, without the leaves; a storage that is saved twice counts once."""
    found = {}

    @torch.compiler.disable  # else torch.compile would trace it with a compiled forward
    def keep(tensor: Tensor) -> Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = forward(*leaves)
    of_leaves = {leaf.untyped_storage().data_ptr() for leaf in leaves}
    del out  # not before: while `out` lives, no saved storage is freed, so addresses tell storages apart
    return sum(size for at, size in found.items() if at not in of_leaves)


def peak_bytes(run: Callable[[], object]) -> int:
    """Bytes by which the device's memory in use rises during run()."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return torch.cuda.max_memory_allocated() - before


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        eager = dense_gated if args.gated else dense_nongated

        def planned(plan: Tensor | None) -> Callable[..., FeedForwardOutput]:
            missing = () if args.gated else (None,)
            return lambda x, *weights: feedforward(x, *missing, *weights, plan)

        self.forwards = {
            "torch eager": eager,
            "torch compiled": torch.compile(eager, dynamic=False),
            "torch ours": torch.compile(planned(None), dynamic=False),
            **{name: planned(Plan.of(name).tensor()) for name in ("tile", "dense")},
        }
        self.results = ("y", "dx", *(("dw_gate",) if args.gated else ()), "dw_up", "dw_down")
        self.l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size

    def measure(self, name: str, block: patterns.Block, tokens: int) -> dict:
        """The result for one pattern and number of tokens: what was measured, and a row for each variant."""
        x = block.x[:tokens]
        weights = (block.w_gate, block.w_up, block.w_down) if self.args.gated else (block.w_gate, block.w_down)
        dy = torch.randn(x.shape, device=x.device, generator=torch.Generator(x.device).manual_seed(0)).bfloat16()
        dl1 = torch.tensor(L1_COEFFICIENT / tokens, device=x.device)
        copies = max(1, -(-2 * self.l2_bytes // (x.nbytes + block.w_gate.nbytes)))
        steps = [Step([t.clone().requires_grad_() for t in (x, *weights)], dy.clone(), dl1) for _ in range(copies)]

        def run(forward: Callable) -> Callable[[int], list[Tensor]]:
            return lambda i: forward_backward(forward, steps[i % copies])

        times = alternating_ms({n: run(forward) for n, forward in self.forwards.items()}, self.args.budget_ms)
        without_l1 = steps[0]._replace(dl1=torch.zeros_like(dl1))
        right = exact(without_l1)
        variants = {n: self.variant(forward, times[n], without_l1, right) for n, forward in self.forwards.items()}
        nnz, union = patterns.counts(x, block.w_gate)
        engine = self.automatic(times, steps[0])
        return {
            "training": True, "tokens": tokens, "pattern": name, "note": block.note, "gated": self.args.gated,
            "nonzeros_per_token": nnz / tokens, "union_per_128": union / -(-tokens // patterns.TOKEN_TILE),
            "auto": engine, "variants": rows(variants, engine),
        }  # fmt: skip

    def variant(self, forward: Callable, ms: float | Exception, step: Step, right: list[Tensor]) -> dict:
        """One variant's time, errors and memory, and under `failure` the error that ended the measuring, if one did."""
        if isinstance(ms, Exception):
            return {"failure": f"{type(ms).__name__}: {ms}"}
        found: dict = {"ms": ms}
        try:
            ours = forward_backward(forward, step)
            found["errors"] = {
                name: float((a.double() - b).norm() / b.norm())
                for name, a, b in zip(self.results, ours, right, strict=True)
            }
            del ours
            found["saved_mib"] = saved_by(forward, step.leaves) / MIB
            found["peak_mib"] = peak_bytes(lambda: forward_backward(forward, step)) / MIB
        except Exception as error:
            found["failure"] = f"{type(error).__name__}: {error}"
        return found

    def automatic(self, times: dict, step: Step) -> str:
        """The engine that a layer has after two decisions, if it starts dense and counts what its engines count."""
        x, *_, w_down = step.leaves
        engine = Engine.dense
        for _ in range(2):
            if not isinstance(times[engine.name], Exception):
                out = self.forwards[engine.name](*step.leaves)
                engine = choose_training_engine(*x.shape, w_down.shape[1], int(out.nnz), int(out.union), engine)
        return engine.name


def rows(variants: dict[str, dict], engine: str) -> list[dict]:
    """A row for each variant, and for `auto`: what was measured, the speed-up, errors over those of eager dense
    PyTorch."""
    dense = min((variants[name]["ms"] for name in BASES if "ms" in variants[name]), default=None)
    eager_errors = variants["torch eager"].get("errors")
    found = []
    for name in [*variants, "auto"]:
        measured = variants[engine if name == "auto" else name]
        row = {"variant": f"auto: {engine}" if name == "auto" else name, **measured}
        if "ms" in row and dense:
            row["speedup"] = dense / row["ms"]
        if "errors" in row and eager_errors and name != "torch eager":
            row["of_dense_errors"] = {key: error / eager_errors[key] for key, error in row["errors"].items()}
        found.append(row)
    return found


def summary(results: list[dict]) -> None:
    """Prints a line for each result. `worst error` is the largest error ratio of y and all gradients, over all variants
    but dense PyTorch."""
    engines = ("torch ours", "tile", "dense")
    print(f"\n{'M':>8} {'pattern':<14}{'nonzeros':>9}{'union':>7}{'dense ms':>10}", end="")
    print(
        "".join(f"{name:>12}" for name in engines)
        + f"  {'auto':<12}{'worst error':>12}{'saved MiB: dense':>18}{'tile':>8}"
    )
    for result in results:
        by = {row["variant"]: row for row in result["variants"]}
        auto = by[f"auto: {result['auto']}"]
        dense = min((by[name] for name in BASES if "ms" in by[name]), key=lambda row: row["ms"], default={})
        ratios = [r for name, row in by.items() if name not in BASES for r in row.get("of_dense_errors", {}).values()]
        worst = f"{torch.tensor(ratios).max():.2f}" if ratios else "-"  # a NaN is the worst

        def number(row: dict, key: str, digits: int = 2) -> str:
            return f"{row[key]:.{digits}f}" if key in row else "-"

        print(
            f"{result['tokens']:>8} {result['pattern']:<14}{result['nonzeros_per_token']:>9.1f}"
            f"{result['union_per_128']:>7.0f}{number(dense, 'ms', 3):>10}"
            + "".join(f"{number(by[name], 'speedup'):>12}" for name in engines)
            + f"  {result['auto'] + ' ' + number(auto, 'speedup'):<12}{worst:>12}"
            f"{number(dense, 'saved_mib', 0):>18}{number(by['tile'], 'saved_mib', 0):>8}"
        )
