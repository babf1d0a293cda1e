"""data.validation_fraction=0, as in data=paper: every document is trained on, and nothing is validated."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from whole_config import mistakes, open_data, open_validation, prepare

from sparsellm import config as configuration
from sparsellm.commands import prepare_data
from sparsellm.config import Config, from_overrides
from sparsellm.data import DataError, Request, corpus
from sparsellm.distributed.groups import process_group
from sparsellm.evaluation import request as evaluation

MakeConfig = Callable[..., Config]


def test_the_papers_corpus_holds_nothing_out_by_default() -> None:
    data = from_overrides(["data=paper"]).data
    assert (data.dataset, data.validation_fraction) == ("skymizer/fineweb-edu-dedup-45B", 0)
    assert Request.of(from_overrides(["data=paper"])).holds_nothing_out
    assert not Request.of(from_overrides(["data=paper", "data.validation_fraction=0.005"])).holds_nothing_out


@pytest.mark.parametrize("streaming", [False, True])
def test_every_document_is_trained_on_and_the_run_says_that_it_is_not_validated(
    make_config: MakeConfig, parquet: list[str], capsys: pytest.CaptureFixture[str], streaming: bool
) -> None:
    config = make_config(parquet, validation_fraction=0.0, streaming=streaming)
    if not streaming:
        manifest = prepare(config)
        assert manifest.train.documents == 588  # all that have text
        assert (manifest.validation.documents, manifest.validation.tokens, manifest.cut) == (0, 0, False)
    assert mistakes(config) == []
    with process_group("cpu") as ranks:
        assert open_data(config, ranks).validation.shape == (0, 33)
    assert "data.validation_fraction=0 holds nothing out: this run is not validated" in capsys.readouterr().err


def test_few_documents_are_not_cut_and_too_short_a_text_is_refused(make_config: MakeConfig, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(json.dumps({"text": "one block of text to train on " * 10}))
    config = make_config([str(tmp_path / "x.jsonl")], validation_fraction=0.0)
    manifest = prepare(config)
    assert (manifest.train.documents, manifest.validation.tokens, manifest.cut) == (1, 0, False)
    tokens = manifest.train.tokens
    longer = replace(config, training=replace(config.training, sequence_length=tokens))
    (found,) = mistakes(longer)
    assert f"shorten training.sequence_length to at most {tokens - 1}" in found
    longer.data.path = str(tmp_path / "longer")
    with pytest.raises(DataError, match=rf"needs a block of {tokens + 1} tokens to train on: .* at most {tokens - 1},"):
        prepare(longer)
    longer.training.sequence_length = tokens - 1
    assert prepare(longer).train.blocks == 1


def test_prepare_data_says_what_validation_uses(
    parquet: list[str], tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    overrides = ["data=files", "data.files=[part-*.parquet]", f"data.tokenizer={tokenizer_folder}"]
    assert prepare_data.main([*overrides, "data.validation_fraction=0"], "prepare_data") == 0
    assert "nothing is held out (data.validation_fraction=0), so runs are not validated" in capsys.readouterr().out
    assert len(list(corpus.read(parquet, "text"))) == 600


def test_evaluate_skips_the_loss_and_analyze_asks_for_a_text(
    make_config: MakeConfig, parquet: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(parquet, validation_fraction=0.0)
    configuration.save(config, tmp_path / "config.yaml")
    checkpoint = SimpleNamespace(run=tmp_path, model=str(tmp_path / "hf"))
    asked = evaluation.Request(SimpleNamespace(validation=True), checkpoint, tmp_path / "out")
    assert asked.held_out() is None
    assert "data.validation_fraction=0 held nothing out, so validation loss is skipped" in capsys.readouterr().err
    with pytest.raises(DataError, match=r"the run's data holds nothing out \(data\.validation_fraction=0\)"):
        open_validation(config, tmp_path / "hf", tmp_path)
