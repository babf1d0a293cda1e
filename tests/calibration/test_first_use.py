"""A layer without a calibration: measured once where it is first used, by one process, whatever cache and memory allow.

No GPU: times are invented, as in test_calibration.py.
"""

import contextlib
import threading

import numpy as np
import pytest
import torch
from invented_machine import CPU, K, Machine, N, a_gpu, counts, layer_of

from sparsellm import calibration
from sparsellm.calibration import first_use, measure, store
from sparsellm.calibration.layer import Layer
from sparsellm.ops import backend
from sparsellm.system import locks

LAYER = (K, 2 * N)  # not the one that the package's constants are of


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
    calibration.measure_missing([LAYER, LAYER], CPU)
    timed = len(machine.asked)
    said = capsys.readouterr().err
    assert said.count("this GPU had not been measured for layers of 2048 x 11264: measured in ") == 1
    assert f" s, kept in {store.file()}" in said
    costs = backend.measured[LAYER]
    calibration.measure_missing([LAYER], CPU)
    backend.measured.clear()  # as in another process
    calibration.measure_missing([LAYER], CPU)
    assert backend.measured[LAYER] == costs
    assert len(machine.asked) == timed > 0
    assert capsys.readouterr().err == ""


def test_a_layer_that_the_packages_constants_are_of_or_that_was_decided_is_not_measured(machine):
    backend.measured[LAYER] = None
    calibration.measure_missing([(K, N), LAYER], CPU)
    assert machine.asked == []
    assert backend.measured == {LAYER: None}


def test_a_process_that_waited_takes_what_the_other_one_kept(machine, capsys):
    calibration.measure_missing([LAYER], CPU)
    costs, timed = backend.measured.pop(LAYER), len(machine.asked)
    path = store.file()
    path.unlink()
    with path.with_suffix(".measuring").open("w") as held:
        locks.take(held)
        second = threading.Thread(target=calibration.measure_missing, args=([LAYER], CPU))
        second.start()
        second.join(0.5)
        assert second.is_alive()
        assert "another process is measuring this GPU model; waiting for it" in capsys.readouterr().err
        store.keep(costs, None)
    second.join(10)
    assert backend.measured[LAYER] == costs
    assert len(machine.asked) == timed


def test_a_process_that_measures_for_too_long_is_not_waited_for(machine, monkeypatch, capsys):
    monkeypatch.setattr(store, "PATIENCE", 0.2)
    store.file().parent.mkdir(parents=True)
    with store.file().with_suffix(".measuring").open("w") as held:
        locks.take(held)
        calibration.measure_missing([LAYER], CPU)
    assert machine.asked == []
    assert backend.measured[LAYER] is None
    said = capsys.readouterr().err
    assert "choose their engines: another process is still measuring; `sparsellm calibrate model=2048x11264`" in said


def test_where_the_cache_cannot_be_written_it_is_measured_all_the_same(machine, monkeypatch, tmp_path, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setenv("SPARSELLM_CACHE_DIR", str(tmp_path / "file"))
    calibration.measure_missing([LAYER], CPU)
    timed = len(machine.asked)
    assert backend.measured[LAYER] is not None
    assert capsys.readouterr().err.count("not kept, for the cache cannot be written") == 1
    calibration.measure_missing([LAYER], CPU)
    assert len(machine.asked) == timed


def test_without_memory_it_says_so_once_and_raises_nothing(machine, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (1 << 30, 1 << 40))
    calibration.measure_missing([LAYER], CPU)
    calibration.measure_missing([LAYER], CPU)
    assert machine.asked == []
    said = capsys.readouterr().err
    assert (
        said.count("layers of 2048 x 11264 are not measured, so an H200's constants choose their engines: cpu has") == 1
    )
    assert said.endswith("`sparsellm calibrate model=2048x11264` measures this GPU\n")

    def fails(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (1 << 40, 1 << 40))
    monkeypatch.setattr(measure, "gpu_milliseconds", fails)
    backend.measured.clear()
    calibration.measure_missing([LAYER], CPU)
    assert backend.measured[LAYER] is None
    assert "CUDA out of memory" in capsys.readouterr().err


def with_room_for(monkeypatch, tokens):
    layer = 2 * LAYER[0] * LAYER[1] * 25
    free = first_use.SPARE + layer + tokens * (16 * LAYER[0] + 12 * LAYER[1])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (free, 1 << 40))


def test_with_less_memory_fewer_tokens_are_timed(machine, monkeypatch, capsys):
    with_room_for(monkeypatch, 5000)
    calibration.measure_missing([LAYER], CPU)
    assert max(call.tokens for call in machine.asked) == max(backend.measured[LAYER].forward) == 4096
    said = capsys.readouterr().err
    assert "s, up to 4,096 tokens, as far as its free memory goes (`sparsellm calibrate model=2048x11264`" in said


def test_what_was_measured_with_little_memory_is_measured_again_once_there_is_more(machine, monkeypatch, capsys):
    def reached(tokens):
        """By a process of its own, with room for so many tokens: (tokens, whether it has measured)."""
        backend.measured.clear()
        with_room_for(monkeypatch, tokens)
        before = len(machine.asked)
        calibration.measure_missing([LAYER], CPU)
        return max(backend.measured[LAYER].forward), len(machine.asked) > before

    assert reached(5000) == (4096, True)
    assert reached(7000) == reached(3000) == reached(5000) == (4096, False)  # on a GPU that is simply small
    capsys.readouterr()
    assert reached(9000) == (8192, True)
    said = capsys.readouterr().err
    assert "this GPU had been measured up to 4,096 tokens only for layers of 2048 x 11264: measured in " in said
    assert reached(9000) == (8192, False)
    machine.memory = 5000  # as if another process had taken the rest: what is there stays, and it is asked once
    assert reached(20_000) == (8192, True)
    assert reached(20_000) == (8192, False)
    machine.memory = 1000
    assert reached(70_000) == (8192, True)
    assert reached(70_000) == (8192, False)
    assert "are not measured" not in capsys.readouterr().err
    store.keep(backend.measured[LAYER], None)  # by `sparsellm calibrate`, which asks for no limit
    assert reached(1 << 30) == (8192, False)


def test_within_a_process_what_was_taken_first_stays(machine, monkeypatch):
    with_room_for(monkeypatch, 5000)
    calibration.measure_missing([LAYER], CPU)
    costs, timed = backend.measured[LAYER], len(machine.asked)
    with_room_for(monkeypatch, 70_000)
    calibration.measure_missing([LAYER], CPU)
    assert backend.measured[LAYER] is costs
    assert len(machine.asked) == timed


def test_random_states_stay_as_they_are(machine, monkeypatch):
    made = []

    def real(width, neurons, tokens, device, dtype):
        made.append(Layer(width, neurons, 64, device, dtype))
        made[-1].counts = counts
        return made[-1]

    monkeypatch.setattr(first_use, "Layer", real)
    torch.manual_seed(1)
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()
    calibration.measure_missing([(64, 128)], CPU)
    assert made
    assert backend.measured[64, 128] is not None
    assert torch.equal(torch.get_rng_state(), before)
    assert np.array_equal(np.random.get_state()[1], numpy_before)
