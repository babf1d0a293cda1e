"""The command that converts a published sparse checkpoint to a stock model, and its refusals."""

import json

import pytest
import torch
from attack.small_export import VOCABULARY, cut, damaged, tensors
from hf.test_published import IDS, SIZE, as_stock, respelled, write
from inference.small_models import logits, make
from transformers import AutoModelForCausalLM, AutoTokenizer

from sparsellm import accelerate
from sparsellm.commands import generate
from sparsellm.commands.import_model import main
from sparsellm.hf import pretrained

PROGRAM = "sparsellm import_model"


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Tied, gated, and as our decoder can hold it."""
    model = make("llama", **SIZE | {"tie_word_embeddings": True, "num_key_value_heads": 4})
    return write(tmp_path_factory.mktemp("published"), model, respelled, True)


@pytest.mark.parametrize(("kind", "form"), [("llama", respelled), ("arcee", respelled), ("llama", as_stock)])
def test_transformers_loads_what_is_written_with_the_same_logits_and_tokens(kind, form, tmp_path, capsys):
    model = make(kind, **SIZE)
    folder = write(tmp_path / "published", model, form, kind == "llama", intermediate_size=7,
                   sparsity_new_intermediate_size=64)  # fmt: skip
    assert main([f"checkpoint={folder}", f"output_dir={tmp_path}/out/stock"], PROGRAM) == 0
    assert f"{type(model).__name__}, " in capsys.readouterr().out
    out = tmp_path / "out/stock"
    stock, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info.values())
    assert torch.equal(logits(stock.eval(), IDS), logits(model, IDS))
    assert stock.config.hidden_act == "relu"
    assert not [key for key in json.loads((out / "config.json").read_text()) if key.startswith(("sparsity", "auto"))]
    assert (out / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    expected = pretrained.read_tokenizer(folder, VOCABULARY)("why water").input_ids
    assert AutoTokenizer.from_pretrained(out)("why water").input_ids == expected
    assert [path.name for path in out.parent.iterdir()] == ["stock"]
    assert not list(out.glob("*.py"))


def test_dtype_rounds_every_weight(published, tmp_path):
    assert main([f"checkpoint={published}", f"output_dir={tmp_path}/out", "dtype=bfloat16"], PROGRAM) == 0
    written, read = pretrained.read_model(tmp_path / "out").state_dict(), pretrained.read_model(published).state_dict()
    assert all(torch.equal(written[name], tensor.bfloat16()) for name, tensor in read.items())


def test_the_commands_take_the_published_folder_as_they_take_the_stock_one(published, tmp_path, capsys):
    assert main([f"checkpoint={published}", f"output_dir={tmp_path}/stock"], PROGRAM) == 0
    capsys.readouterr()
    settings = ["device=cpu", "kernels=torch", "tokens=8", "temperature=0", "prompt=why water"]
    texts = []
    for folder in (published, tmp_path / "stock"):
        assert generate.main([f"checkpoint={folder}", *settings], "sparsellm generate") == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert texts[0].startswith("why water")
    model = pretrained.read_model(published).eval()
    expected = logits(model, IDS)
    torch.testing.assert_close(logits(accelerate(model, kernels="torch"), IDS), expected)


def test_a_write_that_fails_leaves_nothing_and_what_lies_in_its_way_stays(published, tmp_path, capsys, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("shutil.copyfile", full)
        assert main([f"checkpoint={published}", f"output_dir={tmp_path}/out"], PROGRAM) == 1
    assert "out cannot be written: [Errno 28] No space left on device" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial/mine").touch()
    assert main([f"checkpoint={published}", f"output_dir={tmp_path}/out"], PROGRAM) == 2
    assert "out.partial exists, from an import that is running or was killed" in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob("*")] == ["out.partial", "mine"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([], 2, ["checkpoint has no value", "output_dir has no value"]),
        (["checkpoint=WHOLE", "output_dir=WHOLE"], 2, ["exists"]),
        (["checkpoint=WHOLE", "output_dir="], 2, ["output_dir has no value"]),
        (["checkpoint=WHOLE", "output_dir=/"], 2, ["output_dir=/ exists"]),
        (["checkpoint=nope/nope/nope", "output_dir=OUT"], 2, ["nope/nope/nope"]),
        (["checkpoint=CUT", "output_dir=OUT"], 1, ["cannot be read", "model.safetensors"]),
        (["checkpoint=STRANGE", "output_dir=OUT"], 1, ["model.layers.0.mlp.scale"]),
        (["checkpoint=WHOLE", "output_dir=FILE/out"], 1, ["cannot be written"]),
    ],
)
def test_what_cannot_be_imported_is_refused_and_nothing_is_left(arguments, code, words, published, tmp_path, capsys):
    (tmp_path / "file").touch()
    places = {"WHOLE": published, "OUT": tmp_path / "out", "FILE": tmp_path / "file"}
    places["CUT"] = damaged(published, tmp_path / "cut", cut("model.safetensors", 0.5))
    strange = tensors(lambda found: found.update({"model.layers.0.mlp.scale": torch.ones(3)}))
    places["STRANGE"] = damaged(published, tmp_path / "strange", strange)
    for name, path in places.items():
        arguments = [argument.replace(name, str(path)) for argument in arguments]
    assert main(arguments, PROGRAM) == code
    said = capsys.readouterr().err
    assert all(word in said for word in words), said
    assert {path.name for path in tmp_path.iterdir()} == {"file", "cut", "strange"}
