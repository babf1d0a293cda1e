"""Preparation with several processes gives the same bytes as with one, and loses nothing on failures."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from whole_config import prepare

from sparsellm.config import Config
from sparsellm.data import DataError, corpus, encoding
from sparsellm.data.errors import ProcessesFailed
from sparsellm.data.manifest import read

NAMES = [f"{split}.{kind}" for split in ("train", "validation") for kind in ("tokens", "documents")]


@pytest.fixture
def three_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "CHUNK_CHARACTERS", 2_000)
    monkeypatch.setattr(encoding, "PATIENCE", 4_000)  # two chunks
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})


def content(config: Config) -> dict[str, bytes]:
    return {name: (config.data.folder / name).read_bytes() for name in NAMES}


@pytest.mark.usefixtures("three_processes")
def test_several_processes_give_the_same_bytes(
    make_config: Callable[..., Config], parquet: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = os.getpid()
    by: list[bool] = []
    chunks, encoded = [], encoding.encoded

    def seen(*arguments: object) -> object:
        for chunk in encoded(*arguments):
            chunks.append(chunk)
            yield chunk

    monkeypatch.setattr(encoding, "encoded", seen)
    monkeypatch.setattr(encoding, "encode", lambda *a, e=encoding.encode: (by.append(os.getpid() == ours), e(*a))[1])
    several = make_config(parquet, path=str(tmp_path / "several"), max_tokens=12_000)
    prepare(several)
    assert by == [True, True]  # the others were encoded elsewhere
    # The first two, then one in three; the limit was reached in another one, whose tokens are on disk too.
    assert len(chunks) > 6
    assert not chunks[-1].at_rest
    assert [chunk.at_rest for chunk in chunks[:6]] == [True, True, False, False, True, False]
    monkeypatch.setattr(encoding, "PATIENCE", 10**9)
    one = make_config(parquet, path=str(tmp_path / "one"), max_tokens=12_000)
    assert prepare(one) == read(several.data.folder)
    assert content(several) == content(one)


@pytest.mark.usefixtures("three_processes")
def test_a_file_that_cannot_be_read_loses_no_document_before_it(
    make_config: Callable[..., Config], parquet: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, reached = Path(parquet[3]).read_bytes(), []
    Path(parquet[3]).write_bytes(whole[: len(whole) // 2])
    for name in ("several", "one"):
        config = make_config(parquet, path=str(tmp_path / name))
        with pytest.raises(DataError, match=r"part-3\.parquet cannot be read"):
            prepare(config)
        reached.append(read(config.data.folder, "progress.json").position)
        monkeypatch.setattr(encoding, "PATIENCE", 10**9)
    assert reached[0] == reached[1]
    assert reached[0]["file"] == 2
    assert not multiprocessing.active_children()


@pytest.mark.usefixtures("three_processes")
def test_a_process_that_ends_is_said_and_the_same_command_goes_on(
    make_config: Callable[..., Config], parquet: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, ours, encode = make_config(parquet), os.getpid(), encoding.encode

    def dying(*arguments: object) -> encoding.Encoded:
        if os.getpid() != ours:
            os.kill(os.getpid(), signal.SIGKILL)
        return encode(*arguments)

    monkeypatch.setattr(encoding, "encode", dying)
    with pytest.raises(DataError, match="a tokenizing process died"):
        prepare(config)
    assert read(config.data.folder, "progress.json").train.documents > 0
    monkeypatch.setattr(encoding, "encode", encode)
    prepare(config)
    whole = make_config(parquet, path=str(tmp_path / "whole"))
    prepare(whole)
    assert content(config) == content(whole)


@pytest.mark.usefixtures("three_processes")
@pytest.mark.parametrize("failing", [1, 3])
def test_processes_that_cannot_start_are_said_and_leave_none_behind(
    make_config: Callable[..., Config], parquet: list[str], monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    forks, fork = [], os.fork

    def fails() -> int:
        forks.append(None)
        if len(forks) == failing:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return fork()

    monkeypatch.setattr(os, "fork", fails)
    with pytest.raises(ProcessesFailed, match=r"cannot be started .*Resource temporarily unavailable.* `ulimit -u`"):
        prepare(make_config(parquet))
    assert not multiprocessing.active_children()


@pytest.mark.usefixtures("three_processes")
def test_the_processes_end_with_the_one_that_is_killed(
    make_config: Callable[..., Config], parquet: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(parquet)
    monkeypatch.setattr(encoding, "_encode", forever)
    monkeypatch.setenv(encoding.PARALLELISM, "false")  # the victim is forked from a process with a tokenizer's threads
    victim = multiprocessing.get_context("fork").Process(target=prepare, args=(config,))
    victim.start()
    deadline = time.monotonic() + 30
    while len(children := psutil.Process(victim.pid).children()) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(children) == 3
    os.kill(victim.pid, signal.SIGKILL)
    victim.join()
    assert psutil.wait_procs(children, 10)[1] == []


def forever(_: list[str]) -> None:
    time.sleep(600)
