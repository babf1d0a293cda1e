"""A finished run is extended: from before the decay of optimizer.schedule=wsd, and never with a cosine schedule."""

from pathlib import Path

import pytest
import torch
import whole_config
from logged_rows import differences, untimed_rows
from small_run import OVERRIDES, RandomTokens, small_config

from sparsellm.config import from_overrides, load
from sparsellm.distributed.groups import process_group
from sparsellm.runs import folder as run_folder
from sparsellm.training.loop import Trainer

WSD = ["optimizer.schedule=wsd", "optimizer.decay_fraction=0.25", "run.keep_checkpoints=1", "run.checkpoint_every=2"]


def trained(root: Path, *overrides: str) -> dict[str, torch.Tensor]:
    """The state in which a run of these overrides, in `root`/r, ends."""
    config = small_config(f"run.root={root}", "run.name=r", *overrides)
    assert run_folder.mistakes(config) == []
    with process_group("cpu") as ranks, run_folder.open_folder(config, ranks) as (opened, folder):
        trainer = Trainer(opened, ranks, RandomTokens(opened, 0, 1, root), folder)
        assert trainer.fit() == 0
        assert trainer.step == config.training.steps
        return {name: tensor.clone() for name, tensor in trainer._tensors(trainer.silent.tokens).items()}


@pytest.mark.slow
def test_a_run_made_longer_ends_as_one_that_was_to_be_that_long(tmp_path, capsys):
    """It resumes from step 9 of 12, although run.checkpoint_every saves step 8, and step 12 is the last checkpoint."""
    short = trained(tmp_path / "a", *WSD)
    longer = trained(tmp_path / "a", *WSD, "training.steps=20")
    whole = trained(tmp_path / "b", *WSD, "training.steps=20")
    assert [name for name in whole if not torch.equal(longer[name], whole[name])] == []
    assert any(not torch.equal(short[name], whole[name]) for name in whole)
    assert differences(untimed_rows(tmp_path / "a/r"), untimed_rows(tmp_path / "b/r")) == []
    said = capsys.readouterr()
    assert "resuming after step 9" in said.out
    assert "r is extended from 12 to 20 steps" in said.err
    # The decay's checkpoints are renamed, not lost.
    names = sorted(path.name for path in (tmp_path / "a/r/checkpoints").iterdir())
    assert names == ["step_00000012.decayed", "step_00000015", "step_00000020"]


@pytest.mark.slow
def test_it_goes_on_from_before_the_tokens_in_which_no_row_is_drawn_where_these_begin_before_the_decay(tmp_path):
    """There are 12 steps: no row is drawn in the last 5, and the learning rate decays in the last 3."""
    drawing = ["sparsity.reinit_dead_after_tokens=640", "sparsity.reinit_every=1", "run.checkpoint_every=100"]
    dying = ["sparsity.l1_coefficient=10", "optimizer.learning_rate=3e-2", "model.init_std=0.02"]
    trained(tmp_path / "a", *WSD, *drawing, *dying)
    longer = trained(tmp_path / "a", *WSD, *drawing, *dying, "training.steps=20")
    whole = trained(tmp_path / "b", *WSD, *drawing, *dying, "training.steps=20")
    assert [name for name in whole if not torch.equal(longer[name], whole[name])] == []
    assert {path.name for path in (tmp_path / "a/r/checkpoints").iterdir()} >= {"step_00000012.decayed"}
    drawn = {row["step"]: sum(row["reinitialized_per_layer"]) for row in untimed_rows(tmp_path / "b/r")}
    assert drawn[6] < drawn[9]  # in steps in which the shorter run drew none


def test_the_warm_up_stays_where_a_longer_run_would_have_another(tmp_path):
    untyped = [override for override in OVERRIDES if "warmup" not in override]
    named = [*untyped, *WSD, f"run.root={tmp_path}", "run.name=r"]
    for steps, warmup in ((30, 3), (60, 6)):
        config = from_overrides([*named, f"training.steps={steps}"])
        assert config.optimizer.warmup_steps == warmup
        with process_group("cpu") as ranks, run_folder.open_folder(config, ranks) as (opened, folder):
            assert opened.optimizer.warmup_steps == load(folder / run_folder.CONFIG).optimizer.warmup_steps == 3
        assert run_folder.mistakes(config, named) == []  # also when it is resumed
    (found,) = run_folder.mistakes(config, [*named, "optimizer.warmup_steps=6"])
    assert "optimizer.warmup_steps is 6, but run r was started with 3" in found


@pytest.mark.parametrize(
    ("begun", "asked", "message"),
    [
        ([], [], "started with 12 and a cosine schedule, whose learning rate"),
        (WSD, ["run.checkpoint_every=2"], "started with 12 and optimizer.schedule=wsd; type it again to make the"),
    ],
)
def test_more_steps_are_refused_by_the_schedule_that_the_run_has_and_not_by_their_warm_up(
    begun, asked, message, tmp_path
):
    named = [*(each for each in OVERRIDES if "warmup" not in each), f"run.root={tmp_path}", "run.name=r"]
    with process_group("cpu") as ranks, run_folder.open_folder(from_overrides([*named, *begun]), ranks):
        pass
    longer = [*named, *asked, "training.steps=60"]
    found = run_folder.mistakes(from_overrides(longer), longer)
    assert any(message in each for each in found), found
    assert not any("warmup_steps" in each for each in found), found


@pytest.mark.parametrize(
    ("begun", "asked", "message"),
    [
        ([], ["training.steps=20"], "started with 12 and a cosine schedule, whose learning rate"),
        (WSD, ["training.steps=11"], "training.steps is 11, but run r was started with 12:"),
        (WSD, ["training.steps=20", "training.seed=3"], "training.seed is 3, but run r was started with 0:"),
        (WSD, ["training.steps=20", "optimizer.decay_fraction=0.5"], "optimizer.decay_fraction is 0.5, but"),
        ([], WSD, "optimizer.schedule is 'wsd', but run r was started with 'cosine':"),
    ],
)
def test_what_cannot_be_made_longer_is_refused(begun, asked, message, tmp_path):
    where = [f"run.root={tmp_path}", "run.name=r"]
    with process_group("cpu") as ranks, run_folder.open_folder(small_config(*where, *begun), ranks):
        pass
    found = run_folder.mistakes(small_config(*where, *(begun if asked != WSD else []), *asked))
    assert any(message in each for each in found), found


def test_a_run_without_a_checkpoint_from_before_its_decay_is_refused(tmp_path):
    where = [f"run.root={tmp_path}", "run.name=r", *WSD]
    config, longer = small_config(*where), small_config(*where, "training.steps=20")
    with process_group("cpu") as ranks, run_folder.open_folder(config, ranks) as (_, folder):
        assert run_folder.mistakes(longer) == []  # it has none at all: it begins
        again = small_config(*where, "training.steps=20", "data.max_tokens=99")
        assert run_folder.mistakes(again) == []  # the tokens that there are, again
        (folder / "checkpoints/step_00000012").mkdir(parents=True)
    (found,) = run_folder.mistakes(longer)
    assert "no checkpoint up to step 9, the last step that it shares" in found


def test_room_is_asked_for_as_if_the_decay_were_not_there(tmp_path, monkeypatch):
    where = [f"run.root={tmp_path}", "run.name=r", *WSD]
    with process_group("cpu") as ranks, run_folder.open_folder(small_config(*where), ranks) as (_, folder):
        for step in (9, 12):
            (folder / f"checkpoints/step_{step:08}").mkdir(parents=True)
    monkeypatch.setattr(run_folder.shutil, "disk_usage", lambda _: type("usage", (), {"free": 0}))
    (found,) = whole_config.room_mistakes(small_config(*where, "training.steps=20"))
    assert "needs space for 2 more checkpoints" in found  # 15, 18 and 20 at once; 9 is gone by then
