import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer
from whole_config import mistakes, prepare

from sparsellm import config as configuration
from sparsellm.config import Config, DataConfig, Source, TrainingConfig
from sparsellm.data import DataError, corpus, preparation, tokenizer
from sparsellm.data.manifest import read, verify, write
from sparsellm.system import locks

MakeConfig = Callable[..., Config]


def contents(folder: Path) -> dict[str, str]:
    """sha256 of everything that was prepared."""
    files = [
        path for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in ("lock", "verified.json")
    ]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def documents_in(folder: Path, split: str) -> list[list[int]]:
    tokens = np.fromfile(folder / f"{split}.tokens", "<u2").tolist()
    starts = np.fromfile(folder / f"{split}.documents", "<i8").tolist()
    return [tokens[a:b] for a, b in zip(starts, [*starts[1:], len(tokens)], strict=True)]


def test_every_document_is_in_its_split_once_and_ends_with_end_of_text(
    make_config: MakeConfig, parquet: list[str], texts: list[str]
) -> None:
    config = make_config(parquet)
    manifest = prepare(config)
    folder = Path(config.data.path)
    vocabulary = tokenizer.load(config.data.tokenizer)
    kept = [text for i, text in enumerate(texts) if i % 50 != 49]
    for split, held_out in (("train", False), ("validation", True)):
        expected = [text for text in kept if corpus.is_held_out(text, 0.1) == held_out]
        found = documents_in(folder, split)
        assert sorted(found) == sorted(map(list, tokenizer.encode(vocabulary, expected)))
        assert all(document[-1] == manifest.end_of_text_id == 0 for document in found)
        counts = getattr(manifest, split)
        assert (counts.documents, counts.tokens) == (len(expected), sum(map(len, found)))
        # Blocks of 32 + 1 tokens, one starting every 32; the tail is not in any block.
        assert counts.blocks == (counts.tokens - 1) // 32 > 1
        assert counts.dropped_tail == counts.tokens - (counts.blocks * 32 + 1) < 32
    assert manifest.empty_documents == 12
    assert manifest.licences == {"MIT": 300, "CC0": 288}  # the documents without text are odd, and not counted
    assert manifest.exhausted
    assert not manifest.cut
    assert manifest.recipe["data.source"] == "files"
    assert manifest.tokenizer_hash == hashlib.sha256((folder / "tokenizer" / "tokenizer.json").read_bytes()).hexdigest()
    assert AutoTokenizer.from_pretrained(folder / "tokenizer").eos_token_id == 0
    assert read(folder) == manifest
    assert mistakes(config) == []


def test_max_tokens_stops_at_the_document_that_reaches_it_and_more_can_be_added(
    make_config: MakeConfig, parquet: list[str], tmp_path: Path
) -> None:
    whole = make_config(parquet, path=str(tmp_path / "whole"))
    total = prepare(whole).train.tokens
    everything = sorted(documents_in(tmp_path / "whole", "train"))
    limited = make_config(parquet, max_tokens=1_000)
    first = prepare(limited)
    kept = documents_in(Path(limited.data.path), "train")
    assert sum(map(len, kept)) == first.train.tokens >= 1_000 > first.train.tokens - len(kept[-1])
    assert not first.exhausted

    limited.data.max_tokens = 5_000
    (found,) = mistakes(limited)
    assert f"holds {first.train.tokens:,} of the 5,000 requested training tokens" in found
    assert prepare(limited).train.tokens >= 5_000
    assert documents_in(Path(limited.data.path), "train")[: len(kept)] == kept
    limited.data.max_tokens = total + 1
    assert prepare(limited).exhausted
    assert sorted(documents_in(Path(limited.data.path), "train")) == everything
    assert mistakes(limited) == []


def test_the_default_amount_is_what_the_experiment_reads(make_config: MakeConfig, parquet: list[str]) -> None:
    config = make_config(parquet, max_tokens=None)
    manifest = prepare(config)
    assert manifest.train.blocks >= 10 * 8
    assert manifest.train.tokens < 10 * 8 * 32 + 1 + 1_000


def test_a_finished_folder_is_left_alone(make_config: MakeConfig, parquet: list[str]) -> None:
    config = make_config(parquet)
    manifest = prepare(config)
    before = {path: path.stat().st_mtime_ns for path in Path(config.data.path).rglob("*")}
    for file in parquet:
        Path(file).unlink()  # the tokens outlive their source
    assert prepare(config) == manifest
    assert before == {path: path.stat().st_mtime_ns for path in Path(config.data.path).rglob("*")}
    assert mistakes(config) == []


PREPARE_AND_DIE = """
import os, signal, sys
from pathlib import Path
from sparsellm import config as configuration
from sparsellm.data import Request, corpus
import sparsellm.data.preparation as module
corpus.CHUNK_CHARACTERS = 2_000
config = configuration.load(Path(sys.argv[1]))
writes, fatal, half = 0, int(sys.argv[2]), sys.argv[3] == "half"
Writer = module.token_files.Writer
flush, write = Writer.flush, module.write
def dying_write(*arguments):
    global writes
    writes += 1
    if writes == fatal and not half:
        os.kill(os.getpid(), signal.SIGKILL)
    write(*arguments)
def dying_flush(writer):
    if writes + 1 == fatal and half:
        writer.tokens = writer.tokens[: len(writer.tokens) // 2]
        flush(writer)
        os.kill(os.getpid(), signal.SIGKILL)
    flush(writer)
Writer.flush, module.write = dying_flush, dying_write
module.prepare(Request.of(config))
"""


@pytest.mark.slow
def test_killed_at_any_instant_it_goes_on_to_the_same_bytes(
    make_config: MakeConfig, parquet: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "CHUNK_CHARACTERS", 2_000)
    straight = make_config(parquet, path=str(tmp_path / "straight"))
    expected = prepare(straight)
    config = make_config(parquet)
    configuration.save(config, tmp_path / "config.yaml")
    # Before anything is recorded, within a chunk's files, between its files and progress.json.
    for fatal, how in ((1, "whole"), (4, "half"), (7, "whole")):
        command = [sys.executable, "-c", PREPARE_AND_DIE, str(tmp_path / "config.yaml"), str(fatal), how]
        killed = subprocess.run(command, capture_output=True, text=True)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        assert read(Path(config.data.path)) is None
        if fatal > 1:
            (found,) = mistakes(config)
            assert "its preparation has not finished; run python -m sparsellm.prepare_data" in found
    assert read(Path(config.data.path), "progress.json").train.documents > 0
    assert prepare(config) == expected
    assert contents(Path(config.data.path)) == contents(tmp_path / "straight")


def test_stopped_between_the_last_document_and_the_manifest_it_adds_nothing(
    make_config: MakeConfig, parquet: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    direct = make_config(parquet, max_tokens=1_000, path=str(tmp_path / "direct"))
    prepare(direct)
    config = make_config(parquet, max_tokens=1_000)
    with monkeypatch.context() as patch:
        patch.setattr(preparation, "compare", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepare(config)
    prepare(config)
    assert contents(Path(config.data.path)) == contents(tmp_path / "direct")


def test_a_hub_data_set_is_prepared_with_the_licence_of_its_card(
    make_config: MakeConfig, parquet: list[str], tmp_path: Path
) -> None:
    # A local copy of a repository uses the same code path of the library as one on the hub.
    (tmp_path / "README.md").write_text("---\nlicense: odc-by\n---\n")
    config = make_config([], source=Source.hub, dataset=str(tmp_path))
    manifest = prepare(config)
    assert manifest.licence == "odc-by"
    assert list(manifest.source_files) == parquet
    assert manifest.train.documents > 500
    assert mistakes(config) == []


def test_a_kill_at_the_very_end_leaves_a_finished_folder(make_config: MakeConfig, parquet: list[str]) -> None:
    config = make_config(parquet)
    manifest = prepare(config)
    folder = Path(config.data.path)
    (folder / "progress.json").write_bytes((folder / "manifest.json").read_bytes())
    assert prepare(config) == manifest


@pytest.mark.slow
def test_two_processes_do_not_prepare_the_same_folder_at_once(
    make_config: MakeConfig, parquet: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(parquet)
    configuration.save(config, tmp_path / "config.yaml")
    slow = (
        "import sys, time; from pathlib import Path; from sparsellm import config;"
        "from sparsellm.data import Request, prepare;"
        "import sparsellm.data.preparation as module; write = module.write;"
        "module.write = lambda *a: (write(*a), time.sleep(1));"
        "prepare(Request.of(config.load(Path(sys.argv[1]))))"
    )
    other = subprocess.Popen([sys.executable, "-c", slow, str(tmp_path / "config.yaml")])
    progress = Path(config.data.path) / "progress.json"
    while not progress.exists():
        assert other.poll() is None
        time.sleep(0.02)
    manifest = prepare(config)
    assert "another process is preparing" in capsys.readouterr().out
    assert other.wait() == 0
    verify(manifest, Path(config.data.path))


@pytest.mark.parametrize("name", ["train.tokens", "validation.tokens", "train.documents", "tokenizer/tokenizer.json"])
def test_a_changed_byte_is_found_and_named(make_config: MakeConfig, parquet: list[str], name: str) -> None:
    config = make_config(parquet)
    manifest = prepare(config)
    folder = Path(config.data.path)
    verify(manifest, folder)
    with (folder / name).open("r+b") as file:
        file.seek(100)
        byte = file.read(1)[0]
        file.seek(100)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(DataError, match=rf"prepared/{name} is corrupt .* delete"):
        verify(manifest, folder)


def test_a_truncated_or_missing_file_is_named_without_reading(make_config: MakeConfig, parquet: list[str]) -> None:
    config = make_config(parquet)
    prepare(config)
    folder = Path(config.data.path)
    os.truncate(folder / "train.tokens", 1_000)
    (folder / "validation.documents").unlink()
    found = mistakes(config)
    assert len(found) == 2
    assert "train.tokens has 1,000 bytes" in found[0]
    assert "validation.documents is missing" in found[1]


@pytest.mark.parametrize("damage", ['{"version": 1}', "{", '{"version": 2}', ""])
def test_a_damaged_manifest_is_named(make_config: MakeConfig, parquet: list[str], damage: str) -> None:
    config = make_config(parquet)
    prepare(config)
    (Path(config.data.path) / "manifest.json").write_text(damage)
    (found,) = mistakes(config)
    assert "manifest.json" in found
    assert "damaged" in found or "layout version 2" in found
    with pytest.raises(DataError, match=r"manifest\.json"):
        prepare(config)


@pytest.mark.parametrize("finished", [True, False])
def test_other_keys_than_it_was_prepared_with_are_refused_by_name(
    make_config: MakeConfig, parquet: list[str], finished: bool
) -> None:
    config = make_config(parquet)
    prepare(config)
    if not finished:
        (Path(config.data.path) / "manifest.json").rename(Path(config.data.path) / "progress.json")
    config.data.validation_fraction = 0.2
    config.data.text_column = "other"
    with pytest.raises(DataError) as refusal:
        prepare(config)
    for found in (mistakes(config), [str(refusal.value)]):
        assert len(found) == 1
        assert "data.validation_fraction was 0.1, now it is 0.2" in found[0]
        assert "data.text_column was 'text', now it is 'other'" in found[0]
        assert "tokenizer" not in found[0]


def test_more_tokens_are_refused_where_a_file_that_was_read_changed_and_taken_where_another_one_did(
    make_config: MakeConfig, parquet: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(parquet, max_tokens=100, validation_fraction=0.5)  # a file's share is less than a document
    first = prepare(config)
    assert not first.cut
    unread = [file for file in parquet if file not in first.taken]
    whole, other = Path(parquet[0]).read_bytes(), Path(parquet[4]).read_bytes()
    Path(parquet[0]).write_bytes(other)
    config.data.max_tokens = 2_000
    with pytest.raises(DataError, match=r"part-0\.parquet has changed since .*: prepare the current text"):
        prepare(config)
    Path(parquet[0]).write_bytes(whole)
    Path(unread[0]).write_bytes(other)
    assert prepare(config).train.tokens >= 2_000
    assert f"{unread[0]}, not completely read" in capsys.readouterr().out


def test_damage_is_found_before_a_folder_is_extended(make_config: MakeConfig, parquet: list[str]) -> None:
    config = make_config(parquet, max_tokens=1_000)
    prepare(config)
    with (Path(config.data.path) / "train.tokens").open("r+b") as file:
        file.write(b"\xff\x00")
    config.data.max_tokens = 2_000
    with pytest.raises(DataError, match=r"train\.tokens is corrupt"):
        prepare(config)


def test_vocabulary_and_size_are_held_against_the_run(make_config: MakeConfig, parquet: list[str]) -> None:
    config = make_config(parquet)
    prepare(config)
    config.model.vocab_size = 399
    config.training.sequence_length = 1_000_000
    found = mistakes(config)
    assert len(found) == 2
    assert "a block of training.sequence_length 1000000 takes 1,000,001 of each: shorten" in found[0]
    assert "has 400 ids, but model.vocab_size is 399" in found[1]


def test_a_local_tokenizer_that_changed_since_is_refused(
    make_config: MakeConfig, parquet: list[str], tmp_path: Path, texts: list[str]
) -> None:
    folder = tmp_path / "mine"
    tokenizer.save(tokenizer.train(texts, 400), folder)
    config = make_config(parquet, tokenizer=str(folder))
    prepare(config)
    assert mistakes(config) == []
    tokenizer.save(tokenizer.train(texts[:300], 390), folder)
    (found,) = mistakes(config)
    assert f"the tokenizer of data.tokenizer={folder} has changed since" in found


def test_everything_missing_is_listed_with_the_command_to_run(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config([str(tmp_path / "no" / "*.parquet")], tokenizer=str(tmp_path / "no" / "tokenizer"))
    found = mistakes(config)
    assert len(found) == 3
    assert "there are no prepared tokens; run python -m sparsellm.prepare_data" in found[0]
    assert f"data.path={config.data.path}" in found[0]
    assert "nothing matches" in found[1]
    assert "does not exist" in found[2]
    assert not Path(config.data.path).exists()


def test_a_vocabulary_above_65536_is_stored_as_uint32(
    make_config: MakeConfig, parquet: list[str], tokenizer_folder: Path, tmp_path: Path
) -> None:
    large = tokenizer.load(str(tokenizer_folder))
    large.tokenizer.add_tokens([f"<extra {i}>" for i in range(65_537 - 400)] + ["neuron"])
    tokenizer.save(large, tmp_path / "large")
    config = make_config(parquet, tokenizer=str(tmp_path / "large"), max_tokens=500)
    config.model.vocab_size = 65_538
    manifest = prepare(config)
    tokens = np.fromfile(Path(config.data.path) / "train.tokens", "<u4")
    assert manifest.token_dtype == "<u4"
    assert len(tokens) == manifest.train.tokens
    assert tokens.max() == manifest.vocab_size - 1 == 65_537


def test_real_text_with_the_smollm2_tokenizer(shared_data: Path, tmp_path: Path) -> None:
    config = Config(
        data=DataConfig(
            source=Source.files,
            files=[str(shared_data / "text" / "part-00000.parquet")],
            tokenizer=str(shared_data / "tokenizer"),
            path=str(tmp_path / "text"),
            max_tokens=300_000,
            validation_fraction=0.05,
        ),
        training=TrainingConfig(sequence_length=512),
    )
    manifest = prepare(config)
    assert 300_000 <= manifest.train.tokens < 700_000
    assert manifest.vocab_size == 49_152
    assert mistakes(config) == []
    decoded = AutoTokenizer.from_pretrained(tmp_path / "text" / "tokenizer").decode(
        documents_in(tmp_path / "text", "train")[0]
    )
    assert decoded.endswith("<|endoftext|>")
    assert decoded.removesuffix("<|endoftext|>") in {each.text for each in corpus.read(config.data.files, "text")}


def test_a_source_file_with_one_changed_byte_is_refused_when_more_is_wanted(
    make_config: MakeConfig, texts: list[str], tmp_path: Path
) -> None:
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for file, some in zip(files, (texts[:300], texts[300:]), strict=True):
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in some))
    config = make_config([str(file) for file in files], max_tokens=1_000)
    assert list(prepare(config).source_checksums) == [str(file) for file in files]
    config.data.max_tokens = 2_000
    whole = files[0].read_bytes()
    files[0].write_bytes(whole.replace(b"sparse", b"sparsf", 1))
    with pytest.raises(DataError, match=r"a\.jsonl has changed since .* was prepared, .*restore the old text"):
        prepare(config)
    files[0].write_bytes(whole)
    assert prepare(config).train.tokens >= 2_000


def test_files_without_documents_are_counted_also_after_a_stop(
    make_config: MakeConfig, texts: list[str], tmp_path: Path
) -> None:
    names = [tmp_path / f"{i}.jsonl" for i in range(6)]
    for i, name in enumerate(names):
        some = texts[i * 100 : (i + 1) * 100] if i in (1, 4) else []
        name.write_text("".join(json.dumps({"text": text}) + "\n" for text in some))
    config = make_config([str(name) for name in names], max_tokens=1_000)
    assert prepare(config).empty_files == 0  # files whose share is nothing are not read
    config.data.max_tokens = 10**6
    assert prepare(config).empty_files == 4
    assert prepare(make_config(config.data.files, path=str(tmp_path / "direct"))).empty_files == 4


def test_what_a_kill_right_before_the_end_left_is_removed_unless_the_folder_is_in_use(
    make_config: MakeConfig, parquet: list[str]
) -> None:
    config = make_config(parquet, max_tokens=5_000)
    manifest, folder = prepare(config), Path(config.data.path)
    write(manifest, folder, "progress.json")
    with (folder / "lock").open("w") as file:
        locks.take(file)
        assert prepare(config) == manifest
        assert (folder / "progress.json").exists()
    assert prepare(config) == manifest
    assert not (folder / "progress.json").exists()


def test_a_disk_that_is_full_before_a_folder_grows_leaves_its_tokens_to_go_on_from(
    make_config: MakeConfig, parquet: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = prepare(make_config(parquet, max_tokens=5_000))

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match=f"it continues after the {before.train.tokens:,} training tokens"):
        prepare(make_config(parquet, max_tokens=12_000))


@pytest.mark.parametrize("fatal", [1, 2, 3, 5, 9, 14, 20, 40])
def test_a_full_disk_is_one_sentence_and_the_same_call_goes_on(
    make_config: MakeConfig, parquet: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fatal: int
) -> None:
    monkeypatch.setattr(corpus, "CHUNK_CHARACTERS", 10_000)
    straight = make_config(parquet, path=str(tmp_path / "straight"))
    expected = prepare(straight)
    config = make_config(parquet)
    calls, fsync = 0, os.fsync

    def full(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls >= fatal:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(DataError) as refusal:
            prepare(config)
    said = str(refusal.value)
    assert said.startswith(f"data.path={config.data.path} cannot be written because the disk is full (No space left")
    assert "MiB are free there" in said
    assert ("run the same command again: it continues after the" in said) == Path(config.data.path).exists()
    assert not list(tmp_path.rglob("*.partial"))
    assert prepare(config) == expected
    assert contents(Path(config.data.path)) == contents(tmp_path / "straight")
