"""Runs that start from an existing model: what they use from it, refusals, and that it is read once."""

import json
import shutil
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import huggingface_hub
import pytest
import torch
from hf.small_families import stock_model
from processes import joined
from safetensors.torch import load, load_file, save_file
from small_run import RandomTokens, small_config
from training.test_sharding import on_ranks, wholes

from sparsellm.commands import prepare_data, train
from sparsellm.config import fingerprint, from_overrides
from sparsellm.config import load as load_config
from sparsellm.data import DataError, tokenizer
from sparsellm.distributed.groups import process_group
from sparsellm.hf import conversion
from sparsellm.runs import precision
from sparsellm.runs.locate import locate
from sparsellm.runs.metrics import METRICS, read
from sparsellm.training import warm_start
from sparsellm.training.loop import Trainer
from sparsellm.training.relu_annealing import MixedFeedForward

WORDS = ("a sparse model of dense layers", "the gate opens and the neuron fires", "tokens in a row")
# Like the smoke experiment, which is tiny; with more than 96 ids, because a byte-level tokenizer has at least 256.
RUN = [
    "training.steps=4", "training.batch_size=4", "training.sequence_length=16", "logging=disabled",
    "logging.validation_every=2", "logging.validation_samples=4", "run.checkpoint_every=2", "runtime.device=cpu",
    "runtime.micro_batch_size=auto", "optimizer.warmup_steps=0", "data.max_tokens=2000",
]  # fmt: skip
STANDS_STILL = ["optimizer.learning_rate=1e-30", "optimizer.weight_decay=0"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """text.txt, a tokenizer, another one, and source/: a Qwen3-shaped SiLU model with random weights."""
    folder = tmp_path_factory.mktemp("initial")
    text = "\n".join(f"{i}: {WORDS[i % 3]} {i * i}" for i in range(400))
    (folder / "text.txt").write_text(text)
    for name, size in (("vocabulary", 320), ("other", 300)):
        tokenizer.save(tokenizer.train([text], size), folder / name)
    stock_model("qwen3", vocab_size=320, initializer_range=0.05).save_pretrained(folder / "source")
    for file in (folder / "vocabulary").iterdir():
        shutil.copy(file, folder / "source" / file.name)
    return folder


@pytest.fixture
def run(folder, tmp_path, monkeypatch):
    """run(command, *overrides): the exit code of a command in an empty folder, on this folder's text."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder / "source", "source")

    def start(command, *overrides):
        text = ["data=files", f"data.files=[{folder}/text.txt]", "data.path=tokens"]
        return command.main([*RUN, *text, *overrides], "sparsellm")

    return start


def tensors(path):
    return load_file(path / "model.safetensors")


@pytest.mark.slow
def test_a_run_takes_architecture_tokenizer_and_weights_and_a_resume_needs_none_of_them(run, tmp_path, capsys):
    assert run(prepare_data, "init_from=./source") == 0
    start = ["init_from=./source", *STANDS_STILL, "run.name=still"]
    assert run(train, *start) == 0
    still = tmp_path / "runs/still"
    config, hf = load_config(still / "config.yaml"), still / "checkpoints/step_00000004/hf"
    assert config.init_from == config.data.tokenizer == "./source"
    assert config.model == conversion.architecture("source")[0]
    assert config.model.qk_norm
    source, left = tensors(tmp_path / "source"), tensors(hf)
    assert source.keys() == left.keys()
    assert all(torch.equal(left[name], source[name]) for name in source)
    assert json.loads((hf / "config.json").read_text())["hidden_act"] == "relu"
    assert tokenizer.digest(tokenizer.load(str(hf))) == tokenizer.digest(tokenizer.load("source"))
    assert "starting from the weights of ./source" in capsys.readouterr().err

    # The same with the run's default name, after its last checkpoint and the source were lost.
    assert run(train, "init_from=./source") == 0
    (named,) = (path for path in (tmp_path / "runs").iterdir() if path != still)
    ended = tensors(named / "checkpoints/step_00000004/hf")
    assert any(not torch.equal(ended[name], source[name]) for name in source)
    shutil.rmtree(named / "checkpoints/step_00000004")
    (tmp_path / "source").rename(tmp_path / "gone")
    assert run(train, "init_from=./source") == 0
    assert "resuming after step 2" in capsys.readouterr().out
    again = tensors(named / "checkpoints/step_00000004/hf")
    assert all(torch.equal(again[name], ended[name]) for name in ended)
    assert [row["step"] for row in read(named / METRICS)] == [1, 2, 4]
    assert run(train, *start, "run.restart=true") == 2
    assert "init_from=./source does not exist" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_or_a_checkpoint_as_the_source_gives_its_tokenizer_too(run, tmp_path):
    assert run(prepare_data, "init_from=source") == 0
    assert run(train, "init_from=source", "run.name=first", "runtime.precision=bfloat16") == 0
    # What is exported is rounded, and what training goes on from is not.
    first = precision.load_float32(locate("runs/first"))[2]
    for name, given in (("second", "runs/first"), ("third", "runs/first/checkpoints/step_00000004")):
        again = [f"init_from={given}", f"data.path={name}", f"run.name={name}", *STANDS_STILL]
        assert run(prepare_data, *again) == 0
        assert run(train, *again) == 0
        config = load_config(tmp_path / "runs" / name / "config.yaml")
        assert config.init_from == config.data.tokenizer == given
        left = precision.load_float32(locate(f"runs/{name}"))[2]
        assert all(torch.equal(left[key], first[key]) for key in first)
    shutil.rmtree(tmp_path / "runs/third/checkpoints/step_00000004")
    shutil.rmtree(tmp_path / "runs/first")
    assert run(train, *again) == 0  # the resume does not look at the source


@pytest.mark.slow
def test_a_run_gone_on_with_from_its_checkpoint_takes_the_tokens_that_it_was_trained_on(run, tmp_path, capsys):
    own = ["data.tokenizer_vocab_size=320", "model.vocab_size=320"]
    assert run(prepare_data, *own) == run(train, *own, "sparsity=dense_silu", "run.name=dense") == 0
    before = (tmp_path / "tokens/manifest.json").read_bytes()
    sparse = ["init_from=runs/dense", "run.name=sparse", "sparsity.relu_tokens=64"]
    assert run(prepare_data, *sparse) == run(train, *sparse) == 0
    assert (tmp_path / "tokens/manifest.json").read_bytes() == before
    data = load_config(tmp_path / "runs/sparse/config.yaml").data
    assert (data.tokenizer, data.tokenizer_vocab_size) == (None, 320)
    shutil.rmtree(tmp_path / "runs/sparse/checkpoints/step_00000004")
    shutil.rmtree(tmp_path / "runs/dense")
    assert run(train, *sparse) == 0  # the resume does not look at the source
    capsys.readouterr()
    assert run(train, *sparse, "data.tokenizer=runs/dense", "run.name=typed") == 2
    assert "init_from=runs/dense" in capsys.readouterr().err


def test_what_does_not_agree_with_the_source_is_refused_by_name(run, folder, tmp_path, capsys):
    def refusal(*overrides, command=train, code=2):
        capsys.readouterr()
        assert run(command, *overrides) == code
        return " ".join(capsys.readouterr().err.split())

    source = "init_from=source"
    said = refusal(source, "model.hidden_size=64", "model.num_heads=4", "model.head_dim=16")
    assert "model.hidden_size is 64, but init_from=source has 48: leave it out" in said
    assert "num_heads" not in said
    assert "head_dim" not in said
    assert "model.qk_norm" not in said
    assert "model.num_layers is 24, but init_from=source has 2" in refusal(source, "model=qwen2p5_0p5b")
    assert "init_from=./sources does not exist: did you mean source?" in refusal("init_from=./sources")

    # Mistakes in its tokenizer are reported for the typed key.
    for damage, expected in (
        (lambda path: (path / "tokenizer.json").write_text("{}"), "the tokenizer of init_from=mine cannot be loaded"),
        (lambda path: (path / "tokenizer.json").unlink(), "the tokenizer of init_from=mine is missing"),
    ):
        shutil.copytree("source", "mine")
        damage(tmp_path / "mine")
        for typed, command in (([], prepare_data), ([], train), ([f"data.tokenizer={folder / 'other'}"], prepare_data)):
            said = refusal("init_from=mine", *typed, command=command)
            assert expected in said
            assert said.count("init_from=mine") == 1
        shutil.rmtree("mine")
    small = ["experiment=smoke", "data=stdlib_docs", "data.files=[]", "data.tokenizer=null"]
    said = refusal(source, *small)
    assert "has 4,096 ids, but the model of init_from=source has 320: they should belong together" in said
    shutil.copytree("source", "copy")
    assert run(prepare_data, source, "data.path=named") == 0
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / "other" / file, "copy")
    said = refusal("init_from=copy", "data.path=named")
    assert "data.tokenizer was 'source', now it is 'copy'): restore them" in said
    assert "has changed since" not in said
    assert "training.sequence_length 65 is longer than model.context_length 64" in refusal(
        source, "training.sequence_length=65"
    )

    # Data of another tokenizer: nothing is left behind.
    other = [source, f"data.tokenizer={folder / 'other'}"]
    for key in ("init_from", "distill.teacher"):
        said = refusal(f"{key}=source", other[1], command=prepare_data)
        assert f"differs from the tokenizer of {key}=source" in said
        assert said.endswith("use data.tokenizer=source")
    assert not (tmp_path / "tokens").exists()
    assert run(prepare_data, other[1]) == 0
    said = refusal(*other, code=1)
    assert f"data.path=tokens was tokenized with the tokenizer {folder / 'other'}, but init_from=source uses" in said
    said = refusal("distill.teacher=source", f"data.tokenizer={folder / 'other'}", "model.vocab_size=320", code=1)
    assert "but distill.teacher=source uses another tokenizer" in said
    assert said.endswith("prepare the data again, in another data.path, with data.tokenizer=source")
    assert not (tmp_path / "runs").exists()
    saved = tmp_path / "saved"  # a checkpoint, in which data.tokenizer would find none
    shutil.copytree("source", saved / "hf")
    (saved / "COMMITTED").touch()
    assert refusal("init_from=saved", other[1], code=1).endswith("with data.tokenizer=saved/hf")
    with process_group("cpu") as ranks:
        own = from_overrides(["experiment=smoke", "init_from=saved"])  # whose source takes no data.tokenizer
        prepared = SimpleNamespace(tokenizer_folder=folder / "other")
        with pytest.raises(DataError, match=r"with data=files data.files=\[PATTERN,...\] data.tokenizer=saved/hf"):
            warm_start.require_one_tokenizer({"init_from": "saved"}, own.data, prepared, ranks)

    relu = json.loads((tmp_path / "source/config.json").read_text()) | {"hidden_act": "relu"}
    (tmp_path / "source/config.json").write_text(json.dumps(relu))
    assert "init_from=source already has ReLU: leave it out" in refusal(source, "sparsity.relu_tokens=64")
    (tmp_path / "source/config.json").write_text(
        json.dumps(relu | {"layer_types": ["full_attention", "sliding_attention"]})
    )
    said = refusal(source)
    assert "init_from=source cannot be read: source is not a model that the decoder can represent" in said
    assert "sliding_attention" in said


def test_the_name_of_a_run_does_not_depend_on_the_model_that_is_read_later():
    plain, first, second = (from_overrides([*RUN, *more]) for more in ([], ["init_from=a"], ["init_from=b"]))
    assert len({config.run.name for config in (plain, first, second)}) == 3
    assert "relu_tokens" not in plain.run.name
    first.model.hidden_size = 48
    assert first.run.name.endswith(fingerprint(first))


def written(rank, world_size, folder, path):
    """The weights of a run on these ranks once it has started, and the losses of its steps, for each way of sharding.

    Compiled, and with a gate that is a ReLU from the third step on.
    """
    with (
        joined(folder / "store", rank, world_size) as ranks,
        patch.object(torch, "compile", partial(torch.compile, backend="eager")),
    ):
        found = {}
        for shard in ("none", "full"):
            gradual = ["sparsity.relu_tokens=384", "runtime.compile=true"]
            config = small_config(f"init_from={path}", f"runtime.shard={shard}", "run.name=r", *gradual)
            config.run.root = str(folder)
            assert warm_start.adopt(config) == []
            target = folder / shard
            target.mkdir(exist_ok=True)
            trainer = Trainer(config, ranks, RandomTokens(config, rank, world_size, target), target)
            trainer._resume()
            weights, batches, losses = wholes(trainer.optimizer.parameters), trainer.data.batches(None), []
            for _ in range(5):
                sums, norm, clock = trainer.advance(batches)
                losses.append(trainer._reduce(sums, norm, clock, False).read().ce)
            assert not any(isinstance(layer.mlp, MixedFeedForward) for layer in trainer.decoder.layers)
            found[shard] = weights, losses
        return found


@pytest.mark.slow
def test_ranks_with_copies_and_with_shards_start_from_the_source_and_train_alike(folder, tmp_path):
    results = on_ranks([2], written, tmp_path, folder / "source")[2]
    _, _, weights = conversion.load(folder / "source")
    for of_rank in results:
        assert of_rank["full"][1] == pytest.approx(of_rank["none"][1], rel=1e-5)
        assert len(set(of_rank["none"][1])) == 5
        for found, _ in of_rank.values():
            assert found.keys() == weights.keys()
            assert all(torch.equal(found[name], weights[name]) for name in weights)


def test_a_source_on_the_hub_whose_weights_have_other_shapes_leaves_nothing_behind(run, tmp_path, monkeypatch, capsys):
    """Its weights are fetched and read once the run has its folder."""
    assert run(prepare_data, "init_from=source") == 0
    kept = tmp_path / "hub/models--owner--model"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs/main").write_text("0123")
    shutil.copytree("source", kept / "snapshots/0123")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(warm_start.hub, "obstacle", lambda: "there is no network")
    start = ["init_from=owner/model", "data.tokenizer=source", "run.name=r"]
    teaches = ["init_from=source", "distill.teacher=owner/model", "data.tokenizer=source", "run.name=r"]
    weights = kept / "snapshots/0123/model.safetensors"
    whole = load(weights.read_bytes())
    short = {name: tensor[1:] if name == "model.norm.weight" else tensor for name, tensor in whole.items()}
    save_file(short, weights, metadata={"format": "pt"})
    for given in (start, teaches):
        capsys.readouterr()
        assert run(train, *given) == 2
        assert "whose shape differs from config.json: model.norm.weight" in capsys.readouterr().err
        assert not (tmp_path / "runs").exists()
    save_file(whole, weights, metadata={"format": "pt"})
    assert run(train, *start) == 0


@pytest.mark.slow
def test_a_source_whose_weights_are_damaged_or_have_changed_is_named(run, tmp_path, capsys):
    assert run(prepare_data, "init_from=source") == 0
    file = tmp_path / "source/model.safetensors"
    whole = file.read_bytes()
    for damage in (partial(file.write_bytes, whole[:-100]), file.unlink):
        damage()
        teaches = ["distill.teacher=source", "model.vocab_size=320"]
        for key, model in (("init_from", ["init_from=source"]), ("distill.teacher", teaches)):
            assert run(train, *model, "data.tokenizer=source", "run.name=r") == 2
            assert f"{key}=source cannot be read: " in capsys.readouterr().err
        assert not (tmp_path / "runs").exists()  # so another source may be given under the same run.name
    found = load(whole)
    short = {name: tensor[1:] if name == "model.norm.weight" else tensor for name, tensor in found.items()}
    lacking = {name: tensor for name, tensor in found.items() if name != "lm_head.weight"}
    nan = found | {"model.norm.weight": torch.full([48], torch.nan)}
    for content, said in (
        (short, "whose shape differs from config.json: model.norm.weight"), (lacking, "missing: lm_head.weight"),
        (nan, "not finite: model.norm.weight"),
    ):  # fmt: skip
        save_file(content, file, metadata={"format": "pt"})
        assert run(train, "init_from=source", "run.name=r") == 2
        assert said in capsys.readouterr().err
        assert not (tmp_path / "runs").exists()
        assert run(train, "init_from=source", "run.name=r", "evaluation.every=1", "evaluation.data_dir=none") == 2
        assert (said in capsys.readouterr().err) == (content is not nan)  # with what else is known without reading it
    assert run(train, "init_from=source", "run.name=r", "data.seed=1") == 2  # nothing says that it was begun otherwise
    assert capsys.readouterr().err.count("not finite") == 1
    log = tmp_path / "runs/r/log"  # as of a scheduler, which was there before
    log.parent.mkdir(parents=True)
    log.touch()
    assert run(train, "init_from=source", "run.name=r") == 2
    assert list(log.parent.iterdir()) == [log]
    shutil.rmtree(tmp_path / "runs")
    # Started but not saved: it starts from the source, and from no other one.
    file.write_bytes(whole)
    assert run(train, "init_from=source", "run.name=r") == 0
    shutil.rmtree(tmp_path / "runs/r/checkpoints")
    save_file(nan, file, metadata={"format": "pt"})
    assert run(train, "init_from=source", "run.name=r") == 2
    assert (tmp_path / "runs/r/config.yaml").exists()
    stock_model("qwen3", vocab_size=320, num_hidden_layers=3).save_pretrained(tmp_path / "source")
    assert run(train, "init_from=source", "run.name=r") == 2
    said = capsys.readouterr().err
    assert "is no longer the model with which run r was started (model.num_layers is 3 instead of 2" in said
