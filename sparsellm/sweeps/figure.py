"""A sweep against the L1 coefficient in one picture: accuracy, nonzeros, cross entropy, dead neurons."""

import io
from collections.abc import Callable
from dataclasses import dataclass

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FixedFormatter, FixedLocator, FuncFormatter, NullLocator

from sparsellm.sweeps.plan import COEFFICIENT, Point, Sweep
from sparsellm.sweeps.table import COMPLETE, Row

STYLE = {
    "font.size": 8, "axes.titlesize": 8.5, "axes.labelsize": 8, "legend.fontsize": 8, "lines.linewidth": 1.4,
    "lines.markersize": 4, "axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.7,
    "axes.grid": True, "grid.alpha": 0.25, "grid.linewidth": 0.5, "pdf.fonttype": 42,
}  # fmt: skip
WIDTH, ROW_HEIGHT = 6.75, 2.3  # inches; a paper's text is so wide
# Without dates: the same numbers give the same bytes.
METADATA = {"png": {"Software": None}, "pdf": {"CreationDate": None, "Producer": None, "Creator": None}}
LABEL_ROOM, MARGIN = 0.11, 0.05  # of the axis: between two labels, and beside the outer coefficients

DENSE = "dense SiLU"

Value = Callable[[Point, Row], float | None]
Runs = list[tuple[Point, Row]]


@dataclass(frozen=True)
class Panel:
    title: str
    ylabel: str
    value: Value
    percent: bool = False
    error: Value | None = None  # one standard error of the value
    layers: bool = False  # draw each layer's nonzeros too; logarithmic
    baseline: Value | None = None  # the level of the dense run; by default its value


def _dead_share(point: Point, row: Row) -> float | None:
    neurons = point.config.model.num_layers * point.config.model.intermediate_size
    return None if row["dead_neurons"] is None else row["dead_neurons"] / neurons


PANELS = (
    Panel(
        "Mean accuracy", "accuracy ± standard error", lambda _, r: r["mean"], percent=True,
        error=lambda _, r: r["mean_stderr"],
    ),
    Panel(
        "Nonzero activations", "per token and layer", lambda _, r: r["nnz_mean"], layers=True,
        baseline=lambda p, _: p.config.model.intermediate_size,
    ),
    Panel("Cross entropy over the run without L1", "increase", lambda _, r: r["ce_increase"], percent=True),
    Panel("Dead neurons", "share of all", _dead_share, percent=True),
)  # fmt: skip


def draw(sweep: Sweep, table: list[Row]) -> dict[str, bytes] | None:
    """The picture as {"png": ..., "pdf": ...}, of the finished runs; None if they have fewer than two coefficients.

    Every combination of the other swept values is a line of its own, with its own run without L1 and baseline.
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
    with plt.rc_context(STYLE):
        height = -(-len(panels) // 2)
        figure, grid = plt.subplots(
            height, 2, figsize=(WIDTH, ROW_HEIGHT * height + 0.3), squeeze=False, layout="constrained"
        )
        legend = {}
        for axes, panel in zip(grid.flat, panels, strict=False):
            _coefficient_axis(axes, coefficients)
            _draw(axes, panel, lines, dense)
            legend |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
        for axes in grid.flat[len(panels) :]:
            axes.remove()
        labels = sorted(legend, key=lambda label: label.startswith(DENSE))
        figure.legend([legend[label] for label in labels], labels, loc="outside upper center", ncols=3, frameon=False)
        files = {}
        for kind, metadata in METADATA.items():
            buffer = io.BytesIO()
            figure.savefig(buffer, format=kind, dpi=200, metadata=metadata)
            files[kind] = buffer.getvalue()
        plt.close(figure)
    return files


def _draw(axes: Axes, panel: Panel, lines: dict[str, Runs], dense: Runs) -> None:
    axes.set(title=panel.title, ylabel=panel.ylabel)
    for number, (label, runs) in enumerate(lines.items()):
        runs = [run for run in runs if panel.value(*run) is not None]
        x, y = [_coefficient(point) for point, _ in runs], [panel.value(*run) for run in runs]
        color = f"C{number}"
        errors = [panel.error(*run) for run in runs] if panel.error else [None]
        if None in errors:
            axes.plot(x, y, "o-", color=color, label=label)
        else:
            axes.errorbar(x, y, yerr=errors, fmt="o-", color=color, label=label, capsize=1.5, elinewidth=0.6)
        if panel.layers and len(lines) == 1:
            keys = [key for key in runs[0][1] if key.startswith("nnz_layer_") and runs[0][1][key] is not None]
            for i, key in enumerate(keys):
                each = [row[key] for _, row in runs]
                axes.plot(x, each, color=color, alpha=0.35, linewidth=0.7, label=None if i else "each layer")
    for point, row in dense:
        level = (panel.baseline or panel.value)(point, row)
        if level is None:
            continue
        color, name = "0.35", DENSE
        if len(dense) > 1:  # each in the colour of its line
            name += f", {_label(point)}"
            of = [runs[0][0].outside_sparsity == point.outside_sparsity for runs in lines.values()]
            color = f"C{of.index(True)}" if True in of else color
        axes.axhline(level, color=color, linestyle=(0, (4, 2)), linewidth=1.1, label=name)
    if panel.percent:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{round(100 * value, 6):g}%"))
    if panel.layers:
        axes.set_yscale("log", nonpositive="mask")  # a gap where a layer has none


def _coefficient_axis(axes: Axes, coefficients: list[float]) -> None:
    """Logarithmic, with a place for 0, a tick at every coefficient, and a label where there is room for one."""
    smallest = next(c for c in coefficients if c > 0)
    axes.set_xscale("symlog", linthresh=smallest, linscale=0.5)
    place = axes.xaxis.get_transform()
    places = [float(place.transform(c)) for c in coefficients]
    span = places[-1] - places[0]
    labels, last = [], None
    for coefficient, here in zip(coefficients, places, strict=True):
        fits = last is None or here - last >= LABEL_ROOM * span
        labels.append(_short(coefficient) if fits else "")
        last = here if fits else last
    axes.xaxis.set_major_locator(FixedLocator(coefficients))
    axes.xaxis.set_major_formatter(FixedFormatter(labels))
    axes.xaxis.set_minor_locator(NullLocator())
    edges = (places[0] - MARGIN * span, places[-1] + MARGIN * span)
    axes.set_xlim(*(float(place.inverted().transform(edge)) for edge in edges))
    axes.set_xlabel("L1 coefficient")


def _short(coefficient: float) -> str:
    """1.5e-5, 0.01, 0."""
    if coefficient == 0 or coefficient >= 0.01:
        return f"{coefficient:g}"
    mantissa, exponent = f"{coefficient:e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def _coefficient(point: Point) -> float:
    return point.config.sparsity.l1_coefficient


def _label(point: Point) -> str:
    others = [f"{key}={value}" for key, value in point.values.items() if key != COEFFICIENT]
    return ", ".join(others) or "ReLU + L1"
