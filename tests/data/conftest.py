"""Small documents, a small tokenizer, and the configurations that use them."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from datasets import Dataset

from sparsellm.config import Config, DataConfig, ModelConfig, RuntimeConfig, Source, TrainingConfig
from sparsellm.data import tokenizer

VOCABULARY = 400


@pytest.fixture
def shared_data() -> Path:
    """Real text and its tokenizer, next to the checkout on development machines."""
    folder = Path(__file__).parents[2].parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"{folder} is not here")
    return folder


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """600 different documents of 1 to 80 words."""
    draw = random.Random(0)
    words = ["block", "token", "stream", "épreuve", "sparse", "42", "(x)", "neuron", "layer\n", "gate", "the", "of"]
    return [f"{i}: " + " ".join(draw.choices(words, k=draw.randint(1, 80))) for i in range(600)]


@pytest.fixture(scope="session")
def tokenizer_folder(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(tokenizer.train(texts, VOCABULARY), folder)
    return folder


@pytest.fixture
def parquet(texts: list[str], tmp_path: Path) -> list[str]:
    """The documents in six parquet files with a licence column, one document in fifty without text."""
    files = []
    for i in range(6):
        rows = [None if j % 50 == 49 else text for j, text in enumerate(texts[i * 100 : (i + 1) * 100])]
        licences = ["CC0" if j % 2 else "MIT" for j in range(100)]
        path = tmp_path / f"part-{i}.parquet"
        Dataset.from_dict({"text": rows, "license": licences, "other": list(range(100))}).to_parquet(
            path, batch_size=30
        )
        files.append(str(path))
    return files


@pytest.fixture
def make_config(tmp_path: Path, tokenizer_folder: Path) -> Callable[..., Config]:
    """A configuration of local files: `make_config(files, **data)`, 10 steps of 8 sequences of 32 tokens."""

    def make(files: list[str], **data: object) -> Config:
        values = {
            "name": "files",
            "source": Source.files,
            "files": files,
            "tokenizer": str(tokenizer_folder),
            "path": str(tmp_path / "prepared"),
            "validation_fraction": 0.1,
            "max_tokens": 1_000_000,
        }
        return Config(
            model=ModelConfig(vocab_size=VOCABULARY),
            runtime=RuntimeConfig(data_workers=0),
            data=DataConfig(**{**values, **data}),
            training=TrainingConfig(steps=10, batch_size=8, sequence_length=32),
        )

    return make
