"""Chunks of documents to tokens, on all cores and in order.

A short text is encoded here, by the threads of the tokenizer. A longer one is spread over processes, one for each core,
a chunk at a time: what Python does for each document is then done in parallel, too, and reading goes on meanwhile. The
tokens are the same.
"""

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import count
from multiprocessing import get_context
from typing import NamedTuple

import numpy as np

from sparsellm.data import corpus, tokenizer
from sparsellm.data.corpus import Document
from sparsellm.data.errors import DataError, ProcessesFailed
from sparsellm.data.tokenizer import Vocabulary
from sparsellm.system.processes import end_with_parent

PATIENCE = 16_000_000  # characters that are encoded without other processes: a few seconds' work
PARALLELISM = "TOKENIZERS_PARALLELISM"  # what the tokenizers library asks before it uses threads
AHEAD = 2  # chunks that each process has at hand
FEWER = "the same command goes on; started with fewer cores (taskset -c 0-3 ...) it needs less"


class Encoded(NamedTuple):
    """The documents of a chunk that have a text, in their order."""

    tokens: list[np.ndarray]  # of each its ids
    held_out: list[bool]


class Chunk(NamedTuple):
    documents: list[Document]
    encoded: Encoded
    at_rest: bool  # whether to bring what there is to disk: after as many chunks as there are processes, and at the end


def encode(vocabulary: Vocabulary, texts: list[str], fraction: float, dtype: str) -> Encoded:
    """`fraction`: of the documents that are held out. `dtype`: of the ids."""
    ids = [np.array(document, dtype) for document in tokenizer.encode(vocabulary, texts)]
    return Encoded(ids, [corpus.is_held_out(text, fraction) for text in texts])


def encoded(
    chunks: Iterator[list[Document]], vocabulary: Vocabulary, fraction: float, dtype: str
) -> Generator[Chunk, None, None]:
    """`chunks`, each with its tokens. What reading raises is raised after the chunks before. Close it when done."""
    characters = 0
    for documents in chunks:
        texts = _texts(documents)
        yield Chunk(documents, encode(vocabulary, texts, fraction, dtype), True)
        characters += sum(map(len, texts))
        if characters >= PATIENCE and (cores := len(os.sched_getaffinity(0))) > 1:
            yield from _by_processes(chunks, cores, (vocabulary, fraction, dtype))


def _by_processes(
    chunks: Iterator[list[Document]], cores: int, given: tuple[Vocabulary, float, str]
) -> Generator[Chunk, None, None]:
    pending: deque[tuple[list[Document], Future[Encoded]]] = deque()
    end: BaseException | None = None
    # A fork has none of the tokenizer's threads, so it must not ask for them. The library warns of forks, unless told.
    os.environ.setdefault(PARALLELISM, "true")
    try:
        executor = ProcessPoolExecutor(cores, get_context("fork"), _begin, given)
    except OSError as error:  # of a pipe or a semaphore
        raise _not_started(error) from error
    try:
        for number in count(1):
            while end is None and len(pending) < AHEAD * cores:
                try:
                    documents = next(chunks)
                except (StopIteration, DataError) as error:
                    end = error
                else:
                    pending.append((documents, _submit(executor, _texts(documents))))
            if not pending:
                break
            documents, future = pending.popleft()
            yield Chunk(documents, future.result(), number % cores == 0 or not pending)
    except BrokenProcessPool as error:
        raise ProcessesFailed(f"a process that tokenizes has ended, as where memory is short: {FEWER}") from error
    finally:
        executor.shutdown(cancel_futures=True)
    if isinstance(end, DataError):
        raise end


def _submit(executor: ProcessPoolExecutor, texts: list[str]) -> Future[Encoded]:
    """The first call starts the processes."""
    before = set(multiprocessing.active_children())
    try:
        return executor.submit(_encode, texts)
    except BrokenProcessPool:
        raise
    except (OSError, RuntimeError) as error:  # of a fork; of a thread
        # Those that did start would wait for work without end, and this process for them.
        for process in set(multiprocessing.active_children()) - before:
            process.kill()
            process.join()
        executor.shutdown(wait=False, cancel_futures=True)
        raise _not_started(error) from error


def _not_started(error: Exception) -> ProcessesFailed:
    return ProcessesFailed(
        f"the processes that tokenize cannot be started ({error}): {FEWER}, or raise the limits of this shell"
        " (`ulimit -n` for open files, `ulimit -u` for processes)"
    )


def _texts(documents: list[Document]) -> list[str]:
    return [document.text for document in documents if document.text]


# In a process of its own.

_given: tuple[Vocabulary, float, str]


def _begin(*given: object) -> None:
    global _given
    end_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the one that writes ends the others
    os.environ[PARALLELISM] = "false"
    _given = given  # type: ignore[assignment]


def _encode(texts: list[str]) -> Encoded:
    vocabulary, fraction, dtype = _given
    return encode(vocabulary, texts, fraction, dtype)
