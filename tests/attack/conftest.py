"""A tiny corpus, a run on it, and rows of tasks."""

import json
import random
from pathlib import Path

import pytest
import whole_config
from attack import kills
from evaluation.small_rows import sentence, write_rows

from sparsellm.config import from_overrides


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The overrides of a run of 12 steps with checkpoints at 4, 8 and 12, without data.path."""
    folder, draw = tmp_path_factory.mktemp("tiny"), random.Random(0)
    lines = (json.dumps({"text": f"{i}: {sentence(draw, 60)}"}) + "\n" for i in range(400))
    (folder / "text.jsonl").write_text("".join(lines))
    return [
        "experiment=smoke", "data=files", f"data.files=[{folder}/text.jsonl]", "data.tokenizer_vocab_size=400",
        "data.validation_fraction=0.2", "data.max_tokens=4000",
        "model.vocab_size=400", "model.hidden_size=32", "model.intermediate_size=48", "model.num_layers=2",
        "model.num_heads=2", "model.context_length=192", "training.steps=12", "training.batch_size=4",
        "training.sequence_length=32", "optimizer.warmup_steps=1", "logging=disabled", "logging.every=3",
        "logging.validation_every=6", "run.checkpoint_every=4", "runtime.device=cpu",
    ]  # fmt: skip


@pytest.fixture(scope="session")
def prepared(tiny: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The overrides of `tiny` with its data.path, which is prepared."""
    overrides = [*tiny, f"data.path={tmp_path_factory.mktemp('prepared')}/tokens"]
    whole_config.prepare(from_overrides(overrides))
    return overrides


@pytest.fixture(scope="session")
def trained(prepared: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs/r, fully trained. Tests that change it make a copy."""
    folder = tmp_path_factory.mktemp("trained") / "here"
    kills.undisturbed(["-m", "sparsellm.train", *prepared, "run.name=r"], lambda _: None, folder)
    return folder


@pytest.fixture(scope="session")
def scored(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """data_dir=, tasks= and device= of an evaluation."""
    folder = tmp_path_factory.mktemp("rows")
    for task in ("piqa", "winogrande"):
        write_rows(folder, task, "validation")
    return [f"data_dir={folder}", "tasks=[piqa,winogrande]", "device=cpu"]
