import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import DataLoader
from whole_config import prepare

from sparsellm.config import Config
from sparsellm.data import DataError
from sparsellm.data import packed as packed_tokens
from sparsellm.data.packed import PackedTokens, _items, permutation, shuffle, started


@pytest.fixture
def packed(make_config: Callable[..., Config], parquet: list[str]) -> PackedTokens:
    """Blocks of 32 + 1 tokens; about 13 steps of 64 make an epoch."""
    config = make_config(parquet)
    return PackedTokens(
        folder=Path(config.data.path),
        manifest=prepare(config),
        sequence_length=32,
        batch_size=64,
        rank=0,
        world_size=1,
        seed=7,
        workers=0,
        pin_memory=False,
    )


def all_blocks(packed: PackedTokens) -> torch.Tensor:
    tokens = torch.from_numpy(np.fromfile(packed.folder / "train.tokens", "<u2").astype(np.int64))
    return tokens.unfold(0, 33, 32)


def as_set(blocks: torch.Tensor) -> set[tuple[int, ...]]:
    return {tuple(block) for block in blocks.tolist()}


def steps(packed: PackedTokens, count: int, state: dict | None = None) -> torch.Tensor:
    return torch.stack([batch for batch, _ in islice(packed.batches(state), count)])


def test_blocks_overlap_by_one_token_and_cover_the_stream(packed: PackedTokens) -> None:
    blocks = packed._read("train", np.arange(packed.manifest.train.blocks))
    assert blocks.dtype == torch.int64
    assert torch.equal(blocks, all_blocks(packed))
    assert torch.equal(blocks[1:, 0], blocks[:-1, -1])


def test_every_epoch_is_a_permutation_of_its_own(packed: PackedTokens) -> None:
    size = packed.manifest.train.blocks
    samples = steps(packed, 3 * size // 64 + 1).flatten(0, 1)
    epochs = [samples[i * size : (i + 1) * size] for i in range(3)]
    for epoch in epochs:
        assert len(epoch) == size
        assert sorted(epoch.tolist()) == sorted(all_blocks(packed).tolist())
    assert not torch.equal(epochs[0], epochs[1])
    assert not torch.equal(epochs[0], all_blocks(packed))
    assert not torch.equal(steps(replace(packed, seed=8), 1), steps(packed, 1))


def test_the_order_does_not_depend_on_the_number_of_ranks(packed: PackedTokens) -> None:
    expected = steps(packed, 20)
    assert expected.shape == (20, 64, 33)
    for world_size in (2, 4):
        shares = [steps(replace(packed, rank=r, world_size=world_size), 20) for r in range(world_size)]
        assert torch.equal(torch.cat(shares, dim=1), expected)


def test_a_batch_may_span_several_epochs(packed: PackedTokens) -> None:
    size = packed.manifest.train.blocks
    (batch,) = steps(replace(packed, batch_size=2 * size + 5), 1)
    assert as_set(batch[:size]) == as_set(batch[size : 2 * size]) == as_set(all_blocks(packed))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resume_gives_what_followed(packed: PackedTokens, workers: int) -> None:
    packed = replace(packed, workers=workers)
    expected = steps(replace(packed, workers=0), 30)
    handed_out = list(islice(packed.batches(None), 9))
    state = handed_out[-1][1]
    assert state["samples"] == 9 * 64  # workers have read ahead
    assert torch.equal(torch.stack([batch for batch, _ in handed_out]), expected[:9])
    assert torch.equal(steps(packed, 21, state), expected[9:])
    # Also with another number of ranks.
    shares = [steps(replace(packed, rank=r, world_size=2), 21, state) for r in range(2)]
    assert torch.equal(torch.cat(shares, dim=1), expected[9:])


def test_a_start_draws_nothing_from_the_global_generator(packed: PackedTokens) -> None:
    before = torch.get_rng_state()
    steps(replace(packed, workers=1), 1)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_position_in_other_tokens_is_refused(packed: PackedTokens) -> None:
    with pytest.raises(DataError, match="trained on tokens other than"):
        next(packed.batches({"samples": 64, "tokens": "0123456789abcdef"}))


def test_validation_is_the_held_out_blocks_and_no_training_block(packed: PackedTokens) -> None:
    validation = packed.validation(10)
    assert validation.shape == (10, 33)
    assert validation.dtype == torch.int64
    assert len(packed.validation(10**6)) == packed.manifest.validation.blocks < 10**6
    whole = packed.validation(10**6)
    assert torch.equal(whole[torch.arange(10) * len(whole) // 10], validation)  # not only from the first files
    assert as_set(validation).isdisjoint(as_set(all_blocks(packed)))


def test_permutations_never_change_between_versions() -> None:
    assert permutation(8, 0, 0).tolist() == [6, 3, 5, 0, 7, 2, 1, 4]
    assert permutation(8, 2**40, 1).tolist() != permutation(8, 2**40, 2).tolist()


def test_an_epochs_order_is_computed_once_for_all_workers_and_is_that_of_earlier_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier versions shuffled 8 bytes a block in each worker: `np.random.RandomState.permutation` of the same key."""

    def counted(order: np.ndarray, *key: int) -> None:
        with (tmp_path / "computed").open("a") as file:
            file.write(f"{key} {order.itemsize}\n")
        shuffle(order, *key)

    monkeypatch.setattr(packed_tokens, "shuffle", counted)
    order, size, fork = packed_tokens._Order(1_000, 7), 1_000, multiprocessing.get_context("fork")
    for epoch in range(3):
        parts = np.split(np.arange(epoch * size, (epoch + 1) * size), 2)
        workers = [
            fork.Process(target=lambda path, part: np.save(path, order.blocks(part)), args=(tmp_path / f"{i}", part))
            for i, part in enumerate(parts)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        found = np.concatenate([np.load(tmp_path / f"{i}.npy") for i in range(2)])
        generator = np.random.RandomState(np.random.MT19937(np.random.SeedSequence((7, epoch))))
        assert np.array_equal(found, generator.permutation(size))
    assert sorted((tmp_path / "computed").read_text().splitlines()) == [f"(7, {epoch}) 4" for epoch in range(3)]


LEFT_OPEN = """
from torch.utils.data import DataLoader
from sparsellm.data.packed import outlive_stop_signals, started

kept = started(DataLoader(range(100), batch_size=None, num_workers=2, worker_init_fn=outlive_stop_signals))
print(next(kept), flush=True)
raise RuntimeError("in the middle")
"""


@pytest.mark.slow
def test_a_process_that_fails_with_its_loaders_open_exits() -> None:
    done = subprocess.run([sys.executable, "-c", LEFT_OPEN], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "0\n")
    assert "in the middle" in done.stderr


KILLED = """
import multiprocessing, os, signal, time
from torch.utils.data import DataLoader
from sparsellm.data.packed import outlive_stop_signals, started

kept = started(DataLoader(range(100), batch_size=None, num_workers=2, worker_init_fn=outlive_stop_signals))
next(kept)
print(*(worker.pid for worker in multiprocessing.active_children()), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the death of a parent is a signal on Linux only")
@pytest.mark.slow
def test_a_loaders_processes_end_at_once_with_a_trainer_that_is_killed() -> None:
    killed = subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True)
    workers = [int(pid) for pid in killed.stdout.readline().split()]
    assert len(workers) == 2
    killed.wait(30)
    time.sleep(1)  # by default, workers check for their parent every 5 s
    assert [pid for pid in workers if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"] == []


@pytest.mark.parametrize("failing", [1, 3], ids=["the first", "the third"])
def test_workers_that_cannot_start_are_an_error_and_leave_none_behind(
    packed: PackedTokens, failing: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    forks, fork = [], os.fork

    def fails() -> int:
        forks.append(None)
        if len(forks) == failing:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return fork()

    monkeypatch.setattr(os, "fork", fails)
    with pytest.raises(DataError, match=r"a data worker cannot be started .* lower runtime.data_workers \(4 now\)"):
        next(replace(packed, workers=4).batches(None))
    assert not multiprocessing.active_children()
    assert "Traceback" not in capfd.readouterr().err


def test_a_worker_is_named_though_its_connection_fails_before_it_has_ended() -> None:
    worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    worker.start()

    class Iterator:
        _workers = (worker,)

        def __next__(self) -> None:
            threading.Timer(0.2, worker.kill).start()
            raise ConnectionResetError(104, "Connection reset by peer")

    with pytest.raises(DataError, match="was killed, perhaps by the system for lack of memory"):
        next(_items(Iterator(), DataLoader([0])))


@pytest.mark.slow
def test_a_worker_that_is_killed_while_others_start_was_killed(
    packed: PackedTokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    forks, fork = [], os.fork

    def kills() -> int:
        if forks:
            os.kill(forks[0], signal.SIGKILL)
            time.sleep(0.5)  # torch notices while the next one starts
        if (child := fork()) != 0:
            forks.append(child)
        return child

    monkeypatch.setattr(os, "fork", kills)
    with pytest.raises(DataError, match=r"a data worker .*was killed, perhaps by the system for lack of memory"):
        list(zip(range(100), replace(packed, workers=2).batches(None), strict=False))
    assert not multiprocessing.active_children()


def test_workers_without_a_file_left_to_open_are_an_error(packed: PackedTokens) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
    taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(highest)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(taken) + 4, limits[1]))
    try:
        with pytest.raises(DataError, match=r"data workers? .*[Tt]oo many open files.*`ulimit -n`"):
            deque(replace(packed, workers=4).batches(None), maxlen=0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for descriptor in taken:
            os.close(descriptor)
    assert not [process for process in multiprocessing.active_children() if not process.exitcode]


@pytest.mark.slow
def test_a_worker_that_is_killed_is_an_error_only_where_its_batches_are_missing(packed: PackedTokens) -> None:
    before = signal.getsignal(signal.SIGCHLD)
    batches = replace(packed, workers=1).batches(None)
    next(batches)
    (worker,) = multiprocessing.active_children()
    os.kill(worker.pid, signal.SIGKILL)
    worker.join(30)
    assert signal.getsignal(signal.SIGCHLD) == before  # torch's handler would raise here, in the middle of any code
    killed = rf"a data worker \(process {worker.pid}\) was killed, .* lower runtime.data_workers"
    with pytest.raises(DataError, match=killed):
        deque(batches, maxlen=0)


class Unreadable(torch.utils.data.Dataset):
    def __getitem__(self, _: int) -> None:
        raise DataError("part-3.jsonl: row 7 is no JSON: mend it")


def test_what_a_worker_says_comes_without_its_traceback() -> None:
    items = started(DataLoader(Unreadable(), batch_size=None, sampler=[0], num_workers=1))
    with pytest.raises(DataError) as raised:
        next(items)
    assert str(raised.value) == "part-3.jsonl: row 7 is no JSON: mend it"
