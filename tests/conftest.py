"""Makes processes that tests start in any folder import this checkout, installed or not, and removes the variables of
Weights & Biases from the environment, because they would change results or upload the runs of tests."""

import gc
import os
from collections import Counter
from pathlib import Path

import pytest
from pictures import do_not_draw

_paths = [str(Path(__file__).parents[1]), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
os.environ["PYTHONPATH"] = os.pathsep.join(str(Path(path).resolve()) for path in _paths)
for _name in [name for name in os.environ if name.startswith("WANDB_")]:
    del os.environ[_name]
gc.disable()  # collecting the tests makes millions of objects that stay


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with the files that have most slow tests, so that parallel workers end at about the same time."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])


@pytest.fixture(autouse=True)
def _runs_do_not_draw(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("draws") is None:
        do_not_draw(monkeypatch.setattr)


def pytest_collection_finish() -> None:
    """From now on, garbage is collected again, but not sought among what the collected tests and their imports are."""
    gc.freeze()
    gc.enable()
