"""Draws docs/overflow.png: the speed of a layer against the share of heavy tokens, from files of bench_ffn.

    python -m scripts.draw_overflow

Heavy tokens fire 1,500 of 5,632 neurons, the others 36. The PNG stores a checksum of the rows that it shows.
"""

import json
import re
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from scripts.compare_runs import checksum
from sparsellm.figures import BLUE, GREY, ORANGE, PANEL, STYLE, legend_below, saved

DOCS = Path(__file__).resolve().parents[1] / "docs"
FILES = {"overflow_forward.json": "forward", "overflow_training.json": "forward and backward"}


def draw(found: dict[str, list[dict[str, Any]]]) -> Figure:
    """A panel per file, from {file: its results}."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(2 * PANEL[0], PANEL[1]), layout="constrained")
        for axes, (name, rows) in zip(figure.subplots(1, 2), found.items(), strict=True):
            shares = [int(re.sub("[a-z]+", "", row["pattern"])) for row in rows]
            speed = {kind: [_speed(row, kind) for row in rows] for kind in ("tile", "dense")}
            chosen = [_speed(row, row["auto"]) for row in rows]
            axes.plot(shares, speed["tile"], "o-", color=BLUE, label="tile engine, also before counts are known")
            axes.plot(shares, speed["dense"], "o-", color=ORANGE, label="dense engine")
            axes.plot(shares, chosen, "s", color="black", fillstyle="none", markersize=8, label="chosen from counts")
            axes.axhline(1, color=GREY, linewidth=1, label="dense PyTorch, compiled")
            axes.set(xlabel="heavy tokens, %", ylabel="speedup", title=FILES[name], ylim=(0, None))
        handles, labels = axes.get_legend_handles_labels()
        legend_below(figure, handles, labels)
        return figure


def _speed(row: dict[str, Any], kind: str) -> float:
    return next(variant["speedup"] for variant in row["variants"] if variant["variant"] == kind)


if __name__ == "__main__":
    results = {name: json.loads((DOCS / "results" / name).read_text())["results"] for name in FILES}
    (DOCS / "overflow.png").write_bytes(saved(draw(results), Source=checksum(results)))
