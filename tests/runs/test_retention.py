"""Which steps are saved and which checkpoints are kept, consistently for the run and its disk space check."""

import itertools

import pytest
from small_run import small_config, small_trainer

from sparsellm.runs.retention import Retention, last_common_step


def retention(steps, every, keep, keep_every, wsd):
    overrides = [f"training.steps={steps}", f"run.checkpoint_every={every}", f"run.keep_checkpoints={keep}"]
    schedule = ["optimizer.schedule=wsd", "optimizer.decay_fraction=0.3"] if wsd else []
    config = small_config(*overrides, f"run.keep_every={keep_every}", *schedule)
    return Retention(config.run, steps, last_common_step(config.training, config.optimizer, config.sparsity))


def test_the_newest_the_milestones_and_the_one_before_the_decay_stay(tmp_path):
    overrides = ["run.checkpoint_every=2", "run.keep_checkpoints=1", "run.keep_every=5"]
    with small_trainer(tmp_path, *overrides, "optimizer.schedule=wsd", "optimizer.decay_fraction=0.4") as trainer:
        assert trainer.fit() == 0
    # 12 steps, of which the last 5 decay: 7 is between the milestones 5 and 10, and no multiple of 2 stays but 12.
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        f"step_{step:08}" for step in (5, 7, 10, 12)
    ]


def test_a_milestone_that_came_late_stays_and_one_of_a_run_without_them_goes():
    assert retention(100, 2, 1, 10, False).for_good([8, 11, 12, 20, 22, 28]) == {11, 20}
    assert retention(100, 2, 1, 0, False).for_good([8, 11, 12]) == set()
    assert retention(100, 2, 1, 0, True).for_good([8, 69, 72, 80]) == {69}  # the save of step 70 had to wait


@pytest.mark.parametrize("wsd", [False, True])
def test_the_most_checkpoints_at_once_are_those_that_a_run_has(wsd):
    """Against saving and removing step by step, from every step that a run can be resumed from."""
    for every, keep, keep_every in itertools.product((2, 3, 30), (1, 2, 4), (0, 3, 4, 7, 9)):
        rule = retention(20, every, keep, keep_every, wsd)
        there, counts = [], []
        states = [(0, [])]
        for step in range(1, 21):
            if rule.is_due(step):
                there.append(step)
                counts.append((step, len(there)))
                there = sorted({*there[-keep:], *rule.for_good(there)})
                states.append((step, list(there)))
        for last, then in states:
            most = max((count for step, count in counts if step > last), default=len(then))
            assert rule.most_at_once(then) == max(most, len(then)), (every, keep, keep_every, last, then)


def test_a_run_that_keeps_every_checkpoint_is_counted_as_well():
    assert retention(300_000, 1, 2, 1, True).most_at_once([]) == 300_000
