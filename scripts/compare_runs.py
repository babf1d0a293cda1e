"""Plots the curves of several runs in one figure, and prints their last values as a table.

    python -m scripts.compare_runs runs/SPARSE runs/DENSE ... --output docs/comparison.png
    python -m scripts.compare_runs docs/results/NAME.jsonl --shared-gpus --output docs/NAME.png

Top row, against steps: held-out and training cross entropy; each run's training cross entropy minus the mean of all
runs, at the steps that all runs have logged; nonzero activations per token, mean over layers (if every run has its own
colour, thin lines show the layers of the first ReLU run). Bottom row: held-out cross entropy against the time of the
steps; tokens per second against steps; and, for runs on a GPU, the peak memory of tensors against steps.
--shared-gpus leaves out time and tokens per second, which other processes on the same GPUs change.

The arguments are run folders or files that --json wrote.

--json OUT writes a line of JSON for each run: its configuration, about 80 of its rows, and "saved_by", the command,
machine, commit and versions of this process. A row's speed, energy per token and peak memory are those of all steps
since the row before, so that times and energies computed from the file equal those of the run. The figure then shows
these rows. The PNG stores their checksum, so that a test can check whether the figure is up to date.

The table has last values, and the time of each run's steps: in total, and until the run's held-out cross entropy was as
low as that of the worst run at its end. Times are computed from the tokens per second of logged steps, so validations
and checkpoints are excluded.

If some ReLU runs used the kernels and others PyTorch, colours show which of the two a run used, to tell whether they
differ by more than runs of the same kind. Otherwise each run has its own colour. (SiLU runs always use PyTorch.)
"""

import argparse
import hashlib
import json
import math
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from scripts.benchmarks import harness
from scripts.benchmarks.harness import cell
from sparsellm.config import load, to_dict
from sparsellm.figures import BLUE, ORANGE, STYLE, from_zero, legend_below, plain, saved
from sparsellm.runs.layout import CONFIG
from sparsellm.runs.metrics import METRICS, read
from sparsellm.system.provenance import provenance

Rows = list[dict[str, Any]]
LAST_ROWS, FIRST_ROWS = 48, 32  # number of rows kept: evenly spaced, and logarithmically spaced
KEPT = (
    "step", "tokens", "lr", "ce", "val_ce", "l1", "l1_coefficient", "nnz_mean", "nnz_per_layer", "dead_per_layer",
    "reinitialized_per_layer", "tokens_per_s", "mj_per_token", "peak_memory_bytes", "micro_batch_size",
    "plan_per_layer", "evaluation",
)  # fmt: skip
PATHS = {"kernels": ORANGE, "PyTorch": BLUE}


def path(rows: Rows) -> str:
    """What computed a run's feedforward layers: a key of PATHS. If PyTorch did, rows may have no engines."""
    engines = {engine for row in rows for engine in row.get("plan_per_layer") or []}
    return "kernels" if engines - {"torch"} else "PyTorch"


def thinned(rows: Rows) -> Rows:
    """About 80 rows with the columns KEPT and numbers rounded to six digits: the first and last row, all rows with a
    validation, and others, of which more are near the beginning. Speed, energy per token and peak memory also cover the
    rows left out before a row."""
    wanted = np.concatenate([np.geomspace(1, len(rows), FIRST_ROWS), np.linspace(1, len(rows), LAST_ROWS)])
    chosen = {round(number) - 1 for number in wanted} | {i for i, row in enumerate(rows) if row["val_ce"] is not None}
    ends, tokens = sorted(chosen), spans(rows)
    kept = []
    for first, last in pairwise([-1, *ends]):
        steps = slice(first + 1, last + 1)
        kept.append({key: rows[last].get(key) for key in KEPT} | _merged(rows[steps], tokens[steps]))
    return json.loads(json.dumps(kept), parse_float=lambda text: float(f"{float(text):.6g}"))


def _merged(rows: Rows, tokens: list[int]) -> dict[str, float | None]:
    """The columns of several consecutive rows that describe the time since the row before, each over `tokens`."""
    energies = [(n, n * row["mj_per_token"]) for row, n in zip(rows, tokens, strict=True) if row.get("mj_per_token")]
    peaks = [row["peak_memory_bytes"] for row in rows if row.get("peak_memory_bytes")]
    return {
        "tokens_per_s": sum(tokens) / sum(n / row["tokens_per_s"] for row, n in zip(rows, tokens, strict=True)),
        "mj_per_token": sum(mj for _, mj in energies) / sum(n for n, _ in energies) if energies else None,
        "peak_memory_bytes": max(peaks, default=None),
    }


def checksum(runs: dict[str, Rows]) -> str:
    """SHA-256 of the rows of all runs."""
    return hashlib.sha256(json.dumps(runs, sort_keys=True).encode()).hexdigest()


def _is_relu(rows: Rows) -> bool:
    return any(row["nnz_mean"] is not None for row in rows)


def named(folders: list[Path]) -> dict[str, Path]:
    """{name: folder}. The name is the folder's name, or its path if several folders have the same name."""
    names = [folder.resolve().name for folder in folders]
    each = zip(names, folders, strict=True)
    return {name if names.count(name) == 1 else str(folder): folder for name, folder in each}


def styles(runs: dict[str, Rows]) -> dict[str, tuple[str, str]]:
    """{run: (colour, name in the legend)}"""
    paths = {name: path(rows) for name, rows in runs.items()}
    found = list(paths.values())
    if len({paths[name] for name, rows in runs.items() if _is_relu(rows)}) < 2:
        return {name: (f"C{number}", name) for number, name in enumerate(runs)}
    return {name: (PATHS[of], f"{of} ({found.count(of)})") for name, of in paths.items()}


def spans(rows: Rows) -> list[int]:
    """Tokens between a row and the row before."""
    return [after - before for before, after in pairwise([0, *(row["tokens"] for row in rows)])]


def seconds(rows: Rows) -> list[float]:
    """Cumulative seconds of a run's steps, at each row. Assumes that a step takes as long as the next logged step."""
    return np.cumsum([span / row["tokens_per_s"] for span, row in zip(spans(rows), rows, strict=True)]).tolist()


def seconds_to(rows: Rows, loss: float) -> float | None:
    """Seconds until the held-out cross entropy reached `loss`, interpolated between validations; None if never."""
    points = [(s, row["val_ce"]) for s, row in zip(seconds(rows), rows, strict=True) if row["val_ce"] is not None]
    for (s0, ce0), (s1, ce1) in pairwise([(0.0, math.inf), *points]):
        if ce1 <= loss:
            return s1 if math.isinf(ce0) else s0 + (s1 - s0) * (ce0 - loss) / (ce0 - ce1)
    return None


def curve(axes: Axes, x: Iterable[float], y: Iterable[Any], *form: str, **style: Any) -> None:
    """Plot y against x, leaving out points whose y is None."""
    shown = [point for point in zip(x, y, strict=True) if point[1] is not None]
    axes.plot(*(zip(*shown, strict=True) if shown else ([], [])), *form, **style)


def draw(runs: dict[str, Rows], shared_gpus: bool = False) -> Figure:
    """The figure described at the top of this file."""
    by_style = styles(runs)
    by_run = len({color for color, _ in by_style.values()}) == len(runs)
    layers_of = next((name for name, rows in runs.items() if by_run and _is_relu(rows)), None)
    ce = {name: {r["step"]: r["ce"] for r in rows if r["ce"] is not None} for name, rows in runs.items()}
    mean = {step: fmean(of[step] for of in ce.values()) for step in sorted(set.intersection(*map(set, ce.values())))}
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.2 if shared_gpus else 13.5, 7.2), layout="constrained")
        losses, apart, nonzeros, *of_time, memory = figure.subplots(2, 2 if shared_gpus else 3).flat
        for name, rows in runs.items():
            color, label = by_style[name]
            columns = {key: [row.get(key) for row in rows] for key in KEPT}
            steps, held_out = columns["step"], columns["val_ce"]
            curve(losses, steps, columns["ce"], color=color, alpha=0.3, linewidth=0.9)
            curve(losses, steps, held_out, "o-", color=color, markersize=3, label=label, zorder=4)
            curve(apart, mean, [ce[name][step] - mean[step] for step in mean], color=color, linewidth=1, alpha=0.7)
            curve(nonzeros, steps, columns["nnz_mean"], color=color, linewidth=1.8)
            if name == layers_of:
                curve(nonzeros, steps, columns["nnz_per_layer"], color=color, alpha=0.3, linewidth=0.7)
            if of_time:
                in_time, speed = of_time
                curve(in_time, seconds(rows), held_out, "o-", color=color, markersize=3, clip_on=False)
                # Leave out the first step, which compiles.
                curve(speed, steps[1:], columns["tokens_per_s"][1:], color=color)
            gib = [value and value / 2**30 for value in columns["peak_memory_bytes"]]
            curve(memory, steps[1:], gib[1:], color=color)
        # Fit the axis to everything except each run's first tenth, which may be cut off.
        settled = [of[step] for of in ce.values() for step in of if 10 * step > max(of)]
        margin = 0.05 * (max(settled) - min(settled)) or 0.1
        losses.set_ylim(min(settled) - margin, max(settled) + margin)
        nats = "cross entropy, nats per token"
        losses.set(ylabel=nats, title="dots: held-out, light: training")
        apart.set(ylabel="nats per token", title="training cross entropy minus the mean of all runs")
        thin = f"; thin: layers of {layers_of}" if layers_of else ""
        nonzeros.set(ylabel="nonzeros per token", title=f"mean of layers{thin}")
        nonzeros.set_yscale("log", nonpositive="mask")
        if of_time:
            in_time.set(ylabel=nats, title="held-out, over time")
            speed.set_title("tokens per second")
            from_zero(speed)
        memory.set_title("largest memory of tensors on a GPU, GiB")
        from_zero(memory)
        if not any(len(line.get_xdata()) for line in memory.get_lines()):
            memory.remove()  # no run used a GPU
        for axes in figure.axes:
            axes.set_xlabel("seconds of steps" if axes in of_time[:1] else "step")
            axes.set_xlim(0, None)
            plain(axes.xaxis)
            plain(axes.yaxis)
        shown = dict(zip(*reversed(losses.get_legend_handles_labels()), strict=True))
        legend_below(figure, shown.values(), shown.keys())
        return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders, or files that --json wrote")
    parser.add_argument("--shared-gpus", action="store_true", help="leave out time and tokens per second")
    parser.add_argument("--without", nargs="+", default=(), metavar="NAME", help="runs of the files to leave out")
    parser.add_argument("--output", type=Path, required=True, help="the PNG to write")
    parser.add_argument("--json", type=Path, metavar="OUT", help="a line of JSON for each run")
    args = parser.parse_args()
    if args.json and any(path.is_file() for path in args.runs):
        parser.error("--json needs run folders: a file that --json wrote has fewer rows than its run")
    folders = named([path for path in args.runs if not path.is_file()])
    runs = {name: read(folder / METRICS) for name, folder in folders.items()}
    for saved_runs in filter(Path.is_file, args.runs):
        runs |= {line["name"]: line["rows"] for line in map(json.loads, saved_runs.read_text().splitlines())}
    runs = {name: rows for name, rows in runs.items() if name not in args.without}
    if empty := [name for name, rows in runs.items() if not rows]:
        parser.error(f"no {METRICS} with rows in: {', '.join(empty)}")

    held_out = {name: [row["val_ce"] for row in rows if row["val_ce"] is not None] for name, rows in runs.items()}
    common = max((losses[-1] for losses in held_out.values() if losses), default=math.inf)
    table = []
    for name, rows in runs.items():
        last, until = rows[-1], seconds_to(rows, common)
        counted = last["nnz_mean"] is not None
        table.append({
            "run": name, "path": path(rows), "steps": f"{last['step']:,}", "ce": f"{last['ce']:.3f}",
            "held-out": f"{held_out[name][-1]:.3f}" if held_out[name] else "-",
            "nonzeros": cell(last["nnz_mean"], ".1f"), "dead": f"{sum(last['dead_per_layer']):,}" if counted else "-",
        } | ({} if args.shared_gpus else {
            "seconds": f"{seconds(rows)[-1]:,.0f}", f"to {common:.3f}": cell(until, ",.0f"),
        }))  # fmt: skip
    harness.table(table)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    shown = {name: thinned(rows) for name, rows in runs.items()} if args.json else runs
    args.output.write_bytes(saved(draw(shown, args.shared_gpus), Source=checksum(shown)))
    print(f"figure: {args.output}")
    if args.json:
        configs = [to_dict(load(folder / CONFIG)) for folder in folders.values()]
        lines = zip(shown.items(), configs, strict=True)
        found = [
            {"name": name, "config": config, "rows": rows, "saved_by": provenance()} for (name, rows), config in lines
        ]
        args.json.write_text("".join(json.dumps(line, allow_nan=False) + "\n" for line in found))


if __name__ == "__main__":
    main()
