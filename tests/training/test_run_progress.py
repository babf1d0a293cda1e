"""The output of a run: an overview, a line per logged step, and the remaining time."""

import io
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from small_run import signal_after, small_config, small_trainer

from sparsellm.runs import report, wandb_record
from sparsellm.training import loop
from sparsellm.training.progress import Pace, Progress, duration, line


def row(step, **values):
    return {
        "step": step, "loss": 2.5, "ce": 2.25, "l1": 3.0, "nnz_mean": 12.5, "tokens_per_s": 74_000.0, "val_ce": None,
        "evaluation": None,
    } | values  # fmt: skip


class Clock(SimpleNamespace):
    def seconds(self):
        return self.took


class Terminal(io.StringIO):
    def isatty(self):
        return True


def told(terminal, monkeypatch):
    """The output of a run of 40 steps from step 10 on, whose first step takes a minute and the others 2 s."""
    stream = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    shown = Progress("name", 10, 40, 1_000)
    for step in range(11, 41):
        shown.step(step, Clock(took=60 if step == 11 else 2))
        if step in (11, 20, 40):
            shown.row(row(step, val_ce=2.375 if step == 20 else None))
    shown.close()
    return stream.getvalue()


def lines_of(text):
    """Without the bar: what a terminal keeps."""
    pieces = text.replace("\r", "\n").splitlines()
    return [piece.rstrip() for piece in pieces if piece.strip() and not piece.startswith("name")]


def test_a_log_file_has_a_line_for_every_logged_step_however_fast_they_come(monkeypatch):
    lines = lines_of(told(False, monkeypatch))
    assert lines[0] == "step 11/40  loss  2.500  ce  2.250  nonzeros    12.5     74,000 tokens/s"
    assert lines[1] == "about 52 s left, 500 tokens/s"  # the first step, which compiles, is not counted
    assert lines[2].startswith("step 20/40")
    assert " left  held-out  2.375" in lines[2]
    assert lines[3].startswith("step 40/40")
    assert len(lines) == 4


def test_a_terminal_keeps_the_same_lines_above_one_bar(monkeypatch):
    text = told(True, monkeypatch)
    assert lines_of(text) == lines_of(told(False, monkeypatch))
    assert re.search(r"name   50% \S+ +step 20/40  \d+ s left", text)  # the bar
    assert text.count("\n") == len(lines_of(text))  # the bar never takes a separate line


def test_scores_stand_on_a_line_of_their_own(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    Progress("name", 0, 1_000, 1).row(row(20, evaluation={"piqa": 0.5, "hellaswag": None, "mean": None}))
    assert lines_of(sys.stderr.getvalue())[1] == "step    20/1,000  accuracy  piqa 0.5000  hellaswag -  mean -"


def test_a_line_leaves_out_what_does_not_exist():
    silu = row(5, l1=None, nnz_mean=None, val_ce=2.25)
    assert line(silu, 40, 8.0) == "step  5/40  loss  2.500     74,000 tokens/s         8 s left  held-out  2.250"
    assert "loss not finite" in line(row(5, loss=None), 40, None)
    assert "nonzeros    12.5  kl  0.125  " in line(row(5, distill_kl=0.125), 40, None)


def test_the_pace_is_that_of_the_later_half_with_all_that_happens_between_steps():
    pace = Pace()
    assert pace.left(100) is None
    pace.mark(1, 0.0)
    assert pace.left(100) is None
    for step, now in ((10, 90.0), (20, 110.0), (30, 130.0), (40, 170.0)):  # slow at first; 20 s of validation at last
        pace.mark(step, now)
    assert pace.left(100) == pytest.approx(100 * 60 / 20)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.2, "0 s"), (59.7, "1 min 0 s"), (200, "3 min 20 s"), (3570, "1 h 0 min"), (4800, "1 h 20 min"),
     (86_400 * 3 + 14_000, "3 d 4 h")],
)  # fmt: skip
def test_durations(seconds, words):
    assert duration(seconds) == words


def test_a_run_says_what_it_is_before_its_first_step_and_what_a_resume_goes_on_with(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    options = ["runtime.compile=false", "run.name=tiny", "data.name=random", f"data.path={tmp_path}/tokens"]
    with small_trainer(tmp_path / "tiny", *options) as trainer:
        trainer.data.training_tokens = 1_000
        signal_after(trainer, 4)
        trainer.fit()
    parameters = sum(p.numel() for p in trainer.decoder.parameters())
    opening = [
        "tiny: 12 steps of 128 tokens, 1,536 in all",
        "  device              1 x CPU, 2 threads; float32, feedforward layers in PyTorch",
        f"  model               {parameters:,} parameters, 2 layers of 48 neurons, relu, L1 0.01 (`sum`)",
        f"  data                random in {tmp_path}/tokens: 1,000 training tokens, read 1.5 times",
        f"  folder              {tmp_path}/tiny",
        "  micro-batch         8 of 8 sequences",
        "  Weights & Biases    disabled",
    ]
    assert capsys.readouterr().out.splitlines()[:7] == opening
    with small_trainer(tmp_path / "tiny", *options, "sparsity.l1_coefficient=1e-2") as trainer:
        trainer.fit()
    shown = capsys.readouterr()
    assert shown.out.startswith("tiny: resuming after step ")
    assert shown.out.splitlines()[1:3] == opening[:2]
    assert "tokenized while training" in shown.out
    assert "held-out" in shown.err


def test_the_summary_says_over_how_many_tokens_the_held_out_loss_is(tmp_path, capsys):
    with small_trainer(tmp_path / "run", "runtime.compile=false", "logging.validation_samples=3") as trainer:
        trainer.data.validation = trainer.data.validation[:3]
        assert trainer.fit() == 0
    summary = capsys.readouterr().out
    assert "(cross entropy of 48 tokens; under 20,000 tokens, small" in summary
    assert "wandb sync" not in summary  # nothing is offline
    again = report.finish(trainer.config, tmp_path / "run")  # of a finished run
    assert again.splitlines()[1:] == summary.splitlines()[-len(again.splitlines()) : -1]


@pytest.mark.parametrize("stopped", [True, False])
def test_where_a_record_is_offline_the_end_names_the_command_that_uploads_it(stopped, tmp_path, capsys, monkeypatch):
    """And at the end, not when stopped, the pictures are in the record."""
    kept = []

    class Record:
        status = "offline"

        def __init__(self, _config, folder):
            (folder / "wandb/offline-run-1").mkdir(parents=True)
            (folder / "wandb/offline-run-1/run-1.wandb").touch()

        def write(self, _row):
            pass

        def figures(self, step, files):
            kept.append((step, [path.name for path in files]))

        def close(self, exit_code):
            kept.append(exit_code)

    monkeypatch.setattr(loop, "WandbRun", Record)
    monkeypatch.setattr(wandb_record.shutil, "which", lambda _: "wandb")
    with small_trainer(tmp_path / "run", "runtime.compile=false") as trainer:
        if stopped:
            signal_after(trainer, 4)
        assert trainer.fit() == (143 if stopped else 0)
    out = capsys.readouterr().out
    assert "  Weights & Biases    offline\n" in out
    assert out.count(f"  Weights & Biases    to upload: wandb sync {tmp_path}/run/wandb\n") == 1
    assert kept == ([143] if stopped else [(12, ["loss.png", "nonzeros.png", "training.png"]), 0])


def test_an_opening_of_a_dense_model_names_no_coefficient(tmp_path):
    config = small_config("sparsity=dense_silu", "sparsity.l1_coefficient=0", "run.name=dense", "data.path=tokens")
    ranks = SimpleNamespace(world_size=2, device=torch.device("cpu"))
    text = report.opening(config, ranks, 1_234, "in PyTorch", 5_000, tmp_path)
    assert "1,234 parameters, 2 layers of 48 neurons, silu\n" in text
    assert "2 x CPU" in text
    assert "5,000 training tokens\n" in text
