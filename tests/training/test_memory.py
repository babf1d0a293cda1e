"""Estimated memory compared with peaks measured on H200s (docs/RESULTS.md, docs/dev/LOG.md)."""

import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from small_run import small_config, small_trainer
from whole_config import room_mistakes, step_memory

from sparsellm.config import from_overrides, state_bytes
from sparsellm.ops import Engine, Plan
from sparsellm.training import memory, sharding
from sparsellm.training.memory import GIB, Sharing
from sparsellm.training.micro_batch import MicroBatch, Setting

ROOT = Path(__file__).parents[2]
SIZES = ("0p5b", "1b", "1p5b", "2b")
# GiB at the peak of a step of 64 sequences: docs/RESULTS.md, largest micro-batch in 77 GiB.
MEASURED = {
    "torch": [
        ("0p5b", 16, 29.93), ("0p5b", 32, 49.34), ("1b", 8, 40.50), ("1b", 16, 61.86),
        ("1p5b", 4, 44.26), ("1p5b", 8, 60.77), ("2b", 2, 46.78), ("2b", 4, 58.71),
    ],
    "dense": [
        ("0p5b", 32, 40.57), ("0p5b", 64, 70.80), ("1b", 8, 34.70), ("1b", 16, 51.42),
        ("1p5b", 4, 38.85), ("1p5b", 8, 51.75), ("2b", 4, 51.36), ("2b", 8, 68.80),
    ],
    "tile": [
        ("0p5b", 32, 30.64), ("0p5b", 64, 50.73), ("1b", 16, 40.16), ("1b", 32, 62.43),
        ("1p5b", 8, 43.01), ("1p5b", 16, 60.05), ("2b", 4, 45.42), ("2b", 8, 56.94),
    ],
}  # fmt: skip
# (overrides, engine, GB at the peak of a step of one micro-batch of 16): four layers of the experiments' width.
RECOMPUTED = [
    ([], None, 8.33), ([], "dense", 8.72), (["model.gated=false"], None, 7.28),
    (["sparsity=dense_silu", "sparsity.l1_coefficient=0"], None, 8.04),
]  # fmt: skip
ARCHITECTURE = [
    "model.num_key_value_heads=1", "model.head_dim=12", "model.qk_norm=true", "model.tie_embeddings=false",
]  # fmt: skip


@pytest.fixture(autouse=True)
def layouts(monkeypatch):
    """What each engine saves, as kernels/ lays it out: g and u, or 6 bytes for each nonzero that the lists have room
    for and some 100 of plans."""

    def saved(plan, tokens, neurons, gated, dtype):
        return tokens * (2 * neurons * dtype.itemsize if plan.engine == Engine.dense else 6 * plan.room + 100)

    monkeypatch.setattr(memory, "saved_bytes", saved)


@pytest.mark.parametrize(
    ("way", "experiment", "micro_batch", "measured"),
    [(way, *measured) for way in MEASURED for measured in MEASURED[way]],
)
def test_the_arithmetic_gives_what_was_measured(way, experiment, micro_batch, measured):
    config = from_overrides([f"experiment={experiment}", "training.batch_size=64"])
    plan = None if way == "torch" else Plan.of(way)
    found = step_memory(config).usage(micro_batch, [plan] * config.model.num_layers).total / GIB
    assert found == pytest.approx(measured, rel=0.006)


@pytest.mark.parametrize(("ranks", "muon"), [(1, False), (8, False), (8, True)])
def test_a_start_is_refused_by_the_state_that_a_step_holds(ranks, muon):
    config = from_overrides(["experiment=1p5b", "runtime.shard=full", f"optimizer.muon={muon}"])
    found = step_memory(config, ranks, Sharing(ranks)).usage(1, [None] * config.model.num_layers)
    assert found.weights + found.gradients + found.optimizer == state_bytes(
        config.model, config.runtime.shard, ranks, muon
    )


@pytest.mark.parametrize("muon", ["false", "true"])
@pytest.mark.parametrize("overrides", [["model.gated=false", "model.attention_bias=true"], ARCHITECTURE])
def test_the_arithmetic_of_weights_and_moments_gives_their_bytes(overrides, muon, tmp_path, monkeypatch):
    overrides = [*overrides, f"optimizer.muon={muon}", f"run.root={tmp_path}", "run.name=new"]
    with small_trainer(tmp_path / "run", *overrides) as trainer:
        config, tensors = trainer.config, trainer._tensors(trainer.silent.tokens)
    weights, moments = (
        sum(tensor.nbytes for name, tensor in tensors.items() if re.fullmatch(pattern, name))
        for pattern in (r"model\..*", r"optimizer\..*\.(exp_avg|exp_avg_sq|momentum)")
    )
    found = step_memory(config).usage(1, [None] * config.model.num_layers)
    assert (found.weights, found.gradients, found.optimizer) == (weights, weights, moments)
    assert state_bytes(config.model, config.runtime.shard, 1, muon == "true") == 2 * weights + moments
    needed = 2 * weights + moments  # the checkpoint's state and the float32 model in hf/
    for free in (needed, needed - 1):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: SimpleNamespace(free=free))
        assert (room_mistakes(config) == []) == (free == needed)


@pytest.mark.parametrize(("overrides", "engine", "measured"), RECOMPUTED)
def test_the_arithmetic_gives_what_was_measured_with_recomputation(overrides, engine, measured):
    config = from_overrides(["experiment=1p5b", "model.num_layers=4", "training.batch_size=16", *overrides])
    found = step_memory(config).usage(16, [None if engine is None else Plan.of(engine)] * 4, recompute=True).total / 1e9
    assert found == pytest.approx(measured, rel=0.025)


@pytest.mark.parametrize(
    ("neurons", "measured", "with_casts"), [(5_632, 0.73, 0.754), (11_264, 0.63, 0.665), (16_384, 0.59, 0.624)]
)
def test_wide_layers_need_the_measured_part_of_pytorchs_memory(neurons, measured, with_casts):
    """14 layers, steps of two micro-batches of 8, on one H100; with shared casts on an H200."""
    config = from_overrides(
        ["experiment=1p5b", "model.num_layers=14", "training.batch_size=16", f"model.intermediate_size={neurons}"]
    )
    torchs, ours = (step_memory(config).usage(8, [plan] * 14).total for plan in (None, Plan.of("tile")))
    assert ours / torchs == pytest.approx(measured, abs=0.01)
    casts = step_memory(config).shared_casts([Plan.of("tile")] * 14)
    assert (ours + casts) / torchs == pytest.approx(with_casts, abs=0.005)


@pytest.mark.parametrize(
    ("overrides", "engine", "measured"),
    [
        (["runtime.kernels=torch"], None, 34_776_133_632),
        (["runtime.kernels=torch", "runtime.float8=all"], None, 27_585_099_776),
        (["runtime.kernels=torch", "runtime.float8=all", "runtime.float8_recipe=rowwise"], None, 27_584_999_424),
        ([], "tile", 25_239_353_856),
        (["runtime.float8=attention"], "tile", 23_827_879_936),
        (["runtime.float8=all"], "tile", 23_827_879_936),  # the gate product in FP8 saves what it saves in bfloat16
    ],
)
def test_the_arithmetic_gives_what_was_measured_in_float8(overrides, engine, measured):
    """Bytes at the peak of a step of two micro-batches of 8, on one H100 with torchao 0.18 (docs/dev/LOG.md)."""
    config = from_overrides(["experiment=1p5b", "model.num_layers=14", "training.batch_size=16", *overrides])
    found = step_memory(config).usage(8, [None if engine is None else Plan.of(engine)] * 14).total
    assert found == pytest.approx(measured, rel=0.004)


@pytest.mark.parametrize("engine", [None, "dense", "tile"])
@pytest.mark.parametrize("setting", ["runtime.compile=false", "runtime.compile=true", "runtime.recompute=true"])
def test_a_gate_in_float8_on_the_kernels_needs_what_attention_in_float8_needs(setting, engine):
    """Also while sparsity.relu_tokens leaves the layers to PyTorch, in bfloat16."""
    plans = [None if engine is None else Plan.of(engine)] * 28
    gate, attention = (
        step_memory(from_overrides(["experiment=1p5b", setting, f"runtime.float8={layers}"]))
        for layers in ("all", "attention")
    )
    for recompute in (False, True):
        assert gate.usage(8, plans, recompute) == attention.usage(8, plans, recompute)


@pytest.mark.parametrize("setting", ["runtime.compile=false", "runtime.compile=true"])
def test_float8_saves_the_copies_of_weights_and_never_needs_more_in_compiled_layers(setting):
    shape = ["experiment=1p5b", "training.batch_size=16", "runtime.kernels=torch", setting]
    exact, attention, every = (
        step_memory(from_overrides([*shape, *more])).usage(8, [None] * 28).activations
        for more in ([], ["runtime.float8=attention"], ["runtime.float8=all"])
    )
    model = from_overrides(shape).model
    assert exact - attention >= 2 * 28 * 4 * model.hidden_size**2
    assert setting.endswith("false") or every < attention


def chosen(overrides, ranks, engine, first=None):
    """The setting that `auto` chooses on GPUs of 80 GB, of which tensors get 76 GiB, and its GiB. All layers are
    `engine`; None: PyTorch. `first`: the setting until then; None: at the start of a run."""
    config = from_overrides(overrides)
    model, shard, plan = config.model, config.runtime.shard, None if engine is None else Plan.of(engine)
    shared = sharding.sharing(model, shard, SimpleNamespace(world_size=ranks))
    plans = SimpleNamespace(plans=[plan] * model.num_layers)
    found = MicroBatch(step_memory(config, ranks, shared), None, None, None, plans, SimpleNamespace(), None, None)
    setting = found._fastest(76 * GIB, found._settings())
    if first is not None:
        found.setting = first
        setting = setting if found._worth(setting) else first
    return setting, found.usage(setting).total / GIB


@pytest.fixture
def one_node(monkeypatch):
    monkeypatch.setattr(sharding, "gather", lambda value: [value])


@pytest.mark.usefixtures("one_node")
@pytest.mark.parametrize("engine", [None, "dense", "tile"])
@pytest.mark.parametrize(("experiment", "ranks"), [(e, r) for e in SIZES for r in (1, 8)] + [("7b", 8)])
def test_no_experiment_of_the_papers_width_recomputes(experiment, ranks, engine):
    found, without = (
        chosen([f"experiment={experiment}", *more], ranks, engine) for more in ([], ["runtime.recompute=false"])
    )
    assert found == without


@pytest.mark.usefixtures("one_node")
def test_the_tables_of_micro_batches_follow_from_the_arithmetic():
    """The README's table, and that of wide layers in TRAINING."""
    documents = "".join((ROOT / name).read_text() for name in ("README.md", "docs/TRAINING.md"))
    rows = re.findall(r"^\| `(\w+)` \|.*\| (\d+), (\d+) GiB(?:, sharded)? \| (\d+), (\d+) GiB \|", documents, re.M)
    assert [name for name, *_ in rows] == [*SIZES, "7b", *(f"{size}_wide" for size in SIZES)]
    for name, *said in rows:
        first = chosen([f"experiment={name}"], 8, "dense")
        found = first, chosen([f"experiment={name}"], 8, "tile", first[0])
        assert not any(setting.recompute for setting, _ in found)
        numbers = [number for setting, gib in found for number in (setting.size, gib)]
        assert [int(number) for number in said] == pytest.approx(numbers, abs=0.7), name


@pytest.mark.usefixtures("one_node")
@pytest.mark.parametrize(
    ("overrides", "ranks", "dense", "sparse"),
    [
        (["experiment=2b_wide", "runtime.shard=none"], 8, Setting(8, True), Setting(2)),
        (["experiment=1p5b_wide", "model.intermediate_size=16384"], 8, Setting(8, True), Setting(2)),
        # Measured: 1.10 times as fast dense, 1.27 times sparse (docs/RESULTS.md, "Sharded training").
        (["experiment=7b", "training.batch_size=16"], 2, Setting(8, True), Setting(8, True)),
        (["experiment=2b_wide", "runtime.shard=none", "runtime.recompute=false"], 8, Setting(1), Setting(2)),
    ],
)
def test_auto_recomputes_where_few_tokens_fit_otherwise(overrides, ranks, dense, sparse):
    assert chosen(overrides, ranks, "dense")[0] == dense
    assert chosen(overrides, ranks, "tile")[0] == sparse


def test_states_that_ranks_share_take_their_part(monkeypatch):
    config = from_overrides(["experiment=1p5b", "training.batch_size=64"])
    whole = step_memory(config, 4).usage(4, [None] * 28)
    assert whole.optimizer == 2 * whole.weights == 2 * whole.gradients == 2 * whole.buckets
    shared = step_memory(config, 4, Sharing(4)).usage(4, [None] * 28)
    assert (shared.weights, shared.gradients, shared.optimizer) == (
        whole.weights // 4, whole.gradients // 4, whole.optimizer // 4
    )  # fmt: skip
    assert shared.buckets == 0
    assert shared.activations == whole.activations
    assert shared.total == sum(shared[:5])


def test_ddp_has_no_gradients_beside_its_buckets_unless_a_step_accumulates():
    one = step_memory(small_config(), 2).usage(4, [None] * 2)
    assert (one.gradients, one.buckets) == (0, one.weights)
    two = step_memory(small_config(), 2).usage(2, [None] * 2)
    assert (two.gradients, two.buckets) == (two.weights, two.weights)


def test_grouped_heads_keep_less_and_an_output_matrix_of_its_own_is_one_more_state():
    """Queries, keys, values and output are E (2 Q + 2 R) of a token, and the matrices' casts E K (2 Q + 2 R)."""
    plain = from_overrides(["experiment=0p5b", "training.batch_size=16"])
    grouped = from_overrides(["experiment=0p5b", "training.batch_size=16", "model.num_key_value_heads=8"])
    untied = from_overrides(["experiment=0p5b", "training.batch_size=16", "model.tie_embeddings=false"])
    before, fewer, more = (step_memory(config).usage(16, [None] * 8) for config in (plain, grouped, untied))
    narrower = 2 * 2 * (32 - 8) * 64  # bytes of a token
    assert before.activations - fewer.activations == 8 * narrower * (16 * 2048 + 2048)
    assert more.weights - before.weights == 4 * 49_152 * 2_048
    assert more.activations == before.activations
