"""Rows of metrics.jsonl, compared without the keys whose values differ whenever a run is repeated."""

from pathlib import Path
from typing import Any

from sparsellm.runs.metrics import METRICS, read

TIMING = ("tokens_per_s", "mfu", "mj_per_token", "peak_memory_bytes", "data_wait_fraction")


def untimed(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in TIMING}


def untimed_rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of the run in `folder`."""
    return [untimed(row) for row in read(folder / METRICS)]


def differences(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> list[str]:
    """What differs between two lists of rows, step by step and key by key; empty if they are equal."""
    by_step, expected_by_step = ({row["step"]: row for row in rows} for rows in (found, expected))
    different = []
    for step in sorted(by_step.keys() | expected_by_step.keys()):
        row, other = by_step.get(step), expected_by_step.get(step)
        if row is None or other is None:
            different.append(f"step {step}: there is {'no' if row is None else 'an unexpected'} row")
            continue
        different += [
            f"step {step}: {key} is {row.get(key, 'absent')}, expected {other.get(key, 'absent')}"
            for key in (*row, *(other.keys() - row.keys()))
            if key not in row or key not in other or row[key] != other[key]
        ]
    return different
