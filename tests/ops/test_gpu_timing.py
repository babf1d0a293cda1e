"""The rounds in which candidates are timed, on a simulated GPU."""

import torch

from sparsellm.ops import gpu_timing


def test_rounds_that_the_host_was_too_slow_for_are_repeated(monkeypatch):
    hosts = iter([0.0005, 0.0005, *[0.1] * 3, *[0.0005] * 5])  # for two first calls, then for the rounds
    seen = []

    def events(runs):
        took = next(hosts)
        for run in runs:
            run()
        return [5.0 if took > 0.01 else 1.0 + len(runs) * i for i, _ in enumerate(runs)], took

    monkeypatch.setattr(torch.cuda, "_sleep", lambda _: None)
    monkeypatch.setattr(gpu_timing, "_events", events)
    found = gpu_timing.alternating_ms({"a": seen.append, "b": lambda _: None}, budget_ms=4, least=5, most=5)
    assert found == {"a": 1.0, "b": 3.0}
    assert seen == [0, 1, 0, 0, 0, 0, 1, 2, 3, 4]  # untimed, the estimate, the first round four times


def test_a_candidate_that_waits_for_the_gpu_is_repeated_no_more_than_it_has_rounds(monkeypatch):
    monkeypatch.setattr(torch.cuda, "_sleep", lambda _: None)
    monkeypatch.setattr(gpu_timing, "_events", lambda runs: ([run() or 2.0 for run in runs], 0.1))
    seen = []
    assert gpu_timing.alternating_ms({"waits": seen.append}, least=3, most=3) == {"waits": 2.0}
    assert len(seen) == 2 + 3 + 3
