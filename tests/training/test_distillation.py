"""Distillation: the chunked loss, the gradient of a step, and the rows of a run."""

import shutil
import signal

import pytest
import torch
import torch.nn.functional as F
from hf.small_families import stock_model
from processes import joined
from small_run import RandomTokens, first_gradients, signal_after, small_config, small_trainer
from training.test_sharding import on_ranks, wholes

from sparsellm.config import Config, ConfigError
from sparsellm.model import cross_entropy
from sparsellm.model.cross_entropy import TeacherOutput, distilled_cross_entropy, distilled_softmax_cross_entropy
from sparsellm.runs.metrics import METRICS, read
from sparsellm.training import distillation
from sparsellm.training.distillation import Teacher
from sparsellm.training.loop import Trainer, TrainingDiverged

WEIGHT, TEMPERATURE = 0.7, 2.5
BFLOAT16 = "runtime.precision=bfloat16"


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A SiLU model of another shape than the small run's, and of its vocabulary."""
    folder = tmp_path_factory.mktemp("teacher")
    stock_model("llama3").save_pretrained(folder)
    return folder


def overrides(teacher, *more):
    return [f"distill.teacher={teacher}", f"distill.weight={WEIGHT}", f"distill.temperature={TEMPERATURE}", *more]


def whole_kl(student, teacher):
    """torch's KL divergence of logits [M, V], summed over M."""
    ours, theirs = (F.log_softmax(logits / TEMPERATURE, -1) for logits in (student, teacher))
    return F.kl_div(ours, theirs, reduction="sum", log_target=True)


def test_sums_and_gradients_equal_those_on_whole_logits_of_which_a_chunk_exists_at_a_time(monkeypatch):
    monkeypatch.setattr(cross_entropy, "CHUNK", 7)
    generator, largest = torch.Generator().manual_seed(0), 0
    shapes = (20, 16), (33, 16), (20, 24), (33, 24)
    x, weight, hidden, head = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    targets = torch.randint(33, (20,), generator=generator)
    leaves = [x.requires_grad_(), weight.requires_grad_()]

    def kernel(logits, targets, theirs, *constants):
        nonlocal largest
        largest = max(largest, len(logits), len(theirs))
        return distilled_softmax_cross_entropy(logits, targets, theirs, *constants)

    loss, ce, kl = distilled_cross_entropy(x, weight, targets, TeacherOutput(hidden, head, WEIGHT, TEMPERATURE), kernel)
    logits = x @ weight.T
    expected = F.cross_entropy(logits, targets, reduction="sum"), whole_kl(logits, hidden @ head.T)
    whole = expected[0] + WEIGHT * TEMPERATURE**2 * expected[1]
    torch.testing.assert_close((loss, ce, kl), (whole, *expected))
    assert not ce.requires_grad
    assert not kl.requires_grad
    ours, theirs = (torch.autograd.grad(3 * each, leaves) for each in (loss, whole))
    torch.testing.assert_close(ours, theirs)
    assert largest == 7


def expected_step(trainer):
    """(the sum of KL, the gradients) of the first step, from whole logits: the student's and those of transformers'
    teacher."""
    tokens = next(trainer.data.batches(None))[0]
    inputs, targets = tokens[:, :-1], tokens[:, 1:].flatten()
    logits = trainer.decoder.logits(inputs).flatten(0, 1)
    with torch.no_grad():
        theirs = stock_model("llama3")(inputs).logits.flatten(0, 1)
    l1 = sum(layer[0] for layer in trainer.decoder.hidden(inputs)[1])
    kl = whole_kl(logits, theirs)
    loss = F.cross_entropy(logits, targets, reduction="sum") + WEIGHT * TEMPERATURE**2 * kl
    loss = (loss + 1e-2 * l1) / targets.numel()
    parameters = dict(trainer.decoder.named_parameters())
    return kl, dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))


def assert_close(ours, expected):
    assert ours.keys() == expected.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], expected[name], rtol=1e-4, atol=1e-6)


def with_teacher(trainer):
    config = trainer.config
    trainer.teacher = Teacher(config.distill, config.runtime, config.run.name, trainer.ranks, trainer.autocast)
    return trainer


@pytest.mark.parametrize("size", [8, 3])
def test_the_gradient_is_that_of_one_big_batch(teacher, size, tmp_path):
    with small_trainer(tmp_path / "run", *overrides(teacher, f"runtime.micro_batch_size={size}")) as trainer:
        kl, expected = expected_step(trainer)
        sums = with_teacher(trainer).accumulate(next(trainer.data.batches(None))[0], size)
        torch.testing.assert_close(sums.kl.float(), kl)
        trainer.optimizer.drop_gradients()
        assert_close(first_gradients(trainer), expected)


def of_rank(rank, world_size, folder, teacher):
    with joined(folder / "store", rank, world_size) as ranks:
        found = []
        for shard in ("none", "full"):
            config = small_config(*overrides(teacher, "runtime.micro_batch_size=3", f"runtime.shard={shard}"))
            run = folder / shard
            run.mkdir(exist_ok=True)
            trainer = Trainer(config, ranks, RandomTokens(config, rank, world_size, run), run)
            found.append(wholes(first_gradients(with_teacher(trainer))))
        return found


@pytest.mark.slow
def test_two_ranks_have_the_gradient_of_one_big_batch(teacher, tmp_path):
    with small_trainer(tmp_path / "one", *overrides(teacher)) as trainer:
        _, expected = expected_step(trainer)
    for ways in on_ranks([2], of_rank, tmp_path, teacher)[2]:
        for gradients in ways:
            assert_close(gradients, expected)


@pytest.mark.slow
def test_rows_have_loss_cross_entropy_and_kl_apart(teacher, tmp_path):
    """In bfloat16, whose teacher has its matrices in bfloat16, too."""
    with small_trainer(tmp_path / "run", *overrides(teacher, "logging.every=1", BFLOAT16)) as trainer:
        before = torch.get_rng_state()
        assert trainer.fit() == 0
        assert torch.equal(torch.get_rng_state(), before)
        assert trainer.micro_batch.teacher_bytes == trainer.teacher.bytes > 0
        assert not any(parameter.requires_grad for parameter in trainer.teacher.decoder.parameters())
        validated = trainer._validate().ce
    rows = read(tmp_path / "run" / METRICS)
    for row in rows:
        extra = WEIGHT * TEMPERATURE**2 * row["distill_kl"] + row["l1_coefficient"] * row["l1"]
        assert row["loss"] == pytest.approx(row["ce"] + extra)
    assert rows[-1]["distill_kl"] < rows[0]["distill_kl"]
    assert rows[-1]["val_ce"] == validated  # of the cross entropy alone


@pytest.mark.slow
def test_a_resume_takes_no_other_teacher_of_the_same_name(teacher, tmp_path):
    folder = shutil.copytree(teacher, tmp_path / "teacher")
    run, given = tmp_path / "run", overrides(folder, "run.name=taught", "run.checkpoint_every=4")
    with small_trainer(run, *given) as trainer:
        signal_after(trainer, 5)
        assert trainer.fit() == 128 + signal.SIGTERM
    other = stock_model("llama3")
    other.model.norm.weight.data[3] += 1e-6
    other.save_pretrained(folder)
    with small_trainer(run, *given) as trainer, pytest.raises(ConfigError, match="that run taught has used as teacher"):
        trainer.fit()
    stock_model("llama3").save_pretrained(folder)
    (folder / "README.md").write_text("no part of the model")
    with small_trainer(run, *given) as trainer:
        assert trainer.fit() == 0


def test_a_teacher_that_does_not_fit_is_refused_by_name(teacher, tmp_path):
    def mistakes(config):
        return distillation.mistakes(config.distill, config.model, config.training.sequence_length)

    def said(*more):
        (mistake,) = mistakes(small_config(*overrides(teacher, *more)))
        return mistake

    assert mistakes(Config()) == mistakes(small_config(*overrides(teacher))) == []
    assert "has a vocabulary of 96, but the model has 97: give a teacher with the same vocabulary" in said(
        "model.vocab_size=97"
    )
    longer = ["model.context_length=128", "training.sequence_length=65"]
    assert "has a context of 64 tokens, but training.sequence_length is 65" in said(*longer)
    missing = said(f"distill.teacher={tmp_path}/none")
    assert missing.startswith(f"distill.teacher={tmp_path}/none does not exist")


def test_a_kl_that_is_not_finite_is_named_with_its_keys(teacher, tmp_path):
    given = f"distill.teacher={teacher}", "distill.temperature=1e-39", "runtime.max_skipped_steps=2"
    with (
        small_trainer(tmp_path / "run", *given) as trainer,
        pytest.raises(TrainingDiverged, match="because the KL from the teacher is not finite: raise distill"),
    ):
        trainer.fit()
