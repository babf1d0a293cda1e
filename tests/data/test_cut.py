"""The held-out split with too few documents: the end of the stream."""

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from whole_config import mistakes, open_data, open_validation, prepare

from sparsellm.config import SHORTEST_SEQUENCE, Config
from sparsellm.config.keys import bound_mistakes
from sparsellm.data import DataError, Request, corpus, preparation, token_files, tokenizer
from sparsellm.data.manifest import LEAST_BLOCKS, Manifest, Split, read
from sparsellm.distributed.groups import process_group

MakeConfig = Callable[..., Config]
LENGTH = 32  # of make_config


def contents(folder: Path) -> dict[str, str]:
    files = [
        path for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in ("lock", "verified.json")
    ]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def tokens_in(config: Config, split: str) -> list[int]:
    return np.fromfile(Path(config.data.path) / f"{split}.tokens", "<u2").tolist()


def starts_in(config: Config, split: str) -> list[int]:
    return np.fromfile(Path(config.data.path) / f"{split}.documents", "<i8").tolist()


def encoded(config: Config, texts: list[str]) -> list[int]:
    return [i for ids in tokenizer.encode(tokenizer.load(config.data.tokenizer), texts) for i in ids]


def with_length(config: Config, length: int, **data: object) -> Config:
    training = replace(config.training, sequence_length=length)
    return replace(config, training=training, data=replace(config.data, **data))


@pytest.fixture
def text_files(texts: list[str], tmp_path: Path) -> list[str]:
    """Six texts of about 4,000 tokens, a document each, none of which is held out by its content."""
    files = []
    for i in range(6):
        path = tmp_path / f"{i}.txt"
        path.write_text("\n".join(texts[i * 100 : (i + 1) * 100]))
        assert not corpus.is_held_out(path.read_text(), 0.1)
        files.append(str(path))
    return files


@pytest.mark.parametrize("held_out_by_content", [False, True])
def test_one_text_file_gives_its_end_to_validation_and_every_token_to_one_split(
    make_config: MakeConfig, texts: list[str], tmp_path: Path, held_out_by_content: bool
) -> None:
    candidates = (f"{i}\n" + "\n".join(texts) for i in range(1000))
    text = next(text for text in candidates if corpus.is_held_out(text, 0.1) == held_out_by_content)
    (tmp_path / "input.txt").write_text(text)
    config = make_config([str(tmp_path / "input.txt")])
    manifest = prepare(config)
    everything = encoded(config, [text])
    train, validation = tokens_in(config, "train"), tokens_in(config, "validation")
    assert train + validation == everything
    assert len(validation) == int(0.1 * len(everything)) > LENGTH + 1
    assert manifest.cut
    assert (manifest.train.tokens, manifest.validation.tokens) == (len(train), len(validation))
    assert (manifest.train.documents, manifest.validation.documents) == (1, 1)
    assert starts_in(config, "train") == starts_in(config, "validation") == [0]
    assert manifest.train.blocks == (len(train) - 1) // LENGTH
    assert mistakes(config) == []
    with process_group("cpu") as ranks:
        opened = open_data(config, ranks)
        assert len(opened.validation) == manifest.validation.blocks == (len(validation) - 1) // LENGTH
        assert opened.validation[0].tolist() == validation[: LENGTH + 1]


def test_few_short_documents_are_held_out_after_the_end_of_the_training_documents(
    make_config: MakeConfig, texts: list[str], tmp_path: Path
) -> None:
    short = [text[:20] for text in texts[:500]]
    (tmp_path / "short.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in short))
    config = make_config([str(tmp_path / "short.jsonl")], validation_fraction=0.004)
    manifest = prepare(config)
    held_out = [text for text in short if corpus.is_held_out(text, 0.004)]
    kept = [text for text in short if not corpus.is_held_out(text, 0.004)]
    assert 0 < len(encoded(config, held_out)) <= LENGTH  # which is too few for a block
    train, validation = tokens_in(config, "train"), tokens_in(config, "validation")
    assert train + validation == encoded(config, kept) + encoded(config, held_out)
    assert len(validation) == int(0.05 * len(train + validation)) > LENGTH + 1
    # Where documents start: the first held-out one may be the rest of the document at the cut.
    ends = [0, *np.cumsum([len(ids) for ids in tokenizer.encode(tokenizer.load(config.data.tokenizer), kept)])]
    assert starts_in(config, "train") == [start for start in ends[:-1] if start < len(train)]
    starts = starts_in(config, "validation")
    assert starts[0] == 0
    assert all(validation[start - 1] == manifest.end_of_text_id for start in starts[1:])
    assert manifest.validation.documents == len(starts) == validation.count(0)
    assert mistakes(config) == []


class Killed(BaseException):
    pass


@pytest.mark.parametrize("extended", [False, True])
@pytest.mark.parametrize(
    ("module", "name", "calls"),
    [(token_files, "_replace_end", 4), (preparation, "write", 4), (preparation, "checksums", 1)],
)
def test_stopped_at_any_step_of_the_cut_it_goes_on_to_the_same_bytes(
    make_config: MakeConfig, text_files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    module: ModuleType, name: str, calls: int, extended: bool,
) -> None:  # fmt: skip
    direct = make_config(text_files[:2], path=str(tmp_path / "direct"))
    if extended:
        prepare(replace(direct, data=replace(direct.data, max_tokens=2_000)))
    expected = prepare(direct)
    assert expected.cut
    original = getattr(module, name)
    for fatal in range(1, calls + 1):
        config = make_config(text_files[:2], path=str(tmp_path / f"{fatal}"), max_tokens=2_000)
        if extended:
            assert prepare(config).train.tokens < expected.train.tokens
        config.data.max_tokens = direct.data.max_tokens
        count = 0

        def dying(*arguments: object, fatal: int = fatal) -> object:
            nonlocal count
            count += 1
            if count == fatal:
                raise Killed
            return original(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(module, name, dying)
            with pytest.raises(Killed):
                prepare(config)
        assert (read(Path(config.data.path)) is None) == (not extended)
        assert prepare(config) == expected
        assert contents(Path(config.data.path)) == contents(tmp_path / "direct")


def test_an_extended_folder_holds_out_nothing_that_was_trained_on(
    make_config: MakeConfig, text_files: list[str], tmp_path: Path
) -> None:
    config = make_config(text_files, max_tokens=2_000)
    before: list[int] = []
    for amount in (2_000, 6_000, 1_000_000):
        config.data.max_tokens = amount
        manifest = prepare(config)
        assert manifest.cut
        assert mistakes(config) == []
        train = tokens_in(config, "train")
        assert train[: len(before)] == before  # the cut moved past everything that had been left for training
        assert len(train) > len(before)
        before = train
    assert manifest.exhausted
    everything = encoded(config, [Path(file).read_text() for file in text_files])
    assert sorted(train + tokens_in(config, "validation")) == sorted(everything)


def test_a_cut_folder_is_extended_only_with_the_files_that_decided_its_tokens(
    make_config: MakeConfig, text_files: list[str], tmp_path: Path
) -> None:
    config = make_config([f"{tmp_path}/*.txt"], max_tokens=2_000)
    assert [*prepare(config).taken] == text_files[:1]
    Path(text_files[5]).unlink()
    config.data.max_tokens = 6_000
    with pytest.raises(DataError, match=r"5\.txt has changed since it was read for"):
        prepare(config)


def test_a_longer_sequence_does_not_move_the_cut_of_a_folder_that_was_trained_on(
    make_config: MakeConfig, text_files: list[str]
) -> None:
    config = make_config(text_files, max_tokens=2_000, validation_fraction=0.001)
    trained_on = prepare(config).train.tokens
    extended = with_length(config, 3_000, max_tokens=trained_on + 1)
    manifest = prepare(extended)
    assert manifest.train.tokens > trained_on
    assert manifest.sequence_length == LENGTH
    assert manifest.validation.tokens == LENGTH + 1
    assert "shorten training.sequence_length to at most 32, or prepare" in mistakes(extended)[0]


def test_documents_that_come_to_be_enough_end_the_cut(
    make_config: MakeConfig, texts: list[str], tmp_path: Path
) -> None:
    files = []
    for name, some in (("a", texts[:40]), ("b", texts[40:])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in some))
        files.append(str(tmp_path / f"{name}.jsonl"))
    config = make_config(files, max_tokens=200, validation_fraction=0.02)
    assert prepare(config).cut
    config.data.max_tokens = 1_000_000
    assert not prepare(config).cut
    held_out = [text for text in texts if corpus.is_held_out(text, 0.02)]
    assert sorted(tokens_in(config, "validation")) == sorted(encoded(config, held_out))


def test_the_amount_asked_for_is_left_for_training_after_the_cut(
    make_config: MakeConfig, texts: list[str], tmp_path: Path
) -> None:
    (tmp_path / "x.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    config = make_config([str(tmp_path / "x.jsonl")], max_tokens=2_000, validation_fraction=1e-6)
    manifest = prepare(config)
    assert manifest.cut
    assert not manifest.exhausted
    assert 2_000 <= manifest.train.tokens < 2_500
    assert mistakes(config) == []
    assert prepare(config) == manifest


def test_another_sequence_length_fits_or_is_refused_with_remedies_that_work(
    make_config: MakeConfig, text_files: list[str], tmp_path: Path
) -> None:
    config = make_config(text_files[:1], validation_fraction=0.1)
    fits = prepare(config).validation.tokens - 1
    for length in (1, 8, 100, fits):
        assert mistakes(with_length(config, length)) == []
    longer = with_length(config, fits + 1)
    (found,) = mistakes(longer)
    assert (
        f"shorten training.sequence_length to at most {fits}, or prepare the text for this length in another" in found
    )
    elsewhere = with_length(config, fits + 1, path=str(tmp_path / "elsewhere"))
    assert prepare(elsewhere).validation.tokens == fits + 2
    assert mistakes(elsewhere) == []
    # The longest possible length, and one more.
    with pytest.raises(
        DataError, match=r"shorten training\.sequence_length to at most \d+, or give more text"
    ) as error:
        prepare(with_length(config, 100_000, path=str(tmp_path / "long")))
    longest = int(str(error.value).split("training.sequence_length to at most ")[1].split(",")[0])
    for length in (longest + 1, longest):
        assert not (tmp_path / "long").exists()
        long = with_length(config, length, path=str(tmp_path / "long"))
        if length > longest:
            with pytest.raises(DataError, match=f"to at most {longest}"):
                prepare(long)
        else:
            prepare(long)
            assert mistakes(long) == []


def test_the_length_advised_for_a_short_text_is_one_that_the_rule_accepts(
    make_config: MakeConfig, text_files: list[str]
) -> None:
    config = with_length(make_config(text_files[:1]), 100)
    whole = prepare(config)
    advised = {}
    for tokens in range(2 * SHORTEST_SEQUENCE + 4):  # in each split
        manifest = replace(whole, train=Split(1, tokens), validation=Split(1, tokens))
        said = [preparation._too_short(manifest), *Request.of(config).block_mistakes(manifest)]
        advised[tokens] = [int(length) for message in said for length in re.findall(r"to at most (-?\d+)", message)]
        for length in advised[tokens]:
            assert list(bound_mistakes(with_length(config, length).training)) == []
    assert advised[SHORTEST_SEQUENCE] == []
    assert advised[SHORTEST_SEQUENCE + 1] == [SHORTEST_SEQUENCE] * 2


def test_text_too_short_for_any_length_is_refused_and_leaves_only_what_was_there(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    (tmp_path / "input.txt").write_text("a")
    config = make_config([str(tmp_path / "input.txt")], path=str(tmp_path / "mine" / "deep" / "tokens"))
    (tmp_path / "mine").mkdir()
    with pytest.raises(DataError, match="another one to hold out: give more text"):
        prepare(config)
    assert list((tmp_path / "mine").iterdir()) == []


def test_a_failure_before_the_first_document_is_prepared_leaves_nothing(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    rows = [{"text": "one"}, {"text": 2}]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = make_config([str(tmp_path / "x.jsonl")])
    with pytest.raises(DataError):
        prepare(config)
    assert not Path(config.data.path).exists()


def test_a_tokenizer_is_trained_on_the_start_of_the_files_and_recorded(
    make_config: MakeConfig, text_files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation, "TOKENIZER_CHARACTERS", 30_000)
    config = make_config(text_files, tokenizer=None, tokenizer_vocab_size=350)
    manifest = prepare(config)
    assert (manifest.vocab_size, manifest.tokenizer_characters) == (350, 30_000)
    assert manifest.recipe["data.tokenizer"] is None
    assert manifest.recipe["data.tokenizer_vocab_size"] == 350
    sizes = [len(Path(file).read_text()) for file in text_files]
    assert sum(sizes[:1]) < 30_000 < sum(sizes[:3])
    starts = [Path(text_files[0]).read_text(), Path(text_files[1]).read_text()[: 30_000 - sizes[0]]]
    assert sum(map(len, starts)) == 30_000
    assert manifest.tokenizer_hash == tokenizer.digest(tokenizer.train(starts, 350))
    again = make_config(text_files, tokenizer=None, tokenizer_vocab_size=350, path=str(tmp_path / "again"))
    assert prepare(again) == manifest
    assert mistakes(config) == []
    config.data.tokenizer_vocab_size = 360
    assert "data.tokenizer_vocab_size was 350, now it is 360" in mistakes(config)[0]


def test_a_stream_of_one_file_is_refused_with_a_remedy_that_works(
    make_config: MakeConfig, text_files: list[str]
) -> None:
    config = make_config(text_files[:1], streaming=True)
    with process_group("cpu") as ranks, pytest.raises(DataError) as refusal:
        open_data(config, ranks)
    assert "fewer than one block of 33: prepare the tokens first" in str(refusal.value)
    prepared = make_config(text_files[:1], streaming=False)
    prepare(prepared)
    assert mistakes(prepared) == []


def test_a_run_is_not_validated_on_tokens_that_were_cut_elsewhere_than_those_it_trained_on(
    make_config: MakeConfig, text_files: list[str], tmp_path: Path, tokenizer_folder: Path
) -> None:
    config = make_config(text_files, max_tokens=2_000)
    manifest = prepare(config)
    checkpoint = tmp_path / "runs" / "mine" / "checkpoints" / "step_00000001"
    shutil.copytree(tokenizer_folder, checkpoint / "hf")
    (checkpoint / "state").mkdir()
    position = {"data": {"samples": 8, "tokens": manifest.files["train.tokens"]["xxh3"]}}
    (checkpoint / "state" / "rank_00000.json").write_text(json.dumps(position))
    blocks = open_validation(config, checkpoint / "hf", tmp_path / "runs" / "mine")
    assert len(blocks) == manifest.validation.blocks
    extended = make_config(text_files, max_tokens=6_000)
    prepare(extended)
    with pytest.raises(
        DataError, match="has another held-out split: the run may have trained on tokens that are held out there"
    ):
        open_validation(extended, checkpoint / "hf", tmp_path / "runs" / "mine")


def counted(train: int, validation: int, **changed: object) -> Manifest:
    """A manifest of a new preparation with blocks of 256 tokens and data.validation_fraction=0.005."""
    return Manifest(
        recipe={"data.validation_fraction": 0.005}, tokenizer_hash="", vocab_size=400, end_of_text_id=0,
        sequence_length=256, train=Split(1, train), validation=Split(1, validation),
        **{"source_files": {}, "least_blocks": LEAST_BLOCKS, "exhausted": True, **changed},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("train", "validation", "cut"),
    [
        (150_000, 0, 7_500),  # a file of 600 kB: 5% of it, 29 blocks
        (149_000, 1_000, 7_500),  # the same tokens with two documents held out
        (999_000, 1_000, 50 * 256 + 1),
        (4_000_000, 0, 20_000),  # the requested fraction is more than 50 blocks
        (607_531, 12_221, 0),  # the embedded corpus: 47 blocks are nearly enough
        (4_000_000, 13_000, 0),
        (600, 0, 257),  # 5% is less than a block
    ],
)
def test_a_short_text_holds_out_50_blocks_or_a_twentieth(train: int, validation: int, cut: int) -> None:
    assert counted(train, validation).tokens_to_cut == cut


def test_a_folder_from_before_the_minimum_holds_out_as_it_did() -> None:
    assert counted(149_000, 1_000, least_blocks=1).tokens_to_cut == 0
    assert counted(150_000, 0, least_blocks=1).tokens_to_cut == 750


def test_the_minimum_holds_for_one_file_and_not_for_a_share_of_several() -> None:
    files: dict[str, int | None] = {"a": 1, "b": 1}
    assert counted(150_000, 750, exhausted=False, source_files=files).tokens_to_cut == 0
    assert counted(150_000, 750, exhausted=False, source_files={"a": 1}).tokens_to_cut == 7_537


def test_extending_whole_documents_moves_no_token_from_training_to_the_held_out_split(
    make_config: MakeConfig, texts: list[str], tmp_path: Path
) -> None:
    (tmp_path / "x.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    half = str(tmp_path / "x.jsonl")
    shutil.copy(half, tmp_path / "y.jsonl")
    config = make_config([half, str(tmp_path / "y.jsonl")], max_tokens=3_000, validation_fraction=0.02)
    before = prepare(config)
    assert not before.cut
    trained_on = tokens_in(config, "train")
    config.data.max_tokens = 1_000_000
    after = prepare(config)
    assert not after.cut
    assert tokens_in(config, "train")[: len(trained_on)] == trained_on
