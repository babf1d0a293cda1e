"""The benchmark on a GPU measures kernels, energy, memory and layers, on the engines of training."""

import json
import random
from dataclasses import replace

import pytest
import torch
from attack.small_export import CONFIG, VOCABULARY
from evaluation.small_rows import sentence

from sparsellm.commands.benchmark import main
from sparsellm.config import Activation
from sparsellm.data import tokenizer
from sparsellm.hf import conversion
from sparsellm.model import Decoder
from sparsellm.ops import float8

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels")]


def test_every_number_is_there_on_the_kernels_in_pytorch_and_of_a_baseline(tmp_path):
    text = sentence(random.Random(0), 20_000)
    (tmp_path / "text.txt").write_text(text)
    tokenizer.save(tokenizer.train([text], VOCABULARY), tmp_path / "tokenizer")
    config = replace(CONFIG, hidden_size=256, intermediate_size=512, num_layers=2, num_heads=4, context_length=512)
    for activation in Activation:
        torch.manual_seed(0)
        weights = Decoder(config, activation).state_dict()
        conversion.export(weights, config, activation, tmp_path / activation.name, tmp_path / "tokenizer", 0)
    arguments = [f"checkpoint={tmp_path}/relu", f"baseline={tmp_path}/silu", f"text={tmp_path}/text.txt", "sequences=8"]
    assert main([*arguments, "kernels=cuda", "seconds=0.5", f"output_dir={tmp_path}/out"], "sparsellm benchmark") == 0
    results = json.loads((tmp_path / "out/benchmark.json").read_text())
    (row,) = results["checkpoints"]
    obstacle = float8.obstacle()
    assert results["missing"] == ([] if obstacle is None else [f"no dense FP8: {obstacle}"])
    assert list(row["sides"]) == ["kernels", *["dense FP8"] * (obstacle is None), "PyTorch", "baseline"]
    for name, side in row["sides"].items():
        assert set(side) == {"forward", "training"} | ({"prefill", "decode"} if name != "dense FP8" else set())
        assert all(rate["tokens_per_s"] > 0 and rate["mj_per_token"] > 0 for rate in side.values())
        assert side["training"]["peak_bytes"] > 0
    assert len(row["sides"]["kernels"]["training"]["engines"]) == len(row["layer_speeds"]) == 2
    assert row["sides"]["PyTorch"]["training"]["engines"] is None
