import gzip
import json
from pathlib import Path

import pytest
from datasets import Dataset

from sparsellm.data import DataError, corpus


@pytest.mark.slow
def test_stdlib_docs_is_text_without_duplicates_in_a_fixed_order() -> None:
    texts, unparsable = corpus.stdlib_docs()
    assert len(texts) == len(set(texts)) > 5_000
    assert sum(map(len, texts)) > 1_500_000
    assert texts[0].startswith('The "assert" statement')
    assert any("Return the number of seconds" in text or "namedtuple" in text for text in texts)
    assert unparsable < 50


def test_stdlib_docs_counts_a_module_that_cannot_be_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pydoc_data").mkdir()
    (tmp_path / "pydoc_data" / "topics.py").write_text("topics = {'b': 'second', 'a': 'first'}\n")
    (tmp_path / "good.py").write_text(
        '"""module"""\nclass A:\n    """class"""\n    def f(self):\n        """module"""\n'
    )
    (tmp_path / "broken.py").write_text('"""never read"""\nprint "python 2"\n')
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "test_x.py").write_text('"""never read"""\n')
    monkeypatch.setattr(corpus.sysconfig, "get_path", lambda name: str(tmp_path))
    assert corpus.stdlib_docs() == (["first", "second", "module", "class"], 1)


def test_stdlib_docs_without_documentation_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(DataError, match="no documentation to train on"):
        corpus.stdlib_docs()


def read(files: list[str], column: str = "text") -> list[str | None]:
    return [document.text for document in corpus.read(files, column)]


def test_every_kind_of_file_gives_the_same_documents(tmp_path: Path, texts: list[str], parquet: list[str]) -> None:
    expected = [None if i % 50 == 49 else text for i, text in enumerate(texts)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in expected)
    (tmp_path / "a.jsonl").write_text(lines)
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.write(lines)
    assert read(parquet) == read([str(tmp_path / "a.jsonl")]) == read([str(tmp_path / "b.jsonl.gz")]) == expected


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    folder = tmp_path / "odd [name], a=b"
    folder.mkdir()
    for name, text in (("a.txt", "one\n\ntwo\n"), ("b.txt", "three")):
        (folder / name).write_text(text)
    assert read([str(folder / "a.txt"), str(folder / "b.txt")]) == ["one\n\ntwo\n", "three"]


@pytest.mark.parametrize("stop", [0, 1, 99, 100, 101, 250, 599])
def test_reading_goes_on_from_any_position(stop: int, parquet: list[str]) -> None:
    documents = list(corpus.read(parquet, "text"))
    assert [(d.file, d.number) for d in documents] == [(i // 100, i % 100) for i in range(600)]
    assert list(corpus.read(parquet, "text", documents[stop].position())) == documents[stop:]
    assert list(corpus.read(parquet, "text", documents[stop].position_after())) == documents[stop + 1 :]
    texts = [document.text for document in documents]
    assert [d.text for d in corpus.from_texts(texts, {"file": 0, "document": stop})] == texts[stop:]


def test_chunks_are_bounded_and_lose_nothing(parquet: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "CHUNK_CHARACTERS", 1_000)
    chunks = list(corpus.chunks(corpus.read(parquet, "text")))
    assert [document for chunk in chunks for document in chunk] == list(corpus.read(parquet, "text"))
    sizes = [sum(len(document.text or "") for document in chunk) for chunk in chunks]
    assert len(sizes) > 50
    assert all(1_000 <= size < 2_000 for size in sizes[:-1])


def test_documents_held_out_are_the_fraction_asked_for_and_depend_on_nothing_else(texts: list[str]) -> None:
    held_out = [text for text in texts if corpus.is_held_out(text, 0.1)]
    assert 30 < len(held_out) < 100
    assert held_out == [text for text in texts if corpus.is_held_out(text, 0.1)]
    assert all(corpus.is_held_out(text, 0.5) for text in held_out)


def test_mistakes_about_files_name_what_is_wrong(tmp_path: Path, parquet: list[str]) -> None:
    (tmp_path / "x.csv").write_text("text\n")
    (tmp_path / "x.txt").write_text("text\n")
    _, missing = corpus.local_files([str(tmp_path / "no*.parquet"), str(tmp_path)])
    assert "nothing matches" in missing[0]
    assert "is a folder" in missing[1]
    assert "ending in .csv cannot be read" in corpus.local_files([str(tmp_path / "x.csv")])[1][0]
    assert "several formats (.parquet, .txt)" in corpus.local_files([str(tmp_path / "x.txt"), parquet[0]])[1][0]
    with pytest.raises(DataError, match=r"no column 'content': set data.text_column to one of text, license$"):
        read(parquet, "content")
    with pytest.raises(DataError, match=r"'other' of .*part-0\.parquet holds int"):
        read(parquet, "other")


def test_a_damaged_file_is_named(tmp_path: Path, parquet: list[str]) -> None:
    whole = Path(parquet[0]).read_bytes()
    Path(parquet[0]).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"part-0\.parquet cannot be read as parquet"):
        read(parquet)


def test_a_hub_data_set_is_listed_by_its_configuration_and_split(tmp_path: Path, parquet: list[str]) -> None:
    # A local folder with a card takes the same way through the library as a repository of the hub.
    from sparsellm.config import DataConfig, Source

    card = ["---", "license: odc-by", "configs:", "- config_name: small", "  data_files:", "  - split: train"]
    (tmp_path / "README.md").write_text("\n".join([*card, "    path: part-*.parquet", "---", ""]))
    data = DataConfig(source=Source.hub, dataset=str(tmp_path), subset="small")
    assert list(corpus.find_files(data)) == parquet
    with pytest.raises(DataError, match=r"no split 'test': set data\.split to one of train"):
        corpus.find_files(DataConfig(source=Source.hub, dataset=str(tmp_path), subset="small", split="test"))
    with pytest.raises(DataError, match=r"large.*check data.dataset"):
        corpus.find_files(DataConfig(source=Source.hub, dataset=str(tmp_path), subset="large"))
    assert corpus.card_licence(str(tmp_path)) == "odc-by"
    (tmp_path / "README.md").unlink()
    assert corpus.card_licence(str(tmp_path)) is None


def test_files_without_documents_are_passed_over_and_torn_ones_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = "".join(json.dumps({"text": f"{i} of the documents"}) + "\n" for i in range(100)).encode()
    good, empty, blank, packed, torn = (
        str(tmp_path / f"{name}.jsonl") for name in ("good", "empty", "blank", "p", "t")
    )
    for path, content in (
        (good, lines), (empty, b""), (blank, b"\n\n"), (f"{packed}.gz", gzip.compress(b"")),
        (f"{torn}.gz", gzip.compress(lines)[:-20]),
    ):  # fmt: skip
        Path(path).write_bytes(content)
    assert len(read([empty, good, f"{packed}.gz", blank, good])) == 200
    said = capsys.readouterr().out
    for path in (empty, blank, f"{packed}.gz"):
        assert said.count(f"{path} has no documents and is skipped") == 1
    with pytest.raises(DataError, match=r"t\.jsonl\.gz cannot be read .* Restore an intact copy of the file"):
        read([good, f"{torn}.gz"])
    Dataset.from_dict({"text": []}).to_parquet(str(tmp_path / "none.parquet"))
    Dataset.from_dict({"text": ["one"]}).to_parquet(str(tmp_path / "one.parquet"))
    assert read([str(tmp_path / "none.parquet"), str(tmp_path / "one.parquet")]) == ["one"]


def test_no_files_at_all_are_no_files_of_several_kinds() -> None:
    assert corpus.local_files([]) == ({}, [])


def test_a_bad_record_stops_the_reading_or_is_a_document_without_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bad.jsonl"
    good = [json.dumps({"text": str(i)}) for i in range(6)]
    file.write_text("\n".join([*good[:2], "{", *good[2:4], r'{"text": "\ud83d"}', *good[4:]]))
    reading = corpus.read([str(file)], "text")
    assert [next(reading).text for _ in range(2)] == ["0", "1"]
    with pytest.raises(DataError, match=r"bad\.jsonl, line 3: .* data\.skip_bad_records=true"):
        next(reading)
    documents = list(corpus.read([str(file)], "text", skip_bad_records=True))
    assert [document.text for document in documents] == ["0", "1", None, "2", "3", None, "4", "5"]
    assert [document.number for document in documents if document.fault] == [2, 5]
    for i, document in enumerate(documents):
        after = corpus.read([str(file)], "text", document.position_after(), skip_bad_records=True)
        assert list(after) == documents[i + 1 :]
    said = capsys.readouterr().out
    assert f"{file}, line 3: it is not JSON" in said
    assert f"{file}: skipped 2 unreadable records" in said


def test_a_name_with_brackets_means_the_file_of_that_name(tmp_path: Path) -> None:
    (tmp_path / "c[v2]").mkdir()
    for name in ("c[v2]/a.txt", "b[1].txt", "b1.txt", "a(1) & ü.txt"):
        (tmp_path / name).write_text("text")
    for name in ("b[1].txt", "c[v2]/a.txt", "a(1) & ü.txt"):
        assert list(corpus.local_files([name], tmp_path)[0]) == [str(tmp_path / name)]
    assert corpus.local_files(["b[[]1].txt"], tmp_path)[1] == []
    files, (mistake,) = corpus.local_files(["c[v2]/*.txt"], tmp_path)
    assert files == {}
    assert mistake.endswith("""write a literal [ as [[]: 'data.files=["c[[]v2]/*.txt"]'""")
    assert corpus.local_files(["c[[]v2]/*.txt"], tmp_path)[1] == []
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    assert "gone.txt is a dangling link or not a regular file" in corpus.local_files([str(tmp_path / "gone.txt")])[1][0]
    assert "begins with an unknown user" in corpus.local_files(["~nobody-here/x.txt"])[1][0]
