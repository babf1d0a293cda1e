"""A law of cross entropy and nonzeros against width and L1 coefficient, fitted to a grid of finished runs.

    cross entropy = a(N) + b(C)        log nonzeros = p(N) + q(C)

N: neurons per layer, C: L1 coefficient (`sum`). Each width and each coefficient has a constant of its own, so the law
says that a coefficient costs the same loss, and divides the nonzeros by the same factor, at every width. It predicts
widths and coefficients of the grid only, in any pair.

    python -m scripts.width_grid docs/results/mini_muon.jsonl --coefficients 2e-5 4e-5 8e-5 --output docs/mini_grid.png

The file has one line of JSON per run (scripts/evidence_report.py). The grid is its runs with AdamW at --learning-rate,
seed 0, without remedies, and one of --coefficients; every width must have every coefficient. Each run is then
predicted from the other runs of the grid. Nonzeros are means over all layers, and over all layers but the first.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from scripts.benchmarks.harness import table
from scripts.compare_runs import checksum
from scripts.evidence_report import Run
from sparsellm.figures import STYLE, legend_below, plain, saved
from sparsellm.sweep.figure import spelled

Array = NDArray[np.float64]


class Grid(NamedTuple):
    """Values [widths, coefficients] of runs, and the predictions of each from all others."""

    widths: list[int]
    coefficients: list[float]
    ce: Array
    nonzeros: Array
    later: Array  # nonzeros without the first layer

    def predicted(self) -> tuple[Array, Array, Array]:
        return left_out(self.ce), np.exp(left_out(np.log(self.nonzeros))), np.exp(left_out(np.log(self.later)))


def left_out(values: Array) -> Array:
    """Each of values [n, m] as a(row) + b(column), fitted to all other values by least squares."""
    rows, columns = (index.ravel() for index in np.indices(values.shape))
    x = np.hstack([np.eye(values.shape[0])[rows], np.eye(values.shape[1])[columns]])
    hat = x @ np.linalg.pinv(x)
    y = values.ravel()
    return (y - (y - hat @ y) / (1 - np.diag(hat))).reshape(values.shape)


def grid(lines: Sequence[dict[str, Any]], coefficients: Sequence[float], learning_rate: float = 2e-3) -> Grid:
    """Raises ValueError if a width lacks a coefficient, or has it twice."""
    found: dict[tuple[int, float], Run] = {}
    for run in map(Run, lines):
        config = run.line["config"]
        other = config.get("optimizer.muon") or config["optimizer.learning_rate"] != learning_rate or run.remedy
        if run.relu and run.coefficient in coefficients and run.seed == 0 and not other:
            if (run.width, run.coefficient) in found:
                raise ValueError(f"{found[run.width, run.coefficient].name} and {run.name} are the same arm")
            found[run.width, run.coefficient] = run
    widths = sorted({width for width, _ in found})
    missing = [(n, spelled(c)) for n in widths for c in coefficients if (n, c) not in found]
    if missing or len(widths) < 2:
        raise ValueError(
            f"the grid has {len(widths)} widths and lacks {missing}: it needs two widths, and none missing"
        )
    runs = [[found[n, c] for c in coefficients] for n in widths]
    later = [[np.mean(run.last["nnz_per_layer"][1:]) for run in row] for row in runs]
    return Grid(
        widths, list(coefficients), np.array([[run.ce for run in row] for row in runs]),
        np.array([[run.nonzeros for run in row] for row in runs]), np.array(later),
    )  # fmt: skip


def draw(of: Grid) -> Figure:
    """Measured values as points, predictions of each from the others as crosses joined by lines."""
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    panels = figure.subplots(1, 3)
    labels = "held-out cross entropy", "nonzeros per token and layer", "nonzeros without the first layer"
    for axes, measured, predicted, label in zip(panels, of[2:], of.predicted(), labels, strict=True):
        for column in range(len(of.coefficients)):
            axes.plot(of.widths, measured[:, column], "o", color=f"C{column}")
            axes.plot(of.widths, predicted[:, column], "x-", color=f"C{column}", linewidth=1)
        axes.set(xlabel="neurons per layer", ylabel=label, xscale="log")
        axes.set_xticks(of.widths, [f"{width:,}" for width in of.widths])
        axes.minorticks_off()
    for axes in panels[1:]:
        axes.set_yscale("log")
        plain(axes.yaxis)
    legend_below(figure, panels[0].get_lines()[::2], [f"L1 {spelled(each)}" for each in of.coefficients])
    return figure


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, metavar="RUNS.jsonl")
    parser.add_argument("--coefficients", type=float, nargs="+", required=True)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--output", type=Path, metavar="PNG", help="figure to write")
    args = parser.parse_args(arguments)
    try:
        lines = [json.loads(line) for line in args.runs.read_text().splitlines()]
        found = grid(lines, args.coefficients, args.learning_rate)
    except (OSError, ValueError) as error:
        parser.error(f"{args.runs}: {error}")
    ce, nonzeros, later = found.predicted()
    table(
        {
            "N": f"{width:,}", "L1": spelled(coefficient), "cross entropy": f"{found.ce[i, j]:.3f}",
            "predicted": f"{ce[i, j]:.3f}", "nonzeros": f"{found.nonzeros[i, j]:.1f}",
            "predicted nonzeros": f"{nonzeros[i, j]:.1f}", "without the first layer": f"{found.later[i, j]:.1f}",
            "predicted without it": f"{later[i, j]:.1f}",
        }
        for i, width in enumerate(found.widths) for j, coefficient in enumerate(found.coefficients)
    )  # fmt: skip
    for name, apart in (
        ("cross entropy, nats", ce - found.ce), ("nonzeros", nonzeros / found.nonzeros - 1),
        ("nonzeros without the first layer", later / found.later - 1),
    ):  # fmt: skip
        print(
            f"{name}: errors {np.sqrt((apart**2).mean()):.4f} (root mean square), {np.abs(apart).max():.4f} (largest)"
        )
    if args.output is not None:
        with matplotlib.rc_context(STYLE):
            args.output.write_bytes(saved(draw(found), Source=checksum({line["name"]: line["rows"] for line in lines})))


if __name__ == "__main__":
    main()
