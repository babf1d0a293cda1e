"""Validates rows of the seven tasks: lm-eval silently scores a row with an impossible label as wrong."""

from collections.abc import Iterable, Mapping
from typing import Any, TypeGuard

from sparsellm.system.errors import listed

NAMED = 3  # maximum number of bad rows listed per task


def mistakes(task: str, rows: Iterable[Mapping[str, Any]]) -> str | None:
    """An error message for the first `rows` that cannot be scored (numbered from 1); None if all can be."""
    found = [f"row {number}: {wrong}" for number, row in enumerate(rows, 1) if (wrong := _mistake(task, row))]
    return listed(found, NAMED, "; ") or None


def _mistake(task: str, row: Mapping[str, Any]) -> str | None:
    """An error message for the first field of `row` that violates the schema of the task's hub data set, or None."""
    if task in ("arc_easy", "arc_challenge", "openbookqa", "commonsense_qa"):
        question = "question_stem" if task == "openbookqa" else "question"
        choices = row.get("choices")
        texts, labels = (choices.get(key) if isinstance(choices, Mapping) else None for key in ("text", "label"))
        if not (_are_texts(texts) and _are_texts(labels) and len(texts) == len(labels) > 1):
            return _wrong("choices", choices, "texts, with one label each")
        if task == "commonsense_qa" and labels != list("ABCDE"):
            return _wrong("choices.label", labels, "A, B, C, D, E")
        answer = row.get("answerKey")
        stripped = answer.lstrip() if task == "openbookqa" and isinstance(answer, str) else answer
        return _texts(row, question) or (None if stripped in labels else _one_of("answerKey", answer, labels))
    if task == "hellaswag":
        endings, label = row.get("endings"), row.get("label")
        if not (_are_texts(endings) and len(endings) > 1):
            return _wrong("endings", endings, "several texts")
        allowed = [str(i) for i in range(len(endings))]
        if isinstance(label, bool) or not isinstance(label, str | int) or str(label) not in allowed:
            return _one_of("label", label, allowed)
        return _texts(row, "activity_label", "ctx_a") or _texts(row, "ctx_b", empty=True)
    if task == "piqa":
        label = row.get("label")
        if type(label) is not int or label not in (0, 1):
            return _one_of("label", label, [0, 1])
        return _texts(row, "goal", "sol1", "sol2")
    assert task == "winogrande"
    if row.get("answer") not in ("1", "2"):
        return _one_of("answer", row.get("answer"), ["1", "2"])
    if wrong := _texts(row, "sentence", "option1", "option2"):
        return wrong
    return None if "_" in row["sentence"] else _wrong("sentence", row["sentence"], "a text with a gap, _")


def _texts(row: Mapping[str, Any], *fields: str, empty: bool = False) -> str | None:
    for field in fields:
        if not (isinstance(row.get(field), str) and (empty or row[field].strip())):
            return _wrong(field, row.get(field), "a text")
    return None


def _are_texts(value: Any) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(text, str) and text.strip() for text in value)


def _one_of(field: str, value: Any, allowed: list[Any]) -> str:
    return _wrong(field, value, "one of " + ", ".join(map(repr, allowed)))


def _wrong(field: str, value: Any, wanted: str) -> str:
    return f"{field} is {value!r:.80}: it should be {wanted}"
