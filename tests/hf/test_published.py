"""Published sparse checkpoints (llama_sparse_relu), written by the tests: read as stock models."""

import json
from pathlib import Path

import pytest
import torch
from attack import small_export
from attack.small_export import VOCABULARY, content, damaged, keys, sharded, tensors
from inference.small_models import logits, make
from safetensors.torch import save_file

from sparsellm.hf import hub, pretrained
from sparsellm.hf.pretrained import BrokenModel
from sparsellm.runs.locate import Checkpoint

MLP = "model.layers.0.mlp."
SIZE = {"vocab_size": VOCABULARY, "num_hidden_layers": 2, "num_key_value_heads": 2, "tie_word_embeddings": False}
IDS = torch.arange(24).view(2, 12)


def respelled(state, gated):
    """The feedforward weights as `gate_weight` [K, N], `up_weight` [N, K] (gated) or [K, N], `down_weight` [N, K]."""
    found = {}
    for name, tensor in state.items():
        part = name.split(".")[-2].removesuffix("_proj")
        if ".mlp." not in name:
            found[name] = tensor
        else:
            new = name.replace("_proj.weight", "_weight")
            found[new] = tensor if gated and part == "up" else tensor.t().contiguous()
    return found


def down_by_neuron(state, _gated):
    return {name: tensor.t().contiguous() if "down_proj" in name else tensor for name, tensor in state.items()}


def as_stock(state, _gated):
    return state


FORMS = [as_stock, down_by_neuron, respelled]
COUNTERS = {
    "tracker.steps": torch.tensor(7),
    "tracker.silent": torch.full((3,), torch.nan),
    "model.layers.0.mlp.metrics_accumulator.nonzeros": torch.ones(4, dtype=torch.int32),
}


def write(folder: Path, model, form, gated, **changes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    small_export.write_export(folder / "made")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / "made" / "hf" / file).rename(folder / file)
    described = model.config.to_dict() | {
        "model_type": "llama_sparse_relu",
        "architectures": ["LlamaSparseReluForCausalLM"],
        "auto_map": {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"},
        "hidden_act": "silu",
        "sparsity_gated_mlp": gated,
        "sparsity_new_intermediate_size": None,
        "sparsity_l1_weight": 0.5,
    }
    (folder / "config.json").write_text(json.dumps(described | changes))
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    save_file(form(state, gated) | COUNTERS, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "evil.py").write_text("raise SystemExit('code of a checkpoint ran')\n")
    return folder


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "non-gated"])
@pytest.mark.parametrize("form", FORMS)
def test_its_logits_are_the_stock_models_bit_for_bit(form, gated, tmp_path):
    model = make("llama" if gated else "arcee", **SIZE)
    folder = write(tmp_path, model, form, gated, intermediate_size=999, sparsity_new_intermediate_size=64)
    read = pretrained.read_model(folder).eval()
    assert type(read) is type(model)
    assert read.config.hidden_act == "relu"
    assert not [key for key in read.config.to_dict() if key.startswith("sparsity_") or key == "auto_map"]
    assert torch.equal(logits(read, IDS), logits(model, IDS))
    assert pretrained.read_tokenizer(folder, VOCABULARY)("why water").input_ids


def test_a_tied_one_in_two_files_and_in_bfloat16_keeps_every_bit(tmp_path):
    model = make("llama", **SIZE | {"tie_word_embeddings": True, "num_key_value_heads": 4}).bfloat16()
    model.save_pretrained(tmp_path / "stock")  # read again, for .bfloat16() has rounded the rotary frequencies too
    stock = pretrained.read_model(tmp_path / "stock").eval()
    folder = write(tmp_path / "one", model, respelled, True)
    for whole in (folder, damaged(folder, tmp_path / "two", sharded())):
        read = pretrained.read_model(whole).eval()
        assert read.dtype == torch.bfloat16
        assert read.lm_head.weight is read.model.embed_tokens.weight
        assert torch.equal(logits(read, IDS), logits(stock, IDS))


def change(**replaced):
    return tensors(lambda found: found.update({MLP + name.replace("__", "."): t for name, t in replaced.items()}))


def nan(found):
    found[f"{MLP}down_weight"][0, 0] = torch.nan


BROKEN = {
    "another shape": (change(gate_weight=torch.ones(64, 32)), rf"with unknown layout: {MLP}gate_weight \[64, 32\]"),
    "one dimension": (change(down_weight=torch.ones(64)), rf"with unknown layout: {MLP}down_weight \[64\]"),
    "both spellings": (change(up_proj__weight=torch.ones(64, 32)), f"in both spellings: {MLP}up_proj.weight"),
    "a missing tensor": (tensors(lambda found: found.pop(f"{MLP}up_weight")), f"missing: {MLP}up_proj.weight"),
    "an unknown tensor": (change(scale=torch.ones(64)), rf"unexpected \(no such layer in config\.json\): {MLP}scale"),
    "integers": (change(down_weight=torch.ones(64, 32).int()), f"with integer values: {MLP}down_weight"),
    "NaN": (tensors(nan), f"not finite: {MLP}down_proj.weight"),
    "a gate that is not said": (keys("config.json", sparsity_gated_mlp=None), "sparsity_gated_mlp is None"),
    "a gate too many": (keys("config.json", sparsity_gated_mlp=False), f"with unknown layout: {MLP}up_weight"),
    "quantized": (keys("config.json", quantization_config={"quant_method": "evil"}), "quantization_config"),
    "no rope_theta": (keys("config.json", rope_parameters=None, rope_theta=None), "has no rope_theta"),
    "other neurons": (keys("config.json", sparsity_new_intermediate_size=48), "with unknown layout"),
    "garbage weights": (content("model.safetensors", b"x" * 99), r"model\.safetensors"),
}


def test_a_hub_name_is_read_from_the_hubs_cache_with_its_commit(whole, tmp_path, monkeypatch):
    from huggingface_hub import constants

    repository = tmp_path / "models--owner--sparse"
    damaged(whole, repository / "snapshots" / ("c" * 40), lambda _: None)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("c" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with hub.offline(True):
        assert Checkpoint("owner/sparse", None, None, None).identity() == f"owner/sparse@{'c' * 40}"
        read = pretrained.read_model("owner/sparse").eval()
        assert pretrained.read_tokenizer("owner/sparse", VOCABULARY)("why water").input_ids
        with pytest.raises(OSError, match="cached files"):
            pretrained.read_model("owner/other")
    assert torch.equal(logits(read, IDS), logits(pretrained.read_model(whole).eval(), IDS))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return write(tmp_path_factory.mktemp("whole"), make("llama", **SIZE), respelled, True)


@pytest.mark.parametrize("what", BROKEN)
def test_a_tensor_that_fits_neither_form_is_refused_by_name(what, whole, tmp_path):
    damage, named = BROKEN[what]
    folder = damaged(whole, tmp_path / "hf", damage)
    with pytest.raises(BrokenModel, match=named) as error:
        pretrained.read_model(folder)
    assert str(folder) in str(error.value)


def test_a_square_down_proj_has_a_shape_that_tells_nothing_and_is_refused(tmp_path):
    square = make("llama", **SIZE | {"intermediate_size": 32})
    folder = write(tmp_path / "a", square, down_by_neuron, True)
    with pytest.raises(BrokenModel, match=rf"square, so ambiguous: {MLP}down_proj\.weight"):
        pretrained.read_model(folder)
    read = pretrained.read_model(write(tmp_path / "b", square, respelled, True)).eval()
    assert torch.equal(logits(read, IDS), logits(square, IDS))
