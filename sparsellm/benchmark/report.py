"""The output of a benchmark: the same tables on screen and as Markdown, a figure, and all numbers as JSON.

OUTPUT/benchmark.json, benchmark.md, benchmark.png
"""

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sparsellm.analysis.report import aligned
from sparsellm.runs.layout import BENCHMARK_JSON
from sparsellm.system.files import write_whole

BENCHMARK_MD, BENCHMARK_PNG = "benchmark.md", "benchmark.png"  # in the folder of BENCHMARK_JSON
PHASES = ("forward", "training", "prefill", "decode")
OUT_OF_MEMORY = "out of memory"
DENSE_FP8 = "dense FP8"  # the side whose linear layers compute in FP8: the baseline's, if there is one
SPARSE_FP8 = "sparse FP8"  # the side on the kernels with FP8 attention and gate product

FIRST = 3  # columns that identify a row: model, size, and what computes the model

Row = dict[str, Any]
Table = list[list[str]]  # the header first


def write_all(folder: Path, results: Row) -> None:
    """Write the results, each file completely or not at all. Raises OSError if a file cannot be written."""
    write_whole(folder / BENCHMARK_JSON, (json.dumps(results, indent=1, allow_nan=False) + "\n").encode())
    write_whole(folder / BENCHMARK_MD, markdown(results).encode())


def reference(checkpoint: Row) -> str:
    """The side that others are compared with: the baseline if there is one, otherwise PyTorch."""
    return list(checkpoint["sides"])[-1]


def ratio(checkpoint: Row, side: str, phase: str, key: str) -> float | None:
    """A value of `side` divided by the reference's; None for the reference itself or if a value is missing."""
    base, own = (checkpoint["sides"][name].get(phase) for name in (reference(checkpoint), side))
    if side == reference(checkpoint) or not (own and own[key] and base and base[key]):
        return None
    return own[key] / base[key]


def text(results: Row) -> str:
    """The results as plain text."""
    parts = ["\n".join(aligned(table, FIRST)) for table in tables(results)]
    return "\n\n".join([measured_on(results), *parts, "\n".join(notes(results))])


def markdown(results: Row) -> str:
    parts = []
    for header, *rows in tables(results):
        lines = [header, ["---"] * len(header), *rows]
        parts.append("\n".join(f"| {' | '.join(cells)} |" for cells in lines))
    return "\n\n".join([measured_on(results), *parts, "\n".join(f"- {note}" for note in notes(results))]) + "\n"


def measured_on(results: Row) -> str:
    compiled = "compiled" if results["compiled"] else "nothing compiled"
    text = "held-out text" if results["text"] == "held-out" else results["text"]
    kernels = f", {results['kernels']}" if results["kernels"] else ""
    return f"{results['device']}, torch {results['torch']}, {results['dtype']}, {compiled}{kernels}; {text}"


def tables(results: Row) -> list[Table]:
    """Tables of speed and memory; of energy and scores if available; and of layers on the kernels."""
    found = [_speeds(results)]
    if any(_of(row, side, phase, "mj_per_token") for row, side in _sides(results) for phase in PHASES):
        found.append(_energies(results))
    if any(model["scores"] and model["scores"]["tasks"] for model in _models(results)):
        found.append(_scores(results))
    return found + [_layers(row) for row in results["checkpoints"] if row["layer_speeds"]]


def notes(results: Row) -> list[str]:
    """Notes that explain the tables."""
    rows = results["checkpoints"]
    compared = f"in brackets: ratio to the last row of each checkpoint, {reference(rows[0])}"
    tokens = " or ".join(dict.fromkeys(f"{row['sequences']} x {row['sequence_length']:,}" for row in rows))
    found = [compared] if any(len(row["sides"]) > 1 for row in rows) else []
    found += [
        "nonzeros: per token, mean over layers",
        f"forward: {tokens} tokens, hidden states; training: a whole step of the same size, micro-batch"
        f" {results['micro_batch_size']}; prefill and decode: sparsellm.Generator",
    ]
    if of_layers := dict.fromkeys(f"{of['tokens']:,}" for row in rows for of in row["layer_speeds"] or []):
        found.append(
            f"layers: each measured alone on {' or '.join(of_layers)} tokens, compared with PyTorch (eager or"
            f" compiled, the faster)"
        )
    if any(DENSE_FP8 in row["sides"] for row in rows):
        found.append(f"{DENSE_FP8}: every linear layer by torchao (forward: scales per row; training: per tensor)")
    if any(SPARSE_FP8 in row["sides"] for row in rows):
        found.append(
            f"{SPARSE_FP8}: forward: attention by torchao (scales per row), and the gate product of calls that the tile"
            " engine computes; training: attention (per tensor)"
        )
    found += [
        f"{row['name']}: correlation of speedup and nonzeros over layers: {row['correlation_with_nonzeros']:+.2f}"
        for row in rows
        if row["correlation_with_nonzeros"] is not None
    ]
    found += [
        f"{row['name']}: only ReLU models run on the kernels; this one has {row['activation']}"
        for row in rows
        if row["activation"] != "relu"
    ]
    unscored = list(dict.fromkeys(model["name"] for model in _models(results) if not model["scores"]))
    if unscored:
        found.append(
            "held-out loss and accuracy: from `sparsellm evaluate` without a limit; not evaluated:"
            f" {'; '.join(unscored)}"
        )
    return found + results["missing"]


def _sides(results: Row) -> list[tuple[Row, str]]:
    return [(row, side) for row in results["checkpoints"] for side in row["sides"]]


def _of(row: Row, side: str, phase: str, key: str) -> float | None:
    measured = row["sides"][side].get(phase)
    return measured and measured[key]


def size(parameters: int) -> str:
    """A parameter count as text, such as 0.51B or 30.4M."""
    return f"{parameters / 1e9:.2f}B" if parameters >= 1e8 else f"{parameters / 1e6:.3g}M"


def _model_of(row: Row, side: str) -> Row:
    return row["baseline"] or row if side in ("baseline", DENSE_FP8) else row


def _first_cells(row: Row, side: str) -> list[str]:
    """The cells that identify a row: model, size, and what computes the model."""
    model = _model_of(row, side)
    return [model["name"], size(model["parameters"]), f"PyTorch, {model['activation']}" if side == "baseline" else side]


def _cell(row: Row, side: str, phase: str, key: str, spelled: Callable[[float], str]) -> str:
    if row["sides"][side].get(phase, {}) is None:
        return OUT_OF_MEMORY
    value, relative = _of(row, side, phase, key), ratio(row, side, phase, key)
    if value is None:
        return "-"
    return spelled(value) if relative is None else f"{spelled(value)} ({relative:.2f}x)"


def _speeds(results: Row) -> Table:
    def per_ms(value: float) -> str:
        return f"{value / 1e3:,.1f}"

    def whole(value: float) -> str:
        return f"{value:,.0f}"

    measured: list[tuple[str, str, str, Callable[[float], str]]] = [
        ("forward tokens/ms", "forward", "tokens_per_s", per_ms),
        ("training tokens/s", "training", "tokens_per_s", whole),
        ("peak GiB", "training", "peak_bytes", lambda value: f"{value / 2**30:,.1f}"),
        ("prefill tokens/ms", "prefill", "tokens_per_s", per_ms),
        ("decode tokens/s", "decode", "tokens_per_s", whole),
    ]
    titles = [title for title, *_ in measured]
    table = [["checkpoint", "parameters", "on", "nonzeros", *titles, "held-out loss", "accuracy"]]
    for row, side in _sides(results):
        model, scores = _model_of(row, side), {"mean": None, "validation_loss": None}
        if side not in (DENSE_FP8, SPARSE_FP8):  # `evaluate` scored these weights, but not in FP8
            scores = model["scores"] or scores
        dense = model is not row or row["nonzeros"] is None
        table.append([
            *_first_cells(row, side),
            "-" if dense else f"{statistics.mean(row['nonzeros']):,.1f}",
            *(_cell(row, side, phase, key, spelled) for _, phase, key, spelled in measured),
            *("-" if score is None else f"{score:.4f}" for score in (scores["validation_loss"], scores["mean"])),
        ])  # fmt: skip
    return table


def _energies(results: Row) -> Table:
    def joules(row: Row, side: str) -> list[str]:
        return [_cell(row, side, phase, "mj_per_token", lambda value: f"{value:,.3g}") for phase in PHASES]

    header = ["checkpoint", "parameters", "mJ per token on", *PHASES]
    return [header, *([*_first_cells(row, side), *joules(row, side)] for row, side in _sides(results))]


def _models(results: Row) -> list[Row]:
    """Every checkpoint, each followed by its baseline."""
    return [model for row in results["checkpoints"] for model in (row, row["baseline"]) if model is not None]


def _scores(results: Row) -> Table:
    """Scores from `evaluate`: one row per model, one column per task that any model has."""
    each = {model["checkpoint"]: model for model in _models(results)}.values()
    tasks = list(dict.fromkeys(task for model in each for task in (model["scores"] or {"tasks": {}})["tasks"]))
    table = [["accuracy of", "parameters", "dtype", *tasks]]
    for model in each:
        scores = model["scores"] or {"tasks": {}}
        found = ("-" if score is None else f"{score:.4f}" for score in map(scores["tasks"].get, tasks))
        table.append([model["name"], size(model["parameters"]), scores.get("dtype", ""), *found])
    return table


def _layers(row: Row) -> Table:
    header = [f"layer of {row['name']}", "nonzeros", "in a tile", "engine", "speed-up"]
    return [header] + [
        [str(of["layer"]), f"{of['nonzeros']:,.1f}", f"{of['union']:,.0f}", of["engine"], f"{of['speedup']:.2f}x"]
        for of in row["layer_speeds"]
    ]
