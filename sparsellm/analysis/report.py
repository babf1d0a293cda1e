"""The files that an analysis writes, and the table that it prints.

OUTPUT/
  analysis.json           the numbers, written after the tables
  layers.csv              a row per layer
  positions.csv           a row per position: mean nonzeros of each layer
  tokens.csv              a row per token of the vocabulary that was read
  neurons.csv             a row per neuron: on how many tokens it fired, the busiest of a layer first
  *.png                   FIGURES
"""

import csv
import io
import json
import shutil
from pathlib import Path
from typing import Any

from sparsellm.analysis import numbers
from sparsellm.analysis.activity import Activity
from sparsellm.config.values import flat
from sparsellm.ops.twell import TOKEN_TILE
from sparsellm.system.console import quantity
from sparsellm.system.files import write_whole

ANALYSIS_JSON = "analysis.json"
BY_LAYER, BY_POSITION, BY_TOKEN = "nonzeros_by_layer.png", "nonzeros_by_position.png", "nonzeros_by_token.png"
FREQUENCY, UNION, SPEEDUP = "firing_frequency.png", "union_by_layer.png", "speedup.png"
FIGURES = {
    BY_LAYER: "Nonzeros per layer (paper: Figure 6)",
    SPEEDUP: "Speedup of layers against nonzeros (paper: Figure 6)",  # only where layers were timed
    BY_TOKEN: "Nonzeros by token and token class (paper: Figure 7a)",
    BY_POSITION: "Nonzeros by position, exponential fit (paper: Figure 7b)",
    FREQUENCY: "Firing frequency of neurons",
    UNION: f"Neurons that fire in tiles of {TOKEN_TILE} tokens",
}
LINES = 5  # tokens of each kind on screen
WIDTH = 120  # columns of a table that is not printed to a terminal

Row = dict[str, Any]


def write_all(folder: Path, results: Row, activity: Activity, types: list[Row]) -> None:
    """Write each file completely or not at all, after removing an earlier analysis. Raises OSError on failure."""
    means = numbers.by_position(activity)
    positions = [
        {"position": at} | {f"layer_{layer:02d}": float(mean) for layer, mean in enumerate(row)}
        for at, row in enumerate(means)
    ]
    files = {
        "layers.csv": as_csv([flat(row, between="_") for row in results["layers"]]),
        "positions.csv": as_csv(positions),
        "tokens.csv": as_csv(types),
        "neurons.csv": as_csv(numbers.neurons(activity)),
        ANALYSIS_JSON: (json.dumps(results, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode(),
    }
    for name in (ANALYSIS_JSON, *FIGURES):  # analysis.json must not exist while the folder mixes files of two analyses
        (folder / name).unlink(missing_ok=True)
    for name, content in files.items():
        write_whole(folder / name, content)


def as_csv(rows: list[Row]) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def table(results: Row) -> str:
    """The results as plain text."""
    model, text, tokens, speed = (results[key] for key in ("model", "text", "tokens", "speed"))
    layers = quantity(model["layers"], "gated layer" if model["gated"] else "non-gated layer")
    sequences = quantity(text["sequences"], "sequence")
    source = "held-out text" if text["source"] == "held-out" else text["source"]
    lines = [
        f"{results['checkpoint']}: {layers} of {model['neurons']:,} neurons, {model['dtype']}",
        f"{text['tokens']:,} tokens of {source}: {sequences} of {text['sequence_length']:,}",
        "",
    ]
    header = ["layer", "mean", "median", "p99", "max", "zeros", f"in {TOKEN_TILE} tokens", "dead", "top 5% have"]
    rows = [
        [
            str(row["layer"]), f"{n['mean']:,.1f}", f"{n['median']:,.0f}", f"{n['p99']:,.0f}", f"{n['max']:,.0f}",
            f"{row['zeros']:.2%}", f"{row['union_per_tile']:,.0f}", f"{row['dead']:,}",
            "-" if top is None else f"{top:.0%}",
        ]
        for row in results["layers"]
        for n, top in [(row["nonzeros"], row["share_of_top"]["0.05"])]
    ]  # fmt: skip
    if speed:
        header += ["engine", "speed-up"]
        for row, of in zip(rows, speed["layers"], strict=True):
            row += [of["engine"], f"{of['speedup']:.2f}x"]
    lines += aligned([header, *rows])
    dead = sum(row["dead"] for row in results["layers"])
    lines += [
        "",
        f"mean, median, p99, max: nonzeros per token. dead: neurons that never fired in these {text['tokens']:,}"
        f" tokens, {dead:,} of {model['layers'] * model['neurons']:,} in total.",
        "by position, mean of layers: "
        + "  ".join(
            f"{row['first']}{'' if row['first'] == row['last'] else '-' + str(row['last'])}:"
            f" {sum(row['nonzeros']) / model['layers']:,.1f}"
            for row in results["positions"]
        ),
    ]
    if fit := results["position_fit"]:
        lines.append(f"exponential fit, position from 0: {fitted(fit)}, relative error {fit['relative_error']:.1%}")
    classes = "  ".join(f"{row['class']} {row['nonzeros']:,.1f}" for row in results["token_classes"])
    lines.append(f"by token class, from position {tokens['from_position']} on: {classes}")
    if tokens["most_active"]:
        for name in ("most_active", "least_active"):
            shown = "  ".join(f"{row['token']!r} {row['nonzeros']:,.1f}" for row in tokens[name][:LINES])
            lines.append(f"{name.replace('_', ' ')} tokens, from position {tokens['from_position']} on: {shown}")
    else:
        lines.append(f"no token was read {tokens['min_count']:,} times: lower min_count or raise sequences")
    if speed and speed["correlation_with_nonzeros"] is not None:
        lines.append(f"correlation of speedup and nonzeros over layers: {speed['correlation_with_nonzeros']:+.2f}")
    elif not speed:
        lines.append(f"speed-up: {results['speed_missing']}")
    return "\n".join(lines)


def fitted(fit: Row) -> str:
    """A fit from numbers.position_fit, written as a formula."""
    return f"{fit['floor']:.3g} + {fit['amplitude']:.3g} exp(-position / {fit['scale']:.3g})"


def aligned(rows: list[list[str]], repeated: int = 1) -> list[str]:
    """The lines of a table. Columns beyond the terminal's width continue below, after the first `repeated` columns."""
    width = shutil.get_terminal_size((WIDTH, 0)).columns
    columns = [[cell.rjust(max(map(len, column))) for cell in column] for column in zip(*rows, strict=True)]
    parts = [columns[:repeated]]
    for column in columns[repeated:]:
        if len(parts[-1]) > repeated and sum(len(each[0]) + 2 for each in [*parts[-1], column]) - 2 > width:
            parts.append(columns[:repeated])
        parts[-1] = [*parts[-1], column]
    return "\n\n".join("\n".join("  ".join(line) for line in zip(*part, strict=True)) for part in parts).split("\n")
