"""The numbers of the README's tables are those of RESULTS."""

import math
import re

from results.documents import ROOT, TABLES, numbers, tables


def sections(text):
    """{anchor: the numbers in the tables of a section of RESULTS}"""
    found = {}
    for name, rows in tables(ROOT / "docs/RESULTS.md").items():
        anchor = name.partition("#")[2].partition(" ")[0]
        found.setdefault(anchor, set()).update(value for row in rows for cell in row for value, _ in numbers(cell))
    return found[text]


def test_the_workloads_of_the_readme_repeat_results():
    for row in TABLES["README.md#sparsellm"]:
        *_, gains, _, link = row
        anchors = re.findall(r"RESULTS\.md#([\w-]+)", gains + link)
        ratios = [float(each) for each in re.findall(r"(\d+\.\d+)x", gains)]
        assert ratios
        found = set().union(*(sections(anchor) | quotients(anchor) for anchor in anchors))
        assert set(ratios) <= found, f"{row[0]}: {ratios}, but RESULTS has others"


def quotients(anchor):
    """Gains that a table of RESULTS says in words: SiLU's time to L1's loss, divided by L1's."""
    if anchor != "l1-compared-with-relu-and-silu-300m-tokens":
        return set()
    (times,) = (row for row in TABLES[f"RESULTS.md#{anchor}"] if row[0].startswith("time in steps until"))
    l1, _, silu = (numbers(cell)[0][0] for cell in times[1:])
    return {round(silu / l1, 2)}


def test_the_speeds_of_the_experiments_in_the_readme_repeat_results():
    for name, *_, speed in TABLES["README.md#train"]:
        anchor = "sharded-training-fsdp2" if name == "`7b`" else "training-in-80-gb-the-largest-micro-batch"
        thousands, ratio = (float(each) for each in re.match(r"(\d+)k, ([\d.]+)x", speed).groups())
        measured = sections(anchor) if name != "`7b`" else {value / 2 for value in sections(anchor)}  # on two GPUs
        assert ratio in sections(anchor), name
        assert any(math.isclose(thousands, value / 1e3, abs_tol=0.5) for value in measured), name
