"""A run's small files with one bit of every byte flipped: each damage is named, or changes nothing.

Each test prints how many attacks were tried, held and failed. An attack holds if the answer is a sentence that names
the file, or if all that is read from the file is what was written.
"""

import json
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO

import pytest
from small_run import small_config, small_trainer

from sparsellm.config import definition, load, save
from sparsellm.run_layout import COMMITTED, STATE, VALUES
from sparsellm.training import report, run_folder
from sparsellm.training.checkpoint import CheckpointError
from sparsellm.training.metrics import IN_EVERY_ROW, METRICS, MetricsError, MetricsFile, Saved, history
from sparsellm.training.wandb_record import record_id

STEPS = 12


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(configuration, folder) of a finished run."""
    root = tmp_path_factory.mktemp("runs")
    config = small_config(f"run.root={root}", "run.name=r", "run.checkpoint_every=6")
    with redirect_stdout(StringIO()), small_trainer(root / "r", "run.root=" + str(root), "run.checkpoint_every=6") as t:
        assert t.fit() == 0
    save(config, root / "r" / run_folder.CONFIG)
    return config, root / "r"


def flipped(path):
    """(position, content) for every byte of `path`, with one of its bits flipped: another one at the next byte."""
    whole = path.read_bytes()
    for position in range(len(whole)):
        content = bytearray(whole)
        content[position] ^= 1 << position % 8
        yield position, bytes(content)


def attack(path, holds):
    """Flip bits of `path`; `holds(position)` says whether the answer is right. Nothing may be raised."""
    whole, failed, tried = path.read_bytes(), [], 0
    try:
        for position, content in flipped(path):
            tried += 1
            path.write_bytes(content)
            try:
                right = holds(position)
            except Exception as error:
                right = None
                failed.append(f"byte {position}: {type(error).__name__}: {error}")
            if right is False:
                failed.append(f"byte {position}: {content[max(0, position - 20) : position + 20]}")
    finally:
        path.write_bytes(whole)
    print(f"{path.name}: tried {tried}, held {tried - len(failed)}, failed {len(failed)}")
    assert tried > 0
    assert failed == []


def test_every_byte_of_the_configuration(run):
    config, folder = run
    path, before = folder / run_folder.CONFIG, definition(config)

    def holds(_position):
        found = run_folder.mistakes(config)
        return all(str(path) in each for each in found) if found else definition(load(path)) == before

    assert run_folder.mistakes(config) == []
    attack(path, holds)


def test_every_byte_of_the_rows(run):
    config, folder = run
    path = folder / METRICS
    saved = Saved(**json.loads((run_folder.checkpoint(folder, STEPS) / STATE / VALUES).read_text())["metrics"])
    assert history(path, saved, IN_EVERY_ROW, 2).problems == []

    def holds(position):
        found = history(path, saved, IN_EVERY_ROW, config.model.num_layers)
        if not found.problems or str(path) not in found.report(path):
            return False
        if found.rows:
            report.summary(config, found.rows, folder)
        if position % 97 == 0:
            with redirect_stderr(StringIO()):
                assert "is damaged" in report.finish(config, folder)
        try:
            MetricsFile(path, STEPS, saved)
        except MetricsError as error:
            return str(path) in str(error) and "run.skip_damaged=true" in str(error)
        return False

    attack(path, holds)


def test_every_byte_of_the_commit(run):
    config, folder = run
    committed = run_folder.checkpoint(folder, STEPS) / COMMITTED

    with small_trainer(folder) as trainer:

        def holds(_position):
            run_folder.is_finished(config)
            try:
                trainer.checkpoints.find(skip_damaged=False)
            except CheckpointError as error:
                return str(committed.parent) in str(error)
            return False

        assert trainer.checkpoints.find(skip_damaged=False) == STEPS
        attack(committed, holds)


@pytest.mark.parametrize("content", ["", "[]", "{}", "null", "3", '"x"', "\0" * 20, "[" * 100_000, '{"step": 12}'])
def test_a_commit_that_is_none(run, content):
    config, folder = run
    committed = run_folder.checkpoint(folder, STEPS) / COMMITTED
    whole = committed.read_text()
    committed.write_text(content)
    try:
        assert not run_folder.is_finished(config)
        with small_trainer(folder) as trainer, pytest.raises(CheckpointError, match=f"{committed.parent} is damaged"):
            trainer.checkpoints.find(skip_damaged=False)
    finally:
        committed.write_text(whole)


def test_every_byte_of_the_records_name(run):
    _, folder = run
    path = folder / "wandb" / "id"
    name = record_id(folder)

    def holds(_position):
        said = StringIO()
        with redirect_stderr(said):
            found = record_id(folder)
        return found == name or (str(path) in said.getvalue() and found in said.getvalue())

    attack(path, holds)


@pytest.mark.parametrize(
    "content",
    [b"", b"\0" * 300, b"\xff\xfe", b"- a\n- b\n", b"3", b"null", b"{", b"model: 3\n", b"model: [1]\n", b"a: b: c\n",
     b"runtime:\n  precision: float7\n", b"training: null\n", b"1: 2\n",
     b"&a [*a]"],
)  # fmt: skip
def test_a_configuration_that_is_none(run, content):
    config, folder = run
    path = folder / run_folder.CONFIG
    whole = path.read_bytes()
    path.write_bytes(content)
    try:
        (found,) = run_folder.mistakes(config)
        assert str(path) in found
        assert "was begun with" not in found
    finally:
        path.write_bytes(whole)
