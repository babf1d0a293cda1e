"""Third-party tokenizers always give the same tokens, all tokens of a text, and prompts that can be continued."""

import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer

from sparsellm.data import DataError
from sparsellm.data import tokenizer as of_data
from sparsellm.hf import pretrained, tokenizer_file

BEGIN, END = ("<s>", 0), ("</s>", 1)
TEMPLATE = processors.TemplateProcessing(single="<s> $A </s>", pair="<s> $A </s> $B </s>", special_tokens=[BEGIN, END])
ENDING = {
    "template": (TEMPLATE, [0, 2, 3], [0, 2, 1, 3]),
    "only an end": (
        processors.TemplateProcessing(single="$A </s>", pair="$A </s> $B </s>", special_tokens=[END]),
        [2, 3], [2, 1, 3],
    ),
    "roberta": (processors.RobertaProcessing(END, BEGIN), [0, 2, 3], [0, 2, 1, 1, 3]),
    "bert": (processors.BertProcessing(END, BEGIN), [0, 2, 3], [0, 2, 1, 3]),
    "sequence": (processors.Sequence([processors.ByteLevel(), TEMPLATE]), [0, 2, 3], [0, 2, 1, 3]),
}  # fmt: skip


def words(post=None, **settings):
    vocabulary = {"<s>": 0, "</s>": 1, "why": 2, "water": 3, "w": 4, "h": 5, "y": 6, "wh": 7}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("w", "h"), ("wh", "y")], **settings))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.add_tokens(["water"])
    if post is not None:
        tokenizer.post_processor = post
    return tokenizer


@pytest.mark.parametrize("kind", ENDING)
def test_nothing_stands_behind_a_prompt_and_what_begins_it_stays(kind, tmp_path):
    post, prompt, pair = ENDING[kind]
    tokenizer = words(post)
    assert tokenizer.encode("why water").ids == [*prompt, 1]
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (change,) = tokenizer_file.settle(tokenizer)
    assert "to every prompt" in change
    assert tokenizer.encode("why water").ids == prompt
    assert tokenizer.encode("why", "water").ids == pair
    assert tokenizer_file.settle(tokenizer) == []
    # The same of a folder, as it is exported and read.
    tokenizer_file.settle_file(tmp_path / "tokenizer.json")
    assert json.loads((tmp_path / "tokenizer.json").read_text()) == json.loads(tokenizer.to_str())


def test_a_tokenizer_that_needs_nothing_is_left_as_it_is(tmp_path):
    for post in (None, processors.ByteLevel(), processors.TemplateProcessing("<s> $A", special_tokens=[BEGIN])):
        tokenizer, path = words(post), tmp_path / "tokenizer.json"
        before = tokenizer.to_str()
        path.write_text(before)
        assert tokenizer_file.settle(tokenizer) == []
        tokenizer_file.settle_file(path)
        assert tokenizer.to_str() == before == path.read_text()


def test_chance_and_limits_are_switched_off():
    tokenizer = words(dropout=1.0)
    tokenizer.enable_truncation(1)
    tokenizer.enable_padding(length=9)
    assert tokenizer_file.settle(tokenizer) == [
        "dropout 1 is switched off, so that a text always gives the same tokens"
    ]
    assert tokenizer.encode("why water").ids == [2, 3]
    sampling = Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0), ("aa", -1.0)], 0))
    sampling.model.alpha, sampling.model.nbest_size = 0.5, 8
    assert len(tokenizer_file.settle(sampling)) == 2
    assert {tuple(sampling.encode("a" * 9).ids) for _ in range(20)} == {tuple(sampling.encode("a" * 9).ids)}


def test_a_tokenizer_that_is_read_beside_a_model_is_one_too_and_a_line_says_so(tmp_path, capsys):
    tokenizer = words(TEMPLATE, dropout=1.0)
    tokenizer.enable_truncation(1)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "none").mkdir()
    with pytest.raises(pretrained.BrokenModel, match=r"none contains no tokenizer: .*save_pretrained"):
        pretrained.read_tokenizer(tmp_path / "none", 8)
    assert AutoTokenizer.from_pretrained(tmp_path)("why water").input_ids[-1] == 1
    for _ in range(2):
        read = pretrained.read_tokenizer(tmp_path, 8)
        assert read("why water").input_ids == read.encode("why water") == [0, 2, 3]
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(": the tokenizer of")[0] for line in said] == ["sparsellm", "sparsellm"]
    assert "dropout 1 is switched off" in said[0]
    assert "to every prompt" in said[1]
    # Also what transformers itself adds.
    words().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named | {"add_bos_token": True, "add_eos_token": True}))
    theirs = AutoTokenizer.from_pretrained(tmp_path)("why water").input_ids
    assert pretrained.read_tokenizer(tmp_path, 8)("why water").input_ids == theirs[: theirs.index(3) + 1]


DOUBLING = {"type": "Replace", "pattern": {"String": "h"}, "content": "hh"}
TWICE = [{"Sequence": {"id": "A", "type_id": 0}}]
DAMAGES = {
    "an exception": {"model": None},
    "a panic while it is read": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    "a panic at a text": {"post_processor": {
        "type": "TemplateProcessing", "single": [{"Sequence": {"id": "B", "type_id": 0}}], "pair": [],
        "special_tokens": {},
    }},
    "the end of the process": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////w=="}},
    "all memory": {"normalizer": {"type": "Sequence", "normalizers": [DOUBLING] * 40}},
    "many tokens": {"post_processor": {
        "type": "TemplateProcessing", "single": TWICE * 1000, "pair": [], "special_tokens": {}
    }},
    "much text": {"decoder": {"type": "Sequence", "decoders": [DOUBLING] * 20}},
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_tokenizer_is_one_sentence_wherever_it_is_loaded(kind, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(tokenizer_file, "SECONDS", 3)
    monkeypatch.setattr(tokenizer_file, "MEMORY", 400 << 20)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(words().to_str()) | DAMAGES[kind]))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    for load, error in (
        (lambda: of_data.load(str(tmp_path)), DataError),
        (lambda: pretrained.read_tokenizer(tmp_path, 8), pretrained.BrokenModel),
    ):
        with pytest.raises(error, match=r"tokenizer\.json") as refusal:
            load()
        assert "\n" not in str(refusal.value)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("content", "why"), [
    (b"", "it is not JSON"), (b"\xff", "it is not JSON"), (b"[" * 10_000, "it is not JSON"),
    (b"[1]", "should hold an object"),
])  # fmt: skip
def test_a_file_that_holds_no_tokenizer_is_refused_without_trying_it(content, why, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer_file.subprocess, "run", None)
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(tokenizer_file.BrokenTokenizer, match=why):
        tokenizer_file.load(path)
    monkeypatch.setattr(tokenizer_file, "LARGEST", 5)
    tokenizer_file.plain().save(str(path))
    with pytest.raises(tokenizer_file.BrokenTokenizer, match="it should have at most 5"):
        tokenizer_file.load(path)


def test_one_that_was_trained_here_costs_no_process_and_its_damage_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer_file.subprocess, "run", None)
    made = of_data.train(["why water"], 300)
    of_data.save(made, tmp_path)
    assert of_data.serialized(of_data.load(str(tmp_path))) == of_data.serialized(made)
    content = json.loads(of_data.serialized(made))
    content["model"]["merges"].append(["?", "no such token"])
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match="out of vocabulary"):
        of_data.load(str(tmp_path))
