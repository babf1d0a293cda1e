"""The sparsity policy: schedules, normalisations, dead neurons, and their re-initialization."""

import math
from functools import partial

import pytest
import torch
from small_run import small_trainer

from sparsellm.config import L1Normalization, L1Schedule, ModelConfig, SparsityConfig, l1_denominator
from sparsellm.runs.metrics import METRICS, read
from sparsellm.training import sparsity
from sparsellm.training.sparsity import SilentNeurons, l1_coefficient

WARMUP = ["sparsity.l1_schedule=linear", "sparsity.l1_start_tokens=64", "sparsity.l1_warmup_tokens=640"]
REINIT = ["sparsity.reinit_dead_after_tokens=256", "sparsity.reinit_every=2"]  # 2 steps of 128 tokens


def test_the_coefficient_is_constant_or_grows_after_the_start():
    constant = SparsityConfig(l1_coefficient=2e-5)
    assert [l1_coefficient(tokens, constant) for tokens in (1, 100)] == [2e-5, 2e-5]
    late = SparsityConfig(l1_coefficient=2e-5, l1_start_tokens=100)
    assert [l1_coefficient(tokens, late) for tokens in (1, 100, 101)] == [0, 0, 2e-5]
    linear = SparsityConfig(l1_coefficient=2e-5, l1_schedule=L1Schedule.linear, l1_warmup_tokens=400)
    assert [l1_coefficient(t, linear) for t in (100, 200, 399)] == pytest.approx([5e-6, 1e-5, 1.995e-5])
    assert [l1_coefficient(tokens, linear) for tokens in (400, 401, 10**12)] == [2e-5] * 3
    cosine = SparsityConfig(l1_coefficient=2e-5, l1_schedule=L1Schedule.cosine, l1_warmup_tokens=300)
    assert [l1_coefficient(t, cosine) for t in (100, 150, 200, 300, 301)] == pytest.approx(
        [5e-6, 1e-5, 1.5e-5, 2e-5, 2e-5]
    )
    linear.l1_start_tokens = 100
    assert [l1_coefficient(t, linear) for t in (99, 100, 200, 500)] == pytest.approx([0, 0, 5e-6, 2e-5])


def test_means_divide_by_what_they_are_taken_over():
    model = ModelConfig(intermediate_size=5632, num_layers=8)
    divided = {each.name: l1_denominator(each, model) for each in L1Normalization}
    assert divided == {"sum": 1, "mean": 5632 * 8, "layer_mean": 8}


@pytest.mark.parametrize("batch_size", [4, 8])
@pytest.mark.slow
def test_rows_have_the_coefficient_in_force_whatever_the_batch_size(batch_size, tmp_path):
    overrides = [*WARMUP, f"training.batch_size={batch_size}", f"training.steps={96 // batch_size}", "logging.every=1"]
    with small_trainer(tmp_path / "run", *overrides) as trainer:
        assert trainer.fit() == 0
    rows = read(tmp_path / "run" / METRICS)
    for row in rows:
        assert row["l1_coefficient"] == pytest.approx(1e-2 * min(1, max(0, row["tokens"] - 64) / 640))
        assert row["loss"] == row["ce"] + row["l1_coefficient"] * row["l1"]
    assert rows[-1]["tokens"] == 96 * 16
    assert rows[-1]["l1_coefficient"] == 1e-2


def test_a_changing_coefficient_compiles_nothing_anew(tmp_path, monkeypatch):
    """What decides is Dynamo's guards, so a backend that compiles nothing shows it as well as Inductor."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    graphs = torch._dynamo.utils.counters["stats"]
    with small_trainer(tmp_path / "run", *WARMUP, *REINIT, "runtime.compile=true") as trainer:
        batches = trainer.data.batches(None)
        trainer.advance(batches)
        compiled, coefficients = graphs["unique_graphs"], set()
        for _ in range(6):
            trainer.advance(batches)
            coefficients.add(l1_coefficient(trainer.tokens, trainer.config.sparsity))
        assert graphs["unique_graphs"] == compiled > 0
        assert len(coefficients) > 4
    torch._dynamo.reset()


def test_silence_is_counted_in_tokens_and_ends_with_firing(monkeypatch):
    monkeypatch.setattr(sparsity.dist, "all_reduce", lambda *_args, **_kwargs: None)
    silent = SilentNeurons(ModelConfig(num_layers=1, intermediate_size=3), torch.device("cpu"))
    for fired in ([True, False, True], [False, False, True], [False, True, True]):
        silent.update(torch.tensor([fired]), 100, torch.tensor(True))
        silent.update(torch.tensor([[True] * 3]), 100, torch.tensor(False))  # of a step that was skipped
    assert silent.tokens.tolist() == [[200, 0, 0]]
    assert silent.reduced() is not silent.tokens
    assert torch.equal(silent.reduced(), silent.tokens)


def state(trainer):
    return {name: t.clone() for name, t in trainer._tensors(trainer.silent.tokens).items()}


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "nongated"])
def test_only_the_gate_rows_of_silent_neurons_and_their_moments_change(gated, tmp_path):
    gate = "gate_proj" if gated else "up_proj"
    with small_trainer(tmp_path / "run", *REINIT, f"model.gated={gated}", "model.hidden_size=512") as trainer:
        trainer.advance(trainer.data.batches(None))
        before, random_state = state(trainer), torch.get_rng_state()
        silent_tokens = torch.full((2, 48), 255)
        silent_tokens[1, ::2], silent_tokens[1, 5] = 256, 1000
        trainer.reinitialization.apply(2, silent_tokens)
        after = state(trainer)
        assert torch.equal(torch.get_rng_state(), random_state)
    rows = silent_tokens[1] >= 256
    name = f"layers.1.mlp.{gate}.weight"
    changed = {
        f"model.{name}", f"optimizer.{name}.exp_avg", f"optimizer.{name}.exp_avg_sq", "sparsity.drawn_at",
        "sparsity.reinitialized",
    }  # fmt: skip
    assert {key for key in before if not torch.equal(before[key], after[key])} == changed
    for key in (f"model.{name}", f"optimizer.{name}.exp_avg", f"optimizer.{name}.exp_avg_sq"):
        assert torch.equal(before[key][~rows], after[key][~rows])
    assert not after[f"optimizer.{name}.exp_avg"][rows].any()
    assert not after[f"optimizer.{name}.exp_avg_sq"][rows].any()
    drawn = after[f"model.{name}"][rows]  # 25 x 512 numbers: 1% is more than one standard error of their deviation
    assert drawn.std().item() == pytest.approx(0.2, rel=0.05)
    assert abs(drawn.mean().item()) < 0.01
    assert after["sparsity.reinitialized"].tolist() == [0, 25]


def test_draws_repeat_by_seed_step_and_layer(tmp_path):
    with small_trainer(tmp_path / "run", *REINIT) as trainer:
        reinitialization, everyone = trainer.reinitialization, torch.full((2, 48), 10**9)

        def draw(step, seed=0):
            reinitialization.seed = seed
            reinitialization.drawn_at.zero_()
            reinitialization.apply(step, everyone)
            return [weight.detach().clone() for weight in reinitialization.weights]

        first, second = draw(2)
        other_step, other_seed = draw(4)[0], draw(2, seed=2**63 - 1)[0]
        assert len({weight[0, 0].item() for weight in (first, second, other_step, other_seed)}) == 4
        assert all(torch.equal(a, b) for a, b in zip((first, second), draw(2), strict=True))


def test_a_drawn_neuron_has_the_same_time_to_fire_again_and_counts_as_dead_until_then(tmp_path):
    overrides = [*REINIT, "logging.every=1", "sparsity.dead_after_tokens=256"]
    with small_trainer(tmp_path / "run", *overrides, "sparsity.reinit_dead_after_tokens=384") as trainer:
        fired, update = torch.ones(2, 48, dtype=torch.bool), trainer.silent.update
        fired[1, :7] = False
        trainer.silent.update = lambda _fired, tokens, counts: update(fired, tokens, counts)
        assert trainer.fit() == 0
    rows = read(tmp_path / "run" / METRICS)
    # 384 tokens are 3 steps: drawn at steps 4 and 8, not at 6; at 12 there is no time left to learn.
    assert [row["reinitialized_per_layer"][1] for row in rows] == [0, 0, 0, 7, 7, 7, 7, 14, 14, 14, 14, 14]
    assert [row["dead_per_layer"][1] for row in rows] == [0] + [7] * 11
    assert [row["reinitialized_per_layer"][0] for row in rows] == [0] * 12


def test_a_step_that_is_skipped_ends_no_silence(tmp_path):
    """NaN counts as firing everywhere. Rows are drawn when the silence of the steps that count is long enough."""
    overrides = [*REINIT, "logging.every=1", "sparsity.dead_after_tokens=256", "optimizer.learning_rate=1e-6"]
    with small_trainer(tmp_path / "run", *overrides) as trainer:
        first, second = (layer for layer in trainer.decoder.layers)
        with torch.no_grad():
            second.mlp.gate_proj.weight[:5] = 0
        first.post_attention_layernorm.register_forward_hook(
            lambda _module, _inputs, out: out * math.nan if trainer.step == 3 else out
        )
        assert trainer.fit() == 0
    rows = read(tmp_path / "run" / METRICS)
    assert [row["skipped_steps"] for row in rows[:4]] == [0, 0, 1, 1]
    assert [row["dead_per_layer"][1] for row in rows[:3]] == [0, 5, 5]
    assert [row["reinitialized_per_layer"][1] for row in rows[:4]] == [0, 5, 5, 5]


def test_the_updates_of_a_drawn_row_are_what_the_docstring_says():
    """Compared with a row that has seen the same gradient for 10,000 steps."""
    weight = torch.zeros(2, dtype=torch.float64)
    adamw = torch.optim.AdamW([weight], lr=1, betas=(0.9, 0.95), eps=0, weight_decay=0)
    old = torch.tensor([0.0, 1.0], dtype=torch.float64)
    adamw.state[weight] = {"step": torch.tensor(1e4), "exp_avg": old.clone(), "exp_avg_sq": old.clone()}
    ratios = []
    for _ in range(200):
        before, weight.grad = weight.clone(), torch.ones_like(weight)
        adamw.step()
        drawn, usual = (weight - before).tolist()
        ratios.append(drawn / usual)
    assert ratios[0] == pytest.approx(0.1 / 0.05**0.5)
    assert next(n for n, ratio in enumerate(ratios, 1) if ratio > 1) == 9
    assert (ratios.index(max(ratios)) + 1, max(ratios)) == (20, pytest.approx(1.0967, abs=1e-4))
    assert ratios[-1] == pytest.approx(1, abs=1e-4)


def test_a_blend_moves_silent_rows_a_little_at_every_draw_until_they_fire(tmp_path):
    with small_trainer(tmp_path / "run", *REINIT, "sparsity.reinit_blend=0.25") as trainer:
        reinitialization, silent_tokens = trainer.reinitialization, torch.zeros(2, 48, dtype=torch.int64)
        silent_tokens[1, :7] = 256

        def after_draw(step):
            reinitialization.apply(step, silent_tokens)
            return reinitialization.weights[1].detach().clone()

        first = reinitialization.weights[1].detach().clone()
        blended, again = after_draw(2), after_draw(3)  # the second before the waiting time has passed again
        reinitialization.blend = 1
        drawn = []
        for step in (2, 3):
            reinitialization.drawn_at.zero_()
            drawn.append(after_draw(step)[:7])
    torch.testing.assert_close(blended[:7], 0.75 * first[:7] + 0.25 * drawn[0])
    torch.testing.assert_close(again[:7], 0.75 * blended[:7] + 0.25 * drawn[1])
    assert torch.equal(again[7:], first[7:])


def test_drawn_neurons_live_where_others_stay_dead(tmp_path):
    """Gate rows of 0 never fire and get no gradient."""
    dead = {}
    for name, overrides in {"off": [], "on": REINIT}.items():
        with small_trainer(tmp_path / name, *overrides, "sparsity.dead_after_tokens=256") as trainer:
            with torch.no_grad():
                trainer.decoder.layers[0].mlp.gate_proj.weight[:20] = 0
            assert trainer.fit() == 0
        last = read(tmp_path / name / METRICS)[-1]
        dead[name] = last["dead_per_layer"][0]
    assert last["reinitialized_per_layer"][0] >= 20
    assert dead["off"] >= 20
    assert dead["on"] == 0


def test_rows_are_drawn_while_there_is_time_to_learn(tmp_path):
    with small_trainer(tmp_path / "run", *REINIT) as trainer:
        assert [step for step in range(1, 13) if trainer.reinitialization.due(step)] == [2, 4, 6, 8, 10]
    with small_trainer(tmp_path / "run", *REINIT, "sparsity.reinit_dead_after_tokens=257") as trainer:
        assert [step for step in range(1, 13) if trainer.reinitialization.due(step)] == [2, 4, 6, 8]
    with small_trainer(tmp_path / "run", *REINIT, "sparsity.relu_tokens=600") as trainer:  # ReLU from step 5 on
        assert [step for step in range(1, 13) if trainer.reinitialization.due(step)] == [6, 8, 10]
    with small_trainer(tmp_path / "run") as trainer:
        assert trainer.reinitialization is None
