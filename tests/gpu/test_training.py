"""Training, as only a GPU can test it: the host does not wait, nothing recompiles, a resumed run has the same bits."""

import gzip
import json
import os
from dataclasses import replace

import pytest
import torch
from kernel_cases import no_waiting
from small_run import first_gradients, small_trainer
from torch.nn.parallel import DistributedDataParallel

from sparsellm.config import DdpCompress, RuntimeConfig
from sparsellm.ops import Engine, Plan, feedforward
from sparsellm.ops.plan import ROOM
from sparsellm.policy import Policy
from sparsellm.runs.metrics import METRICS, read
from sparsellm.training import plans, sharding
from sparsellm.training.run import set_determinism

pytestmark = pytest.mark.gpu
CUDA = ["runtime.device=cuda", "runtime.precision=bfloat16", "runtime.compile=true", "runtime.micro_batch_size=3"]
# small runs are deterministic by default, and deterministic runs choose no engines
PLANNED = [*CUDA, "runtime.deterministic=false"]


@pytest.fixture(autouse=True)
def nothing_compiled():
    """Each test compiles for itself, because all tests together would reach the limit of recompilations."""
    torch._dynamo.reset()


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

        step().read()  # the first step compiles, which waits
        with no_waiting():
            reports = [step() for _ in range(3)]
        losses = [report.read().ce for report in reports]
        assert all(loss > 0 for loss in losses)
        assert len(set(losses)) == 3


def test_steps_after_the_first_compile_nothing(tmp_path):
    with small_trainer(tmp_path / "run", *CUDA) as trainer:
        batches = trainer.data.batches(None)
        trainer.advance(batches)
        compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        for _ in range(5):
            trainer.advance(batches)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled > 0


def alternate(monkeypatch):
    """Replace the policy, which would keep such a small model dense: layers take turns changing their engine, some at
    every decision."""
    decisions = iter(range(1000))

    def choose(*_, current):
        return Engine.tile if current == Engine.dense or next(decisions) % 3 == 0 else Engine.dense

    monkeypatch.setattr(Policy, "choose_training_engine", staticmethod(choose))
    monkeypatch.setattr(plans, "DECIDE_EVERY", 3)


def engines_of_changing_plans(folder, monkeypatch, *overrides):
    """The layers' engines in each of 11 steps of a run whose plans change, which compiles nothing after its first step
    and never waits. (The host waits only for the counts of the step before the last, through an event, which the debug
    mode allows.)"""
    alternate(monkeypatch)
    with small_trainer(folder, *overrides) as trainer:
        batches, seen = trainer.data.batches(None), []
        trainer._reduce(*trainer.advance(batches), stop=False).read()
        compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        with no_waiting():
            for _ in range(11):
                report = trainer._reduce(*trainer.advance(batches), stop=False)
                seen.append(report.known["plan_per_layer"])
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled > 0
        assert report.read().ce > 0
    assert seen[1] == ["tile"] * 2  # step 3
    assert len({str(engines) for engines in seen}) > 2
    return seen


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("recompute", ["false", "true"])
def test_plans_change_without_compiling_or_waiting(recompute, tmp_path, monkeypatch):
    seen = engines_of_changing_plans(tmp_path / "run", monkeypatch, *PLANNED, f"runtime.recompute={recompute}")
    assert seen[0] == ["dense"] * 2


def tensors(trainer):
    return {name: t.cpu() for name, t in trainer._tensors(trainer.silent.reduced()).items()}


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("gated", ["true", "false"], ids=["gated", "nongated"])
def test_micro_batches_that_share_casts_and_sums_train_the_same_bits(gated, tmp_path, monkeypatch):
    set_determinism(RuntimeConfig(deterministic=True))
    # Heads of 64, wide enough for flash attention and its backward.
    overrides = [*PLANNED, "model.hidden_size=256", "model.num_heads=4", "model.intermediate_size=1024"]
    overrides += [f"model.gated={gated}", "training.batch_size=12"]
    found = {}
    try:
        for shares in (True, False):
            if not shares:
                monkeypatch.setattr(plans.Plans, "weights", lambda _: [])
            with small_trainer(tmp_path / str(shares), *overrides) as trainer:
                for of_layer, engine in zip(trainer.plans.tensors, ("tile", "dense"), strict=True):
                    of_layer.copy_(Plan.of(engine, room=1024).tensor())
                trainer.micro_batch.choose()
                assert trainer.micro_batch.shares_casts
                batches = trainer.data.batches(None)
                for _ in range(4):
                    trainer.advance(batches)
                found[shares] = tensors(trainer)
        assert [name for name in found[True] if not torch.equal(found[True][name], found[False][name])] == []
    finally:
        torch.use_deterministic_algorithms(False)
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


@pytest.mark.parametrize("recompute", ["false", "true"])
def test_a_deterministic_run_resumes_bit_for_bit(recompute, tmp_path):
    set_determinism(RuntimeConfig(deterministic=True))
    try:
        overrides = [*CUDA, "runtime.deterministic=true", f"runtime.recompute={recompute}", "run.checkpoint_every=6"]
        # Heads of 64, wide enough for flash attention and its backward.
        overrides += ["model.hidden_size=256", "model.num_heads=4", "model.intermediate_size=512"]
        with small_trainer(tmp_path / "straight", *overrides) as trainer:
            assert trainer.fit() == 0
            straight = tensors(trainer)
        with small_trainer(tmp_path / "stopped", *overrides) as trainer:
            trainer._open_log()
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


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("stopped_after", [4, 5, 6])
def test_a_run_on_tile_plans_resumes_bit_for_bit(stopped_after, tmp_path, monkeypatch):
    """A run that is stopped before, at or after a decision makes the same decisions, and has the same bits, as an
    uninterrupted run: everything that engine choices depend on is deterministic if PyTorch is."""
    monkeypatch.setattr(plans, "DECIDE_EVERY", 3)

    # This policy depends on every nonzero that was counted, and on the current plan.
    def by_every_nonzero(*counted, current):
        return Engine((round(counted[3]) + current // 2) % 2 * 2)

    monkeypatch.setattr(Policy, "choose_training_engine", staticmethod(by_every_nonzero))
    overrides = [*PLANNED, "logging.every=1"]
    # Heads of 64, wide enough for flash attention and its backward.
    overrides += ["model.hidden_size=256", "model.num_heads=4", "model.intermediate_size=512"]

    def run(folder, steps):
        with small_trainer(folder, *overrides) as trainer:
            trainer._resume()
            trainer._open_log()
            batches = trainer.data.batches(trainer.data_state)
            for _ in range(trainer.step, steps):
                trainer.reported = trainer._reduce(*trainer.advance(batches), stop=False)
                trainer._read()
            trainer._save()
            trainer.checkpoints.wait()
            return trainer.plans.state(), tensors(trainer)

    set_determinism(RuntimeConfig(deterministic=True))
    try:
        run(tmp_path / "stopped", stopped_after)
        resumed, _ = run(tmp_path / "stopped", stopped_after)  # only resumes, and takes no step
        assert resumed == run(tmp_path / "straight", stopped_after)[0]
        (stopped, ours), (straight, theirs) = (run(tmp_path / name, 12) for name in ("stopped", "never"))
    finally:
        torch.use_deterministic_algorithms(False)
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    assert stopped == straight
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []
    rows = [[row["plan_per_layer"] for row in read(tmp_path / name / METRICS)] for name in ("stopped", "never")]
    assert rows[0] == rows[1]
    assert {engine for engines in rows[0] for engine in engines} == {"dense", "tile"}


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("gated", ["true", "false"], ids=["gated", "nongated"])
def test_a_step_on_tile_plans_learns_what_a_dense_step_learns(gated, tmp_path):
    """So does a step in which some tiles overflow: rest_calls and overflow_tiles count it, and the next decision gives
    the lists more capacity."""
    sums, norms = {}, {}
    overrides = [*PLANNED, "model.hidden_size=256", "model.intermediate_size=5632", f"model.gated={gated}"]
    overrides += ["model.context_length=512", "training.sequence_length=512", "runtime.micro_batch_size=8"]
    for name, plan in (("dense", Plan()), ("tile", Plan.of("tile")), ("small room", Plan.of("tile", room=32))):
        with small_trainer(tmp_path / name, *overrides) as trainer:
            # each of the others fires for half of the tokens: 50 per token
            silent = torch.arange(5632, device="cuda") % 56 != 0
            for layer, of_layer in zip(trainer.decoder.layers, trainer.plans.tensors, strict=True):
                with torch.no_grad():
                    (layer.mlp.gate_proj if gated == "true" else layer.mlp.up_proj).weight[silent] = 0
                of_layer.copy_(plan.tensor())
            batches = trainer.data.batches(None)
            sums[name], norms[name], _ = trainer.advance(batches)
            assert sums[name].rest_calls.tolist() == [int(name == "small room")] * 2
            assert (sums[name].overflow_tiles > 0).tolist() == [name == "small room"] * 2
            for _ in range(2):
                trainer.advance(batches)
            # the policy's capacity for 50 nonzeros per token
            assert all(plan.room == ROOM for plan in trainer.plans.plans)
    # Engines round to bfloat16 in different places, so only closeness is asserted; test_gradients.py asserts exactness.
    for name in ("tile", "small room"):
        assert sums[name].ce.item() == pytest.approx(sums["dense"].ce.item(), rel=2**-8)
        assert norms[name].item() == pytest.approx(norms["dense"].item(), rel=2**-6)


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
        out = feedforward(x, *(() if gated else (None,)), *ws, Plan() if how == "registered" else None)
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


@pytest.mark.parametrize("compress", ["none", "bf16"])
def test_compressed_gradients_are_rounded_to_bfloat16(compress, tmp_path):
    """On one rank, so that nothing is added up."""
    with small_trainer(tmp_path / "run", *CUDA, "runtime.compile=false") as trainer:
        expected = first_gradients(trainer)
        model = DistributedDataParallel(trainer.decoder, device_ids=[0], gradient_as_bucket_view=True)
        sharding.arrange(model, replace(trainer.config.runtime, ddp_compress=DdpCompress[compress]))
        trainer.model, trainer.step = model, 0
        trainer.decoder.zero_grad()
        for name, gradient in first_gradients(trainer).items():
            rounded = expected[name].bfloat16().float() if compress == "bf16" else expected[name]
            assert torch.equal(gradient, rounded), name


def test_a_profile_has_the_kernels_of_its_steps_alone(tmp_path):
    """Checked by the optimizer's kernels, of which every step has the same number; none belongs to an earlier step."""
    counts = []
    for steps in ("[6,6]", "[8,9]"):
        with small_trainer(tmp_path / steps, *CUDA, f"runtime.profile_steps={steps}") as trainer:
            assert trainer.fit() == 0
        (trace,) = (tmp_path / steps / "profile").iterdir()
        events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
        kernels = [event for event in events if event.get("cat") == "kernel"]
        begin = min(event["ts"] for event in events if event.get("name", "").startswith("step "))
        assert min(kernel["ts"] for kernel in kernels) > begin
        counts.append(sum("adam" in kernel["name"].lower() for kernel in kernels))
    assert 0 < counts[0] == counts[1] / 2


# Qwen3 8B, except for the vocabulary and the number of layers: 6.7 GiB of weights, gradients and optimizer state.
QWEN3 = [
    "model=qwen3_8b", "model.vocab_size=4096", "model.hidden_size=4096", "model.intermediate_size=12288",
    "model.num_layers=2", "model.num_heads=32", "model.context_length=1024", "model.init_std=0.02",
    "training.sequence_length=1024", "runtime.micro_batch_size=8", "sparsity.l1_coefficient=1e-5",
    "optimizer.learning_rate=1e-4",
]  # fmt: skip


@pytest.mark.usefixtures("kernels")
def test_a_wide_qwen3_trains_on_the_kernels_with_the_losses_of_pytorch(tmp_path):
    """80 of 12,288 neurons fire, 0.65%: from the third step on both layers are on the tile engine."""
    found = {}
    for path in ("torch", "cuda"):
        torch._dynamo.reset()
        overrides = [*PLANNED, *QWEN3, f"runtime.kernels={path}"]
        with small_trainer(tmp_path / path, *overrides) as trainer:
            silent = torch.arange(12_288, device="cuda") % 77 != 0  # the others fire for half of the tokens
            for layer in trainer.decoder.layers:
                with torch.no_grad():
                    layer.mlp.gate_proj.weight[silent] = 0
            batches = trainer.data.batches(None)
            steps = [trainer.advance(batches)[0] for _ in range(8)]
            found[path] = [(step.ce.item() / 8192, step.l1.sum().item(), step.nnz.tolist()) for step in steps]
            if path == "cuda":
                assert trainer.plans.engines == ["tile", "tile"]
                assert steps[-1].rest_calls.tolist() == [0, 0]
    for (ce, l1, nnz), (expected_ce, expected_l1, expected_nnz) in zip(found["cuda"], found["torch"], strict=True):
        assert ce == pytest.approx(expected_ce, rel=2**-8)
        assert l1 == pytest.approx(expected_l1, rel=1e-2)
        assert nnz == pytest.approx(expected_nnz, rel=1e-2)
