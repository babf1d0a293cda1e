"""Tokenizes chunks of documents on all cores, in order.

A small corpus is encoded in this process, by the tokenizer's threads. The chunks of a larger one are distributed over
one process per core, so that Python's work per document runs in parallel and overlaps with reading. The tokens do not
depend on the number of processes.
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

PATIENCE = 16_000_000  # characters encoded before other processes are started: a few seconds of work
PARALLELISM = "TOKENIZERS_PARALLELISM"  # environment variable that lets the tokenizers library use threads
AHEAD = 2  # chunks queued per process
FEWER = "run the same command again to continue; with fewer cores (taskset -c 0-3 ...) it needs less memory"


class Encoded(NamedTuple):
    """A chunk's documents that have text, in order."""

    tokens: list[np.ndarray]  # token ids, one array per document
    held_out: list[bool]


class Chunk(NamedTuple):
    documents: list[Document]
    encoded: Encoded
    at_rest: bool  # whether to sync to disk now: once per as many chunks as there are processes, and at the end


def encode(vocabulary: Vocabulary, texts: list[str], fraction: float, dtype: str) -> Encoded:
    """Encode the documents `texts`. `fraction`: fraction of documents held out. `dtype`: dtype of the token ids."""
    ids = [np.array(document, dtype) for document in tokenizer.encode(vocabulary, texts)]
    return Encoded(ids, [corpus.is_held_out(text, fraction) for text in texts])


def encoded(
    chunks: Iterator[list[Document]], vocabulary: Vocabulary, fraction: float, dtype: str
) -> Generator[Chunk, None, None]:
    """Yields `chunks` with their tokens. If reading raises an exception, the preceding chunks come first. Close the
    iterator when done."""
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
    # A forked process lacks the tokenizer's threads. The library warns about forks unless this variable is set.
    os.environ.setdefault(PARALLELISM, "true")
    try:
        executor = ProcessPoolExecutor(cores, get_context("fork"), _begin, given)
    except OSError as error:  # a pipe or a semaphore cannot be created
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
        raise ProcessesFailed(f"a tokenizing process died, perhaps out of memory: {FEWER}") from error
    finally:
        executor.shutdown(cancel_futures=True)
    if isinstance(end, DataError):
        raise end


def _submit(executor: ProcessPoolExecutor, texts: list[str]) -> Future[Encoded]:
    """Submit a chunk's documents, `texts`. The first call also starts the processes."""
    before = set(multiprocessing.active_children())
    try:
        return executor.submit(_encode, texts)
    except BrokenProcessPool:
        raise
    except (OSError, RuntimeError) as error:  # a failed fork raises OSError, a failed thread RuntimeError
        # Processes that did start would wait for work forever, and this process would wait for them.
        for process in set(multiprocessing.active_children()) - before:
            process.kill()
            process.join()
        executor.shutdown(wait=False, cancel_futures=True)
        raise _not_started(error) from error


def _not_started(error: Exception) -> ProcessesFailed:
    return ProcessesFailed(
        f"tokenizing processes cannot be started ({error}): {FEWER}. Or raise the limits of this shell"
        " (`ulimit -n` for open files, `ulimit -u` for processes)"
    )


def _texts(documents: list[Document]) -> list[str]:
    return [document.text for document in documents if document.text]


# The code below runs in the tokenizing processes.

_given: tuple[Vocabulary, float, str]


def _begin(*given: object) -> None:
    global _given
    end_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent ends the others
    os.environ[PARALLELISM] = "false"
    _given = given  # type: ignore[assignment]


def _encode(texts: list[str]) -> Encoded:
    vocabulary, fraction, dtype = _given
    return encode(vocabulary, texts, fraction, dtype)
