"""Classes of tokens, on a byte-level tokenizer and on one that marks spaces as SentencePiece does."""

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sparsellm.analysis.token_classes import CLASSES, classified

END = "<|endoftext|>"
BYTE_LEVEL = (pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel(), "\u0120")
METASPACE = (pre_tokenizers.Metaspace(), decoders.Metaspace(), "\u2581")


def sorted_into_classes(pieces, form=BYTE_LEVEL):
    """The class of each of `pieces`, which are the tokens of one sequence; a leading space is part of its token."""
    before, decoder, space = form
    vocabulary = {name: i for i, name in enumerate(dict.fromkeys([END, *(p.replace(" ", space) for p in pieces)]))}
    inner = Tokenizer(models.WordLevel(vocabulary, END))
    inner.pre_tokenizer, inner.decoder = before, decoder
    inner.add_special_tokens([AddedToken(END, special=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=END)
    ids = np.array([[vocabulary[p.replace(" ", space)] for p in pieces]])
    return [CLASSES[i] for i in classified(ids, tokenizer)[0]]


@pytest.mark.parametrize("form", [BYTE_LEVEL, METASPACE], ids=["byte level", "metaspace"])
def test_words_numbers_punctuation_and_urls(form):
    expected = {
        "The": "word start", " wat": "word start", "er": "word continuation", "'s": "word continuation",
        ",": "punctuation", " 19": "number", "84": "number", " (": "punctuation", "see": "word start",
        " https": "URL piece", "://": "URL piece", "arxiv": "URL piece", ".org": "URL piece", "/2603": "URL piece",
        ")": "punctuation", ".": "punctuation", END: "other", "Why": "word start", "?": "punctuation",
        " www": "URL piece", ".x": "URL piece", " end": "word start",
    }  # fmt: skip
    assert sorted_into_classes(list(expected), form) == list(expected.values())


def test_white_space_and_parts_of_a_character_are_other():
    pieces = [
        "a",
        "\u010a",
        "\u00f0",
        " ",
        "b",
    ]  # a newline and a byte of an emoji, as byte-level tokenizers spell them
    assert sorted_into_classes(pieces) == ["word start", "other", "other", "other", "word start"]


def test_a_url_ends_with_its_sequence():
    assert sorted_into_classes(["http", "://", "a", ".b"]) == ["URL piece"] * 4
