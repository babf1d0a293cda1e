"""Compares finished runs at their ends: a figure of held-out loss over time, and a Markdown table for RESULTS.md.

    python -m scripts.compare_runs runs/SILU runs/L1 ... --output runs/all.png --json docs/results/NAME.jsonl
    python -m scripts.compare_ends docs/results/NAME.jsonl --output docs/NAME.png

The argument is a file that `compare_runs --json` wrote. Its first SiLU run is the one that the table compares with.
Below the table: what each ReLU run costs and gains compared with each SiLU run. `--other-host NAME` marks a run that
was timed on another host than the rest.

Only ends are compared. In mid-schedule, a run's learning rate is still high, and a run that is planned to stop there
would have a lower loss, so it means nothing if curves cross. A run without its last step, or without a validation
there, is refused.

Figure: left, held-out cross entropy over the seconds of steps, with large marks at the ends; right, the ends alone,
with lines through that of the first SiLU run. The PNG stores a checksum of the rows.

Times are of steps: tokens divided by the logged tokens/s, the dense beginning included, validations and checkpoints
excluded. Energy is of the whole GPU from the first logged step to the end, validations included.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from scripts import evidence_report
from scripts.benchmarks.harness import cell
from scripts.compare_runs import checksum, curve, seconds, spans
from sparsellm.config import ModelConfig, Precision, parameters
from sparsellm.config.values import build
from sparsellm.figures import BLUE, GREEN, GREY, ORANGE, STYLE, legend_below, plain, saved
from sparsellm.runs.folder import checkpoint_bytes
from sparsellm.sweep.figure import spelled

GIB = 2**30
MARKERS = "os^Dv"  # of widths, ascending
NEAR = 0.15  # fraction of the range of losses within which the names of two ends would overlap
LARGE, SMALL = 9, 3  # marker sizes: of an end, and of a validation in mid-schedule


class Run:
    """A line of the file: one run, and what its last row and all its steps say."""

    def __init__(self, line: dict[str, Any]) -> None:
        self.name, self.rows, config = line["name"], line["rows"], line["config"]
        self.last, self.steps = self.rows[-1], config["training"]["steps"]
        self.width: int = config["model"]["intermediate_size"]
        self.neurons = self.width * config["model"]["num_layers"]
        model = build(ModelConfig, config["model"])
        self.parameters = parameters(model)
        hf_dtype = Precision[config["run"]["hf_dtype"] or config["runtime"]["precision"]]
        self.checkpoint_bytes = checkpoint_bytes(model, config["optimizer"]["muon"], hf_dtype)
        self.relu = config["sparsity"]["activation"] == "relu"
        coefficient = config["sparsity"]["l1_coefficient"]
        self.kind = ("ReLU" + f" + L1 {spelled(coefficient)}" * bool(coefficient)) if self.relu else "SiLU"
        self.kind += " in FP8" * bool(config["runtime"]["float8"])
        self.label = f"{self.kind}, N {self.width:,}"
        self.times = seconds(self.rows)
        self.seconds = self.times[-1]

    @property
    def finished(self) -> bool:
        """Whether the run reached its last step, and was validated there."""
        return self.last["step"] == self.steps and self.last["val_ce"] is not None

    @property
    def loss(self) -> float:
        """Held-out cross entropy at the end, nats per token."""
        return self.last["val_ce"]

    @property
    def dense_seconds(self) -> float:
        """Seconds of steps until all layers had left the dense engine for good; all of them if some never did."""
        dense = [set(row["plan_per_layer"]) & {"dense", "torch"} for row in self.rows]
        return max((time for time, engines in zip(self.times, dense, strict=True) if engines), default=0.0)

    @property
    def kilojoules(self) -> float | None:
        """Energy of all GPUs, without steps before the first known energy (the first step); None if unknown."""
        each = [tokens * row["mj_per_token"] for tokens, row in zip(spans(self.rows), self.rows, strict=True)
                if row.get("mj_per_token")]  # fmt: skip
        return sum(each) / 1e6 if each else None

    def compared(self, other: "Run") -> str:
        """Such as "ends 0.050 nats lower in 0.97x the time, with 0.98x the energy and 1.54x the parameters"."""
        apart, ratio = self.loss - other.loss, self.seconds / other.seconds
        found = f"ends {abs(apart):.3f} nats {'lower' if apart < 0 else 'higher'} in {ratio:.2f}x the time"
        if (energies := energy(self, other)) is not None:
            found += f", with {energies:.2f}x the energy"
        size = self.parameters / other.parameters
        return found + f" and {size:.2f}x the parameters" * (size != 1)


def energy(run: Run, base: Run) -> float | None:
    """The energy of `run` divided by that of `base`; None if one is unknown."""
    return run.kilojoules / base.kilojoules if run.kilojoules and base.kilojoules else None


def read(path: Path) -> list[Run]:
    return [Run(json.loads(line)) for line in path.read_text().splitlines()]


def first_silu(runs: list[Run]) -> Run:
    """The run that others are compared with. Raises ValueError if there is none, or if a run did not end."""
    if unfinished := [run.name for run in runs if not run.finished]:
        raise ValueError(f"no validation at the last step, so no end to compare: {', '.join(unfinished)}")
    silu = [run for run in runs if not run.relu]
    if not silu:
        raise ValueError("no SiLU run to compare with")
    return silu[0]


def table(runs: list[Run]) -> str:
    """A Markdown table with a column for each run."""
    base = first_silu(runs)
    rows = {
        "parameters": [f"{run.parameters / 1e6:,.0f}M" for run in runs],
        "held-out cross entropy at the end": [f"{run.loss:.4f}" for run in runs],
        f"difference to {base.label}": ["" if run is base else f"{run.loss - base.loss:+.4f}" for run in runs],
        "nonzeros per token at the end": [cell(run.last["nnz_mean"], ".1f") if run.relu else "all" for run in runs],
        "zeros": [f"{1 - run.last['nnz_mean'] / run.width:.2%}" if run.relu else "" for run in runs],
        "dead neurons": [f"{sum(run.last['dead_per_layer']) / run.neurons:.1%}" if run.relu else "" for run in runs],
        "seconds of steps": [f"{run.seconds:,.0f}" for run in runs],
        f"seconds, ratio to {base.label}": ["" if run is base else f"{run.seconds / base.seconds:.2f}" for run in runs],
        "seconds until no layer was dense": [f"{run.dense_seconds:,.0f}" if run.relu else "" for run in runs],
        "tokens/s in the last steps": [f"{run.last['tokens_per_s']:,.0f}" for run in runs],
        "peak tensor memory, GiB": [f"{max(r['peak_memory_bytes'] for r in run.rows) / GIB:.1f}" for run in runs],
        "memory at the end, GiB": [f"{run.last['peak_memory_bytes'] / GIB:.1f}" for run in runs],
        "energy, kJ": [cell(run.kilojoules, ",.0f") for run in runs],
        f"energy, ratio to {base.label}": ["" if run is base else cell(energy(run, base), ".2f") for run in runs],
        "checkpoint, GB": [f"{run.checkpoint_bytes / 1e9:.1f}" for run in runs],
    }
    return evidence_report.table(
        [{"": name} | {run.label: text for run, text in zip(runs, texts, strict=True)} for name, texts in rows.items()]
    )


def pairs(runs: list[Run]) -> str:
    """A list item for each ReLU run compared with each SiLU run."""
    silu = [run for run in runs if not run.relu]
    return "\n".join(
        f"- **{run.label}** {run.compared(other)} of {other.label}." for run in runs if run.relu for other in silu
    )


def color(run: Run) -> str:
    """Grey for SiLU, green for SiLU in FP8, orange for ReLU, blue for ReLU with L1."""
    if run.relu:
        return BLUE if "L1" in run.kind else ORANGE
    return GREEN if "FP8" in run.kind else GREY


def draw(runs: list[Run], other_host: list[str]) -> Figure:
    """The figure described at the top of this file."""
    base = first_silu(runs)
    widths = sorted({run.width for run in runs})
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 4.6), layout="constrained")
        over_time, ends = figure.subplots(1, 2, width_ratios=(2, 3))
        for run in runs:
            style: dict[str, Any] = {"color": color(run), "marker": MARKERS[widths.index(run.width)]}
            end = style | ({"markerfacecolor": "white"} if run.name in other_host else {})
            label = run.label + " (another host)" * (run.name in other_host)
            held_out = [row["val_ce"] for row in run.rows]
            curve(over_time, run.times, held_out, markersize=SMALL, alpha=0.45, **style)
            for axes in (over_time, ends):
                axes.plot(run.seconds, run.loss, markersize=LARGE, linestyle="none", label=label, zorder=4, **end)
        for line, at in ((ends.axvline, base.seconds), (ends.axhline, base.loss)):
            line(at, color=color(base), linewidth=0.9, linestyle=(0, (4, 2)), zorder=1)
        for run in runs:
            _name(ends, run, base, runs)
        ends.margins(x=0.75, y=0.15)
        ends.text(0.02, 0.03, "lower loss\nin less time", transform=ends.transAxes, fontsize=8, color=color(base))
        over_time.set(ylabel="held-out cross entropy, nats per token")
        over_time.set_title("large: at the end; light: in mid-schedule, not to be compared")
        over_time.set_xlim(0, None)
        ends.set_title("the ends alone: lower is better, further left is faster")
        for axes in (over_time, ends):
            axes.set_xlabel("seconds of steps, validations excluded")
            plain(axes.xaxis)
            plain(axes.yaxis)
        legend_below(figure, *over_time.get_legend_handles_labels())
        return figure


def _name(axes: Axes, run: Run, base: Run, runs: list[Run]) -> None:
    """Write what a run is, and its distance from `base`, at its side away from `base`. Of two ends that are close, the
    higher one is named above its mark, the lower one below."""
    text = run.label
    if run is not base:
        text += f"\n{run.loss - base.loss:+.3f} nats, {run.seconds / base.seconds:.2f}x the time"
    left = run.seconds < base.seconds
    close = NEAR * (max(each.loss for each in runs) - min(each.loss for each in runs))
    neighbours = [each.loss for each in runs if each is not run and abs(each.loss - run.loss) < close]
    above = run.loss >= max(neighbours, default=run.loss)
    axes.annotate(
        text, (run.seconds, run.loss), xytext=(-9 if left else 9, 0), textcoords="offset points", fontsize=8,
        ha="right" if left else "left", va=("bottom" if above else "top") if neighbours else "center",
        color=color(run), zorder=3,
        bbox={"color": "white", "pad": 1, "alpha": 0.8},
    )  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, help="a file that compare_runs --json wrote")
    parser.add_argument("--other-host", nargs="+", default=[], metavar="NAME", help="runs timed on another host")
    parser.add_argument("--output", type=Path, required=True, help="the PNG to write")
    args = parser.parse_args(arguments)
    try:
        runs = read(args.runs)
        text = f"{table(runs)}\n\n{pairs(runs)}"
    except (OSError, ValueError) as error:  # a line that is no JSON is a ValueError
        parser.error(f"{args.runs}: {error}")
    source = checksum({run.name: run.rows for run in runs})
    args.output.write_bytes(saved(draw(runs, args.other_host), Source=source))
    print(text)


if __name__ == "__main__":
    main()
