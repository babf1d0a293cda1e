"""Draws the benchmark as one PNG in memory: a panel per quantity, checkpoints side by side, a colour per side."""

from functools import partial
from itertools import zip_longest
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from sparsellm.benchmark.report import DENSE_FP8, PHASES, SPARSE_FP8, size
from sparsellm.figures import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    STYLE,
    from_zero,
    legend_above,
    legend_below,
    plain,
    saved,
    written,
)

COLORS = {"kernels": BLUE, "PyTorch": GREY, "baseline": ORANGE, DENSE_FP8: GREEN, SPARSE_FP8: PURPLE}
WIDTH, HEIGHT = 2.9, 2.5  # inches, per panel
MOST_COLUMNS = 5
Row = dict[str, Any]


def draw(results: Row) -> bytes:
    rows = results["checkpoints"]
    bars = [
        *((phase, "tokens_per_s", 1e3, f"{phase}, 1,000 tokens/s") for phase in PHASES),
        ("training", "peak_bytes", 2**30, "training, peak GiB"),
        *((phase, "mj_per_token", 1, f"{phase}, mJ per token") for phase in PHASES),
    ]
    measured = [side for row in rows for side in row["sides"].values()]
    panels = [
        partial(_bars, rows, *each) for each in bars if any(s.get(each[0]) and s[each[0]][each[1]] for s in measured)
    ]
    if any(row["layer_speeds"] for row in rows):
        panels.append(partial(_layers, rows))
    lines = -(-len(panels) // MOST_COLUMNS)
    columns = -(-len(panels) // lines)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH * columns, HEIGHT * lines), layout="constrained")
        figure.suptitle(f"{'; '.join(row['name'] for row in rows)}: {results['device']}")
        for panel, axes in zip_longest(panels, figure.subplots(lines, columns, squeeze=False).flat):
            if panel is None:
                axes.set_axis_off()
            else:
                panel(axes)
        if len(rows) > 1:
            names = _sides(rows)
            legend_below(figure, [Patch(color=COLORS[name]) for name in names], names)
        return saved(figure)


def _bars(rows: list[Row], phase: str, key: str, unit: float, label: str, axes: Axes) -> None:
    """A group of bars per checkpoint; a single checkpoint's bars have their name and value. Missing values have no
    bar."""
    names = _sides(rows)
    where, width = np.arange(len(rows)), 0.8 / len(names)
    for i, name in enumerate(names):
        found = [row["sides"].get(name, {}).get(phase) for row in rows]
        values = [((each and each[key]) or 0) / unit for each in found]
        bars = axes.bar(where + (i - (len(names) - 1) / 2) * width, values, width * 0.92, color=COLORS[name])
        if len(rows) == 1:
            axes.bar_label(bars, [written(float(f"{value:.3g}")) if value else "-" for value in values])
    axes.set_xticks(where, [size(row["parameters"]) for row in rows])
    if len(rows) == 1:
        axes.set_xticks([(i - (len(names) - 1) / 2) * width for i in range(len(names))], names)
        axes.margins(x=0.25, y=0.15)  # room for the values
    axes.set_title(label, loc="left")
    axes.grid(False, axis="x")
    from_zero(axes)
    plain(axes.yaxis)


def _sides(rows: list[Row]) -> list[str]:
    return [name for name in COLORS if any(name in row["sides"] for row in rows)]


def _layers(rows: list[Row], axes: Axes) -> None:
    """One point per layer that was timed on the kernels."""
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
    if len(rows) > 1:
        legend_above(axes, points, [size(row["parameters"]) for row in rows if row["layer_speeds"]])
