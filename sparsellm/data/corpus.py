"""Documents: the files that hold them, reading them one after the other, and which ones are held out.

Files of the hub and local files are read alike, as streams: nothing is downloaded before it is reached. A hub file's
address names its commit. In parquet and jsonl a row is a document; a text file is one document.

A position is `{"file", "document"}`, counted from 0 among the files and in the file. Reading goes on from it exactly,
at the cost of passing over the file's earlier documents. (The library's own `state_dict` costs as much, and after a
resume it describes the same place in other words.)

The embedded corpus is the documentation of Python's standard library: `pydoc_data.topics` and the docstrings of its
modules, parsed and never imported.
"""

import ast
import glob
import hashlib
import os
import sysconfig
import warnings
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import fsspec
import pyarrow.parquet
import xxhash
from huggingface_hub import DatasetCard
from huggingface_hub.errors import EntryNotFoundError, HFValidationError

from sparsellm import hub
from sparsellm.config import DataConfig, Source
from sparsellm.data.errors import DataError

if TYPE_CHECKING:
    from datasets import IterableDataset  # a second to import, with pandas: a run on prepared tokens needs neither

Position = dict[str, int]
Files = dict[str, int | None]  # path or address -> bytes; None for the hub, where the address already names the content

# A chunk of documents is tokenized at once: about a million tokens keep every core busy in some 150 MB.
CHUNK_CHARACTERS = 4_000_000
ENDS = 1 << 20  # bytes of a local file, at either end, by which a changed one is noticed
READERS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".txt": "text"}
LICENCE_COLUMNS = ("license", "licence")
UNREADABLE = (OSError, ValueError, EOFError, zlib.error)  # what a damaged file raises, by its kind and its damage
NOT_DOCUMENTATION = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}

START: Position = {"file": 0, "document": 0}


class Document(NamedTuple):
    text: str | None
    licence: str | None
    file: int
    number: int

    def position(self) -> Position:
        return {"file": self.file, "document": self.number}

    def position_after(self) -> Position:
        return {"file": self.file, "document": self.number + 1}


def local_files(patterns: Sequence[str]) -> tuple[Files, list[str]]:
    """The files that `patterns` match, sorted, with their sizes; and what is wrong with the patterns."""
    files: Files = {}
    mistakes = []
    for pattern in patterns:
        found = glob.glob(str(Path(pattern).expanduser()), recursive=True)  # noqa: PTH207 (a pattern may be absolute)
        if not found:
            mistakes.append(f"data.files: nothing matches {pattern!r}: check the path, or quote the pattern")
        for path in found:
            if Path(path).is_dir():
                mistakes.append(f"data.files: {path} is a folder: give its files, as in {path}/*.parquet")
            else:
                files[path] = Path(path).stat().st_size
    files = dict(sorted(files.items()))
    try:
        if files and not mistakes:
            _reader(list(files))
    except DataError as error:
        mistakes.append(str(error))
    return files, mistakes


def ends(files: Files) -> dict[str, str]:
    """Of each local one of `files`, the xxh3 of its first and last ENDS bytes. Raises DataError where a read fails."""
    local = [name for name in files if "://" not in name]
    with ThreadPoolExecutor(8) as threads:  # a network file system answers several at once
        return dict(zip(local, threads.map(_ends, local), strict=True))


def _ends(name: str) -> str:
    try:
        with Path(name).open("rb") as file:
            digest = xxhash.xxh3_64(file.read(ENDS))
            file.seek(max(file.tell(), file.seek(0, os.SEEK_END) - ENDS))
            digest.update(file.read(ENDS))
    except OSError as error:
        raise DataError(f"{name} cannot be read ({error.strerror}): bring the file back as it was") from error
    return digest.hexdigest()


def find_files(data: DataConfig) -> Files:
    """The files of `data`, in the order in which they are read. Asks the hub for source=hub. Raises DataError."""
    if data.source == Source.files:
        files, mistakes = local_files(data.files)
        if mistakes:
            raise DataError("; ".join(mistakes))
        return files
    from datasets import load_dataset_builder

    name = f"{data.dataset}" + (f" ({data.subset})" if data.subset else "")
    require_hub(data)
    try:
        splits = load_dataset_builder(data.dataset, data.subset).config.data_files
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(
            f"data.dataset={name} cannot be opened ({' '.join(str(error).split())}): check data.dataset and"
            " data.subset, or use files of your own with data=files"
        ) from error
    if data.split not in splits:
        raise DataError(
            f"the data set {name} has no split {data.split!r}: set data.split to one of {', '.join(splits)}"
        )
    return dict.fromkeys(splits[data.split])


def require_hub(data: DataConfig) -> None:
    """Raises DataError if the documents of `data` are on the hub, and it does not answer: there are no copies."""
    if (
        data.source == Source.hub
        and data.dataset is not None
        and not Path(data.dataset).is_dir()
        and not hub.answers(f"data.dataset={data.dataset}")
    ):
        raise DataError(
            f"data.dataset={data.dataset} cannot be read, for the hub does not answer: connect this machine, or"
            " download the files elsewhere and use data=files 'data.files=[FOLDER/*.parquet]'"
        )


def card_licence(dataset: str) -> str | None:
    """The licence that the card of a hub data set, or of a local copy of one, names; None without a card."""
    local_card = Path(dataset) / "README.md"
    try:
        licence = DatasetCard.load(local_card if local_card.is_file() else dataset).data.get("license")
    except (EntryNotFoundError, HFValidationError):
        return None
    return ", ".join(licence) if isinstance(licence, list) else licence


def open_file(file: str, text_column: str) -> "IterableDataset | None":
    """A stream of the rows of `file`: the text column, and the licence column if there is one. None if it has no rows.

    Raises DataError for a file that is of another kind or cannot be read, and for a missing column.
    """
    from datasets import IterableDataset

    reader = _reader([file])
    # The library would take a "[" in a local name for a pattern.
    path = file if "://" in file else glob.escape(file)
    try:
        # The library cannot read a parquet file of no rows.
        if file.endswith(".parquet"):
            with fsspec.open(file) as opened:
                if pyarrow.parquet.ParquetFile(opened).metadata.num_rows == 0:
                    return None
        # Not through load_dataset("parquet", ...), which reports each call to a server and waits for it.
        dataset = {
            "parquet": IterableDataset.from_parquet,
            "json": IterableDataset.from_json,
            "text": partial(IterableDataset.from_text, sample_by="document"),
        }[reader](path)
        columns = dataset.column_names
        if not columns:
            if (row := next(iter(dataset), None)) is None:
                return None
            columns = list(row)
    except StopIteration:  # so the library says that a jsonl file is empty
        return None
    except UNREADABLE as error:
        raise DataError(
            f"{file} cannot be read as {reader}: {error}. Bring back a whole copy of the file, or leave the file out"
        ) from error
    if text_column not in columns:
        raise DataError(f"{file} has no column {text_column!r}: set data.text_column to one of {', '.join(columns)}")
    return dataset.select_columns([text_column, *(c for c in LICENCE_COLUMNS if c in columns and c != text_column)])


def read(files: Sequence[str], text_column: str, position: Position = START) -> Iterator[Document]:
    """The documents of `files` from `position` on. A file of no rows is passed over, with a line that says so.

    Raises DataError when reading fails or a text is not a string.
    """
    for index in range(position["file"], len(files)):
        skipped = position["document"] if index == position["file"] else 0
        opened = open_file(files[index], text_column)
        if opened is None:
            _say_empty(files[index])
            continue
        rows = iter(opened)
        for number in count():
            try:
                row = next(rows, None)
            except UNREADABLE as error:
                raise DataError(
                    f"{files[index]} cannot be read to its end: {error}. Bring back a whole copy of the file, or leave"
                    " the file out"
                ) from error
            if row is None:
                break
            text = row[text_column]
            if not isinstance(text, str | None):
                raise DataError(
                    f"data.text_column {text_column!r} of {files[index]} holds {type(text).__name__}: it must hold text"
                )
            if number >= skipped:
                licence = next((row[c] for c in LICENCE_COLUMNS if row.get(c) is not None), None)
                yield Document(text, None if licence is None else str(licence), index, number)


def from_texts(texts: Sequence[str], position: Position = START) -> Iterator[Document]:
    """The same for documents in memory."""
    for number in range(position["document"], len(texts)):
        yield Document(texts[number], None, 0, number)


def chunks(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """`documents` in lists of at least CHUNK_CHARACTERS characters, the last one perhaps less."""
    chunk: list[Document] = []
    characters = 0
    for document in documents:
        chunk.append(document)
        characters += len(document.text or "")
        if characters >= CHUNK_CHARACTERS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


def is_held_out(text: str, fraction: float) -> bool:
    """Whether a document belongs to the validation split: decided by its content alone, so that every copy of it,
    on every machine and in every order, is on the same side."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2**64


def stdlib_docs() -> tuple[list[str], int]:
    """The embedded corpus without duplicates, in a fixed order; and how many modules could not be parsed.

    Raises DataError if this Python came without its documentation.
    """
    root = Path(sysconfig.get_path("stdlib"))
    topics = root / "pydoc_data" / "topics.py"
    if not topics.is_file():
        raise DataError(
            f"{topics} is missing, so this Python has no documentation to train on:"
            " install the whole standard library, or use data=files"
        )
    texts = [text for _, text in sorted(_topics(topics).items())]
    unparsable = 0
    for path in sorted(root.rglob("*.py"), key=lambda p: p.relative_to(root).as_posix()):
        if NOT_DOCUMENTATION.isdisjoint(path.relative_to(root).parts):
            try:
                texts += _docstrings(path)
            except (SyntaxError, ValueError):  # lib2to3 keeps Python 2; a few files are broken on purpose
                unparsable += 1
    return list(dict.fromkeys(texts)), unparsable


@cache  # once in each process, however often the files are read
def _say_empty(file: str) -> None:
    print(f"sparsellm: {file} has no documents, and is passed over", flush=True)


def _reader(files: Sequence[str]) -> str:
    # By the end of the name: "x.jsonl", and "x.jsonl.gz", which the library unpacks.
    kinds = {Path(file.removesuffix(".gz")).suffix.lower() for file in files}
    if unknown := kinds - READERS.keys():
        raise DataError(
            f"files ending in {', '.join(sorted(unknown)) or 'nothing'} cannot be read:"
            f" the ends of names must be one of {', '.join(READERS)}, or these with .gz"
        )
    readers = {READERS[kind] for kind in kinds}
    if len(readers) != 1:
        raise DataError(f"the files are of several kinds ({', '.join(sorted(kinds))}): give one kind at a time")
    return readers.pop()


def _parse(path: Path) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about escapes in other people's strings
        return ast.parse(path.read_bytes())


def _topics(path: Path) -> dict[str, str]:
    for statement in _parse(path).body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Dict):
            return ast.literal_eval(statement.value)
    raise DataError(f"{path} holds no dictionary of topics: this Python's documentation has an unknown form")


def _docstrings(path: Path) -> list[str]:
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    found = [ast.get_docstring(node) for node in ast.walk(_parse(path)) if isinstance(node, kinds)]
    return [text for text in found if text]
