"""Damage to a folder of prepared tokens: to each byte of its small files in `make attack`, to some 200 in `make test`,
and to some of the large ones; and text that changes after it was prepared.

Every attack must end in one sentence (a DataError) that names the file. `failed` counts what was accepted, and what
ended otherwise.
"""

import json
import os
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from attack.seed import SEED, positions
from whole_config import mistakes, prepare

from sparsellm.config import Config, DataConfig, ModelConfig, Source, TrainingConfig
from sparsellm.data import DataError, corpus, token_files, tokenizer
from sparsellm.data.manifest import read, verify, write


class Stopped(BaseException):
    pass


@pytest.fixture
def prepared(tmp_path: Path) -> Config:
    """The configuration of a finished folder: 200 documents, 300 ids."""
    texts = [f"{i}: " + "the block of a token stream " * (i % 7 + 1) for i in range(200)]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer.save(tokenizer.train(texts, 300), tmp_path / "tokenizer")
    config = Config(
        model=ModelConfig(vocab_size=300),
        data=DataConfig(
            source=Source.files, files=[str(tmp_path / "x.jsonl")], tokenizer=str(tmp_path / "tokenizer"),
            path=str(tmp_path / "tokens"), validation_fraction=0.1, max_tokens=10**6,
        ),
        training=TrainingConfig(steps=1, batch_size=1, sequence_length=16),
    )  # fmt: skip
    prepare(config)
    return config


@pytest.fixture
def unfinished(prepared: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """The same, stopped in the middle of preparation."""
    monkeypatch.setattr(corpus, "CHUNK_CHARACTERS", 2_000)
    config = replace(prepared, data=replace(prepared.data, path=str(tmp_path / "unfinished")))
    with monkeypatch.context() as patch:
        calls, flush = 0, token_files.Writer.flush

        def dying(writer: token_files.Writer) -> None:
            nonlocal calls
            calls += 1
            if calls == 8:
                raise Stopped
            flush(writer)

        patch.setattr(token_files.Writer, "flush", dying)
        with pytest.raises(Stopped):
            prepare(config)
    return config


def attack(path: Path, damaged: Iterator[bytes], start: Callable[[], object]) -> None:
    """`start` with each content of `path` in turn."""
    whole, tried, held, failed = path.read_bytes(), 0, 0, []
    for content in damaged:
        tried += 1
        path.write_bytes(content)
        try:
            start()
        except DataError as error:
            if path.name in str(error) and "\n" not in str(error):
                held += 1
                continue
            failed.append(str(error))
        except Exception as error:
            failed.append(repr(error))
        else:
            failed.append("accepted")
    path.write_bytes(whole)
    print(f"prepared {path.name}: tried {tried}, held {held}, failed {len(failed)}")
    assert not failed, failed[:3]
    assert tried > 0


def flips(path: Path, bits: int = 8, stride: int = 1, size: int | None = None) -> Iterator[bytes]:
    """The content of `path` with one bit flipped: `bits` of the bytes at `positions`, among the first `size` or all.

    SEED decides which.
    """
    whole = path.read_bytes()
    for at in positions(len(whole) if size is None else size, stride):
        for bit in range(bits):
            yield whole[:at] + bytes([whole[at] ^ 1 << (bit + at + SEED) % 8]) + whole[at + 1 :]


def junk(path: Path) -> Iterator[bytes]:
    """Truncations of `path`, and other invalid content."""
    whole = path.read_bytes()
    yield from (whole[:end] for end in positions(len(whole)))
    yield from (b"\0", b"\xff\xfe", b"[]", b"{}", b"null", b"1", b'{"version": 2}', b'{"version": 1}', b"[" * 10**5,
                b"1" * 10**5, b'{"version": NaN}', whole + b"\0", whole + whole, b"\0" * len(whole))  # fmt: skip


def checked(config: Config) -> Callable[[], None]:
    """What training does before its first step."""

    def start() -> None:
        if found := mistakes(config):
            raise DataError("; ".join(found))
        verify(read(Path(config.data.path)), Path(config.data.path))

    return start


@pytest.mark.slow
def test_no_changed_bit_and_no_junk_in_a_manifest_is_accepted(prepared: Config) -> None:
    path = Path(prepared.data.path) / "manifest.json"
    attack(path, flips(path), lambda: read(path.parent))
    attack(path, flips(path, bits=1, stride=3), checked(prepared))
    attack(path, junk(path), checked(prepared))
    attack(path, flips(path, bits=1, stride=7), lambda: prepare(prepared))
    checked(prepared)()


@pytest.mark.slow
def test_no_changed_bit_and_no_junk_in_progress_is_accepted(unfinished: Config) -> None:
    path = Path(unfinished.data.path) / "progress.json"
    attack(path, flips(path), lambda: read(path.parent, path.name))
    attack(path, flips(path, bits=1, stride=7), lambda: prepare(unfinished))
    attack(path, junk(path), lambda: read(path.parent, path.name))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "stride"), [
    ("tokenizer/tokenizer.json", 1), ("tokenizer/tokenizer_config.json", 1),
    ("train.tokens", 41), ("train.documents", 13), ("validation.tokens", 7), ("validation.documents", 3),
])  # fmt: skip
def test_no_changed_bit_in_a_finished_folder_is_accepted(prepared: Config, name: str, stride: int) -> None:
    path, folder = Path(prepared.data.path) / name, Path(prepared.data.path)
    manifest = read(folder)
    attack(path, flips(path, bits=1, stride=stride), lambda: verify(manifest, folder, [name]))


@pytest.mark.parametrize("name", [
    "tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json", "train.tokens", "train.documents",
    "validation.tokens", "validation.documents",
])  # fmt: skip
def test_what_is_damaged_during_a_preparation_is_not_sealed(unfinished: Config, prepared: Config, name: str) -> None:
    path = Path(unfinished.data.path) / name
    # Later bytes were written after progress.json and are removed.
    size = read(Path(unfinished.data.path), "progress.json").files[name]["bytes"]
    attack(path, flips(path, bits=1, stride=size // 20 + 1, size=size), lambda: prepare(unfinished))
    assert prepare(unfinished).train == read(Path(prepared.data.path)).train


def test_counts_that_are_not_those_of_the_files_are_refused_though_their_checksum_is_right(prepared: Config) -> None:
    folder = Path(prepared.data.path)
    manifest = read(folder)
    wrong = [
        {"vocab_size": 301}, {"end_of_text_id": 1}, {"tokenizer_hash": "0"}, {"sequence_length": 17}, {"files": {}},
        *({split: replace(getattr(manifest, split), **{count: 1})}
          for split in ("train", "validation") for count in ("tokens", "documents", "blocks", "dropped_tail")),
    ]  # fmt: skip
    for values in wrong:
        write(replace(manifest, **values), folder, "manifest.json")
        with pytest.raises(DataError, match=r"manifest\.json"):
            verify(read(folder), folder)
    print(f"counts of a manifest: tried {len(wrong)}, held {len(wrong)}, failed 0")


def test_no_changed_source_is_accepted(prepared: Config, tmp_path: Path) -> None:
    """Changes one or two of three files at random: bytes anywhere, also with size and time unchanged; an additional or
    missing file; a replaced text. Files that were only touched, copied or rewritten are accepted."""
    draw, failed, tried = random.Random(f"{SEED} sources"), [], 60
    names = [tmp_path / f"{name}.jsonl" for name in "abc"]
    rows = (tmp_path / "x.jsonl").read_text().splitlines(keepends=True)
    for i, name in enumerate(names):
        name.write_text("".join(rows[i * 60 : (i + 1) * 60]))
    whole, late = {name: name.read_bytes() for name in names}, tmp_path / "d.jsonl"
    folder = tmp_path / "of-three"
    files = [f"{tmp_path}/[abcd].jsonl"]
    config = replace(prepared, data=replace(prepared.data, files=files, path=str(folder)))
    before = prepare(config)

    def flip(name: Path) -> None:
        at = draw.randrange(len(whole[name]))
        name.write_bytes(whole[name][:at] + bytes([whole[name][at] ^ 1 << draw.randrange(8)]) + whole[name][at + 1 :])

    def flip_and_set_back_the_time(name: Path) -> None:
        times = name.stat()
        flip(name)
        os.utime(name, ns=(times.st_atime_ns, times.st_mtime_ns))

    def replace_by_another(name: Path) -> None:
        flip(late)
        late.replace(name)

    whole[late] = whole[names[0]]
    changes = [
        flip, flip_and_set_back_the_time, replace_by_another,
        lambda name: name.write_bytes(whole[name][: draw.randrange(len(whole[name]))]),
        lambda name: name.write_bytes(whole[name] + b"\n"),
        lambda name: name.unlink(),
        lambda name: late.write_bytes(whole[name]),
    ]  # fmt: skip
    harmless = [os.utime, lambda name: name.write_bytes(whole[name]), lambda _: None]
    for _ in range(tried):
        wrong, name = draw.random() < 0.8, draw.choice(names)
        change = draw.choice(changes if wrong else harmless)
        change(name)
        for start in (checked(config), lambda: prepare(config)):
            try:
                start()
            except DataError as error:
                named = late if late.exists() else name
                if not (wrong and str(named) in str(error) and "was prepared" in str(error)):
                    failed.append(str(error))
            else:
                failed += ["accepted"] if wrong else []
        name.write_bytes(whole[name])
        late.unlink(missing_ok=True)
    assert prepare(config) == before
    print(f"a changed source: tried {tried}, held {tried - len(failed)}, failed {len(failed)}")
    assert not failed, failed[:3]


def test_a_preparation_whose_sources_change_gives_what_is_there_in_the_end_or_refuses(
    prepared: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped at a random place, then a file changes or goes: its tokens are those of an undisturbed preparation of
    what is there now, or, if it was read to its end, it is refused by name."""
    monkeypatch.setattr(corpus, "CHUNK_CHARACTERS", 1_500)
    draw, failed, tried = random.Random(f"{SEED} stopped"), [], 12
    flush = token_files.Writer.flush
    rows = (tmp_path / "x.jsonl").read_text().splitlines(keepends=True)
    for number in range(tried):
        here = tmp_path / str(number)
        here.mkdir()
        names = [here / f"{name}.jsonl" for name in "abc"]
        for i, name in enumerate(names):
            name.write_text("".join(rows[i * 60 : (i + 1) * 60]))
        data = replace(prepared.data, files=[f"{here}/*.jsonl"], path=str(here / "tokens"))
        config, name = replace(prepared, data=data), draw.choice(names)
        stop = draw.randint(2, 26)

        def dying(writer: token_files.Writer) -> None:
            nonlocal stop
            stop -= 1
            if stop == 0:
                raise Stopped
            flush(writer)

        with monkeypatch.context() as patch, suppress(Stopped):
            patch.setattr(token_files.Writer, "flush", dying)
            prepare(config)
        progress = read(here / "tokens", "progress.json")
        if draw.random() < 0.5:
            name.write_text("".join(rows[180:200]))
        else:
            name.unlink()
        straight = replace(config, data=replace(data, path=str(here / "straight")))
        try:
            found = prepare(config)
        except DataError as error:
            was_read = progress is None or names.index(name) < progress.position["file"]
            failed += [] if was_read and str(name) in str(error) else [str(error)]
        else:
            same = found == prepare(straight)
            for each in found.files:
                same = same and (here / "tokens" / each).read_bytes() == (here / "straight" / each).read_bytes()
            failed += [] if same else [f"{number}: other tokens"]
    print(f"a source that changes in between: tried {tried}, held {tried - len(failed)}, failed {len(failed)}")
    assert not failed, failed[:3]
