"""runtime.micro_batch_size=auto: its choice, its growth, and its behaviour when memory runs out; on a fake GPU."""

import errno
import json
import os
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from processes import torchrun
from small_memory import OUT_OF_MEMORY, ROOMY, FakeGpu, become_sparse, sparse_layers_save_nothing
from small_run import force_plans, signal_after, small_trainer
from whole_config import step_memory

from sparsellm.config import Precision, Shard, from_overrides
from sparsellm.config.groups import choices
from sparsellm.ops import Plan
from sparsellm.runs import report
from sparsellm.runs.metrics import METRICS, read
from sparsellm.training import memory, micro_batch, plans
from sparsellm.training.memory import GIB, Sharing
from sparsellm.training.micro_batch import RECORD, UNMEASURED, MicroBatchError, OutOfMemory, Setting

AUTO = [
    "runtime.micro_batch_size=auto", "runtime.recompute=false", "runtime.deterministic=false", "training.batch_size=12",
]  # fmt: skip
GROWING = [*ROOMY, "training.batch_size=16", "training.steps=30", "logging.every=1"]


@pytest.fixture
def fast_decisions(monkeypatch):
    monkeypatch.setattr(plans, "DECIDE_EVERY", 3)
    monkeypatch.setattr(micro_batch, "SETTLED", 2)
    monkeypatch.setattr(memory, "saved_bytes", sparse_layers_save_nothing)
    monkeypatch.setattr(report, "finish", lambda *_: "")  # plots and a sample of the text take longer than the steps
    monkeypatch.setattr(report, "sample", lambda *_: "")


def state(trainer):
    """All that a checkpoint would hold of the tensors."""
    return {name: tensor.clone() for name, tensor in trainer._tensors(trainer.silent.reduced()).items()}


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def trained(trainer, steps=4):
    batches = trainer.data.batches(trainer.data_state)
    for _ in range(steps):
        trainer.advance(batches)
    return state(trainer)


def test_the_largest_divisor_that_fits_is_chosen_and_the_passes_leave_no_trace(tmp_path):
    with small_trainer(tmp_path / "given", *AUTO, "runtime.micro_batch_size=4") as trainer:
        expected = trained(trainer)
    with small_trainer(tmp_path / "auto", *AUTO) as trainer:
        gpu, before, random = FakeGpu(trainer, sequences=5), state(trainer), torch.get_rng_state()
        trainer.micro_batch.choose()
        assert trainer.micro_batch.size == 4
        assert gpu.tried == [4]
        assert_same(state(trainer), before)
        assert torch.equal(torch.get_rng_state(), random)
        assert all(p.grad is None for p in trainer.decoder.parameters())
        assert_same(trained(trainer), expected)


def test_a_line_says_what_memory_is_used_for_and_how_much_is_left(tmp_path):
    """If passes need a GiB more than estimated, it is attributed to activations."""
    with small_trainer(tmp_path / "run", *AUTO) as trainer:
        gpu, chosen = FakeGpu(trainer, sequences=4), trainer.micro_batch
        gpu.bytes, chosen.setting, found = 5 * GIB, Setting(4), chosen.usage(Setting(4))
        by_arithmetic = (
            "4 of 12 sequences: weights 0.0, optimizer 0.0, gradients 0.0, buckets 0.0, activations 0.0 GiB;"
            " estimated peak 0.0 GiB of 5.0 GiB (5.0 GiB free)"
        )
        assert str(chosen) == by_arithmetic
        chosen.peak = found.total + GIB
        assert "activations 1.0 GiB; peak 1.0 GiB of 5.0 GiB (4.0 GiB free)" in str(chosen)
        chosen.teacher_bytes, chosen.peak = 2 * GIB, found.total + 3 * GIB
        assert "activations 1.0, teacher 2.0 GiB; peak 3.0 GiB of 5.0 GiB (2.0 GiB free)" in str(chosen)
        gpu.bytes = 0
        assert "peak 3.0 GiB of 0.0 GiB (3.0 GiB too much)" in str(chosen)


@pytest.mark.parametrize("given", ["auto", "4"])
def test_micro_batches_share_casts_of_weights_only_where_memory_allows(given, tmp_path, monkeypatch):
    overrides = [*AUTO, f"runtime.micro_batch_size={given}", "runtime.precision=bfloat16"]
    with small_trainer(tmp_path / "run", *overrides) as trainer:
        force_plans(trainer)
        gpu, chosen, shared = FakeGpu(trainer, sequences=5), trainer.micro_batch, []
        casts = chosen.memory.shared_casts(trainer.plans.plans)
        assert casts == 2 * sum(w.numel() for w in trainer.plans.weights()) > 0
        passes = chosen.passes
        monkeypatch.setattr(chosen, "passes", lambda *given: (shared.append(chosen.shares_casts), passes(*given)))
        chosen.choose()
        assert chosen.size == 4
        needed = chosen.usage(Setting(4)).total
        reserve = 0 if given == "auto" else UNMEASURED  # a given size is not measured
        for room, shares in ((1.11 * (needed + casts), True), (1.09 * (needed + casts), False)):
            chosen.capacity, gpu.bytes = (2 * int(room) if given == "auto" else None), int(room) + reserve
            chosen.restored = given == "auto"
            chosen.choose()
            assert (chosen.size, chosen.shares_casts) == (4, shares)
            assert ("bfloat16 weights 0.0" in str(chosen)) == shares
        chosen.room = 10 * needed
        chosen.setting = Setting(12)  # one micro-batch
        assert not chosen.shares_casts
        assert not any(shared)  # the passes that measure memory leave them out
        assert len(shared) == (6 if given == "auto" else 0)


@pytest.mark.parametrize("given", ["auto", "4"])
def test_a_step_that_runs_out_of_memory_first_gives_up_shared_casts(given, tmp_path, capsys):
    overrides = [*AUTO, f"runtime.micro_batch_size={given}", "runtime.precision=bfloat16"]
    with small_trainer(tmp_path / "run", *overrides) as trainer:
        force_plans(trainer)
        chosen, fails = trainer.micro_batch, iter([True, False, False])
        FakeGpu(trainer, sequences=5)
        chosen.choose()
        chosen.room = GIB
        assert chosen.shares_casts

        def accumulate(size):
            if next(fails):
                raise torch.OutOfMemoryError
            return size

        assert chosen.run(3, accumulate) == 4
        assert not chosen.shares_casts
        said = "step 3: out of memory with micro-batch 4: repeating the step; from now on, each micro-batch casts"
        assert said in capsys.readouterr().err
        assert chosen.run(4, accumulate) == 4
        fails = iter([True, False])
        if given == "auto":
            assert chosen.run(5, accumulate) == 2
        else:
            with pytest.raises(OutOfMemory):
                chosen.run(5, accumulate)


def test_steps_in_float32_and_sharded_steps_have_no_casts_to_share():
    memory = step_memory(from_overrides(["experiment=1p5b"]))
    planned = [Plan.of("tile")] * 28
    assert memory.shared_casts(planned) == 28 * 3 * 2048 * 5632 * 2
    assert memory.shared_casts([None] * 28) == replace(memory, sharing=Sharing(8)).shared_casts(planned) == 0
    in_float32 = replace(memory.runtime, precision=Precision.float32)
    assert replace(memory, runtime=in_float32).shared_casts(planned) == 0


def test_a_size_whose_real_passes_run_out_of_memory_is_not_taken(tmp_path, capsys):
    with small_trainer(tmp_path / "run", *AUTO) as trainer:
        gpu = FakeGpu(trainer, sequences=6, most=lambda: 3)
        trainer.micro_batch.choose()
        assert (trainer.micro_batch.size, gpu.tried) == (3, [6, 4, 3])
        assert "micro-batch 4 ran out of memory; trying 3" in capsys.readouterr().err


def test_a_run_of_which_not_one_sequence_fits_is_refused(tmp_path):
    with small_trainer(tmp_path / "run", *AUTO) as trainer:
        FakeGpu(trainer, sequences=2, most=lambda: 0)
        with pytest.raises(MicroBatchError, match=r"not even one sequence fits: .*runtime\.recompute=true"):
            trainer.micro_batch.choose()


def test_where_ranks_share_states_the_arithmetic_alone_chooses(tmp_path):
    """Real passes would contain collectives, which a rank without memory would leave the others waiting in."""
    with small_trainer(tmp_path / "run", *AUTO) as trainer:
        gpu, chosen = FakeGpu(trainer, sequences=1), trainer.micro_batch
        chosen.memory = replace(chosen.memory, sharing=Sharing(100))
        trainer.micro_batch.choose()
        assert (trainer.micro_batch.size, gpu.tried) == (4, [])  # sharded state leaves room for more
        assert trainer.micro_batch.capacity == gpu.bytes


@pytest.mark.parametrize(("batch", "size"), [(12, 12), (48, 16), (34, 2), (17, 1)])
def test_on_a_cpu_auto_is_the_largest_divisor_up_to_16(batch, size, tmp_path):
    with small_trainer(tmp_path / "run", *AUTO, f"training.batch_size={batch}") as trainer:
        trainer.micro_batch.choose()
        assert trainer.micro_batch.size == size


def test_experiments_are_auto_and_smoke_is_not():
    given = {name: from_overrides([f"experiment={name}"]).runtime.micro_batch_size for name in choices("experiment")}
    assert given == {name: 8 if name == "smoke" else "auto" for name in given}


@pytest.mark.usefixtures("fast_decisions")
def test_a_deterministic_run_chooses_by_arithmetic_alone_and_keeps_the_size(tmp_path, monkeypatch):
    deterministic = [*AUTO, "runtime.deterministic=true"]

    def run(sequences, steps):
        with small_trainer(tmp_path / "run", *deterministic, f"training.steps={steps}") as trainer:
            gpu = FakeGpu(trainer, sequences)
            assert trainer.fit() == 0
            assert gpu.tried == []
            return trainer.micro_batch.size

    assert run(5, steps=3) == 4
    monkeypatch.setattr(micro_batch, "MARGIN", 1)  # an estimate that would choose less
    assert run(5, steps=6) == 4


def growing(folder, sparse, engine="tile", most=lambda: 16, stop_after=None):
    """A run that decides before steps 3, 6, 9, ...: its rows, its state, and the sizes that were tried.

    Layers of `engine` have room for 8 sequences.
    """
    with small_trainer(folder, *GROWING) as trainer:
        become_sparse(trainer, sparse)
        gpu = FakeGpu(trainer, 8, engine, most)
        if stop_after is not None:
            signal_after(trainer, stop_after - 1)
        assert trainer.fit() == (0 if stop_after is None else 128 + signal.SIGTERM)
        assert trainer.plans.tokens == trainer.micro_batch.size * 16
        return read(folder / METRICS), state(trainer), gpu.tried


def sizes(rows):
    return [row["micro_batch_size"] for row in rows]


@pytest.mark.slow
@pytest.mark.usefixtures("fast_decisions")
def test_it_grows_once_layers_are_sparse_and_goes_back_while_they_are_dense(tmp_path, capsys):
    """Sparse from the decision of step 6 on: the second such decision is that of step 9. Dense from 15 to 20."""
    rows, _, tried = growing(tmp_path / "run", lambda step: step >= 4 and not 15 <= step < 20)
    assert sizes(rows) == [4] * 8 + [8] * 6 + [4] * 6 + [8] * 10
    assert tried == [4, 8]
    said = capsys.readouterr().err
    assert "step 9: layers are sparse: micro-batch 4 -> 8" in said
    assert "step 15: memory allows a micro-batch of 4 again" in said
    dense, _, _ = growing(tmp_path / "dense", lambda step: False)
    assert sizes(dense) == [4] * 30
    for key in ("ce", "l1", "nnz_mean", "grad_norm"):  # the same mathematics, rounded in another order
        assert [row[key] for row in rows] == pytest.approx([row[key] for row in dense], rel=1e-3)
        assert [row[key] for row in rows[:9]] == pytest.approx([row[key] for row in dense[:9]], rel=1e-6)


@pytest.mark.slow
@pytest.mark.usefixtures("fast_decisions")
def test_while_layers_are_dense_it_does_not_grow(tmp_path):
    """Although 8 are estimated to fit, as at the start, where real passes showed otherwise."""
    most = iter([4])  # at the first call
    rows, _, tried = growing(tmp_path / "run", lambda step: False, "dense", lambda: next(most, 16))
    assert (sizes(rows), tried) == ([4] * 30, [8, 4])


@pytest.mark.slow
@pytest.mark.usefixtures("fast_decisions")
def test_a_resumed_run_grows_and_computes_as_one_that_was_not_stopped(tmp_path):
    """Stopped between the decisions that lead to growth, right after it, and later."""

    def sparse(step):
        return step >= 4

    straight, expected, _ = growing(tmp_path / "straight", sparse)
    for stop_after, tried in ((7, [4]), (9, [4, 8]), (12, [8])):
        assert growing(tmp_path / "stopped", sparse, stop_after=stop_after)[2] == tried
    rows, ours, tried = growing(tmp_path / "stopped", sparse)
    assert tried == [8]
    assert sizes(rows) == sizes(straight) == [4] * 8 + [8] * 22
    assert_same(ours, expected)


@pytest.mark.usefixtures("fast_decisions")
@pytest.mark.slow
def test_a_growth_whose_real_passes_run_out_of_memory_is_not_taken_and_not_tried_again(tmp_path, capsys):
    rows, _, tried = growing(tmp_path / "run", lambda step: step >= 4, most=lambda: 4)
    assert (sizes(rows), tried) == ([4] * 30, [4, 8])
    assert "step 9: micro-batch 8 was estimated to fit but ran out of memory; keeping 4" in capsys.readouterr().err


@pytest.mark.usefixtures("fast_decisions")
def test_it_does_not_grow_for_less_than_a_hundredth_of_the_time(tmp_path, monkeypatch):
    """Twice 64 tokens, if a micro-batch costs as much as c more tokens: c / 64 less c / 128, of 1 + c / 128."""
    for tokens, grows in ((1.0, False), (1.6, True)):
        monkeypatch.setitem(micro_batch.PER_MICRO_BATCH, Shard.none, tokens)
        rows, _, _ = growing(tmp_path / str(tokens), lambda step: step >= 4)
        assert sizes(rows) == ([4] * 8 + [8] * 22 if grows else [4] * 30)


@pytest.mark.usefixtures("fast_decisions")
def test_cached_blocks_are_released_when_plans_change_while_memory_is_tight(tmp_path, monkeypatch):
    """Plans are new at the decision of step 3, and change at 6, 15 and 21. At 15, after growth to 8 sequences, layers
    become dense again, for which 8 need more memory than there is."""
    released = []
    monkeypatch.setattr(micro_batch, "give_back", lambda: released.append(True))

    def releases(tight):
        released.clear()
        monkeypatch.setattr(micro_batch, "TIGHT", tight)
        growing(tmp_path / str(tight), lambda step: step >= 4 and not 15 <= step < 20)
        return len(released)

    others = releases(-1)  # those at the start and at growth
    assert [releases(0) - others, releases(10) - others] == [1, 4]


def out_of_memory_once(trainer, step, call):
    """Run out of memory at a call of `step`, counted from 1, when others have left their gradients."""
    calls = []

    def before_passes(_module, _inputs):
        if trainer.step == step:
            calls.append(step)
            if len(calls) == call:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    trainer.decoder.register_forward_pre_hook(before_passes)


@pytest.mark.usefixtures("fast_decisions")
@pytest.mark.slow
def test_a_resume_with_another_part_of_the_gpu_chooses_anew(tmp_path):
    def run(sequences, steps):
        with small_trainer(tmp_path / "run", *AUTO, f"training.steps={steps}") as trainer:
            gpu = FakeGpu(trainer, sequences)
            assert trainer.fit() == 0
            return trainer.micro_batch.size, gpu.tried

    assert [run(5, steps=3), run(5, steps=4), run(3, steps=5), run(7, steps=6)] == [
        (4, [4]), (4, [4]), (3, [3]), (6, [6])
    ]  # fmt: skip


def test_a_step_that_runs_out_of_memory_is_done_again_with_half_as_many_sequences(tmp_path, capsys):
    with small_trainer(tmp_path / "disturbed", *AUTO) as trainer:
        trainer.micro_batch._take_first(Setting(6))
        out_of_memory_once(trainer, step=3, call=2)
        ours = trained(trainer)
        assert trainer.micro_batch.size == 3
    assert "step 3: out of memory with micro-batch 6: repeating the step with 3" in capsys.readouterr().err
    with small_trainer(tmp_path / "undisturbed", *AUTO) as trainer:
        trainer.micro_batch._take_first(Setting(6))
        trained(trainer, 2)
        trainer.micro_batch._take_first(Setting(3))
        assert_same(ours, trained(trainer, 2))


@pytest.mark.slow
def test_a_compiled_run_may_halve_as_often_as_it_has_to(tmp_path, monkeypatch):
    """Each size is a graph of the layers with gradients and, in validation, one without; dynamo keeps eight."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    with small_trainer(tmp_path / "run", *AUTO, "training.batch_size=16", "runtime.compile=true") as trainer:
        trainer.micro_batch.choose()
        accumulate, batches = trainer.accumulate, trainer.data.batches(None)
        for most in (16, 8, 4, 2, 1):

            def runs_out(tokens, size, most=most):
                sums = accumulate(tokens, size)
                if size > most:
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
                return sums

            trainer.accumulate = runs_out
            trainer.advance(batches)
            trainer._validate()
            assert trainer.micro_batch.size == most
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("override", "size", "said"),
    [("runtime.micro_batch_size=6", 6, "set by runtime.micro_batch_size"), (AUTO[0], 1, "runtime.recompute=true")],
)
def test_a_given_number_is_not_halved_nor_is_one(override, size, said, tmp_path):
    with small_trainer(tmp_path / "run", *AUTO, override) as trainer:
        if override == AUTO[0]:
            trainer.micro_batch._take_first(Setting(1))
        before = state(trainer)
        out_of_memory_once(trainer, step=1, call=2)
        with pytest.raises(OutOfMemory, match=f"step 1: out of memory with micro-batch {size}.*{said}"):
            trained(trainer)
        assert_same(state(trainer), before)


def test_a_record_that_cannot_be_read_is_named(tmp_path):
    with small_trainer(tmp_path / "run", *AUTO) as trainer:
        (tmp_path / "run" / RECORD).write_text('{"most": "some"}')
        with pytest.raises(MicroBatchError, match=rf"{RECORD} cannot be read .*Remove it"):
            trainer.micro_batch.choose()


def test_memory_that_ran_out_is_named_where_the_record_cannot_be_written(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(micro_batch, "write_whole", full)
    with small_trainer(tmp_path / "run", *AUTO) as trainer:
        trainer.micro_batch.ranks = replace(trainer.ranks, world_size=2)
        said = rf"^lost\. .*{RECORD}, which limits .* 6, cannot be written \(No space.*runtime\.micro_batch_size=6"
        with pytest.raises(OutOfMemory, match=said):
            trainer.micro_batch._halve("lost")


def test_a_run_that_has_gone_back_does_not_return_to_more_than_its_record_says(tmp_path):
    with small_trainer(tmp_path / "run", *AUTO) as trainer:
        FakeGpu(trainer, sequences=12)
        trainer.micro_batch.choose()
        gone_back = {**trainer.micro_batch.state(), "size": 3, "first": 3, "grown": 12}
    with small_trainer(tmp_path / "run", *AUTO) as trainer:
        FakeGpu(trainer, sequences=12)
        trainer.micro_batch.restore(gone_back)
        (tmp_path / "run" / RECORD).write_text('{"most": 6, "because": "rank 1"}')
        trainer.micro_batch.choose()
        trainer.micro_batch.decided(trainer.step, torch.zeros(12, 17, dtype=torch.int64))
        assert trainer.micro_batch.size <= 6


@pytest.mark.slow
def test_two_ranks_agree_grow_alike_and_go_on_with_half_after_one_ran_out_of_memory(tmp_path):
    """Rank 1 has room for less than rank 0. It runs out of memory once both have grown, and torchrun starts them again
    from the checkpoint of step 10."""
    script = Path(__file__).parents[1] / "small_memory.py"
    done = torchrun(2, "--max-restarts=1", script, tmp_path, "run.name=run", "training.batch_size=32",
                    "training.steps=20", "logging.every=1", "run.checkpoint_every=5")  # fmt: skip
    folder = tmp_path / "run"
    record = json.loads((folder / RECORD).read_text())
    said = f"step {OUT_OF_MEMORY}: out of memory with micro-batch 8"
    assert record == {"most": 4, "because": f"rank 1, {said}"}
    assert f"rank 1: {said}. Restarted" in done.stderr
    assert "step 9: layers are sparse: micro-batch 4 -> 8" in done.stderr
    assert "the micro-batch size is limited to 4: rank 1, step 11" in done.stderr
    rows = read(folder / METRICS)
    assert [row["step"] for row in rows] == list(range(1, 21))
    assert sizes(rows) == [4] * 8 + [8] * 2 + [4] * 10
    assert (folder / "checkpoints/step_00000020/COMMITTED").exists()
