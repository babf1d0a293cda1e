"""Commands with others under them, torchrun and sweep: one process of them is killed, or all, and they are repeated."""

import pytest
from attack.kills import TORCHRUN, attack, copy

pytestmark = pytest.mark.slow


def test_train_under_torchrun(prepared, tmp_path):
    command = [*TORCHRUN, "-m", "sparsellm.train", *prepared, "run.name=r"]
    attack("train under torchrun", command, lambda _: None, tmp_path, 2)


def test_evaluate_under_torchrun(trained, scored, tmp_path):
    command = [*TORCHRUN, "-m", "sparsellm.evaluate", "checkpoint=runs/r", *scored]
    attack("evaluate under torchrun", command, lambda folder: copy(trained, folder), tmp_path, 2)


def test_sweep(prepared, scored, tmp_path):
    command = ["-m", "sparsellm.sweep", *prepared, "sparsity.l1_coefficient=0,1e-2", "training.steps=6", "sweep.name=s",
               *(f"evaluate.{option}" for option in scored)]  # fmt: skip
    attack("sweep", command, lambda _: None, tmp_path, 1)
