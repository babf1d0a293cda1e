"""The table of a sweep's results, read from the runs' files: metrics.jsonl, results.json, and benchmark.json.

No state is kept between starts, so the table does not depend on interruptions of the sweep.
"""

import json
from collections.abc import Iterable
from typing import Any

from sparsellm.analysis.report import aligned
from sparsellm.config import Activation, L1Normalization
from sparsellm.evaluation.results import RESULTS, STORED, of_dtype, only
from sparsellm.evaluation.tasks import TASKS, chosen
from sparsellm.runs.layout import EVALUATION
from sparsellm.runs.locate import CheckpointNotFound, locate
from sparsellm.runs.metrics import METRICS, read
from sparsellm.sweep.plan import COEFFICIENT, Point, Sweep
from sparsellm.system import regular
from sparsellm.system.console import warn

MULTIPLIED = {
    L1Normalization.sum: "the sum over neurons and layers",
    L1Normalization.mean: "the mean over neurons and layers",
    L1Normalization.layer_mean: "the sum over neurons and mean over layers",
}
# Columns from a benchmark: PHASE_KEY in benchmark.json -> title.
COSTS = {
    "forward_tokens_per_s": "forward tokens/s",
    "training_tokens_per_s": "training tokens/s",
    "training_peak_bytes": "training peak bytes",
    "prefill_tokens_per_s": "prefill tokens/s",
    "decode_tokens_per_s": "decode tokens/s",
    "forward_mj_per_token": "forward mJ/token",
    "training_mj_per_token": "training mJ/token",
    "prefill_mj_per_token": "prefill mJ/token",
    "decode_mj_per_token": "decode mJ/token",
}
COMPLETE, UNFINISHED, NOT_BEGUN = "complete", "unfinished", "not begun"
Row = dict[str, Any]


def rows(sweep: Sweep) -> list[Row]:
    """One row per point, all with the same keys; None for missing values. An unfinished run has no results.

    `ce` and `val_ce` are in nats per token at the last step; `nnz_*` are nonzeros per token; `dead_neurons` is summed
    over layers; scores, `mean` and `mean_acc` are fractions; `ce_increase` is relative to the run without L1 (from
    `val_ce` if validated).
    """
    metrics = {point.name: read(point.folder / METRICS) for point in sweep.points}
    finished = {point.name: _numbers(point, metrics[point.name]) for point in sweep.points if point.is_finished()}
    scores = {name: _results(sweep, point) for point in sweep.points if (name := point.name) in finished}
    layers = max((len(n.get("nnz_per_layer") or []) for n in finished.values()), default=0)
    tasks = list(dict.fromkeys(task for result in scores.values() for task in result.get("tasks", {})))
    table = []
    for point in sweep.points:
        last, result = finished.get(point.name, {}), scores.get(point.name, {})
        begun = metrics[point.name]
        nnz, dead = last.get("nnz_per_layer") or [], last.get("dead_per_layer")
        if last.get("tokens", 0) < point.config.sparsity.dead_after_tokens:
            dead = None  # unknown, not 0: the run is too short for any neuron to count as dead
        table.append(
            {key: point.values.get(key) for key in sweep.keys}
            | {
                "activation": point.config.sparsity.activation.name,
                "run": point.name,
                "status": COMPLETE if point.name in finished else UNFINISHED if begun else NOT_BEGUN,
                "step": begun[-1]["step"] if begun else None,
                "tokens": begun[-1].get("tokens") if begun else None,
                "ce": last.get("ce"),
                "val_ce": last.get("val_ce"),
                "ce_increase": _increase(point, sweep, finished),
                "nnz_mean": last.get("nnz_mean"),
            }
            | {f"nnz_layer_{i:02d}": nnz[i] if i < len(nnz) else None for i in range(layers)}
            | {"dead_neurons": None if dead is None else sum(dead)}
            | {task: result.get("tasks", {}).get(task, {}).get("score") for task in tasks}
            | {"mean": result.get("mean"), "mean_stderr": _stderr_of_mean(result), "mean_acc": result.get("mean_acc")}
            | {"score_dtype": result.get("dtype", STORED) if result.get("tasks") else None}
            | (_costs(sweep, point) if sweep.options.benchmark else {})
        )
    return table


def as_text(sweep: Sweep, table: list[Row]) -> str:
    """The table for the screen, with a legend. Each part of a table split by width begins with the swept values."""
    cells, legend = _cells(sweep, table)
    return "\n".join([*aligned(cells, len(sweep.keys) + 1), "", legend])


def as_markdown(sweep: Sweep, table: list[Row]) -> str:
    """The table in Markdown, with aligned columns, rounded numbers and a legend."""
    cells, legend = _cells(sweep, table)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [cells[0], ["-" * width for width in widths], *cells[1:]]
    text = "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    )
    return f"{text}\n\n{legend}\n"


def _cells(sweep: Sweep, table: list[Row]) -> tuple[list[list[str]], str]:
    """The table's lines, header first, without empty columns; and the legend."""

    def column(title: str, key: str, form: str) -> tuple[str, list[str]]:
        return title, ["" if row[key] is None else form.format(row[key]) for row in table]

    dtypes = distinct(row["score_dtype"] for row in table if row["score_dtype"] is not None)
    tasks = list(table[0])
    tasks = tasks[tasks.index("dead_neurons") + 1 : tasks.index("mean")]
    columns = [
        *(column(key, key, "{}") for key in sweep.keys),
        column("activation", "activation", "{}"),
        column("run", "run", "{}"),
        column("status", "status", "{}"),
        column("steps", "step", "{:,}"),
        column("CE", "ce", "{:.3f}"),
        column("held-out CE", "val_ce", "{:.3f}"),
        column("CE increase", "ce_increase", "{:+.2%}"),
        column("nonzeros", "nnz_mean", "{:.1f}"),
        column("dead", "dead_neurons", "{:,}"),
        *(column(task, task, "{:.1%}") for task in tasks),
        column("mean", "mean", "{:.1%}"),
        column("mean acc", "mean_acc", "{:.1%}"),
        *([column("dtype", "score_dtype", "{}")] if " or " in dtypes else []),
        *(column(title, key, "{:,.4g}") for key, title in COSTS.items() if key in table[0]),
    ]
    columns = [(title, cells) for title, cells in columns if any(cells)]
    lines = [[title for title, _ in columns], *([cells[i] for _, cells in columns] for i in range(len(table)))]
    return lines, _legend(sweep, {title for title, _ in columns}, dtypes)


def _numbers(point: Point, rows: list[Row]) -> Row:
    """The row of a finished run's last step; empty, with a warning, if that row is damaged or missing."""
    if rows and rows[-1]["step"] == point.config.training.steps:
        return rows[-1]
    warn(f"{point.folder / METRICS} has no row for the last step: its numbers are left out")
    return {}


def _results(sweep: Sweep, point: Point) -> dict[str, Any]:
    """A point's scores on the sweep's tasks only; other evaluations may have written scores for more or fewer tasks."""
    try:
        output = locate(str(point.checkpoint)).output(EVALUATION, limit=sweep.evaluation.limit)
        path = of_dtype(output, sweep.dtype(point)) / RESULTS
        return only(json.loads(regular.content(path)), chosen(sweep.evaluation.tasks)) if path.exists() else {}
    except (CheckpointNotFound, json.JSONDecodeError) as error:
        warn(f"the scores of {point.checkpoint} are left out: {error}")
        return {}


def _costs(sweep: Sweep, point: Point) -> Row:
    """A finished point's benchmark results: with the kernels if they were used, otherwise in PyTorch."""
    side: Row = {}
    if point.is_finished() and (path := sweep.benchmark(point)).exists():
        sides = json.loads(regular.content(path))["checkpoints"][0]["sides"]
        side = sides.get("kernels", sides["PyTorch"])
    found = {}
    for key in COSTS:
        phase, _, number = key.partition("_")
        found[key] = (side.get(phase) or {}).get(number)  # missing if a training step ran out of memory
    return found


def _increase(point: Point, sweep: Sweep, finished: dict[str, Row]) -> float | None:
    """The relative increase in cross entropy compared with the ReLU run without L1 that has the same values outside
    `sparsity`; None if unknown."""
    alike = [p for p in sweep.points if p.outside_sparsity == point.outside_sparsity and _is_without_l1(p)]
    if not alike or point.name not in finished or alike[0].name not in finished:
        return None
    mine, base = finished[point.name], finished[alike[0].name]
    key = "ce" if None in (mine.get("val_ce"), base.get("val_ce")) else "val_ce"
    return None if mine.get(key) is None or not base.get(key) else mine[key] / base[key] - 1


def _is_without_l1(point: Point) -> bool:
    return point.config.sparsity.activation == Activation.relu and point.config.sparsity.l1_coefficient == 0


def _stderr_of_mean(result: dict[str, Any]) -> float | None:
    """The standard error of the mean score, with independent scores; None if unknown."""
    errors = [task["stderr"] for task in result.get("tasks", {}).values()]
    if result.get("mean") is None or not errors or None in errors:
        return None
    return sum(error**2 for error in errors) ** 0.5 / len(errors)


def distinct(values: Iterable[Any]) -> str:
    """Formats the distinct values: "5,632", or "5,632 or 8,448"."""
    return " or ".join(dict.fromkeys(f"{v:,}" if isinstance(v, int) else v for v in values))


def _legend(sweep: Sweep, titles: set[str], dtypes: str) -> str:
    """Explains the columns `titles`. `dtypes`: the dtypes in which the scores were computed."""
    # The dense baseline is left out, because it has none of the settings explained below.
    configs = [point.config for point in sweep.points if not point.baseline]
    neurons = distinct(c.model.intermediate_size for c in configs)
    silence = distinct(c.sparsity.dead_after_tokens for c in configs)
    multiplied = distinct(MULTIPLIED[c.sparsity.l1_normalization] for c in configs if c.sparsity.l1_coefficient)
    limit = sweep.evaluation.limit
    rows = "" if limit is None else f", on the first {limit:,} rows"
    meanings = {
        "CE": "cross entropy of the last step's batch, nats per token; held-out CE: on the validation split",
        "CE increase": f"relative to the ReLU run with {COEFFICIENT}=0",
        "nonzeros": f"feedforward activations per token that are not zero, mean over layers, of {neurons}",
        "dead": f"neurons, over all layers, that did not fire for the last {silence} tokens",
    }
    lines = [f"{title}: {meaning}." for title, meaning in meanings.items() if title in titles]
    if multiplied:
        lines.append(f"The coefficient multiplies, per token, {multiplied} of |h|.")
    if titles & TASKS.keys():
        lines.append(
            f"Scores: zero-shot, in {dtypes}, acc_norm where the task has it, acc otherwise{rows}; mean acc averages"
            " acc alone."
        )
    return "\n".join(f"- {line}" for line in lines)
