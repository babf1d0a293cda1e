"""Reads the records in one file in order. A record is a text and its licence, or the reason why it cannot be read.

    .parquet          each row is a record
    .jsonl, .json     each line is a record; in a file that is one JSON list, each item
    .txt              the whole file is a record

Only the text and the licence are used: other columns may hold anything and change types within a file. (The readers of
`datasets` infer the types of all columns from the first 10 MB of a jsonl file and refuse later deviations.) Text is
UTF-8; a byte order mark is removed. Text and jsonl files may be compressed.

With a seed, a file's blocks are shuffled: the row groups of a parquet file, or pieces of BLOCK bytes of an uncompressed
jsonl file. Any other file is a single block. Records within a block keep their order.

An unreadable record becomes a `Row` with a fault, and reading continues after it. An unreadable file raises DataError.
If the hub fails, reading waits and continues at the next record.
"""

import bz2
import codecs
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, count, islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import pyarrow
import pyarrow.parquet
import xxhash

from sparsellm.data.errors import DataError
from sparsellm.data.packed import permutation
from sparsellm.hf import hub
from sparsellm.system.errors import one_line

READERS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".txt": "text"}
COMPRESSIONS: dict[str, Callable[[BinaryIO], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": partial(pyarrow.input_stream, compression="zstd"),
}
LICENCE_COLUMNS = ("license", "licence")
HEAD = 10 << 20  # bytes from the start of a jsonl file in which the text column must appear
READ_AHEAD = 1 << 20
BLOCK = 16 << 20  # bytes of a jsonl file; a line belongs to the block in which it begins
BATCH_ROWS = 100  # parquet rows in memory at once
# Exceptions raised when a damaged file is read, depending on format and damage.
UNREADABLE = (OSError, ValueError, EOFError, KeyError, zlib.error, lzma.LZMAError)
# UTF-32 first, because its byte order mark starts with UTF-16's.
WIDE = {
    codecs.BOM_UTF32_LE: "UTF-32", codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16", codecs.BOM_UTF16_BE: "UTF-16",
}  # fmt: skip


class Row(NamedTuple):
    text: str | None
    licence: str | None = None
    fault: str | None = None  # where the record is in its file, and why it cannot be read


def rows(file: str, text_column: str, seed: int | None = None, skip: int = 0) -> Iterator[Row]:
    """The records in `file`, a path or a hub address, after the first `skip`. `seed` shuffles the file's blocks.

    Raises DataError if the file is unsupported or unreadable, a column is missing, or the hub does not answer.
    """
    attempt = 0
    while True:
        try:
            for row in _rows(file, text_column, seed, skip):
                yield row
                skip, attempt = skip + 1, 0
            return
        except Exception as error:
            if "://" not in file or not hub.is_temporary(error):
                raise
            if not hub.waits(error, file, attempt):
                raise DataError(
                    f"{file} cannot be read because the hub does not answer ({one_line(error)}): run the same command"
                    " again later; it continues where this one stopped"
                ) from error
            attempt += 1


def _rows(file: str, text_column: str, seed: int | None, skip: int) -> Iterator[Row]:
    reader = reader_of([file])
    try:
        if reader == "parquet":
            yield from _parquet(file, text_column, seed, skip)
        else:
            yield from islice(_text(file) if reader == "text" else _json(file, text_column, seed), skip, None)
    except DataError:
        raise
    except UNREADABLE as error:
        if hub.is_temporary(error):
            raise
        raise DataError(
            f"{file} cannot be read as {reader}: {' '.join(str(error).split())}. Restore an intact copy of the file, or"
            " leave the file out"
        ) from error


def reader_of(files: Sequence[str]) -> str:
    """The entry of READERS for `files`. Raises DataError if there is none, or if the files have several formats."""
    kinds = {ending(file) for file in files}
    if unknown := kinds - READERS.keys():
        raise DataError(
            f"files ending in {', '.join(sorted(unknown)) or 'nothing'} cannot be read: the suffix should be one of"
            f" {', '.join(READERS)}, optionally (except .parquet) followed by {', '.join(COMPRESSIONS)}. {_REMEDY}"
        )
    readers = {READERS[kind] for kind in kinds}
    if len(readers) != 1:
        raise DataError(f"the files have several formats ({', '.join(sorted(kinds))}): give files of one format")
    return readers.pop()


_REMEDY = (
    'Unpack archives; convert other files, for example with python -c "import datasets;'
    " datasets.Dataset.from_csv('FILE.csv').to_parquet('FILE.parquet')\" (or Dataset.from_file for .arrow)"
)


def ending(file: str) -> str:
    """The suffix that decides how a file is read: without the compression suffix, if the format may be compressed."""
    name, *ends = file.lower().rpartition("/")[2].rsplit(".", 2)
    if not ends:
        return ""
    inner, last = ends if len(ends) == 2 else (name, *ends)
    if f".{last}" not in COMPRESSIONS:
        return f".{last}"
    # A parquet file compresses its own columns and is read from the end, so the file itself must not be compressed.
    return f".{inner}" if f".{inner}" in READERS.keys() - {".parquet"} else f".{inner}.{last}"


def _binary(file: str) -> BinaryIO:
    if "://" not in file:
        return Path(file).open("rb")
    import fsspec

    return fsspec.open(file, "rb").open()


def _unpacked(file: str) -> io.BufferedReader:
    """The decompressed bytes of `file`. Raises DataError if a byte order mark shows that they are not UTF-8."""
    unpack = COMPRESSIONS.get(Path(file.lower()).suffix)
    raw: Any = _binary(file)
    stream: io.BufferedReader = io.BufferedReader(unpack(raw) if unpack else raw, READ_AHEAD)
    start = stream.peek(4)
    for mark, name in WIDE.items():
        if start.startswith(mark):
            raise DataError(f"{file} is {name}: it should be UTF-8; {_convert(file, name)}")
    return stream


def _convert(file: str, encoding: str) -> str:
    packed = Path(file.lower()).suffix in COMPRESSIONS
    name = str(Path(file).with_suffix("")) if packed else file
    return f"{'unpack and ' if packed else ''}convert the file (iconv -f {encoding} -t UTF-8 {name} > NEW)"


def _not_utf8(error: UnicodeDecodeError, file: str) -> str:
    byte = error.object[error.start]
    return f"the byte 0x{byte:02x} is not UTF-8; if the text is Latin-1, {_convert(file, 'LATIN1')}"


def _shuffled(blocks: int, file: str, seed: int | None) -> list[int]:
    """The order of the blocks in `file`, which depends on the file's name but not on its folder."""
    if seed is None:
        return list(range(blocks))
    return permutation(blocks, seed, xxhash.xxh3_64_intdigest(Path(file).name.encode())).tolist()


def _text(file: str) -> Iterator[Row]:
    with _unpacked(file) as stream:
        try:
            text = io.TextIOWrapper(stream, "utf-8-sig").read()
        except UnicodeDecodeError as error:
            line = error.object[: error.start].count(b"\n") + 1
            yield Row(None, fault=f"line {line}: {_not_utf8(error, file)}")
        else:
            yield Row(text)


def _parquet(file: str, text_column: str, seed: int | None, skip: int) -> Iterator[Row]:
    with _binary(file) as opened:
        # pre_buffer: fetch a row group's column from the hub in a few large requests.
        parquet = pyarrow.parquet.ParquetFile(opened, pre_buffer="://" in file)
        if parquet.metadata.num_rows == 0:
            return
        kinds = {field.name: field.type for field in parquet.schema_arrow}
        if text_column not in kinds:
            texts = {name: "" if _is_text(kind) else 0 for name, kind in kinds.items()}
            raise DataError(_no_column(file, text_column, texts))
        if not _is_text(kinds[text_column]):
            raise DataError(
                f"data.text_column {text_column!r} of {file} holds {kinds[text_column]}: it should hold text; set"
                " data.text_column to another one, or write the text to a separate column"
            )
        names = [text_column, *(name for name in LICENCE_COLUMNS if name in kinds and name != text_column)]
        sizes = [parquet.metadata.row_group(i).num_rows for i in range(parquet.num_row_groups)]
        ends = list(accumulate(sizes))
        for group in _shuffled(len(sizes), file, seed):
            skip, skipped = max(0, skip - sizes[group]), min(skip, sizes[group])
            if skipped == sizes[group]:
                continue
            number = ends[group] - sizes[group]
            for batch in parquet.iter_batches(BATCH_ROWS, row_groups=[group], columns=names):
                columns = [batch.column(name) for name in names]
                for i in range(min(skipped, batch.num_rows), batch.num_rows):
                    try:
                        text, *licences = (column[i].as_py() for column in columns)
                    except UnicodeDecodeError as error:
                        byte = error.object[error.start]
                        yield Row(None, fault=f"row {number + i + 1}: the byte 0x{byte:02x} is not UTF-8")
                    else:
                        yield Row(text, _licence(licences))
                skipped = max(0, skipped - batch.num_rows)
                number += batch.num_rows


def _is_text(kind: pyarrow.DataType) -> bool:
    types = pyarrow.types
    if isinstance(kind, pyarrow.BaseExtensionType):
        kind = kind.storage_type
    if types.is_dictionary(kind):
        kind = kind.value_type
    return any(is_it(kind) for is_it in (types.is_string, types.is_large_string, types.is_string_view, types.is_null))


class _Record(NamedTuple):
    """A line of a jsonl file, or an item of a JSON list."""

    row: Row
    value: Any  # the parsed JSON; None if it cannot be read
    size: int = 0  # bytes; 0 for an item of a list, because the whole list is in memory


def _json(file: str, text_column: str, seed: int | None) -> Iterator[Row]:
    with _unpacked(file) as stream:
        is_list = stream.peek(1).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")
        records = _items(stream, file, text_column) if is_list else _lines(stream, file, text_column, seed)
        yield from _head(records, file, text_column)
        for record in records:
            yield record.row


def _head(records: Iterator[_Record], file: str, text_column: str) -> Iterator[Row]:
    """The rows up to the first one with a text, or those in the first HEAD bytes. Raises DataError if these rows show
    that the column is missing or holds something other than text."""
    head: list[Row] = []
    seen: dict[str, Any] = {}  # columns seen so far, each with a sample value if there was one
    size = 0
    for row, value, length in records:
        head.append(row)
        if isinstance(value, dict):
            seen |= {name: found for name, found in value.items() if seen.get(name) is None}
        if row.text is not None or (size := size + length) > HEAD:
            break
    if seen and text_column not in seen:
        raise DataError(_no_column(file, text_column, seen))
    if not isinstance(found := seen.get(text_column), str | None):
        remedy = _lifted(file, text_column, found) or "set data.text_column to another one"
        raise DataError(
            f"data.text_column {text_column!r} of {file} holds {_named(found)}: it should hold text; {remedy}"
        )
    return iter(head)


def _items(stream: io.BufferedReader, file: str, text_column: str) -> Iterator[_Record]:
    content = stream.read()
    try:
        items = json.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(f"{file} cannot be read as json, from line {line} on: {_not_utf8(error, file)}") from error
    for number, item in enumerate(items, start=1):
        value = {"text": item} if isinstance(item, str) else item
        try:
            yield _Record(_row(value, text_column), value)
        except ValueError as error:
            yield _Record(Row(None, fault=f"item {number}: {_reason(error)}"), value)


def _lines(stream: io.BufferedReader, file: str, text_column: str, seed: int | None) -> Iterator[_Record]:
    if seed is None or Path(file.lower()).suffix in COMPRESSIONS:
        yield from _lines_between(stream, 0, None, file, text_column)
        return
    size = stream.seek(0, io.SEEK_END)
    for block in _shuffled(-(-size // BLOCK), file, seed):
        start = stream.seek(block * BLOCK)
        if block > 0:  # skip the rest of the line that began earlier
            stream.seek(start - 1)
            start += len(stream.readline()) - 1
        yield from _lines_between(stream, start, (block + 1) * BLOCK, file, text_column)


def _lines_between(
    stream: io.BufferedReader, start: int, end: int | None, file: str, text_column: str
) -> Iterator[_Record]:
    """The lines of `file` that begin in bytes `start` to `end` - 1. `stream` must be positioned at `start`."""
    at, before = start, None
    for number in count(start=1):
        # Do not keep the line while its record is in use, because a line may take gigabytes.
        if (end is not None and at >= end) or (record := _line(stream.readline(), file, text_column)) is None:
            return
        at += record.size
        if record.row.fault is not None:
            before = _line_breaks(file, start) if before is None else before
            record = record._replace(row=Row(None, fault=f"line {before + number}: {record.row.fault}"))
        if record.row is not _BLANK:
            yield record


def _line_breaks(file: str, end: int) -> int:
    """The line breaks in the first `end` bytes of `file`. Reads all of them, so it is used only for messages."""
    with _binary(file) as opened:
        return sum(opened.read(min(READ_AHEAD, end - at)).count(b"\n") for at in range(0, end, READ_AHEAD))


_BLANK = Row(None)


def _line(line: bytes, file: str, text_column: str) -> _Record | None:
    """The record in `line`, whose row is _BLANK if the line is blank. None if `line` is empty, after the last line."""
    if not line:
        return None
    content = line.removeprefix(codecs.BOM_UTF8)  # concatenated files have several byte order marks
    if not content or content.isspace():
        return _Record(_BLANK, None, len(line))
    value, broken = None, None
    try:
        try:
            text = content.decode()
        except UnicodeDecodeError as error:  # harmless if the invalid bytes are in another column
            text, broken = content.decode(errors="surrogateescape"), error
        value = json.loads(text)
        row = _row(value, text_column)
    except (ValueError, RecursionError) as error:
        reason = _reason(error) if broken is None else _not_utf8(broken, file)
        if value is None and not line.endswith(b"\n"):
            reason += "; the file ends here and may be truncated"
        elif value is None and content.strip() in (b"{", b"["):
            reason += f"; each line should hold a whole record (jq -c . {file} > NEW)"
        row = Row(None, fault=reason)
    return _Record(row, value, len(line))


def _row(value: Any, text_column: str) -> Row:
    """The row of a parsed record. Raises ValueError if `value` is not an object, or if its text is not a string."""
    if not isinstance(value, dict):
        raise ValueError(f"it holds {_named(value)}: it should hold an object")
    text = value.get(text_column)
    if not isinstance(text, str | None):
        raise ValueError(f"{text_column!r} holds {_named(text)}: it should hold text")
    licence = _licence(value.get(name) for name in LICENCE_COLUMNS if name != text_column)
    for found in (text, licence):
        if found is not None and not found.isascii():
            found.encode()
    return Row(text, licence)


def _licence(values: Any) -> str | None:
    found = next((value for value in values if value is not None), None)
    return None if found is None else str(found)


def _reason(error: Exception) -> str:
    if isinstance(error, UnicodeEncodeError):
        return f"it contains an unpaired surrogate ({ascii(error.object[error.start])[1:-1]})"
    if isinstance(error, json.JSONDecodeError):
        return f"it is not JSON from column {error.colno} on ({error.msg})"
    return f"its JSON cannot be read ({error})" if isinstance(error, RecursionError) else str(error)


def _named(value: Any) -> str:
    """The type of a JSON value, in words, for messages."""
    if isinstance(value, dict):
        return f"an object ({', '.join(map(str, value))})"
    kinds = {list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
    return kinds.get(type(value), "null")


def _no_column(file: str, text_column: str, columns: dict[str, Any]) -> str:
    """The message for a missing column. `columns`: the existing columns, each with a sample value."""
    texts = [name for name, value in columns.items() if isinstance(value, str)]
    remedies = [f"set data.text_column to one of {', '.join(texts)}"] if texts else []
    remedies += [lifted for name, value in columns.items() if (lifted := _lifted(file, name, value))]
    others = f", and none of its columns ({', '.join(columns)}) holds text" if not texts else ""
    said = f"{file} has no column {text_column!r}{others}: {', or '.join(remedies) or 'give other files'}"
    return said.encode(errors="backslashreplace").decode()  # names may contain bytes that are not valid text


def _lifted(file: str, name: str, value: Any) -> str | None:
    """A remedy that extracts the text nested in `value`, a sample from the column `name`; None if there is no text."""
    fields = value.items() if isinstance(value, dict) else ()
    inner = next((key for key, found in fields if isinstance(found, str)), None)
    if inner is None:
        return None
    return f"write {name}.{inner} to a separate column (jq -c '{{text: .{name}.{inner}}}' {file} > NEW.jsonl)"
