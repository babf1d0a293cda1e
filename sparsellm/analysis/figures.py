"""Draws the analysis as PNG files in memory; the same numbers give the same bytes."""

from functools import partial
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from sparsellm.analysis.activity import Activity
from sparsellm.analysis.numbers import by_position, position_bins
from sparsellm.analysis.report import BY_LAYER, BY_POSITION, BY_TOKEN, FIGURES, FREQUENCY, SPEEDUP, UNION, fitted
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

TOKENS = 6  # number of most active and of least active tokens in the figure, as in the paper

Row = dict[str, Any]


def draw(title: str, results: Row, activity: Activity) -> dict[str, bytes]:
    """{file name: content} for report.FIGURES. `title`: what was analyzed."""
    plots = {
        BY_LAYER: _by_layer, BY_POSITION: _by_position, BY_TOKEN: _by_token, FREQUENCY: _frequency, UNION: _union,
    } | ({SPEEDUP: _speedup} if results["speed"] else {})  # fmt: skip

    def panel(name: str) -> bytes:
        with matplotlib.rc_context(STYLE):
            figure = Figure(figsize=PANEL, layout="constrained")
            figure.suptitle(f"{FIGURES[name]}\n{title}")
            plots[name](figure.subplots(), results, activity)
            return saved(figure)

    return drawn({name: partial(panel, name) for name in plots})


def _by_layer(axes: Axes, results: Row, activity: Activity) -> None:
    """Box plot by layer: boxes from 25% to 75% of tokens, whiskers from 1% to 99%, on a logarithmic axis."""
    layers = results["layers"]
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
    axes.set(xlabel="layer", ylabel=f"nonzeros per token, of {activity.neurons:,}", ylim=(0, None))
    plain(axes.yaxis)
    _layer_ticks(axes, len(layers))
    box, whiskers = Patch(facecolor=BLUE, alpha=0.35), Line2D([], [], color=BLUE)
    mean, largest = axes.get_legend_handles_labels()[0]
    legend_above(axes, [box, whiskers, mean, largest], ["25% to 75%", "1% to 99%", "mean", "largest"])


def _by_position(axes: Axes, results: Row, activity: Activity) -> None:
    """Each layer's curve, their mean, and its fit. Positions are counted from 1, because the axis is logarithmic."""
    means = position_bins(by_position(activity))
    positions = np.arange(activity.blocks.shape[1])
    middles = 1 + position_bins(positions)
    for curve, color in zip(means.T, layer_colors(axes, means.shape[1]), strict=True):
        axes.plot(middles, curve, color=color, alpha=0.6, linewidth=0.8)
    axes.plot(middles, means.mean(1), color="black", label="mean")
    if fit := results["position_fit"]:
        curve = fit["floor"] + fit["amplitude"] * position_bins(np.exp(-positions / fit["scale"]))
        axes.plot(middles, curve, "--", color=ORANGE, label=fitted(fit))
    legend_above(axes, *axes.get_legend_handles_labels())
    axes.set(xscale="log", xlabel="position in the sequence, from 1")
    axes.set(ylabel=f"mean nonzeros per token, of {activity.neurons:,}")
    logarithmic_y(axes)
    plain(axes.xaxis)
    plain(axes.yaxis)


def _by_token(axes: Axes, results: Row, activity: Activity) -> None:
    """Bars, from top to bottom: the most active tokens, the token classes, the least active tokens."""
    classes = sorted(results["token_classes"], key=lambda row: -row["nonzeros"])
    most, least = (results["tokens"][f"{kind}_active"][:TOKENS] for kind in ("most", "least"))
    bars = [(ascii(row["token"]), row["nonzeros"], BLUE) for row in most]
    bars += [(row["class"], row["nonzeros"], ORANGE) for row in classes]
    bars += [(ascii(row["token"]), row["nonzeros"], BLUE) for row in reversed(least)]
    names, nonzeros, colors = zip(*bars, strict=True)
    axes.bar_label(axes.barh(range(len(bars)), nonzeros, color=colors), fmt="{:,.1f}", padding=2, fontsize=6)
    axes.set_yticks(range(len(bars)), names, fontsize=6, parse_math=False)
    axes.margins(x=0.15)  # room for the numbers
    axes.invert_yaxis()
    axes.set(xlabel=f"mean nonzeros per token, of {activity.neurons:,}")
    plain(axes.xaxis)


def _frequency(axes: Axes, _: Row, activity: Activity) -> None:
    """Firing rates of each layer's neurons, from the busiest to the last that fired."""
    for fired, color in zip(activity.fired, layer_colors(axes, len(activity.fired)), strict=True):
        alive = np.sort(fired[fired > 0])[::-1] / activity.tokens
        axes.plot(np.arange(1, len(alive) + 1), alive, color=color)
    if activity.fired.any():
        axes.set_xscale("log")
    logarithmic_y(axes)
    axes.set(xlabel=f"neuron of {activity.neurons:,}, by rank", ylabel="share of tokens on which it fires")
    plain(axes.xaxis)
    percent(axes.yaxis)


def _union(axes: Axes, results: Row, activity: Activity) -> None:
    layers, neurons = results["layers"], activity.neurons
    where = np.arange(len(layers))
    alive = axes.bar(where, [1 - row["dead"] / neurons for row in layers], 0.75, color="0.9")
    tile = axes.bar(where, [row["union_per_tile"] / neurons for row in layers], 0.55, color=BLUE, alpha=0.75)
    (token,) = axes.plot(where, [1 - row["zeros"] for row in layers], "o", color=ORANGE, markersize=4)
    axes.set(xlabel="layer", ylabel=f"share of the layer's {neurons:,} neurons", ylim=(0, 1))
    percent(axes.yaxis)
    _layer_ticks(axes, len(layers))
    legend_above(axes, [alive, tile, token], ["on any token", f"in a tile of {TOKEN_TILE} tokens", "on a token"])


def _speedup(axes: Axes, results: Row, _: Activity) -> None:
    """One point per layer, in the colour of the layer's curve in the other figures."""
    speed = results["speed"]
    nonzeros, times = ([row[key] for row in speed["layers"]] for key in ("nonzeros", "speedup"))
    axes.scatter(nonzeros, times, color=layer_colors(axes, len(times)), zorder=3)
    if (correlation := speed["correlation_with_nonzeros"]) is not None:
        axes.set_title(f"correlation {correlation:+.3f}")
    axes.axhline(1, color=GREY, linewidth=0.8)
    axes.set(xlabel="mean nonzeros per token", ylabel="speed-up over dense PyTorch", xlim=(0, None))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
    from_zero(axes)
    plain(axes.xaxis)


def _layer_ticks(axes: Axes, layers: int) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=min(layers + 1, 14)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
    axes.set_xlim(-0.6, layers - 0.4)
