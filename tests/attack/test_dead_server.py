"""A Weights & Biases server that fails at any row and in any way: a record holds every row, and nothing waits long."""

import os
import random
import time

import pytest
import wandb
import wandb_server
from attack.seed import SEED, one
from small_run import small_config

from sparsellm.runs import wandb_record
from sparsellm.runs.wandb_record import WandbRun

ROUNDS = 2


@pytest.fixture
def _key(monkeypatch):
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    wandb.teardown()
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setattr(wandb_record, "SETTINGS", wandb_record.SETTINGS | {"init_timeout": 2, "finish_timeout": 2})
    yield
    wandb.teardown()


@pytest.mark.parametrize("number", range(ROUNDS))
@pytest.mark.usefixtures("_key")
@one("dead servers")
def test_a_server_that_fails_at_a_random_row(tmp_path, monkeypatch, number):
    draw = random.Random(f"{SEED} {number}")
    failures = [wandb_server.SILENT, wandb_server.RUBBISH, 401, 403, 404, 429, 500, 502, 503]
    rows, fails_at = draw.randrange(1, 60), draw.randrange(-1, 60)
    with wandb_server.serving() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        if fails_at < 0:
            server.answer = draw.choice(failures)
        began = time.monotonic()
        run = WandbRun(small_config("logging.wandb=online"), tmp_path)
        for step in range(1, rows + 1):
            if step == fails_at:
                server.answer = draw.choice(failures)
            run.write({"step": step, "loss": 1000.5 + step})
        run.close(0)
        assert time.monotonic() - began < 60
    contents = b"".join(path.read_bytes() for path in (tmp_path / "wandb").glob("*run-*/*.wandb"))
    assert [step for step in range(1, rows + 1) if str(1000.5 + step).encode() not in contents] == []
