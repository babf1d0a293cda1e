"""A long document in pieces, whose tokens, one after the other, are those of the whole.

A piece ends in front of a space that stands between a word and a letter. That changes no token if three things hold:

- the normalizer changes the text on each side of the space alone, as those of NORMALIZERS do;
- no word of the pre-tokenizer goes across: "a b" gives the words of "a" and of " b". Where it does not cut the text at
  spaces, as those that were made from sentencepiece, the model must be a BPE, and none of its tokens may have the mark
  of a space behind another character: then nothing is ever merged across;
- no token that is found in the text before all that goes across.

Llama 2's normalizer puts a "▁" in front of every text, and turns every space into one. There a piece begins with the
letter and leaves the space out, in whose place it gets the "▁".

Where this does not hold, or is not known to, a document is not cut: its encoding then takes 60 to 100 bytes a
character, and one core.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers

LONG_DOCUMENT = 4_000_000  # characters; a longer document is cut, so that all cores encode it, in 0.5 GB
PIECE = 500_000
# In front of a space alone before a letter. Literal marks may merge with it, as other spaces do.
_BREAK = re.compile(r"(?<=[^\s▁]) (?=[^\W\d_])")
NORMALIZERS: tuple[dict[str, Any], ...] = (
    *({"type": name} for name in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase")),
    {"type": "Prepend", "prepend": "▁"},
    {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
)
# What stands before and behind a space, of each kind that pre-tokenizers tell apart.
BEFORE, BEHIND = "aZ1.)'é日", "bÜ日"


def batches(tokenizer: Tokenizer, texts: list[str]) -> Iterator[list[tuple[int, str]]]:
    """The pieces of `texts`, each with the number of its text, in lists of about LONG_DOCUMENT characters."""
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
    """`text` in pieces of at least PIECE characters, the last one perhaps less."""
    start, skipped = 0, left_out(tokenizer)
    while skipped is not None and (found := _BREAK.search(text, start + PIECE)):
        yield text[start : found.start()]
        start = found.start() + skipped
    yield text[start:]


def left_out(tokenizer: Tokenizer) -> int | None:
    """How many characters, 0 or 1, a piece leaves out at its beginning; None: a text cannot be cut."""
    added = [token for token in tokenizer.get_added_tokens_decoder().values() if not token.special]
    if any(token.rstrip or re.search(r"\S ", token.content) for token in added):
        return None
    if any(part not in NORMALIZERS for part in _normalizers(tokenizer)):
        return None
    pairs = [(a, f" {b}") for a in BEFORE for b in BEHIND]
    for skipped in (0,) if added else (0, 1):  # behind a space that is left out, an added token would be another one
        parts = [(_words(tokenizer, a + b), _words(tokenizer, a), _words(tokenizer, b[skipped:])) for a, b in pairs]
        if all(whole == left + right for whole, left, right in parts):
            return skipped
        same = all("".join(whole) == "".join(left + right) for whole, left, right in parts)
        marks = {"".join(right)[:1] for *_, right in parts}
        if same and len(marks) == 1 and _never_merges(tokenizer, marks.pop()):
            return skipped
    return None


def _normalizers(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """One after the other, as tokenizer.json has them."""
    if tokenizer.normalizer is None:
        return []
    found = json.loads(tokenizer.normalizer.__getstate__())
    return found["normalizers"] if found["type"] == "Sequence" else [found]


def _words(tokenizer: Tokenizer, text: str) -> list[str]:
    """What the model gets of a text, word by word."""
    if tokenizer.normalizer is not None:
        text = tokenizer.normalizer.normalize_str(text)
    if tokenizer.pre_tokenizer is None:
        return [text]
    return [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


def _never_merges(tokenizer: Tokenizer, mark: str) -> bool:
    """Whether the model, which gets a text as one word, puts no `mark` of a space into a token behind another one."""
    model, vocabulary = tokenizer.model, tokenizer.get_vocab(with_added_tokens=False)
    return (
        isinstance(tokenizer.pre_tokenizer, pre_tokenizers.Metaspace | None)
        and isinstance(model, models.BPE)
        and not (model.dropout or model.continuing_subword_prefix or model.end_of_word_suffix)
        and mark in vocabulary
        and not any(re.search(f"[^{re.escape(mark)}]{re.escape(mark)}", token) for token in vocabulary)
    )
