"""Lifelines between ranks that are threads of one process, where the end of a process is only noted."""

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from sparsellm import lifeline
from sparsellm.lifeline import KEY, Lifeline, RanksMissing


@pytest.fixture
def ended(monkeypatch) -> Iterator[dict[int, str]]:
    """What each rank has ended for."""
    found, made, begin = {}, [], Lifeline.__init__

    def kept(self, *arguments):
        made.append(self)
        begin(self, *arguments)

    monkeypatch.setattr(Lifeline, "__init__", kept)
    monkeypatch.setattr(Lifeline, "_end", lambda self: found.setdefault(self.rank, self._lost))
    monkeypatch.setattr(lifeline, "GRACE", 0.3)
    yield found
    for each in made:
        each._left.set()  # what is closed later ends nothing


def joined(store: dist.Store, ranks: list[int], world_size: int) -> list[Lifeline]:
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(lambda rank: Lifeline(store, "localhost", rank, world_size), ranks))


def wait_for(ended: dict[int, str], count: int) -> None:
    deadline = time.monotonic() + 10
    while len(ended) < count and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.1)  # in which no other one may end


def test_ranks_end_with_one_that_fails_and_hear_why(ended):
    lines = joined(dist.HashStore(), [0, 1, 2], 3)
    assert len({line.start for line in lines}) == 1
    lines[1].leave(ValueError("no\nroom"))
    wait_for(ended, 2)
    assert ended == dict.fromkeys((0, 2), f"{lines[1].me} failed: ValueError: no room")


def test_rank_0_is_heard_of_too(ended):
    lines = joined(dist.HashStore(), [0, 1, 2], 3)
    lines[0]._left.set()  # it is no more
    for connection in lines[0]._others.values():
        connection.shutdown(2)
    wait_for(ended, 2)
    assert ended[1] == ended[2] == f"{lines[0].me} is gone: it was killed, or its machine does not answer"


def test_who_leaves_in_order_ends_nobody_and_is_ended_by_nobody(ended):
    lines = joined(dist.HashStore(), [0, 1, 2], 3)
    lines[2].leave()
    time.sleep(0.6)
    lines[1].leave(ValueError())
    assert lines[0]._heard.wait(10)
    lines[0].leave()  # in its own words, within the time for that
    time.sleep(0.6)
    assert ended == {}


def test_an_end_explains_what_broke(ended, monkeypatch):
    monkeypatch.setattr(lifeline, "GRACE", 60)
    lines = joined(dist.HashStore(), [0, 1], 2)
    threading.Timer(0.2, lambda: lines[0].leave(MemoryError())).start()
    lines[1].explain()
    assert ended == {1: f"{lines[0].me} failed: MemoryError:"}


def test_the_connection_ends_with_its_process_though_a_child_goes_on(ended):
    store = dist.HashStore()
    reading, writing = os.pipe()
    pool = ThreadPoolExecutor(1)
    first = pool.submit(Lifeline, store, "localhost", 0, 2)
    store.wait([KEY])
    port_and_name = store.get(KEY)
    parent = os.fork()
    if parent == 0:
        mine = dist.HashStore()
        mine.set(KEY, port_and_name)
        Lifeline(mine, "localhost", 1, 2)
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        os.write(writing, b"%d" % child)
        os._exit(9)
    child = int(os.read(reading, 10))
    first.result()
    wait_for(ended, 1)
    os.kill(child, 9)
    os.waitpid(parent, 0)
    assert f"process {parent}) is gone" in ended[0]


def test_a_rank_finds_this_start_and_not_the_one_before(ended):
    store = dist.HashStore()
    joined(store, [0], 1)  # a start that is over: nobody listens at its port
    with ThreadPoolExecutor(2) as pool:
        second = pool.submit(Lifeline, store, "localhost", 1, 2)
        time.sleep(0.3)
        first = pool.submit(Lifeline, store, "localhost", 0, 2)
        assert first.result().start == second.result().start


def test_ranks_that_do_not_come_are_named(ended, monkeypatch):
    monkeypatch.setattr(lifeline, "ARRIVAL", 0.5)
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        first, third = (pool.submit(Lifeline, store, "localhost", rank, 4) for rank in (0, 2))
        with pytest.raises(RanksMissing, match=r"2 of 4 ranks have not come in 0.5 s: \[1, 3\]"):
            first.result()
        third.result()
    with pytest.raises(RanksMissing, match=r"rank 1 .* has not reached rank 0 on localhost"):
        Lifeline(store, "localhost", 1, 2)
