"""A model with grouped heads of a width of their own, normalised queries and keys, scaled rotary positions and an
output matrix of its own: trained by the command's own trainer, and taken by every command that takes a checkpoint."""

import json

import pytest
import whole_config
from evaluation.conftest import LAST, rows, tiny

from sparsellm.commands import analyze, benchmark, evaluate, generate, import_model
from sparsellm.config import from_overrides, parameters
from sparsellm.distributed.groups import process_group
from sparsellm.hf import conversion
from sparsellm.runs.folder import open_folder
from sparsellm.training.loop import Trainer

__all__ = ["rows", "tiny"]
SHAPE = [
    "model.num_key_value_heads=1", "model.head_dim=24", "model.qk_norm=true", "model.tie_embeddings=false",
    "model.rope_parameters.rope_type=yarn", "model.rope_parameters.factor=4",
    "model.rope_parameters.original_max_position_embeddings=48",
]  # fmt: skip


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory):
    config = from_overrides([*tiny, *SHAPE, f"run.root={tmp_path_factory.mktemp('runs')}"])
    with process_group("cpu") as ranks:
        opened = whole_config.open_data(config, ranks)
        with open_folder(config, ranks) as (config, folder):
            Trainer(config, ranks, opened, folder).fit()
    return folder


def test_every_command_takes_the_run(run, rows, tmp_path, capsys):
    model, hf = from_overrides([*SHAPE]).model, run / LAST / "hf"
    assert json.loads((hf / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]
    card = (hf / "README.md").read_text()
    assert "`Qwen3ForCausalLM`" in card
    assert "| attention and head | 1 key/value heads; head dimension 24;" in card
    config, _, weights = conversion.load(hf)
    assert config.rope_parameters == model.rope_parameters
    assert sum(weight.numel() for weight in weights.values()) == parameters(config)

    common = [f"checkpoint={run}", "device=cpu"]
    settings = ["tasks=[piqa]", f"data_dir={rows}", f"output_dir={tmp_path}/scores"]
    assert evaluate.main([*common, *settings], "sparsellm evaluate") == 0
    results = json.loads((tmp_path / "scores/results.json").read_text())
    last = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][-1]
    assert results["validation"]["loss"] == pytest.approx(last["val_ce"], rel=1e-5)
    assert analyze.main([*common, f"output_dir={tmp_path}/analysis"], "sparsellm analyze") == 0
    quick = ["seconds=0.05", "sequences=2", "new_tokens=5", "prompts=2", f"output_dir={tmp_path}/benchmark"]
    assert benchmark.main([*common, *quick], "sparsellm benchmark") == 0
    said = ["prompt=why water", "tokens=8", "temperature=0"]
    assert generate.main([*common, *said], "sparsellm generate") == 0
    text = capsys.readouterr().out.splitlines()[-1]
    assert import_model.main([f"checkpoint={hf}", f"output_dir={tmp_path}/stock"], "sparsellm import_model") == 0
    assert "Qwen3ForCausalLM" in capsys.readouterr().out
    assert generate.main([f"checkpoint={tmp_path}/stock", "device=cpu", *said], "sparsellm generate") == 0
    assert capsys.readouterr().out.splitlines()[-1] == text
