"""The trainer against the formulas of DESIGN §2, computed by transformers' stock model; its metrics; its resume."""

import itertools
import json
import math
import shutil
import signal
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from logged_rows import differences, untimed, untimed_rows
from processes import torchrun
from small_run import first_gradients, signal_after, small_config, small_trainer
from transformers import AutoModelForCausalLM

from sparsellm.data import DataError
from sparsellm.evaluation.perplexity import cross_entropy
from sparsellm.runs import checkpoint, report
from sparsellm.runs.checkpoint import CheckpointError
from sparsellm.runs.folder import is_finished
from sparsellm.runs.layout import STATE, VALUES
from sparsellm.runs.layout import checkpoint as checkpoint_folder
from sparsellm.runs.metrics import KINDS, METRICS, MetricsError, MetricsFile, read
from sparsellm.training import muon
from sparsellm.training.loop import Trainer, TrainingDiverged
from sparsellm.training.optimizer import learning_rate

SMALL_RUN = Path(__file__).parents[1] / "small_run.py"
ROWS = {
    "step", "tokens", "loss", "ce", "l1", "nnz_mean", "nnz_per_layer", "dead_per_layer", "lr", "l1_coefficient",
    "grad_norm", "tokens_per_s", "mfu", "mj_per_token", "peak_memory_bytes", "data_wait_fraction", "wide_segments",
    "rest_calls", "overflow_tiles", "plan_per_layer", "micro_batch_size", "ffn_saved_bytes",
    "val_ce", "val_tokens", "evaluation", "reinitialized_per_layer", "skipped_steps",
}  # fmt: skip


# So few that some neurons fire on one rank only, and some on none.
FEW_TOKENS = ["training.sequence_length=1", "training.batch_size=4"]


def stock(trainer, folder):
    """transformers' model of the trainer's weights, and a list that receives each layer's h [B, T, N]."""
    trainer._export(trainer.decoder.state_dict(), folder / "hf")
    model = AutoModelForCausalLM.from_pretrained(folder / "hf")
    hidden = []
    for layer in model.model.layers:
        layer.mlp.down_proj.register_forward_pre_hook(lambda _module, inputs: hidden.append(inputs[0]))
    return model, hidden


def specified(trainer, folder, coefficient, normalization):
    """(loss, ce, l1, hidden, gradients) of the first global batch as DESIGN §2 writes them."""
    model, hidden = stock(trainer, folder)
    tokens = trainer.data.samples(range(trainer.config.training.batch_size))
    logits = model(tokens[:, :-1]).logits
    ce = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    l1 = sum((h.abs().mean(-1) if normalization == "mean" else h.abs().sum(-1)).mean() for h in hidden)
    l1 = l1 if normalization == "sum" else l1 / len(hidden)
    loss = ce + coefficient * l1
    loss.backward()
    gradients = {name.removeprefix("model."): p.grad for name, p in model.named_parameters()}
    return loss, ce, l1, hidden, gradients


def assert_equal_gradients(ours, theirs, rtol=1e-4):
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=rtol, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("normalization", ["sum", "mean"])
@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["runtime.micro_batch_size=2"],
        ["runtime.micro_batch_size=3"],  # 3 + 3 + 2
        ["runtime.recompute=true", "runtime.micro_batch_size=4"],
        ["model.gated=false", "runtime.micro_batch_size=3"],
    ],
    ids=["whole", "equal", "unequal", "recompute", "nongated"],
)
def test_the_gradient_is_that_of_one_big_batch(overrides, normalization, tmp_path):
    coefficient = 1e-2 if normalization == "sum" else 1.0
    overrides = [*overrides, f"sparsity.l1_normalization={normalization}", f"sparsity.l1_coefficient={coefficient}"]
    with small_trainer(tmp_path / "run", *overrides) as trainer:
        expected = specified(trainer, tmp_path, coefficient, normalization)[-1]
        without = specified(trainer, tmp_path / "0", 0, "sum")[-1]
        assert_equal_gradients(first_gradients(trainer), expected)
    # The L1 term is large enough that losing or miscounting it would show.
    key = "layers.0.mlp.up_proj.weight"
    assert (expected[key] - without[key]).norm() > 0.01 * expected[key].norm()


@pytest.mark.parametrize("normalization", ["sum", "mean", "layer_mean"])
def test_the_gradient_has_the_coefficient_in_force(normalization, tmp_path):
    """The first step's 128 tokens are 64 after the start: a tenth of the warm-up."""
    overrides = ["sparsity.l1_schedule=linear", "sparsity.l1_start_tokens=64", "sparsity.l1_warmup_tokens=640"]
    overrides += [f"sparsity.l1_normalization={normalization}", "sparsity.l1_coefficient=1"]
    with small_trainer(tmp_path / "run", *overrides) as trainer:
        expected = specified(trainer, tmp_path, 0.1, normalization)[-1]
        assert_equal_gradients(first_gradients(trainer), expected)


@pytest.mark.slow
@pytest.mark.parametrize("way", [[], ["planned"]], ids=["traced", "planned"])
@pytest.mark.parametrize("overrides", [[], FEW_TOKENS], ids=["unequal", "few_tokens"])
def test_two_ranks_have_the_gradient_and_the_silent_neurons_of_one_big_batch(overrides, way, tmp_path):
    """Planned layers add their gradients to those of earlier micro-batches themselves."""
    size = 1 if overrides else 3
    torchrun(2, SMALL_RUN, tmp_path / "step.pt", f"runtime.micro_batch_size={size}", *overrides, *way)
    two = torch.load(tmp_path / "step.pt", weights_only=True)
    with small_trainer(tmp_path / "one", *overrides) as trainer:
        assert_equal_gradients(two["gradients"], first_gradients(trainer))
        assert torch.equal(two["silent_tokens"], trainer.silent.tokens)
    assert set(two["silent_tokens"].unique().tolist()) == ({0, 4} if overrides else {0})


@pytest.mark.slow
def test_two_ranks_draw_the_same_rows_and_decide_the_same_plans(tmp_path):
    """Rows of neurons that fired on neither rank; all ranks end with the same weights, moments and counts."""
    draws = ["sparsity.reinit_dead_after_tokens=4", "sparsity.reinit_every=2"]
    torchrun(2, SMALL_RUN.with_name("small_ranks.py"), tmp_path, *FEW_TOKENS, *draws)
    ranks, plans = zip(*(torch.load(tmp_path / f"rank_{rank}.pt", weights_only=True) for rank in (0, 1)), strict=True)
    assert ranks[0].keys() == ranks[1].keys()
    assert [name for name in ranks[0] if not torch.equal(ranks[0][name], ranks[1][name])] == []
    assert (ranks[0]["sparsity.reinitialized"] > 0).all()
    # The decisions of steps 3 and 11, from counts over both; each saw other tokens.
    assert plans[0] == plans[1]
    assert len({str(of_step) for of_step in plans[0]}) == 3


@pytest.mark.slow
def test_rows_hold_the_steps_own_values_over_the_whole_batch(tmp_path):
    with small_trainer(tmp_path / "run", "runtime.micro_batch_size=3") as trainer:
        loss, ce, l1, hidden, gradients = specified(trainer, tmp_path, 1e-2, "sum")
        assert trainer.fit() == 0
    rows = read(tmp_path / "run" / METRICS)
    assert [row["step"] for row in rows] == [1, 3, 4, 6, 8, 9, 12]
    assert {row["step"]: row.keys() ^ ROWS for row in rows if row.keys() != ROWS} == {}
    assert KINDS.keys() >= ROWS
    first = rows[0]
    assert first["tokens"] == 128
    for key, value in {"loss": loss, "ce": ce, "l1": l1}.items():
        assert first[key] == pytest.approx(value.item(), rel=1e-5)
    counts = [(h != 0).sum().item() / 128 for h in hidden]
    assert first["nnz_per_layer"] == counts
    assert first["nnz_mean"] == sum(counts) / 2
    norm = math.sqrt(sum(g.square().sum().item() for g in gradients.values()))
    assert first["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert first["wide_segments"] == first["rest_calls"] == first["overflow_tiles"] == 0
    assert first["plan_per_layer"] == ["torch", "torch"]
    assert first["ffn_saved_bytes"] == 2 * 2 * (3 * 16) * 48 * 4  # g and u of each layer, float32
    assert {row["step"]: row["val_tokens"] for row in rows if row["val_ce"] is not None} == {4: 80, 8: 80, 12: 80}
    assert all((row["val_ce"] is None) == (row["val_tokens"] is None) for row in rows)
    for row in rows:
        assert row["loss"] == pytest.approx(row["ce"] + row["l1_coefficient"] * row["l1"])
        assert row["tokens_per_s"] > 0
        assert 0 <= row["data_wait_fraction"] < 1


def test_validation_is_the_stock_models_loss(tmp_path):
    with small_trainer(tmp_path / "run", "runtime.micro_batch_size=2") as trainer:
        model, _ = stock(trainer, tmp_path)
        blocks = trainer.data.validation
        with torch.no_grad():
            logits = model(blocks[:, :-1]).logits
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), blocks[:, 1:].flatten())
        found = trainer._validate()
    assert found.ce == pytest.approx(expected.item(), rel=1e-6)
    assert found.tokens == 5 * 16


def test_values_that_do_not_exist_are_null(tmp_path):
    with small_trainer(tmp_path / "run", "sparsity=dense_silu", "sparsity.l1_coefficient=0") as trainer:
        assert trainer.fit() == 0
    text = (tmp_path / "run" / METRICS).read_text()
    assert "NaN" not in text
    for row in map(json.loads, text.splitlines()):
        nothing = ("l1", "nnz_mean", "nnz_per_layer", "dead_per_layer", "wide_segments", "rest_calls",
                   "overflow_tiles", "mfu", "peak_memory_bytes",
                   "reinitialized_per_layer", "ffn_saved_bytes", "evaluation")  # fmt: skip
        assert all(row[key] is None for key in nothing)
        assert row["loss"] == row["ce"]


def test_dead_neurons_are_those_silent_for_long_enough(tmp_path):
    """Over the global batch, from firing patterns that the test counts itself."""
    with small_trainer(tmp_path / "run", "sparsity.dead_after_tokens=300", "logging.every=1") as trainer:
        with torch.no_grad():
            trainer.decoder.layers[1].mlp.gate_proj.weight[:5] = 0  # relu(0) never fires, and gets no gradient
        assert trainer.fit() == 0
    dead = [row["dead_per_layer"][1] for row in read(tmp_path / "run" / METRICS)]
    assert dead[:2] == [0, 0]  # 128 and 256 tokens
    assert all(count >= 5 for count in dead[2:])


def fail_from(trainer, steps):
    """Make the loss of the given steps infinite."""
    forward = trainer.decoder.forward

    def broken(tokens, targets):
        out = forward(tokens, targets)
        if trainer.step in steps:
            out = out._replace(ce=out.ce * math.inf)
        return out

    trainer.decoder.forward = broken


@pytest.mark.parametrize("muon", ["false", "true"])
def test_a_non_finite_step_is_skipped_and_counted(muon, tmp_path):
    with small_trainer(tmp_path / "run", f"optimizer.muon={muon}") as trainer:
        fail_from(trainer, {2})
        batches = trainer.data.batches(None)
        trainer.advance(batches)
        before = {name: t.clone() for name, t in trainer.optimizer.state().items()}
        weights = {name: p.detach().clone() for name, p in trainer.decoder.named_parameters()}
        trainer.advance(batches)
        state = trainer.optimizer.state()
        assert all(torch.equal(weights[name], p) for name, p in trainer.decoder.named_parameters())
        assert all(torch.equal(before[name], state[name]) for name in before if not name.startswith("skipped"))
        assert (state["skipped"], state["skipped_in_row"], trainer.step) == (1, 1, 2)
        trainer.advance(batches)
        state = trainer.optimizer.state()
        assert (state["skipped"], state["skipped_in_row"], state["norm.weight.step"]) == (1, 0, 2)
        assert not torch.equal(weights["norm.weight"], trainer.decoder.norm.weight)
        assert trainer.data_state == {"samples": 24}


def test_several_non_finite_steps_in_a_row_stop_the_run(tmp_path):
    with small_trainer(tmp_path / "run", "runtime.max_skipped_steps=4") as trainer:
        fail_from(trainer, range(3, 100))
        with pytest.raises(
            TrainingDiverged, match="4 consecutive steps, up to step 6, were skipped because the cross entropy is"
        ):
            trainer.fit()
    assert read(tmp_path / "run" / METRICS)[1]["loss"] is None


def test_an_l1_loss_that_is_not_finite_is_named_with_its_coefficient(tmp_path):
    with (
        small_trainer(tmp_path / "run", "sparsity.l1_coefficient=1e300", "runtime.max_skipped_steps=2") as trainer,
        pytest.raises(
            TrainingDiverged, match=r"because the (L1 loss|gradient of a finite loss) is .* sparsity.l1_coefficient"
        ),
    ):
        trainer.fit()


def test_no_checkpoint_is_saved_while_steps_are_skipped(tmp_path):
    """The weights before such a row may be broken: they must not push out good checkpoints."""
    with small_trainer(tmp_path / "run", "run.checkpoint_every=2", "run.keep_checkpoints=9") as trainer:
        fail_from(trainer, {4, 5, 6, 8})
        assert trainer.fit() == 0
    saved = sorted(int(p.name.removeprefix("step_")) for p in (tmp_path / "run/checkpoints").iterdir())
    assert saved == [2, 7, 9, 10, 12]


def test_a_run_asked_to_stop_while_steps_are_skipped_goes_on_to_one_that_it_can_save(tmp_path):
    with small_trainer(tmp_path / "run") as trainer:
        signal_after(trainer, 4)
        fail_from(trainer, {7, 8})  # step 6 is logged, and read in step 7
        assert trainer.fit() == 128 + signal.SIGTERM
        assert (trainer.step, trainer.optimizer.skipped) == (9, 2)
    assert [p.name for p in (tmp_path / "run/checkpoints").iterdir()] == ["step_00000009"]


@pytest.mark.slow
def test_a_failed_save_is_said_and_the_next_one_tried(tmp_path, capsys):
    with small_trainer(tmp_path / "run", "run.checkpoint_every=4", "logging.every=1") as trainer:
        export, failures = trainer.checkpoints.export, []

        def fails_once(weights, folder):
            if not failures:
                failures.append(folder)
                raise OSError("No space left on device")
            export(weights, folder)

        trainer.checkpoints.export = fails_once
        assert trainer.fit() == 0
    said = "".join(capsys.readouterr())
    assert "saving step 4" in said
    assert "the disk is full" in said
    assert "GB are free" in said
    saved = sorted(p.name for p in (tmp_path / "run/checkpoints").iterdir())
    assert saved == ["step_00000008", "step_00000012"]


def no_room_for_rows(monkeypatch, trainer, steps):
    """None can be written in `steps`."""
    flush = MetricsFile._flush

    def flushed(self):
        if self.waiting and trainer.step in steps:
            raise OSError(28, "No space left on device")
        flush(self)

    monkeypatch.setattr(MetricsFile, "_flush", flushed)


def test_a_failed_save_gives_back_what_it_took_and_says_how_much_it_wanted(tmp_path, capsys, monkeypatch):
    with small_trainer(tmp_path / "run", "run.checkpoint_every=4", "logging.every=1") as trainer:
        monkeypatch.setattr(checkpoint, "seal", lambda folder, step: (_ for _ in ()).throw(OSError(28, "No space")))
        trainer._resume()
        trainer._open_log()
        trainer.step = 4
        trainer.data_state = {"samples": 32}
        trainer._save()
        trainer.checkpoints.settle()
        assert list((tmp_path / "run/checkpoints").iterdir()) == []
        trainer.log.failed_save(trainer.checkpoints.failure())
        assert "its tensors take 0.2 MB" in capsys.readouterr().err
        with pytest.raises(CheckpointError):
            trainer.checkpoints.wait()


@pytest.mark.slow
def test_rows_wait_for_room_and_a_run_whose_rows_find_none_ends_at_its_checkpoint(tmp_path, capsys, monkeypatch):
    options = ["run.checkpoint_every=4", "logging.every=1"]
    with small_trainer(tmp_path / "run", *options) as trainer:
        no_room_for_rows(monkeypatch, trainer, {2, 3, 6, 7, 8, 9})
        with pytest.raises(MetricsError, match=r"ends at step 8: its rows cannot be written .* GB free\)"):
            trainer.fit()
    said = capsys.readouterr().err
    assert said.count("cannot be written") == 2  # from step 2 on, and from step 6 on
    assert "the row of step 1 cannot be written" in said
    assert [p.name for p in (tmp_path / "run/checkpoints").iterdir()] == ["step_00000004"]
    assert [row["step"] for row in read(tmp_path / "run" / METRICS)] == [1, 2, 3, 4]
    monkeypatch.undo()
    with small_trainer(tmp_path / "run", *options) as trainer:
        assert trainer.fit() == 0
    assert [row["step"] for row in read(tmp_path / "run" / METRICS)] == list(range(1, 13))


@pytest.mark.slow
def test_a_run_whose_rows_are_damaged_does_not_go_on_without_a_word(tmp_path):
    with small_trainer(tmp_path / "run") as trainer:
        signal_after(trainer, 4)
        assert trainer.fit() == 128 + signal.SIGTERM
    path = tmp_path / "run" / METRICS
    whole = path.read_text()
    path.write_text(whole.replace('"step": 3', '"step": 2'))
    with small_trainer(tmp_path / "run") as trainer, pytest.raises(MetricsError, match=f"{path} is damaged"):
        trainer.fit()
    path.write_text(whole)
    with small_trainer(tmp_path / "run") as trainer:
        assert trainer.fit() == 0


def test_steps_before_data_that_does_not_come_are_saved(tmp_path):
    with small_trainer(tmp_path / "run") as trainer:
        batches = trainer.data.batches

        def ending(state):
            yield from itertools.islice(batches(state), 5)
            raise DataError("a data worker was killed")

        trainer.data.batches = ending
        with pytest.raises(DataError, match="was killed"):
            trainer.fit()
    with small_trainer(tmp_path / "run") as trainer:
        trainer._resume()
        assert trainer.step == 5
    with small_trainer(tmp_path / "other") as trainer:  # nothing new to save
        trainer.data.batches = lambda _: (_ for _ in ()).throw(DataError("other tokens"))
        with pytest.raises(DataError, match="other tokens"):
            trainer.fit()
    assert not list((tmp_path / "other").glob("checkpoints/step_*"))


def test_clipping_and_decay_are_torchs(tmp_path):
    """One step of ours equals clip_grad_norm_ and a plain AdamW with decay on matrices only."""
    with small_trainer(tmp_path / "run", "optimizer.grad_clip=0.1") as trainer:
        weights = {name: p.detach().clone().requires_grad_() for name, p in trainer.decoder.named_parameters()}
        config, step = trainer.config.optimizer, trainer.optimizer.step

        def keep_gradients(rate):
            for name, p in trainer.decoder.named_parameters():
                weights[name].grad = p.grad.clone()
            return step(rate)

        trainer.optimizer.step = keep_gradients
        trainer.advance(trainer.data.batches(None))
        torch.nn.utils.clip_grad_norm_(weights.values(), 0.1)
        groups = [
            {"params": [w for w in weights.values() if w.dim() == 2], "weight_decay": config.weight_decay},
            {"params": [w for w in weights.values() if w.dim() == 1], "weight_decay": 0.0},
        ]
        rate = learning_rate(1, 12, config)
        torch.optim.AdamW(groups, lr=rate, betas=(config.beta1, config.beta2), eps=config.eps).step()
        for name, p in trainer.decoder.named_parameters():
            torch.testing.assert_close(p, weights[name], rtol=1e-6, atol=1e-7)


def test_muon_is_torchs(tmp_path, monkeypatch):
    """Up to bfloat16, the layers' matrices take the steps of torch.optim.Muon, one matrix at a time or many."""
    for at_once in (1, 1 << 24):
        monkeypatch.setattr(muon, "AT_ONCE", at_once)
        with small_trainer(tmp_path / str(at_once), "optimizer.muon=true", "optimizer.grad_clip=0.1") as trainer:
            named, config = dict(trainer.decoder.named_parameters()), trainer.config.optimizer
            ours = {name: p for name, p in named.items() if name.startswith("layers.") and p.dim() == 2}
            assert set(ours.values()) == trainer.optimizer.moments.keys()
            theirs = {name: p.detach().clone().requires_grad_() for name, p in ours.items()}
            reference = torch.optim.Muon(
                theirs.values(), weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw"
            )
            step, batches = trainer.optimizer.step, trainer.data.batches(None)

            def both(rate, named=named, theirs=theirs, reference=reference, step=step):
                norm = torch.nn.utils.get_total_norm([p.grad for p in named.values()])
                for name, p in theirs.items():
                    p.grad = named[name].grad / (norm / 0.1).clamp(min=1)
                reference.param_groups[0]["lr"] = rate
                reference.step()
                return step(rate)

            trainer.optimizer.step = both
            before = {name: p.detach().clone() for name, p in theirs.items()}
            trainer.advance(batches)
            trainer.advance(batches)
            for name, p in ours.items():
                moved = (theirs[name] - before[name]).norm()
                assert (p - theirs[name]).norm() < 1e-3 * moved, name


def tensors(trainer):
    return {name: t.clone() for name, t in trainer._tensors(trainer.silent.reduced()).items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["model.gated=false", "runtime.recompute=true", "optimizer.muon=true"],
        ["sparsity.l1_schedule=linear", "sparsity.l1_start_tokens=200", "sparsity.l1_warmup_tokens=1000"],
        [*FEW_TOKENS, "sparsity.reinit_dead_after_tokens=4", "sparsity.reinit_every=2"],
    ],
    ids=["plain", "nongated", "warmup", "reinitialized"],
)
def test_a_resumed_run_goes_on_bit_for_bit(overrides, tmp_path, capsys):
    overrides = [*overrides, "runtime.deterministic=true"]
    with small_trainer(tmp_path / "straight", *overrides) as trainer:
        assert trainer.fit() == 0
        straight = tensors(trainer)
    with small_trainer(tmp_path / "stopped", *overrides) as trainer:
        signal_after(trainer, 4)
        assert trainer.fit() == 128 + signal.SIGTERM
        assert 4 < trainer.step < 12
    assert "to resume, run the same command" in capsys.readouterr().out
    with (tmp_path / "stopped" / METRICS).open("a") as file:
        file.write('{"step": 11, "of a step that": "was lost"}\n{"cut short')
    with small_trainer(tmp_path / "stopped", *overrides) as trainer:
        torch.manual_seed(12345)
        assert trainer.fit() == 0
        resumed = tensors(trainer)
    assert straight.keys() == resumed.keys()
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)
    assert differences(untimed_rows(tmp_path / "stopped"), untimed_rows(tmp_path / "straight")) == []


def ends_at(trainer, step, name="_validate"):
    """Fit, with something that ends the run in the validation of `step`, or in another method."""
    method = getattr(trainer, name)

    def broken(*arguments):
        if trainer.step == step:
            raise KeyError("what ends a run")
        return method(*arguments)

    setattr(trainer, name, broken)
    with pytest.raises(KeyError):
        trainer.fit()


@pytest.fixture
def quick_ending(monkeypatch):
    """Without plots and a sample of the text, which take longer than the steps."""
    monkeypatch.setattr(report, "finish", lambda *_: "")
    monkeypatch.setattr(report, "sample", lambda *_: "")


SAVED_AND_SCORED = ["run.checkpoint_every=4", "run.keep_checkpoints=9", "runtime.deterministic=true"]  # every 4 steps


def said_of(folder, step):
    """The card and values.json of the checkpoint of `step`, without times."""
    path = checkpoint_folder(folder, step)
    values = json.loads((path / STATE / VALUES).read_text()) | {"metrics": None}
    if values["row"] is not None:
        values["row"] = untimed(values["row"])
    return values, (path / "hf/README.md").read_text()


@pytest.mark.usefixtures("quick_ending")
@pytest.mark.parametrize("step", [8, 12])
@pytest.mark.slow
def test_a_validation_that_ends_the_run_costs_no_checkpoint_and_the_resume_does_it(step, tmp_path):
    """As after a kill between the two. Rows, checkpoints and cards equal those of an undisturbed run."""
    with small_trainer(tmp_path / "straight", *SAVED_AND_SCORED) as trainer:
        assert trainer.fit() == 0
        straight = tensors(trainer)
    named = small_config(*SAVED_AND_SCORED, f"run.root={tmp_path}", "run.name=ended")
    with small_trainer(tmp_path / "ended", *SAVED_AND_SCORED) as trainer:
        ends_at(trainer, step)
    assert max((tmp_path / "ended/checkpoints").iterdir()).name == f"step_{step:08d}"
    assert read(tmp_path / "ended" / METRICS)[-1]["step"] == {8: 6, 12: 9}[step]
    assert not is_finished(named.run, named.training.steps)
    with small_trainer(tmp_path / "ended", *SAVED_AND_SCORED) as trainer:
        assert trainer.fit() == 0
        assert all(torch.equal(straight[name], each) for name, each in tensors(trainer).items())
    assert is_finished(named.run, named.training.steps)
    assert differences(untimed_rows(tmp_path / "ended"), untimed_rows(tmp_path / "straight")) == []
    for saved in (4, 8, 12):
        values, card = said_of(tmp_path / "ended", saved)
        assert (values, card) == said_of(tmp_path / "straight", saved)
        assert (values["row"] is None) == (saved == 12)  # which is saved once more, with its row in metrics.jsonl
    assert "held-out | " in card
    assert "(step 12) |" in card


@pytest.mark.usefixtures("quick_ending")
def test_a_row_that_a_run_had_written_after_its_checkpoint_is_there_once(tmp_path, capsys):
    """Also where damage before it leaves only what can be read."""
    overrides = [*SAVED_AND_SCORED, "logging.every=1"]
    path = tmp_path / "run" / METRICS
    for step in (7, 11):
        with small_trainer(tmp_path / "run", *overrides) as trainer:
            ends_at(trainer, step, "_reduce")
        assert [row["step"] for row in read(path)] == list(range(1, step))
    path.write_text(path.read_text().replace('"step": 3,', '"step": 2,'))
    with small_trainer(tmp_path / "run", *overrides, "run.skip_damaged=true") as trainer:
        assert trainer.fit() == 0
    assert [row["step"] for row in read(path)] == [1, 2, *range(4, 13)]
    assert "rows that the resumed run will write again" in capsys.readouterr().err


@pytest.mark.usefixtures("quick_ending")
def test_a_validation_that_a_resume_goes_without_leaves_its_row_without(tmp_path):
    with small_trainer(tmp_path / "run", *SAVED_AND_SCORED) as trainer:
        ends_at(trainer, 8)
    with small_trainer(tmp_path / "run", *SAVED_AND_SCORED, "logging.validation_every=0") as trainer:
        assert trainer.fit() == 0
    rows = {row["step"]: row["val_ce"] for row in read(tmp_path / "run" / METRICS)}
    assert [*rows] == [1, 3, 4, 6, 8, 9, 12]
    assert [step for step, ce in rows.items() if ce is not None] == [4]


@pytest.mark.usefixtures("quick_ending")
def test_data_that_holds_nothing_out_is_trained_on_without_validation(tmp_path):
    with small_trainer(tmp_path / "run") as trainer:
        trainer.data.validation = trainer.data.validation[:0]
        assert trainer.fit() == 0
    rows = {row["step"]: row["val_ce"] for row in read(tmp_path / "run" / METRICS)}
    assert rows == dict.fromkeys([1, 3, 6, 9, 12])


@pytest.mark.usefixtures("quick_ending")
def test_a_checkpoint_that_was_saved_after_its_row_as_before_0_1_0_goes_on(tmp_path):
    with small_trainer(tmp_path / "straight", *SAVED_AND_SCORED) as trainer:
        assert trainer.fit() == 0
    with small_trainer(tmp_path / "run", *SAVED_AND_SCORED) as trainer:
        score, save = trainer._score, trainer.checkpoints.save

        def without_row(step, saved, values, *others):
            save(step, saved, {key: value for key, value in values.items() if key != "row"}, *others)

        def saved_after_it():
            score()
            Trainer._save(trainer)

        trainer._save, trainer._score, trainer.checkpoints.save = lambda: None, saved_after_it, without_row
        trainer.checkpoints.export = trainer._export
        ends_at(trainer, 9, "_reduce")
    with small_trainer(tmp_path / "run", *SAVED_AND_SCORED) as trainer:
        assert trainer.fit() == 0
    assert differences(untimed_rows(tmp_path / "run"), untimed_rows(tmp_path / "straight")) == []


@pytest.mark.slow
def test_a_checkpoint_that_lacks_values_is_refused_by_what_it_lacks(tmp_path):
    with small_trainer(tmp_path / "run") as trainer:
        save = trainer.checkpoints.save
        trainer.checkpoints.save = lambda step, saved, values, *others: save(step, saved, {"step": step}, *others)
        trainer.checkpoints.export = trainer._export
        trainer.fit()
    with small_trainer(tmp_path / "run") as trainer, pytest.raises(CheckpointError, match="lacks metrics, micro_batch"):
        trainer.fit()


@pytest.mark.slow
def test_resume_restores_the_random_state_and_a_finished_run_stays_as_it_is(tmp_path, capsys):
    with small_trainer(tmp_path / "run") as trainer:
        torch.manual_seed(7)
        trainer.fit()
        state = torch.get_rng_state()
    written = (tmp_path / "run" / METRICS).read_bytes()
    with small_trainer(tmp_path / "run") as trainer:
        assert trainer.fit() == 0
        assert torch.equal(torch.get_rng_state(), state)
    assert (tmp_path / "run" / METRICS).read_bytes() == written
    assert "run has a checkpoint at step 12, its last step: nothing is left" in capsys.readouterr().err


@pytest.mark.slow
def test_a_damaged_checkpoint_is_named_and_replaced_only_on_request(tmp_path):
    with small_trainer(tmp_path / "run", "run.checkpoint_every=6") as trainer:
        trainer.fit()
    victim = max((tmp_path / "run/checkpoints/step_00000012/state").glob("*.distcp"))
    damaged = bytearray(victim.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    victim.write_bytes(damaged)
    with small_trainer(tmp_path / "run") as trainer, pytest.raises(CheckpointError, match=victim.name):
        trainer.fit()
    with small_trainer(tmp_path / "run", "run.skip_damaged=true") as trainer:
        assert trainer.fit() == 0
        assert trainer.step == 12


def test_learning_rate():
    config = small_config("optimizer.learning_rate=1", "optimizer.warmup_steps=4").optimizer
    rates = [learning_rate(step, 12, config) for step in range(1, 13)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1]
    assert rates[7] == pytest.approx(0.55)  # half-way through the cosine
    assert rates[-1] == pytest.approx(0.1)
    assert all(a > b for a, b in pairwise(rates[3:]))


def test_the_rate_of_wsd_is_constant_up_to_the_step_before_its_decay():
    wsd = ["optimizer.schedule=wsd", "optimizer.decay_fraction=0.25"]
    config = small_config("optimizer.learning_rate=1", "optimizer.warmup_steps=4", *wsd).optimizer
    rates = [learning_rate(step, 12, config) for step in range(1, 13)]
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, 0.7, 0.4, 0.1])
    assert [learning_rate(step, 100, config) for step in range(1, 10)] == rates[:9]  # the same of a longer run


def test_ranks_without_a_validation_block_add_nothing(tmp_path):
    """Five blocks over eight ranks: the shares of all ranks add up to the whole."""
    with small_trainer(tmp_path / "run") as trainer:
        whole = trainer._validate().ce
        ranks = [replace(trainer.ranks, rank=rank, world_size=8) for rank in range(8)]
        model, blocks, autocast = trainer.decoder, trainer.data.validation, trainer.autocast
        shares = [cross_entropy(model, blocks, 2, autocast, rank) for rank in ranks]
    assert shares[5:] == [0, 0, 0]
    assert sum(shares) == pytest.approx(whole)


def test_a_sample_that_fails_comes_after_the_summary_and_hides_nothing(tmp_path, monkeypatch, capsys):
    def fail(*_):
        raise ValueError("no such\narchitecture")

    monkeypatch.setattr(report, "sample", fail)
    with small_trainer(tmp_path / "run") as trainer:
        assert trainer.fit() == 0
    shown = capsys.readouterr()
    assert "12 steps" in shown.out
    assert "nonzeros per token" in shown.out
    (said,) = (line for line in shown.err.splitlines() if "no text sample" in line)
    assert said.endswith("step_00000012/hf: ValueError: no such architecture")


def test_a_run_whose_folder_was_removed_saves_its_weights_and_ends_with_an_error(tmp_path):
    folder = tmp_path / "run"
    with small_trainer(folder, "run.checkpoint_every=4") as trainer:
        advance = trainer.advance

        def removing(batches):
            if trainer.step == 6:
                trainer.checkpoints.settle()
                shutil.move(folder / "tokenizer", tmp_path)  # which a run has in data/
                shutil.rmtree(folder)
                folder.mkdir()
                shutil.move(tmp_path / "tokenizer", folder)
            return advance(batches)

        trainer.advance = removing
        with pytest.raises(MetricsError, match=r"ends at step 8: .*metrics\.jsonl was removed or replaced during"):
            trainer.fit()
    with small_trainer(folder, "run.checkpoint_every=4", "run.skip_damaged=true") as trainer:
        assert trainer.fit() == 0
    assert next(row["step"] for row in read(folder / METRICS)) == 8  # which is scored once it is saved
