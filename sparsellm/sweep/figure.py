"""Plots a sweep over the L1 coefficient: accuracy, nonzeros, cross entropy, dead neurons."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

from sparsellm.evaluation.tasks import TASKS
from sparsellm.figures import (
    METADATA,
    STYLE,
    broken,
    chance_line,
    from_zero,
    legend_below,
    logarithmic_y,
    percent,
    plain,
    saved,
)
from sparsellm.sweep.plan import COEFFICIENT, Point, Sweep
from sparsellm.sweep.table import COMPLETE, Row, distinct

WIDTH, ROW_HEIGHT = 6.75, 2.3  # inches; the text width of a paper
SMALL = {"font.size": 8, "axes.titlesize": 8.5, "axes.labelsize": 8}  # overrides STYLE, for small panels
LABEL_ROOM, MARGIN = 0.11, 0.06  # fractions of the axis: minimum between labels, and beyond the outermost coefficients
OFFSET = 0.012  # fraction of the axis between the points of different lines at the same coefficient

DENSE = "dense SiLU"

Value = Callable[[Point, Row], float | None]
Runs = list[tuple[Point, Row]]


@dataclass(frozen=True)
class Panel:
    title: str
    ylabel: str  # {neurons}: neurons per layer; {window}: tokens without firing after which a neuron is dead
    value: Value
    percent: bool = False
    signed: bool = False  # False: the axis starts at 0, if it is linear
    error: Value | None = None  # standard error of the value, shown as error bars; points are then not connected
    layers: bool = False  # also draw each layer's nonzeros; logarithmic
    baseline: Value | None = None  # level drawn for the dense run; default: `value`


def _dead_share(point: Point, row: Row) -> float | None:
    neurons = point.config.model.num_layers * point.config.model.intermediate_size
    return None if row["dead_neurons"] is None else row["dead_neurons"] / neurons


PANELS = (
    Panel(
        "Mean accuracy", "accuracy ± standard error", lambda _, r: r["mean"], percent=True,
        error=lambda _, r: r["mean_stderr"],
    ),
    Panel(
        "Nonzero activations", "per token, of {neurons}", lambda _, r: r["nnz_mean"], layers=True,
        baseline=lambda p, _: p.config.model.intermediate_size,
    ),
    Panel(
        "Cross entropy over the run without L1", "increase", lambda _, r: r["ce_increase"], percent=True, signed=True,
    ),
    Panel("Dead neurons", "fraction inactive for\nthe last {window} tokens", _dead_share, percent=True),
)  # fmt: skip


def draw(sweep: Sweep, table: list[Row]) -> dict[str, bytes] | None:
    """The figure, as {"png": ..., "pdf": ...}, of the finished runs; None with fewer than two coefficients.

    Each combination of the other swept values is drawn as one line, with its own run without L1 and its own baseline.
    """
    runs = [(p, r) for p, r in zip(sweep.points, table, strict=True) if r["status"] == COMPLETE]
    sparse, dense = ([(p, r) for p, r in runs if p.baseline == wanted] for wanted in (False, True))
    coefficients = sorted({_coefficient(point) for point, _ in sparse})
    if len(coefficients) < 2:
        return None
    lines: dict[str, Runs] = {}
    for point, row in sorted(sparse, key=lambda run: _coefficient(run[0])):
        lines.setdefault(_label(point), []).append((point, row))
    panels = [panel for panel in PANELS if any(panel.value(*run) is not None for run in sparse)]
    at = positions(coefficients)
    neurons = distinct(point.config.model.intermediate_size for point, _ in sparse)
    window = distinct(point.config.sparsity.dead_after_tokens for point, _ in sparse)
    with matplotlib.rc_context(STYLE | SMALL):
        height = -(-len(panels) // 2)
        figure = Figure(figsize=(WIDTH, ROW_HEIGHT * height + 0.6), layout="constrained")
        grid = figure.subplots(height, 2, squeeze=False)
        legend: dict[str, Any] = {}
        for axes, panel in zip(grid.flat, panels, strict=False):
            _coefficient_axis(axes, at)
            axes.set(title=panel.title, ylabel=panel.ylabel.format(neurons=neurons, window=window))
            _draw(axes, panel, lines, dense, at)
            legend |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
        for axes in grid.flat[len(panels) :]:
            axes.remove()
        labels = sorted(legend, key=lambda label: label.startswith(DENSE))
        figure.suptitle(sweep.name)
        legend_below(figure, [legend[label] for label in labels], labels, most=3)
        return {kind: saved(figure, kind) for kind in METADATA}


def _draw(axes: Axes, panel: Panel, lines: dict[str, Runs], dense: Runs, at: dict[float, float]) -> None:
    """Draw one panel. `at`: the x position of each coefficient. No line connects coefficient 0 with the others, because
    a logarithmic axis has no 0."""
    span = max(at.values()) - min(at.values())
    for number, (label, runs) in enumerate(lines.items()):
        found = [(point, row, y) for point, row in runs if (y := panel.value(point, row)) is not None]
        color = f"C{number}"
        if panel.error:
            shift = OFFSET * span * (number - (len(lines) - 1) / 2)
            x, ys = [at[_coefficient(point)] + shift for point, _, _ in found], [y for _, _, y in found]
            yerr = [math.nan if (error := panel.error(point, row)) is None else error for point, row, _ in found]
            axes.errorbar(x, ys, yerr=yerr, fmt="o", color=color, label=label, capsize=1.5, elinewidth=0.8)
            continue
        parts = [[each for each in found if (_coefficient(each[0]) == 0) == zero] for zero in (True, False)]
        for part in filter(None, parts):
            x = [at[_coefficient(point)] for point, _, _ in part]
            axes.plot(x, [y for _, _, y in part], "o-", color=color, label=label, clip_on=False)
            if panel.layers and len(lines) == 1:
                keys = [key for key in part[0][1] if key.startswith("nnz_layer_") and part[0][1][key] is not None]
                marker = "." if len(part) == 1 else None
                for i, key in enumerate(keys):
                    axes.plot(
                        x, [row[key] for _, row, _ in part], marker=marker, color=color, alpha=0.35, linewidth=0.7,
                        label=None if i else "each layer",
                    )  # fmt: skip
    for point, row in dense:
        level = (panel.baseline or panel.value)(point, row)
        if level is None:
            continue
        color, name = "0.35", DENSE
        if len(dense) > 1:  # draw each baseline in the colour of its line
            name += f", {_label(point)}"
            of = [runs[0][0].outside_sparsity == point.outside_sparsity for runs in lines.values()]
            color = f"C{of.index(True)}" if True in of else color
        axes.axhline(level, color=color, linestyle=(0, (4, 2)), linewidth=1.1, label=name)
    if panel.layers:
        logarithmic_y(axes)
        plain(axes.yaxis)
    elif not panel.signed:
        from_zero(axes, least=0.01)
    if panel.percent:
        percent(axes.yaxis)
    rows = [row for runs in lines.values() for _, row in runs]
    chances = [task.chance for name, task in TASKS.items() if any(row.get(name) is not None for row in rows)]
    if panel.error and chances:
        chance_line(axes, sum(chances) / len(chances), "chance")


def positions(coefficients: list[float]) -> dict[float, float]:
    """{coefficient: x position} in ascending order. The position is the logarithm; 0 is to the left of the others."""
    at = {c: math.log10(c) for c in coefficients if c > 0}
    first, last = min(at.values()), max(at.values())
    return {c: at.get(c, first - max(0.3, 0.25 * (last - first))) for c in coefficients}


def _coefficient_axis(axes: Axes, at: dict[float, float]) -> None:
    """A tick at every coefficient, labels where there is room, and an axis break after 0."""
    ticks = list(at.values())
    span = ticks[-1] - ticks[0]
    labels, last = [], None
    for coefficient, here in at.items():
        fits = last is None or here - last >= LABEL_ROOM * span
        labels.append(spelled(coefficient) if fits else "")
        last = here if fits else last
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_major_formatter(FixedFormatter(labels))
    axes.xaxis.set_minor_locator(NullLocator())
    left, right = ticks[0] - MARGIN * span, ticks[-1] + MARGIN * span
    axes.set_xlim(left, right)
    axes.set_xlabel("L1 coefficient")
    if 0 in at:
        broken(axes, ((ticks[0] + ticks[1]) / 2 - left) / (right - left))


def spelled(coefficient: float) -> str:
    """Formats the coefficient: "1.5e-5", "0.01" or "0"."""
    if coefficient == 0 or coefficient >= 0.01:
        return f"{coefficient:g}"
    mantissa, exponent = f"{coefficient:e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def _coefficient(point: Point) -> float:
    return point.config.sparsity.l1_coefficient


def _label(point: Point) -> str:
    others = [f"{key}={value}" for key, value in point.values.items() if key != COEFFICIENT]
    return ", ".join(others) or "ReLU + L1"
