"""TensorBoard files hold the numbers of each row; where the package is missing, a sentence says so."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from sparsellm.config import from_overrides, mistakes
from sparsellm.runs.tensorboard_record import TensorboardRun
from sparsellm.system.packages import PackageMissing

ROW = {"step": 3, "loss": 1.5, "val_ce": None, "nnz_per_layer": [2.0, 4.0], "plan_per_layer": ["tile", "dense"]}
SCALARS = {"step": 3, "loss": 1.5, "nnz_per_layer/00": 2.0, "nnz_per_layer/01": 4.0, "tile_layers": 1}


FAILURES = {
    "full/tensorboard": OSError("No space left on device"),
    "odd/tensorboard": ValueError("a tag\nis odd"),
}


class Writer:
    """What torch's SummaryWriter is used for."""

    def __init__(self, folder, purge_step):
        self.folder, self.purge_step, self.added, self.closed = folder, purge_step, [], False

    def add_scalar(self, *values):
        if self.folder in FAILURES:
            raise FAILURES[self.folder]
        self.added.append(values)

    def flush(self):
        self.flushed = len(self.added)

    def close(self):
        self.closed = True


@pytest.fixture
def stand_in(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))


def test_a_resumed_run_writes_the_numbers_of_its_rows_over_those_of_an_earlier_start(stand_in, tmp_path):
    record = TensorboardRun(tmp_path, 2)
    record.write(ROW)
    record.close()
    assert (record._writer.folder, record._writer.purge_step) == (f"{tmp_path}/tensorboard", 3)
    assert record._writer.added == [(key, value, 3) for key, value in SCALARS.items()]
    assert record._writer.flushed == len(SCALARS)
    assert record._writer.closed


@pytest.mark.parametrize(("folder", "why"), [("full", "No space left on device"), ("odd", "ValueError: a tag is odd")])
def test_a_failure_is_said_once_and_ends_nothing(stand_in, capsys, folder, why):
    record = TensorboardRun(Path(folder), 0)
    for _ in range(3):
        record.write(ROW)
    record.close()
    assert capsys.readouterr().err.count(f"are missing rows ({why}); metrics.jsonl has them all") == 1


def test_without_the_package_a_run_is_refused_with_the_command_that_installs_it(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    (found,) = mistakes(from_overrides(["experiment=smoke", "logging.tensorboard=true"]))
    assert "the package tensorboard is not installed: install it with `pip install tensorboard`" in found
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard")
    with pytest.raises(PackageMissing, match=r"logging\.tensorboard=true needs the package tensorboard"):
        TensorboardRun(tmp_path, 0)


def test_tensorboard_reads_the_files(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    record = TensorboardRun(tmp_path, 0)
    record.write(ROW)
    record.close()
    found = EventAccumulator(str(record.folder)).Reload()
    assert {tag: found.Scalars(tag)[0].value for tag in found.Tags()["scalars"]} == SCALARS
    assert found.Scalars("loss")[0].step == 3
