"""Long documents in pieces: which tokenizers allow it, and that the tokens equal those of the whole."""

import random

import pytest
import small_tokenizers
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers

from sparsellm.data import pieces, tokenizer

# Separators of words: what spaces merge with, what is a separate word, and what only looks like a token.
BETWEEN = [
    " ",
    " ",
    " ",
    "  ",
    " \n",
    "\n\n",
    "\t",
    ". ",
    " ▁ ",
    "▁ ",
    " ▁",
    "▁▁ ",
    " </s> ",
    " 日本 ",
    "é ",
    " e\u0301 ",
    " 1 2 ",
    "' ",
]


@pytest.fixture(scope="module")
def long(texts: list[str]) -> str:
    draw = random.Random(1)
    words = " ".join(texts).split()
    return "".join(draw.choice(words) + draw.choice(BETWEEN) for _ in range(3_000))


def of_words(texts: list[str]) -> Tokenizer:
    return tokenizer.train(texts, 400).tokenizer


def composing(texts: list[str]) -> Tokenizer:
    made = of_words(texts)
    made.normalizer = normalizers.NFC()
    return made


def marked_words(texts: list[str]) -> Tokenizer:
    """A mark in front of every text, and words."""
    made = small_tokenizers.mistral(texts)
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    return made


def across_spaces(texts: list[str]) -> Tokenizer:
    """Tokens hold several words."""
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.train_from_iterator(
        [text[:60] for text in texts],
        trainers.BpeTrainer(vocab_size=600, special_tokens=["<unk>", "</s>"], show_progress=False),
    )
    return made


def adding_across_spaces(texts: list[str]) -> Tokenizer:
    made = of_words(texts)
    made.add_tokens(["the token", "of."])
    return made


def adding_words(texts: list[str]) -> Tokenizer:
    made = small_tokenizers.llama2(texts)
    made.add_tokens([AddedToken("token", normalized=False)])
    return made


def stripping(texts: list[str]) -> Tokenizer:
    made = of_words(texts)
    made.normalizer = normalizers.Strip()
    return made


@pytest.mark.parametrize(("make", "left_out"), [
    (of_words, 0), (composing, 0), (small_tokenizers.llama3, 0), (small_tokenizers.mistral, 0), (marked_words, 0),
    (small_tokenizers.llama2, 1), (across_spaces, None), (adding_across_spaces, None), (adding_words, None),
    (stripping, None),
])  # fmt: skip
def test_a_long_document_has_the_tokens_of_the_whole_and_is_cut_where_that_can_be(
    make, left_out, texts, long, monkeypatch
):
    made = make(texts)
    end = next(token for token in ("</s>", "<|endoftext|>", "<|end_of_text|>") if made.token_to_id(token) is not None)
    vocabulary = tokenizer.Vocabulary(made, end)
    documents = [texts[0], long, "", long[:900], texts[1]]
    whole = tokenizer.encode(vocabulary, documents)
    assert pieces.left_out(made) == left_out
    monkeypatch.setattr(pieces, "LONG_DOCUMENT", 1_000)
    for size in (1, 100, 3_000):
        monkeypatch.setattr(pieces, "PIECE", size)
        counts = [number for batch in pieces.batches(made, documents) for number, _ in batch]
        assert (counts.count(1) > len(long) / (size + 300)) == (left_out is not None)
        assert counts.count(3) == 1
        assert tokenizer.encode(vocabulary, documents) == whole
