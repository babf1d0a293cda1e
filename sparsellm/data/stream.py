"""Trains on documents while they are read and tokenized, without disk space for tokens.

Each epoch permutes the files and gives each file to one rank, which starts its next epoch when its own files end.
Documents, except held-out and empty ones, are packed into blocks as in manifest.py. Blocks are shuffled in groups: a
group is collected, then permuted. (`IterableDataset.shuffle` would lose its buffer on a resume.)

A position consists of the position of the current group's first token, and the number of blocks already used from the
group: a resume reads the group again and skips these blocks. A position is valid for one rank of a fixed number of
ranks, one tokenizer (by content), and the same files (local ones by path, size, and their first and last MiB).

Only local files before the position must be unchanged. Others may change or disappear (a file with a bad record has to
be fixed): each epoch still permutes the files with which the run started, and missing ones are skipped. If the
current group has tokens from a changed file, reading restarts at the document in the position, or, if that document's
file has changed, at the start of the file: nothing is lost, and some sequences are repeated.
"""

import os
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, count, pairwise
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import DataLoader, IterableDataset

from sparsellm.data import corpus, tokenizer
from sparsellm.data.errors import DataError
from sparsellm.data.packed import Batch, outlive_stop_signals, permutation, started
from sparsellm.data.sources import NAMED
from sparsellm.system.console import quantity, warn
from sparsellm.system.errors import listed

GROUP_BLOCKS = 1024
FILES_AT_ONCE = 16  # number of files opened at a time to read the held-out sequences
MOST_FILES = 256  # maximum number of files with held-out sequences, because opening a hub file takes about a second
_REMEDY = (
    "prepare the tokens first (`python -m sparsellm.prepare_data` with data.streaming=false): then the end of the text"
    " is held out if there are too few documents"
)


@dataclass(frozen=True)
class TokenStream:
    """One rank's endless stream of training sequences."""

    files: corpus.Files
    ends: dict[str, str]  # result of `corpus.ends(files)`
    text_column: str
    tokenizer_folder: Path
    validation_fraction: float
    sequence_length: int  # T
    share: int  # blocks per step on this rank
    rank: int
    world_size: int
    seed: int
    workers: int
    pin_memory: bool
    skip_bad_records: bool = False
    group_blocks: int = GROUP_BLOCKS
    listed: tuple[str, ...] = ()  # the files with which the run started, if some no longer exist

    def __post_init__(self) -> None:
        if len(self.files) < self.world_size:
            raise DataError(
                f"data.streaming=true gives each rank whole files, but {self.world_size} ranks share"
                f" {quantity(len(self.files), 'file')}: split them into more files, use fewer ranks, or prepare the"
                " data and set data.streaming=false"
            )

    def validation(self, samples: int) -> torch.Tensor:
        """`samples` held-out blocks, or all if there are fewer: int64 [V, T + 1].

        Every file (with more than MOST_FILES files, every second, every third, ...) contributes its first held-out
        documents, in proportion to its size; hub files, whose sizes are unknown, contribute equally. So the blocks are
        the same on every rank and in every run. Raises DataError if there are none, unless validation_fraction is 0.
        """
        length, others = self.sequence_length, list(self.files)
        if self.validation_fraction == 0:
            return torch.empty(0, length + 1, dtype=torch.int64)
        names = others[:: -(-len(others) // MOST_FILES)]
        wanted, sizes = samples * length + 1, list(accumulate(self.files[name] or 1 for name in names))
        ends = [wanted * size // sizes[-1] for size in sizes]
        shares = [end - start for start, end in pairwise([0, *ends])]
        read = partial(self._held_out, self._vocabulary(), Lock())
        with ThreadPoolExecutor(FILES_AT_ONCE) as threads:
            found = list(threads.map(read, names, shares))
        for i, name in enumerate(names):
            if len(found[i]) >= shares[i] and (missing := wanted - sum(map(len, found))) > 0:  # the file has more
                found[i] = read(name, len(found[i]) + missing)
        for name in sorted({*others} - {*names}):
            if (missing := wanted - sum(map(len, found))) > 0:
                found.append(read(name, missing))
        tokens = np.concatenate(found)
        if len(tokens) <= length:
            raise DataError(
                f"the stream has {len(tokens):,} validation tokens, fewer than one block of {length + 1:,}: {_REMEDY}"
            )
        blocks = _blocks(tokens, length)
        chosen = np.linspace(0, len(blocks) - 1, min(samples, len(blocks))).astype(int)  # the first and last included
        return torch.from_numpy(blocks[chosen])

    def _held_out(self, vocabulary: tokenizer.Vocabulary, lock: Lock, name: str, wanted: int) -> np.ndarray:
        """The tokens of a file's first held-out documents: at least `wanted` tokens, or all that the file has."""
        tokens = np.empty(0, np.int64)
        documents = corpus.read([name], self.text_column, skip_bad_records=self.skip_bad_records)
        while len(tokens) < wanted and (document := next(documents, None)) is not None:
            if document.text and corpus.is_held_out(document.text, self.validation_fraction):
                with lock:  # a tokenizer serves one thread at a time
                    (ids,) = tokenizer.encode(vocabulary, [document.text])
                tokens = np.concatenate([tokens, np.array(ids, np.int64)])
        return tokens

    def batches(self, state: dict[str, Any] | None) -> Generator[Batch, None, None]:
        """Yields (int64 [share, T + 1], state after these blocks) forever, from the start or from `state`.

        Raises DataError if `state` was saved with another number of ranks, rank, tokenizer or begin-of-text token, or
        if files have changed since they were read.
        """
        vocabulary = self._vocabulary()
        identity: dict[str, Any] = {
            "world_size": self.world_size, "rank": self.rank,
            "begin_of_text": vocabulary.begin_of_text, "tokenizer": tokenizer.digest(vocabulary)[:16],
        }  # fmt: skip
        stream, position = self, {"epoch": 0, **corpus.START, "skip_tokens": 0, "group": 0, "given": 0}
        if state is not None:
            digests = {digest[:16] for digest in tokenizer.digests(vocabulary)}
            for key, now in identity.items():
                before = state.get(key)
                if before != now and not (key == "tokenizer" and before in digests):
                    raise DataError(_other(key, before, now))
            stream, position = self._since(state)
        identity |= {
            "files": self._files_digest(),
            "ends": {name: self.ends.get(name) for name in stream.names} if self.ends else {},
            "sizes": {name: self.files.get(name) for name in stream.names} if self.ends else {},
        }
        # One worker, because several workers would need separate positions. The worker reads ahead up to one group.
        ahead = max(2, self.group_blocks // self.share)
        worker: dict[str, Any] = {"num_workers": 1, "prefetch_factor": ahead, "worker_init_fn": _one_thread}
        loader = DataLoader(
            _Shares(stream, position),
            batch_size=None,
            pin_memory=self.pin_memory,
            # Without its own generator, a loader draws a seed from the global one, so a resumed run would differ.
            generator=torch.Generator(),
            **(worker if self.workers else {}),
        )
        for batch, after in started(loader):
            yield batch, {**identity, **after}

    @property
    def names(self) -> list[str]:
        """The files that are permuted in each epoch; those that are not in `files` are skipped."""
        return list(self.listed or self.files)

    def _order(self, epoch: int) -> list[str]:
        """This rank's files in `epoch`."""
        names = self.names
        return [names[i] for i in permutation(len(names), self.seed, epoch)[self.rank :: self.world_size]]

    def _since(self, state: dict[str, Any]) -> tuple["TokenStream", dict[str, Any]]:
        """The stream that continues from `state` with the current files, and the position in the stream.

        Raises DataError if files that this rank has read completely have changed.
        """
        ends, sizes = state["ends"], state.get("sizes", {})  # states saved before 0.1.0 lack sizes
        stream = replace(self, listed=tuple(ends))
        added = [name for name in self.ends if ends and name not in ends]
        gone = {name for name in ends if name not in self.files}
        others = {name for name in ends if ends[name] != self.ends.get(name)}
        others |= {name for name in sizes if sizes[name] != self.files.get(name)}
        # For hub files, and for states without sizes, only the digest shows whether files have changed.
        if added or (not others and state["files"] != self._files_digest() and not sizes):
            detail = f" ({listed(added, NAMED)} added later)" if added else ""
            raise DataError(_other("files", state["files"], f"{self._files_digest()}{detail}"))
        if not others:
            return stream, state
        passed_over = {name for name in ends if ends[name] is None}
        here = [name for name in stream._order(state["epoch"]) if name not in passed_over]
        current, orders = here[state["file"]], {epoch: stream._order(epoch) for epoch in range(state["epoch"] + 1)}
        order = orders.pop(state["epoch"])
        place = order.index(current)
        read = {name for names in orders.values() for name in names} | set(order[:place])
        if changed := sorted(name for name in read & others if name not in passed_over):
            raise DataError(
                f"{listed(changed, NAMED)} changed or disappeared after the run had read"
                f" {'it' if len(changed) == 1 else 'them'} completely: restore {'it' if len(changed) == 1 else 'them'},"
                " or start a new run with run.restart=true"
            )
        if self.rank == 0:
            warn(
                f"{listed(sorted(others), NAMED)} changed or disappeared before the run had read them completely: it"
                " continues with the current files"
            )
        position = {**state, "file": sum(name not in gone for name in order[:place])}
        if not others.isdisjoint(stream._of_group(state, order[place:])):
            again = state["skip_tokens"] + state["given"] * self.sequence_length
            position |= {"skip_tokens": 0, "given": 0} | ({"document": 0} if current in others else {})
            warn(
                f"rank {self.rank}: the sequences since document {position['document']} of"
                f" {current if current not in gone else 'the file after it'} are repeated, about {again:,} tokens,"
                " before new ones follow"
            )
        return stream, position

    def _of_group(self, state: dict[str, Any], order: list[str]) -> set[str]:
        """Files from which the group in `state` may have tokens. `order`: the epoch's files from the current one on."""
        epoch, last = state.get("reached", (None, None))  # states saved before 0.1.0 lack this key
        if epoch == state["epoch"]:
            return set(order[: order.index(last) + 1])
        return set(self.names)

    def shares(self, position: dict[str, Any]) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
        """Like `batches`, but without checks, and read in this process."""
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
        # Offset of each chunk in the buffer; negative once the chunk's first tokens are used up.
        starts: deque[tuple[int, dict[str, Any]]] = deque()
        for where, last, tokens in self._epochs(position):
            starts.append((len(buffer) - skip, where))
            buffer = np.concatenate([buffer, tokens[skip:]])
            skip = 0
            while len(buffer) > step:
                while len(starts) > 1 and starts[1][0] <= 0:
                    starts.popleft()
                first, where = starts[0]
                yield (
                    {**where, "skip_tokens": -first, "group": number, "reached": last},
                    _blocks(buffer[: step + 1], self.sequence_length),
                )
                buffer = buffer[step:]
                starts = deque((start - step, where) for start, where in starts)
                number += 1

    def _epochs(self, position: dict[str, Any]) -> Iterator[tuple[dict[str, int], list[Any], np.ndarray]]:
        """This rank's training tokens in chunks: (position of the chunk's first document, epoch and file of its last
        document, tokens)."""
        start = {key: position[key] for key in corpus.START}
        for epoch in count(position["epoch"]):
            files = [name for name in self._order(epoch) if name in self.files]
            total = 0
            for where, last, tokens in self._tokens(files, start):
                total += len(tokens)
                yield {"epoch": epoch, **where}, [epoch, last], tokens
            if files and total == 0 and start == corpus.START:
                raise DataError(
                    f"the files of rank {self.rank} in epoch {epoch} contain no document to train on:"
                    f" remove empty files, lower data.validation_fraction, or {_REMEDY}"
                )
            start = corpus.START

    def _tokens(self, files: list[str], position: corpus.Position) -> Iterator[tuple[corpus.Position, str, np.ndarray]]:
        vocabulary = self._vocabulary()
        documents = corpus.read(files, self.text_column, position, self.skip_bad_records)
        for chunk in corpus.chunks(documents):
            texts = [document.text for document in chunk if document.text]
            texts = [text for text in texts if not corpus.is_held_out(text, self.validation_fraction)]
            tokens = [np.array(ids, np.int64) for ids in tokenizer.encode(vocabulary, texts)]
            yield chunk[0].position(), files[chunk[-1].file], np.concatenate([np.empty(0, np.int64), *tokens])

    def _vocabulary(self) -> tokenizer.Vocabulary:
        return tokenizer.load(str(self.tokenizer_folder), "data.path")

    def _files_digest(self) -> str:
        return xxhash.xxh3_64(repr(sorted(self.files.items())).encode()).hexdigest()


def _other(key: str, before: object, now: object) -> str:
    return (
        f"the data position was saved with {key} {before}, but {key} is now {now}: a stream resumes only with the same"
        " ranks, files and tokenizer; restore them, or start a new run with run.restart=true"
    )


@dataclass
class _Shares(IterableDataset):
    stream: TokenStream
    position: dict[str, Any]

    def __iter__(self) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
        return self.stream.shares(self.position)


def _one_thread(worker: int) -> None:
    outlive_stop_signals(worker)
    # A forked process lacks the tokenizer's threads; one core still tokenizes faster than a GPU trains.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _blocks(tokens: np.ndarray, length: int) -> np.ndarray:
    """All whole blocks of `tokens`, [B, T + 1], one starting every T tokens, as a view."""
    return np.lib.stride_tricks.sliding_window_view(tokens, length + 1)[::length]
