"""The records of one file: what is read, what is ignored, and how an unreadable record is reported."""

import bz2
import codecs
import gzip
import itertools
import json
import lzma
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import fsspec
import pyarrow
import pyarrow.parquet
import pytest

from sparsellm.data import DataError
from sparsellm.data.rows import Row, reader_of, rows


def written(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    return str(path)


def lines(*records: object) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def read(file: str, column: str = "text") -> list[str | None]:
    return [row.text for row in rows(file, column)]


@pytest.mark.parametrize(
    ("early", "late"),
    [
        ({"meta": None}, {"meta": "x"}), ({"meta": {"a": 1}}, {"meta": {"b": 2}}), ({"meta": [1]}, {"meta": ["x"]}),
        ({"date": "2024-01-02"}, {"date": "unknown"}), ({"n": 1}, {"n": 2**70}), ({}, {"license": "mit"}),
    ],
)  # fmt: skip
def test_other_columns_may_change_their_types_anywhere_in_a_jsonl_file(
    tmp_path: Path, early: dict[str, object], late: dict[str, object]
) -> None:
    text = "word " * 2_500  # so that the second half starts after the library's first block of 10 MB
    records = [{"text": f"{text}{i}", **(early if i < 850 else late)} for i in range(1_700)]
    found = list(rows(written(tmp_path / "a.jsonl", lines(*records)), "text"))
    assert [row.text for row in found] == [record["text"] for record in records]
    assert [row.licence for row in found] == [record.get("license") for record in records]


def test_other_columns_of_parquet_may_hold_what_no_reader_knows(tmp_path: Path) -> None:
    texts = [f"text {i}" for i in range(250)]
    pairs = pyarrow.array([[("a", "b")]] * 250, pyarrow.map_(pyarrow.string(), pyarrow.string()))
    features = {"info": {"features": {"x": {"_type": "OfALaterVersion"}}}}
    table = pyarrow.table(
        {"text": pyarrow.array(texts).dictionary_encode(), "headers": pairs, "license": ["mit"] * 250}
    )
    table = table.replace_schema_metadata({"huggingface": json.dumps(features)})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=120)
    assert list(rows(str(tmp_path / "a.parquet"), "text")) == [Row(text, "mit") for text in texts]


def test_a_column_of_text_may_lack_values_or_hold_none(tmp_path: Path) -> None:
    file = written(tmp_path / "a.jsonl", lines({"id": 1}, {"text": None}, {"text": "one"}, {"id": 2}))
    assert list(rows(file, "text")) == [Row(None), Row(None), Row("one"), Row(None)]
    assert read(written(tmp_path / "b.json", b'[{"text": "one"}, {"id": 2}]')) == ["one", None]
    assert read(written(tmp_path / "c.json", b' ["one", "two"]')) == ["one", "two"]
    assert read(written(tmp_path / "d.jsonl", b'\n{"text": "2024-01-02"}\r\n \n{"text": "x"}')) == ["2024-01-02", "x"]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json", "a.jsonl.gz", "a.txt.gz"])
def test_a_byte_order_mark_is_no_text(tmp_path: Path, name: str) -> None:
    content = {"a.txt": b"one", "a.json": b'["one"]'}.get(name.removesuffix(".gz"), lines({"text": "one"}))
    packed = gzip.compress if name.endswith(".gz") else bytes
    assert read(written(tmp_path / name, packed(codecs.BOM_UTF8 + content))) == ["one"]
    if "jsonl" in name:  # of files that were joined
        assert read(written(tmp_path / name, packed((codecs.BOM_UTF8 + content) * 2))) == ["one", "one"]
    for encoding in ("utf-16", "utf-32"):
        wide = written(tmp_path / name, packed(content.decode().encode(encoding)))
        unpacked = wide.removesuffix(".gz")
        with pytest.raises(DataError, match=f"is {encoding.upper()}: .*iconv -f {encoding.upper()} .* {unpacked} >"):
            read(wide)


@pytest.mark.parametrize(
    ("ending", "pack"),
    [("gz", gzip.compress), ("bz2", bz2.compress), ("xz", lzma.compress), ("zst", pyarrow.Codec("zstd").compress)],
)
def test_every_compression_is_read_in_several_parts_and_torn_ones_are_refused(
    tmp_path: Path, ending: str, pack: Callable[[bytes], bytes]
) -> None:
    content = lines(*({"text": str(i)} for i in range(500)))
    packed = bytes(pack(content))
    file = written(tmp_path / f"a.jsonl.{ending}", packed * 2)
    assert read(file) == [str(i) for i in range(500)] * 2
    with pytest.raises(DataError, match=r"cannot be read as json: .* Restore an intact copy"):
        read(written(tmp_path / f"a.jsonl.{ending}", packed[:-10]))
    with pytest.raises(DataError, match=r"cannot be read as json: .* Restore an intact copy"):
        read(written(tmp_path / f"a.jsonl.{ending}", content))


GOOD = b'{"text": "one"}\n'


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (rb'{"text": "\ud83d"}', r"it contains an unpaired surrogate (\ud83d)"),
        (b'{"text": "r\xefver"}', "the byte 0xef is not UTF-8; if the text is Latin-1, convert the file (iconv -f"),
        (b'{"text": "a', "it is not JSON from column 12 on"),
        (b"[1]", "it holds a list: it should hold an object"),
        (b'{"text": 5}', "'text' holds a number: it should hold text"),
        (b'{"text": ' + b"[" * 100_000, "its JSON cannot be read"),
        (b"{", "each line should hold a whole record (jq -c ."),
    ],
)
def test_a_bad_record_is_named_by_its_line_and_the_others_are_read(tmp_path: Path, bad: bytes, said: str) -> None:
    head = b'{"text": "' + b"x" * (11 << 20) + b'"}\n\n'  # a blank line is not a record, but counts as a line
    found = list(rows(written(tmp_path / "a.jsonl", head + GOOD * 48 + bad + b"\n" + GOOD), "text"))
    assert [bool(row.fault) for row in found] == [False] * 49 + [True, False]
    fault = found[49].fault
    assert fault is not None
    assert fault.startswith("line 51: ")
    assert said in fault
    assert found[50] == Row("one")


def test_bad_bytes_of_another_column_do_not_matter(tmp_path: Path) -> None:
    assert read(written(tmp_path / "a.jsonl", b'{"x": "\xef", "text": "one"}\n{"x": "\\ud83d", "text": "two"}')) == [
        "one", "two",
    ]  # fmt: skip


def test_bad_bytes_of_text_and_parquet_are_named_by_line_and_row(tmp_path: Path) -> None:
    (row,) = rows(written(tmp_path / "a.txt", b"one\ntwo\r\nr\xefver\n"), "text")
    assert row.fault is not None
    assert row.fault.startswith("line 3: the byte 0xef is not UTF-8")
    raw = pyarrow.array([b"one"] * 130 + [b"r\xefver", b"two"]).cast(pyarrow.binary())
    text = pyarrow.Array.from_buffers(pyarrow.string(), len(raw), raw.buffers())
    pyarrow.parquet.write_table(pyarrow.table({"text": text}), tmp_path / "a.parquet")
    found = list(rows(str(tmp_path / "a.parquet"), "text"))
    assert [i for i, row in enumerate(found) if row.fault] == [130]
    assert found[130].fault == "row 131: the byte 0xef is not UTF-8"
    assert found[131] == Row("two")


def test_where_the_text_is_instead_is_said(tmp_path: Path) -> None:
    nested = written(tmp_path / "n.jsonl", lines({"doc": {"text": "one"}}))
    lifted = rf"jq -c '{{text: \.doc\.text}}' {nested} > NEW\.jsonl"
    for column in ("text", "doc"):
        with pytest.raises(DataError, match=lifted):
            read(nested, column)
    with pytest.raises(DataError, match=r"no column 'text': set data\.text_column to one of body$"):
        read(written(tmp_path / "b.jsonl", lines({"body": "one", "id": 1})))
    with pytest.raises(DataError, match=r"none of its columns \(id\) holds text: give other files"):
        read(written(tmp_path / "c.jsonl", lines({"id": 1})))


@pytest.mark.parametrize(
    ("name", "said"),
    [("a.csv", ".csv"), ("a.parquet.zst", ".parquet.zst"), ("a.arrow", ".arrow"), ("a", "nothing"), ("a.gz", ".a.gz")],
)
def test_other_kinds_of_files_are_refused_with_what_to_do(name: str, said: str) -> None:
    with pytest.raises(DataError, match=rf"files ending in {said} cannot be read.*to_parquet"):
        reader_of([name])


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_a_long_document_is_in_memory_once_when_it_is_used(tmp_path: Path, name: str) -> None:
    text = "word " * 2_000_000
    file = written(tmp_path / name, lines({"text": text}) if name == "a.jsonl" else text.encode())
    list(rows(written(tmp_path / "small.jsonl", GOOD), "text"))  # imports
    tracemalloc.start()
    try:
        reading = rows(file, "text")
        row = next(reading)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert row.text == text
    assert held < 1.5 * len(text)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.txt", "a.parquet"])
def test_an_address_is_read_as_a_file_is(tmp_path: Path, name: str) -> None:
    texts = ["one", "two"] if "txt" not in name else ["one"]
    content = b"one" if "txt" in name else lines(*({"text": text, "other": 1} for text in texts))
    if name == "a.parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": texts, "other": [1, 2]}), tmp_path / name)
        content = (tmp_path / name).read_bytes()
    elif name.endswith(("gz", "zst")):
        content = gzip.compress(content) if name.endswith("gz") else bytes(pyarrow.Codec("zstd").compress(content))
    memory = fsspec.filesystem("memory")
    memory.pipe(f"/{name}", content)
    assert read(f"memory://{name}") == read(written(tmp_path / name, content)) == texts


@pytest.fixture(params=["parquet", "jsonl"])
def blocks(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file of 250 records in about ten blocks; in jsonl, blank lines and a line longer than several blocks."""
    texts = [f"{i} " + "word " * (500 if i == 100 else i % 7) for i in range(250)]
    monkeypatch.setattr("sparsellm.data.rows.BLOCK", 700)
    if request.param == "jsonl":
        return written(tmp_path / "a.jsonl", b"\n".join(lines({"text": text}) for text in texts))
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet", row_group_size=27)
    return str(tmp_path / "a.parquet")


def test_a_seed_shuffles_the_blocks_of_a_file_and_any_record_can_be_the_first(blocks: str) -> None:
    in_order, found = list(rows(blocks, "text")), list(rows(blocks, "text", 7))
    assert [int(row.text.split()[0]) for row in in_order] == list(range(250))
    assert sorted(found) == sorted(in_order)
    numbers = [int(row.text.split()[0]) for row in found]
    jumps = sum(b != a + 1 for a, b in itertools.pairwise(numbers))
    assert 5 <= jumps <= 20
    assert found != list(rows(blocks, "text", 8))
    for skip in (0, 1, 26, 27, 28, 100, 249, 250):
        assert list(rows(blocks, "text", 7, skip)) == found[skip:]
        assert list(rows(blocks, "text", None, skip)) == in_order[skip:]


def test_the_order_of_blocks_does_not_depend_on_the_folder(blocks: str, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    copy = written(tmp_path / "other" / Path(blocks).name, Path(blocks).read_bytes())
    assert list(rows(copy, "text", 7)) == list(rows(blocks, "text", 7))


@pytest.mark.parametrize("blocks", ["jsonl"], indirect=True)
def test_a_bad_record_in_a_shuffled_block_is_named_by_its_line_in_the_file(blocks: str) -> None:
    records = Path(blocks).read_bytes().split(b"\n")
    for line in (0, 200, 400):
        records[line] = b"{"
    faults = sorted(row.fault for row in rows(written(Path(blocks), b"\n".join(records)), "text", 7) if row.fault)
    assert [fault.split(":")[0] for fault in faults] == ["line 1", "line 201", "line 401"]
