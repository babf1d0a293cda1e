"""The generation benchmark with a tiny model on the CPU: every mode generates the right number of tokens, and rows are
complete."""

from collections import Counter

import pytest
import torch

import sparsellm
from scripts.benchmarks import bench_generate
from scripts.benchmarks.bench_generate import Case
from sparsellm.benchmark import phases
from sparsellm.benchmark.subject import Subject
from sparsellm.config import Activation, ModelConfig
from sparsellm.model import Decoder

NEW = 4
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def subject():
    torch.manual_seed(0)
    config = ModelConfig(256, 64, 128, 2, 4)
    weights = Decoder(config, Activation.relu).state_dict()
    return Subject(None, "tiny", config, Activation.relu, weights, text(1, 1), None)


@pytest.fixture(scope="module")
def models(subject):
    dense = phases.stock_model(subject, CPU)
    return {"dense": dense, "accelerated": sparsellm.accelerate(phases.sharing_copy(dense), "torch")}


def text(batch, context):
    return torch.randint(256, (batch, context + NEW), generator=torch.Generator().manual_seed(batch))


@pytest.mark.slow
@pytest.mark.parametrize("mode", bench_generate.MODES)
def test_every_mode_is_measured(mode, subject, models, monkeypatch, capsys):
    monkeypatch.setattr(phases, "_kernels", lambda side: "torch" if side.kernels else None)
    case, measured = Case(mode, 3, 9), models
    if mode == "ours":
        sides = {name: phases.Side(subject, name == "accelerated") for name in models}
        measured = {name: phases.generator_of(side, CPU) for name, side in sides.items()}
    for call in bench_generate.calls(case, measured, text(3, 9), 1.0).values():
        for new in (1, NEW):
            made = call(new)
            if mode == "ours":
                assert [len(step) for step in made] == [3] * new
            else:
                assert torch.equal(made, text(3, 9)[:, : 9 + new])  # the text's continuation
    rows = bench_generate.run_case(case, measured, models["dense"], text(3, 9), 2, 1.0, None)
    printed = capsys.readouterr().out
    assert [row["model"] for row in rows] == ["dense", "accelerated"]
    for row in rows:
        assert row["first_ms"] > 0 < row["tokens_per_s"]
        assert row["mj_per_token"] is row["of_peak"] is None
        assert (row["mode"], row["batch"], row["context"]) == case
        assert f"{row['tokens_per_s'] / rows[0]['tokens_per_s']:.3f}x" in printed


def test_what_must_be_read(models):
    model = models["dense"]
    inputs = bench_generate.block_inputs(model, text(3, 9))
    assert [list(x.shape) for x in inputs] == [[3, 64]] * 2
    weights = sum(p.numel() for p in model.parameters())
    cache = 3 * 10 * 2 * 64 * 2  # sequences, positions, keys and values, width, layers
    dense = bench_generate.must_read(model, inputs, 10, Counter(dense=2))
    assert dense == 4 * (weights + cache)  # float32
    firing = [
        int((x @ layer.mlp.gate_proj.weight.T > 0).any(0).sum())
        for x, layer in zip(inputs, model.model.layers, strict=True)
    ]
    assert 0 < sum(firing) < 2 * 128
    sparse = bench_generate.must_read(model, inputs, 10, Counter(row=2))
    assert dense - sparse == pytest.approx(4 * sum(2 * 64 * (128 - n) for n in firing), rel=1e-4)
