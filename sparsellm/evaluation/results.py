"""The files that evaluations of a checkpoint write, and the table that they print.

OUTPUT/results.json: all scores of these weights, rebuilt from tasks/ at the end of each evaluation.
OUTPUT/samples_arc_easy.jsonl: lm-eval's samples; each row with its requests, log-probabilities and scores.
OUTPUT/tasks/arc_easy.json: a finished task, and what its score depends on. A successful evaluation replaces this file.
OUTPUT/tasks/validation.json: the same for the held-out split.
OUTPUT/torch/: samples and tasks computed by PyTorch, with compare_kernels=true.
OUTPUT/float32/: the results of dtype=float32, where OUTPUT has scores in another dtype.
OUTPUT/float8/: the results of float8=true, always apart from others.
OUTPUT/limit_20/: the results of limit=20.
"""

import json
from pathlib import Path
from typing import Any

from sparsellm.evaluation.tasks import TASKS
from sparsellm.runs.report import caveat
from sparsellm.system import regular
from sparsellm.system.console import columns
from sparsellm.system.files import whole

RESULTS = "results.json"
VALIDATION = "validation"  # the name of the held-out loss among the tasks
SETTINGS = ("dtype", "kernels", "device", "data", "limit", "lm_eval")  # settings that scores must share to be averaged

STORED = "float32"  # the dtype of scores that name no dtype: before 0.1.0, runs stored their models in float32
FLOAT8 = "float8"  # the folder and the "dtype" of scores of bfloat16 models whose attention and gate compute in FP8
MEANS = {"mean": "score", "mean_acc": "acc"}  # name of the mean -> key of each task

Parts = dict[str, dict[str, Any]]  # results by task name; the held-out split's result is under VALIDATION


class Finished:
    """The results of an evaluation on disk: one file per task, written atomically."""

    def __init__(self, folder: Path, decided_by: dict[str, Any]) -> None:
        """`decided_by`: what the scores depend on in addition to the rows, including the weights.

        Raises OSError if `folder` cannot be written.
        """
        self.folder, self.decided_by = folder, decided_by
        folder.mkdir(exist_ok=True)
        (folder / "tasks").mkdir(exist_ok=True)

    def find(self, name: str, rows: str) -> dict[str, Any] | None:
        """The result stored under this name, if it was computed from the same rows and settings."""
        decided_by, part = _read(self.folder, name)
        return part if decided_by == {**self.decided_by, "rows": rows} else None

    def add(self, name: str, rows: str, part: dict[str, Any], samples: list[dict[str, Any]] | None = None) -> None:
        """Store the result `part`, and the samples if any, replacing an earlier result of this name.

        Old files are removed only after the new files are complete. A stored result always has its samples.
        """
        path = _path(self.folder, name)
        found = {"decided_by": {**self.decided_by, "rows": rows}, "finished": part}
        with whole(path) as file:
            file.write(json.dumps(found, indent=1).encode())
            file.flush()
            if samples is not None:
                with whole(_samples(self.folder, name)) as lines:
                    for sample in samples:
                        lines.write(f"{json.dumps(sample, default=str, ensure_ascii=False)}\n".encode())
                    lines.flush()
                    path.unlink(missing_ok=True)


def kept(folder: Path, weights: str) -> Parts:
    """All results of these weights in `folder`, with any settings: tasks in order, VALIDATION last."""
    found = {name: _read(folder, name) for name in (*TASKS, VALIDATION)}
    return {name: part for name, (decided_by, part) in found.items() if decided_by.get("weights") == weights}


def dtypes(folder: Path, weights: str) -> set[str]:
    """The dtypes in which the tasks in `folder` were scored with these weights."""
    parts = kept(folder, weights).items()
    return {part.get("measured", {}).get("dtype", STORED) for name, part in parts if name != VALIDATION}


def of_dtype(folder: Path, dtype: str) -> Path:
    """The folder with the results for `dtype`: `folder/dtype` if it has results, else `folder`. FLOAT8 is never in
    `folder`."""
    return folder / dtype if dtype == FLOAT8 or (folder / dtype / RESULTS).is_file() else folder


def discard_others(folder: Path, weights: str) -> None:
    """Remove results of other weights from `folder`, with their samples."""
    for name in (*TASKS, VALIDATION):
        decided_by, _ = _read(folder, name)
        if decided_by and decided_by.get("weights") != weights:
            _path(folder, name).unlink()
            _samples(folder, name).unlink(missing_ok=True)


def _read(folder: Path, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(settings, result) of a stored file; both empty if it cannot be read."""
    try:
        found = json.loads(regular.content(_path(folder, name)))
        decided_by, part = dict(found["decided_by"]), dict(found["finished"])
        if decided_by.get("dtype") == "auto":  # written before 0.1.0, when auto meant the stored dtype
            decided_by["dtype"] = part.get("measured", {}).get("dtype", STORED)
        return decided_by, part
    except (OSError, ValueError, KeyError, TypeError):
        return {}, {}


def _path(folder: Path, name: str) -> Path:
    return folder / "tasks" / f"{name}.json"


def _samples(folder: Path, name: str) -> Path:
    return folder / f"samples_{name}.jsonl"


def as_json(results: dict[str, Any]) -> str:
    """The exact contents of the RESULTS file for `results`."""
    return json.dumps(results, indent=1) + "\n"


def has_scores(results: dict[str, Any]) -> bool:
    return bool(results["tasks"]) or results[VALIDATION] is not None


def settings(task: dict[str, Any]) -> dict[str, Any]:
    """The settings that must be equal for all tasks in a mean."""
    return {key: task["measured"].get(key) for key in SETTINGS}


def unlike(tasks: dict[str, dict[str, Any]]) -> list[str]:
    """The settings that differ between the tasks."""
    each = [settings(task) for task in tasks.values()]
    return [key for key in SETTINGS if any(other[key] != each[0][key] for other in each)]


def means(tasks: dict[str, dict[str, Any]], failed: dict[str, str]) -> dict[str, float | None]:
    """The "mean" of scores, and the "mean_acc" of `acc`, which every task has.

    None if there is no score, a failed task has no earlier score, or settings differ.
    """
    if not tasks or failed.keys() - {VALIDATION} - tasks.keys() or unlike(tasks):
        return dict.fromkeys(MEANS)
    return {name: sum(task[key] for task in tasks.values()) / len(tasks) for name, key in MEANS.items()}


def only(results: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """`results` restricted to the tasks `names`, with their mean."""
    if results["tasks"].keys() <= set(names):
        return results
    tasks, failed = ({n: v for n, v in results[key].items() if n in names} for key in ("tasks", "failed"))
    return {**results, "tasks": tasks, "failed": failed, **means(tasks, failed)}


def record_table(results: dict[str, Any]) -> str:
    """The name of the table of `results` in the run's W&B record."""
    return f"{next(map(_record_name, results['tasks'].values()), 'evaluation')}/table"


def _record_name(task: dict[str, Any]) -> str:
    limit, dtype = task["measured"].get("limit"), task["measured"].get("dtype")
    return "evaluation" + (f"/limit_{limit}" if limit is not None else "") + (f"/{FLOAT8}" if dtype == FLOAT8 else "")


def scores(results: dict[str, Any]) -> dict[str, float]:
    """The numbers of `results` by flat names, for the run's W&B record. Names include the limit on rows, and FP8."""
    tasks = results["tasks"]
    found = {f"{_record_name(task)}/{name}": task["score"] for name, task in tasks.items()}
    if results["mean"] is not None:
        found |= {f"{_record_name(next(iter(tasks.values())))}/{name}": results[name] for name in MEANS}
    if results[VALIDATION] is not None:
        each = {key: results[VALIDATION][key] for key in ("loss", "perplexity")}
        name = f"evaluation/{FLOAT8}" if results.get(FLOAT8) else "evaluation"
        found |= {f"{name}/validation_{key}": value for key, value in each.items() if value is not None}
    return found


def table(results: dict[str, Any], asked: list[str]) -> str:
    """The results as plain text, one line per task; with compare_kernels, the PyTorch scores next to the kernels'.

    `asked`: the tasks requested in the latest evaluation. A line lists the tasks whose scores are from earlier
    evaluations.
    """
    tasks, failed, compared = results["tasks"], results["failed"], results.get("torch")
    differing = unlike(tasks)
    header = ["task", "score", "metric", "acc", "+-", "acc_norm", "+-", "rows", "split", *differing]
    rows = []
    for name, task in tasks.items():
        numbers = (task[key] for key in ("acc", "acc_stderr", "acc_norm", "acc_norm_stderr"))
        row = [name, _number(task["score"]), task["metric"], *map(_number, numbers), f"{task['rows']:,}", task["split"]]
        row += [_setting(settings(task)[key]) for key in differing]
        if compared:
            other = compared["tasks"].get(name)
            alike = other is not None and not set(unlike({"one": other, "other": task})) - {"kernels"}
            row[2:2] = _compared(task["score"], other["score"] if alike else None)
        rows.append(row)
    of = f"mean of {len(tasks.keys() | failed.keys() - {VALIDATION})}"
    if results["mean"] is not None:
        others = _compared(results["mean"], compared["mean"]) if compared else []
        rows.append([of, _number(results["mean"]), *others, "", _number(results["mean_acc"])])
    if compared:
        header[2:2] = ["torch", "difference"]
    lines = columns([header, *rows]) if tasks else []
    lines += [f"{name}  note: {task['note']}" for name, task in tasks.items() if task["note"]]
    for name, reason in failed.items():
        earlier = "; the score above is from an earlier evaluation" if name in tasks and not compared else ""
        lines.append(f"{name}  failed: {' '.join(reason.split())}{earlier}")
    if differing:
        lines.append(f"{of}  none: settings differ ({', '.join(differing)}); score all tasks with one command")
    elif results["mean"] is None and (tasks or failed.keys() - {VALIDATION}):
        lines.append(f"{of}  none: not all tasks have a score")
    if tasks and (shared := [key for key in SETTINGS if key not in differing]):
        common = settings(next(iter(tasks.values())))
        lines.append("measured with  " + "  ".join(f"{key} {_setting(common[key])}" for key in shared))
    if others := [name for name in tasks if name not in asked]:
        lines.append(f"from earlier evaluations of these weights  {', '.join(others)}")
    sides = [("", results)] if not compared else [(" (kernels)", results), (" (torch)", compared)]
    for side, found in sides:
        if (validation := found[VALIDATION]) is not None:
            perplexity = validation["perplexity"]
            lines.append(
                f"validation{side}  loss {validation['loss']:.4f}"
                f"  perplexity {'over 1e308' if perplexity is None else f'{perplexity:.3f}'}"
                f"  over {validation['tokens']:,} held-out tokens,"
                f" {'in FP8' if results.get(FLOAT8) else 'as the run validates'}{caveat(validation['tokens'])}"
                f"{', from an earlier evaluation of these weights' if VALIDATION in results['failed'] else ''}"
            )
    return "\n".join(lines)


def _setting(value: Any) -> str:
    return "none" if value is None else str(value)


def _compared(score: float, other: float | None) -> list[str]:
    return ["-", "-"] if other is None else [_number(other), f"{score - other:+.4f}"]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
