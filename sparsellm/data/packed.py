"""Prepared tokens as blocks, and the order in which they are used for training.

Sample n is entry n mod B of epoch n div B, and each epoch is its own permutation of the B blocks. Step s trains on
samples [s batch, (s + 1) batch), of which rank r takes the r-th contiguous share: the order depends neither on the
number of ranks nor on how a rank splits its share into micro-batches. The position is therefore one number, `samples`.
"""

import atexit
import mmap
import multiprocessing.connection
import signal
import sys
import threading
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from sparsellm.data.errors import DataError
from sparsellm.data.manifest import Manifest, blocks
from sparsellm.system.processes import end_with_parent

Batch = tuple[torch.Tensor, dict[str, Any]]  # sequences, and the data position after these sequences


def permutation(size: int, *key: int) -> np.ndarray:
    """A permutation of range(size), int64, that depends only on `key`."""
    order = np.arange(size)
    shuffle(order, *key)
    return order


def shuffle(order: np.ndarray, *key: int) -> None:
    """Shuffle the integers `order` in place, depending only on `key`. RandomState is the only generator whose stream
    NumPy promises never to change, so a run can resume after an upgrade."""
    np.random.RandomState(np.random.MT19937(np.random.SeedSequence(key))).shuffle(order)


def outlive_stop_signals(_worker: int) -> None:
    """Make a loader process ignore stop signals that are sent to the whole process group: on such a signal, the trainer
    saves a checkpoint, and still needs its workers.

    A worker ends when the iterator over batches is closed, when the trainer exits (`started`), and immediately if the
    trainer is killed, so that inherited resources do not outlive the trainer."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    end_with_parent(signal.SIGKILL)


def started(loader: DataLoader) -> Iterator[Any]:
    """The loader's items. Its worker processes end when this process exits, even if an exception left the loader open.

    By default, torch and multiprocessing would send SIGTERM, which workers ignore, and wait for the workers. Raises
    DataError if a worker cannot be started, or dies.
    """
    atexit.unregister(_end_workers)
    atexit.register(_end_workers)  # registered after torch's handler, so that it is called first
    reports = signal.getsignal(signal.SIGCHLD)
    try:
        iterator = iter(loader)
    except (OSError, RuntimeError) as error:  # OSError: no fork, pipe or semaphore; RuntimeError: no thread
        _end_workers()
        say_dropped, sys.unraisablehook = sys.unraisablehook, lambda _: None
        error.__traceback__ = None  # frees the partly constructed loader, whose finalizer fails
        sys.unraisablehook = say_dropped
        if "killed by signal" in str(error):  # torch's message for a worker that dies while the others start
            raise DataError(_ended("a data worker", KILLED, loader.num_workers)) from error
        raise DataError(
            f"a data worker cannot be started ({error}): lower runtime.data_workers ({loader.num_workers} now)"
            " or raise the limits of this shell (`ulimit -n` for open files, `ulimit -u` for processes) or the job's"
            " memory"
        ) from error
    if threading.current_thread() is threading.main_thread():
        # torch would report a dead worker from a signal handler, in the middle of a step or a save.
        signal.signal(signal.SIGCHLD, reports)
    return _items(iterator, loader)


def _items(iterator: Iterator[Any], loader: DataLoader) -> Iterator[Any]:
    # torch's list of workers, because multiprocessing no longer lists a worker that has died.
    workers: list[BaseProcess] = getattr(iterator, "_workers", [])
    while True:
        try:
            item = next(iterator)
        except StopIteration:
            return
        except DataError as error:  # from a worker: torch prepends its traceback to the message
            name = f"{DataError.__module__}.{DataError.__name__}: "
            raise DataError(str(error).rpartition(name)[2].strip()) from error
        except (RuntimeError, OSError, EOFError) as error:
            if "Too many open files" in str(error):
                raise DataError(
                    "the data workers failed (too many open files): raise the limit of open files (`ulimit -n`), or"
                    f" lower runtime.data_workers ({loader.num_workers} now), and run the same command again to resume"
                ) from error
            # The connection to a killed worker fails before the worker counts as ended, so wait until it does.
            dead = multiprocessing.connection.wait([worker.sentinel for worker in workers], timeout=2)
            if ended := [worker for worker in workers if worker.sentinel in dead]:
                ended[0].join(2)  # the exit code is set a moment after the sentinel
                raise DataError(_why_ended(ended[0], loader.num_workers)) from error
            raise
        yield item


KILLED = "was killed, perhaps by the system for lack of memory (see `dmesg`)"


def _why_ended(worker: BaseProcess, workers: int) -> str:
    if worker.exitcode == -signal.SIGKILL:
        how = KILLED
    elif (code := worker.exitcode or 0) < 0:
        how = f"died from {signal.Signals(-code).name}"
    else:
        how = f"ended with exit code {code}"
    return _ended(f"a data worker (process {worker.pid})", how, workers)


def _ended(which: str, how: str, workers: int) -> str:
    remedy = f"give the job more memory, or lower runtime.data_workers ({workers} now)"
    return f"{which} {how}: {remedy}, and run the same command again to resume"


def _end_workers() -> None:
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()
            process.join()


class _Order:
    """The order of `size` blocks in each epoch. One even and one odd epoch are stored in memory shared with all
    processes forked later, so that each epoch's order is computed by only one worker and stored only once."""

    def __init__(self, size: int, seed: int) -> None:
        self.size, self.seed = size, seed
        self.turn = multiprocessing.get_context("fork").Lock()
        dtype = np.dtype(np.uint32 if size <= 2**32 else np.int64)
        shared = mmap.mmap(-1, 16 + 2 * size * dtype.itemsize)  # uses memory only for written pages
        self.epochs = np.frombuffer(shared, np.int64, 2)
        self.orders = np.frombuffer(shared, dtype, 2 * size, offset=16).reshape(2, size)
        self.epochs[:] = -1

    def blocks(self, samples: np.ndarray) -> np.ndarray:
        """The block of each sample; int64 [S]."""
        epochs, entries = np.divmod(samples, self.size)
        chosen = np.empty(len(samples), np.int64)
        with self.turn:
            for epoch in np.unique(epochs).tolist():
                here = epochs == epoch
                chosen[here] = self._order(epoch)[entries[here]]
        return chosen

    def _order(self, epoch: int) -> np.ndarray:
        slot = epoch % 2
        if self.epochs[slot] != epoch:
            self.epochs[slot] = -1  # invalid until complete: this process may be killed
            self.orders[slot] = np.arange(self.size, dtype=self.orders.dtype)
            shuffle(self.orders[slot], self.seed, epoch)
            self.epochs[slot] = epoch
        return self.orders[slot]


@dataclass(frozen=True, kw_only=True)
class Samples(Dataset):
    """A run's samples, numbered from 0; each sample is one sequence. `dataset[n]` is this rank's share of the step that
    starts with sample n."""

    batch_size: int  # over all ranks
    rank: int
    world_size: int
    workers: int
    pin_memory: bool

    @property
    def identity(self) -> Any:
        """JSON-serializable identity of these samples. A position is valid only for samples with the same identity."""
        raise NotImplementedError

    @property
    def place(self) -> str:
        """The folder or folders of the samples, for messages."""
        raise NotImplementedError

    def sequences(self, samples: np.ndarray) -> torch.Tensor:
        """The sequences, int64 [S, T + 1], for sample numbers int64 [S]."""
        raise NotImplementedError

    def batches(self, state: dict[str, Any] | None) -> Generator[Batch, None, None]:
        """Yields (int64 [batch / ranks, T + 1], state after the batch) forever, from the start or from `state`.

        Raises DataError if `state` belongs to other tokens.
        """
        tokens = self.identity
        state = state or {"samples": 0, "tokens": tokens}
        if state.get("tokens") != tokens:
            raise DataError(
                f"this run was trained on tokens other than those in {self.place} (xxh3 {state.get('tokens')}, now"
                f" {tokens}): restore the original tokens, or start a new run with run.restart=true"
            )
        samples = state["samples"]
        loader = DataLoader(
            self,
            batch_size=None,  # an item is already a whole share
            sampler=count(samples, self.batch_size),
            num_workers=self.workers,
            worker_init_fn=outlive_stop_signals,
            pin_memory=self.pin_memory,
            # Without its own generator, a loader draws a seed from the global one, so a resumed run would differ.
            generator=torch.Generator(),
        )
        # Count batches here, where they are consumed, not where workers read ahead.
        for batch in started(loader):
            samples += self.batch_size
            yield batch, {"samples": samples, "tokens": tokens}

    def __getitem__(self, first_sample: int) -> torch.Tensor:
        share = self.batch_size // self.world_size
        return self.sequences(first_sample + self.rank * share + np.arange(share))


@dataclass(frozen=True)
class PackedTokens(Samples):
    """The blocks in a finished folder of prepared tokens."""

    folder: Path
    manifest: Manifest
    sequence_length: int  # T
    seed: int

    def __post_init__(self) -> None:
        _ = self._order  # created before workers are forked, so that they share one copy

    @property
    def identity(self) -> str:
        return self.manifest.files["train.tokens"]["xxh3"]

    @property
    def place(self) -> str:
        return str(self.folder)

    def validation(self, samples: int) -> torch.Tensor:
        """`samples` held-out blocks, or all if there are fewer: int64 [V, T + 1]. The blocks are evenly spaced, because
        the first ones come from the first files only."""
        found = blocks(self.manifest.validation.tokens, self.sequence_length)
        count = min(samples, found)
        if count == 0:  # nothing is held out
            return torch.empty(0, self.sequence_length + 1, dtype=torch.int64)
        return self._read("validation", np.arange(count) * found // count)

    def sequences(self, samples: np.ndarray) -> torch.Tensor:
        return self._read("train", self._order.blocks(samples))

    @cached_property
    def _order(self) -> _Order:
        return _Order(blocks(self.manifest.train.tokens, self.sequence_length), self.seed)

    def _read(self, split: str, chosen: np.ndarray) -> torch.Tensor:
        # Map the file for each batch: this takes microseconds, and workers inherit no open file.
        tokens = np.memmap(self.folder / f"{split}.tokens", self.manifest.token_dtype, mode="r")
        length = self.sequence_length
        rows = [tokens[start : start + length + 1] for start in (chosen * length).tolist()]
        return torch.from_numpy(np.stack(rows).astype(np.int64))
