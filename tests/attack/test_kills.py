"""Every command, alone: killed at random instants and system calls and repeated, it ends as if undisturbed."""

import pytest
from attack.kills import attack, copy

pytestmark = pytest.mark.slow


def test_prepare_data(tiny, tmp_path):
    attack("prepare_data", ["-m", "sparsellm.prepare_data", *tiny, "data.path=tokens"], lambda _: None, tmp_path, 4)


def test_train(prepared, tmp_path):
    attack("train", ["-m", "sparsellm.train", *prepared, "run.name=r"], lambda _: None, tmp_path, 4)


def test_evaluate(trained, scored, tmp_path):
    command = ["-m", "sparsellm.evaluate", "checkpoint=runs/r", *scored]
    attack("evaluate", command, lambda folder: copy(trained, folder), tmp_path, 4)


def test_analyze(trained, tmp_path):
    command = ["-m", "sparsellm.analyze", "checkpoint=runs/r", "recordings=recorded"]
    attack("analyze", command, lambda folder: copy(trained, folder), tmp_path, 3)
