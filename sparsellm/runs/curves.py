"""Plots the rows in a run's metrics.jsonl: losses, nonzeros, dead neurons, learning rate, gradient norm and
throughput, as PNG in memory."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

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
    legend_below,
    logarithmic_y,
    percent,
    plain,
    saved,
)
from sparsellm.runs.layout import LOSS_PLOT
from sparsellm.runs.metrics import NAMED

Row = dict[str, Any]
GAP = float("nan")  # drawn as a gap in the curve; stands for a missing value
ALONE = "s^Dv<>"  # markers of data.mix sources that were validated only once
NONZEROS, DEAD, TRAINING = "nonzeros.png", "dead_neurons.png", "training.png"


@dataclass(frozen=True)
class Curves:
    """Plots of a run's metrics, from the rows in metrics.jsonl."""

    title: str
    tokens_per_step: int
    neurons: int  # neurons per layer
    dead_after_tokens: int
    warmup_steps: int
    sources: list[str]  # names of the data.mix sources
    taught: bool  # whether the run has a teacher

    def draw(self, rows: list[Row]) -> dict[str, bytes]:
        """Returns {file name: PNG}. Nonzeros and dead neurons are drawn only for ReLU models, and dead neurons only if
        the run is long enough for neurons to count as dead."""
        plots: dict[str, Callable[[list[Row]], Figure]] = {TRAINING: self.training}
        if any(row["nnz_per_layer"] is not None for row in rows):
            plots[NONZEROS] = self.nonzeros
        if any(row["dead_per_layer"] is not None and self._is_past_window(row) for row in rows):
            plots[DEAD] = self.dead_neurons
        plots[LOSS_PLOT] = self.losses  # last, because `report.is_drawn` takes this file as proof that all plots exist
        with matplotlib.rc_context(STYLE):
            return drawn({name: partial(lambda plot: saved(plot(rows)), plot) for name, plot in plots.items()})

    def losses(self, rows: list[Row]) -> Figure:
        """Left: the whole run, with the y axis from zero. Right: zoomed in after the warm-up, to tell curves apart."""
        settled = [row for row in rows if row["step"] > self.warmup_steps and row["ce"] is not None]
        panels = [rows, settled] if len(settled) > 2 else [rows]
        figure = Figure(figsize=(PANEL[0] * len(panels), PANEL[1]), layout="constrained")
        figure.suptitle(self.title)
        grid = figure.subplots(1, len(panels), squeeze=False)[0]
        for axes, shown in zip(grid, panels, strict=True):
            curves = [("ce", "training", BLUE)]
            terms = ["the L1 term"] if any(row["l1_coefficient"] for row in rows) else []
            terms += ["the teacher's"] if self.taught else []
            if terms:
                curves.append(("loss", f"training, with {' and '.join(terms)}", GREY))
            for key, label, color in reversed(curves):
                _curve(axes, shown, [row[key] for row in shown], color=color, alpha=0.6, linewidth=1, label=label)
            validated = [row for row in shown if row["val_ce"] is not None]
            if validated:
                axes.plot(
                    *zip(*((row["step"], row["val_ce"]) for row in validated), strict=True), "o-", color=ORANGE,
                    markersize=3.5 if len(validated) < 60 else 0, label="held-out", zorder=4,
                )  # fmt: skip
            for i, name in enumerate(self.sources, 1):
                each = [row.get(f"{NAMED}{name}") for row in validated]
                axes.plot(
                    [row["step"] for row in validated], [GAP if ce is None else ce for ce in each], color=ORANGE,
                    linewidth=1, linestyle=(0, (2 * i, 2)), label=f"held-out {name}", zorder=3,
                    marker=ALONE[i % len(ALONE)] if len(validated) == 1 else None, fillstyle="none",
                )  # fmt: skip
            self._step_axis(axes, shown)
            axes.set_ylabel("cross entropy, nats per token")
        from_zero(grid[0])
        if len(panels) > 1:
            # The y axis fits all values except the highest 5%, so spikes may be cut off.
            values = sorted(row[key] for row in settled for key in ("ce", "val_ce") if row[key] is not None)
            low, high = values[0], values[int(0.95 * (len(values) - 1))]
            margin = 0.06 * (high - low) or 0.01
            grid[1].set_ylim(low - margin, high + margin)
            grid[1].set_title("after the warm-up", loc="left")
        handles, labels = grid[0].get_legend_handles_labels()
        legend_below(figure, handles[::-1], labels[::-1])
        return figure

    def nonzeros(self, rows: list[Row]) -> Figure:
        figure, axes = self._panel(rows)
        _layers(axes, rows, "nnz_per_layer", 1)
        _curve(
            axes, rows, [row["nnz_mean"] for row in rows], color="black", linestyle=(0, (4, 2)), label="mean of layers"
        )
        logarithmic_y(axes)
        axes.set_ylabel(f"nonzeros per token, of {self.neurons:,}")
        plain(axes.yaxis)
        legend_above(axes, *axes.get_legend_handles_labels())
        return figure

    def dead_neurons(self, rows: list[Row]) -> Figure:
        figure, axes = self._panel(rows)
        _layers(axes, [row for row in rows if self._is_past_window(row)], "dead_per_layer", self.neurons)
        axes.set_ylabel(
            f"fraction of {self.neurons:,} neurons inactive\nfor the last {self.dead_after_tokens:,} tokens"
        )
        from_zero(axes, least=0.01)
        percent(axes.yaxis)
        return figure

    def training(self, rows: list[Row]) -> Figure:
        figure = Figure(figsize=(PANEL[0] * 2.2, PANEL[1] * 0.85), layout="constrained")
        figure.suptitle(self.title)
        panels = {"lr": "learning rate", "grad_norm": "gradient norm before clipping", "tokens_per_s": "tokens/s"}
        for axes, (key, label) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
            _curve(axes, rows, [row.get(key) for row in rows], color=BLUE)
            self._step_axis(axes, rows)
            axes.set_title(label, loc="left")
            if key == "grad_norm":  # it falls by orders of magnitude, and spikes would flatten the rest
                logarithmic_y(axes)
            else:
                from_zero(axes)
            plain(axes.yaxis)
        return figure

    def _is_past_window(self, row: Row) -> bool:
        return row["step"] * self.tokens_per_step >= self.dead_after_tokens

    def _panel(self, rows: list[Row]) -> tuple[Figure, Axes]:
        figure = Figure(figsize=PANEL, layout="constrained")
        figure.suptitle(self.title)
        axes = figure.subplots()
        self._step_axis(axes, rows)
        return figure, axes

    def _step_axis(self, axes: Axes, rows: list[Row]) -> None:
        axes.set_xlabel(f"step, of {self.tokens_per_step:,} tokens")
        axes.set_xlim(rows[0]["step"] - 1, max(rows[-1]["step"] * 1.01, 2))
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, steps=[1, 2, 5, 10]))
        plain(axes.xaxis)


def _layers(axes: Axes, rows: list[Row], key: str, of: int) -> None:
    layers = next(len(row[key]) for row in rows if row[key] is not None)
    for layer, color in enumerate(layer_colors(axes, layers)):
        values = [None if row[key] is None else row[key][layer] / of for row in rows]
        _curve(axes, rows, values, color=color, linewidth=1, clip_on=False)  # a curve at zero stays visible


def _curve(axes: Axes, rows: list[Row], values: list[float | None], **style: Any) -> None:
    """Draw `values` over the steps: a line, or a point if there is only one row."""
    marker = "o" if len(rows) == 1 else None
    axes.plot([row["step"] for row in rows], [GAP if v is None else v for v in values], marker=marker, **style)
