"""The scripts: most need a GPU to run, and none needs one to be imported."""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "scripts").rglob("*.py"))
INDEX = ROOT / "scripts/benchmarks/README.md"


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_every_script_finds_what_it_imports(path):
    importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))


def test_the_index_of_benchmarks_names_all_of_them():
    listed = {line.split("`")[1] for line in INDEX.read_text().splitlines() if line.startswith("| `")}
    assert listed == {path.stem for path in SCRIPTS if path.parent == INDEX.parent}
