"""How much is taken of each file, and that every document is taken at most once, over kills, limits and extensions."""

import itertools
import json
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from whole_config import mistakes, prepare

from sparsellm.config import Config
from sparsellm.data import DataError, Manifest, checksums, corpus, encoding, preparation, rows, tokenizer
from sparsellm.data.manifest import read
from sparsellm.system.files import write_sealed

MakeConfig = Callable[..., Config]


def write(path: Path, texts: list[str], **columns: object) -> str:
    path.write_text("".join(json.dumps({"text": text, **columns}) + "\n" for text in texts))
    return str(path)


@pytest.fixture
def files(texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Four jsonl files of 60, 120, 180 and 240 documents, in blocks of 1,000 bytes."""
    monkeypatch.setattr(corpus, "CHUNK_CHARACTERS", 2_000)
    monkeypatch.setattr(rows, "BLOCK", 1_000)
    ends = [0, 60, 180, 360, 600]
    return [
        write(tmp_path / f"{name}.jsonl", texts[start:end])
        for name, (start, end) in zip("abcd", itertools.pairwise(ends), strict=True)
    ]


def texts_in(config: Config, split: str = "train") -> list[str]:
    folder = config.data.folder
    tokens, starts = np.fromfile(folder / f"{split}.tokens", "<u2"), np.fromfile(folder / f"{split}.documents", "<i8")
    found = tokenizer.load(str(folder / "tokenizer")).tokenizer
    return found.decode_batch([each.tolist() for each in np.split(tokens, starts[1:])])


def numbers_in(config: Config, split: str = "train") -> list[int]:
    return [int(text.split(":")[0]) for text in texts_in(config, split)]


def content(config: Config) -> dict[str, bytes]:
    names = ("train.tokens", "train.documents", "validation.tokens", "validation.documents", "manifest.json")
    return {name: (config.data.folder / name).read_bytes() for name in names}


def tokens_of(manifest: Manifest) -> list[int]:
    return [manifest.taken[name]["tokens"] for name in manifest.source_files]


def assert_shares(tokens: list[int], sizes: list[int]) -> None:
    """Each share is exact to two documents of at most 150 tokens."""
    for found, size in zip(tokens, sizes, strict=True):
        assert abs(found - sum(tokens) * size / sum(sizes)) < 300


def test_each_file_gives_its_share_by_size_and_the_manifest_says_what_was_taken(
    make_config: MakeConfig, files: list[str]
) -> None:
    config = make_config(files, max_tokens=10_000, validation_fraction=0.02)
    manifest = prepare(config)
    assert 10_000 <= manifest.train.tokens < 10_150
    assert_shares(tokens_of(manifest), list(manifest.source_files.values()))
    numbers = numbers_in(config) + numbers_in(config, "validation")
    assert len(set(numbers)) == len(numbers) == sum(taken["documents"] for taken in manifest.taken.values())
    assert sum(tokens_of(manifest)) == manifest.train.tokens
    assert not any(taken["all"] for taken in manifest.taken.values())
    assert (manifest.goals, manifest.targets, manifest.position) == ([10_000], {}, corpus.START)
    assert read(config.data.folder) == manifest


def test_blocks_are_drawn_by_the_seed(make_config: MakeConfig, files: list[str], tmp_path: Path) -> None:
    found = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        config = make_config(files, max_tokens=5_000, seed=seed, path=str(tmp_path / name))
        prepare(config)
        found.append(numbers_in(config))
    assert found[0] == found[1] != found[2]
    assert set(found[0]) != set(found[2])
    assert max(found[0]) > 590  # not the beginnings of the files


def test_all_text_is_read_where_the_limit_exceeds_it(make_config: MakeConfig, files: list[str]) -> None:
    config = make_config(files)
    manifest = prepare(config)
    assert sorted(numbers_in(config) + numbers_in(config, "validation")) == list(range(600))
    assert manifest.exhausted
    assert all(taken["all"] for taken in manifest.taken.values())


def test_a_file_that_runs_out_hands_its_remainder_on_and_the_limit_is_reached(
    make_config: MakeConfig, files: list[str], texts: list[str], tmp_path: Path
) -> None:
    # By size, the first file would give nearly all; it has little text. The last one has even less.
    first = write(tmp_path / "a.jsonl", texts[:60], url="x" * 5_000)
    last = write(tmp_path / "e.jsonl", ["600: the last"], url="x" * 5_000)
    for limit in (3_000, 10_000, 20_000):
        config = make_config([first, *files[1:], last], max_tokens=limit, path=str(tmp_path / f"{limit}"))
        manifest = prepare(config)
        assert limit <= manifest.train.tokens < limit + 150
        numbers = numbers_in(config) + numbers_in(config, "validation")
        assert len(set(numbers)) == len(numbers)
        assert sum(taken["documents"] for taken in manifest.taken.values()) == len(numbers)
        assert (manifest.taken[first]["all"], limit) in ((0, 3_000), (1, 10_000), (1, 20_000))
    assert manifest.taken[last]["all"]


def test_documents_longer_than_a_share_are_taken_from_evenly_spaced_files(
    make_config: MakeConfig, texts: list[str], tmp_path: Path
) -> None:
    for i, text in enumerate(texts[:500]):
        (tmp_path / f"{i:03}.txt").write_text(f"{i}:" + text.split(":", 1)[1])
    opened = []
    config = make_config([f"{tmp_path}/*.txt"], max_tokens=3_000)
    with pytest.MonkeyPatch.context() as patch:
        documents = corpus.documents
        patch.setattr(
            corpus,
            "documents",
            lambda file, *given, **named: (opened.append(file), documents(file, *given, **named))[1],
        )
        manifest = prepare(config)
    numbers = sorted(numbers_in(config) + numbers_in(config, "validation"))
    assert len(numbers) == manifest.train.documents + manifest.validation.documents
    assert len(opened) < len(numbers) + 10  # files without a share are not opened; the reader is a chunk ahead
    assert 0 <= numbers[0] < 50
    assert numbers[-1] > 450
    assert all(b - a < 60 for a, b in itertools.pairwise(numbers))


def test_an_extension_continues_in_each_file_and_keeps_the_tokens(
    make_config: MakeConfig, files: list[str], tmp_path: Path
) -> None:
    config = make_config(files, max_tokens=4_000, validation_fraction=0.02)
    before = prepare(config)
    tokens = (config.data.folder / "train.tokens").read_bytes()
    config.data.max_tokens, config.data.seed = 12_000, 3  # the seed of the beginning counts
    after = prepare(config)
    assert (config.data.folder / "train.tokens").read_bytes().startswith(tokens)
    assert (after.goals, after.seed) == ([4_000, 12_000], 0)
    assert_shares(tokens_of(after), list(after.source_files.values()))
    assert all(a > b for a, b in zip(tokens_of(after), tokens_of(before), strict=True))
    numbers = numbers_in(config) + numbers_in(config, "validation")
    assert len(set(numbers)) == len(numbers)
    config.data.max_tokens = 10**6
    assert prepare(config).exhausted
    assert sorted(numbers_in(config) + numbers_in(config, "validation")) == list(range(600))


class Killed(BaseException):
    pass


def prepare_until(config: Config, writes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepare up to the given number of writes of progress.json."""
    write, calls = preparation.write, 0

    def dying(*arguments: object) -> None:
        nonlocal calls
        calls += 1
        if calls > writes:
            raise Killed
        write(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(preparation, "write", dying)
        with pytest.raises(Killed):
            prepare(config)


@pytest.mark.parametrize("cores", [1, 3])
def test_a_kill_in_any_pass_and_another_number_of_processes_change_no_byte(
    make_config: MakeConfig, files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int
) -> None:
    straight = make_config(files, path=str(tmp_path / "straight"))
    for limit in (4_000, 9_000):
        straight.data.max_tokens = limit
        prepare(straight)
    monkeypatch.setattr(encoding, "PATIENCE", 4_000)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    config = make_config(files, max_tokens=4_000)
    for writes in (2, 3):
        prepare_until(config, writes, monkeypatch)
    prepare(config)
    config.data.max_tokens = 9_000
    for writes in (2, 3):
        prepare_until(config, writes, monkeypatch)
    prepare(config)
    assert content(config) == content(straight)


def test_another_limit_after_a_kill_ends_the_pass_first_or_stops_within_it(
    make_config: MakeConfig, files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    straight = make_config(files, path=str(tmp_path / "straight"))
    for limit in (6_000, 9_000):
        straight.data.max_tokens = limit
        prepare(straight)
    config = make_config(files, max_tokens=6_000)
    prepare_until(config, 4, monkeypatch)
    config.data.max_tokens = 3_000
    few = prepare(config)
    assert 3_000 <= few.train.tokens < 3_150
    said = capsys.readouterr().out
    assert (
        "started for 6,000 tokens, but fewer are requested now: 2 of 4 files contribute less than their share" in said
    )
    assert read(config.data.folder) == few
    assert mistakes(config) == []
    config.data.max_tokens = 9_000
    prepare(config)
    assert content(config) == content(straight)


def test_a_folder_that_an_earlier_version_prepared_in_order_is_extended_in_order(
    make_config: MakeConfig, files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    start = preparation._start

    def in_order(request: object) -> tuple[Manifest, object]:
        manifest, vocabulary = start(request)
        return replace(manifest, seed=None), vocabulary

    monkeypatch.setattr(preparation, "_start", in_order)
    config = make_config(files, max_tokens=5_000)
    manifest = prepare(config)
    assert (manifest.goals, manifest.targets, manifest.taken) == ([], {}, {})
    later = ("seed", "goals", "targets", "taken")  # keys that an earlier version does not write
    values = {key: value for key, value in asdict(manifest).items() if key not in later}
    write_sealed(config.data.folder / "manifest.json", values)
    numbers = [number for number in range(600) if not corpus.is_held_out(text_of(files, number), 0.1)]
    for limit in (5_000, 8_000, 10**6):
        config.data.max_tokens = limit
        prepare(config)
        found = numbers_in(config)
        assert found == numbers[: len(found)]
    assert len(found) == len(numbers)


def text_of(files: list[str], number: int) -> str:
    lines = [line for file in files for line in Path(file).read_text().splitlines()]
    return json.loads(lines[number])["text"]


def test_a_share_of_a_large_file_costs_no_reading_of_the_whole_file(
    make_config: MakeConfig, files: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen, digest_of = [], checksums.digest_of
    monkeypatch.setattr(
        checksums, "digest_of", lambda path, *given: (seen.append(str(path)), digest_of(path, *given))[1]
    )
    config = make_config(files, max_tokens=5_000)
    manifest = prepare(config)
    assert not set(seen) & set(files)
    assert all(known.startswith("ends ") for known in manifest.source_checksums.values())
    # Its ends must stay as they were; a touched file has not changed.
    os.utime(files[3])
    assert mistakes(config) == []
    whole = Path(files[3]).read_bytes()
    Path(files[3]).write_bytes(whole.replace(b"sparse", b"sparsf", 1))
    config.data.max_tokens = 6_000
    with pytest.raises(DataError, match=r"d\.jsonl has changed since"):
        prepare(config)
    Path(files[3]).write_bytes(whole)
    config.data.max_tokens = 10**6
    assert all(len(known) == 16 for known in prepare(config).source_checksums.values())
    assert set(files) <= set(seen)


def test_the_estimate_follows_the_text_of_each_file(make_config: MakeConfig, tmp_path: Path) -> None:
    # A token for each character in one file, and few for many characters in the other.
    dense = [f"{i}: " + "qzxj" * 40 for i in range(400)]
    light = [f"{i}: " + "the token stream " * 40 for i in range(400, 800)]
    names = [write(tmp_path / "a.jsonl", dense), write(tmp_path / "b.jsonl", light)]
    manifest = prepare(make_config(names, max_tokens=20_000))
    assert_shares(tokens_of(manifest), list(manifest.source_files.values()))
