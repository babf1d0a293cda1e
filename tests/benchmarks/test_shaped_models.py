"""Decoders whose neurons fire at given rates, and the training benchmark that uses them; tiny, on the CPU."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from small_run import small_config

from scripts.benchmarks import bench_train, patterns, shaped_checkpoint, shaped_models
from sparsellm.analysis import text
from sparsellm.benchmark import phases
from sparsellm.data import tokenizer
from sparsellm.distributed.groups import process_group
from sparsellm.hf import conversion, pretrained
from sparsellm.model import Decoder
from sparsellm.runs import folder as run_folder
from sparsellm.training import micro_batch, plans

SIZES = ["model.vocab_size=1024", "model.hidden_size=64", "model.intermediate_size=256", "model.context_length=128"]
QWEN3 = ["model.num_key_value_heads=1", "model.head_dim=48", "model.qk_norm=true", "model.tie_embeddings=false"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [["model.gated=true"], ["model.gated=false"], QWEN3], ids=["gated", "not", "qwen3"])
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_a_decoder_fires_at_the_rates_it_is_shaped_to(kind, precision):
    config = small_config(*SIZES, "model.num_layers=3", "model.init_std=0.02", *kind)
    rates = np.stack([patterns.firing_rates(mean, 256, seed) for seed, mean in enumerate((8, 16, 4))])
    tokens = shaped_models.random_text(64, 128, 1024, "cpu", 0, seed=1)
    others = shaped_models.random_text(64, 128, 1024, "cpu", 0, seed=2)
    fired = []
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
        decoder = shaped_models.shaped_decoder(config, tokens, rates, locality=0)
        for layer in decoder.layers:
            layer.mlp.register_forward_hook(lambda _mlp, _args, out: fired.append(out.nnz.item()))
        nonzeros, unions = shaped_models.firing_statistics(decoder, tokens)
        decoder.hidden(others)
    assert fired[:3] == [round(nnz * tokens.numel()) for nnz in nonzeros]
    # On the calibrating tokens: each count is rounded, and bfloat16 moves what is near the threshold.
    assert nonzeros == pytest.approx(rates.sum(1), rel=1e-3 if precision == torch.float32 else 0.02)
    assert all(nnz < union <= 256 for nnz, union in zip(nonzeros, unions, strict=True))
    # On others: limited by a vocabulary of 1,024 vectors, because a token's draws repeat 8 times on average.
    deviation = np.sqrt((rates * (1 - rates)).sum(1) * 2 * 8 / tokens.numel())
    found = np.array(fired[3:]) / tokens.numel()
    assert (np.abs(found - rates.sum(1)) <= 5 * deviation + 0.02 * rates.sum(1)).all()


def test_local_text_stays_in_a_cluster():
    tokens = shaped_models.random_text(4, 200, 1024, "cpu", locality=0.5, seed=0)
    run = tokens[:, : shaped_models.CLUSTER_RUN] % shaped_models.CLUSTERS
    assert (run == run[:, :1]).all()
    assert tokens.max() < 1024


def test_layer_rates_scale_to_the_wanted_mean():
    assert shaped_models.layer_rates(3, 512, None, 12.0).sum(1) == pytest.approx([12.0] * 3)
    scaled = patterns.scaled_rates(np.random.default_rng(0).random((4, 64)), 9.0)
    assert scaled.sum(1).mean() == pytest.approx(9.0)


@pytest.mark.parametrize(("mean", "message"), [(0.0, "above 0"), (200.0, "lower"), (5000.0, "lower")])
def test_a_mean_that_cannot_be_reached_is_refused(mean, message):
    with pytest.raises(ValueError, match=message):
        shaped_models.layer_rates(2, 512, None, mean)


def test_recorded_rates_spread_over_the_layers_and_neurons_of_any_model(tmp_path):
    random = np.random.default_rng(0)
    arrays, recorded = {}, []
    for layer in range(8):
        firing = random.random((64, patterns.N)) < random.random(patterns.N) ** 4 * 0.1 * (layer + 1)
        arrays |= {f"layer{layer}_row_counts": firing.sum(1), f"layer{layer}_cols": firing.nonzero()[1]}
        recorded.append(firing.mean(0))
    np.savez(tmp_path / "firing_patterns_0p5b_l1.npz", **arrays)

    rates = shaped_models.layer_rates(18, patterns.N, tmp_path, None)
    assert (rates == np.stack([recorded[8 * layer // 18] for layer in range(18)])).all()
    assert shaped_models.layer_rates(18, patterns.N, tmp_path, 36.0).sum(1).mean() == pytest.approx(36)
    # Fewer or more neurons: the same mean rate, up to the error of quantiles.
    for neurons in (96, 8448):
        assert shaped_models.layer_rates(8, neurons, tmp_path, None).mean(1) == pytest.approx(
            np.mean(recorded, axis=1), rel=0.05
        )


# The benchmark.

TINY = [
    *("experiment=smoke", *SIZES, "model.num_layers=2", "data.tokenizer_vocab_size=1024", "runtime.device=cpu"),
    *("training.sequence_length=128", "training.batch_size=8", "runtime.precision=bfloat16"),
    *("runtime.deterministic=false", "optimizer.warmup_steps=0", "logging=disabled"),
]


@pytest.fixture(scope="module")
def benchmark(tmp_path_factory):
    """Runs the benchmark with more arguments, overrides first; returns its JSON. The data is prepared once."""
    folder = tmp_path_factory.mktemp("benchmark")

    def run(*arguments: str) -> dict:
        out = folder / "result.json"
        overrides = [*TINY, f"data.path={folder / 'data'}", f"run.root={folder / 'runs'}"]
        bench_train.main([*overrides, *arguments, "--warmup", "1", "--steps", "2", "--json", str(out)])
        return json.loads(out.read_text())

    return run


@pytest.mark.slow
def test_the_benchmark_trains_frozen_weights_that_fire_as_wanted(benchmark, monkeypatch, capsys):
    energies, used = iter(range(0, 10_000, 500)), bench_train.measure
    monkeypatch.setattr(bench_train, "energy_mj", lambda _device: next(energies))
    before_and_after = []

    def measure(config, ranks, opened, weights, *rest):
        """Runs out of memory at micro-batch 8 of the second variant; keeps the weights before and after training."""
        if config.runtime.micro_batch_size == 8 and config.runtime.recompute is True:
            raise torch.OutOfMemoryError
        trainers, build = [], phases.Trainer
        monkeypatch.setattr(phases, "Trainer", lambda *args: trainers.append(build(*args)) or trainers[-1])
        result = used(config, ranks, opened, weights, *rest)
        monkeypatch.setattr(phases, "Trainer", build)
        before_and_after.append((weights, trainers[0].decoder.state_dict()))
        return result

    monkeypatch.setattr(bench_train, "measure", measure)
    result = benchmark(
        "--firing", "8", "--variant", "sparsity.l1_coefficient=0", "--variant", "runtime.recompute=true",
        "--micro-batches", "4", "8", "--rounds", "1",
    )  # fmt: skip
    first, second, at_eight, _ = result["runs"]
    assert [run["micro_batch"] for run in result["runs"]] == [4, 4, 8, 8]
    assert [run["out_of_memory"] for run in result["runs"]] == [False, False, False, True]
    for run in (first, second, at_eight):
        assert run["mj_per_token"] == 500 / (2 * 8 * 128)
        assert run["engines"] is None
    assert first["ratio"] == at_eight["ratio"] == 1
    assert second["ratio"] == pytest.approx(second["tokens_per_s"] / first["tokens_per_s"])
    # Text repeats its tokens: far fewer independent draws than tokens.
    assert first["nonzeros"] == pytest.approx([8, 8], rel=0.2)
    assert second["nonzeros"] == pytest.approx(first["nonzeros"], rel=1e-3)
    assert len(before_and_after) == 3
    for before, after in before_and_after:
        assert all(torch.equal(before[name], tensor) for name, tensor in after.items())
    printed = capsys.readouterr().out
    assert "OOM" in printed
    assert "each at its best micro-batch" in printed
    assert "nonzeros per token: mean" in printed


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_benchmark_trains_on_random_texts_and_without_shaping(benchmark):
    local = benchmark("--firing", "8", "--locality", "0.5", "--rounds", "1")
    assert local["runs"][0]["nonzeros"] == pytest.approx([8, 8], rel=0.2)
    other = benchmark("model=qwen3_0p6b", *QWEN3, "--firing", "8", "--locality", "0.5", "--rounds", "1")
    assert other["runs"][0]["nonzeros"] == pytest.approx([8, 8], rel=0.2)
    alone = benchmark("--rounds", "2")
    assert alone["runs"][0]["variant"] == "(no variant)"
    assert alone["runs"][0]["nonzeros"] == pytest.approx([128, 128], rel=0.1)  # half of all neurons
    assert alone["runs"][0]["mj_per_token"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--firing", "8", "--variant", "model.num_layers=3", "--variant", ""], "model differs between variants"),
        (["sparsity.reinit_dead_after_tokens=1024", "--firing", "8"], "reinitializes weights"),
        (["optimizer.learning_rate=0"], "learning_rate is 0"),
    ],
)
def test_what_cannot_be_compared_is_refused(benchmark, arguments, message, monkeypatch):
    """And a disk without space for checkpoints is not: the benchmark writes none."""
    monkeypatch.setattr(run_folder, "room_mistakes", lambda *_: pytest.fail("the disk's space was looked at"))
    with pytest.raises(SystemExit, match=message):
        benchmark(*arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--firing", "recorded"], "--firing recorded needs --activations"),
        (["--firing", "often"], "--firing: invalid firing value: 'often'"),
        (["--firing", "250"], "--firing: the mean is 250 nonzeros per token"),
        (["--locality", "0.5"], "--locality need --firing"),
        (["--firing", "8", "--locality", "2"], "--locality is 2"),
    ],
)
def test_options_that_do_not_fit_are_refused(benchmark, arguments, message, capsys):
    with pytest.raises(SystemExit):
        benchmark(*arguments)
    assert message in capsys.readouterr().err


def test_clustered_tokens_differ_by_step_and_rank():
    config = small_config()
    with process_group("cpu") as ranks:
        batches = shaped_models.ClusteredTokens(config, ranks, 0.5).batches(None)
        first, second = next(batches)[0], next(batches)[0]
    assert first.shape == (8, 17)
    assert not torch.equal(first, second)


@pytest.mark.slow
def test_engines_and_micro_batches_are_chosen_soon_if_asked(benchmark, monkeypatch, capsys):
    monkeypatch.setattr(plans, "DECIDE_EVERY", 8)  # so that the benchmark's change is undone
    monkeypatch.setattr(micro_batch, "SETTLED", 4)
    benchmark("--variant", "runtime.micro_batch_size=4", "--rounds", "1")
    assert (plans.DECIDE_EVERY, micro_batch.SETTLED) == (8, 4)
    assert "micro-batch of" not in capsys.readouterr().out
    found = benchmark("--micro-batches", "auto", "4", "--rounds", "1", "--soon")
    assert (plans.DECIDE_EVERY, micro_batch.SETTLED) == (2, 1)
    assert [run["micro_batch"] for run in found["runs"]] == ["auto", 4]
    shown = capsys.readouterr().out
    assert "micro-batch of (no variant): 8\n" in shown
    assert "each at its best micro-batch" in shown


@pytest.mark.slow
def test_a_shaped_checkpoint_fires_on_its_text_as_often_as_asked(tmp_path):
    shaped_checkpoint.main([
        str(tmp_path / "out"), "model=tiny", "model.num_layers=2", "--mean", "12", "--locality", "0.5",
        "--sequences", "4", "--length", "64",
    ])  # fmt: skip
    config, activation, weights = conversion.load(tmp_path / "out/hf")
    reader = pretrained.read_tokenizer(tmp_path / "out/hf", config.vocab_size)
    tokens = text.of_file(tmp_path / "out/text.txt", reader, sequences=9, length=64)
    words = (tmp_path / "out/text.txt").read_text().split()
    assert len(tokens) == 4
    assert tokens.flatten().tolist() == [int(word.removeprefix("w")) for word in words]
    decoder = Decoder(config, activation)
    decoder.load_state_dict(weights)
    nonzeros, _ = shaped_models.firing_statistics(decoder, tokens)
    assert sum(nonzeros) / len(nonzeros) == pytest.approx(
        12, rel=0.2
    )  # tokens other than those that it was shaped with


@pytest.mark.slow
def test_a_shaped_checkpoint_takes_a_tokenizer_and_fires_as_asked_on_a_text(tmp_path):
    words = Path(shaped_models.__file__).read_text()
    (tmp_path / "words.txt").write_text(words)
    tokenizer.save(tokenizer.train([words], 400), tmp_path / "tokenizer")
    shaped_checkpoint.main([
        str(tmp_path / "out"), "model=tiny", "model.num_layers=2", "--mean", "12", "--length", "64",
        "--tokenizer", str(tmp_path / "tokenizer"), "--text", str(tmp_path / "words.txt"),
    ])  # fmt: skip
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["hf"]
    config, activation, weights = conversion.load(tmp_path / "out/hf")
    decoder = Decoder(config, activation)
    decoder.load_state_dict(weights)
    reader = pretrained.read_tokenizer(tmp_path / "out/hf", config.vocab_size)
    nonzeros, _ = shaped_models.firing_statistics(decoder, text.of_file(tmp_path / "words.txt", reader, 256, 64))
    assert sum(nonzeros) / len(nonzeros) == pytest.approx(12, rel=0.1)
