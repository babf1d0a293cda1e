"""Draws the benchmark as one PNG in memory: model sizes next to each other, one colour per side."""

from collections.abc import Callable
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sparsellm.benchmark.report import PHASES, size
from sparsellm.figures import BLUE, GREY, ORANGE, STYLE, from_zero, legend_above, plain, saved

COLORS = {"kernels": BLUE, "PyTorch": GREY, "baseline": ORANGE}
WIDTH, HEIGHT = 2.9, 2.5  # inches, per panel
Row = dict[str, Any]


def draw(results: Row) -> bytes:
    rows = results["checkpoints"]
    panels: list[Callable[[Axes], None]] = [
        lambda axes, phase=phase: _bars(axes, rows, phase, "tokens_per_s", 1e3, f"{phase}, 1,000 tokens/s")  # type: ignore[misc]
        for phase in PHASES
    ]
    if _any(rows, "training", "peak_bytes"):
        panels.append(lambda axes: _bars(axes, rows, "training", "peak_bytes", 2**30, "training, peak GiB"))
    panels += [
        lambda axes, phase=phase: _bars(axes, rows, phase, "mj_per_token", 1, f"{phase}, mJ per token")  # type: ignore[misc]
        for phase in PHASES
        if _any(rows, phase, "mj_per_token")
    ]
    if any(row["layer_speeds"] for row in rows):
        panels.append(lambda axes: _layers(axes, rows))
    columns = min(5, len(panels))
    lines = -(-len(panels) // columns)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH * columns, HEIGHT * lines), layout="constrained")
        figure.suptitle(f"{'; '.join(row['name'] for row in rows)}: {results['device']}")
        axes = figure.subplots(lines, columns, squeeze=False).flat
        for panel, where in zip(panels, axes, strict=False):
            panel(where)
        for where in list(axes)[len(panels) :]:
            where.set_axis_off()
        return saved(figure)


def _any(rows: list[Row], phase: str, key: str) -> bool:
    return any(side[phase] and side[phase][key] for row in rows for side in row["sides"].values())


def _bars(axes: Axes, rows: list[Row], phase: str, key: str, unit: float, label: str) -> None:
    """A group of bars per checkpoint; missing values have no bar."""
    names = [name for name in COLORS if any(name in row["sides"] for row in rows)]
    where, width, bars = np.arange(len(rows)), 0.8 / len(names), []
    for i, name in enumerate(names):
        found = [row["sides"].get(name, {}).get(phase) for row in rows]
        values = [((each and each[key]) or 0) / unit for each in found]
        bars.append(axes.bar(where + (i - (len(names) - 1) / 2) * width, values, width * 0.92, color=COLORS[name]))
    axes.set_xticks(where, [size(row["parameters"]) for row in rows])
    axes.set(ylabel=label)
    axes.grid(False, axis="x")
    from_zero(axes)
    plain(axes.yaxis)
    legend_above(axes, bars, names)


def _layers(axes: Axes, rows: list[Row]) -> None:
    """One point per layer on the kernels."""
    colors = matplotlib.colormaps["viridis"](np.linspace(0, 0.85, len(rows)))
    points = [
        axes.scatter(
            [of["nonzeros"] for of in row["layer_speeds"]], [of["speedup"] for of in row["layer_speeds"]], s=12,
            color=color,
        )
        for row, color in zip(rows, colors, strict=True)
        if row["layer_speeds"]
    ]  # fmt: skip
    axes.axhline(1, color=GREY, linewidth=0.8)
    axes.set(xlabel="nonzeros per token of a layer", ylabel="speedup of a layer", xlim=(0, None))
    from_zero(axes)
    plain(axes.xaxis)
    legend_above(axes, points, [size(row["parameters"]) for row in rows if row["layer_speeds"]])
