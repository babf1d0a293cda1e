"""The study in pictures, as PNG in memory: the same numbers give the same bytes."""

import io
from itertools import pairwise
from typing import Any

import matplotlib

matplotlib.use("Agg")
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from sparsellm.analysis.activity import Activity
from sparsellm.analysis.numbers import by_position, octaves
from sparsellm.ops.twell import TOKEN_TILE

STYLE = {
    "font.size": 9, "axes.titlesize": 9, "legend.fontsize": 8, "lines.linewidth": 1.3, "axes.linewidth": 0.7,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25, "grid.linewidth": 0.5,
    "axes.axisbelow": True,
}  # fmt: skip
SIZE = (4.6, 3.1)  # inches
BLUE, ORANGE, GREY = "#3b6ea8", "#d9822b", "0.55"
BINS_PER_OCTAVE = 4  # of positions
SPEEDUP = "speedup.png"

Row = dict[str, Any]


def draw(activity: Activity, layers: list[Row], speeds: list[Row] | None) -> dict[str, bytes]:
    """File names and their contents."""
    pictures = {
        "nonzeros_by_layer.png": lambda axes: _by_layer(axes, layers),
        "nonzeros_by_position.png": lambda axes: _by_position(axes, activity),
        "firing_frequency.png": lambda axes: _frequency(axes, activity),
        "union_by_layer.png": lambda axes: _union(axes, layers, activity.fired.shape[1]),
    }
    if speeds:
        pictures[SPEEDUP] = lambda axes: _speedup(axes, speeds)
    files = {}
    for name, picture in pictures.items():
        with plt.rc_context(STYLE):
            figure, axes = plt.subplots(figsize=SIZE, layout="constrained")
            picture(axes)
            files[name] = _png(figure)
    return files


def _by_layer(axes: Axes, layers: list[Row]) -> None:
    """Boxes of the middle half of the tokens, whiskers to the first and last percent, on a logarithmic axis."""
    boxes = [
        {"med": n["median"], "q1": n["p25"], "q3": n["p75"], "whislo": n["p01"], "whishi": n["p99"]}
        for n in (row["nonzeros"] for row in layers)
    ]
    where = range(len(layers))
    axes.set_yscale("symlog", linthresh=1, linscale=0.3)  # with a place for tokens that fire nothing
    axes.bxp(
        boxes, positions=where, widths=0.55, showfliers=False, patch_artist=True,
        boxprops={"facecolor": BLUE, "alpha": 0.35, "edgecolor": BLUE}, medianprops={"color": BLUE},
        whiskerprops={"color": BLUE}, capprops={"color": BLUE},
    )  # fmt: skip
    axes.plot(where, [row["nonzeros"]["mean"] for row in layers], "o", color=ORANGE, markersize=4, label="mean")
    axes.plot(where, [row["nonzeros"]["max"] for row in layers], "_", color=GREY, markersize=7, label="largest")
    axes.set(xlabel="layer", ylabel="nonzeros per token", ylim=(0, None))
    _plain(axes.yaxis)
    _layer_ticks(axes, len(layers))
    box, whiskers = Patch(facecolor=BLUE, alpha=0.35), Line2D([], [], color=BLUE)
    mean, largest = axes.get_legend_handles_labels()[0]
    _legend(axes, {"25% to 75%": box, "1% to 99%": whiskers, "mean": mean, "largest": largest})


def _by_position(axes: Axes, activity: Activity) -> None:
    means = by_position(activity)
    edges = octaves(len(means), BINS_PER_OCTAVE)
    bins = list(pairwise(edges))
    middles = [(first + 1 + last) / 2 for first, last in bins]  # counted from 1, for the logarithm
    for layer, color in enumerate(_colors(axes, means.shape[1])):
        axes.plot(middles, [means[a:b, layer].mean() for a, b in bins], color=color)
    axes.set(xscale="log", xlabel="position in the sequence, from 1", ylabel="mean nonzeros per token")
    axes.set_yscale("log", nonpositive="mask")
    _plain(axes.xaxis)
    _plain(axes.yaxis)


def _frequency(axes: Axes, activity: Activity) -> None:
    """Each layer's neurons from the busiest to the last that fired."""
    for fired, color in zip(activity.fired, _colors(axes, len(activity.fired)), strict=True):
        alive = np.sort(fired[fired > 0])[::-1] / activity.tokens
        axes.plot(np.arange(1, len(alive) + 1), alive, color=color)
    axes.set_xscale("log")
    axes.set_yscale("log", nonpositive="mask")
    axes.set(xlabel=f"neuron of {activity.fired.shape[1]:,}, by rank", ylabel="share of tokens on which it fires")
    _plain(axes.xaxis)


def _union(axes: Axes, layers: list[Row], neurons: int) -> None:
    where = np.arange(len(layers))
    alive = axes.bar(where, [1 - row["dead"] / neurons for row in layers], 0.75, color="0.9")
    tile = axes.bar(where, [row["union_per_tile"] / neurons for row in layers], 0.55, color=BLUE, alpha=0.75)
    (token,) = axes.plot(where, [1 - row["zeros"] for row in layers], "o", color=ORANGE, markersize=4)
    axes.set(xlabel="layer", ylabel="share of the layer's neurons", ylim=(0, 1))
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))
    _layer_ticks(axes, len(layers))
    _legend(axes, {"on any token": alive, f"in a tile of {TOKEN_TILE} tokens": tile, "on a token": token})


def _speedup(axes: Axes, speeds: list[Row]) -> None:
    points = axes.scatter(
        [row["nonzeros"] for row in speeds], [row["speedup"] for row in speeds],
        c=[row["layer"] for row in speeds], cmap="viridis", vmax=max(1, len(speeds) - 1), zorder=3,
    )  # fmt: skip
    axes.axhline(1, color=GREY, linewidth=0.8)
    axes.figure.colorbar(points, ax=axes, label="layer").locator = MaxNLocator(integer=True)
    axes.set(xlabel="mean nonzeros per token", ylabel="speed-up over dense PyTorch")


def _colors(axes: Axes, layers: int) -> np.ndarray:
    """A colour for each layer, explained by a bar beside `axes`."""
    colors = matplotlib.colormaps["viridis"](np.linspace(0, 0.93, layers))
    listed = matplotlib.colors.ListedColormap(colors)
    scale = matplotlib.cm.ScalarMappable(matplotlib.colors.BoundaryNorm(np.arange(layers + 1) - 0.5, layers), listed)
    bar = axes.figure.colorbar(scale, ax=axes, label="layer", aspect=30, pad=0.02)
    bar.set_ticks(range(0, layers, max(1, layers // 8)))
    bar.minorticks_off()
    return colors


def _legend(axes: Axes, handles: dict[str, Artist]) -> None:
    """In one line above `axes`, where it hides nothing."""
    axes.legend(
        handles.values(), handles.keys(), frameon=False, ncols=len(handles), loc="lower center",
        bbox_to_anchor=(0.5, 1), columnspacing=1, handlelength=1.2, handletextpad=0.5,
    )  # fmt: skip


def _layer_ticks(axes: Axes, layers: int) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=min(layers + 1, 14)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
    axes.set_xlim(-0.6, layers - 0.4)


def _plain(axis: Any) -> None:
    """1,000 instead of 10^3."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}"))


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=200, metadata={"Software": None})
    plt.close(figure)
    return buffer.getvalue()
