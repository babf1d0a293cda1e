"""Which model a checkpoint's name refers to."""

import os
import shutil
from pathlib import Path

import pytest

from sparsellm.runs.layout import ANALYSIS, EVALUATION
from sparsellm.runs.locate import CheckpointNotFound, locate, unreadable

LAST = "checkpoints/step_00000004"


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "tiny")


@pytest.mark.parametrize("name", ["", LAST, f"{LAST}/hf", f"{LAST}/hf/"])
def test_a_run_its_checkpoint_and_its_hf_folder_are_the_same(run, name):
    found = locate(f"{run}/{name}")
    assert (found.model, found.folder) == (f"{run}/{LAST}/hf", run / LAST)
    assert (found.run, found.step) == (run.resolve(), 4)
    assert found.output(EVALUATION) == run / LAST / "evaluation"


def test_an_earlier_checkpoint(run):
    assert locate(str(run / "checkpoints/step_00000002")).step == 2


def test_a_relative_hf_folder(run, monkeypatch):
    monkeypatch.chdir(run / LAST / "hf")
    assert locate(".").run == run.resolve()
    assert locate(".").output(EVALUATION).resolve() == run / LAST / "evaluation"


def test_a_copied_checkpoint_and_a_bare_folder_have_no_run(run, tmp_path):
    copied = shutil.copytree(run / LAST, tmp_path / "step_00000004")
    assert (locate(str(copied)).run, locate(str(copied)).folder) == (None, copied)
    bare = shutil.copytree(run / LAST / "hf", tmp_path / "bare")
    assert (locate(str(bare)).run, locate(str(bare)).output(EVALUATION)) == (None, bare / "evaluation")
    assert locate(str(bare)).identity() == locate(str(run)).identity()  # the same files


def test_a_hub_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = locate("owner/name")
    assert (found.model, found.folder, found.run) == ("owner/name", None, None)
    assert str(found.output(EVALUATION)) == "evaluations/owner--name"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("runs/smoke-3f2a91c1", "did you mean runs/smoke-3f2a91c0? In runs there are smoke-3f2a91c0, tiny"),
        ("runs/smoke", "did you mean runs/smoke-3f2a91c0?"),
        ("runs/nope", "runs has no nope; give a run, .* In runs there are smoke-3f2a91c0, tiny"),
        ("runs/tini/checkpoints", "did you mean runs/tiny/checkpoints?"),
        ("runs/tiny/checkpoints/step_00000005", "did you mean runs/tiny/checkpoints/step_00000004?"),
        ("tiny", "did you mean runs/tiny?"),
        ("other/nope", "other has no nope; give a run"),
        ("checkpoints/step_00000004", "has no checkpoints; give a run"),
        ("./someone/name", "has no someone; give a run"),
        ("a/b/c", "has no a; give a run"),
    ],
)
def test_what_looks_like_a_path_is_one_and_the_closest_is_named(name, said, tmp_path, monkeypatch):
    for folder in ("runs/smoke-3f2a91c0", "runs/tiny/checkpoints/step_00000004", "other"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointNotFound, match=f"checkpoint={name} does not exist: .*{said.replace('?', '[?]')}"):
        locate(name)


def test_a_run_is_no_hub_name_where_there_are_no_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointNotFound, match=f"the working directory, {tmp_path}, has no runs; give a run"):
        locate("runs/nope")


def test_results_go_elsewhere_where_the_checkpoint_cannot_be_written(run, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert str(locate(str(run)).output(EVALUATION)) == "evaluations/tiny-4"
    assert str(locate(str(run)).output(ANALYSIS)) == "analyses/tiny-4"
    assert locate(str(run)).output(ANALYSIS, "~/mine") == Path("~/mine").expanduser()
    bare = shutil.copytree(run / LAST / "hf", tmp_path / "models" / "bare")
    assert str(locate(str(bare)).output(EVALUATION)) == "evaluations/models-bare"


def test_what_is_missing_is_named(run, tmp_path):
    with pytest.raises(CheckpointNotFound, match="does not exist"):
        locate(str(tmp_path / "nothing"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointNotFound, match=r"it should have checkpoints/ \(a run\)"):
        locate(str(tmp_path / "empty"))
    for step in (2, 10, 9):
        (tmp_path / f"empty/checkpoint-{step}").mkdir()
        (tmp_path / f"empty/checkpoint-{step}/config.json").touch()
    with pytest.raises(CheckpointNotFound, match=r"try checkpoint=.*/empty/checkpoint-10$"):
        locate(str(tmp_path / "empty"))
    (run / LAST / "COMMITTED").unlink()
    assert locate(str(run)).step == 2
    with pytest.raises(CheckpointNotFound, match="has no COMMITTED"):
        locate(str(run / LAST))
    (run / "checkpoints/step_00000002/COMMITTED").unlink()
    with pytest.raises(CheckpointNotFound, match="without a complete checkpoint"):
        locate(str(run))


def test_a_damaged_checkpoint_is_refused_by_file(run):
    weights = run / LAST / "hf/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\xff")
    with pytest.raises(CheckpointNotFound, match=r"is damaged: hf/model\.safetensors has checksum"):
        locate(str(run)).identity()


@pytest.mark.parametrize("name", ["", "hf"])
def test_a_checkpoint_without_its_run_has_its_checksums_all_the_same(run, tmp_path, name):
    alone = shutil.copytree(run / LAST, tmp_path / "alone")
    found = locate(str(alone / name))
    assert found.unchecked is None
    assert found.identity() == locate(str(run)).identity()
    weights = alone / "hf/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x00")
    with pytest.raises(CheckpointNotFound, match=r"is damaged: hf/model\.safetensors has checksum"):
        found.identity()
    (alone / "COMMITTED").write_text('{"step": 4, "files": []}')
    with pytest.raises(CheckpointNotFound, match=r"is damaged: COMMITTED cannot be read"):
        found.identity()


def test_of_a_folder_without_checksums_that_is_said(run, bare):
    assert locate(str(run)).unchecked is None
    assert locate("owner/name").unchecked is None
    assert locate(str(bare)).unchecked == (
        f"{bare} has no COMMITTED file: its files are not verified against checksums"
    )


def test_a_checkpoint_that_its_run_deletes_meanwhile_is_called_gone(run):
    found = locate(str(run))
    shutil.rmtree(run / LAST)
    said = unreadable(found, FileNotFoundError("hf"))
    assert f"{LAST} is gone: " in said
    assert f"Run the command again with checkpoint={run}" in said
