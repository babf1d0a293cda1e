"""A data set of twelve parquet files, one of each Common Crawl dump, read from a stand-in for the hub."""

import itertools
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from small_hub import FIRST, NAME, SECOND, SmallHub, serving
from whole_config import mistakes, prepare

from sparsellm.config import Config, Source
from sparsellm.data import DataError, Manifest, corpus, encoding, preparation, tokenizer
from sparsellm.data.manifest import read
from sparsellm.data.stream import TokenStream
from sparsellm.hf import hub as hub_module

MakeConfig = Callable[..., Config]
DUMPS = [f"CC-MAIN-20{13 + i}-{10 + i}" for i in range(12)]
FILES = ("train.tokens", "train.documents", "validation.tokens", "validation.documents", "manifest.json")


def write_dumps(folder: Path, seed: int) -> Path:
    """Twelve files of 60 to 140 documents with the columns of smollm-corpus/fineweb-edu-dedup, ten in a row group."""
    draw = random.Random(seed)
    words = ["block", "token", "stream", "épreuve", "sparse", "42", "(x)", "neuron", "layer\n", "gate", "the", "of"]
    (folder / "data").mkdir(parents=True)
    (folder / "README.md").write_text("---\nlicense: odc-by\n---\n")
    for i, dump in enumerate(DUMPS):
        texts = [f"{dump} {j}: {' '.join(draw.choices(words, k=draw.randint(5, 60)))}" for j in range(60 + 7 * i)]
        rows = [
            {
                "text": text,
                "id": f"<urn:uuid:{i}-{j}>",
                "metadata": {
                    "date": f"20{13 + i}-05-18T10:00:00Z", "dump": dump, "file_path": f"s3://{dump}/{j}.warc.gz",
                    "int_score": 3, "language": "en", "language_score": 0.9, "score": 3.1, "token_count": len(text),
                    "url": f"https://example.org/{draw.random()}",
                },
            }
            for j, text in enumerate(texts)
        ]  # fmt: skip
        name = f"train-{i:05d}-of-00012.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "data" / name, row_group_size=10)
    return folder


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("dumps")
    return {FIRST: write_dumps(folder / "first", 0), SECOND: write_dumps(folder / "second", 1)}


@pytest.fixture
def hub(dumps: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallHub]:
    monkeypatch.setattr(corpus, "CHUNK_CHARACTERS", 2_000)
    with serving(dumps, tmp_path / "cache", monkeypatch) as served:
        yield served


@pytest.fixture
def make(make_config: MakeConfig, tmp_path: Path, hub: SmallHub) -> MakeConfig:
    """A configuration of the data set: `make(name, **data)`."""

    def config(name: str, **data: object) -> Config:
        values = {"source": Source.hub, "dataset": NAME, "max_tokens": 6_000, "path": str(tmp_path / name)}
        return make_config([], **{**values, **data})

    return config


def content(config: Config) -> dict[str, bytes]:
    return {name: (config.data.folder / name).read_bytes() for name in FILES}


def texts_in(config: Config) -> list[str]:
    """The training documents in order."""
    folder = config.data.folder
    tokens, starts = np.fromfile(folder / "train.tokens", "<u2"), np.fromfile(folder / "train.documents", "<i8")
    found = tokenizer.load(str(folder / "tokenizer")).tokenizer
    return found.decode_batch([each.tolist() for each in np.split(tokens, starts[1:])])


def shares_of(manifest: Manifest) -> list[float]:
    """What each file gave, compared with its share by size."""
    sizes, total = manifest.source_files, sum(manifest.source_files.values())
    return [manifest.taken[name]["tokens"] / manifest.train.tokens * total / size for name, size in sizes.items()]


def test_every_dump_gives_its_share_and_each_file_is_opened_once(make: MakeConfig, hub: SmallHub) -> None:
    config = make("prepared", validation_fraction=0.02)
    manifest = prepare(config)
    assert 6_000 <= manifest.train.tokens < 6_100
    assert not manifest.exhausted
    assert manifest.licence == "odc-by"
    assert list(manifest.source_files) == [
        f"hf://datasets/{NAME}@{SECOND}/data/train-{i:05d}-of-00012.parquet" for i in range(12)
    ]
    # A document has 60 tokens at most, and a file's share is 300 or more.
    assert all(0.75 < share < 1.25 for share in shares_of(manifest)), shares_of(manifest)
    texts = texts_in(config)
    assert len(set(texts)) == len(texts) == manifest.train.documents
    of = [text.split()[0] for text in texts]
    assert list(dict.fromkeys(of)) == DUMPS  # one file after the other
    assert of == sorted(of)
    assert all(manifest.taken[name]["documents"] >= of.count(dump) > 0
               for name, dump in zip(manifest.source_files, DUMPS, strict=True))  # fmt: skip
    # Row groups of ten, shuffled, in which documents keep their order.
    numbers = {dump: [int(text.split()[1].rstrip(":")) for text in texts if text.startswith(dump)] for dump in DUMPS}
    assert sum(found[0] < 10 for found in numbers.values()) < 6
    for found in numbers.values():
        assert all(a < b for a, b in itertools.pairwise(found) if a // 10 == b // 10)
    # The footer, and the column once for each of its row groups; the first file is tried before anything is written.
    assert all(count <= 5 for name, count in hub.reads.items() if "00000-of" not in name)
    assert len(hub.reads) == 12
    assert mistakes(config) == []


@pytest.mark.parametrize("cores", [1, 2])
def test_killed_at_any_time_it_goes_on_to_the_same_bytes_with_one_and_two_tokenizing_processes(
    make: MakeConfig, monkeypatch: pytest.MonkeyPatch, cores: int
) -> None:
    straight = make("straight")
    prepare(straight)
    monkeypatch.setattr(encoding, "PATIENCE", 4_000)  # two chunks
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setenv(encoding.PARALLELISM, "false")  # victims are forked from a process with a tokenizer's threads
    config, write = make("killed"), preparation.write
    for fatal in (2, 3, 5):
        calls = []

        def dying(*arguments: object, fatal: int = fatal, calls: list = calls) -> None:
            calls.append(None)
            if len(calls) == fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            write(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(preparation, "write", dying)
            victim = multiprocessing.get_context("fork").Process(target=prepare, args=(config,))
            victim.start()
            victim.join()
        assert victim.exitcode == -signal.SIGKILL
    assert 0 < read(config.data.folder, "progress.json").train.tokens < 6_000
    prepare(config)
    assert content(config) == content(straight)


def test_a_revision_is_chosen_and_belongs_to_the_tokens(make: MakeConfig, dumps: dict[str, Path]) -> None:
    old = make("old", revision=FIRST)
    manifest = prepare(old)
    assert all(f"@{FIRST}/" in name for name in manifest.source_files)
    texts = {
        document.text for file in (dumps[FIRST] / "data").iterdir() for document in corpus.read([str(file)], "text")
    }
    assert set(texts_in(old)) < texts
    latest = make("latest")
    prepare(latest)
    assert not texts & set(texts_in(latest))
    (found,) = mistakes(make("old"))
    assert f"data.revision was '{FIRST}', now it is None" in found
    with pytest.raises(DataError, match=r"cannot be opened .*check data\.dataset, data\.subset and data\.revision"):
        prepare(make("wrong", revision="c" * 40))


def test_a_hub_that_fails_is_waited_for_and_then_reported_in_a_sentence(
    make: MakeConfig, hub: SmallHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    straight = make("straight")
    prepare(straight)
    config, waited = make("waiting"), []
    monkeypatch.setattr(time, "sleep", waited.append)
    # The library itself tries six times, so these are two failures of each kind.
    hub.fails_after = hub.reads.total() + 9
    hub.fails = ["stalls"] * 12 + ["hangs up"] * 12 + ["503"] * 12 + ["504"] * 6
    prepare(config)
    assert content(config) == content(straight)
    said = capsys.readouterr().err
    assert "ReadTimeout" in said
    assert said.count("the hub does not answer (") == 7
    assert "trying again in 2 s" in said
    assert set(hub_module.PATIENCE[:2]) <= set(waited)
    # For good: one sentence, the tokens stay, and the same command goes on.
    config = make("ending")
    hub.fails_after, hub.fails = hub.reads.total() + 9, ["503"] * 1_000
    with pytest.raises(DataError) as refusal:
        prepare(config)
    assert "cannot be read because the hub does not answer (" in str(refusal.value)
    assert "run the same command again later; it continues where this one stopped" in str(refusal.value)
    assert read(config.data.folder, "progress.json").train.tokens > 0
    hub.fails = []
    prepare(config)
    assert content(config) == content(straight)


def test_a_stream_holds_out_sequences_of_every_dump(make: MakeConfig, hub: SmallHub, tokenizer_folder: Path) -> None:
    stream = TokenStream(
        files=corpus.find_files(make("stream").data), ends={}, text_column="text", tokenizer_folder=tokenizer_folder,
        validation_fraction=0.1, sequence_length=32, share=1, rank=0, world_size=1, seed=0, workers=0, pin_memory=False,
    )  # fmt: skip
    found = stream.validation(48)
    assert found.shape == (48, 33)
    text = tokenizer.load(str(tokenizer_folder)).tokenizer.decode(found.flatten().tolist())
    assert all(dump in text for dump in DUMPS)
    assert len(hub.reads) == 12
