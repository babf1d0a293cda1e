"""A model whose tokenizer ends a text with </s> and begins it with <s>, as Llama 2's: from its folder through
preparation, training, evaluation and generation, and what is said of data that end otherwise."""

import json
import random
import shutil

import numpy as np
import pytest
import small_tokenizers
import torch
from evaluation.conftest import rows
from evaluation.small_rows import sentence
from hf.small_families import stock_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import sparsellm
from sparsellm.analysis import text
from sparsellm.commands import evaluate, generate, prepare_data, train
from sparsellm.data import corpus, tokenizer
from sparsellm.data.manifest import read

__all__ = ["rows"]
EOS = {"__type": "AddedToken", "content": "</s>", "special": True, "normalized": False}
RUN = [
    "training.steps=4", "training.batch_size=4", "training.sequence_length=32", "logging=disabled",
    "logging.validation_every=4", "logging.validation_samples=6", "run.checkpoint_every=2", "runtime.device=cpu",
    "runtime.micro_batch_size=auto", "optimizer.warmup_steps=1", "data=files", "data.files=[text.jsonl]",
    "data.validation_fraction=0.2", "data.max_tokens=4000",
]  # fmt: skip


@pytest.fixture
def documents(tmp_path, monkeypatch):
    """The working directory holds source/, a Llama 2 with random weights, and text.jsonl with these documents."""
    monkeypatch.chdir(tmp_path)
    draw = random.Random(0)
    documents = [f"{i}: {sentence(draw, 60)}" for i in range(300)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    model = stock_model("llama2", vocab_size=400, max_position_embeddings=192, bos_token_id=1, eos_token_id=2)
    model.save_pretrained("source")
    small_tokenizers.write(small_tokenizers.llama2(documents), tmp_path / "source", EOS)
    return documents


def run(command, *overrides):
    assert command.main([*RUN, *overrides] if command in (train, prepare_data) else [*overrides], "sparsellm") == 0


@pytest.mark.slow
def test_a_model_that_ends_with_its_own_token_is_prepared_trained_scored_and_generated_with(
    documents, rows, tmp_path, capsys
):
    run(prepare_data, "init_from=./source", "data.path=tokens")
    said = capsys.readouterr().out
    assert "init_from=./source: every document becomes <s> TEXT </s>." in said
    vocabulary = tokenizer.load("source")
    kept = [text for text in documents if not corpus.is_held_out(text, 0.2)]
    expected = [i for ids in tokenizer.encode(vocabulary, kept) for i in ids]
    tokens = np.fromfile("tokens/train.tokens", "<u2").tolist()
    assert tokens == expected[: len(tokens)]
    assert tokens.count(1) == tokens.count(2) == read(tmp_path / "tokens").train.documents
    assert tokens[0] == 1

    tasks = ["evaluation.every=4", "evaluation.tasks=[piqa]", f"evaluation.data_dir={rows}"]
    run(train, "init_from=./source", "data.path=tokens", "run.name=own", *tasks)
    said = capsys.readouterr()
    assert "documents of" not in said.err
    hf = tmp_path / "runs/own/checkpoints/step_00000004/hf"
    config = json.loads((hf / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)
    assert tokenizer.digest(tokenizer.load(str(hf))) == read(tmp_path / "tokens").tokenizer_hash
    auto, theirs = AutoTokenizer.from_pretrained(hf), AutoModelForCausalLM.from_pretrained(hf)
    assert (auto.eos_token, theirs.generation_config.eos_token_id) == ("</s>", 2)
    (tmp_path / "few.txt").write_text(documents[0])
    read_alone = text.of_file(tmp_path / "few.txt", auto, 1, 1_000)
    assert read_alone.tolist() == [list(ids) for ids in tokenizer.encode(vocabulary, documents[:1])]

    # What was scored and validated in the run is scored and validated again from its checkpoint.
    run(evaluate, "checkpoint=runs/own", "tasks=[piqa]", f"data_dir={rows}", "output_dir=scores", "device=cpu")
    results = json.loads((tmp_path / "scores/results.json").read_text())
    last = [json.loads(line) for line in (tmp_path / "runs/own/metrics.jsonl").read_text().splitlines()][-1]
    assert results["validation"]["loss"] == pytest.approx(last["val_ce"], rel=1e-5)
    assert results["tasks"]["piqa"]["score"] == last["evaluation"]["piqa"]

    # A prompt begins with <s>, as the documents do; a text stops at </s>, and keeps the space that it begins with.
    generator = sparsellm.Generator.load(hf, "cpu")
    assert generator.stop == {2}
    prompt = auto("why").input_ids
    assert prompt[0] == 1
    new = [auto.convert_tokens_to_ids(word) for word in ("▁", "▁", "w")]
    assert "why" + generator.continuation(prompt, new) == auto.decode([*prompt, *new], skip_special_tokens=True)
    assert generator.continuation(prompt, new) == "  w" != auto.decode(new)
    made = theirs.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=20, pad_token_id=2)[0]
    whole = auto.decode(made, skip_special_tokens=True)
    assert "why" + generator.text(["why"], 20)[0] == whole
    capsys.readouterr()
    run(generate, "checkpoint=runs/own", "prompt=why", "tokens=20", "temperature=0", "device=cpu")
    assert capsys.readouterr().out.startswith("why")
    generator.stop = frozenset([int(made[len(prompt)])])
    assert generator.text(["why"], 20) == [""]


def test_data_of_the_same_tokens_that_end_otherwise_are_trained_on_with_a_word(documents, tmp_path, capsys):
    shutil.copytree("source", "base")
    small_tokenizers.write(small_tokenizers.llama2(documents), tmp_path / "base", "<s>")
    given = ["init_from=./source", "data.tokenizer=./base", "data.path=tokens"]
    run(prepare_data, *given)
    assert "data.tokenizer=./base: every document becomes TEXT <s>." in capsys.readouterr().out
    run(train, *given, "run.name=other", "distill.teacher=./base", "training.steps=2")
    said = [line for line in capsys.readouterr().err.splitlines() if "documents of" in line]
    forms = "data.path=tokens have the form TEXT <s>, but those of init_from=./source have the form <s> TEXT </s>"
    assert said == [f"sparsellm: documents of {forms}"]
    hf = tmp_path / "runs/other/checkpoints/step_00000002/hf"
    assert json.loads((hf / "config.json").read_text())["eos_token_id"] == [1, 2]  # </s> of source, too
    assert AutoTokenizer.from_pretrained(hf).eos_token == "<s>"


@pytest.mark.slow
def test_of_several_ends_of_the_source_a_run_keeps_those_that_no_document_has(documents, tmp_path):
    ends = {"eos_token_id": [2, 0, 350]}  # 0, <unk>, stands for the end of a turn; 350 is a word
    (tmp_path / "source/generation_config.json").write_text(json.dumps(ends))
    run(prepare_data, "init_from=./source", "data.path=tokens")
    begun = ["init_from=./source", "data.path=tokens", "run.name=own"]
    run(train, *begun)
    last = tmp_path / "runs/own/checkpoints/step_00000004"
    for _ in range(2):
        assert json.loads((last / "hf/config.json").read_text())["eos_token_id"] == [2, 0]
        assert sparsellm.Generator.load(last / "hf", "cpu").stop == {0, 2}
        shutil.rmtree(last)
        shutil.rmtree("source", ignore_errors=True)
        run(train, *begun)  # the second time from a checkpoint, for the source is gone
    # And so does a run that starts from this one.
    run(prepare_data, "init_from=runs/own", "data.path=others")
    run(train, "init_from=runs/own", "data.path=others", "run.name=next", "training.steps=2")
    following = tmp_path / "runs/next/checkpoints/step_00000002/hf"
    assert json.loads((following / "config.json").read_text())["eos_token_id"] == [2, 0]
