"""The arithmetic of memory against the peaks that were measured on H200s (docs/RESULTS.md, docs/LOG.md)."""

import pytest
from small_run import small_config

from sparsellm.config import from_overrides
from sparsellm.ops import Plan
from sparsellm.training import memory
from sparsellm.training.memory import GIB, Sharing, usage

RECOMPUTE, SILU = "runtime.recompute=true", "sparsity=dense_silu"
# (experiment, micro-batch, micro-batches, ranks, override, GiB at the peak) of the PyTorch path
MEASURED = [
    ("0p5b", 16, 1, 1, None, 28.8), ("1b", 8, 1, 1, None, 37.4), ("1p5b", 8, 1, 1, None, 55.8),
    ("2b", 8, 1, 1, None, 74.2), ("1p5b", 16, 1, 1, None, 88.8), ("1p5b", 24, 1, 1, None, 121.8),
    ("2b", 16, 1, 1, None, 118.8), ("0p5b", 16, 2, 1, None, 30.7), ("1b", 16, 2, 1, None, 62.6),
    ("1p5b", 16, 2, 1, None, 94.6), ("1p5b", 8, 4, 1, None, 61.5), ("2b", 16, 2, 1, None, 126.5),
    ("2b", 4, 8, 1, None, 58.7), ("2b", 8, 4, 1, RECOMPUTE, 38.6), ("0p5b", 16, 2, 1, SILU, 29.3),
    ("0p5b", 16, 4, 8, None, 32.6), ("0p5b", 16, 4, 8, SILU, 31.2), ("1p5b", 8, 1, 8, None, 61.5),
]  # fmt: skip
# (experiment, micro-batch, GiB) of one micro-batch with all layers on the tile engine
SPARSE = [
    ("0p5b", 16, 19.1), ("1b", 8, 26.0), ("1p5b", 8, 38.0), ("2b", 8, 50.0), ("1p5b", 16, 55.1), ("1p5b", 24, 72.1),
    ("2b", 16, 73.0),
]  # fmt: skip


def total(experiment, plan, micro_batch, count=1, ranks=1, override=None):
    overrides = [] if override is None else [override]
    config = from_overrides(
        [f"experiment={experiment}", f"training.batch_size={micro_batch * count * ranks}", *overrides]
    )
    return usage(config, ranks, micro_batch, [plan] * config.model.num_layers).total / GIB


@pytest.mark.parametrize(("experiment", "micro_batch", "count", "ranks", "override", "measured"), MEASURED)
def test_the_arithmetic_gives_what_was_measured(experiment, micro_batch, count, ranks, override, measured):
    assert total(experiment, None, micro_batch, count, ranks, override) == pytest.approx(measured, rel=0.005)


@pytest.mark.parametrize(("experiment", "micro_batch", "measured"), SPARSE)
def test_the_arithmetic_gives_what_was_measured_with_sparse_layers(experiment, micro_batch, measured, monkeypatch):
    """6 bytes for each nonzero that the lists have room for, and some 100 of plans, as kernels/ lays them out."""
    monkeypatch.setattr(memory, "saved_bytes", lambda plan, tokens, *_: tokens * (6 * plan.room + 100))
    assert total(experiment, Plan.of("tile"), micro_batch) == pytest.approx(measured, rel=0.005)


def test_states_that_ranks_share_take_their_part(monkeypatch):
    config = from_overrides(["experiment=1p5b", "training.batch_size=64"])
    whole = usage(config, 4, 4, [None] * 28)
    assert whole.optimizer == 2 * whole.weights == 2 * whole.gradients == 2 * whole.buckets
    shared = usage(config, 4, 4, [None] * 28, Sharing(weights=4, gradients=4, optimizer=4))
    assert (shared.weights, shared.gradients, shared.optimizer) == (
        whole.weights // 4, whole.gradients // 4, whole.optimizer // 4
    )  # fmt: skip
    assert shared.buckets == 0
    assert shared.activations == whole.activations
    assert shared.total == sum(shared[:5])


def test_ddp_has_no_gradients_beside_its_buckets_unless_a_step_accumulates():
    one = usage(small_config(), 2, 4, [None] * 2)
    assert (one.gradients, one.buckets) == (0, one.weights)
    two = usage(small_config(), 2, 2, [None] * 2)
    assert (two.gradients, two.buckets) == (two.weights, two.weights)


def test_grouped_heads_keep_less_and_an_output_matrix_of_its_own_is_one_more_state():
    """Queries, keys, values and output are E (2 Q + 2 R) of a token, and the matrices' casts E K (2 Q + 2 R)."""
    plain = from_overrides(["experiment=0p5b", "training.batch_size=16"])
    grouped = from_overrides(["experiment=0p5b", "training.batch_size=16", "model.num_key_value_heads=8"])
    untied = from_overrides(["experiment=0p5b", "training.batch_size=16", "model.tie_embeddings=false"])
    before, fewer, more = (usage(config, 1, 16, [None] * 8) for config in (plain, grouped, untied))
    narrower = 2 * 2 * (32 - 8) * 64  # bytes of a token
    assert before.activations - fewer.activations == 8 * narrower * (16 * 2048 + 2048)
    assert more.weights - before.weights == 4 * 49_152 * 2_048
    assert more.activations == before.activations
