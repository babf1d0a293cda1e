"""The firing patterns that benchmarks and GPU tests use, and refused recordings; tiny, on the CPU."""

import argparse
import importlib
import re

import numpy as np
import pytest
import torch

from scripts.benchmarks import patterns


@pytest.fixture
def few_neurons_firing() -> torch.Tensor:
    """bool [384, 96] with the difficulties of recorded patterns: hubs, dead neurons, a token that fires a third of
    all."""
    generator = torch.Generator().manual_seed(3)
    rates = torch.rand(96, generator=generator) ** 4 * 0.2
    rates[:30], rates[30:32] = 0, 0.9
    firing = torch.rand(384, 96, generator=generator) < rates
    firing[7, ::3] = True
    return firing


@pytest.mark.parametrize("mean", [5, 40, 150])
def test_synthetic_rates_have_the_wanted_mean_and_shape(mean):
    rates = patterns.firing_rates(mean, 512)
    assert rates.sum() == pytest.approx(mean, rel=1e-6)
    assert rates.max() <= 0.5
    assert (rates == 0).sum() == round(0.3 * 512)


def test_a_mean_beyond_the_cap_is_half_of_all_tokens_for_every_neuron():
    assert (patterns.firing_rates(2800, 5632) == 0.5).all()


def test_a_mean_of_all_neurons_is_every_neuron_for_every_token():
    assert patterns.SYNTHETIC["synthetic5632"] == patterns.N
    block = patterns.synthetic(512, 300, 128, 512, "cpu")
    assert all(firing.all() for firing in patterns.firing_chunks(block.x, block.w_gate))


@pytest.mark.parametrize("mean", [10, 60, 400])
def test_a_synthetic_block_fires_at_the_wanted_rates(mean):
    tokens, neurons = 4096, 512
    block = patterns.synthetic(mean, tokens, 128, neurons, "cpu")
    firing = torch.cat(list(patterns.firing_chunks(block.x, block.w_gate)))
    rates = patterns.firing_rates(mean, neurons)
    # Five binomial standard deviations, plus shifts from rounding to bfloat16.
    deviation = np.sqrt(rates * (1 - rates) / tokens)
    found = firing.double().mean(0).numpy()
    assert (np.abs(found - rates) <= 5 * deviation + 0.01 * rates + 5 / tokens).all()
    assert found.sum() == pytest.approx(rates.sum(), rel=0.06)
    assert not firing[:, rates == 0].any()
    assert {t.dtype for t in (block.x, block.w_gate, block.w_up, block.w_down)} == {torch.bfloat16}


def test_tokens_are_heavy_tailed():
    block = patterns.synthetic(20, 4096, 128, 512, "cpu")
    per_token = torch.cat([firing.sum(1) for firing in patterns.firing_chunks(block.x, block.w_gate)]).float()
    assert per_token.quantile(0.99) > 2.5 * per_token.mean()


def test_the_same_seed_gives_the_same_block():
    first, second = (patterns.synthetic(10, 64, 32, 64, "cpu", seed=4) for _ in range(2))
    assert torch.equal(first.x, second.x)
    assert torch.equal(first.w_down, second.w_down)


def test_union_counts_the_neurons_of_each_tile_of_128(few_neurons_firing):
    firing = few_neurons_firing[:300]
    wanted = sum(int(firing[i : i + 128].any(0).sum()) for i in (0, 128, 256))
    assert patterns.union_sum(firing) == wanted


def test_a_recording_unpacks_row_by_row(few_neurons_firing):
    row_counts = few_neurons_firing.sum(1).numpy().astype(np.uint16)
    columns = few_neurons_firing.nonzero()[:, 1].numpy().astype(np.uint16)
    assert torch.equal(patterns.dense_firing(row_counts, columns, 96), few_neurons_firing)


def test_a_fit_meets_the_pattern_exactly(few_neurons_firing):
    fitted = patterns.fit(few_neurons_firing, width=48)
    assert fitted.mismatches == 0
    assert torch.equal(torch.cat(list(patterns.firing_chunks(fitted.x, fitted.w_gate))), few_neurons_firing)
    assert fitted.x.float().square().mean().sqrt() == pytest.approx(1, rel=0.01)
    assert fitted.w_gate.float().square().mean().sqrt() == pytest.approx(0.02, rel=0.01)


def test_a_fit_that_cannot_succeed_says_by_how_much(few_neurons_firing):
    fitted = patterns.fit(few_neurons_firing, width=2, steps=20)
    found = torch.cat(list(patterns.firing_chunks(fitted.x, fitted.w_gate)))
    assert fitted.mismatches == (found != few_neurons_firing).sum() > 0


HOW = r"`python -m sparsellm\.analyze checkpoint=PATH recordings=DIR` writes recordings of a checkpoint"


@pytest.mark.parametrize(("name", "nonzeros"), [("synthetic36", 36), ("synthetic10", 10), ("heavy0", 36)])
def test_a_synthetic_pattern_has_any_mean_at_any_number_of_neurons(name, nonzeros):
    block = patterns.build(patterns.pattern_name(name), 4096, "cpu", neurons=512)
    assert [w.shape for w in (block.w_gate, block.w_up, block.w_down)] == [(512, 2048), (512, 2048), (2048, 512)]
    assert patterns.counts(block.x, block.w_gate)[0] / 4096 == pytest.approx(nonzeros, rel=0.05)


@pytest.mark.parametrize("name", ["synthetic", "synthetic0", "synthetic2.5", "synthetic-3", "layer3", ""])
def test_a_name_that_is_no_pattern_is_refused_with_those_that_are(name):
    with pytest.raises(argparse.ArgumentTypeError, match=rf"'{name}' is not a pattern: use .*layer4gate, heavy0.*36"):
        patterns.pattern_name(name)


def test_a_recorded_pattern_without_its_folder_is_refused():
    with pytest.raises(ValueError, match=f"'layer1' is recorded, so it needs --activations DIR: {HOW}"):
        patterns.build("layer1", 128, "cpu")


def test_what_a_folder_does_not_hold_is_named_with_how_to_make_it(tmp_path):
    for folder, problem in ((tmp_path / "none", "is not a folder"), (tmp_path, r"has no firing_patterns\*\.npz")):
        with pytest.raises(ValueError, match=f"{folder} {problem}: {HOW}"):
            patterns.recorded("layer1", folder)
        with pytest.raises(ValueError, match=f"{folder} {problem}: {HOW}"):
            patterns.recorded_rates(folder)
    pattern = {"row_counts": np.array([1], np.uint16), "cols": np.array([3], np.uint16)}
    of_two_layers = {f"layer{i}_{name}": array for i in range(2) for name, array in pattern.items()}
    np.savez(tmp_path / "firing_patterns.npz", neurons=48, **of_two_layers)
    assert patterns.recorded("layer1", tmp_path, neurons=48).nonzero().tolist() == [[0, 3]]
    for name, problem in (
        ("layer1", "was recorded with N 48: pattern 'layer1' needs N 5,632"),
        ("layer7", "has no layer7: its model has only 2 layers"), ("sparse", "firing_pattern_sparse_l4.npz"),
        ("layer4gate", "layer4_input_bf16.npy"),
    ):  # fmt: skip
        with pytest.raises(patterns.MissingRecording, match=re.escape(problem)):
            patterns.build(name, 128, "cpu", tmp_path)
    with pytest.raises(patterns.MissingRecording, match=r"was recorded with N 48: pattern 'layer1' needs N 64"):
        patterns.build("layer1", 128, "cpu", tmp_path, neurons=64)
    (tmp_path / "firing_patterns_older.npz").touch()
    with pytest.raises(ValueError, match=r"has firing_patterns\.npz, firing_patterns_older\.npz, but should have one"):
        patterns.layers_file(tmp_path)


@pytest.mark.parametrize("script", ["bench_ffn", "bench_train", "shaped_checkpoint"])
def test_scripts_refuse_a_folder_without_a_recording_and_say_how_to_make_one(script, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [script, "--activations", str(tmp_path)])
    with pytest.raises(SystemExit):
        importlib.import_module(f"scripts.benchmarks.{script}").main()
    said = " ".join(capsys.readouterr().err.split())
    assert re.search(rf"--activations: {tmp_path} has no firing_patterns\*\.npz: {HOW}", said)
