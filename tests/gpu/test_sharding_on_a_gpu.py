"""Sharded models, as only a GPU can test them. One GPU is enough: its rank has all shards of a group of one."""

import gc
from dataclasses import replace

import pytest
import torch
from kernel_cases import no_waiting
from small_run import small_trainer
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from sparsellm.distributed.groups import whole
from sparsellm.training import sharding

pytestmark = pytest.mark.gpu
CUDA = ["runtime.device=cuda", "runtime.precision=bfloat16", "runtime.compile=true", "runtime.micro_batch_size=3"]
STEPS = 6


@pytest.fixture(autouse=True)
def nothing_compiled():
    """Each test compiles for itself, because all tests together would reach the limit of recompilations."""
    torch._dynamo.reset()


@pytest.fixture
def alone(monkeypatch):
    """Make a single rank shard its model, which a run would not do."""

    def as_one_of_two(function):
        return lambda *args: function(*args[:-1], replace(args[-1], world_size=2))

    for name in ("decoder", "distributed"):
        monkeypatch.setattr(sharding, name, as_one_of_two(getattr(sharding, name)))
    monkeypatch.setattr(sharding, "_mesh", lambda ranks: init_device_mesh(ranks.device.type, (1,)))


def states(trainer):
    return {name: whole(t).clone() for name, t in trainer._tensors(trainer.silent.reduced()).items()}


@pytest.mark.usefixtures("kernels", "alone")
@pytest.mark.parametrize("recompute", ["false", "true"])
def test_shards_train_on_the_kernels_as_a_whole_model_does_and_are_saved(recompute, tmp_path):
    drawn, losses = {}, {}
    for shard in ("none", "optimizer", "full"):
        options = [*CUDA, f"runtime.shard={shard}", f"runtime.recompute={recompute}", "runtime.kernels=cuda"]
        options += ["sparsity.reinit_dead_after_tokens=1", "sparsity.reinit_every=2", "runtime.deterministic=false"]
        with small_trainer(tmp_path / shard, *options, f"training.steps={STEPS}") as trainer:
            assert isinstance(next(trainer.decoder.parameters()), DTensor) == (shard != "none")
            drawn[shard] = states(trainer)
            batches, losses[shard] = trainer.data.batches(None), []
            for _ in range(STEPS):
                sums, norm, _ = trainer.advance(batches)
                losses[shard] += [sums.ce.item(), norm.item()]
            saved = states(trainer)
            trainer.checkpoints.find(skip_damaged=False)
            values = {"step": STEPS}  # which the model card reads
            trainer.checkpoints.save(STEPS, trainer._tensors(trainer.silent.tokens), values, {}, {})
            for tensor in trainer._tensors(trainer.silent.tokens).values():
                tensor.zero_()
            trainer.checkpoints.load(STEPS, trainer._tensors(trainer.silent.tokens))
            assert all(torch.equal(tensor, saved[name]) for name, tensor in states(trainer).items())
    for shard in ("optimizer", "full"):
        assert all(torch.equal(tensor, drawn["none"][name]) for name, tensor in drawn[shard].items())
        assert losses[shard][0] == losses["none"][0]  # the same weights and the same kernels
        # Later losses differ: attention's backward adds in any order, and the difference is rounded to bfloat16.
        assert losses[shard] == pytest.approx(losses["none"], rel=2**-7)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("shard", ["optimizer", "full"])
def test_a_step_in_shards_never_waits_and_compiles_nothing_after_the_first(shard, tmp_path):
    reinit = ["sparsity.reinit_dead_after_tokens=1", "sparsity.reinit_every=1"]
    with small_trainer(tmp_path / "run", *CUDA, *reinit, f"runtime.shard={shard}") as trainer:
        batches = trainer.data.batches(None)

        def step():
            return trainer._reduce(*trainer.advance(batches), stop=False)

        step().read()  # the first step compiles, which waits
        compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        with no_waiting():
            reports = [step() for _ in range(3)]
        assert len({report.read().ce for report in reports}) == 3
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled > 0


@pytest.mark.usefixtures("alone")
def test_shards_take_the_memory_that_arithmetic_says(tmp_path):
    """Between steps: 12 bytes per parameter. Within a step, `optimizer` has all weights, and `full` those in use."""
    model = [
        "model.hidden_size=1024", "model.intermediate_size=4096", "model.num_layers=8", "model.vocab_size=4096",
        "training.batch_size=2", "runtime.micro_batch_size=1",
    ]  # fmt: skip
    peaks = {}
    for shard in ("optimizer", "full"):
        gc.collect()
        before = torch.cuda.memory_allocated()
        with small_trainer(tmp_path / shard, *CUDA[:2], *model, f"runtime.shard={shard}") as trainer:
            size = sum(p.numel() for p in trainer.decoder.parameters())
            batches = trainer.data.batches(None)
            for _ in range(2):
                _, _, clock = trainer.advance(batches)
            torch.cuda.synchronize()
            assert torch.cuda.memory_allocated() - before == pytest.approx(12 * size, rel=0.05)
            peaks[shard] = clock.peak_memory - before
        del trainer, batches
    assert 16 * size < peaks["full"] < peaks["optimizer"]
