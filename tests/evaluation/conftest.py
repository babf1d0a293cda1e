"""A tiny trained run, and a few local rows of each task."""

import json
import random
import shutil
from pathlib import Path

import pytest
import whole_config
from evaluation.small_rows import sentence, write_rows

from sparsellm.config import from_overrides
from sparsellm.data import tokenizer
from sparsellm.distributed.groups import process_group
from sparsellm.runs.folder import open_folder
from sparsellm.training.loop import Trainer

VOCABULARY = 400
LAST = "checkpoints/step_00000004"  # of the trained run


@pytest.fixture(scope="session")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All seven tasks; arc_challenge has the split that is scored, arc_easy and openbookqa only validation."""
    folder = tmp_path_factory.mktemp("rows")
    for task in ("arc_easy", "arc_challenge", "hellaswag", "openbookqa", "piqa", "winogrande", "commonsense_qa"):
        write_rows(folder, task, "validation")
    write_rows(folder, "arc_challenge", "test", seed=1)
    return folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The overrides of a run of 4 steps with checkpoints at 2 and 4, whose data are prepared."""
    folder = tmp_path_factory.mktemp("tiny")
    draw = random.Random(0)
    documents = [f"{i}: {sentence(draw, 60)}" for i in range(400)]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    tokenizer.save(tokenizer.train(documents, VOCABULARY), folder / "tokenizer")
    overrides = [
        "data=files", f"data.files=[{folder}/text.jsonl]", f"data.tokenizer={folder}/tokenizer",
        f"data.path={folder}/tokens", "data.validation_fraction=0.2", "data.max_tokens=4000",
        f"model.vocab_size={VOCABULARY}", "model.hidden_size=32", "model.intermediate_size=48",
        "model.num_layers=2", "model.num_heads=2",
        "model.context_length=192", "model.init_std=0.3", "training.steps=4", "training.batch_size=4",
        "training.sequence_length=32", "optimizer.warmup_steps=1", "logging=disabled", "logging.validation_every=4",
        "logging.validation_samples=6", "run.checkpoint_every=2", "run.name=tiny",
        "runtime.device=cpu", "runtime.micro_batch_size=auto", "runtime.precision=bfloat16",
    ]  # fmt: skip
    whole_config.prepare(from_overrides(overrides))
    return overrides


@pytest.fixture(scope="session")
def trained(tiny: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of `tiny`. Tests that change it make a copy."""
    config = from_overrides([*tiny, f"run.root={tmp_path_factory.mktemp('runs')}"])
    with process_group("cpu") as ranks:
        opened = whole_config.open_data(config, ranks)
        with open_folder(config, ranks) as (config, run):
            assert Trainer(config, ranks, opened, run).fit() == 0
    return run


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of `trained`."""
    return shutil.copytree(trained, tmp_path / "tiny")


@pytest.fixture
def bare(trained: Path, tmp_path: Path) -> Path:
    """Its last hf/ folder alone."""
    return shutil.copytree(trained / LAST / "hf", tmp_path / "bare")
