"""Plots the curves of several runs in one figure, and prints their last values as a table.

    python -m scripts.compare_runs runs/SPARSE runs/DENSE ... --output docs/comparison.png

Top row, over steps: held-out and training cross entropy; each run's training cross entropy minus the mean of all runs,
at steps that all have logged; nonzero activations per token, mean over layers (if every run has its own colour, thin
lines show the layers of the first ReLU run). Bottom row: held-out cross entropy over the time of the steps; over steps,
tokens per second and, for runs on a GPU, the peak memory of tensors.

--json OUT writes a line of JSON for each run: its configuration, some 80 of its rows, and "saved_by", the command,
machine, commit and versions of this process.

The table has last values, and the time of each run's steps, in total and until its held-out cross entropy was as low as
that of the worst run at its end, computed from tokens per second of logged steps, without validations and checkpoints.

If some ReLU runs used the kernels and others PyTorch, colours show which, to tell whether the two differ by more than
runs of the same kind. Otherwise each run has its own colour. (SiLU runs always use PyTorch.)
"""

import argparse
import json
import math
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sparsellm.config import load, to_dict
from sparsellm.figures import BLUE, ORANGE, STYLE, from_zero, legend_below, plain, saved
from sparsellm.runs.layout import CONFIG
from sparsellm.runs.metrics import METRICS, read
from sparsellm.system.provenance import provenance

Rows = list[dict[str, Any]]
LAST_ROWS, FIRST_ROWS = 48, 32  # kept of a run, evenly and by logarithm
KEPT = (
    "step", "tokens", "lr", "ce", "val_ce", "l1", "l1_coefficient", "nnz_mean", "nnz_per_layer", "dead_per_layer",
    "reinitialized_per_layer", "tokens_per_s", "peak_memory_bytes", "micro_batch_size", "plan_per_layer", "evaluation",
)  # fmt: skip
PATHS = {"kernels": ORANGE, "PyTorch": BLUE}


def path(rows: Rows) -> str:
    """Which path computed a run's feedforward layers, a key of PATHS. Rows without engines are PyTorch's."""
    engines = {engine for row in rows for engine in row.get("plan_per_layer") or []}
    return "kernels" if engines - {"torch"} else "PyTorch"


def thinned(rows: Rows) -> Rows:
    """KEPT of some rows: denser at the beginning, all validated ones, the first and the last; six digits of numbers."""
    wanted = np.concatenate([np.geomspace(1, len(rows), FIRST_ROWS), np.linspace(1, len(rows), LAST_ROWS)])
    chosen = {round(number) - 1 for number in wanted} | {i for i, row in enumerate(rows) if row["val_ce"] is not None}
    return [{key: _short(rows[i].get(key)) for key in KEPT} for i in sorted(chosen)]


def _short(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _short(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_short(each) for each in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _is_relu(rows: Rows) -> bool:
    return any(row["nnz_mean"] is not None for row in rows)


def named(folders: list[Path]) -> dict[str, Path]:
    """{name: folder}, by folder name, or by path if several have the same name."""
    names = [folder.resolve().name for folder in folders]
    each = zip(names, folders, strict=True)
    return {name if names.count(name) == 1 else str(folder): folder for name, folder in each}


def styles(runs: dict[str, Rows]) -> dict[str, tuple[str, str]]:
    """The colour of each run, and its name in the legend."""
    paths = {name: path(rows) for name, rows in runs.items()}
    found = list(paths.values())
    if len({paths[name] for name, rows in runs.items() if _is_relu(rows)}) < 2:
        return {name: (f"C{number}", name) for number, name in enumerate(runs)}
    return {name: (PATHS[of], f"{of} ({found.count(of)})") for name, of in paths.items()}


def seconds(rows: Rows) -> list[float]:
    """Cumulative seconds of a run's steps at each row, with each step as long as the next logged one."""
    spans = [row["tokens"] - before for row, before in zip(rows, [0, *(row["tokens"] for row in rows)], strict=False)]
    return np.cumsum([span / row["tokens_per_s"] for span, row in zip(spans, rows, strict=True)]).tolist()


def seconds_to(rows: Rows, loss: float) -> float | None:
    """Seconds until the held-out cross entropy first reached `loss`, interpolated between validations; None if
    never."""
    points = [(s, row["val_ce"]) for s, row in zip(seconds(rows), rows, strict=True) if row["val_ce"] is not None]
    for (s0, ce0), (s1, ce1) in pairwise([(0.0, math.inf), *points]):
        if ce1 <= loss:
            return s1 if math.isinf(ce0) else s0 + (s1 - s0) * (ce0 - loss) / (ce0 - ce1)
    return None


def draw(runs: dict[str, Rows]) -> Figure:
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(13.5, 7.2), layout="constrained")
        panels = figure.subplots(2, 3).flatten()
        losses, apart, nonzeros, in_time, speed, memory = panels
        _losses(losses, runs)
        _apart(apart, runs)
        _nonzeros(nonzeros, runs)
        _in_time(in_time, runs)
        _per_step(speed, runs, "tokens_per_s", 1, "tokens per second")
        _per_step(memory, runs, "peak_memory_bytes", 2**30, "largest memory of tensors on a GPU, GiB")
        if not any(len(line.get_xdata()) for line in memory.get_lines()):
            memory.remove()  # no run was on a GPU
        for axes in figure.axes:
            axes.set_xlabel("seconds of steps" if axes is in_time else "step")
            axes.set_xlim(0, None)
            plain(axes.xaxis)
        shown = dict(zip(*reversed(losses.get_legend_handles_labels()), strict=True))
        legend_below(figure, shown.values(), shown.keys())
        return figure


def _losses(axes: Axes, runs: dict[str, Rows]) -> None:
    """Draws all training curves light, and the held-out curves on top of them."""
    settled = []
    for name, (color, label) in styles(runs).items():
        rows = runs[name]
        axes.plot([r["step"] for r in rows], [r["ce"] for r in rows], color=color, alpha=0.3, linewidth=0.9)
        validated = [r for r in rows if r["val_ce"] is not None]
        axes.plot(
            [r["step"] for r in validated], [r["val_ce"] for r in validated], "o-", color=color, markersize=3,
            label=label, zorder=4,
        )  # fmt: skip
        settled += [r["ce"] for r in rows if r["ce"] is not None and 10 * r["step"] > rows[-1]["step"]]
    low, high = min(settled), max(settled)
    margin = 0.05 * (high - low) or 0.1
    axes.set_ylim(low - margin, high + margin)  # fits everything except a run's first tenth, which may be cut off
    axes.set(ylabel="cross entropy, nats per token", title="dots: held-out, light: training")
    plain(axes.yaxis)


def _apart(axes: Axes, runs: dict[str, Rows]) -> None:
    ce = {name: {r["step"]: r["ce"] for r in rows if r["ce"] is not None} for name, rows in runs.items()}
    shared = sorted(set.intersection(*(set(of_run) for of_run in ce.values())))
    means = [fmean(of_run[step] for of_run in ce.values()) for step in shared]
    for name, (color, _) in styles(runs).items():
        distances = [ce[name][step] - mean for step, mean in zip(shared, means, strict=True)]
        axes.plot(shared, distances, color=color, linewidth=1, alpha=0.7)
    axes.set(ylabel="nats per token", title="training cross entropy, less the mean of all runs")
    plain(axes.yaxis)


def _nonzeros(axes: Axes, runs: dict[str, Rows]) -> None:
    by_run = len({color for color, _ in styles(runs).values()}) == len(runs)
    layers_of = next((name for name, rows in runs.items() if by_run and _is_relu(rows)), None)
    for name, (color, _) in styles(runs).items():
        counted = [r for r in runs[name] if r["nnz_mean"] is not None]
        steps = [r["step"] for r in counted]
        axes.plot(steps, [r["nnz_mean"] for r in counted], color=color, linewidth=1.8)
        if name == layers_of:
            axes.plot(steps, [r["nnz_per_layer"] for r in counted], color=color, alpha=0.3, linewidth=0.7)
    axes.set(
        ylabel="nonzeros per token", title="mean of layers" + (f"; thin: each of {layers_of}" if layers_of else "")
    )
    axes.set_yscale("log", nonpositive="mask")
    plain(axes.yaxis)


def _in_time(axes: Axes, runs: dict[str, Rows]) -> None:
    for name, (color, _) in styles(runs).items():
        took = zip(seconds(runs[name]), runs[name], strict=True)
        points = [(second, row["val_ce"]) for second, row in took if row["val_ce"] is not None]
        axes.plot(*zip(*points, strict=True) if points else ([], []), "o-", color=color, markersize=3, clip_on=False)
    axes.set(ylabel="cross entropy, nats per token", title="held-out, over time")
    plain(axes.yaxis)


def _per_step(axes: Axes, runs: dict[str, Rows], key: str, unit: float, title: str) -> None:
    """Plot `key` of all rows except the first, whose step compiles."""
    for name, (color, _) in styles(runs).items():
        found = [(row["step"], row[key] / unit) for row in runs[name][1:] if row.get(key) is not None]
        axes.plot(*zip(*found, strict=True) if found else ([], []), color=color)
    axes.set_title(title)
    from_zero(axes)
    plain(axes.yaxis)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders")
    parser.add_argument("--output", type=Path, required=True, help="the picture to write")
    parser.add_argument("--json", type=Path, metavar="OUT", help="a line of JSON for each run")
    args = parser.parse_args()
    folders = named(args.runs)
    runs = {name: read(folder / METRICS) for name, folder in folders.items()}
    if empty := [name for name, rows in runs.items() if not rows]:
        parser.error(f"no {METRICS} with rows in: {', '.join(empty)}")

    held_out_last = {name: [r["val_ce"] for r in rows if r["val_ce"] is not None][-1:] for name, rows in runs.items()}
    common = max((last[0] for last in held_out_last.values() if last), default=math.inf)
    to_common = f"to {common:.3f}"
    width = 2 + max(map(len, ["run", *runs]))
    print(
        f"{'run':<{width}}{'path':<10}{'steps':>8}{'ce':>9}{'held-out':>10}{'nonzeros':>10}{'dead':>8}{'seconds':>10}"
        f"{to_common:>10}"
    )
    for name, rows in runs.items():
        last, validated = rows[-1], held_out_last[name]
        held_out = f"{validated[0]:.3f}" if validated else "-"
        until = seconds_to(rows, common) if validated else None
        took = f"{seconds(rows)[-1]:>10,.0f}{'-' if until is None else f'{until:,.0f}':>10}"
        counted = last["nnz_mean"] is not None
        count = f"{last['nnz_mean']:.1f}" if counted else "-"
        dead = f"{sum(last['dead_per_layer']):,}" if counted else "-"
        print(
            f"{name:<{width}}{path(rows):<10}{last['step']:>8,}{last['ce']:>9.3f}{held_out:>10}{count:>10}{dead:>8}"
            f"{took}"
        )
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_bytes(saved(draw(runs)))
    print(f"drawn: {args.output}")
    if args.json:
        configs = [to_dict(load(folder / CONFIG)) for folder in folders.values()]
        lines = zip(runs.items(), configs, strict=True)
        found = [
            {"name": name, "config": config, "rows": thinned(rows), "saved_by": provenance()}
            for (name, rows), config in lines
        ]
        args.json.write_text("".join(json.dumps(line, allow_nan=False) + "\n" for line in found))


if __name__ == "__main__":
    main()
