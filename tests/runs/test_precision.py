"""Which dtype a command computes in, and where the weights that training goes on from are read."""

import json
import shutil

import pytest
import torch
from evaluation.conftest import LAST
from safetensors.torch import load_file

from sparsellm.config import Dtype
from sparsellm.hf import pretrained
from sparsellm.runs.locate import CheckpointNotFound, locate
from sparsellm.runs.precision import computation, computed_in, load_float32
from sparsellm.runs.state_reader import StateReader


def test_the_dtype_is_the_typed_one_else_the_runs_else_the_stored_one(run, bare):
    assert computed_in(Dtype.auto, locate(str(run))) == (torch.bfloat16, "as the run trained")
    assert computed_in(Dtype.float32, locate(str(run))) == (torch.float32, "dtype=float32")
    for changed, expected in (
        ({}, torch.bfloat16),
        ({"dtype": "float32"}, torch.float32),
        ({"dtype": None}, torch.bfloat16),
    ):
        path = bare / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changed))
        assert computed_in(Dtype.auto, locate(str(bare))) == (expected, "as stored")
        assert pretrained.read_model(bare).dtype == expected  # as transformers has it
    (run / "config.yaml").write_text("damaged")
    assert computed_in(Dtype.auto, locate(str(run))) == (torch.bfloat16, "as stored")


def test_the_line_says_dtype_kernels_and_why():
    line = computation(torch.bfloat16, "as the run trained", None, "cuda")
    assert line == "dtype bfloat16 (as the run trained), kernels cuda (available on this GPU)"
    line = computation(torch.float32, "dtype=float32", "kernels=torch")
    assert line == "dtype float32 (dtype=float32), kernels none (kernels=torch)"


def test_weights_that_hf_has_rounded_are_read_from_state(run, capsys):
    exported = load_file(run / LAST / "hf/model.safetensors")
    config, activation, weights = load_float32(locate(str(run)))
    assert len(weights) == len(exported)
    for name, weight in weights.items():
        assert weight.dtype == torch.float32
        assert torch.equal(weight.bfloat16(), exported[f"model.{name}" if name != "lm_head.weight" else name]), name
    assert not torch.equal(weights["embed_tokens.weight"], weights["embed_tokens.weight"].bfloat16().float())
    assert (config.hidden_size, activation.name) == (32, "relu")

    shard = next((run / LAST / "state").glob("*.distcp"))
    content = shard.read_bytes()
    shard.write_bytes(content[:-1])
    with pytest.raises(CheckpointNotFound, match=rf"is damaged: state/{shard.name} has .* bytes instead of"):
        load_float32(locate(str(run)))
    shutil.rmtree(run / LAST / "state")
    assert capsys.readouterr().err == ""
    rounded = load_float32(locate(str(run)))[2]
    assert "has no state/: its weights are those of hf/, which are rounded to bfloat16" in capsys.readouterr().err
    assert all(torch.equal(rounded[name], weight.bfloat16().float()) for name, weight in weights.items())


def test_an_interrupt_while_weights_are_read_is_not_taken_for_damage(run, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(StateReader, "read_data", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load_float32(locate(str(run)))
