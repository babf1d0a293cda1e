"""Classifies tokens by spelling. Parts of speech are left out, because a tagger would have to be downloaded."""

import re
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # deferred: importing transformers' models takes two seconds
    from transformers import PreTrainedTokenizerBase

CLASSES = ("URL piece", "number", "punctuation", "word start", "word continuation", "other")
URL = re.compile(r"(?:https?://|www\.)[^\s<>\"')\]]+")
PART_OF_A_CHARACTER = "\N{REPLACEMENT CHARACTER}"


def classified(blocks: np.ndarray, tokenizer: "PreTrainedTokenizerBase") -> np.ndarray:
    """The class of each token of `blocks` (int64 [S, T]), as an index into CLASSES."""
    special = set(tokenizer.all_special_ids)
    pieces = {i: " " if i in special else piece(tokenizer, i) for i in np.unique(blocks).tolist()}
    found = np.empty_like(blocks)
    for row, block in zip(found, blocks.tolist(), strict=True):
        texts = [pieces[i] for i in block]
        row[:] = [CLASSES.index(spelled_as(*pair)) for pair in zip(texts, [" ", *texts], strict=False)]
        ends = np.cumsum([len(text) for text in texts])
        for url in URL.finditer("".join(texts)):
            first, last = np.searchsorted(ends, (url.start(), url.end() - 1), side="right")
            row[first : last + 1] = CLASSES.index("URL piece")
    return found


def piece(tokenizer: "PreTrainedTokenizerBase", token: int) -> str:
    """The characters that `token` adds to a document, with a leading space if it has one; never empty."""
    text = str(tokenizer.decode([token]))
    # SentencePiece marks the space before a word with U+2581, which decoding a single token drops.
    marked = str(tokenizer.convert_ids_to_tokens(token)).startswith("\u2581")
    return text if text[:1].isspace() or (text and not marked) else f" {text}"


def spelled_as(text: str, before: str) -> str:
    """The class of a token with this text, after a token with the text `before`, outside URLs."""
    if text.isspace() or PART_OF_A_CHARACTER in text:
        return "other"
    if any(map(str.isalpha, text)):
        return "word continuation" if before[-1].isalnum() and not text[0].isspace() else "word start"
    return "number" if any(map(str.isnumeric, text)) else "punctuation"
