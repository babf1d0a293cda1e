"""scripts/width_grid.py: what is predicted from a grid of runs."""

import json

import numpy as np
import pytest

from scripts import width_grid


def lines(prices):
    """Runs whose losses and nonzeros follow the law, with `prices` {coefficient: (nats, factor)}."""
    return [
        {
            "name": f"{n}_{c}", "task_rows": {},
            "config": {
                "sparsity.l1_coefficient": c, "sparsity.activation": "relu", "training.seed": 0,
                "model.intermediate_size": n, "model.num_layers": 2, "sparsity.dead_after_tokens": 1,
                "sparsity.reinit_dead_after_tokens": None, "sparsity.reinit_blend": 1.0,
                "sparsity.l1_warmup_tokens": 0, "optimizer.learning_rate": 2e-3, "optimizer.muon": False,
            },
            "rows": [{
                "val_ce": 3 - 0.1 * i + nats, "nnz_mean": 30 * (i + 1) / factor, "tokens_per_s": 1.0,
                "evaluation": None, "nnz_per_layer": [50.0, 10 * (i + 1) / factor],
                "dead_per_layer": [0, 0], "tokens": 100,
            }],
        }
        for i, n in enumerate((1024, 2048, 4096)) for c, (nats, factor) in prices.items()
    ]  # fmt: skip


PRICES = {2e-5: (0.0, 1.0), 4e-5: (0.01, 1.5), 8e-5: (0.03, 3.0)}


def test_a_grid_that_follows_the_law_is_predicted_from_its_other_runs():
    found = width_grid.grid(lines(PRICES), [*PRICES])
    assert found.widths == [1024, 2048, 4096]
    assert found.ce[1, 2] == pytest.approx(2.93)
    for predicted, measured in zip(found.predicted(), found[2:], strict=True):
        np.testing.assert_allclose(predicted, measured, rtol=1e-9)


def test_a_run_is_predicted_without_itself():
    values = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    wrong = values.copy()
    wrong[1, 0] += 10
    assert width_grid.left_out(wrong)[1, 0] == pytest.approx(values[1, 0])


def test_a_grid_that_lacks_a_run_or_has_it_twice_and_a_missing_file_are_refused(tmp_path, capsys):
    runs, file = lines(PRICES), tmp_path / "runs.jsonl"
    for wrong, says in ((runs[:-1], r"(4096, '8e-5')"), ([*runs, runs[0]], "the same arm")):
        file.write_text("".join(json.dumps(run) + "\n" for run in wrong))
        with pytest.raises(SystemExit):
            width_grid.main([str(file), "--coefficients", *map(str, PRICES)])
        assert says in capsys.readouterr().err
    with pytest.raises(SystemExit):
        width_grid.main([str(tmp_path / "absent.jsonl"), "--coefficients", *map(str, PRICES)])
    assert "No such file" in capsys.readouterr().err
    other = [run | {"config": run["config"] | {"optimizer.muon": True}} for run in runs]
    assert (width_grid.grid([*runs, *other], [*PRICES]).ce == width_grid.grid(runs, [*PRICES]).ce).all()
