"""The tables of the documents as numbers, and the files of docs/results that they were made from."""

import json
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs/results"
DOCUMENTS = [ROOT / "README.md", ROOT / "docs/RESULTS.md", ROOT / "docs/INFERENCE.md"]
GIB, NEURONS = 2**30, 5_632  # NEURONS: of the models of 0.5B and larger


def tables(path):
    """{"RESULTS.md#anchor", with " 2" for the second table of a section: the cells of its rows without the header}"""
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.M | re.S)
    found, anchor, number = {}, "", 0
    for heading, block in re.findall(r"^#+ (.*)$|((?:^\|.*\n)+)", text, re.M):
        if heading:
            anchor, number = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-"), 0
            continue
        number += 1
        lines = [line.strip("|").split("|") for line in block.splitlines()[2:]]
        name = f"{path.name}#{anchor}" + (f" {number}" if number > 1 else "")
        found[name] = [[cell.strip() for cell in line] for line in lines]
    return found


def listed(section):
    """{table: the second cell of its row} in a section of docs/results/README.md."""
    found = {}
    for link, second, *_ in tables(FOLDER / "README.md")[f"README.md#{section}"]:
        number, target = re.fullmatch(r"\[.*?(?:, table (\d))?\]\((?:\.\./)+(\w+\.md#[\w-]+)\)", link).groups()
        found[f"{target} {number}" if number else target] = second
    return found


class Cells(NamedTuple):
    """The numbers that a row of a table should have, from left to right, without its first cell. None: not compared."""

    numbers: list | None
    tolerance: float = 0  # relative, in addition to rounding
    label: str | None = None  # the first cell


def numbers(text):
    """(number, half a unit of its last digit) of each number in a cell; "H100" is none."""
    found = re.findall(r"(?<![A-Za-z\d.,])[-+]?\d+(?:,\d{3})*(?:\.\d+)?", text)
    return [(float(each.replace(",", "")), 0.5 * 10 ** -len(each.partition(".")[2])) for each in found]


def differences(rows, expected):
    """A line for each row whose numbers are not the expected ones, rounded."""
    assert len(rows) == len(expected)
    found = []
    for (label, *cells), (values, tolerance, name) in zip(rows, expected, strict=True):
        assert name in (None, label)
        shown = numbers(" | ".join(cells))
        if values is not None and not (
            len(shown) == len(values)
            and all(
                abs(number - value) <= half * (1 + 1e-6) + tolerance * abs(value)
                for (number, half), value in zip(shown, values, strict=True)
            )
        ):
            found.append(f"{label}: the table has {[number for number, _ in shown]}, the file {values}")
    return found


def file(name):
    return json.loads((FOLDER / name).read_text())


def runs_of(name):
    return {run["name"]: run for run in map(json.loads, (FOLDER / name).read_text().splitlines())}


TABLES = {name: rows for path in DOCUMENTS for name, rows in tables(path).items()}
