"""A run whose loss diverges says so, and with training.stop_on_divergence=true ends with its checkpoint."""

import pytest
from logged_rows import differences, untimed_rows
from small_run import signal_after, small_trainer

from sparsellm.runs import report
from sparsellm.runs.curves import Curves
from sparsellm.runs.wandb_record import WandbRun
from sparsellm.training.loop import TrainingDiverged

# The learning rate grows for eight steps until it destroys the model.
DIVERGING = [
    "optimizer.learning_rate=30", "optimizer.warmup_steps=8", "training.steps=16", "logging.every=1",
    "runtime.compile=false", "logging.validation_every=0", "sparsity.l1_coefficient=0", "runtime.deterministic=true",
]  # fmt: skip
STOPPING = [*DIVERGING, "training.stop_on_divergence=true"]


@pytest.fixture(autouse=True)
def alerts(monkeypatch):
    """The alerts that are sent. No curves are drawn and no sample is written, which would take most of the time."""
    sent = []
    monkeypatch.setattr(WandbRun, "alert", lambda _, title, text: sent.append((title, text)))
    monkeypatch.setattr(Curves, "draw", lambda *_: {})
    monkeypatch.setattr(report, "sample", lambda *_: "")
    return sent


def test_a_diverging_run_is_named_and_stops_only_if_asked(tmp_path, capsys, alerts):
    with small_trainer(tmp_path / "whole", *DIVERGING) as trainer:
        assert trainer.fit() == 0
    shown = capsys.readouterr()
    (line,) = (line for line in shown.err.splitlines() if "diverges" in line)
    (exit_step,) = trainer.loss_range.exits
    assert line.startswith(f"sparsellm: the loss diverges at step {exit_step}: the cross entropy is ")
    assert "Training continues; training.stop_on_divergence=true would end it" in line
    assert f"  diverged            at step {exit_step}: the cross entropy is " in shown.out
    ((title, text),) = alerts
    assert title == "The loss diverges"
    assert text in line

    with small_trainer(tmp_path / "run", *STOPPING) as trainer:
        signal_after(trainer, 2)
        assert trainer.fit() == 143
    with small_trainer(tmp_path / "run", *STOPPING) as trainer:  # the rows before the resume count too
        assert trainer.fit() == 1
        assert trainer.loss_range.exits == [exit_step]
        assert exit_step <= trainer.step <= exit_step + 1
    assert [row["step"] for row in untimed_rows(tmp_path / "run")] == list(range(1, trainer.step + 1))
    assert (tmp_path / f"run/checkpoints/step_{trainer.step:08}/COMMITTED").exists()
    shown = capsys.readouterr()
    assert "The run ends with a checkpoint" in shown.err
    assert f"ended after step {trainer.step}, because its loss diverges" in shown.out
    with small_trainer(tmp_path / "run", *STOPPING) as trainer:
        refused = rf"diverged at step {exit_step}: .* use training\.stop_on_divergence=false"
        with pytest.raises(TrainingDiverged, match=refused):
            trainer.fit()
    with small_trainer(tmp_path / "run", *DIVERGING) as trainer:
        assert trainer.fit() == 0
    assert differences(untimed_rows(tmp_path / "run"), untimed_rows(tmp_path / "whole")) == []
    assert len(alerts) == 2
