"""The scripts: most need a GPU to run, and none needs one to be imported."""

import importlib
from pathlib import Path

import pytest

SCRIPTS = sorted(path.stem for path in (Path(__file__).parents[1] / "scripts").glob("*.py"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_finds_what_it_imports(name):
    importlib.import_module(f"scripts.{name}")
