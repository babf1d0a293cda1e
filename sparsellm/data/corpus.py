"""Documents: finding files, reading documents, and choosing the held-out ones.

Hub files and local files are read as streams: nothing is downloaded before it is needed. A hub file's address contains
its commit. In parquet and jsonl a row is a document; a text file is one document.

A position is `{"file", "document"}`, both counted from 0. Reading resumes from it exactly, by skipping the file's
earlier documents. (The `state_dict` of `datasets` costs the same, and describes the same position differently after
a resume.) shares.py decides which files preparation reads, and how much of each.

The embedded corpus is the documentation of Python's standard library: `pydoc_data.topics` and the docstrings of its
modules, parsed and never imported.
"""

import ast
import glob
import hashlib
import json
import os
import shlex
import sysconfig
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import DatasetCard
from huggingface_hub.errors import EntryNotFoundError, HFValidationError, HTTPError
from tqdm import tqdm

from sparsellm.config import DataConfig, Source
from sparsellm.data.checksums import digest_of_ends
from sparsellm.data.errors import DataError
from sparsellm.data.rows import reader_of, rows
from sparsellm.hf import hub
from sparsellm.system.errors import one_line

Position = dict[str, Any]  # "file", "document", and in a pass (shares.py) "estimate"
Files = dict[str, int | None]  # path or address -> bytes; None: unknown, for hub files

# Documents are tokenized in chunks of about a million tokens, which keep every core busy and take about 150 MB.
CHUNK_CHARACTERS = 4_000_000
MANY_FILES = 1_000  # with at least this many files, a second progress bar counts files
# The end of the message about a record that cannot be read; commands without data.* keys leave it out.
OR_SKIP = ", or skip and count such records with data.skip_bad_records=true"
NOT_DOCUMENTATION = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}

START: Position = {"file": 0, "document": 0}


class Document(NamedTuple):
    text: str | None
    licence: str | None
    file: int
    number: int
    fault: str | None = None  # why the record cannot be read; `text` is then empty
    end: bool = False  # not a document, but the end of a file that has `number` documents
    estimate: tuple[float, ...] | None = None  # shares.Estimate

    def position(self) -> Position:
        return {"file": self.file, "document": self.number}

    def position_after(self) -> Position:
        after = {"file": self.file + 1, "document": 0} if self.end else {**self.position(), "document": self.number + 1}
        return after if self.estimate is None else {**after, "estimate": [*self.estimate]}


def local_files(patterns: Sequence[str], start: Path = Path()) -> tuple[Files, list[str]]:
    """The files that match `patterns` (relative to `start`), sorted, with their sizes; and error messages for patterns.

    A pattern that is the name of an existing file matches that file, even if the name contains brackets.
    """
    files: Files = {}
    mistakes = []
    for pattern in patterns:
        try:
            name = Path(pattern).expanduser()
        except RuntimeError:
            mistakes.append(f"data.files: {pattern} begins with an unknown user: write out the home folder")
            continue
        found = [str(start / name)] if os.path.lexists(start / name) else _matches(name, start)
        if not found:
            literal = Path(str(name).replace("[", "[[]"))
            remedy = "check the path, or quote the pattern"
            if literal != name and _matches(literal, start):
                typed = shlex.quote(f"data.files={json.dumps([str(literal)], ensure_ascii=False)}")
                remedy = f"write a literal [ as [[]: {typed}"
            mistakes.append(f"data.files: nothing matches {pattern!r}: {remedy}")
        for file in tqdm(found, desc=f"looking at {pattern}", unit=" files", delay=5, leave=False):
            path = Path(file)
            if path.is_file():
                files[file] = path.stat().st_size
            elif path.is_dir():
                mistakes.append(f"data.files: {file} is a folder: give its files, for example {file}/*.parquet")
            else:
                mistakes.append(f"data.files: {file} is a dangling link or not a regular file: leave it out")
    files = dict(sorted(files.items()))
    try:
        if files and not mistakes:
            reader_of(list(files))
    except DataError as error:
        mistakes.append(str(error))
    return files, mistakes


def _matches(pattern: Path, start: Path) -> list[str]:
    # PTH207: a pattern may be absolute.
    return glob.glob(str(Path(glob.escape(str(start))) / pattern), recursive=True)  # noqa: PTH207


def ends(files: Files) -> dict[str, str]:
    """The xxh3 of the first and last ENDS bytes of each local file in `files`. Raises DataError if a read fails."""
    local = [name for name in files if "://" not in name]
    with ThreadPoolExecutor(8) as threads:  # a network file system serves several requests at once
        return dict(zip(local, threads.map(_ends, local), strict=True))


def _ends(name: str) -> str:
    try:
        return digest_of_ends(Path(name)).hexdigest()
    except OSError as error:
        raise DataError(f"{name} cannot be read ({error.strerror}): restore the file") from error


def find_files(data: DataConfig) -> Files:
    """The files of `data` in reading order; for source=hub, the hub lists them. Raises DataError if there are none."""
    if data.source == Source.files:
        files, mistakes = local_files(data.files)
        if mistakes:
            raise DataError("; ".join(mistakes))
        return files
    from datasets import load_dataset_builder  # slow to import: a second, because it imports pandas

    name = ", ".join(filter(None, (data.dataset, data.subset, data.revision)))
    require_hub(data)
    builder = partial(load_dataset_builder, data.dataset, data.subset, revision=data.revision)
    try:
        splits = hub.answer(lambda: builder().config.data_files, f"data.dataset={data.dataset}")
    except (OSError, ValueError, RuntimeError, HTTPError) as error:
        raise DataError(
            f"data.dataset={name} cannot be opened ({' '.join(str(error).split())}): check data.dataset, data.subset"
            " and data.revision, or use your own files with data=files"
        ) from error
    if data.split not in splits:
        raise DataError(
            f"the data set {name} has no split {data.split!r}: set data.split to one of {', '.join(splits)}"
        )
    return dict.fromkeys(splits[data.split])


def with_sizes(files: Files) -> Files:
    """`files` with the sizes of hub files, from one listing per folder. Raises DataError if the hub does not answer."""
    import fsspec

    def size(file: str) -> int:
        system, path = fsspec.core.url_to_fs(file)
        return system.info(path)["size"]

    try:
        return {
            file: hub.answer(partial(size, file), file) if known is None else known for file, known in files.items()
        }
    except (OSError, HTTPError) as error:
        raise DataError(f"the sizes of the files cannot be read ({one_line(error)}): run the command again") from error


def require_hub(data: DataConfig) -> None:
    """Raises DataError if the documents of `data` are on the hub, and so never cached, but the hub does not answer."""
    if (
        data.source == Source.hub
        and data.dataset is not None
        and not Path(data.dataset).is_dir()
        and not hub.answers(f"data.dataset={data.dataset}")
    ):
        raise DataError(
            f"data.dataset={data.dataset} cannot be read because the hub does not answer: connect this machine, or"
            " download the files elsewhere and use data=files 'data.files=[FOLDER/*.parquet]'"
        )


def card_licence(dataset: str) -> str | None:
    """The licence in the card of a hub data set, or of a local copy; None if there is no readable card."""
    local_card = Path(dataset) / "README.md"
    try:
        licence = DatasetCard.load(local_card if local_card.is_file() else dataset).data.get("license")
    except (EntryNotFoundError, HFValidationError, HTTPError):
        return None
    return ", ".join(licence) if isinstance(licence, list) else licence


def read(
    files: Sequence[str], text_column: str, position: Position = START, skip_bad_records: bool = False
) -> Iterator[Document]:
    """The documents in `files` from `position` on, one file after the other."""
    for index in range(position["file"], len(files)):
        skip = position["document"] if index == position["file"] else 0
        yield from documents(files[index], index, text_column, skip_bad_records, skip=skip)


def documents(
    file: str, index: int, text_column: str, skip_bad_records: bool, seed: int | None = None, skip: int = 0
) -> Iterator[Document]:
    """The documents in `file` after the first `skip`. `index`: the file's number. `seed` shuffles its blocks (rows.py).

    An unreadable record raises DataError; with `skip_bad_records`, it becomes a document with a fault and no text.
    """
    number, faults = skip, 0
    for number, (text, licence, fault) in enumerate(rows(file, text_column, seed, skip), start=skip + 1):
        if fault is not None:
            if not skip_bad_records:
                raise DataError(f"{file}, {fault}: fix the record{OR_SKIP}")
            faults += 1
            if faults == 1:
                _say(f"{file}, {fault}: skipped, like all further bad records of this file (data.skip_bad_records)")
        yield Document(text, licence, index, number - 1, fault)
    if number == 0:
        _say(f"{file} has no documents and is skipped")
    if faults > 1:
        _say(f"{file}: skipped {faults:,} unreadable records")


def counted(documents: Iterator[Document], files: int) -> Iterator[Document]:
    """Yields `documents`, with a progress bar that counts files and appears after a few seconds."""
    with tqdm(total=files, desc="reading", unit=" files", delay=5, leave=False, disable=files < MANY_FILES) as bar:
        for document in documents:
            if document.file >= bar.n:
                bar.update(document.file + 1 - bar.n)
            yield document


def from_texts(texts: Sequence[str], position: Position = START) -> Iterator[Document]:
    """Documents from strings in memory."""
    for number in range(position["document"], len(texts)):
        yield Document(texts[number], None, 0, number)


def chunks(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """`documents` in lists of at least CHUNK_CHARACTERS characters, except perhaps the last."""
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
    """Whether the document `text` belongs to the validation split. Depends only on its content, so every copy, on every
    machine and in any order, is in the same split."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2**64


def stdlib_docs() -> tuple[list[str], int]:
    """The embedded corpus without duplicates, in a fixed order, and the number of modules that could not be parsed.

    Raises DataError if this Python has no documentation.
    """
    return _stdlib_docs(Path(sysconfig.get_path("stdlib")))


@cache  # preparation calls this function twice
def _stdlib_docs(root: Path) -> tuple[list[str], int]:
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
            except (SyntaxError, ValueError):  # lib2to3 contains Python 2; a few files are broken on purpose
                unparsable += 1
    return list(dict.fromkeys(texts)), unparsable


@cache  # once per process, however often the files are read
def _say(line: str) -> None:
    print(f"sparsellm: {line}", flush=True)


def _parse(path: Path) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in the parsed code
        return ast.parse(path.read_bytes())


def _topics(path: Path) -> dict[str, str]:
    for statement in _parse(path).body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Dict):
            return ast.literal_eval(statement.value)
    raise DataError(f"{path} contains no dictionary of topics: this Python's documentation has an unknown form")


def _docstrings(path: Path) -> list[str]:
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    found = [ast.get_docstring(node) for node in ast.walk(_parse(path)) if isinstance(node, kinds)]
    return [text for text in found if text]
