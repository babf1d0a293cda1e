"""Lifelines between ranks that are threads of one process; ending the process is only recorded."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from sparsellm.distributed import lifeline
from sparsellm.distributed.lifeline import KEY, Lifeline, RanksMissing


@pytest.fixture
def ended(monkeypatch) -> Iterator[dict[int, str]]:
    """The reason for which each rank ended."""
    found, made, begin = {}, [], Lifeline.__init__

    def kept(self, *arguments):
        made.append(self)
        begin(self, *arguments)

    monkeypatch.setattr(Lifeline, "__init__", kept)
    monkeypatch.setattr(Lifeline, "_end", lambda self: found.setdefault(self.rank, self._lost))
    monkeypatch.setattr(lifeline, "GRACE", 0.3)
    monkeypatch.setattr(lifeline, "BEAT", 0.05)
    yield found
    for each in made:
        each._left.set()  # closing it later ends nothing


def joined(store: dist.Store, ranks: list[int], world_size: int) -> list[Lifeline]:
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(lambda rank: Lifeline(store, "localhost", rank, world_size), ranks))


@pytest.fixture
def impatient(monkeypatch) -> list[str]:
    """Messages about ranks that others wait for, with time limits below a second."""
    said = []
    for name, seconds in (("SILENT", 0.3), ("SILENT_LIMIT", 0.8), ("BEHIND", 0.3), ("STEP_PATIENCE", 0.8)):
        monkeypatch.setattr(lifeline, name, seconds)
    monkeypatch.setattr(lifeline, "write_now", lambda text: said.append(text.removesuffix("\n")))
    return said


def begin(step: int, lines: list[Lifeline]) -> None:
    for line in lines:
        line.reached(step)


def stop(line: Lifeline) -> None:
    """As with SIGSTOP: the rank falls silent."""
    line._tell = lambda _: None


def until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def wait_for(ended: dict[int, str], count: int) -> None:
    deadline = time.monotonic() + 10
    while len(ended) < count and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.1)  # no other rank may end meanwhile


def test_ranks_end_with_one_that_fails_and_hear_why(ended):
    lines = joined(dist.HashStore(), [0, 1, 2], 3)
    assert len({line.launch for line in lines}) == 1
    lines[1].leave(ValueError("no\nroom"))
    wait_for(ended, 2)
    assert ended == dict.fromkeys((0, 2), f"{lines[1].me} failed: ValueError: no room")


def test_rank_0_is_heard_of_too(ended):
    lines = joined(dist.HashStore(), [0, 1, 2], 3)
    lines[0]._left.set()  # it is gone
    for connection in lines[0]._others.values():
        connection.shutdown(2)
    wait_for(ended, 2)
    assert ended[1] == ended[2] == f"{lines[0].me} died: it was killed, or its machine does not answer"


def test_who_leaves_in_order_ends_nobody_and_is_ended_by_nobody(ended):
    lines = joined(dist.HashStore(), [0, 1, 2], 3)
    lines[2].leave()
    time.sleep(0.6)
    lines[1].leave(ValueError())
    assert lines[0]._heard.wait(10)
    lines[0].leave()  # with its own error, within GRACE
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
    assert f"process {parent}) died" in ended[0]


def test_a_rank_that_says_nothing_is_named_and_then_given_up(ended, impatient):
    lines = joined(dist.HashStore(), [0, 1, 2], 3)
    stop(lines[2])
    wait_for(ended, 3)
    assert impatient[0].startswith(f"sparsellm: {lines[2].me} has not answered for ")
    assert "it is stopped (`kill -CONT` resumes it), or its machine hangs. All ranks will end if" in impatient[0]
    assert len(impatient) == 1
    assert {why.partition(" for ")[0] for why in ended.values()} == {f"{lines[2].me} has not answered"}
    assert ended.keys() >= {0, 1}


def test_rank_1_names_rank_0(ended, impatient):
    lines = joined(dist.HashStore(), [0, 1, 2], 3)
    stop(lines[0])
    wait_for(ended, 2)
    assert len(impatient) == 1
    assert impatient[0].startswith(f"sparsellm: {lines[0].me} has not answered")
    assert ended.keys() >= {1, 2}


def test_a_rank_that_is_behind_is_named_and_said_to_go_on(ended, impatient):
    lines = joined(dist.HashStore(), [0, 1, 2], 3)
    for step in (1, 2):
        begin(step, lines)
    begin(3, [lines[0], lines[2]])
    until(lambda: len(impatient) == 1)
    begin(3, [lines[1]])
    until(lambda: len(impatient) == 2)
    assert impatient[0].startswith(f"sparsellm: {lines[1].me} has kept the other ranks waiting for ")
    assert "in or after step 2 (py-spy on its host shows what it is doing). All ranks will end if" in impatient[0]
    assert impatient[1] == f"sparsellm: {lines[1].me} continues"
    assert ended == {}
    begin(4, [lines[1], lines[2]])  # rank 0 waits for itself no longer than for others
    wait_for(ended, 3)
    assert all(why.startswith(f"{lines[0].me} has kept the other ranks waiting") for why in ended.values())


@pytest.mark.slow
def test_others_wait_long_for_the_first_step_and_for_a_rank_that_works_alone(ended, impatient):
    lines = joined(dist.HashStore(), [0, 1], 2)
    begin(1, lines)  # it may compile
    begin(2, [lines[0]])
    until(lambda: len(impatient) == 1)
    time.sleep(1)
    assert ended == {}
    begin(2, [lines[1]])
    with lines[0].alone():
        lines[1].reached()  # an exchange that rank 0 reaches after its work
        lines[1].hurry()
        until(lambda: len(impatient) == 3)
        time.sleep(1)
        assert ended == {}
    assert impatient[-1].startswith(f"sparsellm: {lines[0].me} has kept the other ranks waiting")
    wait_for(ended, 2)
    assert len(ended) == 2


def test_a_rank_that_was_asked_to_stop_waits_less(ended, impatient, monkeypatch):
    monkeypatch.setattr(lifeline, "SILENT_LIMIT", 60)
    lines = joined(dist.HashStore(), [0, 1, 2], 3)
    stop(lines[2])
    until(lambda: len(impatient) == 1)
    assert ended == {}
    lines[1].hurry()
    wait_for(ended, 3)
    assert ended.keys() >= {0, 1}


def test_a_rank_finds_this_start_and_not_the_one_before(ended):
    store = dist.HashStore()
    joined(store, [0], 1)  # an earlier start: nothing listens on its port
    with ThreadPoolExecutor(2) as pool:
        second = pool.submit(Lifeline, store, "localhost", 1, 2)
        time.sleep(0.3)
        first = pool.submit(Lifeline, store, "localhost", 0, 2)
        assert first.result().launch == second.result().launch


def test_ranks_that_do_not_come_are_named(ended, monkeypatch):
    monkeypatch.setattr(lifeline, "ARRIVAL", 0.5)
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        first, third = (pool.submit(Lifeline, store, "localhost", rank, 4) for rank in (0, 2))
        with pytest.raises(RanksMissing, match=r"2 of 4 ranks have not joined within 0.5 s: \[1, 3\]"):
            first.result()
        third.result()
    with pytest.raises(RanksMissing, match=r"rank 1 .* has not reached rank 0 on localhost"):
        Lifeline(store, "localhost", 1, 2)
