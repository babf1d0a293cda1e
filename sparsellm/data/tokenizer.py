"""The tokenizer: from the hub, from a local folder, or trained here; and kept in a folder that AutoTokenizer loads.

Only `tokenizer.json` is read. Loading the folder through the class that its `tokenizer_config.json` names can change
the tokens: transformers 5 builds a GPT2Tokenizer from vocabulary and merges, and loses how SmolLM2 splits digits.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from sparsellm import hub
from sparsellm.data.errors import DataError
from sparsellm.files import write_whole

END_OF_TEXT = "<|endoftext|>"  # follows every document
# A longer document is encoded in pieces, on all cores and in 0.5 GB: whole, its encoding takes 100 bytes a character.
LONG_DOCUMENT = 4_000_000
PIECE = 500_000
# Pieces begin here: byte-level tokenizers join no letter and no space in front of it to what comes before.
_BREAK = re.compile(r"(?<=\S) (?=[^\W\d_])")
_FILE = "tokenizer.json"


def load(name: str) -> Tokenizer:
    """The tokenizer of a local folder, of the tokenizer.json in it, or of a hub repository. Raises DataError."""
    path = Path(name).expanduser()
    here = path.exists()
    try:
        if here:
            tokenizer = Tokenizer.from_file(str(path / _FILE if path.is_dir() else path))
        else:
            with hub.offline(not hub.answers(f"data.tokenizer={name}")):
                tokenizer = Tokenizer.from_pretrained(name)
    except Exception as error:  # the library raises a bare Exception for a file that it cannot parse
        what = "cannot be loaded" if here else "is no folder here, and no tokenizer of that name is read from the hub"
        raise DataError(
            f"data.tokenizer={name} {what} ({' '.join(str(error).split())}): give a folder with {_FILE}, which needs no"
            " network, or the name of a repository on the hub"
        ) from error
    if tokenizer.token_to_id(END_OF_TEXT) is None:
        raise DataError(f"data.tokenizer {name!r} has no {END_OF_TEXT}, which ends every document: add it to {_FILE}")
    # Settings of other uses, which would cut or pad documents without a word.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def is_missing(name: str) -> bool:
    """Whether `name` can only be a local path (the hub's names are OWNER/NAME), and nothing is there."""
    looks_local = name.startswith((".", "/", "~")) or name.endswith(".json") or name.count("/") > 1
    return looks_local and not Path(name).expanduser().exists()


def train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE with END_OF_TEXT as id 0. The same texts give the same tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> str:
    """Write `tokenizer` to `folder` as AutoTokenizer loads it, and return its `digest`."""
    folder.mkdir(parents=True, exist_ok=True)
    content = _serialized(tokenizer)
    # A class that only wraps tokenizer.json; transformers 4 and 5 both know it by this name.
    roles = {role: END_OF_TEXT for role in ("bos_token", "eos_token", "pad_token")}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **roles}
    for name, text in ((_FILE, content), ("tokenizer_config.json", json.dumps(config, indent=2) + "\n")):
        write_whole(folder / name, text)
    return hashlib.sha256(content.encode()).hexdigest()


def digest(tokenizer: Tokenizer) -> str:
    """sha256 of the tokenizer.json that `save` writes."""
    return hashlib.sha256(_serialized(tokenizer).encode()).hexdigest()


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """One more than the largest id, added tokens included."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def end_of_text_id(tokenizer: Tokenizer) -> int:
    found = tokenizer.token_to_id(END_OF_TEXT)
    assert found is not None  # `load` has refused a tokenizer without one, and `train` gives each one
    return found


def encode(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """The ids of each document, END_OF_TEXT at its end; documents in parallel.

    A special token that is spelled out in a text is text: only the end of a document ends it.
    """
    tokenizer.encode_special_tokens = True
    end = end_of_text_id(tokenizer)
    documents: list[list[int]] = [[] for _ in texts]
    for batch in _batches(texts):
        encodings = tokenizer.encode_batch_fast([piece for _, piece in batch], add_special_tokens=False)
        for (number, _), encoding in zip(batch, encodings, strict=True):
            documents[number] += encoding.ids
    for document in documents:
        document.append(end)
    return documents


def _batches(texts: list[str]) -> Iterator[list[tuple[int, str]]]:
    """The pieces of `texts`, each with the number of its text, in lists of about LONG_DOCUMENT characters."""
    batch: list[tuple[int, str]] = []
    characters = 0
    for number, text in enumerate(texts):
        for piece in _pieces(text) if len(text) > LONG_DOCUMENT else (text,):
            batch.append((number, piece))
            characters += len(piece)
            if characters >= LONG_DOCUMENT:
                yield batch
                batch, characters = [], 0
    if batch:
        yield batch


def _pieces(text: str) -> Iterator[str]:
    """`text` in pieces of at least PIECE characters, the last one perhaps less."""
    start = 0
    while found := _BREAK.search(text, start + PIECE):
        yield text[start : found.start()]
        start = found.start()
    yield text[start:]


def _serialized(tokenizer: Tokenizer) -> str:
    return tokenizer.to_str(pretty=True)
