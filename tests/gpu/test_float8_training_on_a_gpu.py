"""Training with the gate product in FP8 on a GPU: exact where rounding changes nothing, elsewhere the gradients of what
fires in FP8; and whole runs."""

import os

import kernel_cases as cases
import pytest
import torch
from kernel_cases import DEVICE, GATED, assert_as_accurate, assert_equal, check_statistics
from small_run import small_trainer
from test_gradients import DL1, small, stepwise
from test_training import PLANNED, engines_of_changing_plans, tensors
from torch.utils.checkpoint import checkpoint

from sparsellm.config import RuntimeConfig
from sparsellm.ops import Engine, Plan, borders, cuda, feedforward, float8, reference, twell
from sparsellm.policy import Policy
from sparsellm.training import plans
from sparsellm.training.run import set_determinism

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels")]
FLOAT8 = [*PLANNED, "runtime.float8=all"]
TILE = Plan.of("tile")


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()


def integers(m, k, n, gated, seed=0):
    """A layer of small integers that rounding to FP8 does not change: the largest of each row is 14 = 448 / 32, so its
    scale is 1 / 32."""
    x, ws = cases.integers(m, k, n, gated, seed)
    ws[0][:, 0] -= 2
    x[:, 1], x[:, 2] = 14, 0
    ws[0][:, 1], ws[0][:, 2] = 0, 14
    for w in ws[1:-1]:
        w[:, 1] = 0
    return x, ws


def gradients(x, ws, dy, plan=TILE, rounds=True, through=None):
    """(output, (dx, dw ...)) of the operator, for the loss y . dy + DL1 l1; all memory is poisoned before each pass."""
    inputs = [t.detach().requires_grad_() for t in (x, *ws)]
    rounded = cuda.quantize_rows(x) if rounds else None

    def layer(x, *ws):
        return feedforward(x, *cases.layer(list(ws)), plan, rounded)

    cases.poison()
    out = layer(*inputs) if through is None else through(layer, *inputs)
    cases.poison()
    loss = (out.y.double() * dy.double()).sum() + DL1 * out.l1.double()
    return out, torch.autograd.grad(loss, inputs)


def names(gated):
    return ("dx", "dw_gate", "dw_up", "dw_down") if gated else ("dx", "dw_up", "dw_down")


@GATED
@pytest.mark.parametrize("capacity", [None, 128], ids=["lists", "overflow"])
@pytest.mark.parametrize(("m", "k", "n"), [(129, 48, 264), (1537, 768, 1000), (16_390, 272, 1000)])
def test_integers_have_exact_results_and_gradients(m, k, n, capacity, gated, monkeypatch):
    """With tokens in their own order and reordered, and where all tiles take the overflow path."""
    if capacity is not None:
        monkeypatch.setattr(borders, "capacity", lambda *_: capacity)
        m = m // 128 * 128  # a last tile of few tokens would stay
    x, ws = integers(m, k, n, gated)
    dy = small(m, k, seed=n)
    g, _, y = cases.stepwise(x, ws)
    assert g.count_nonzero()
    out, found = gradients(x, ws, dy)
    assert out.overflow_tiles == (0 if capacity is None else m // 128)
    assert_equal(out.y, y, "y")
    if capacity is None:
        check_statistics(out, g, "tile", "statistics")
    for name, ours, right in zip(names(gated), found, stepwise(x, ws, dy), strict=True):
        assert_equal(ours, right, name)


@GATED
def test_micro_batches_add_up_and_float32_weights_are_not_rounded(gated):
    x, ws = integers(600, 272, 1000, gated)
    dy = small(600, 272, seed=1)
    with torch.autocast("cuda", torch.bfloat16):
        parts = [gradients(x[rows], [w.float() for w in ws], dy[rows])[1] for rows in (slice(0, 300), slice(300, 600))]
    found = torch.cat([part[0] for part in parts]), *(sum(of_parts) for of_parts in list(zip(*parts, strict=True))[1:])
    for name, ours, right in zip(names(gated), found, stepwise(x, ws, dy, float_weights=True), strict=True):
        assert ours.dtype == right.dtype
        assert_equal(ours, right, name)


def straight_through(x, ws, g, dy):
    """(y, dx, dw ...) of the layer whose activations after the ReLU are g, in the dtype of the inputs."""
    w_gate, w_up, w_down = cases.layer(ws)
    planes = [g] if w_gate is None else [g, x @ w_up.T]
    h = g if w_gate is None else g * planes[1]
    dl1 = torch.tensor(DL1, device=DEVICE, dtype=x.dtype)
    return h @ w_down.T, *reference.backward(x, w_gate, w_up, w_down, planes, dy, dl1)


@GATED
@pytest.mark.parametrize(("m", "k", "n", "rate"), [(4096, 2048, 5632, 0.01), (20_000, 272, 1000, 0.05)])
def test_gradients_are_straight_through_what_fires_in_float8(m, k, n, rate, gated):
    x, ws = cases.normal(m, k, n, gated, rate=rate)
    dy = torch.randn(x.shape, device=DEVICE, generator=cases.random(5)).bfloat16()
    out, found = gradients(x, ws, dy)
    g = twell.unpack(cuda.gate_pack_float8(cuda.quantize_rows(x), cuda.quantize_rows(ws[0])), n)
    assert ((g != 0) != (x @ ws[0].T > 0)).any()
    assert out.rest_calls == 0
    check_statistics(out, g, "tile", "statistics")
    theirs = straight_through(x, ws, g, dy)
    exact = straight_through(x.double(), [w.double() for w in ws], g.double(), dy.double())
    for name, *three in zip(("y", *names(gated)), (out.y, *found), theirs, exact, strict=True):
        assert_as_accurate(*three, name)


@GATED
def test_tokens_that_overflow_have_a_bfloat16_gate_in_both_passes(gated, monkeypatch):
    """All tiles overflow, so results and gradients are as accurate as those of dense bfloat16."""
    monkeypatch.setattr(borders, "capacity", lambda *_: 128)
    x, ws = cases.normal(1536, 272, 1000, gated, rate=0.05)
    dy = torch.randn(x.shape, device=DEVICE, generator=cases.random(5)).bfloat16()
    dl1 = torch.tensor(DL1, device=DEVICE)
    out, found = gradients(x, ws, dy)
    assert out.overflow_tiles == 12
    theirs, exact = cases.gradients(x, ws, dy, dl1), cases.exact_gradients(x, ws, dy, dl1)
    y = cases.dense(x, *ws), cases.dense(x.double(), *(w.double() for w in ws))
    for name, *three in zip(("y", *names(gated)), (out.y, *found), (y[0], *theirs), (y[1], *exact), strict=True):
        assert_as_accurate(*three, name)


@GATED
def test_recomputed_and_repeated_calls_have_the_same_bits(gated):
    x, ws = cases.normal(20_000, 272, 1000, gated, rate=0.02)
    dy = torch.randn(x.shape, device=DEVICE, generator=cases.random(1)).bfloat16()
    _, once = gradients(x, ws, dy)
    for through in (None, lambda layer, *inputs: checkpoint(layer, *inputs, use_reentrant=False)):
        for name, ours, right in zip(names(gated), gradients(x, ws, dy, through=through)[1], once, strict=True):
            assert_equal(ours, right, name)


def test_the_dense_engine_stays_bfloat16():
    x, ws = cases.normal(1537, 272, 1000)
    dy = torch.randn(x.shape, device=DEVICE, generator=cases.random(1)).bfloat16()
    (ours, found), (theirs, right) = (gradients(x, ws, dy, Plan(), rounds) for rounds in (True, False))
    for a, b in zip((ours.y, *found), (theirs.y, *right), strict=True):
        assert_equal(a, b, "dense")


# Whole runs: attention by torchao, and the gate product.


@pytest.fixture
def torchao():
    if obstacle := float8.obstacle():
        pytest.skip(obstacle)


@pytest.mark.usefixtures("torchao")
@pytest.mark.parametrize("recompute", ["false", "true"])
def test_plans_change_without_compiling_or_waiting(recompute, tmp_path, monkeypatch):
    engines_of_changing_plans(tmp_path / "run", monkeypatch, *FLOAT8, f"runtime.recompute={recompute}")


SPARSE = [
    "model.hidden_size=256", "model.intermediate_size=2816", "model.num_heads=4", "model.context_length=512",
    "training.sequence_length=512", "training.steps=20", "optimizer.learning_rate=3e-3", "model.init_std=0.05",
    "sparsity.l1_coefficient=1e-4",
]  # fmt: skip


def sparse_run(folder, *overrides):
    """20 steps on tile plans on one batch, which is learned by heart: (loss, L1 sum, nonzeros) of each step, the calls
    in FP8 (tokens, saving) of a validation, and the losses of validations in FP8 and in bfloat16."""
    with small_trainer(folder, *PLANNED, *SPARSE, *overrides) as trainer:
        silent = torch.arange(2816, device="cuda") % 28 != 0  # each of the others fires for half of the tokens
        for layer, plan in zip(trainer.decoder.layers, trainer.plans.tensors, strict=True):
            with torch.no_grad():
                layer.mlp.gate_proj.weight[silent] = 0
            plan.copy_(TILE.tensor())
        trainer.plans.before = lambda _step: False  # keeps the plans
        batch = next(trainer.data.batches(None))[0]
        steps = []
        for trainer.step in range(1, 21):
            sums, norm = trainer.train_step(batch)
            assert norm.isfinite()
            assert sums.rest_calls.tolist() == [0, 0]
            steps.append((sums.ce.item() / batch[:, 1:].numel(), sums.l1.sum().item(), sums.nnz.sum().item()))
        held_out = [trainer._validate().ce]
        for plan in trainer.plans.tensors:
            plan.copy_(Plan().tensor())
        return steps, [*held_out, trainer._validate().ce]


@pytest.mark.usefixtures("torchao")
@pytest.mark.parametrize("compile", ["true", "false"])
def test_a_short_run_learns_what_one_in_bfloat16_learns(compile, tmp_path, monkeypatch):
    calls, float8_forward = [], cuda.float8_forward

    def counted(*arguments):
        calls.append(arguments[-1])
        return float8_forward(*arguments)

    monkeypatch.setattr(cuda, "float8_forward", counted)
    setting = f"runtime.compile={compile}"
    exact, _ = sparse_run(tmp_path / "exact", setting, "runtime.float8=attention")
    assert not calls
    ours, (in_float8, in_bf16) = sparse_run(tmp_path / "float8", setting, "runtime.float8=all")
    assert calls.count(True) == 20 * 2 * 3  # steps, layers, micro-batches of 3, 3 and 2
    assert calls.count(False) > 0  # of validation
    assert ours[-1][0] < 0.8 * ours[0][0], "the loss falls"
    for step in (0, 1):  # later, both runs go their own ways
        for found, expected in zip(ours[step], exact[step], strict=True):
            assert found == pytest.approx(expected, rel=2**-5)
        assert ours[step] != exact[step]
    assert ours[-1][0] == pytest.approx(exact[-1][0], rel=0.1)
    assert 0 < abs(in_float8 / in_bf16 - 1) < 2**-5


@pytest.mark.usefixtures("torchao")
def test_a_run_resumes_bit_for_bit(tmp_path, monkeypatch):
    monkeypatch.setattr(plans, "DECIDE_EVERY", 3)
    by_nonzeros = staticmethod(lambda *counted, current: Engine((round(counted[3]) + current // 2) % 2 * 2))
    monkeypatch.setattr(Policy, "choose_training_engine", by_nonzeros)
    wide = ["model.hidden_size=256", "model.num_heads=4", "model.intermediate_size=512"]

    def run(folder, steps):
        with small_trainer(folder, *FLOAT8, *wide, "logging.every=1") as trainer:
            trainer._resume()
            trainer._open_log()
            batches, engines = trainer.data.batches(trainer.data_state), []
            for _ in range(trainer.step, steps):
                trainer.reported = trainer._reduce(*trainer.advance(batches), stop=False)
                trainer._read()
                engines += trainer.plans.engines
            trainer._save()
            trainer.checkpoints.wait()
            return tensors(trainer), set(engines)

    set_determinism(RuntimeConfig(deterministic=True))
    try:
        run(tmp_path / "stopped", 5)
        (ours, _), (theirs, engines) = (run(tmp_path / name, 12) for name in ("stopped", "never"))
    finally:
        torch.use_deterministic_algorithms(False)
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []
    assert engines == {"dense", "tile"}
