"""A loss that diverges is noticed once; whatever a healthy run's loss does is not."""

import json
import math
import random
from pathlib import Path

import pytest

from sparsellm.runs.divergence import LossRange

RESULTS = Path(__file__).parents[2] / "docs/results"


def healthy(noise=0.02, every=10, steps=2_000, seed=0):
    """Rows of a run whose cross entropy falls from 9 to about 3 nats."""
    generator = random.Random(seed)
    return [
        {"step": step, "ce": 3 + 6 * math.exp(-step / 300) + generator.gauss(0, noise)}
        for step in (1, *range(every, steps + 1, every))
    ]


def with_rise(rows, begin, end, rise):
    """`rows` with a cross entropy that is higher by rise(step) in the steps from `begin` to `end`."""
    return [row | {"ce": row["ce"] + (rise(row["step"]) if begin <= row["step"] <= end else 0)} for row in rows]


@pytest.mark.parametrize("file", ["mini", "mini_width", "0p5b_150m", "0p5b_300m", "dense_to_sparse"])
def test_no_run_of_the_published_results_diverges(file):
    """Among them: warm-ups of the L1 loss, redrawn neurons, starts from a dense model, annealing to ReLU."""
    for line in (RESULTS / f"{file}.jsonl").read_text().splitlines():
        run = json.loads(line)
        assert LossRange(run["rows"]).exits == [], run["name"]


@pytest.mark.parametrize(
    "rows",
    [
        healthy(),
        healthy(every=1, steps=600),
        healthy(noise=0.4),  # batches of few tokens
        with_rise(healthy(), 10, 80, lambda step: 0.8),  # a warm-up that costs cross entropy at first
        with_rise(healthy(), 1_000, 1_100, lambda step: 0.7 * (1_100 - step) / 100),  # redrawn neurons
        with_rise(healthy(), 500, 2_000, lambda step: 0.5 * min(1, (step - 500) / 1_000)),  # an L1 loss that sets in
        with_rise(healthy(), 1_000, 1_030, lambda step: 5.0),  # a spike
        [{"step": row["step"], "ce": 2.5 + 0.3 * math.sin(row["step"])} for row in healthy()],  # from a good model
    ],
)
def test_a_healthy_loss_stays_in_its_range(rows):
    assert LossRange(rows).exits == []


@pytest.mark.parametrize("seed", [0, 9, 12, 17, 25])  # apart from 0, seeds whose first row is low by chance
def test_a_noisy_loss_that_starts_from_a_good_model_stays_in_its_range_even_if_its_first_row_is_low(seed):
    generator = random.Random(seed)
    rows = [{"step": row["step"], "ce": generator.gauss(2.5, 0.5)} for row in healthy(steps=1_000)]
    assert LossRange(rows).exits == []


@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize("height", [2.0, 6.0, 370.0])
def test_a_loss_that_climbs_and_stays_there_is_noticed_once_within_seventy_steps(every, height):
    rows = with_rise(healthy(every=every), 1_000, 2_000, lambda step: height * min(1, (step - 1_000) / 10))
    loss_range, noticed = LossRange(), []
    for row in rows:
        noticed += [row["step"]] if loss_range.add(row["step"], row["ce"]) else []
    assert noticed == loss_range.exits
    assert 1_010 < noticed[0] <= 1_070
    assert len(noticed) == 1
    assert loss_range.outside
    assert " above its best at step 1,0" in str(loss_range) or " above its best at step 9" in str(loss_range)


def test_a_run_that_diverges_from_its_first_step_is_noticed():
    assert LossRange({"step": step, "ce": 8.3 + 0.9 * step} for step in (1, *range(10, 101, 10))).exits == [40]


def test_a_loss_that_returns_and_climbs_again_is_noticed_twice():
    rows = with_rise(healthy(), 1_000, 1_200, lambda step: 4.0)
    again = LossRange(with_rise(rows, 1_600, 1_800, lambda step: 4.0))
    assert len(again.exits) == 2
    assert not again.outside


def test_steps_that_are_not_finite_or_not_yet_relu_do_not_count():
    rows = healthy()
    known = LossRange(rows)
    for row in rows[50:120:2]:
        row["ce"] = None
    assert LossRange(rows).exits == []
    annealed = [row | {"ce": 9.0, "relu_share": 0.5} if row["step"] > 1_000 else row for row in healthy()]
    assert LossRange(annealed).exits == []
    assert LossRange({k: row[k] for k in ("step", "ce")} for row in annealed).exits != []
    assert known.best.ce == pytest.approx(3.0, abs=0.05)


def test_the_range_of_a_resumed_run_is_that_of_the_uninterrupted_one():
    rows = with_rise(healthy(), 1_000, 1_400, lambda step: 4.0)
    whole = LossRange(rows)
    for cut in (1, 60, 103, 150):
        resumed = LossRange(rows[:cut])
        for row in rows[cut:]:
            resumed.add(row["step"], row["ce"])
        assert vars(resumed) == vars(whole)
