"""The style shared by all figures: number formats, layer colours, and files without dates."""

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.container import Container
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from sparsellm.system.console import warn

T = TypeVar("T")

STYLE: Any = {
    "font.size": 9, "axes.titlesize": 9, "axes.labelsize": 9, "figure.titlesize": 10, "legend.fontsize": 8,
    "legend.frameon": False, "lines.linewidth": 1.3, "lines.markersize": 4, "axes.linewidth": 0.7,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25, "grid.linewidth": 0.5,
    "axes.axisbelow": True, "pdf.fonttype": 42,
}  # fmt: skip
PANEL = (4.6, 3.1)  # width and height in inches of a figure with one panel
BLUE, ORANGE, GREEN, PURPLE, GREY = "#3b6ea8", "#d9822b", "#4f8a4c", "#7d5ba6", "0.45"
# No dates or versions, so that the same numbers give the same bytes.
METADATA = {"png": {"Software": None}, "pdf": {"CreationDate": None, "Producer": None, "Creator": None}}


def drawn(plots: Mapping[str, Callable[[], T]]) -> dict[str, T]:
    """{name: content}. A figure that cannot be drawn is left out, with a warning; its numbers are in other files."""
    found = {}
    for name, plot in plots.items():
        try:
            found[name] = plot()
        except Exception as error:  # matplotlib raises many kinds of exceptions for bad values
            warn(f"{name} cannot be drawn ({type(error).__name__}: {error}); its numbers are in the other files")
    return found


def saved(figure: Figure, kind: str = "png", **metadata: str) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, dpi=200, metadata=METADATA[kind] | metadata)
    return buffer.getvalue()


def written(value: float) -> str:
    """Format `value` as 1,000 or 0.05, never as 10^3."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"


def plain(axis: Axis) -> None:
    """Label ticks as `written` does. On a logarithmic axis with few decades, label 1, 2 and 5 in each decade."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: written(value)))
    if axis.get_scale() == "log":
        low, high = sorted(axis.get_view_interval())
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 300 * low else (1,)))
        axis.set_minor_formatter(NullFormatter())


def logarithmic_y(axes: Axes) -> None:
    """Make the y axis logarithmic, with gaps at zeros; linear if every value is zero."""
    if np.isfinite(axes.dataLim.minposy):
        axes.set_yscale("log", nonpositive="mask")
    else:
        from_zero(axes, least=1)


def percent(axis: Axis) -> None:
    """Label ticks as percentages: 0.5 as 50%."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{round(100 * value, 6):g}%"))


def from_zero(axes: Axes, least: float = 0) -> None:
    """Make the y axis start at 0 and reach at least to `least`."""
    axes.set_ylim(0, max(axes.get_ylim()[1], least))


def layer_colors(axes: Axes, layers: int) -> np.ndarray:
    """One colour per layer, with a colour bar next to `axes`: a legend of 38 layers would cover the curves."""
    colors = matplotlib.colormaps["viridis"](np.linspace(0, 0.93, layers))
    listed = matplotlib.colors.ListedColormap(colors)
    scale = matplotlib.cm.ScalarMappable(matplotlib.colors.BoundaryNorm(np.arange(layers + 1) - 0.5, layers), listed)
    bar = axes.figure.colorbar(scale, ax=axes, label="layer", aspect=30, pad=0.02)
    bar.set_ticks(range(0, layers, max(1, layers // 8)))
    bar.minorticks_off()
    return colors


def legend_above(axes: Axes, handles: Iterable[Artist | Container], labels: Sequence[str]) -> None:
    """Put the legend above `axes`, where it hides nothing."""
    axes.legend(
        list(handles), labels, loc="lower center", bbox_to_anchor=(0.5, 1), borderaxespad=0.2, ncols=len(labels),
        columnspacing=1, handlelength=1.4, handletextpad=0.5,
    )  # fmt: skip


def legend_below(figure: Figure, handles: Iterable[Artist], labels: Iterable[str], most: int = 6) -> None:
    """Put the legend below all panels, with at most `most` entries per line, fewer if they do not fit."""
    handles, labels = list(handles), list(labels)
    for columns in range(min(len(labels), most), 0, -1):
        legend = figure.legend(handles, labels, loc="outside lower center", ncols=columns)
        if columns == 1 or legend.get_window_extent().width <= figure.bbox.width:
            return
        legend.remove()


def chance_line(axes: Axes, level: float, label: str) -> None:
    """Draw the accuracy of guessing, `level`, as a dashed line behind the data, labelled to the right of the axes."""
    axes.axhline(level, color=GREY, linestyle=(0, (4, 2)), linewidth=0.9, zorder=1)
    axes.annotate(
        f"{label}\n{level:.1%}", (1, level), xycoords=("axes fraction", "data"), xytext=(3, 0),
        textcoords="offset points", ha="left", va="center", fontsize="small", color=GREY,
    )  # fmt: skip


def broken(axes: Axes, at: float) -> None:
    """Mark an axis break by two slanted strokes at the fraction `at` of the x axis; left of it there is no scale."""
    gap = 0.008
    axes.plot([at - gap, at + gap], [0, 0], transform=axes.transAxes, color="white", linewidth=2.5, clip_on=False,
              zorder=10)  # fmt: skip
    for x in (at - gap, at + gap):
        axes.plot(
            [x - 0.006, x + 0.006], [-0.025, 0.025], transform=axes.transAxes, color="black", linewidth=0.8,
            clip_on=False, zorder=11,
        )  # fmt: skip
