"""Draws docs/gains.png, shown in README.md, from the tables in docs/RESULTS.md and the metrics of finished runs.

    python -m scripts.draw_readme

From top to bottom: the speedup of one layer against its nonzeros; the gains of whole models next to the paper's; and
whole runs of ReLU + L1 and of SiLU, compared at their ends (docs/results/0p5b_wide_150m.jsonl, written by
scripts/compare_runs.py). The PNG stores a checksum of all these numbers, so that a test can check whether the figure is
up to date.
"""

import hashlib
import json
import re
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from scripts import compare_ends
from scripts.compare_runs import curve
from sparsellm.figures import plain

DOCS = Path(__file__).resolve().parents[1] / "docs"
OURS, PAPER, DENSE, INK = "#1f77b4", "#e08214", "#8c8c8c", "#222222"
DARK, LIGHT = "#08519c", "#6baed6"  # two shades of OURS
WIDTH, DPI = 8.3, 200  # inches; GitHub shows 830 pixels, so text appears at its nominal size in points
MODELS = ("0.5B", "1B", "1.5B", "2B")
TABLES = (
    "One layer: forward pass", "One layer: forward and backward", "Forward pass of whole models",
    "Training step: speed and memory", "Compared with the paper",
)  # fmt: skip
RUNS = DOCS / "results/0p5b_wide_150m.jsonl"
ENDS = {  # {run in RUNS: (colour, marker)}; the first is the one that the others are compared with
    "silu_5632": (DENSE, "o"), "silu_5632_float8": ("#4f8a4c", "o"), "silu_11264": ("#555555", "s"),
    "l1_11264_4e-5": (OURS, "s"),
}  # fmt: skip
STYLE = {
    "font.size": 9, "font.family": "DejaVu Sans", "axes.titlesize": 9.5, "axes.labelsize": 9, "legend.fontsize": 8.5,
    "axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.7, "axes.edgecolor": "#555555",
    "axes.axisbelow": True, "grid.alpha": 0.25, "grid.linewidth": 0.6, "text.color": INK,
}  # fmt: skip

Row = dict[str, str]


def tables(heading: str, text: str) -> list[list[Row]]:
    """The tables under the line `## heading` in the Markdown document `text`, each as its rows, keyed by column."""
    if f"## {heading}\n" not in text:
        raise ValueError(f"docs/RESULTS.md has no section {heading!r}: docs/gains.png needs its table")
    section = text.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    found = []
    for block in re.findall(r"(?:^\|.*\n?)+", section, re.M):
        header, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines())
        found.append([dict(zip(header, row, strict=True)) for row in rows])
    return found


def table(heading: str, text: str) -> list[Row]:
    """The rows of the first table of a section."""
    return tables(heading, text)[0]


def number(cell: str) -> float:
    """The number at the start of a table cell such as "12.596", "131,072", "+17.0%" or "0.11: no room"."""
    return float(cell.split(":")[0].split("(")[0].rstrip("% ").replace(",", ""))


def layer_speed_ups(rows: list[Row], engines: tuple[str, ...]) -> tuple[list[float], list[float]]:
    """Returns (nonzeros per token, ascending; speedup of the fastest engine), two lists with one entry per row."""
    points = sorted((number(row["nonzeros per token"]), max(number(row[engine]) for engine in engines)) for row in rows)
    return [nonzeros for nonzeros, _ in points], [speed_up for _, speed_up in points]


def draw_gains(text: str) -> Figure:
    forward, training, *of_models = (tables(heading, text) for heading in TABLES)
    large = [row for row in forward[0] if row["tokens"] == "131,072"]
    whole, steps, paper = ({row["model"]: row for rows in each for row in rows if "model" in row} for each in of_models)

    figure = plt.figure(figsize=(WIDTH, 9.5))
    above = figure.add_gridspec(1, 1, left=0.06, right=0.985, top=0.969, bottom=0.719)
    below = figure.add_gridspec(1, 4, left=0.06, right=0.985, top=0.612, bottom=0.460, wspace=0.12)
    _lines(
        figure.add_subplot(above[0]),
        layer_speed_ups(training[0], ("tile", "dense engine")),
        layer_speed_ups(large, ("row", "tile", "dense engine")),
    )
    for column, (title, printed, ours) in enumerate((
        ("forward pass: faster", "paper: forward", {m: number(whole[m]["speed-up"]) - 1 for m in MODELS}),
        ("training step: faster", "paper: training step", {m: number(steps[m]["speed-up"]) - 1 for m in MODELS}),
        ("training memory: less", "paper: peak memory", {m: 1 - number(steps[m]["memory ratio"]) for m in MODELS}),
        ("forward energy: less", "paper: energy per token",
         {m: 1 - number(whole[m]["energy per token"]) for m in MODELS}),
    )):  # fmt: skip
        less = -1 if title.endswith("less") else 1
        theirs = {m: less * number(paper[m][printed]) for m in MODELS if paper[m][printed]}
        _bars(
            figure.add_subplot(below[column]), title, theirs, {m: 100 * gain for m, gain in ours.items()}, column == 0
        )
    figure.text(0.06, 0.645, "Whole models: gain in %, ours and the paper's", fontsize=9.5, fontweight="bold")
    figure.legend(
        [Rectangle((0, 0), 1, 1, color=OURS), Rectangle((0, 0), 1, 1, color=PAPER)],
        [
            "sparsellm: one GPU, against the same model in PyTorch",
            "the paper: 8 x H100 PCIe, against its own dense model",
        ],
        loc="lower center", ncols=2, frameon=False, bbox_to_anchor=(0.52, 0.413), handlelength=1.2,
    )  # fmt: skip
    figure.text(
        0.52, 0.370,
        "Ours: on an H100, frozen at 36 to 38 active neurons per token (the paper: 24 to 39).\n"
        "Forward passes of 1B and 2B: by a second script, which finds 3 points more for 0.5B and 1.5B than the first.\n"
        "Hardware and baselines differ: each gain is over its own baseline. No bar: not measured, or not comparable.",
        ha="center", fontsize=8, color="#555555", linespacing=1.3,
    )  # fmt: skip
    _runs(figure, drawn_runs())
    return figure


def checksum(text: str) -> str:
    """SHA-256 of all numbers drawn by draw_gains(text)."""
    drawn = [tables(heading, text) for heading in TABLES] + [run.rows for run in drawn_runs()]
    return hashlib.sha256(json.dumps(drawn).encode()).hexdigest()


def drawn_runs() -> list[compare_ends.Run]:
    """The runs of ENDS, in its order."""
    runs = {run.name: run for run in compare_ends.read(RUNS)}
    return [runs[name] for name in ENDS]


def _runs(figure: Figure, runs: list[compare_ends.Run]) -> None:
    """Draw held-out loss over time with large marks at the ends, nonzeros, and speed of `runs`. Text: what the last
    run, which is sparse, gains and costs compared with each dense run."""
    *dense, ours = runs
    millions = ours.last["tokens"] / 1e6
    figure.text(
        0.06, 0.335, f"Whole runs, from the first step to the end: 0.5B, {millions:.0f}M tokens, one H100 each",
        fontsize=9.5, fontweight="bold",
    )  # fmt: skip
    compared = "\n".join(f"ReLU + L1 {ours.compared(other)} of {other.label}." for other in dense)
    figure.text(0.06, 0.284, compared, fontsize=8, linespacing=1.35)
    grid = figure.add_gridspec(
        1, 3, left=0.06, right=0.985, top=0.25, bottom=0.1, wspace=0.26, width_ratios=(1.7, 1, 1)
    )
    loss, fires, speed = (figure.add_subplot(cell) for cell in grid)
    for run in runs:
        color, marker = ENDS[run.name]
        held_out = [row["val_ce"] for row in run.rows]
        curve(loss, run.times, held_out, marker=marker, color=color, markersize=2.5, alpha=0.6, linewidth=1.2)
        label = f"{run.label}: {run.loss:.3f} after {run.seconds:,.0f} s"
        loss.plot(run.seconds, run.loss, marker, color=color, markersize=7, label=label, zorder=4, clip_on=False)
        steps = [row["step"] for row in run.rows]
        nonzeros = [row["nnz_mean"] if run.relu else run.width for row in run.rows]
        thousands = [row["tokens_per_s"] / 1000 for row in run.rows]
        width = 1.8 if run.relu else 1.2
        fires.plot(steps, nonzeros, color=color, linewidth=width)
        speed.plot(steps[1:], thousands[1:], color=color, linewidth=width)  # without the first step, which compiles
    loss.set_title("held-out loss: compare only the ends (large)", fontsize=9, loc="left")
    ends = [run.loss for run in runs]
    loss.set_ylim(min(ends) - 0.04, max(ends) + 0.25)
    loss.set_xlim(0.4 * min(run.seconds for run in runs), None)
    loss.set_xlabel("seconds of steps")
    plain(loss.xaxis)
    figure.legend(*loss.get_legend_handles_labels(), loc="lower center", ncols=2, frameon=False, fontsize=8)
    fires.set_title("active neurons per token", fontsize=9, loc="left")
    fires.set_yscale("log")
    ticks = (100, 300, 1000, *sorted({run.width for run in runs}))
    fires.set_yticks(ticks, [f"{tick:,}" for tick in ticks])
    fires.minorticks_off()
    speed.set_title("thousand tokens per second", fontsize=9, loc="left", x=-0.1)
    speed.set_ylim(0, None)
    for axes in (fires, speed):
        axes.set_xlim(0, ours.steps)
        axes.set_xticks((0, 500, 1000), ("0", "500", "1,000"))
        axes.set_xlabel("step")
    for axes in (loss, fires, speed):
        axes.grid(axis="y")


def _lines(axes: Axes, training: tuple[list[float], list[float]], forward: tuple[list[float], list[float]]) -> None:
    axes.set_title(
        "One feedforward layer: speedup over the same layer in compiled dense PyTorch (one H100)", loc="left",
        fontweight="bold",
    )  # fmt: skip
    axes.axvspan(36, 116, color=OURS, alpha=0.09, linewidth=0)
    axes.text(65, 0.1, "layers of a\n0.5B model, trained", ha="center", va="bottom", fontsize=8.5, color=OURS)
    axes.axhline(1, color=DENSE, linewidth=1.2, linestyle=(0, (4, 2)))
    axes.text(18.6, 0.93, "dense PyTorch", color="#666666", fontsize=8.5, va="top")
    for (nonzeros, speed_ups), color, marker, label, at in (
        (training, DARK, "o", "forward + backward", (23, 3.42)),
        (forward, LIGHT, "s", "forward", (20, 1.97)),
    ):
        axes.plot(nonzeros, speed_ups, marker=marker, color=color, linewidth=1.8, markersize=4.5)
        axes.text(*at, label, color=color, fontweight="bold")
    ticks = (20, 50, 100, 200, 500, 1000, 2816)
    axes.set_xscale("log")
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlim(18, 3200)
    axes.set_ylim(0, 4)
    axes.set_yticks(range(5), [f"{n}x" for n in range(5)])
    axes.set_xlabel("active neurons per token, of 5,632 (half of them, 2,816, in a new model)")
    axes.grid(axis="y")


def _bars(axes: Axes, title: str, theirs: dict[str, float], ours: dict[str, float], first: bool) -> None:
    axes.set_title(title, fontsize=9, loc="left")
    for values, color, shift, digits in ((ours, OURS, -0.2, ".0f"), (theirs, PAPER, 0.2, ".1f")):
        for row, model in enumerate(MODELS):
            if model in values:
                axes.barh(row + shift, values[model], 0.38, color=color)
                axes.text(
                    max(values[model], 0) + 1, row + shift, f"{values[model]:{digits}}", va="center", fontsize=7.5
                )
    axes.axvline(0, color="#555555", linewidth=0.7)
    axes.set_xlim(-3, 54)
    axes.set_ylim(len(MODELS) - 0.5, -0.5)
    axes.set_yticks(range(len(MODELS)), MODELS if first else [""] * len(MODELS))
    axes.set_xticks([])
    axes.tick_params(axis="y", length=0)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)


def main() -> None:
    with plt.rc_context(STYLE):
        text = (DOCS / "RESULTS.md").read_text()
        metadata = {"Software": None, "Source": checksum(text)}
        draw_gains(text).savefig(DOCS / "gains.png", dpi=DPI, facecolor="white", metadata=metadata)


if __name__ == "__main__":
    main()
