"""What an evaluation leaves and shows.

OUTPUT/
  results.json            all of it, written last
  samples_arc_easy.jsonl  lm-eval's samples: each row with its requests, log-probabilities and scores
  tasks/arc_easy.json     a finished task, which an evaluation of the same things does not repeat
  torch/                  samples and tasks once more in PyTorch, with compare_kernels=true
  limit_20/               the same of limit=20 rows
"""

import hashlib
import json
from pathlib import Path
from typing import Any

RESULTS = "results.json"
VALIDATION = "validation"  # the name of the held-out split's loss, among the tasks


class Finished:
    """The finished parts of an evaluation, one file each, written whole or not at all."""

    def __init__(self, folder: Path, decided_by: dict[str, Any]) -> None:
        """`decided_by`: what the scores depend on besides the rows. Raises OSError if `folder` cannot be written."""
        self.folder, self.decided_by = folder, decided_by
        self.folder.mkdir(exist_ok=True)
        (self.folder / "tasks").mkdir(exist_ok=True)

    def find(self, name: str, rows: str) -> dict[str, Any] | None:
        """What `add` was given under this name, if it was decided by the same things and rows."""
        try:
            found = json.loads(self._path(name).read_text())
            return found["finished"] if found["key"] == self._key(rows) else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def add(self, name: str, rows: str, finished: dict[str, Any], samples: list[dict[str, Any]] | None = None) -> None:
        """The samples first: where the part is, they are."""
        self._path(name).unlink(missing_ok=True)
        if samples is not None:
            lines = (json.dumps(sample, default=str, ensure_ascii=False) for sample in samples)
            write(self.folder / f"samples_{name}.jsonl", "".join(line + "\n" for line in lines))
        write(self._path(name), json.dumps({"key": self._key(rows), "finished": finished}, indent=1))

    def _path(self, name: str) -> Path:
        return self.folder / "tasks" / f"{name}.json"

    def _key(self, rows: str) -> str:
        return hashlib.sha256(json.dumps({**self.decided_by, "rows": rows}, sort_keys=True).encode()).hexdigest()


def write(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def as_json(results: dict[str, Any]) -> str:
    """What RESULTS holds of `results`, to the letter."""
    return json.dumps(results, indent=1) + "\n"


def mean(names: list[str], tasks: dict[str, dict[str, Any]]) -> float | None:
    """Of the scores; None unless there is one for every name."""
    return sum(tasks[name]["score"] for name in names) / len(names) if all(name in tasks for name in names) else None


def record_name(results: dict[str, Any]) -> str:
    """What the names of `results` begin with in a record of the run; of fewer rows, other names."""
    return "evaluation" if results["limit"] is None else f"evaluation/limit_{results['limit']}"


def scores(results: dict[str, Any]) -> dict[str, float]:
    """The numbers of `results` by a flat name, for a record of the run."""
    prefix = record_name(results)
    found = {f"{prefix}/{name}": task["score"] for name, task in results["tasks"].items()}
    if results["mean"] is not None:
        found[f"{prefix}/mean"] = results["mean"]
    if results[VALIDATION] is not None:
        found |= {f"{prefix}/validation_{key}": results[VALIDATION][key] for key in ("loss", "perplexity")}
    return found


def table(results: dict[str, Any]) -> str:
    """Plain text, a line per task however long; with a comparison, the scores in PyTorch beside the kernels'."""
    compared = results.get("torch")
    header = ["task", "score", "metric", "acc", "+-", "acc_norm", "+-", "rows", "split"]
    rows = []
    for name, task in results["tasks"].items():
        numbers = (task[key] for key in ("acc", "acc_stderr", "acc_norm", "acc_norm_stderr"))
        row = [name, _number(task["score"]), task["metric"], *map(_number, numbers), f"{task['rows']:,}", task["split"]]
        if compared:
            row[2:2] = _beside(task["score"], compared["tasks"].get(name, {}).get("score"))
        rows.append([*row, task["note"] or ""])
    of = f"mean of {len(results['tasks']) + len(results['failed'].keys() - {VALIDATION})}"
    if results["mean"] is not None:
        rows.append([of, _number(results["mean"]), *(_beside(results["mean"], compared["mean"]) if compared else [])])
    if compared:
        header[2:2] = ["torch", "difference"]
    lines = _aligned([header, *rows])
    lines += [f"{name}  failed: {' '.join(reason.split())}" for name, reason in results["failed"].items()]
    if results["mean"] is None:
        lines.append(f"{of}  none, for not all have a score")
    sides = [("", results)] if not compared else [(" (kernels)", results), (" (torch)", compared)]
    for side, found in sides:
        if (validation := found[VALIDATION]) is not None:
            lines.append(
                f"validation{side}  loss {validation['loss']:.4f}  perplexity {validation['perplexity']:.3f}"
                f"  {validation['tokens']:,} tokens"
            )
    return "\n".join(lines)


def _beside(score: float, other: float | None) -> list[str]:
    return ["-", "-"] if other is None else [_number(other), f"{score - other:+.4f}"]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _aligned(rows: list[list[str]]) -> list[str]:
    columns = max(map(len, rows))
    filled = [row + [""] * (columns - len(row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*filled, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in filled]
