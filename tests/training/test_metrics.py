"""Rows, their file, and Weights & Biases when it cannot be reached."""

import json

import pytest
import wandb
from small_run import small_config

from sparsellm.training.metrics import METRICS, MetricsFile, WandbRun, mfu, read


def test_mfu_is_the_designs():
    """DESIGN §6: 152k tokens/s of the 0.5B model are 50% of an H200."""
    parameters = 49_152 * 2_048 + 8 * (4 * 2_048**2 + 3 * 2_048 * 5_632)
    assert mfu(152_000, parameters, 8, 2_048, 2_048, 989e12) == pytest.approx(0.50, abs=0.005)
    assert mfu(152_000, parameters, 8, 2_048, 2_048, 8 * 989e12) == pytest.approx(0.50 / 8, abs=0.001)


def test_the_file_begins_anew_after_the_last_step(tmp_path):
    path = tmp_path / METRICS
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in (1, 10, 20)) + '{"step": 3')
    file = MetricsFile(path, last_step=10)
    file.write({"step": 11})
    file.sync()
    assert read(path) == [{"step": 1}, {"step": 10}, {"step": 11}]
    with pytest.raises(ValueError, match="not JSON compliant"):
        file.write({"loss": float("nan")})


def test_runs_of_a_sweep_are_a_group(tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(wandb, "init", lambda **values: given.append(values) or Record())
    for group in ("null", "smoke-1a2b3c4d"):
        config = small_config("logging=offline", f"logging.wandb_group={group}")
        WandbRun(config, config.logging, tmp_path)
    assert [values["group"] for values in given] == [None, "smoke-1a2b3c4d"]


class Record:
    def __init__(self):
        self.logged = []

    def log(self, values, step):
        self.logged.append((step, values))

    def finish(self, exit_code):
        self.exit_code = exit_code


def test_an_unreachable_server_means_offline_and_says_so(tmp_path, monkeypatch, capsys):
    started = []

    def init(**settings):
        started.append(settings)
        if settings["mode"] == "online":
            raise wandb.errors.CommError("no route to host")
        return Record()

    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    config = small_config("logging.wandb=online", "run.name=x")
    for _ in range(2):  # a start and a resume
        run = WandbRun(config, config.logging, tmp_path)
        run.write(
            {"step": 7, "loss": 1.5, "mfu": None, "nnz_per_layer": [2.0, 3.0], "plan_per_layer": ["dense", "tile"]}
        )
        run.close(0)
    assert "offline, for online failed: no route to host" in capsys.readouterr().err
    assert [settings["mode"] for settings in started] == ["online", "offline"] * 2
    assert len({settings["id"] for settings in started}) == 1
    assert run._run.logged == [
        (7, {"step": 7, "loss": 1.5, "nnz_per_layer/00": 2.0, "nnz_per_layer/01": 3.0, "tile_layers": 1})
    ]
