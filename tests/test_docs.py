"""The site that `make docs` builds from mkdocs.yml: what it names exists, and nothing is left out. Needs no mkdocs."""

import importlib
import re
from pathlib import Path

import yaml

import sparsellm

ROOT = Path(__file__).parents[1]
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
NAMED = re.findall(r"^::: (\S+)$", (ROOT / "docs/API.md").read_text(), re.M)


def pages(entry) -> list[str]:
    """The files of a navigation entry, in order."""
    if isinstance(entry, str):
        return [entry]
    return [page for each in (entry.values() if isinstance(entry, dict) else entry) for page in pages(each)]


def test_the_navigation_has_every_document_once():
    documents = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    assert sorted(pages(SITE["nav"])) == sorted(documents)


def test_what_the_reference_names_exists_and_has_a_docstring():
    for name in NAMED:
        module, _, attribute = name.rpartition(".")
        assert getattr(importlib.import_module(module), attribute).__doc__, name


def test_the_reference_has_all_that_the_package_offers():
    offered = {getattr(sparsellm, name) for name in sparsellm.__all__ if name != "__version__"}
    named = {getattr(importlib.import_module(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in NAMED}
    assert offered <= named


def test_the_site_is_built_into_an_ignored_folder():
    folder = SITE["site_dir"].split("/")[0]
    assert f"{folder}/" in (ROOT / ".gitignore").read_text().splitlines()
