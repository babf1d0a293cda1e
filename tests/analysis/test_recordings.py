"""Recordings of firing neurons, and that the benchmarks in scripts/ accept them."""

import numpy as np
import pytest
import torch
from analysis.test_activity import small_blocks, small_model
from analysis.test_analyze import analyzed, rows_of
from evaluation.conftest import LAST

from scripts.benchmarks import patterns, shaped_models
from sparsellm.analysis import AnalysisError, activity, recordings
from sparsellm.commands import analyze


def test_the_benchmarks_read_the_counts_of_the_analysis(run, tmp_path):
    results, folder = analyzed(checkpoint=run, batch_size=4, recordings=tmp_path / "made" / "here")
    recorded = tmp_path / "made/here"
    assert [path.name for path in recorded.iterdir()] == [
        "firing_patterns.npz"
    ]  # the model has two layers and no layer 4
    tokens = results["text"]["tokens"]
    fired = np.zeros((2, 48), int)
    for row in rows_of(folder / "neurons.csv"):
        fired[int(row["layer"]), int(row["neuron"])] = int(row["fired"])
    np.testing.assert_array_equal(patterns.recorded_rates(recorded), fired / tokens)
    firing = patterns.recorded("layer1", recorded, neurons=48)
    assert firing.shape == (tokens, 48)
    assert firing.sum() / tokens == pytest.approx(results["layers"][1]["nonzeros"]["mean"], abs=1e-6)
    of_positions = firing.view(results["text"]["sequences"], -1, 48).sum(2).double().mean(0)
    shown = [float(row["layer_01"]) for row in rows_of(folder / "positions.csv")]
    assert of_positions.tolist() == pytest.approx(shown)
    with np.load(recorded / "firing_patterns.npz") as arrays:
        assert {arrays[name].dtype for name in arrays if name != "neurons"} == {np.dtype("uint16")}
    # A model of another size is shaped to the same rates per neuron.
    rates = shaped_models.layer_rates(4, 96, recorded, None)
    assert rates.shape == (4, 96)
    assert rates[[0, 2]].mean(1) == pytest.approx(fired.mean(1) / tokens, rel=0.05)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.slow
def test_a_recording_of_the_benchmarks_width_has_all_their_patterns(gated, tmp_path, monkeypatch):
    model = small_model(gated, torch.bfloat16, intermediate_size=patterns.N, num_hidden_layers=8)
    blocks = small_blocks()[:, :64]
    monkeypatch.setattr(recordings, "TOKENS", 3 * 64 + 10)
    monkeypatch.setattr(recordings, "INPUT_TOKENS", 150)
    steps = []
    recordings.write(tmp_path, model, blocks, 2, steps.append)
    assert steps == [2, 1]
    counted = activity.count(model, blocks[:3], 2)
    for layer in (1, 2, 4, 7):
        firing = patterns.recorded(f"layer{layer}", tmp_path)
        np.testing.assert_array_equal(firing.sum(1), counted.nonzeros[..., layer].ravel())
        np.testing.assert_array_equal(firing.sum(0), counted.fired[layer])
    monkeypatch.setattr(patterns, "K", 32)
    block = patterns.build("layer4gate", 150, "cpu", tmp_path)
    assert block.x.shape == (150, 32)
    firing = torch.cat(list(patterns.firing_chunks(block.x, block.w_gate)))
    assert torch.equal(firing, patterns.recorded("layer4", tmp_path)[:150])
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_smaller_model_leaves_nothing_of_a_larger_one(tmp_path):
    recordings.write(tmp_path, small_model(True, num_hidden_layers=5), small_blocks(), 5)
    assert len(list(tmp_path.iterdir())) == 3
    recordings.write(tmp_path, small_model(True), small_blocks(), 5)
    assert [path.name for path in tmp_path.iterdir()] == ["firing_patterns.npz"]


@pytest.mark.slow
def test_without_being_asked_nothing_is_recorded_and_the_command_says_where_it_was(run, tmp_path, capsys):
    assert analyze.main([f"checkpoint={run}"], "analyze") == 0
    assert not list(run.rglob("*.npz"))
    assert analyze.main([f"checkpoint={run}", f"recordings={tmp_path}/r"], "analyze") == 0
    assert f"{tmp_path}/r/firing_patterns.npz (for benchmarks: --activations {tmp_path}/r)" in capsys.readouterr().out


def test_a_folder_that_cannot_hold_a_recording_is_refused_before_anything_is_counted(run, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(AnalysisError, match=r"cannot be written: .*; choose another folder for recordings"):
        analyzed(checkpoint=run, recordings=tmp_path / "file")
    (tmp_path / "firing_patterns_0p5b_l1.npz").touch()
    with pytest.raises(AnalysisError, match=r"already has firing_patterns_0p5b_l1\.npz.*choose another folder"):
        analyzed(checkpoint=run, recordings=tmp_path)
    assert not (run / LAST / "analysis/analysis.json").exists()
