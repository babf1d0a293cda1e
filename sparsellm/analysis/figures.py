"""Draws the analysis as PNG files in memory; the same numbers give the same bytes."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from sparsellm.analysis.activity import Activity
from sparsellm.analysis.numbers import by_position, octaves
from sparsellm.analysis.report import BY_LAYER, BY_POSITION, FREQUENCY, SPEEDUP, UNION
from sparsellm.figures import (
    BLUE,
    GREY,
    ORANGE,
    PANEL,
    STYLE,
    drawn,
    from_zero,
    layer_colors,
    legend_above,
    logarithmic_y,
    percent,
    plain,
    saved,
)
from sparsellm.ops.twell import TOKEN_TILE

BINS_PER_OCTAVE = 4  # of positions, on the logarithmic axis

Row = dict[str, Any]


def draw(title: str, activity: Activity, layers: list[Row], speeds: list[Row] | None) -> dict[str, bytes]:
    """{file name: content}. `title`: what was analyzed."""
    neurons = activity.fired.shape[1]
    pictures: dict[str, Callable[[Axes], None]] = {
        BY_LAYER: lambda axes: _by_layer(axes, layers, neurons),
        BY_POSITION: lambda axes: _by_position(axes, activity),
        FREQUENCY: lambda axes: _frequency(axes, activity),
        UNION: lambda axes: _union(axes, layers, neurons),
    }
    if speeds:
        pictures[SPEEDUP] = lambda axes: _speedup(axes, speeds)

    def panel(picture: Callable[[Axes], None]) -> bytes:
        with matplotlib.rc_context(STYLE):
            figure = Figure(figsize=PANEL, layout="constrained")
            figure.suptitle(title)
            picture(figure.subplots())
            return saved(figure)

    return drawn({name: partial(panel, picture) for name, picture in pictures.items()})


def _by_layer(axes: Axes, layers: list[Row], neurons: int) -> None:
    """Box plot by layer: boxes from 25% to 75% of tokens, whiskers from 1% to 99%, on a logarithmic axis."""
    boxes = [
        {"med": n["median"], "q1": n["p25"], "q3": n["p75"], "whislo": n["p01"], "whishi": n["p99"]}
        for n in (row["nonzeros"] for row in layers)
    ]
    where = range(len(layers))
    axes.set_yscale("symlog", linthresh=1, linscale=0.3)  # symlog, to show tokens that fire nothing
    axes.bxp(
        boxes, positions=where, widths=0.55, showfliers=False, patch_artist=True,
        boxprops={"facecolor": BLUE, "alpha": 0.35, "edgecolor": BLUE}, medianprops={"color": BLUE},
        whiskerprops={"color": BLUE}, capprops={"color": BLUE},
    )  # fmt: skip
    axes.plot(where, [row["nonzeros"]["mean"] for row in layers], "o", color=ORANGE, markersize=4, label="mean")
    axes.plot(where, [row["nonzeros"]["max"] for row in layers], "_", color=GREY, markersize=7, label="largest")
    axes.set(xlabel="layer", ylabel=f"nonzeros per token, of {neurons:,}", ylim=(0, None))
    plain(axes.yaxis)
    _layer_ticks(axes, len(layers))
    box, whiskers = Patch(facecolor=BLUE, alpha=0.35), Line2D([], [], color=BLUE)
    mean, largest = axes.get_legend_handles_labels()[0]
    legend_above(axes, [box, whiskers, mean, largest], ["25% to 75%", "1% to 99%", "mean", "largest"])


def _by_position(axes: Axes, activity: Activity) -> None:
    means, neurons = by_position(activity), activity.fired.shape[1]
    edges = octaves(len(means), BINS_PER_OCTAVE)
    bins = list(pairwise(edges))
    middles = [(first + 1 + last) / 2 for first, last in bins]  # positions counted from 1, for the logarithm
    for layer, color in enumerate(layer_colors(axes, means.shape[1])):
        axes.plot(middles, [means[a:b, layer].mean() for a, b in bins], color=color)
    axes.set(xscale="log", xlabel="position in the sequence, from 1", ylabel=f"mean nonzeros per token, of {neurons:,}")
    logarithmic_y(axes)
    plain(axes.xaxis)
    plain(axes.yaxis)


def _frequency(axes: Axes, activity: Activity) -> None:
    """Firing rates of each layer's neurons, from the busiest to the last that fired."""
    for fired, color in zip(activity.fired, layer_colors(axes, len(activity.fired)), strict=True):
        alive = np.sort(fired[fired > 0])[::-1] / activity.tokens
        axes.plot(np.arange(1, len(alive) + 1), alive, color=color)
    if activity.fired.any():
        axes.set_xscale("log")
    logarithmic_y(axes)
    axes.set(xlabel=f"neuron of {activity.fired.shape[1]:,}, by rank", ylabel="share of tokens on which it fires")
    plain(axes.xaxis)
    percent(axes.yaxis)


def _union(axes: Axes, layers: list[Row], neurons: int) -> None:
    where = np.arange(len(layers))
    alive = axes.bar(where, [1 - row["dead"] / neurons for row in layers], 0.75, color="0.9")
    tile = axes.bar(where, [row["union_per_tile"] / neurons for row in layers], 0.55, color=BLUE, alpha=0.75)
    (token,) = axes.plot(where, [1 - row["zeros"] for row in layers], "o", color=ORANGE, markersize=4)
    axes.set(xlabel="layer", ylabel=f"share of the layer's {neurons:,} neurons", ylim=(0, 1))
    percent(axes.yaxis)
    _layer_ticks(axes, len(layers))
    legend_above(axes, [alive, tile, token], ["on any token", f"in a tile of {TOKEN_TILE} tokens", "on a token"])


def _speedup(axes: Axes, speeds: list[Row]) -> None:
    """One point per layer, in the colour of the layer's curve in the other figures."""
    layers = 1 + max(row["layer"] for row in speeds)
    colors = layer_colors(axes, layers)
    nonzeros, times = ([row[key] for row in speeds] for key in ("nonzeros", "speedup"))
    axes.scatter(nonzeros, times, color=colors[[row["layer"] for row in speeds]], zorder=3)
    axes.axhline(1, color=GREY, linewidth=0.8)
    axes.set(xlabel="mean nonzeros per token", ylabel="speed-up over dense PyTorch", xlim=(0, None))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
    from_zero(axes)
    plain(axes.xaxis)


def _layer_ticks(axes: Axes, layers: int) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=min(layers + 1, 14)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
    axes.set_xlim(-0.6, layers - 0.4)
