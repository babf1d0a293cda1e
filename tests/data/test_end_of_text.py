"""Which tokens end and begin documents, wherever they go: <|endoftext|>, or what the files beside a tokenizer.json name
as eos_token; and what tokenizer.json puts in front of a prompt."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import small_tokenizers
import torch
from huggingface_hub.errors import RemoteEntryNotFoundError
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer
from whole_config import mistakes, open_data, open_validation, prepare

from sparsellm.config import Config
from sparsellm.data import DataError, Request, corpus, mix, tokenizer
from sparsellm.data.manifest import read
from sparsellm.distributed.groups import process_group
from sparsellm.hf import hub

ADDED = {"__type": "AddedToken", "content": "</s>", "special": True, "normalized": False}
SPELLED = "the <s> gate</s> opens <|begin_of_text|> <|end_of_text|>\n\n  日本"


@pytest.fixture(scope="module")
def made(texts: list[str]) -> dict[str, Tokenizer]:
    return {make.__name__: make(texts) for make in (
        small_tokenizers.llama2, small_tokenizers.mistral, small_tokenizers.llama3
    )}  # fmt: skip


@pytest.mark.parametrize(("name", "eos", "file"), [
    ("llama2", "</s>", "tokenizer_config.json"), ("llama2", ADDED, "special_tokens_map.json"),
    ("mistral", ADDED, "tokenizer_config.json"), ("llama3", "<|end_of_text|>", "tokenizer_config.json"),
    ("llama3", "<|eot_id|>", "special_tokens_map.json"),
])  # fmt: skip
@pytest.mark.slow
def test_documents_begin_as_prompts_do_and_end_with_the_tokenizers_own_eos_token(name, eos, file, made, tmp_path):
    end = eos if isinstance(eos, str) else eos["content"]
    folder = small_tokenizers.write(made[name], tmp_path / "source", eos, file)
    if file == "special_tokens_map.json":
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": None}))
    loaded = tokenizer.load(str(folder))
    assert loaded.end_of_text == tokenizer.load(str(folder / "tokenizer.json")).end_of_text == end
    begin = made[name].encode("", add_special_tokens=True).ids
    first = "<s>" if name != "llama3" else "<|begin_of_text|>"
    assert made[name].id_to_token(begin[0]) == loaded.begin_of_text == first
    ids, empty = map(list, tokenizer.encode(loaded, [SPELLED, ""]))
    special = {made[name].token_to_id(token) for token in small_tokenizers.SENTENCEPIECE + small_tokenizers.LLAMA3}
    assert empty == [*begin, made[name].token_to_id(end)] == [*begin, tokenizer.end_of_text_id(loaded)]
    assert ids[:1] + ids[-1:] == empty
    assert special.isdisjoint(ids[1:-1])
    assert made[name].decode(ids[1:-1]) == SPELLED

    # After saving, it is the same for us and for transformers, whose prompts are documents without their end.
    assert tokenizer.save(loaded, tmp_path / "saved") == tokenizer.digest(loaded)
    again = tokenizer.load(str(tmp_path / "saved"))
    assert tokenizer.form(again) == tokenizer.form(loaded) == f"{loaded.begin_of_text} TEXT {end}"
    assert tokenizer.digest(again) == tokenizer.digest(loaded)
    auto = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert (auto.bos_token, auto.eos_token, auto.pad_token) == (loaded.begin_of_text, end, end)
    (plain,) = map(list, tokenizer.encode(loaded, ["the gate  opens\n"]))
    assert auto("the gate  opens\n").input_ids == plain[:-1]


def test_the_end_of_text_is_a_part_of_what_tells_tokenizers_apart_unless_it_is_the_usual_one(made, tmp_path):
    base, chat = (
        tokenizer.load(str(small_tokenizers.write(made["llama3"], tmp_path / eos, eos)))
        for eos in ("<|end_of_text|>", "<|eot_id|>")
    )
    assert tokenizer.serialized(base) == tokenizer.serialized(chat)
    assert tokenizer.digest(base) != tokenizer.digest(chat)
    # A tokenizer with <|endoftext|> uses it regardless of eos_token; its digest is that of its file if there is no
    # begin-of-text token.
    own = Tokenizer.from_str(made["llama3"].to_str())
    own.post_processor = processors.ByteLevel(trim_offsets=False)
    own.add_special_tokens(["<|endoftext|>"])
    usual = tokenizer.load(str(small_tokenizers.write(own, tmp_path / "usual", "<|eot_id|>")))
    assert usual.end_of_text == tokenizer.END_OF_TEXT
    tokenizer.save(usual, tmp_path / "saved")
    assert tokenizer.digest(usual) == tokenizer.digest(usual, (tmp_path / "saved/tokenizer.json").read_bytes())


@pytest.mark.parametrize(("config", "said"), [
    ({"eos_token": "<eos>"}, "source/tokenizer_config.json defines eos_token as '<eos>', which ends every document"),
    ({"eos_token": ["</s>"]}, "source/tokenizer_config.json defines eos_token as ['</s>']"),
    ({"bos_token": "<s>"}, "neither tokenizer_config.json nor special_tokens_map.json in its folder"),
    (None, "in tokenizer_config.json, set \"eos_token\" to a token of tokenizer.json"),
    ([], "source/tokenizer_config.json"),
])  # fmt: skip
def test_a_tokenizer_whose_end_of_text_is_not_known_is_refused(config, said, made, tmp_path):
    folder = small_tokenizers.write(made["llama2"], tmp_path / "source", "</s>")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if config is None:
        (folder / "tokenizer_config.json").unlink()
    with pytest.raises(DataError) as refusal:
        tokenizer.load(str(folder))
    assert said in str(refusal.value)
    assert "cannot be loaded" not in str(refusal.value)


def test_the_hubs_copies_say_what_ends_documents(made, tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "answers", lambda what: False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    cached = tmp_path / "models--owner--llama"
    folder = small_tokenizers.write(made["llama2"], cached / "snapshots/commit", "</s>")
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text("commit")
    assert tokenizer.load("owner/llama").end_of_text == "</s>"
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(DataError, match=r"its tokenizer_config\.json, which defines .* is not cached"):
        tokenizer.load("owner/llama")

    def missing(_, file):
        if file == "tokenizer.json":
            return folder / file
        raise RemoteEntryNotFoundError.__new__(RemoteEntryNotFoundError)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", missing)
    with pytest.raises(DataError, match=r"neither tokenizer_config\.json nor special_tokens_map\.json in its folder"):
        tokenizer.load("owner/llama")


def test_prepared_mixed_and_streamed_tokens_end_alike_and_those_of_another_end_are_told_apart(
    made, make_config: Callable[..., Config], parquet: list[str], texts: list[str], tmp_path: Path, capsys
):
    base, chat = (
        str(small_tokenizers.write(made["llama3"], tmp_path / name, eos))
        for name, eos in (("base", "<|end_of_text|>"), ("chat", "<|eot_id|>"))
    )
    config, other = (
        make_config(parquet, tokenizer=source, path=str(tmp_path / f"{Path(source).name}_tokens"))
        for source in (base, chat)
    )
    manifest, others = prepare(config), prepare(other)
    said = capsys.readouterr().out.splitlines()
    assert said == [
        f"data.tokenizer={base}: every document becomes <|begin_of_text|> TEXT <|end_of_text|>.",
        f"data.tokenizer={chat}: every document becomes <|begin_of_text|> TEXT <|eot_id|>.",
    ]
    assert (manifest.end_of_text_id, others.end_of_text_id) == (1, 2)
    assert manifest.begin_of_text_id == 0
    some = [text for i, text in enumerate(texts) if i % 50 != 49]
    kept, held = ([text for text in some if corpus.is_held_out(text, 0.1) == out] for out in (False, True))
    for end, folder in ((1, config.data.folder), (2, other.data.folder)):
        for split, plain in (("train", kept), ("validation", held)):
            tokens, starts = (
                np.fromfile(folder / f"{split}.tokens", "<u2"),
                np.fromfile(folder / f"{split}.documents", "<i8"),
            )
            documents = made["llama3"].encode_batch(plain, add_special_tokens=False)
            assert sorted(each.tolist() for each in np.split(tokens, starts[1:])) == sorted(
                [0, *document.ids, end] for document in documents
            )
    assert prepare(config) == read(config.data.folder) == manifest  # everything is prepared, and nothing is printed
    assert capsys.readouterr().out == ""

    # A run reads the first, and refuses the second.
    assert mistakes(config) == []
    assert tokenizer.load(str(config.data.folder / "tokenizer")).end_of_text == "<|end_of_text|>"
    run = tmp_path / "runs" / "mine"
    assert len(open_validation(config, config.data.folder / "tokenizer", run)) == manifest.validation.blocks
    with pytest.raises(DataError, match="prepared with a tokenizer other than"):
        open_validation(config, other.data.folder / "tokenizer", run)
    mixed = [{"data": str(each.data.folder), "weight": 1} for each in (config, other)]
    assert (
        "different tokenizers"
        in mix.mistakes(Request.of(replace(config, data=replace(config.data, mix=mixed, max_tokens=None))))[0]
    )
    named = Path(base, "tokenizer_config.json")
    content = named.read_text()
    named.write_text(content.replace("end_of_text", "eot_id"))
    assert "has changed since" in mistakes(config)[0]
    named.write_text(content)

    streams = [replace(each, data=replace(each.data, streaming=True)) for each in (config, other)]
    with process_group("cpu") as ranks:
        packed = open_data(config, ranks)
        streamed, apart = (open_data(each, ranks) for each in streams)
        (batch, _), (batch_apart, _) = (next(data.batches(None)) for data in (streamed, apart))
    assert (packed.end_of_text_id, streamed.end_of_text_id, apart.end_of_text_id) == (1, 1, 2)
    assert packed.begin_of_text_id == streamed.begin_of_text_id == 0
    held_out = [i for each in made["llama3"].encode_batch(held, add_special_tokens=False) for i in (0, *each.ids, 1)]
    assert torch.equal(streamed.validation, torch.tensor(held_out).unfold(0, 33, 32))
    assert (batch == 1).sum() == (batch_apart == 2).sum() > 0 == (batch == 2).sum()
    # In one data.path, each tokenizer has its own folder.
    again = replace(streams[1], data=replace(streams[1].data, path=streams[0].data.path))
    with process_group("cpu") as ranks:
        folder = open_data(again, ranks).tokenizer_folder
    assert folder.parent == streamed.tokenizer_folder.parent
    assert tokenizer.load(str(folder)).end_of_text == "<|eot_id|>"
    assert tokenizer.load(str(streamed.tokenizer_folder)).end_of_text == "<|end_of_text|>"


def unigram() -> Tokenizer:
    """Like T5's: </s> is also a word of the model."""
    pieces = [("<unk>", 0.0), ("</s>", 0.0), *((letter, -3.0) for letter in "▁</s>abc")]
    own = Tokenizer(models.Unigram(list(dict(pieces).items()), 0))
    own.pre_tokenizer = pre_tokenizers.Metaspace()
    own.add_special_tokens(["</s>"])
    return own


def test_a_text_that_spells_out_its_end_does_not_end_there(texts, tmp_path):
    usual = tokenizer.train(texts, 400)
    content = json.loads(usual.tokenizer.to_str())
    content["added_tokens"][0]["special"] = False
    (tmp_path / "usual").mkdir()
    (tmp_path / "usual/tokenizer.json").write_text(json.dumps(content))
    loaded = tokenizer.load(str(tmp_path / "usual"))
    assert "<|endoftext|> is now a special token" in loaded.changes[0]
    assert tokenizer.encode(loaded, ["the <|endoftext|> gate"]) == tokenizer.encode(usual, ["the <|endoftext|> gate"])

    own = small_tokenizers.write(unigram(), tmp_path / "own", "</s>")
    loaded = tokenizer.load(str(own))
    ids, plain = map(list, tokenizer.encode(loaded, ["ab </s>c</s>", "abc"]))
    assert (ids.count(1), ids[-1]) == (1, 1)
    assert loaded.tokenizer.decode(ids[:-1], skip_special_tokens=False).replace(" ", "") == "▁ab▁</s>c</s>"
    assert plain == [*loaded.tokenizer.encode("abc").ids, 1]


def test_tokens_of_an_earlier_version_which_left_a_tokenizer_as_it_was_are_gone_on_with(
    made, make_config: Callable[..., Config], parquet: list[str], tmp_path: Path, monkeypatch, capsys
):
    ending = Tokenizer.from_str(made["llama2"].to_str())
    ending.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 1))
    source = small_tokenizers.write(ending, tmp_path / "source", "</s>")
    config = make_config(parquet, tokenizer=str(source), path=str(tmp_path / "earlier"), max_tokens=2000)
    streaming = replace(config, data=replace(config.data, streaming=True))
    with monkeypatch.context() as earlier, process_group("cpu") as ranks:
        earlier.setattr(tokenizer, "_ours", lambda vocabulary: vocabulary)
        before = prepare(config)
        _, state = next(open_data(streaming, ranks).batches(None))
    file = config.data.folder / "tokenizer/tokenizer.json"
    assert Tokenizer.from_file(str(file)).encode("a").ids[-1] == 2
    capsys.readouterr()

    more = replace(config, data=replace(config.data, max_tokens=4000))
    assert mistakes(config) == []
    after = prepare(more)
    assert after.train.tokens > before.train.tokens
    assert after.tokenizer_hash == before.tokenizer_hash
    with process_group("cpu") as ranks:
        held_out = open_data(more, ranks).validation
        next(open_data(streaming, ranks).batches(state))
    # A checkpoint's tokenizer from this version, and from an earlier one.
    hf = tmp_path / "hf"
    tokenizer.save(tokenizer.load(str(source)), hf)
    assert Tokenizer.from_file(str(hf / "tokenizer.json")).encode("a").ids[-1] != 2
    for folder in (hf, file.parent):
        assert torch.equal(open_validation(more, folder, tmp_path / "runs/mine"), held_out)
