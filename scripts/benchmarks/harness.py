"""Shared by all benchmarks: options, tables, and the JSON file of results."""

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from sparsellm.system.provenance import provenance


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser that prints `description` unformatted in --help, with the option --json OUT."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", type=Path, metavar="OUT", help="also write every number to this file")
    return made


def gpu() -> str:
    """A benchmark's first line: the GPU's name and torch's version. Exits if there is no GPU."""
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU")
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"


def cell(value: float | None, form: str) -> str:
    """`value` formatted with `form`; a dash for None."""
    return "-" if value is None else format(value, form)


def listed(title: str, values: Sequence[float]) -> str:
    """Formats the mean over layers and each layer's value."""
    return f"{title}: mean {sum(values) / len(values):,.1f}, by layer {' '.join(f'{value:.0f}' for value in values)}"


def table(rows: Iterable[dict[str, str]]) -> None:
    """Print `rows` as a table whose header is their keys, with the first column left-aligned. Rows may lack keys."""
    rows = list(rows)
    if not rows:
        return
    names = list(dict.fromkeys(name for row in rows for name in row))
    widths = [max(len(name), *(len(row.get(name, "")) for row in rows)) for name in names]
    for row in [dict(zip(names, names, strict=True)), *rows]:
        first, *others = (row.get(name, "") for name in names)
        print(first.ljust(widths[0]) + "".join(f"  {cell:>{w}}" for cell, w in zip(others, widths[1:], strict=True)))


def write(out: Path | None, found: Any) -> None:
    """Write `provenance()` and the results to the file given by --json, if any. A list is stored under "results"."""
    if out is not None:
        results = found if isinstance(found, dict) else {"results": found}
        out.write_text(json.dumps(provenance() | results, indent=1, default=str) + "\n")
