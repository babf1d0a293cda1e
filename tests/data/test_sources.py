"""Text that changes after it was prepared, or while it is."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from whole_config import mistakes, open_data, prepare

from sparsellm import config as configuration
from sparsellm.config import Config
from sparsellm.data import DataError, corpus, preparation, token_files
from sparsellm.data.checksums import VERIFIED
from sparsellm.data.manifest import read, verify
from sparsellm.data.sources import with_current_sources
from sparsellm.distributed.groups import process_group

MakeConfig = Callable[..., Config]


def write(path: Path, texts: list[str], bad: int | None = None) -> Path:
    """`texts` as rows, of which number `bad` cannot be parsed."""
    rows = [json.dumps({"text": text}) for text in texts]
    if bad is not None:
        rows[bad] = rows[bad].replace('"}', '\\ud83d"}')
    path.write_text("\n".join(rows) + "\n")
    return path


@pytest.fixture
def files(tmp_path: Path, texts: list[str]) -> list[Path]:
    """Three files of 200 documents, modified an hour ago."""
    found = []
    for i, name in enumerate("abc"):
        found.append(write(tmp_path / f"{name}.jsonl", texts[i * 200 : (i + 1) * 200]))
        os.utime(found[-1], (1_700_000_000.5, 1_700_000_000.5))
    return found


@pytest.fixture
def config(make_config: MakeConfig, files: list[Path], tmp_path: Path) -> Config:
    return make_config([f"{tmp_path}/*.jsonl"])


def tokens(config: Config) -> dict[str, bytes]:
    folder = Path(config.data.path)
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".tokens", ".documents")}


def replaced(path: Path) -> None:
    """Another text of the same size and modification time."""
    before = path.stat()
    content = path.read_bytes()
    path.write_bytes(content.replace(b"block", b"clock", 1))
    assert path.read_bytes() != content
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_text_that_changed_since_it_was_prepared_is_refused_by_name(config: Config, files: list[Path]) -> None:
    prepare(config)
    assert mistakes(config) == []
    whole = files[1].read_bytes()
    later = files[1].with_name("d.jsonl")
    for change, said in (
        (lambda: replaced(files[1]), f"{files[1]} has changed since"),
        (lambda: files[1].write_bytes(whole + whole), f"{files[1]} has changed since"),
        (lambda: files[1].unlink(), f"{files[1]} was removed since"),
        (lambda: shutil.copy(files[0], later), f"{later} was not there when"),
    ):
        change()
        (found,) = mistakes(config)
        with pytest.raises(DataError) as refusal:
            prepare(config)
        for text in (found, str(refusal.value)):
            assert f"{said} {config.data.path} was prepared" in text
            assert "another data.name" in text
        files[1].write_bytes(whole)
        later.unlink(missing_ok=True)
        assert mistakes(config) == []


def test_a_file_that_was_touched_or_copied_or_not_read_has_not_changed(
    config: Config, files: list[Path], make_config: MakeConfig
) -> None:
    prepare(config)
    os.utime(files[0])
    shutil.copy(files[1], files[1].with_suffix(".copy"))
    files[1].with_suffix(".copy").replace(files[1])
    assert mistakes(config) == []
    part = make_config(config.data.files, path=f"{config.data.path}-part", max_tokens=40)
    assert str(files[1]) not in prepare(part).taken
    replaced(files[1])
    assert mistakes(part) == []
    assert prepare(part).train.tokens < 1_000


def test_the_manifest_of_an_earlier_version_knows_sizes_and_what_is_newer(config: Config, files: list[Path]) -> None:
    prepare(config)
    (Path(config.data.path) / VERIFIED).unlink()
    assert mistakes(config) == []
    replaced(files[0])  # same size, and a modification time before the preparation
    assert mistakes(config) == []
    os.utime(files[0])
    (found,) = mistakes(config)
    assert f"{files[0]} has changed since" in found


def test_a_run_that_has_begun_goes_on_with_its_tokens(
    config: Config,
    files: list[Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    prepare(config)
    replaced(files[0])
    config.run.name, config.run.root = "mine", str(tmp_path / "runs")
    with process_group("cpu") as ranks:
        with pytest.raises(DataError, match="has changed since"):
            open_data(config, ranks)
        config.run.folder.mkdir(parents=True)
        configuration.save(config, config.run.folder / "config.yaml")
        assert mistakes(config) == []
        open_data(config, ranks)
    assert f"{files[0]} has changed since {config.data.path} was prepared: the run continues" in capsys.readouterr().err


def test_tokens_are_read_once_and_again_where_they_changed_or_on_demand(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    from sparsellm.data import checksums

    prepare(config)
    folder, seen, digest_of = Path(config.data.path), [], checksums.digest_of
    monkeypatch.setattr(
        checksums, "digest_of", lambda path, *given: (seen.append(path.name), digest_of(path, *given))[1]
    )
    every = set(read(folder).files)

    def start() -> set[str]:
        seen.clear()
        with process_group("cpu") as ranks:
            open_data(config, ranks)
        return {name if (folder / name).exists() else f"tokenizer/{name}" for name in seen}

    assert start() == set()
    config.data.verify = True
    assert start() == every
    config.data.verify = False
    os.utime(folder / "train.tokens")
    assert start() == {"train.tokens"}
    assert start() == set()
    for damage in ("", "{}", "[", '{"train.tokens": 1}'):
        (folder / VERIFIED).write_text(damage)
        assert start() == every
    with (folder / "train.tokens").open("r+b") as file:
        file.write(b"\xff\x00")
    with pytest.raises(DataError, match=r"train\.tokens is corrupt"):
        start()


def test_a_long_file_is_read_by_threads_and_has_the_checksum_of_its_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import xxhash

    from sparsellm.data import checksums

    monkeypatch.setattr(checksums, "PIECE", 1_000)
    content = os.urandom(100_123)
    (tmp_path / "x").write_bytes(content)
    for size in (0, 1, 999, 1_000, 1_001, 50_000, 100_123):
        assert checksums.digest_of(tmp_path / "x", size).digest() == xxhash.xxh3_64_digest(content[:size])


@pytest.fixture
def failed(config: Config, texts: list[str], monkeypatch: pytest.MonkeyPatch) -> Config:
    """A preparation that ended at a bad record in the middle of the second file, which is partly prepared."""
    monkeypatch.setattr(corpus, "CHUNK_CHARACTERS", 2_000)
    second = Path(config.data.path).with_name("b.jsonl")
    reading = corpus.documents

    def failing(*given: object, **named: object):
        for document in reading(*given, **named):
            if document.file == 1 and document.number == 150:
                raise DataError("b.jsonl has a bad record")
            yield document

    with monkeypatch.context() as patch:
        patch.setattr(corpus, "documents", failing)
        with pytest.raises(DataError, match="a bad record"):
            prepare(config)
    progress = read(second.parent / "prepared", "progress.json")
    assert progress.position["file"] == 1
    assert progress.begun["train"]["tokens"] < progress.train.tokens
    return config


@pytest.mark.parametrize(
    ("remedy", "stopped"),
    [("mended", True), ("gone", False), ("gone", True), ("not named", False), ("later files changed", False)],
)
def test_a_file_that_cannot_be_read_to_its_end_may_be_mended_or_left_out(
    failed: Config, files: list[Path], texts: list[str], make_config: MakeConfig, remedy: str, stopped: bool,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    if remedy == "mended":
        replaced(files[1])
    elif remedy == "gone":
        files[1].unlink()
    elif remedy == "not named":
        failed.data.files = [str(files[0]), str(files[2])]
    else:
        files[2].unlink()
    if stopped:  # between the rollback and the next document
        with monkeypatch.context() as patch:
            patch.setattr(preparation, "_write_tokens", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                prepare(failed)
    manifest = prepare(failed)
    straight = make_config(failed.data.files, path=f"{failed.data.path}-straight")
    assert prepare(straight) == manifest
    assert tokens(straight) == tokens(failed)
    verify(manifest, Path(failed.data.path))
    assert "changed or disappeared: the preparation continues" in capsys.readouterr().out
    assert mistakes(failed) == []


def test_a_file_that_gave_nothing_may_go_before_the_one_being_read(failed: Config, files: list[Path]) -> None:
    folder = Path(failed.data.path)
    progress = read(folder, "progress.json")
    current = str(files[1])
    progress = replace(progress, taken={current: progress.taken[current]})
    progress.begun["position"] = {**progress.position, "document": 0}
    files[0].unlink()
    failed.data.files = [str(file) for file in files[1:]]
    now = with_current_sources(failed.data, folder, progress)
    for position in (now.position, now.begun["position"]):
        assert list(now.source_files)[position["file"]] == current


def test_a_file_that_was_read_to_its_end_may_not_change_and_none_may_come(failed: Config, files: list[Path]) -> None:
    whole = files[0].read_bytes()
    replaced(files[0])
    with pytest.raises(DataError, match=r"a\.jsonl has changed since it was read for"):
        prepare(failed)
    files[0].write_bytes(whole)
    shutil.copy(files[0], files[0].with_name("aa.jsonl"))
    with pytest.raises(DataError, match=r"aa\.jsonl was not there when the preparation of .* started"):
        prepare(failed)


def test_a_file_that_changes_while_it_is_read_is_named(
    config: Config, files: list[Path], make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "CHUNK_CHARACTERS", 2_000)
    reading = corpus.documents

    def meanwhile(*given: object, **named: object):
        for document in reading(*given, **named):
            if document.file == 1 and document.number == 190:
                replaced(files[1])
                os.utime(files[1])
            yield document

    with monkeypatch.context() as patch:
        patch.setattr(corpus, "documents", meanwhile)
        with pytest.raises(DataError, match=r"b\.jsonl was changed while it was being read"):
            prepare(config)
    manifest = prepare(config)
    assert prepare(make_config(config.data.files, path=f"{config.data.path}-straight")) == manifest


@pytest.mark.parametrize("cut", [False, True])
def test_what_runs_read_stays_while_tokens_are_added(
    config: Config, monkeypatch: pytest.MonkeyPatch, make_config: MakeConfig, cut: bool
) -> None:
    monkeypatch.setattr(corpus, "CHUNK_CHARACTERS", 2_000)
    config.data.max_tokens, config.data.validation_fraction = 5_000, 1e-6 if cut else 0.1
    before = prepare(config)
    assert before.cut == cut
    config.data.max_tokens = 12_000
    flush, calls = token_files.Writer.flush, 0

    def failing(writer: token_files.Writer) -> None:
        nonlocal calls
        calls += 1
        if calls == 6:
            raise DataError("a bad record")
        flush(writer)

    with monkeypatch.context() as patch:
        patch.setattr(token_files.Writer, "flush", failing)
        with pytest.raises(DataError, match="a bad record"):
            prepare(config)
    folder = Path(config.data.path)
    assert read(folder) == before
    verify(before, folder)
    fraction = {"validation_fraction": config.data.validation_fraction}
    few = make_config(config.data.files, max_tokens=before.train.tokens, **fraction)
    assert mistakes(few) == []
    straight = make_config(config.data.files, path=f"{config.data.path}-straight", max_tokens=5_000, **fraction)
    prepare(straight)
    straight.data.max_tokens = 12_000
    assert prepare(config) == prepare(straight)
    assert tokens(config) == tokens(straight)
    assert not (folder / "again").exists()
    assert not (folder / "progress.json").exists()
