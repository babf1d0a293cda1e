"""A layer without a calibration: measured once where it is first used, by one process, whatever cache and memory allow.

No GPU: times are invented, as in test_calibration.py.
"""

import contextlib
import dataclasses
import threading

import numpy as np
import pytest
import torch
from invented_machine import CPU, K, Machine, N, a_gpu, counts, layer_of

from sparsellm.policy import first_use, measure, store
from sparsellm.policy.layer import Layer
from sparsellm.system import locks

LAYER = (K, 2 * N)  # not the one that the package's constants are of


def measured(*layers):
    """What a policy of these layers goes by, measured where it is missing."""
    return first_use.policy_for(layers, CPU, layers).measured


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """An invented machine, which counts what was timed on it."""
    a_gpu(monkeypatch, tmp_path / "cache")
    invented = Machine()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (1 << 40, 1 << 40))
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(first_use, "Layer", lambda width, neurons, *_: layer_of(width, neurons))
    monkeypatch.setattr(measure, "gpu_milliseconds", lambda _, calls: invented.milliseconds(calls))
    return invented


def test_a_layer_is_measured_once_and_kept(machine, capsys):
    found = measured(LAYER, LAYER)
    timed = len(machine.asked)
    said = capsys.readouterr().err
    assert said.count("this GPU had not been measured for layers of 2048 x 11264: measured in ") == 1
    assert f" s, cached in {store.file()}" in said
    assert measured(LAYER) == found
    assert set(found) == {LAYER}
    assert len(machine.asked) == timed > 0
    assert capsys.readouterr().err == ""


def test_only_a_layer_that_is_asked_for_and_that_the_packages_constants_are_not_of_is_measured(machine):
    assert measured((K, N)) == {}
    assert first_use.policy_for([LAYER], CPU).measured == {}
    assert machine.asked == []


def test_a_process_that_waited_takes_what_the_other_one_kept(machine, capsys):
    found, timed, others = measured(LAYER), len(machine.asked), []
    path = store.file()
    path.unlink()
    with path.with_suffix(".measuring").open("w") as held:
        locks.take(held)
        second = threading.Thread(target=lambda: others.append(measured(LAYER)))
        second.start()
        second.join(0.5)
        assert second.is_alive()
        assert "another process is measuring this GPU model; waiting for it" in capsys.readouterr().err
        store.keep(found[LAYER], None)
    second.join(10)
    assert others == [found]
    assert len(machine.asked) == timed


def test_a_process_that_measures_for_too_long_is_not_waited_for(machine, monkeypatch, capsys):
    monkeypatch.setattr(store, "PATIENCE", 0.2)
    store.file().parent.mkdir(parents=True)
    with store.file().with_suffix(".measuring").open("w") as held:
        locks.take(held)
        assert measured(LAYER) == {}
    assert machine.asked == []
    said = capsys.readouterr().err
    assert "choose their engines: another process is still measuring; `sparsellm calibrate model=2048x11264`" in said


def test_where_the_cache_cannot_be_written_it_is_measured_all_the_same(machine, monkeypatch, tmp_path, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setenv("SPARSELLM_CACHE_DIR", str(tmp_path / "file"))
    assert set(measured(LAYER)) == {LAYER}
    assert capsys.readouterr().err.count("not cached, because the cache cannot be written") == 1


def test_without_memory_it_says_so_once_and_raises_nothing(machine, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (1 << 30, 1 << 40))
    assert measured(LAYER) == measured(LAYER) == {}
    assert machine.asked == []
    said = capsys.readouterr().err
    assert said.count("layers of 2048 x 11264 were not measured, so an H200's constants choose their engines: cpu") == 1
    assert said.endswith("`sparsellm calibrate model=2048x11264` measures this GPU\n")

    def fails(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (1 << 40, 1 << 40))
    monkeypatch.setattr(measure, "gpu_milliseconds", fails)
    assert measured(LAYER) == {}
    assert "CUDA out of memory" in capsys.readouterr().err


def with_room_for(monkeypatch, tokens):
    layer = 2 * LAYER[0] * LAYER[1] * 25
    free = first_use.SPARE + layer + tokens * (16 * LAYER[0] + 12 * LAYER[1])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (free, 1 << 40))


def test_with_less_memory_fewer_tokens_are_timed(machine, monkeypatch, capsys):
    with_room_for(monkeypatch, 5000)
    found = measured(LAYER)
    assert max(call.tokens for call in machine.asked) == max(found[LAYER].forward) == 4096
    said = capsys.readouterr().err
    assert "s, up to 4,096 tokens, the most that fit into free memory (`sparsellm calibrate model=2048x11264`" in said


def test_what_was_measured_with_little_memory_is_measured_again_once_there_is_more(machine, monkeypatch, capsys):
    def reached(tokens):
        """With room for so many tokens: (tokens, whether it has measured)."""
        with_room_for(monkeypatch, tokens)
        before = len(machine.asked)
        return max(measured(LAYER)[LAYER].forward), len(machine.asked) > before

    assert reached(5000) == (4096, True)
    assert reached(7000) == reached(3000) == reached(5000) == (4096, False)  # on a GPU that is simply small
    capsys.readouterr()
    assert reached(9000) == (8192, True)
    said = capsys.readouterr().err
    assert "this GPU had been measured only up to 4,096 tokens for layers of 2048 x 11264: measured in " in said
    assert reached(9000) == (8192, False)
    machine.memory = 5000  # as if another process had taken the rest: what is there stays, and it is asked once
    assert reached(20_000) == (8192, True)
    assert reached(20_000) == (8192, False)
    machine.memory = 1000
    assert reached(70_000) == (8192, True)
    assert reached(70_000) == (8192, False)
    assert "are not measured" not in capsys.readouterr().err
    store.keep(dataclasses.replace(measured(LAYER)[LAYER], tried=None), None)  # `sparsellm calibrate` asks for no limit
    assert reached(1 << 30) == (8192, False)


def test_random_states_stay_as_they_are(machine, monkeypatch):
    made = []

    def real(width, neurons, tokens, device, dtype):
        made.append(Layer(width, neurons, 64, device, dtype))
        made[-1].counts = counts
        return made[-1]

    monkeypatch.setattr(first_use, "Layer", real)
    torch.manual_seed(1)
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()
    assert set(measured((64, 128))) == {(64, 128)}
    assert made
    assert torch.equal(torch.get_rng_state(), before)
    assert np.array_equal(np.random.get_state()[1], numpy_before)
