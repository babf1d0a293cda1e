import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer, LlamaConfig

from sparsellm.data import DataError, pieces, tokenizer
from sparsellm.hf import hub

SAMPLE = "Hello  12345 wörld\n\n\tdef f(x):  return x"


def test_a_trained_tokenizer_is_deterministic_and_lossless(texts: list[str]) -> None:
    trained = tokenizer.train(texts, 400)
    assert tokenizer.digest(trained) == tokenizer.digest(tokenizer.train(texts, 400))
    assert tokenizer.vocabulary_size(trained) == 400
    assert trained.tokenizer.token_to_id(tokenizer.END_OF_TEXT) == 0
    assert trained.tokenizer.decode(trained.tokenizer.encode(SAMPLE + "日本").ids) == SAMPLE + "日本"


def test_documents_end_with_end_of_text_and_nothing_in_a_text_ends_it(tokenizer_folder: Path) -> None:
    vocabulary = tokenizer.load(str(tokenizer_folder))
    ids, empty = tokenizer.encode(vocabulary, ["token <|endoftext|> stream", ""])
    assert ids[-1] == 0
    assert ids.count(0) == 1
    assert list(empty) == [0]
    assert vocabulary.tokenizer.decode(ids[:-1]) == "token <|endoftext|> stream"


def test_a_long_document_is_encoded_in_pieces_to_the_same_ids(
    texts: list[str], tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocabulary = tokenizer.load(str(tokenizer_folder))
    long = "  \n".join(texts)
    documents = [texts[0], long, "", long[:1_000], texts[1]]
    whole = tokenizer.encode(vocabulary, documents)
    monkeypatch.setattr(pieces, "LONG_DOCUMENT", 2_000)
    for piece in (1, 100, 5_000):
        monkeypatch.setattr(pieces, "PIECE", piece)
        sizes = [[len(piece) for _, piece in batch] for batch in pieces.batches(vocabulary.tokenizer, documents)]
        assert max(map(sum, sizes)) < 2_000 + piece + 1_000 < len(long)
        assert tokenizer.encode(vocabulary, documents) == whole


def test_truncation_and_padding_settings_do_not_touch_documents(tmp_path: Path, tokenizer_folder: Path) -> None:
    cutting = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    cutting.enable_truncation(4)
    cutting.enable_padding(length=50)
    cutting.save(str(tmp_path / "tokenizer.json"))
    (ids,) = tokenizer.encode(tokenizer.load(str(tmp_path)), ["block " * 20])
    assert len(ids) == len(tokenizer.encode(tokenizer.load(str(tokenizer_folder)), ["block " * 20])[0]) > 4
    assert len(ids) != 51


def test_the_saved_smollm2_tokenizer_loads_alone_and_beside_a_model(tmp_path: Path, shared_data: Path) -> None:
    original = Tokenizer.from_file(str(shared_data / "tokenizer" / "tokenizer.json"))
    loaded = tokenizer.load(str(shared_data / "tokenizer"))
    assert tokenizer.save(loaded, tmp_path) == tokenizer.digest(tokenizer.load(str(tmp_path / "tokenizer.json")))
    text = f"{SAMPLE}<|im_start|>user<|endoftext|>"
    for _ in range(2):
        auto = AutoTokenizer.from_pretrained(tmp_path)
        assert auto(text).input_ids == original.encode(text).ids
        assert (len(auto), auto.eos_token_id, auto.pad_token_id) == (49_152, 0, 0)
        assert auto.decode(auto(SAMPLE).input_ids) == SAMPLE
        LlamaConfig().save_pretrained(tmp_path)  # as in an hf/ export, where its type must not choose the class


def test_a_tokenizer_that_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": 1}))
    with pytest.raises(DataError, match=f"data.tokenizer={tmp_path} cannot be loaded"):
        tokenizer.load(str(tmp_path))
    assert hub.is_missing(str(tmp_path / "nowhere"))
    assert not hub.is_missing(str(tmp_path))
    assert not hub.is_missing("owner/name")
