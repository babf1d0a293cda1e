"""Training on documents while they are read and tokenized, for those without the disk.

Each epoch permutes the files and deals them out to the ranks, so that none reads what another needs; a rank goes on to
its next epoch when its own files end. Documents are packed into blocks as in manifest.py, held-out and empty ones left
out. Blocks are shuffled in groups: a group is collected, then permuted. (`IterableDataset.shuffle` would lose its
buffer on a resume.)

The position is that of the group's first token and how many blocks of the group were handed out: a resume reads the
group again and passes over those. It belongs to one rank of a fixed number of ranks, to one tokenizer, by its content,
and to the same files: local ones are the same by path, size, and their first and last MiB (2 MiB to read of each file,
at every start).
"""

import os
from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import DataLoader, IterableDataset

from sparsellm.data import corpus, tokenizer
from sparsellm.data.errors import DataError
from sparsellm.data.packed import Batch, outlive_stop_signals, permutation, started

GROUP_BLOCKS = 1024
_REMEDY = (
    "prepare the tokens first (`python -m sparsellm.prepare_data` with data.streaming=false), for then the end of the"
    " text is held out where whole documents are too few"
)


@dataclass(frozen=True)
class TokenStream:
    """The endless stream of one rank."""

    files: corpus.Files
    text_column: str
    tokenizer_folder: Path
    validation_fraction: float
    sequence_length: int  # T
    share: int  # blocks per step of this rank
    rank: int
    world_size: int
    seed: int
    workers: int
    pin_memory: bool
    group_blocks: int = GROUP_BLOCKS

    def __post_init__(self) -> None:
        if len(self.files) < self.world_size:
            raise DataError(
                f"data.streaming=true deals out whole files, and there are {len(self.files)} for {self.world_size}"
                " ranks: split them into more, use fewer ranks, or prepare the data and set data.streaming=false"
            )

    def validation(self, samples: int) -> torch.Tensor:
        """The first `samples` held-out blocks, or all if there are fewer: int64 [V, T + 1]. Reads the files in their
        own order, so it is the same on every rank and at every start. Raises DataError if there is none."""
        length, found = self.sequence_length, 0
        pieces: list[np.ndarray] = []
        for _, tokens in self._tokens(list(self.files), corpus.START, held_out=True):
            pieces.append(tokens)
            found += len(tokens)
            if found > samples * length:
                break
        if found <= length:
            raise DataError(
                f"the stream holds {found:,} validation tokens, less than one block of {length + 1:,}: {_REMEDY}"
            )
        return torch.from_numpy(_blocks(np.concatenate(pieces), length)[:samples].copy())

    def batches(self, state: dict[str, Any] | None) -> Generator[Batch, None, None]:
        """Endless (int64 [share, T + 1], state after it), from the start or from `state`.

        Raises DataError if `state` belongs to another number of ranks, another rank, other files, another tokenizer,
        or documents that begin otherwise.
        """
        vocabulary = self._vocabulary()
        identity = {
            "world_size": self.world_size, "rank": self.rank, "files": self._files_digest(),
            "begin_of_text": vocabulary.begin_of_text,  # states of earlier versions had none
            "tokenizer": tokenizer.digest(vocabulary)[:16],
        }  # fmt: skip
        ends = corpus.ends(self.files)
        # States of earlier versions have no "ends" and no "tokenizer", or that of the tokenizer as it was found.
        before: dict[str, Any] = identity if state is None else {"tokenizer": identity["tokenizer"], **state}
        if before["tokenizer"] in {digest[:16] for digest in tokenizer.digests(vocabulary)}:
            before = {**before, "tokenizer": identity["tokenizer"]}
        saved = before.get("ends", ends)
        if changed := [file for file, digest in ends.items() if saved.get(file, digest) != digest]:
            raise DataError(
                f"{', '.join(changed)}: of another content than when the data position was saved, for a stream goes on"
                " only in the same files; bring them back, or begin a new run with run.restart=true"
            )
        for key, now in identity.items():
            if before.get(key) != now:
                raise DataError(
                    f"the data position was saved with {key} {before.get(key)} and {key} is {now} now: a stream goes on"
                    " only with the same ranks, files and tokenizer; bring them back, or begin a new run with"
                    " run.restart=true"
                )
        position = state or {"epoch": 0, **corpus.START, "skip_tokens": 0, "group": 0, "given": 0}
        # One worker: more would need positions of their own. It reads ahead up to a group, to have the next one ready.
        ahead = max(2, self.group_blocks // self.share)
        worker: dict[str, Any] = {"num_workers": 1, "prefetch_factor": ahead, "worker_init_fn": _one_thread}
        loader = DataLoader(
            _Shares(self, position),
            batch_size=None,
            pin_memory=self.pin_memory,
            generator=torch.Generator(),  # otherwise a start draws from the global generator, and a resume shows
            **(worker if self.workers else {}),
        )
        for batch, after in started(loader):
            yield batch, {**identity, "ends": ends, **after}

    def shares(self, position: dict[str, Any]) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
        """`batches` without its checks, read in this process."""
        rows: list[np.ndarray] = []
        given = position["given"]
        for start, group in self._groups(position):
            order = permutation(len(group), self.seed, self.rank, start["group"])
            for number, block in enumerate(order[given:], start=given + 1):
                rows.append(group[block])
                if len(rows) == self.share:
                    yield torch.from_numpy(np.stack(rows)), {**start, "given": number}
                    rows = []
            given = 0

    def _groups(self, position: dict[str, Any]) -> Iterator[tuple[dict[str, Any], np.ndarray]]:
        """Groups of blocks, int64 [group_blocks, T + 1], each with the position of its first token."""
        step = self.group_blocks * self.sequence_length
        skip, number = position["skip_tokens"], position["group"]
        buffer = np.empty(0, np.int64)
        # Where in the buffer each chunk starts; negative once its first tokens are used up.
        starts: deque[tuple[int, dict[str, Any]]] = deque()
        for where, tokens in self._epochs(position):
            starts.append((len(buffer) - skip, where))
            buffer = np.concatenate([buffer, tokens[skip:]])
            skip = 0
            while len(buffer) > step:
                while len(starts) > 1 and starts[1][0] <= 0:
                    starts.popleft()
                first, where = starts[0]
                yield (
                    {**where, "skip_tokens": -first, "group": number},
                    _blocks(buffer[: step + 1], self.sequence_length),
                )
                buffer = buffer[step:]
                starts = deque((start - step, where) for start, where in starts)
                number += 1

    def _epochs(self, position: dict[str, Any]) -> Iterator[tuple[dict[str, int], np.ndarray]]:
        """This rank's training tokens, chunk by chunk, each with the position of its first document."""
        names, start = list(self.files), {key: position[key] for key in corpus.START}
        for epoch in count(position["epoch"]):
            order = permutation(len(names), self.seed, epoch)[self.rank :: self.world_size]
            total = 0
            for where, tokens in self._tokens([names[i] for i in order], start, held_out=False):
                total += len(tokens)
                yield {"epoch": epoch, **where}, tokens
            if total == 0 and start == corpus.START:
                raise DataError(
                    f"the files of rank {self.rank} in epoch {epoch} hold no document to train on:"
                    f" remove empty files, lower data.validation_fraction, or {_REMEDY}"
                )
            start = corpus.START

    def _tokens(
        self, files: list[str], position: corpus.Position, held_out: bool
    ) -> Iterator[tuple[corpus.Position, np.ndarray]]:
        vocabulary = self._vocabulary()
        for chunk in corpus.chunks(corpus.read(files, self.text_column, position)):
            texts = [document.text for document in chunk if document.text]
            texts = [text for text in texts if corpus.is_held_out(text, self.validation_fraction) == held_out]
            tokens = [ids for document in tokenizer.encode(vocabulary, texts) for ids in document]
            yield chunk[0].position(), np.array(tokens, np.int64)

    def _vocabulary(self) -> tokenizer.Vocabulary:
        return tokenizer.load(str(self.tokenizer_folder), "data.path")

    def _files_digest(self) -> str:
        return xxhash.xxh3_64(repr(sorted(self.files.items())).encode()).hexdigest()


@dataclass
class _Shares(IterableDataset):
    stream: TokenStream
    position: dict[str, Any]

    def __iter__(self) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
        return self.stream.shares(self.position)


def _one_thread(worker: int) -> None:
    outlive_stop_signals(worker)
    # A forked process has lost the tokenizer's threads; one core still tokenizes faster than a GPU trains.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _blocks(tokens: np.ndarray, length: int) -> np.ndarray:
    """Every whole block of `tokens`, [B, T + 1], one starting every T: a view."""
    return np.lib.stride_tricks.sliding_window_view(tokens, length + 1)[::length]
