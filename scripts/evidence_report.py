"""Reports on finished runs, such as those of a sweep: figures, and Markdown tables for RESULTS.md.

    python -m scripts.evidence_report runs/mini-* --output runs/mini
    python -m scripts.evidence_report docs/results/mini.jsonl --output docs/mini
    python -m scripts.evidence_report docs/results/mini_width.jsonl --widths docs/mini_width.png

Its arguments are run folders, or files with one line of JSON per run: {"name", "config", "rows", "task_rows"}, where
"rows" are about 80 rows of the run's metrics and "task_rows" is the number of rows that `evaluate` scored per task.
--save OUT writes such a file, with "saved_by": the command, machine, commit and versions that read the folder.

OUTPUT_sweep.png: cross entropy, nonzeros, dead neurons and accuracy against the L1 coefficient; nonzeros and dead
neurons over training tokens. OUTPUT_dead.png: remedies for dead neurons, compared with plain runs at the same
coefficient. --widths: cross entropy, nonzeros and dead neurons against the number of neurons per layer, for runs that
differ in it. Tables are printed.

The coefficient that raises cross entropy by 1% is interpolated between two coefficients of the sweep, on a log scale.
The standard error of an accuracy comes from the number of scored rows; a second seed shows the spread between seeds.
"""

import argparse
import json
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from scripts.benchmarks.harness import cell
from scripts.compare_runs import checksum, curve, thinned
from sparsellm.config import definition, load
from sparsellm.evaluation.results import RESULTS
from sparsellm.evaluation.tasks import TASKS
from sparsellm.figures import GREY, STYLE, chance_line, from_zero, legend_below, percent, plain, saved
from sparsellm.runs.layout import CONFIG, EVALUATION, checkpoint
from sparsellm.runs.metrics import METRICS, read
from sparsellm.sweep.figure import spelled
from sparsellm.system.provenance import provenance

Row = dict[str, Any]
LOSSES = 0.01, 0.02  # relative increases in cross entropy for which a coefficient is reported
REMEDIES = {"redrawn": "dead rows reinitialized", "blended": "dead rows blended", "warm_up": "coefficient warms up"}


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The runs in a file, one dict per line; for a run's folder, one dict for that run."""
    if not path.is_dir():
        return [json.loads(line) for line in path.read_text().splitlines()]
    config = load(path / CONFIG)
    rows, tasks = thinned(read(path / METRICS)), {}
    scores = checkpoint(path, config.training.steps) / EVALUATION / RESULTS
    if scores.is_file():
        found = json.loads(scores.read_text())
        tasks = found["tasks"]
        rows[-1]["evaluation"] = {name: task["score"] for name, task in tasks.items()} | {"mean": found["mean"]}
    task_rows = {name: task["rows"] for name, task in tasks.items()}
    line = {"name": path.resolve().name, "config": definition(config), "rows": rows, "task_rows": task_rows}
    return [line | {"saved_by": provenance()}]


def remedy(config: dict[str, Any]) -> str | None:
    """The remedy for dead neurons that `config` uses, as a key of REMEDIES; None if it uses none."""
    if config.get("sparsity.reinit_dead_after_tokens") is not None:
        return "blended" if config["sparsity.reinit_blend"] < 1 else "redrawn"
    return "warm_up" if config.get("sparsity.l1_warmup_tokens") else None


class Run:
    """A finished run: one line in an input file, and one row in the printed tables."""

    def __init__(self, line: dict[str, Any]) -> None:
        self.name, self.line, self.rows = line["name"], line, line["rows"]
        config, self.last = line["config"], line["rows"][-1]
        self.coefficient: float = config["sparsity.l1_coefficient"]
        self.relu: bool = config["sparsity.activation"] == "relu"
        self.seed: int = config["training.seed"]
        self.remedy = remedy(config)
        self.width: int = config["model.intermediate_size"]
        self.neurons = self.width * config["model.num_layers"]
        self.dead_after: int = config["sparsity.dead_after_tokens"]
        self.ce: float = self.last["val_ce"]
        self.nonzeros: float | None = self.last["nnz_mean"]
        self.tokens_per_s = median(row["tokens_per_s"] for row in self.rows)
        scores = self.last["evaluation"] or {}
        # {task: score}; empty if any task has no score.
        self.scores = {task: scores[task] for task in TASKS} if scores.get("mean") is not None else {}
        self.kind = (f"ReLU + L1, {spelled(self.coefficient)}" if self.coefficient else "ReLU") if self.relu else "SiLU"

    def dead(self, row: Row | None = None) -> float | None:
        """The fraction of dead neurons at `row` (default: the last). None for SiLU, and before dead_after_tokens."""
        row = row or self.last
        if row["dead_per_layer"] is None or row["tokens"] < self.dead_after:
            return None
        return sum(row["dead_per_layer"]) / self.neurons

    @property
    def accuracy(self) -> tuple[float, float] | None:
        """The mean accuracy over tasks and its standard error; None if either is unknown."""
        rows = self.line["task_rows"]
        if not self.scores or not rows:
            return None
        variance = sum(p * (1 - p) / rows[task] for task, p in self.scores.items())
        return fmean(self.scores.values()), math.sqrt(variance) / len(self.scores)


class Sweep:
    """The runs that differ only in the L1 coefficient, sorted by coefficient, and the runs compared with them."""

    def __init__(self, runs: list[Run]) -> None:
        self.runs = runs
        plain = [run for run in runs if run.relu and run.seed == 0 and run.remedy is None]
        self.relu = sorted(plain, key=lambda run: run.coefficient)
        self.sparse = [run for run in self.relu if run.coefficient]
        self.silu = [run for run in runs if not run.relu]
        self.without = next((run for run in self.relu if not run.coefficient), None)

    def increase(self, run: Run) -> float | None:
        """The relative increase in held-out cross entropy over the ReLU run without L1; None without such a run."""
        return None if self.without is None else run.ce / self.without.ce - 1

    def remedies(self) -> list[Run]:
        """The runs with the coefficient at which remedies were tried: first those without a remedy, by seed, then those
        with one. [] if no run without a remedy has seed 0."""
        coefficients = [run.coefficient for run in self.runs if run.remedy is not None][:1]
        alike = [run for run in self.runs if run.relu and run.coefficient in coefficients]
        plain = sorted((run for run in alike if run.remedy is None), key=lambda run: run.seed)
        tried = [run for run in alike if run.remedy is not None]
        return [*plain, *tried] if plain and plain[0].seed == 0 else []

    def price(self, loss: float) -> tuple[float, float] | None:
        """(coefficient, nonzeros per token) at which cross entropy has increased by the fraction `loss`.

        Both are interpolated on a log scale. None if `loss` is outside the sweep's range.
        """
        points = [(math.log(r.coefficient), self.increase(r), math.log(r.nonzeros)) for r in self.sparse if r.nonzeros]
        for (x0, y0, n0), (x1, y1, n1) in reversed(list(pairwise(points))):
            if y0 is not None and y1 is not None and y0 <= loss < y1:
                share = (loss - y0) / (y1 - y0)
                return math.exp(x0 + share * (x1 - x0)), math.exp(n0 + share * (n1 - n0))
        return None


def table(rows: list[dict[str, str]]) -> str:
    """A Markdown table of `rows`, whose keys are the header."""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(row.values() for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def markdown(sweep: Sweep) -> str:
    parts = [table([
        {
            "run": run.name, "held-out cross entropy": f"{run.ce:.4f}",
            "over ReLU without L1": cell(sweep.increase(run), "+.2%"), "nonzeros per token": cell(run.nonzeros, ".1f"),
            "dead neurons": cell(run.dead(), ".1%"),
            "mean accuracy": "{:.1%} ± {:.1%}".format(*run.accuracy) if run.accuracy else "-",
            "tokens/s": f"{run.tokens_per_s:,.0f}",
        }
        for run in sweep.runs
    ])]  # fmt: skip
    if scored := [run for run in sweep.runs if run.scores]:
        parts.append(table([{"run": run.name} | {t: f"{run.scores[t]:.1%}" for t in TASKS} for run in scored]))
    prices = []
    for loss in LOSSES:
        answer = "no coefficient of the sweep"
        if (price := sweep.price(loss)) is not None:
            answer = f"{spelled(float(f'{price[0]:.2g}'))}, {price[1]:.1f} nonzeros of {sweep.runs[0].width:,}"
        prices.append(f"- {loss:.0%} of cross entropy: {answer}.")
    return "\n\n".join([*parts, "\n".join(prices)])


def draw_sweep(sweep: Sweep) -> Figure | None:
    """The sweep's figure; None if there is no ReLU run."""
    if not sweep.relu:
        return None
    figure = Figure(figsize=(11, 6.2), layout="constrained")
    loss, nonzeros, dead, accuracy, nonzeros_over, dead_over = figure.subplots(2, 3).flat
    levels: list[tuple[Axes, Callable[[Run], float | None], str]] = [
        (loss, sweep.increase, "held-out cross entropy\nover ReLU without L1"),
        (nonzeros, lambda run: run.nonzeros, "nonzeros per token and layer"),
        (dead, Run.dead, "dead neurons"),
        (accuracy, lambda run: run.accuracy and run.accuracy[0], "mean accuracy"),
    ]
    swept = [run.coefficient for run in sweep.sparse]
    seeds = [run for run in sweep.runs if run.relu and run.coefficient and run.seed and run.remedy is None]
    for axes, value, label in levels:
        curve(axes, swept, map(value, sweep.sparse), "o-", color="C0", label="ReLU + L1")
        if levels_of_seeds := [(run.coefficient, y) for run in seeds if (y := value(run)) is not None]:
            axes.plot(*zip(*levels_of_seeds, strict=True), "o", color="C0", fillstyle="none", label="another seed")
        for color, runs in (("C1", [sweep.without] if sweep.without else []), (GREY, sweep.silu)):
            for number, run in enumerate(runs):
                if (level := value(run)) is not None:
                    name = None if number else run.kind
                    axes.axhline(level, color=color, linestyle=(0, (4, 2)), linewidth=1, label=name)
        axes.set(xlabel="L1 coefficient (`sum`)", ylabel=label, xscale="log")
        axes.set_xticks(swept, list(map(spelled, swept)), fontsize=7)
        axes.minorticks_off()
    for level in LOSSES if sweep.without else ():
        loss.axhline(level, color=GREY, linewidth=0.8, linestyle=":")
    if scored := [(run.coefficient, *run.accuracy) for run in sweep.sparse if run.accuracy]:
        x, y, errors = zip(*scored, strict=True)
        accuracy.errorbar(x, y, yerr=errors, fmt="none", color="C0", capsize=1.5, elinewidth=0.8)
        chance_line(accuracy, fmean(task.chance for task in TASKS.values()), "chance")
    for axes, _, _ in levels if swept else ():  # without limits, error bars would reach below 0 or up to 1
        axes.set_xlim(swept[0] / 1.3, swept[-1] * 1.3)
    _over_tokens(nonzeros_over, dead_over, {spelled(run.coefficient): run for run in sweep.relu})
    _logarithmic(nonzeros)
    for axes in (loss, dead, accuracy):
        percent(axes.yaxis)
    from_zero(dead, least=0.01)
    loss.legend()
    nonzeros_over.legend(title="coefficient", fontsize=7, ncols=2)
    return figure


def _logarithmic(axes: Axes) -> None:
    axes.set_yscale("log", nonpositive="mask")
    plain(axes.yaxis)


def _over_tokens(nonzeros: Axes, dead: Axes, runs: dict[str, Run]) -> None:
    colors = matplotlib.colormaps["viridis"](np.linspace(0, 0.93, len(runs)))
    for color, (label, run) in zip(colors, runs.items(), strict=True):
        millions = [row["tokens"] / 1e6 for row in run.rows]
        curve(nonzeros, millions, [row["nnz_mean"] for row in run.rows], color=color, label=label)
        curve(dead, millions, map(run.dead, run.rows), color=color)
    nonzeros.set(xlabel="million tokens", ylabel="nonzeros per token and layer", xscale="log")
    plain(nonzeros.xaxis)
    _logarithmic(nonzeros)
    dead.set(xlabel="million tokens", ylabel="dead neurons")
    from_zero(dead, least=0.01)
    percent(dead.yaxis)


def draw_remedies(sweep: Sweep) -> Figure | None:
    """The figure that compares remedies for dead neurons; None if no run uses one."""
    runs = {_remedy_label(run): run for run in sweep.remedies()}
    if not runs:
        return None
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    nonzeros, dead, loss = figure.subplots(1, 3)
    _over_tokens(nonzeros, dead, runs)
    first = next(iter(runs.values()))
    reference = {row["tokens"]: row["val_ce"] for row in first.rows if row["val_ce"] is not None}
    for line, run in zip(dead.get_lines(), runs.values(), strict=True):
        points = [(r["tokens"] / 1e6, r["val_ce"] - reference[r["tokens"]]) for r in run.rows
                  if r["tokens"] in reference]  # fmt: skip
        loss.plot(*zip(*points, strict=True), "o-", color=line.get_color())
    loss.set(xlabel="million tokens", ylabel="held-out cross entropy,\nless that of the plain run")
    figure.suptitle(f"coefficient {spelled(first.coefficient)}")
    figure.legend(dead.get_lines(), list(runs), loc="outside lower center", ncols=len(runs))
    return figure


def _remedy_label(run: Run) -> str:
    return REMEDIES[run.remedy] if run.remedy else "plain" + f", seed {run.seed}" * bool(run.seed)


def by_kind(runs: list[Run]) -> dict[str, list[Run]]:
    """Runs by kind: SiLU first, then ReLU sorted by coefficient. Within a kind, runs are sorted by width."""
    found: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda run: (run.relu, run.coefficient, run.width)):
        found.setdefault(run.kind, []).append(run)
    return found


def draw_widths(runs: list[Run]) -> Figure:
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    loss, nonzeros, dead = figure.subplots(1, 3)
    levels: list[tuple[Axes, Callable[[Run], float | None], str]] = [
        (loss, lambda run: run.ce, "held-out cross entropy"),
        (nonzeros, lambda run: run.nonzeros, "nonzeros per token and layer"),
        (dead, Run.dead, "dead neurons"),
    ]
    kinds, widths = by_kind(runs), sorted({run.width for run in runs})
    for axes, value, label in levels:
        for number, alike in enumerate(kinds.values()):
            if any(value(run) is not None for run in alike):
                color = f"C{number}" if alike[0].relu else GREY
                curve(axes, [run.width for run in alike], map(value, alike), "o-", color=color)
        axes.set(xlabel="neurons per layer", ylabel=label, xscale="log")
        axes.set_xticks(widths, [f"{width:,}" for width in widths])
        axes.set_xlim(widths[0] / 1.2, widths[-1] * 1.2)
        axes.minorticks_off()
    _logarithmic(nonzeros)
    percent(dead.yaxis)
    from_zero(dead, least=0.01)
    legend_below(figure, loss.get_lines(), kinds)
    return figure


def table_of_widths(runs: list[Run]) -> str:
    """A Markdown table of runs by width, with differences from the first run in `by_kind`."""
    sorted_runs = [run for alike in by_kind(runs).values() for run in alike]
    first = sorted_runs[0]
    return table([
        {
            "kind": run.kind, "N": f"{run.width:,}", "held-out cross entropy": f"{run.ce:.4f}",
            f"less that of {first.kind} {first.width:,}": f"{run.ce - first.ce:+.4f}",
            "nonzeros per token": cell(run.nonzeros, ".1f"),
            "zeros": "-" if run.nonzeros is None else f"{1 - run.nonzeros / run.width:.2%}",
            "dead neurons": cell(run.dead(), ".1%"),
        }
        for run in sorted_runs
    ])  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders, or files written by --save")
    parser.add_argument("--save", type=Path, metavar="OUT", help="write the runs to this file, one line of JSON each")
    files = parser.add_mutually_exclusive_group(required=True)
    files.add_argument("--output", type=Path, help="prefix of the output files")
    files.add_argument("--widths", type=Path, metavar="PNG", help="figure to write for runs of several widths")
    args = parser.parse_args(arguments)
    lines = [line for path in args.runs for line in lines_of(path)]
    if not lines:
        parser.error(f"{args.runs[0]} has no runs")
    runs = list(map(Run, lines))
    if args.save is not None:
        args.save.write_text("".join(json.dumps(line, allow_nan=False) + "\n" for line in lines))
    with matplotlib.rc_context(STYLE):
        if args.widths is not None:
            figures, text = {args.widths: draw_widths(runs)}, table_of_widths(runs)
        else:
            sweep = Sweep(runs)
            named = {"sweep": draw_sweep(sweep), "dead": draw_remedies(sweep)}
            figures = {args.output.with_name(f"{args.output.name}_{name}.png"): each for name, each in named.items()}
            text = markdown(sweep)
        for path, figure in figures.items():
            if figure is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                source = checksum({line["name"]: line["rows"] for line in lines})
                path.write_bytes(saved(figure, Source=source))
    print(text)


if __name__ == "__main__":
    main()
