"""Plans: decided at the documented steps from the documented counts, equal after a resume, without effect on results.

On the CPU the trainer runs the dense engine of the registered operator; which engine a plan names is for tests/gpu.
"""

import json
import math
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from small_run import first_gradients, force_plans, small_config, small_trainer

from sparsellm.distributed.groups import Ranks, process_group
from sparsellm.ops import Engine, Plan, backend, saved_bytes
from sparsellm.ops.plan import ROOM
from sparsellm.policy import Policy, costs, first_use, store
from sparsellm.policy.costs import Cost, Costs
from sparsellm.runs.metrics import METRICS, read
from sparsellm.runs.step_metrics import StepSums
from sparsellm.training.plans import Plans

# Large enough for the tile engine to pay: 4 + 4 + 2 sequences to a micro-batch, 20,480 tokens to a step.
LARGE = ["model.hidden_size=2048", "model.intermediate_size=5632", "model.context_length=2048", "model.num_heads=32",
         "training.sequence_length=2048", "training.batch_size=10", "runtime.micro_batch_size=4"]  # fmt: skip
STEP_TOKENS, STEP_TILES = 20_480, 160
START = list(Plan())
COUNTS = torch.tensor(True)


@contextmanager
def fake(*overrides, layers=2):
    """Plans of `layers` layers, without a model."""
    with process_group("cpu"):
        yield plans_of(*overrides, layers=layers)


def plans_of(*overrides, layers=2):
    mlps = [SimpleNamespace(choice=SimpleNamespace()) for _ in range(layers)]
    decoder = SimpleNamespace(layers=[SimpleNamespace(mlp=mlp) for mlp in mlps])
    config = small_config(*LARGE, *overrides)
    made = Plans(
        config.model,
        config.training,
        config.runtime,
        decoder,
        Ranks(rank=0, world_size=1, device=torch.device("cpu"), checkpoint_group=None),
    )
    assert all(layer.mlp.training_plan is plan for layer, plan in zip(decoder.layers, made.tensors, strict=True))
    return made


def counted(per_token, per_tile, fullest=None):
    """The sums of a step with these counts in each layer."""
    sums = StepSums()
    sums.nnz = torch.tensor([int(value * STEP_TOKENS) for value in per_token])
    sums.union = torch.tensor([value * STEP_TILES for value in per_tile])
    sums.fullest = torch.tensor(per_token if fullest is None else fullest, dtype=torch.float64)
    return sums


def values(plans):
    return [list(plan) for plan in plans.plans]


def test_a_step_decides_before_the_step_after_the_next():
    with fake() as plans:
        seen = []
        for step in range(1, 21):
            plans.before(step)
            seen.append(plans.engines)
            layer_0 = 30.0 if step != 9 else 2800.0
            layer_1 = 900.0 if step == 1 else 30.0
            unions = [500 if layer < 100 else 5632 for layer in (layer_0, layer_1)]
            plans.after(step, counted([layer_0, layer_1], unions), COUNTS)
    of_1, of_9, of_17 = ["tile", "dense"], ["dense", "tile"], ["tile", "tile"]
    assert seen == [["dense", "dense"]] * 2 + [of_1] * 8 + [of_9] * 8 + [of_17] * 2


def test_the_choice_is_by_the_mean_micro_batch_and_the_plan_in_effect(monkeypatch):
    asked = []

    def choose(tokens, width, neurons, nnz, union, current):
        asked.append((tokens, width, neurons, pytest.approx(nnz), pytest.approx(union), current))
        return Engine.tile

    monkeypatch.setattr(Policy, "choose_training_engine", staticmethod(choose))
    with fake(layers=1) as plans:
        for step in range(1, 12):
            plans.before(step)
            plans.after(step, counted([36], [640]), COUNTS)
    mean = (STEP_TOKENS // 3, 2048, 5632, 36 * (STEP_TOKENS // 3), 640 * STEP_TILES * (STEP_TOKENS // 3) / STEP_TOKENS)
    assert asked == [(*mean, Engine.dense), (*mean, Engine.tile)]


def test_a_union_that_was_not_measured_is_dense():
    with fake(layers=1) as plans:
        plans.tensors[0].copy_(Plan.of("tile").tensor())
        plans.after(1, counted([5], [-1]), COUNTS)
        plans.before(3)
        assert plans.engines == ["dense"]


@pytest.mark.parametrize(
    ("fullest", "room"),
    [(0, ROOM), (80, 320), (80.1, 352), (100, 416), (320, 1280)],
)
def test_the_room_is_for_the_fullest_micro_batch_and_a_margin(fullest, room):
    with fake(layers=1) as plans:
        plans.after(1, counted([20], [500], [fullest]), COUNTS)
        plans.before(3)
        assert values(plans) == [[Engine.tile, room]]


def test_a_micro_batch_that_could_run_out_of_room_is_dense_whatever_the_mean():
    with fake(layers=2) as plans:
        plans.after(1, counted([20, 20], [500, 500], [320, 321]), COUNTS)
        plans.before(3)
        assert plans.engines == ["tile", "dense"]


def test_a_resume_after_any_step_decides_as_if_there_had_been_none():
    generator = torch.Generator().manual_seed(0)
    steps = [counted(*(torch.rand(3, 2, generator=generator) * torch.tensor([[300.0], [3000], [150]])).tolist())
             for _ in range(30)]  # fmt: skip

    def run(plans, first=1):
        seen, states = [], []
        for step in range(first, 31):
            plans.before(step)
            seen.append(values(plans))
            plans.after(step, steps[step - 1], COUNTS)
            states.append(json.dumps(plans.state()))
        return seen, states

    with fake() as plans:
        straight, states = run(plans)
        assert len({str(seen) for seen in straight}) == 5  # the start, and the decisions of steps 1, 9, 17, 25
        for step, state in enumerate(states, 1):
            resumed = plans_of()
            resumed.restore(json.loads(state))
            assert values(resumed) == straight[step - 1]
            assert run(resumed, step + 1) == (straight[step:], states[step:])


def costs_of(kernels="cuda", dense=1.0):
    """Costs by which the tile engine is chosen if its fixed second is less than `dense`."""
    engines = {Engine.dense: Cost(dense), Engine.tile: Cost(1.0)}
    return Costs(kernels, 2048, 5632, {1: engines}, {1: engines})


@pytest.fixture
def measured(monkeypatch):
    """What the cache has of the layers on the CUDA kernels, which are loaded as far as that goes."""
    kept = {(2048, 5632): costs_of(dense=1.5), (64, 128): costs_of()}
    monkeypatch.setattr(backend, "loaded", lambda: "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H100")
    monkeypatch.setattr(
        first_use, "policy_for", lambda layers, *_: Policy("cuda", {k: kept[k] for k in layers if k in kept})
    )
    return kept


def test_a_run_decides_by_what_was_measured(measured):
    with fake(layers=1) as plans:
        plans.begin()
        assert plans.chosen_by() == "chosen by costs measured on this GPU model"
        assert [block.choice.policy for block in plans.blocks] == [plans.policy]  # validation chooses alike
        plans.after(1, counted([300], [5632]), COUNTS)  # the package's constants would choose dense
        plans.before(3)
        assert plans.engines == ["tile"]


@pytest.mark.parametrize("calibrate", [True, False])
def test_a_run_that_begins_measures_a_layer_that_was_not_unless_told_not_to(measured, monkeypatch, calibrate):
    asked = []

    def policy_for(layers, device, missing):
        asked.append((layers, device.type, missing))
        return Policy("cuda", {layer: costs_of(dense=1.5) for layer in missing})

    monkeypatch.setattr(first_use, "policy_for", policy_for)
    with fake(f"runtime.calibrate={str(calibrate).lower()}", layers=1) as plans:
        assert asked == []
        plans.begin()
        assert asked == [([(2048, 5632)], "cpu", [(2048, 5632)] if calibrate else [])]
        assert (plans.state()["costs"] is not None) == calibrate
        assert ("measured on this GPU model" in plans.chosen_by()) == calibrate


def test_a_run_says_by_what_it_decides_where_that_is_not_of_this_gpu(measured, monkeypatch):
    measured.clear()
    with fake(layers=1) as plans:
        plans.begin()
        assert plans.chosen_by() == (
            "chosen by an H200's constants; `sparsellm calibrate model=2048x5632` measures this GPU"
        )
        plans.restore(plans.state())
        assert plans.chosen_by() == "chosen by the constants of an H200, as when the run started"
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
        plans.restore(plans.state())
        assert plans.chosen_by() is None


@pytest.mark.parametrize("began_with", [None, costs_of(dense=3.0)])
def test_a_resume_goes_by_what_the_run_began_with(measured, began_with):
    with fake(layers=1) as plans:
        plans._choose_by(began_with)
        state = json.loads(json.dumps(plans.state()))
        resumed = plans_of(layers=1)
        resumed.restore(state)
        assert resumed.policy.measured.get((2048, 5632)) == began_with
        assert "as when the run started" in resumed.chosen_by()


def test_a_resume_goes_by_its_own_costs_and_a_run_that_begins_by_what_the_cache_has(monkeypatch, tmp_path):
    monkeypatch.setenv("SPARSELLM_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H100")
    monkeypatch.setattr(backend, "loaded", lambda: "cuda")
    store.keep(costs_of(dense=3.0), None)
    with fake(layers=1) as plans:
        plans.restore(plans.state())
        assert plans.policy.measured == {}
        plans.calibrate = False
        plans.begin()
        assert plans.policy.measured == {(2048, 5632): costs_of(dense=3.0)}


def test_a_resume_on_other_kernels_says_that_it_does_not(measured, capsys):
    with fake(layers=1) as plans:
        state = plans.state()
        state["costs"] = costs_of("triton").as_json()
        plans.restore(state)
        assert plans.policy.measured[2048, 5632] == costs_of(dense=1.5)
        assert "costs of the Triton kernels, which are not used here" in capsys.readouterr().err


def test_the_fullest_micro_batch_counts_by_its_own_tokens():
    sums = StepSums()
    for nnz, tokens in ((80, 8), (30, 2), (90, 8)):
        layer = torch.tensor([nnz])
        sums.add(SimpleNamespace(ce=torch.ones(()), kl=None, l1=layer.float(), nnz=layer, fired=layer > 0,
                                 wide_segments=layer * 0, rest_calls=layer * 0,
                                 overflow_tiles=layer * 0, union=layer * 2), tokens)  # fmt: skip
    assert sums.fullest.tolist() == [15]
    assert (sums.nnz.item(), sums.union.item()) == (200, 400)


# In the trainer.


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ["runtime.micro_batch_size=3"],
        ["runtime.micro_batch_size=3", "model.gated=false", "runtime.recompute=true"],
        ["runtime.precision=bfloat16"],
        ["runtime.compile=true", "runtime.recompute=true"],
    ],
    ids=["gated", "nongated-recompute", "autocast", "compiled-recompute"],
)
def test_gradients_are_those_of_the_traced_reference(overrides, tmp_path):
    gradients = []
    for forced in (False, True):
        torch._dynamo.reset()
        with small_trainer(tmp_path / str(forced), *overrides) as trainer:
            if forced:
                force_plans(trainer)
            gradients.append(first_gradients(trainer))
    traced, registered = gradients
    assert traced.keys() == registered.keys()
    # Sums of K, N or M terms, rounded to the compute dtype in another order, through both layers.
    eps = torch.finfo(torch.bfloat16 if "runtime.precision=bfloat16" in overrides else torch.float32).eps
    for name, gradient in traced.items():
        assert (gradient - registered[name]).norm() <= 8 * eps * gradient.norm(), name


def fit(folder, forced=True, stop_after=None, **changes):
    """The rows, the plans of each step, and the state at the end of a run; or of its steps up to `stop_after`."""
    decided = {}
    with small_trainer(folder, "run.checkpoint_every=3", *(f"{k}={v}" for k, v in changes.items())) as trainer:
        if forced:
            force_plans(trainer)
        train_step = trainer.train_step

        def recorded(tokens):
            results = train_step(tokens)
            decided[trainer.step] = values(trainer.plans) if forced else None
            return results

        trainer.train_step = recorded
        if stop_after is None:
            assert trainer.fit() == 0
        else:
            trainer._resume()
            trainer._open_log()
            batches = trainer.data.batches(trainer.data_state)
            while trainer.step < stop_after:
                trainer.advance(batches)
            trainer._save()
            trainer.checkpoints.wait()
        tensors = {name: tensor.clone() for name, tensor in trainer._tensors(trainer.silent.reduced()).items()}
    return decided, tensors


@pytest.fixture
def fine_rooms(monkeypatch):
    """Capacities that show differences in counts."""
    monkeypatch.setattr(costs, "ROOM_MULTIPLE", 1)
    monkeypatch.setattr(costs, "ROOM", 1)


@pytest.mark.usefixtures("fine_rooms")
@pytest.mark.parametrize("stop_after", [1, 2, 9, 10], ids=lambda step: f"step {step}")
@pytest.mark.slow
def test_a_resumed_run_has_the_plans_of_one_that_never_stopped(stop_after, tmp_path):
    straight, tensors = fit(tmp_path / "straight")
    assert straight[1] == straight[2] == [START] * 2
    assert START not in straight[3]
    assert straight[3] == straight[10] != straight[11] == straight[12]
    before, _ = fit(tmp_path / "stopped", stop_after=stop_after)
    after, resumed = fit(tmp_path / "stopped")
    assert before | after == straight
    assert set(before) & set(after) == set()
    assert all(torch.equal(tensors[name], resumed[name]) for name in tensors)


@pytest.mark.usefixtures("fine_rooms")
def test_a_counted_step_that_is_skipped_decides_nothing(tmp_path):
    """NaN counts as firing everywhere. The step before which step 9 would decide neither changes plans nor counts as a
    decision, also after a resume between the two."""
    decided, plans = [], []
    for last in (10, 12):
        with small_trainer(tmp_path / "run", "run.checkpoint_every=10") as trainer:
            force_plans(trainer)
            normalized = trainer.decoder.layers[0].post_attention_layernorm
            normalized.register_forward_hook(
                lambda _module, _inputs, out, trainer=trainer: out * math.nan if trainer.step == 9 else out
            )
            trainer.micro_batch.decided = lambda step, _tokens: decided.append(step)
            trainer._resume()
            trainer._open_log()
            batches = trainer.data.batches(trainer.data_state)
            while trainer.step < last:
                trainer.advance(batches)
                plans.append(values(trainer.plans))
            assert trainer.optimizer.skipped == 1
            trainer._save()
            trainer.checkpoints.wait()
    assert decided == [3]
    assert START not in plans[2]
    assert plans[2] == plans[9] == plans[10] == plans[11]


@pytest.mark.usefixtures("fine_rooms")
def test_runs_with_and_without_plans_resume_each_other(tmp_path):
    fit(tmp_path / "run", forced=False, stop_after=2)
    decided, _ = fit(tmp_path / "run", stop_after=5)
    assert decided == {step: [START] * 2 for step in (3, 4, 5)}  # counts of step 1 were not used
    assert fit(tmp_path / "run", forced=False)[0].keys() == set(range(6, 13))


@pytest.mark.slow
def test_rows_tell_the_plans_and_what_they_save(tmp_path):
    fit(tmp_path / "run", **{"runtime.micro_batch_size": 3})
    rows = read(tmp_path / "run" / METRICS)
    saved = 2 * saved_bytes(Plan(), 3 * 16, 48, True, torch.float32)
    assert {row["ffn_saved_bytes"] for row in rows} == {saved} == {2 * 2 * 48 * 48 * 4}
    assert all(row["plan_per_layer"] == ["dense", "dense"] for row in rows)
    fit(tmp_path / "recomputed", **{"runtime.recompute": "true"})
    assert all(row["ffn_saved_bytes"] == 0 for row in read(tmp_path / "recomputed" / METRICS))


def test_planned_layers_add_to_the_gradients_of_earlier_micro_batches_with_the_same_bits(tmp_path, monkeypatch):
    def gradients(name):
        with small_trainer(tmp_path / name, "runtime.micro_batch_size=3") as trainer:
            force_plans(trainer)
            return first_gradients(trainer), len(trainer.plans.weights())

    (ours, shared), _ = gradients("ours"), monkeypatch.setattr(Plans, "weights", lambda _: [])
    theirs, unshared = gradients("autograd")
    assert (shared, unshared) == (6, 0)
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


def test_while_pytorch_computes_the_layers_they_share_nothing():
    with fake() as plans:
        plans.blocks = [SimpleNamespace(parameters=lambda: ["gate", "up", "down"])] * 2
        assert len(plans.weights()) == 6
        plans.idle = True
        assert plans.weights() == []
