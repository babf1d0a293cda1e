"""A gate that goes from SiLU to ReLU: the operator between them, and runs that use it."""

import shutil
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from logged_rows import differences, untimed_rows
from small_run import RandomTokens, force_plans, small_config, small_trainer

from sparsellm.distributed.groups import process_group
from sparsellm.ops import feedforward
from sparsellm.ops.mixed import mixed_feedforward
from sparsellm.training.loop import Trainer
from sparsellm.training.relu_annealing import MixedFeedForward, ReluAnnealing

STEP = 128  # tokens
GRADUAL = [f"sparsity.relu_tokens={5 * STEP}", "logging.every=1"]  # the fifth step has a ReLU


def inputs(dtype, tokens=9, width=16, neurons=24):
    generator = torch.Generator().manual_seed(0)
    shapes = (tokens, width), (neurons, width), (neurons, width), (width, neurons)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_results_and_gradients_are_those_of_the_formula(share):
    x, w_gate, w_up, w_down = tensors = inputs(torch.float64)
    out = mixed_feedforward(*tensors, torch.tensor(share))
    z = x @ w_gate.T
    a = torch.tensor(share).double()
    h = ((1 - a) * F.silu(z) + a * z.clamp(min=0)) * (x @ w_up.T)
    y, l1 = h @ w_down.T, h.abs().sum()
    torch.testing.assert_close((out.y, out.l1), (y, l1))
    assert out.nnz == (z > 0).sum()
    assert torch.equal(out.fired, (z > 0).any(0))
    seed = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(1))
    ours, expected = (torch.autograd.grad((each * seed).sum() + 3 * loss, tensors) for each, loss in (out[:2], (y, l1)))
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_at_the_end_it_is_the_operator_with_a_relu_bit_for_bit(dtype):
    tensors = inputs(dtype)
    mixed, relu = mixed_feedforward(*tensors, torch.tensor(1.0)), feedforward(*tensors, None)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(mixed, relu, strict=True))
    ours, theirs = (torch.autograd.grad(out.y.sum() + out.l1, tensors) for out in (mixed, relu))
    assert all(torch.equal(our, their) for our, their in zip(ours, theirs, strict=True))


def test_a_second_derivative_is_refused():
    tensors = inputs(torch.float64)
    out = mixed_feedforward(*tensors, torch.tensor(0.3))
    dx, *_ = torch.autograd.grad(out.y.square().sum(), tensors, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated twice"):
        dx.square().sum().backward()


def trained(folder, *overrides):
    """The state in which a run of these overrides ends, and its rows."""
    config = small_config(*GRADUAL, "run.checkpoint_every=2", "run.keep_checkpoints=9", *overrides)
    with process_group("cpu") as ranks:
        folder.mkdir(exist_ok=True)
        trainer = Trainer(config, ranks, RandomTokens(config, 0, 1, folder), folder)
        assert trainer.fit() == 0
        state = {name: tensor.clone() for name, tensor in trainer._tensors(trainer.silent.tokens).items()}
    return state, untimed_rows(folder)


@pytest.mark.slow
def test_the_gate_changes_with_the_tokens_and_a_resume_goes_on_exactly(tmp_path):
    straight, rows = trained(tmp_path / "r")
    assert [row["relu_share"] for row in rows] == pytest.approx([min(1, step / 5) for step in range(1, 13)])
    at_once, _ = trained(tmp_path / "other", "sparsity.relu_tokens=0")
    assert any(not torch.equal(straight[name], at_once[name]) for name in straight)
    for kept in (2, 8):  # while the gate is mixed, and after
        for path in sorted((tmp_path / "r/checkpoints").iterdir()):
            if int(path.name.removeprefix("step_")) > kept:
                shutil.rmtree(path)
        resumed, again = trained(tmp_path / "r")
        assert all(torch.equal(resumed[name], straight[name]) for name in straight)
        assert differences(again, rows) == []


def test_the_kernels_have_no_part_in_it_until_the_gate_is_a_relu(tmp_path):
    with small_trainer(tmp_path / "run", *GRADUAL) as trainer:
        trainer.annealing._take(trainer.annealing.blocks)
        force_plans(trainer)
        trainer.annealing = ReluAnnealing(trainer.config.sparsity, trainer.decoder, trainer.plans, torch.device("cpu"))
        batches, engines, counted = trainer.data.batches(None), [], []
        for _ in range(12):
            sums, norm, clock = trainer.advance(batches)
            engines.append(trainer._reduce(sums, norm, clock, False).read().known["plan_per_layer"])
            counted.append(trainer.plans.state()["counts"] is not None)
            mixed = [isinstance(layer.mlp, MixedFeedForward) for layer in trainer.decoder.layers]
            assert mixed == [trainer.step < 5] * 2
        assert engines == [["torch"] * 2] * 4 + [["dense"] * 2] * 8
        assert counted == [step in (9, 10) for step in range(1, 13)]


@pytest.mark.slow
def test_a_resumed_run_has_the_blocks_of_its_last_step_before_the_next_one(tmp_path):
    """The next step may decide how many sequences fit, before it computes."""
    for steps, mixed in ((4, True), (5, False)):
        with small_trainer(tmp_path / str(steps), *GRADUAL, f"training.steps={steps}") as trainer:
            trainer.fit()
        with small_trainer(tmp_path / str(steps), *GRADUAL, "training.steps=12") as trainer:
            trainer._resume()
            assert [isinstance(layer.mlp, MixedFeedForward) for layer in trainer.decoder.layers] == [mixed] * 2


def test_a_changing_gate_compiles_nothing_anew_but_once(tmp_path, monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    graphs, compiled = torch._dynamo.utils.counters["stats"], []
    with small_trainer(tmp_path / "run", *GRADUAL, "runtime.compile=true") as trainer:
        batches = trainer.data.batches(None)
        for _ in range(8):
            trainer.advance(batches)
            compiled.append(graphs["unique_graphs"])
    assert compiled == [compiled[0]] * 4 + [compiled[0] + 1] * 4
