"""Splits a long document into pieces whose concatenated tokens equal the tokens of the whole.

A piece ends before a space between a word and a letter. Such a split changes no token if three conditions hold:

- the normalizer acts independently on each side of the space, as those in NORMALIZERS do;
- no pre-tokenizer word spans the split: "a b" gives the words of "a" and of " b". If the pre-tokenizer does not split
  at spaces (converted sentencepiece models), the model must be a BPE without tokens that have the space mark (▁)
  after another character: then no merge spans the split;
- no added token spans the split (added tokens are matched before normalization).

Llama 2's normalizer prepends "▁" to every string and replaces every space by "▁". For such a tokenizer, a piece starts
with the letter and omits the space, because the normalizer adds the "▁".

If the conditions do not hold, or are not known to hold, a document is not split: its encoding then takes 60 to 100
bytes per character, on one core.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers

LONG_DOCUMENT = 4_000_000  # characters; longer documents are split, so that all cores encode them in 0.5 GB of memory
PIECE = 500_000
# A single space followed by a letter. Not next to a literal ▁ or another space, which may merge with the space.
_BREAK = re.compile(r"(?<=[^\s▁]) (?=[^\W\d_])")
NORMALIZERS: tuple[dict[str, Any], ...] = (
    *({"type": name} for name in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase")),
    {"type": "Prepend", "prepend": "▁"},
    {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
)
# Characters to test before and after a space: one of each kind that pre-tokenizers distinguish.
BEFORE, BEHIND = "aZ1.)'é日", "bÜ日"


def batches(tokenizer: Tokenizer, texts: list[str]) -> Iterator[list[tuple[int, str]]]:
    """The pieces of the documents `texts` with their document's index, in lists of about LONG_DOCUMENT characters."""
    batch: list[tuple[int, str]] = []
    characters = 0
    for number, text in enumerate(texts):
        for piece in _pieces(text, tokenizer) if len(text) > LONG_DOCUMENT else (text,):
            batch.append((number, piece))
            characters += len(piece)
            if characters >= LONG_DOCUMENT:
                yield batch
                batch, characters = [], 0
    if batch:
        yield batch


def _pieces(text: str, tokenizer: Tokenizer) -> Iterator[str]:
    """`text` in pieces of at least PIECE characters, except perhaps the last."""
    start, skipped = 0, left_out(tokenizer)
    while skipped is not None and (found := _BREAK.search(text, start + PIECE)):
        yield text[start : found.start()]
        start = found.start() + skipped
    yield text[start:]


def left_out(tokenizer: Tokenizer) -> int | None:
    """The number of characters (0 or 1) that a piece omits at its start; None if documents cannot be split."""
    added = [token for token in tokenizer.get_added_tokens_decoder().values() if not token.special]
    if any(token.rstrip or re.search(r"\S ", token.content) for token in added):
        return None
    if any(part not in NORMALIZERS for part in _normalizers(tokenizer)):
        return None
    pairs = [(a, f" {b}") for a in BEFORE for b in BEHIND]
    for skipped in (0,) if added else (0, 1):  # if the space is omitted, an added token after it would differ
        parts = [(_words(tokenizer, a + b), _words(tokenizer, a), _words(tokenizer, b[skipped:])) for a, b in pairs]
        if all(whole == left + right for whole, left, right in parts):
            return skipped
        same = all("".join(whole) == "".join(left + right) for whole, left, right in parts)
        marks = {"".join(right)[:1] for *_, right in parts}
        if same and len(marks) == 1 and _never_merges(tokenizer, marks.pop()):
            return skipped
    return None


def _normalizers(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The normalizers in tokenizer.json as a flat list."""
    if tokenizer.normalizer is None:
        return []
    found = json.loads(tokenizer.normalizer.__getstate__())
    return found["normalizers"] if found["type"] == "Sequence" else [found]


def _words(tokenizer: Tokenizer, text: str) -> list[str]:
    """The words into which normalizer and pre-tokenizer split `text`."""
    if tokenizer.normalizer is not None:
        text = tokenizer.normalizer.normalize_str(text)
    if tokenizer.pre_tokenizer is None:
        return [text]
    return [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


def _never_merges(tokenizer: Tokenizer, mark: str) -> bool:
    """Whether no token has the space `mark` after another character, in a model that sees a document as one word."""
    model, vocabulary = tokenizer.model, tokenizer.get_vocab(with_added_tokens=False)
    return (
        isinstance(tokenizer.pre_tokenizer, pre_tokenizers.Metaspace | None)
        and isinstance(model, models.BPE)
        and not (model.dropout or model.continuing_subword_prefix or model.end_of_word_suffix)
        and mark in vocabulary
        and not any(re.search(f"[^{re.escape(mark)}]{re.escape(mark)}", token) for token in vocabulary)
    )
