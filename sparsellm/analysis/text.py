"""The text that a checkpoint reads: its run's held-out blocks, or the tokens of a file cut into such blocks.

Commands import this module only after their checks, because it imports `datasets`, which is slow.
"""

import codecs
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparsellm import data
from sparsellm.analysis.errors import AnalysisError
from sparsellm.config import load
from sparsellm.data import corpus, rows
from sparsellm.hf import pretrained
from sparsellm.runs.layout import CONFIG
from sparsellm.runs.locate import Checkpoint

if TYPE_CHECKING:  # deferred: importing transformers' models takes two seconds
    from transformers import PreTrainedTokenizerBase

LONGEST = 2_048  # longest sequence for a model without a run, if its context allows it
COLUMN = "text"  # column of a parquet or jsonl file
DOCUMENTS_AT_ONCE = 64
# A file is read up to this many bytes, and further only if these contain too few tokens (English: 4 bytes per token).
LEAST_READ, BYTES_PER_TOKEN = 1 << 20, 64


def blocks(
    checkpoint: Checkpoint, file: str | None, vocabulary: int, context: int, sequences: int, length: int | None = None
) -> Tensor:
    """The first `sequences` sequences of `file`, or of the held-out text of the checkpoint's run: int64 [S, T].

    Sequences of `file` have `length` tokens. None: as many as the run's; without a run, the model's `context`, at most
    LONGEST. Raises AnalysisError if the text cannot be read.
    """
    run, folder = None if checkpoint.run is None else load(checkpoint.run / CONFIG), checkpoint.run
    if file is not None:
        length = length or (run.training.sequence_length if run else min(LONGEST, context))
        tokenizer = pretrained.read_tokenizer(checkpoint.model, vocabulary)
        return of_file(Path(file).expanduser(), tokenizer, sequences, length)
    assert run is not None
    assert folder is not None  # `text_mistakes` requires a file otherwise
    try:
        held_out = data.open_validation(data.Request.of(run), sequences, Path(checkpoint.model), folder)
    except (data.DataError, OSError) as error:
        raise AnalysisError(
            f"the held-out text of {folder} is not available: {error}; or give another text with text=FILE"
        ) from error
    return held_out[:, :-1]  # the last token is only a target


def of_file(path: Path, tokenizer: "PreTrainedTokenizerBase", sequences: int, length: int) -> Tensor:
    """The first `sequences` x `length` tokens of `path`, or all its whole sequences if there are fewer: int64 [S, T].

    A long text file is read only as far as its tokens are needed. Every document ends with the tokenizer's eos_token,
    and begins with its bos_token if prompts do. A file of fewer than `length` tokens is one sequence. Raises
    AnalysisError if the file cannot be read.
    """
    begin = [token for token in tokenizer("a").input_ids[:1] if token == tokenizer.bos_token_id]
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    wanted, most = sequences * length, max(LEAST_READ, BYTES_PER_TOKEN * sequences * length)
    while True:
        tokens: list[int] = []
        texts = documents(path, most)
        while len(tokens) < wanted and (some := list(islice(texts, DOCUMENTS_AT_ONCE))):
            # As in training, a special token's name that occurs in a document is encoded as plain text.
            encoded = tokenizer(some, add_special_tokens=False, split_special_tokens=True, verbose=False)
            tokens += [token for ids in encoded["input_ids"] for token in begin + ids + end]
        # More tokens than wanted: the last token of a truncated document may differ from that of the whole document.
        if len(tokens) > wanted or not _is_cut(path, most):
            break
        most *= 8
    if not tokens:
        raise AnalysisError(f"text={path} contains no text")
    length = min(length, len(tokens))
    sequences = min(sequences, len(tokens) // length)
    return torch.tensor(tokens[: sequences * length]).view(sequences, length)


def _is_cut(path: Path, most: int) -> bool:
    """Whether `path` is a plain text file of more than `most` bytes."""
    is_text = rows.READERS.get(rows.ending(path.name), "text") == "text"
    return is_text and path.suffix.lower() not in rows.COMPRESSIONS and path.stat().st_size > most


def documents(path: Path, most: int) -> Iterator[str]:
    """The documents of a parquet or jsonl file, as preparation reads it; the first `most` bytes of any other file are
    one document. Raises AnalysisError on failure."""
    try:
        if _is_cut(path, most):
            with path.open("rb") as file:
                text = codecs.getincrementaldecoder("utf-8-sig")().decode(file.read(most))
            yield from text.rsplit(maxsplit=1)[:1]  # without the last word, which may be truncated
            return
        if rows.ending(path.name) not in rows.READERS:
            yield from filter(None, [path.read_text(encoding="utf-8-sig")])
            return
        for document in corpus.read([str(path)], COLUMN):
            if document.text:
                yield document.text
    except data.DataError as error:  # its remedies are keys data.*, which commands with text=FILE do not have
        reason = str(error).replace(corpus.OR_SKIP, "").replace("set data.text_column to one of", "rename one of")
        raise AnalysisError(f"text={path}: {reason.replace('data.text_column', 'column')}") from error
    except (OSError, ValueError) as error:
        raise AnalysisError(f"text={path} cannot be read as text: {error}") from error
