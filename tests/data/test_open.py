from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest
import torch
from processes import torchrun
from whole_config import mistakes, open_data, open_validation, prepare

from sparsellm import config as configuration
from sparsellm.config import Config, DataConfig, LoggingConfig, ModelConfig, RuntimeConfig, TrainingConfig
from sparsellm.data import DataError, tokenizer
from sparsellm.data.manifest import read
from sparsellm.distributed.groups import process_group

MakeConfig = Callable[..., Config]


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.slow
def test_the_embedded_corpus_prepares_itself(tmp_path: Path) -> None:
    config = Config(
        model=ModelConfig(vocab_size=1_024),
        data=DataConfig(path=str(tmp_path / "docs"), tokenizer_vocab_size=1_024, validation_fraction=0.02),
        training=TrainingConfig(steps=10, batch_size=8, sequence_length=64),
        runtime=RuntimeConfig(data_workers=0),
        logging=LoggingConfig(validation_samples=16),
    )
    assert mistakes(config) == []
    with process_group("cpu") as ranks:
        data = open_data(config, ranks)
        batch, state = next(data.batches(None))
    assert batch.shape == (8, 65)
    assert state["samples"] == 8
    assert data.validation.shape == (config.logging.validation_samples, 65)
    assert data.end_of_text_id == 0
    assert (data.tokenizer_folder / "tokenizer_config.json").is_file()
    manifest = read(tmp_path / "docs")
    assert manifest.exhausted  # regardless of the steps: the next run may need more
    assert manifest.train.tokens > 500_000
    assert manifest.vocab_size == 1_024
    config.data.tokenizer_vocab_size = 512
    (found,) = mistakes(config)
    assert "data.tokenizer_vocab_size was 1024, now it is 512" in found


def test_a_tokenizer_larger_than_the_model_is_refused_before_it_is_trained(tmp_path: Path) -> None:
    config = Config(model=ModelConfig(vocab_size=1_024), data=DataConfig(path=str(tmp_path / "docs")))
    (found,) = mistakes(config)
    assert "has 4,096 ids, but model.vocab_size is 1,024" in found


def test_what_is_not_prepared_or_corrupt_is_refused(make_config: MakeConfig, parquet: list[str]) -> None:
    config = make_config(parquet)
    with process_group("cpu") as ranks:
        with pytest.raises(DataError, match=r"there are no prepared tokens; run python -m sparsellm\.prepare_data"):
            open_data(config, ranks)
        assert not Path(config.data.path).exists()
        prepare(config)
        assert len(open_data(config, ranks).validation) > 0
        with (Path(config.data.path) / "train.tokens").open("r+b") as file:
            file.write(b"\xff\x00")
        with pytest.raises(DataError, match=r"train\.tokens is corrupt"):
            open_data(config, ranks)


def test_streaming_mistakes_come_before_anything_is_written(make_config: MakeConfig, parquet: list[str]) -> None:
    config = make_config([*parquet, "missing.parquet"], streaming=True)
    config.model.vocab_size = 100
    assert [m for m in mistakes(config) if "nothing matches" in m]
    config = make_config(parquet, streaming=True)
    assert mistakes(config) == []
    config.model.vocab_size = 100
    (found,) = mistakes(config)
    assert "has 400 ids, but model.vocab_size is 100" in found
    with process_group("cpu") as ranks, pytest.raises(DataError, match="400 ids"):
        open_data(config, ranks)
    assert not Path(config.data.path).exists()


TWO_RANKS = """
import sys
from pathlib import Path
import torch
from sparsellm import config as configuration
from sparsellm.data import Request, open_data
from sparsellm.data.manifest import read
from sparsellm.distributed.groups import process_group
with process_group("cpu") as ranks:
    config = configuration.load(Path(sys.argv[1]))
    data = open_data(Request.of(config), config.run, config.logging.validation_samples, 0, ranks)
    batch, state = next(data.batches(None))
    torch.save({"validation": data.validation, "batch": batch}, f"{sys.argv[2]}/{ranks.rank}.pt")
"""


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.slow
def test_two_ranks_share_validation_and_divide_a_step(
    make_config: MakeConfig, parquet: list[str], tmp_path: Path, streaming: bool
) -> None:
    config = make_config(parquet, streaming=streaming)
    if not streaming:
        prepare(config)
    configuration.save(config, tmp_path / "config.yaml")
    (tmp_path / "two_ranks.py").write_text(TWO_RANKS)
    torchrun(2, tmp_path / "two_ranks.py", tmp_path / "config.yaml", tmp_path)
    found = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    assert torch.equal(found[0]["validation"], found[1]["validation"])
    assert all(rank["batch"].shape == (4, 33) for rank in found)
    assert not torch.equal(found[0]["batch"], found[1]["batch"])
    with process_group("cpu") as ranks:
        data = open_data(config, ranks)
        assert torch.equal(data.validation, found[0]["validation"])
        if not streaming:
            ((batch, _),) = islice(data.batches(None), 1)
            assert torch.equal(batch, torch.cat([rank["batch"] for rank in found]))


def test_the_held_out_blocks_of_a_run_are_found_from_another_folder_and_after_a_move(
    make_config: MakeConfig, parquet: list[str], tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    run = project / "runs" / "mine"
    for folder in (run, elsewhere):
        folder.mkdir(parents=True)
    config = make_config(parquet, path="data/files")
    monkeypatch.chdir(project)
    prepare(config)
    expected = open_validation(config, tokenizer_folder, Path("runs/mine"))
    monkeypatch.chdir(elsewhere)
    assert torch.equal(open_validation(config, tokenizer_folder, run), expected)

    # Tokens here with another recipe are skipped.
    prepare(make_config(parquet, path="data/files", validation_fraction=0.2))
    assert torch.equal(open_validation(config, tokenizer_folder, run), expected)

    moved = project.rename(tmp_path / "moved")
    for file in parquet:
        Path(file).unlink()
    assert torch.equal(open_validation(config, tokenizer_folder, moved / "runs" / "mine"), expected)

    (moved / "data" / "files" / "validation.tokens").unlink()
    with pytest.raises(DataError) as refusal:
        open_validation(config, tokenizer_folder, moved / "runs" / "mine")
    for said in (
        f"{elsewhere}/data/files was prepared with other settings (data.validation_fraction was 0.2, now it is 0.1)",
        f"{moved}/runs/data/files/manifest.json is missing",
        f"{moved}/data/files/validation.tokens is missing",
        "python -m sparsellm.prepare_data data=files",
    ):
        assert said in str(refusal.value)


def test_tokens_of_another_tokenizer_and_those_that_are_gone_are_not_a_runs(
    make_config: MakeConfig, parquet: list[str], tmp_path: Path, texts: list[str], tokenizer_folder: Path
) -> None:
    config = make_config(parquet)
    prepare(config)
    tokenizer.save(tokenizer.train(texts[:300], 390), tmp_path / "other")
    with pytest.raises(DataError, match="prepared with a tokenizer other than"):
        open_validation(config, tmp_path / "other", tmp_path / "runs" / "mine")
    gone = make_config(parquet, path=str(tmp_path / "gone"))
    with pytest.raises(DataError) as refusal:  # an absolute path is only looked for in one place
        open_validation(gone, tokenizer_folder, tmp_path / "runs" / "mine")
    assert str(refusal.value).count("is missing") == 1
    assert f"{tmp_path}/gone/manifest.json is missing" in str(refusal.value)


def test_the_files_of_a_streaming_run_are_found_from_another_folder(
    make_config: MakeConfig, parquet: list[str], tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(["part-*.parquet"], streaming=True)
    run = tmp_path / "runs" / "mine"
    monkeypatch.chdir(tmp_path)
    expected = open_validation(config, tokenizer_folder, Path("runs/mine"))
    run.mkdir(parents=True)
    monkeypatch.chdir(run)
    assert torch.equal(open_validation(config, tokenizer_folder, run), expected)
    with pytest.raises(DataError, match="are neither under the working directory nor under a parent of the run's"):
        open_validation(make_config(["none-*.parquet"], streaming=True), tokenizer_folder, run)
