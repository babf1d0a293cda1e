"""Unreadable records, skipped with data.skip_bad_records, in preparation and in a stream."""

import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest
import torch
from whole_config import mistakes, prepare

from sparsellm.config import Config
from sparsellm.data import DataError, corpus
from sparsellm.data.request import Request
from sparsellm.data.stream import TokenStream

MakeConfig = Callable[..., Config]
BAD = [r'{"text": "\ud83d"}', "{", '{"text": 5}']


@pytest.fixture
def files(tmp_path: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Three files of 200 documents; in the second one, three bad records as well."""
    monkeypatch.setattr(corpus, "CHUNK_CHARACTERS", 2_000)
    found = []
    for i, name in enumerate(("a", "b", "c")):
        records = [json.dumps({"text": text}) for text in texts[200 * i : 200 * i + 200]]
        if name == "b":
            records = [*records[:50], BAD[0], *records[50:120], BAD[1], *records[120:], BAD[2]]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(records) + "\n")
        found.append(str(tmp_path / f"{name}.jsonl"))
    return found


def test_a_preparation_that_a_bad_record_ended_goes_on_without_it(
    make_config: MakeConfig, files: list[str], tmp_path: Path
) -> None:
    config = make_config(files)
    with pytest.raises(DataError, match=r"b\.jsonl, line 51: it contains an unpaired surrogate"):
        prepare(config)
    assert json.loads((Path(config.data.path) / "progress.json").read_text())["train"]["documents"] > 0
    config.data.skip_bad_records = True
    manifest = prepare(config)
    assert manifest.bad_records == 3
    assert manifest.train.documents + manifest.validation.documents == 600
    assert manifest.files == prepare(make_config(files, skip_bad_records=True, path=str(tmp_path / "at once"))).files
    good = [str(tmp_path / f"{name}-good.jsonl") for name in "abc"]
    for name, path in zip(files, good, strict=True):
        Path(path).write_text("\n".join(line for line in Path(name).read_text().splitlines() if line not in BAD))
    assert manifest.files == prepare(make_config(good, path=str(tmp_path / "good"))).files


def test_what_was_passed_over_belongs_to_the_tokens(make_config: MakeConfig, files: list[str]) -> None:
    config = make_config(files, skip_bad_records=True)
    assert "data.skip_bad_records=true" in Request.of(config).command()
    prepare(config)
    config.data.skip_bad_records, config.data.max_tokens = False, 1_000
    (found,) = mistakes(config)
    assert "data.skip_bad_records=true skipped 3 unreadable records, now it is false" in found
    whole = make_config([files[0]], path=f"{config.data.path}-whole", max_tokens=1_000)
    prepare(whole)
    whole.data.skip_bad_records = True  # which changes nothing if all records are readable
    assert mistakes(whole) == []


def test_a_stream_passes_over_bad_records_and_resumes_exactly(files: list[str], tokenizer_folder: Path) -> None:
    names = dict.fromkeys(files, 0)
    stream = TokenStream(
        files=names, ends={}, text_column="text", tokenizer_folder=tokenizer_folder, validation_fraction=0.1,
        sequence_length=32, share=4, rank=0, world_size=1, seed=7, workers=0, pin_memory=False, skip_bad_records=True,
        group_blocks=20,
    )  # fmt: skip
    everything = list(islice(stream.batches(None), 120))
    for start in range(0, 119, 7):
        for (tokens, _), (again, _) in zip(
            everything[start + 1 : start + 4], stream.batches(everything[start][1]), strict=False
        ):
            assert torch.equal(tokens, again)
