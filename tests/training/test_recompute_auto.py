"""runtime.recompute=auto in whole runs, on a fake GPU: layers are recomputed while they are dense."""

import json
import signal
from functools import partial

import pytest
import torch
from small_memory import ROOMY, FakeGpu, become_sparse, sparse_layers_save_nothing
from small_run import signal_after, small_trainer

from sparsellm.config import Shard
from sparsellm.runs import report
from sparsellm.runs.metrics import METRICS, read
from sparsellm.training import memory, micro_batch, plans
from sparsellm.training.micro_batch import MicroBatchError, OutOfMemory, Setting

RUN = [*ROOMY, "runtime.recompute=auto", "training.batch_size=16", "training.steps=10", "logging.every=1"]


@pytest.fixture(autouse=True)
def fast_decisions(monkeypatch):
    """Plans are decided before steps 3, 6, 9, ... Each micro-batch costs as much time as 60 tokens."""
    monkeypatch.setattr(plans, "DECIDE_EVERY", 3)
    monkeypatch.setattr(micro_batch, "SETTLED", 2)
    monkeypatch.setattr(micro_batch, "PER_MICRO_BATCH", {Shard.none: 60})
    monkeypatch.setattr(memory, "saved_bytes", sparse_layers_save_nothing)
    monkeypatch.setattr(report, "finish", lambda *_: "")
    monkeypatch.setattr(report, "sample", lambda *_: "")


def trained(folder, *overrides, stop_after=None, most=lambda: 16):
    """A run whose layers are sparse from step 4 on. While they are dense, 4 sequences fit, and 8 with recomputation.
    Returns its rows, the setting of each step, and the final weights."""
    settings = []
    with small_trainer(folder, *RUN, *overrides) as trainer:
        become_sparse(trainer, lambda step: step >= 4)
        gpu = FakeGpu(trainer, 16, "tile", most)
        accumulate = trainer.accumulate

        def noted(tokens, size, reduce=True):
            settings.append(Setting(size, trainer.decoder.recompute))
            return accumulate(tokens, size, reduce)

        trainer.accumulate = noted
        if stop_after is not None:
            signal_after(trainer, stop_after - 1)
        assert trainer.fit() == (0 if stop_after is None else 128 + signal.SIGTERM)
        return read(folder / METRICS), settings, [p.detach().clone() for p in trainer.decoder.parameters()], gpu.tried


@pytest.mark.slow
def test_layers_are_recomputed_while_they_are_dense_also_in_a_resumed_run(tmp_path, capsys):
    rows, settings, expected, tried = trained(tmp_path / "straight")
    assert settings == [Setting(8, True)] * 8 + [Setting(16)] * 2
    assert tried == [8, 16]
    assert [row["ffn_saved_bytes"] == 0 for row in rows[:8]] == [True] * 8
    assert "step 9: layers are sparse: micro-batch 8 with recomputation -> 16" in capsys.readouterr().err
    stopped = trained(tmp_path / "stopped", stop_after=7)[1]
    _, resumed, weights, _ = trained(tmp_path / "stopped")
    assert [*stopped, *resumed] == settings
    assert all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))


def test_a_setting_whose_real_passes_run_out_of_memory_is_not_taken(tmp_path, capsys):
    with small_trainer(tmp_path / "run", *RUN) as trainer:
        gpu = FakeGpu(trainer, 5, most=lambda: 4)
        trainer.micro_batch.choose()
        assert (trainer.micro_batch.setting, trainer.decoder.recompute, gpu.tried) == (Setting(4), False, [8, 4])
        assert "micro-batch 8 with recomputation ran out of memory; trying 4" in capsys.readouterr().err
        gpu.most = lambda: 0
        trainer.micro_batch.restored = False
        with pytest.raises(MicroBatchError, match=r"1 with recomputation, .* for it: use a shorter training.sequence"):
            trainer.micro_batch.choose()


@pytest.mark.parametrize(("recompute", "help"), [(False, "runtime.recompute=true or "), (True, "")])
def test_a_step_with_one_sequence_that_runs_out_of_memory_names_what_would_help(recompute, help, tmp_path):
    with small_trainer(tmp_path / "run", *RUN) as trainer:
        trainer.micro_batch._take_first(Setting(1, recompute))
        with pytest.raises(OutOfMemory, match=f"step 1: use {help}a shorter training.sequence_length"):
            trainer.micro_batch._halve("step 1")


def test_a_size_or_a_recomputation_that_is_typed_is_kept(tmp_path):
    typed = {"runtime.micro_batch_size=4": Setting(4), "runtime.recompute=false": Setting(4)}
    typed |= {"runtime.recompute=true": Setting(8, True)}
    for override, setting in typed.items():
        with small_trainer(tmp_path / "run", *RUN, override) as trainer:
            FakeGpu(trainer, 5)
            trainer.micro_batch.choose()
            assert (trainer.micro_batch.setting, trainer.decoder.recompute) == (setting, setting.recompute)


def test_a_resumed_run_chooses_again_if_what_is_typed_forbids_recomputation(tmp_path):
    with small_trainer(tmp_path / "run", *RUN) as trainer:
        FakeGpu(trainer, 5)
        trainer.micro_batch.choose()
        state = json.loads(json.dumps(trainer.micro_batch.state()))
    sizes_alone = state | {"size": 4, "first": 4, "growing": [4, 0]}  # as saved before runtime.recompute=auto existed
    for override, saved, setting in (
        ("runtime.recompute=auto", state, Setting(8, True)),
        ("runtime.recompute=false", state, Setting(4)),
        ("runtime.recompute=auto", sizes_alone, Setting(4)),
        ("runtime.recompute=true", sizes_alone, Setting(4, True)),
    ):
        with small_trainer(tmp_path / "run", *RUN, override) as trainer:
            FakeGpu(trainer, 5)
            trainer.micro_batch.restore(saved)
            trainer.micro_batch.choose()
            assert trainer.micro_batch.setting == setting


@pytest.mark.slow
def test_a_change_of_recomputation_compiles_nothing(tmp_path, monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    with small_trainer(tmp_path / "run", *RUN, "runtime.compile=true") as trainer:
        batches, compiled = trainer.data.batches(None), set()
        for setting in (Setting(8, True), Setting(8), Setting(8, True)):
            trainer.micro_batch._take(setting)
            trainer.advance(batches)
            compiled.add(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    torch._dynamo.reset()
    assert len(compiled) == 1
    assert compiled.pop() > 0
