"""What only a GPU can show of the training path: nothing waits, nothing recompiles, the same bits twice."""

import os

import pytest
import torch
from small_run import small_trainer

from sparsellm.ops import gated_ffn, nongated_ffn, plan_of
from sparsellm.train import set_determinism

pytestmark = pytest.mark.gpu
CUDA = ["runtime.device=cuda", "runtime.precision=bfloat16", "runtime.compile=true", "runtime.micro_batch_size=3"]


@pytest.mark.parametrize(
    "overrides",
    [
        ["sparsity=l1"],
        ["sparsity=dense_silu", "sparsity.l1_coefficient=0"],
        ["sparsity.l1_schedule=linear", "sparsity.l1_warmup_tokens=1000"],
        ["sparsity.reinit_dead_after_tokens=1", "sparsity.reinit_every=1"],
    ],
    ids=["l1", "dense_silu", "warmup", "reinitialization"],
)
def test_a_step_and_its_report_never_wait_for_the_device(overrides, tmp_path):
    overrides = [*CUDA, *overrides]
    with small_trainer(tmp_path / "run", *overrides) as trainer:
        batches = trainer.data.batches(None)

        def step():
            return trainer._reduce(*trainer.advance(batches), stop=False)

        step().read()  # compiles
        torch.cuda.set_sync_debug_mode("error")
        try:
            reports = [step() for _ in range(3)]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        losses = [report.read().ce for report in reports]
        assert all(loss > 0 for loss in losses)
        assert len(set(losses)) == 3


def test_steps_after_the_first_compile_nothing(tmp_path):
    torch._dynamo.reset()
    with small_trainer(tmp_path / "run", *CUDA) as trainer:
        batches = trainer.data.batches(None)
        trainer.advance(batches)
        compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        for _ in range(5):
            trainer.advance(batches)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled > 0


def tensors(trainer):
    return {name: t.cpu() for name, t in trainer._tensors(trainer.silent.reduced()).items()}


@pytest.mark.parametrize("recompute", ["false", "true"])
def test_a_deterministic_run_resumes_bit_for_bit(recompute, tmp_path):
    set_determinism(True)
    try:
        overrides = [*CUDA, "runtime.deterministic=true", f"runtime.recompute={recompute}", "run.checkpoint_every=6"]
        # Wide enough for flash attention and its backward.
        overrides += ["model.hidden_size=256", "model.num_heads=4", "model.intermediate_size=512"]
        with small_trainer(tmp_path / "straight", *overrides) as trainer:
            assert trainer.fit() == 0
            straight = tensors(trainer)
        with small_trainer(tmp_path / "stopped", *overrides) as trainer:
            trainer._open_logs()
            batches = trainer.data.batches(None)
            for _ in range(6):
                trainer.advance(batches)
            trainer._save()
            trainer.checkpoints.wait()
        with small_trainer(tmp_path / "stopped", *overrides) as trainer:
            assert trainer.fit() == 0
            resumed = tensors(trainer)
        assert [name for name in straight if not torch.equal(straight[name], resumed[name])] == []
    finally:
        torch.use_deterministic_algorithms(False)
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


@pytest.mark.parametrize("how", ["traced", "compiled", "registered"])
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "nongated"])
@pytest.mark.parametrize(("m", "k", "n"), [(1, 768, 264), (127, 1024, 1000), (129, 2048, 5632), (4088, 2048, 5632)])
def test_operators_are_as_accurate_as_dense_pytorch(m, k, n, gated, how):
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    ws = [draw(n, k) / k**0.5 for _ in range(2 if gated else 1)] + [draw(k, n) / n**0.5]
    x, dy = draw(m, k), draw(m, k)

    def ours(x, *ws):
        operator = gated_ffn if gated else nongated_ffn
        out = operator(x, *ws, plan_of() if how == "registered" else None)
        return out.y, out.l1, out.nnz

    def dense(x, *ws):
        g = torch.relu(x @ ws[0].T)
        h = g * (x @ ws[1].T) if gated else g
        return h @ ws[-1].T, h.abs().sum(dtype=torch.promote_types(h.dtype, torch.float32)), (g != 0).sum()

    def run(function, dtype):
        inputs = [t.detach().to(dtype).requires_grad_() for t in (x, *ws)]
        y, l1, nnz = function(*inputs)
        return [y, *torch.autograd.grad([y, l1], inputs, [dy.to(dtype), torch.full_like(l1, 0.1)])], l1, nnz

    exact, l1, _ = run(dense, torch.float64)
    theirs, _, nnz = run(dense, torch.bfloat16)
    mine, my_l1, my_nnz = run(torch.compile(ours, fullgraph=True) if how == "compiled" else ours, torch.bfloat16)
    assert my_nnz == nnz
    assert my_l1.item() == pytest.approx(l1.item(), rel=5e-3)
    for name, e, o, d in zip(["y", "dx", "dw1", "dw2", "dw3"], exact, mine, theirs, strict=False):
        error, allowed = ((t.double() - e).norm() / e.norm() for t in (o, d))
        assert error <= 2 * allowed, f"{name}: error {error:.2e}, dense bfloat16 {allowed:.2e}"
