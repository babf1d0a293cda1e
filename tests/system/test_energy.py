"""Energy per token between logged steps."""

import math

from sparsellm.system import energy


def test_energy_per_token_is_that_since_the_last_logged_step(monkeypatch):
    readings = iter([1_000, 1_600, None, 5_000, 6_000])
    monkeypatch.setattr(energy, "millijoules", lambda _device: next(readings))
    meter = energy.EnergyMeter(None)
    found = [meter.mj_per_token(tokens) for tokens in (100, 400, 500, 600, 1_100)]
    assert found[1] == 2.0
    assert found[4] == 2.0
    assert [math.isnan(value) for value in found] == [True, False, True, True, False]
