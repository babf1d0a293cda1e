"""scripts/width_law.py: the fit of a law to finished runs."""

import json
import math

import numpy as np
import pytest

from scripts import width_law

E, A, B, D = (2.6, 2.4), 0.2, 0.03, 0.25  # of two data sets, and shared
K, S, T, HALF = (170.0, 210.0), 0.5, 0.2, 1.5e-5


def line(data, width, coefficient, tokens=100_000_000, **overrides):
    """A finished run that lies on the law."""
    n, c, t = width / 1408, coefficient / 1e-5, tokens / 1e8
    nonzeros = K[data] * n**S * t**T / (1 + coefficient / HALF)
    config = {
        "sparsity.l1_coefficient": coefficient, "sparsity.activation": "relu", "training.seed": 0,
        "model.intermediate_size": width, "model.num_layers": 4, "sparsity.dead_after_tokens": 9,
        "optimizer.learning_rate": 2e-3, "optimizer.muon": False,
    }  # fmt: skip
    last = {
        "tokens": tokens, "val_ce": E[data] + A * n**-0.5 + B * c**0.5 - D * math.log(t), "nnz_mean": nonzeros,
        "nnz_per_layer": [nonzeros * 2.5, *[nonzeros / 2] * 3], "dead_per_layer": None, "tokens_per_s": 1.0,
        "evaluation": None,
    }  # fmt: skip
    return {"name": f"{width}_{coefficient}", "config": config | overrides, "rows": [last], "task_rows": {}}


@pytest.fixture
def files(tmp_path):
    """Two data sets; the second has one arm of another token count, and runs that are not fitted."""
    grid = [line(0, width, coefficient) for width in (1408, 5632) for coefficient in (1e-5, 4e-5, 1.6e-4)]
    other = [line(1, 2816, 2e-5), line(1, 5632, 2e-5), line(1, 11264, 8e-5, 300_000_000)]
    ignored = [
        line(1, 1408, 3.2e-4), line(1, 1408, 0.0), line(1, 1408, 4e-5, **{"optimizer.muon": True}),
        line(1, 1408, 4e-5, **{"optimizer.learning_rate": 1e-3}),
        line(1, 1408, 4e-5, **{"sparsity.l1_warmup_tokens": 10}),
    ]  # fmt: skip
    for run in ignored:
        run["rows"][0]["val_ce"] = 9.0
    paths = tmp_path / "grid.jsonl", tmp_path / "other.jsonl"
    for path, lines in zip(paths, (grid, other + ignored), strict=True):
        path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return paths


def test_a_law_that_holds_is_found_and_predicts_arms_that_were_left_out(files):
    found = width_law.result([[path] for path in files], learning_rate=2e-3, most=1.6e-4)
    loss, nonzeros = found["law"]["cross entropy"], found["law"]["nonzeros"]
    assert loss == {"E": pytest.approx(E), "A": pytest.approx(A), "B": pytest.approx(B), "D": pytest.approx(D)}
    near = {"K": pytest.approx(K, rel=0.02), "s": pytest.approx(S, abs=0.01), "t": pytest.approx(T, abs=0.01)}
    assert nonzeros == near | {"C0": pytest.approx(HALF, rel=0.02)}
    assert found["law"]["nonzeros without the first layer"]["K"] == pytest.approx([k / 2 for k in K], rel=0.02)
    assert len(found["runs"]) == 9
    *others, alone = found["runs"]
    assert [run["predicted_ce"] for run in others] == pytest.approx([run["ce"] for run in others])
    assert [run["predicted nonzeros"] for run in others] == pytest.approx([run["nonzeros"] for run in others], rel=0.03)
    assert (alone["tokens"], alone["predicted_ce"], alone["predicted nonzeros"]) == (300_000_000, None, None)
    law = found["errors"]["cross entropy"][width_law.LOSS]
    assert (law["within"], law["of"]) == (8, 8)
    assert law["largest"] < 1e-9 < found["errors"]["cross entropy"]["N^(-1/2), log C"]["largest"]


def test_an_arm_is_left_out_with_its_runs_on_other_data():
    data, width = np.array([0, 0, 0, 1, 1]), np.array([1.0, 2.0, 4.0, 1.0, 2.0])
    coefficient, ce = np.array([1.0, 4.0, 9.0, 1.0, 1.0]), np.array([3.0, 3.0, 3.0, 2.0, 2.0])
    runs = width_law.Runs(data, width, coefficient, width, ce, ce)
    fitted = []

    def fit(form, others, arm):
        fitted.append(sorted(zip(others.width, others.coefficient, strict=True)))
        return width_law.Fit(arm.ce, [])

    assert list(width_law.left_out(fit, "", runs)) == [3, 3, 3, 2, 2]
    assert sorted(map(len, fitted)) == [3, 4, 4, 4]
    assert all((1.0, 1.0) not in others for others in fitted if len(others) == 3)


def test_the_report_is_printed_drawn_and_written(files, tmp_path, capsys):
    figure, saved = tmp_path / "law.png", tmp_path / "law.json"
    arguments = [each for path in files for each in ("--data", str(path))]
    width_law.main([*arguments, "--output", str(figure), "--json", str(saved)])
    assert figure.read_bytes().startswith(b"\x89PNG")
    found = json.loads(saved.read_text())
    assert {"command", "commit", "law", "errors", "runs"} <= found.keys()
    told = capsys.readouterr().out
    assert "8 of 8" in told
    assert told.splitlines()[-1].split()[-1] == "-"  # the run that others do not determine
