"""Energy per token between logged steps."""

import math

from small_run import small_trainer

from sparsellm.system import energy


def test_energy_per_token_is_that_since_the_last_logged_step(monkeypatch):
    readings = iter([1_000, 1_600, None, 5_000, 6_000])
    monkeypatch.setattr(energy, "millijoules", lambda _device: next(readings))
    meter = energy.EnergyMeter(None)
    found = [meter.mj_per_token(tokens) for tokens in (100, 400, 500, 600, 1_100)]
    assert found[1] == 2.0
    assert found[4] == 2.0
    assert [math.isnan(value) for value in found] == [True, False, True, True, False]


def test_a_row_has_the_energy_of_the_steps_since_the_previous_row(monkeypatch, tmp_path):
    readings = iter([1_000, 2_280])
    monkeypatch.setattr(energy, "millijoules", lambda _device: next(readings))
    with small_trainer(tmp_path, "runtime.compile=false") as trainer:
        batches = trainer.data.batches(None)
        reports = [trainer._reduce(*trainer.advance(batches), stop=False).read() for _ in range(2)]
    assert math.isnan(reports[0].mj_per_token)
    assert reports[1].mj_per_token == 1_280 / 128
