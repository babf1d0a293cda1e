"""The generation benchmark with a tiny model on the CPU: every mode generates the right number of tokens, and rows are
complete."""

import argparse
import functools

import pytest
import torch
from transformers import ContinuousBatchingConfig

import sparsellm
from scripts.benchmarks import bench_generate
from scripts.benchmarks.bench_generate import Case
from scripts.benchmarks.bench_model import random_model, sharing_copy
from sparsellm.config import ModelConfig

NEW = 4


@pytest.fixture(scope="module")
def models():
    model = random_model(ModelConfig(256, 64, 128, 2, 4), "cpu", locality=0, seed=0)
    return {"dense": model, "accelerated": sparsellm.accelerate(sharing_copy(model), "torch")}


def text(batch, context):
    return torch.randint(256, (batch, context + NEW), generator=torch.Generator().manual_seed(batch))


@pytest.mark.slow
@pytest.mark.parametrize("mode", bench_generate.MODES)
def test_every_mode_is_measured(mode, models, monkeypatch, capsys):
    small = functools.partial(ContinuousBatchingConfig, num_blocks=16, max_batch_tokens=64)
    monkeypatch.setattr(bench_generate, "ContinuousBatchingConfig", small)
    case, args = Case(mode, 3, 9), argparse.Namespace(new=NEW, rounds=2, temperature=1.0, parts=True)
    given = models
    if mode == "ours":
        kinds = {"dense": None, "accelerated": "torch"}
        given = {name: bench_generate.as_generator(models["dense"], kernels) for name, kernels in kinds.items()}
    works = bench_generate.calls(case, given, text(3, 9), 1.0)
    for call in works.values():
        for new in (1, NEW):
            made = call(new)
            if mode == "batched":
                assert [len(each.generated_tokens) for each in made.values()] == [new] * 3
            elif mode == "ours":
                assert [len(step) for step in made] == [3] * new
            else:
                assert torch.equal(made, text(3, 9)[:, : 9 + new])  # the given continuation
    rows = bench_generate.run_case(case, given, models, text(3, 9), args, None)
    printed = capsys.readouterr().out
    for name, row in rows.items():
        assert row["first_ms"] > 0 < row["tokens_per_s"]
        assert row["mj_per_token"] is row["host_ms"] is row["of_peak"] is None
        assert f"{mode:<8}{3:>6}{9:>8}  {name}" in printed
    assert f"{rows['accelerated']['tokens_per_s'] / rows['dense']['tokens_per_s']:.3f}x" in printed
    for model in models.values():
        assert not hasattr(model, "_cached_continuous_batching_manager")


def test_what_must_be_read(models):
    model = models["dense"]
    inputs = bench_generate.block_inputs(model, text(3, 9))
    assert [list(x.shape) for x in inputs] == [[3, 1, 64]] * 2
    weights = sum(p.numel() for p in model.parameters())
    cache = 3 * 10 * 2 * 64 * 2  # sequences, positions, keys and values, width, layers
    dense = bench_generate.must_read(model, inputs, 10, bench_generate.Counter(dense=2))
    assert dense == 2 * (weights + cache)
    firing = [
        int((x[:, 0] @ block.gate_proj.weight.T > 0).any(0).sum())
        for x, block in zip(inputs, bench_generate.blocks(model), strict=True)
    ]
    assert 0 < sum(firing) < 2 * 128
    sparse = bench_generate.must_read(model, inputs, 10, bench_generate.Counter(row=2))
    assert dense - sparse == pytest.approx(2 * sum(2 * 64 * (128 - n) for n in firing), rel=1e-4)


def test_parts_add_up_to_the_time_of_a_token():
    row, kernels = {"each_ms": 10.0}, {"all": 6.0, "attention": 1.5}
    found = bench_generate.parts(row, kernels, 2.5)
    assert found == {"ffn_ms": 2.5, "attention_ms": 1.5, "other_ms": 2.0, "host_ms": 4.0}
