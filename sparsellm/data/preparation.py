"""Tokenizes documents to disk, once for any number of runs; manifest.py describes the layout.

Every few chunks of documents, the files are synced to disk and progress.json records how far they are valid. After a
kill, the next start verifies them against the checksums in progress.json, truncates them to that point and continues,
so the result is byte-identical, and damage is detected instead of sealed in. A finished folder is changed only if more
tokens are requested than it holds: then it is extended, which keeps its tokens.

Source files that were read completely must not change. The file that is being read, and later ones, may change or
disappear (a file with a bad record has to be fixed): its documents are rolled back, and it is read again from the
start.

A stream that is cut (manifest.py) is cut at the end, in place. A start after a kill between the cut and the manifest,
and an extension, restart from the first document, which is cheap because a cut means few documents. So the result
always equals that of one uninterrupted preparation.

What runs read stays valid until the extension is complete, even if it is killed or fails: an extension appends, and
manifest.json counts only the old tokens until the end. The extension of a cut stream is built in the folder again/,
whose files then replace the old ones.
"""

import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from sparsellm.config import SHORTEST_SEQUENCE, DataConfig, Source
from sparsellm.data import corpus, encoding, sources, tokenizer
from sparsellm.data.checksums import VERIFIED, Verified, digest_of, stamp
from sparsellm.data.corpus import Document
from sparsellm.data.errors import DataError
from sparsellm.data.manifest import (
    DOCUMENT_BYTES,
    DOCUMENT_DTYPE,
    SPLITS,
    Manifest,
    Split,
    blocks,
    checksums,
    checksums_of_tokenizer,
    compare,
    corrupt,
    is_enough,
    longest_sequence,
    read,
    size_mistakes,
    tokenizer_names,
    tokens_to_cut,
    verify,
    write,
)
from sparsellm.data.request import Request
from sparsellm.data.tokenizer import Vocabulary
from sparsellm.system import locks, regular
from sparsellm.system.files import sync

# Characters at the start of the text on which a tokenizer is trained: a few seconds, less than 1 GB of memory. In
# pieces, because one text of ten million characters would take twice the memory.
TOKENIZER_CHARACTERS, TOKENIZER_PIECE = 10_000_000, 100_000
AGAIN = "again"  # subfolder in which a cut stream is extended


def preparation_mistakes(request: Request) -> list[str]:
    """Everything that keeps tokens from being prepared and can be known with no network and no writes."""
    data, folder = request.data, request.data.folder
    if data.mix:
        return [
            "data.mix combines tokens that are already prepared: prepare each source separately (data=NAME), without"
            " data.mix"
        ]
    if data.streaming:
        return [
            "data.streaming=true tokenizes while training, so there is nothing to prepare: set data.streaming=false"
        ]
    try:
        if _is_made_again(folder):
            return []  # `prepare` takes what was made
        ready = read(folder)
        started = ready or read(folder, "progress.json")
    except DataError as error:
        return [str(error)]
    if ready is not None:
        found = request.recipe_mistakes(ready) + size_mistakes(ready, folder)
        found = found or [sources.refusal(change, folder) for change in sources.changes(ready, folder)]
    elif started is not None:
        found = request.recipe_mistakes(_with_files_of(request, started))
    if started is not None:
        found = found or request.vocabulary_mistakes(started.vocab_size)
        return found or request.changed_tokenizer_mistakes(started)
    return request.source_mistakes()


def _with_files_of(request: Request, manifest: Manifest) -> Manifest:
    """An unfinished `manifest` with data.files of `request`; `_with_sources_of_now` decides whether it can continue
    with these."""
    key = "data.files"
    if key not in manifest.recipe or key not in request.recipe:
        return manifest
    return replace(manifest, recipe=manifest.recipe | {key: request.recipe[key]})


def prepare(request: Request) -> Manifest:
    """Fill `data.path` with at least `request.token_limit` training tokens (or all that exist) and the held-out
    documents in between; return the manifest. Returns at once if that is done already. Raises DataError, and leaves
    nothing behind if no document was prepared or the text is too short for a block of each split. After a full disk,
    prepared tokens stay, and the next call continues from there.
    """
    folder, limit = request.data.folder, request.token_limit
    if not request.data.streaming and _is_made_again(folder):
        with _exclusive(folder), _writing(folder, limit, []):
            if _is_made_again(folder):
                _take_place(folder)
    if mistakes := preparation_mistakes(request):
        raise DataError("; ".join(mistakes))
    ready, started = read(folder), None
    if ready is not None and is_enough(ready, limit):
        return ready
    if ready is None and not (folder / "progress.json").exists():
        started = _start(request)  # before anything is written, so that failures leave nothing
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    with _exclusive(folder), _writing(folder, limit, made):
        # Another process may have prepared this folder while this one waited.
        done, progress = read(folder), read(folder, "progress.json")
        if done is not None and is_enough(done, limit):
            return done
        if done is not None:
            verify(done, folder)  # otherwise new checksums would cover old damage
            if done.cut:
                return _prepare_again(request, folder, done)
        # If both exist, an extension was stopped, or a preparation at its very end: then they agree.
        before = progress
        if done is not None and (progress is None or not _is_ahead(progress, done)):
            before = replace(done, extends=True)
        if before is not None:
            manifest, vocabulary, documents = _continue(request, folder, before)
        else:
            manifest, vocabulary, documents = started or _start(request)
            tokenizer.save(vocabulary, folder / "tokenizer")
            manifest.files = checksums_of_tokenizer(folder)
        write(manifest, folder, "progress.json")

        try:
            _write_tokens(request.data.validation_fraction, folder, manifest, vocabulary, documents, limit)
        except DataError:
            reached = read(folder, "progress.json")
            if not manifest.extends and reached is not None and reached.position == corpus.START:
                _remove(folder, made)
            raise
        compare(manifest, folder, list(manifest.files), verified := Verified(folder))
        if held_out := tokens_to_cut(manifest):
            if longest_sequence(manifest) < manifest.sequence_length:
                _remove(folder, made)
                raise DataError(_too_short(manifest))
            write(_from_the_start(manifest), folder, "progress.json")
            _cut(folder, manifest, held_out)
            manifest.files = checksums(folder, manifest.files, verified)
            verified.keep()
        manifest.extends, manifest.begun = False, None
        for split in (manifest.train, manifest.validation):
            split.blocks = blocks(split.tokens, manifest.sequence_length)
            split.dropped_tail = max(0, split.tokens - 1) - split.blocks * manifest.sequence_length
        manifest.files = dict(sorted(manifest.files.items()))
        write(manifest, folder, "manifest.json")
        (folder / "progress.json").unlink()
    return manifest


def _is_ahead(progress: Manifest, done: Manifest) -> bool:
    """Whether `progress`, an extension of `done`, holds more tokens."""
    now, then = progress.position, done.position
    if now is None or then is None:
        return False
    return (now["file"], now["document"]) > (then["file"], then["document"])


def _prepare_again(request: Request, folder: Path, done: Manifest) -> Manifest:
    """Extend the cut stream `done` in its locked `folder`."""
    _with_sources_of_now(request.data, folder, done)  # otherwise the new tokens would not contain the old ones
    again = folder / AGAIN
    if read(again, "progress.json") is None:
        shutil.rmtree(again, ignore_errors=True)
        shutil.copytree(folder / "tokenizer", again / "tokenizer")
        write(_from_the_start(replace(done, extends=True)), again, "progress.json")
    manifest = prepare(replace(request, data=replace(request.data, path=str(again))))
    _take_place(folder)
    return manifest


def _is_made_again(folder: Path) -> bool:
    """Whether again/ is finished, or was never started."""
    return (folder / AGAIN).is_dir() and not (folder / AGAIN / "progress.json").exists()


def _take_place(folder: Path) -> None:
    """Move the files of again/ to the locked `folder`; a start after a kill completes this."""
    again = folder / AGAIN
    for name in [*(name for split in SPLITS for name in (f"{split}.tokens", f"{split}.documents")), "manifest.json"]:
        if (again / name).exists():
            (again / name).replace(folder / name)
    sync(folder)
    shutil.rmtree(again)
    (folder / "progress.json").unlink(missing_ok=True)


def _start(request: Request) -> tuple[Manifest, Vocabulary, Iterator[Document]]:
    data = request.data
    files: corpus.Files = {}
    licence, unparsable, characters = None, 0, None
    if data.source == Source.stdlib_docs:
        texts, unparsable = corpus.stdlib_docs()
        vocabulary = tokenizer.train(texts, data.tokenizer_vocab_size)
        characters = sum(map(len, texts))
        documents = corpus.from_texts(texts)
    else:
        if data.tokenizer is not None:
            vocabulary = tokenizer.load(data.tokenizer, request.tokenizer_key)
            if found := request.vocabulary_mistakes(tokenizer.vocabulary_size(vocabulary)):
                raise DataError("; ".join(found))
            tokenizer.say_form(vocabulary, f"{request.tokenizer_key}={data.tokenizer}")
        files = corpus.find_files(data)
        from_start = partial(corpus.read, list(files), data.text_column, skip_bad_records=data.skip_bad_records)
        if data.tokenizer is None:
            documents = corpus.counted(from_start(), len(files))
            vocabulary, characters = _trained_tokenizer(documents, data.tokenizer_vocab_size)
        else:
            next(from_start(), None)  # detect a wrong column before anything is written
        documents = corpus.counted(from_start(), len(files))
        if data.source == Source.hub:
            assert data.dataset is not None
            licence = corpus.card_licence(data.dataset)
    manifest = Manifest(
        recipe=request.recipe,
        source_files=files,
        tokenizer_hash=tokenizer.digest(vocabulary),
        vocab_size=tokenizer.vocabulary_size(vocabulary),
        end_of_text_id=tokenizer.end_of_text_id(vocabulary),
        begin_of_text_id=tokenizer.begin_of_text_id(vocabulary),
        sequence_length=request.training.sequence_length,
        licence=licence,
        unparsable_modules=unparsable,
        tokenizer_characters=characters,
    )
    return manifest, vocabulary, documents


def _trained_tokenizer(documents: Iterable[Document], vocab_size: int) -> tuple[Vocabulary, int]:
    """A tokenizer trained on the first TOKENIZER_CHARACTERS characters of `documents`, and the number of characters."""
    texts, characters = [], 0
    for document in documents:
        text = (document.text or "")[: TOKENIZER_CHARACTERS - characters]
        texts += [text[i : i + TOKENIZER_PIECE] for i in range(0, len(text), TOKENIZER_PIECE)]
        characters += len(text)
        if characters == TOKENIZER_CHARACTERS:
            break
    print(
        f"data.tokenizer is null: training a tokenizer of {vocab_size:,} ids on the first {characters:,} characters"
        " of the text.",
        flush=True,
    )
    return tokenizer.train(texts, vocab_size), characters


def _continue(request: Request, folder: Path, manifest: Manifest) -> tuple[Manifest, Vocabulary, Iterator[Document]]:
    """Hub files are those of the commit with which preparation started; unfinished local files may have changed."""
    data = request.data
    compare(manifest, folder, tokenizer_names(manifest))
    corpus.require_hub(data)
    manifest = _with_sources_of_now(data, folder, manifest)
    if not manifest.extends:
        manifest = replace(_with_files_of(request, manifest), sequence_length=request.training.sequence_length)
    vocabulary = tokenizer.load(str(folder / "tokenizer"), "data.path")
    if manifest.tokenizer_hash not in tokenizer.digests(vocabulary):
        raise DataError(f"{folder}/tokenizer has changed since preparation started: delete {folder} and prepare again")
    if data.source == Source.stdlib_docs:
        documents = corpus.from_texts(corpus.stdlib_docs()[0], manifest.position)
    else:
        files = list(manifest.source_files)
        rest = corpus.read(files, data.text_column, manifest.position, skip_bad_records=data.skip_bad_records)
        documents = corpus.counted(rest, len(files))
    return manifest, vocabulary, documents


def _with_sources_of_now(data: DataConfig, folder: Path, manifest: Manifest) -> Manifest:
    """`manifest` with the current source files. The file being read (which then restarts) and later ones may have
    changed or disappeared. Raises DataError if a completely read file changed, or if files were added.
    """
    if not manifest.position:  # null in manifests that had no checksum once, and were given one later
        raise DataError(
            f"{folder}/manifest.json does not record which document comes next:"
            f" choose another data.path for more tokens, or train on these with data.max_tokens={manifest.train.tokens}"
        )
    before, position = manifest.source_files, manifest.position
    now = corpus.find_files(data) if data.source == Source.files else before
    verified = Verified(folder)
    # Checksums of everything that was read: seconds per gigabyte, compared with minutes for tokenizing.
    other = {
        file for file in _checking(before)
        if now.get(file, 0) != before[file]
        or (file in manifest.source_checksums and _checksum(file, verified) != manifest.source_checksums[file])
    }  # fmt: skip
    verified.keep()
    if added := [file for file in now if file not in before]:
        raise DataError(
            f"{sources.names(added)} {'was' if len(added) == 1 else 'were'} not there when the preparation of {folder}"
            " started: remove the addition, or prepare all files in another folder (another data.name)"
        )
    read = list(before)[: position["file"] + (position["document"] > 0 and manifest.begun is None)]
    if finished := [file for file in read if file in other]:
        raise DataError(
            f"{sources.names(finished)} {'has' if len(finished) == 1 else 'have'} changed since it was read for"
            f" {folder}: restore the original, or choose another data.name or data.path"
        )
    if not other:
        return manifest
    print(
        f"sparsellm: {sources.names(sorted(other))}, not completely read for {folder} yet, changed or disappeared: the"
        " preparation continues with the current files",
        flush=True,
    )
    if position["document"] > 0 and (current := list(before)[position["file"]]) in other:
        print(f"sparsellm: removed the tokens of {current}, which is read again", flush=True)
        manifest = _before_the_file(folder, manifest)
    return replace(manifest, source_files=now)


def _before_the_file(folder: Path, manifest: Manifest) -> Manifest:
    """`manifest` before the first document of the current file."""
    begun = manifest.begun
    assert begun is not None
    for split in SPLITS:
        with _Writer(folder, split, manifest):
            pass  # verifies what was written against its checksums, which exist only for the whole
    read = list(manifest.source_files)[: begun["position"]["file"] + (begun["position"]["document"] > 0)]
    manifest = replace(
        manifest,
        **{**begun, **{split: Split(**begun[split]) for split in SPLITS}},
        begun=None,
        source_checksums={file: xxh3 for file, xxh3 in manifest.source_checksums.items() if file in read},
    )
    sizes = _sizes("train", manifest) | _sizes("validation", manifest)
    kept = {name: {"bytes": size, "xxh3": digest_of(folder / name, size).hexdigest()} for name, size in sizes.items()}
    return replace(manifest, files=manifest.files | kept)


def _so_far(manifest: Manifest) -> dict[str, Any]:
    """The state that `_before_the_file` restores."""
    return {
        **{split: asdict(getattr(manifest, split)) for split in SPLITS},
        "empty_documents": manifest.empty_documents,
        "bad_records": manifest.bad_records,
        "empty_files": manifest.empty_files,
        "licences": dict(manifest.licences),
        "position": dict(manifest.position),
    }


def _checksum(file: str, verified: Verified) -> str:
    """The xxh3 of a source file; empty if the file does not exist."""
    try:
        return verified.checksum(sources.key_of(file), Path(file))
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror}): restore the file") from error


def _written(file: str) -> tuple[int, int] | None:
    """Size and modification time of `file`; None if it does not exist."""
    found = stamp(Path(file))
    return None if found is None else (found.bytes, found.mtime_ns)


def _checking(files: Iterable[str]) -> Iterable[str]:
    return tqdm(files, desc="checksums of the text", unit=" files", delay=5, leave=False)


class _Read:
    """Records the checksums of local source files that were read or started, in a manifest.

    Whole files are hashed, because any byte may change, and reading is fast compared with tokenizing.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.manifest, self.verified = manifest, Verified(folder)
        local = [file for file in list(manifest.source_files)[manifest.position["file"] :] if "://" not in file]
        self.written = {file: _written(file) for file in local}

    def count(self, reached: int) -> None:
        """Record the files before index `reached`. Raises DataError if one of them changed while it was read."""
        for file in _checking(list(self.manifest.source_files)[:reached]):
            if file not in self.written:  # on the hub, or already recorded
                continue
            if file not in self.manifest.source_checksums:
                self.manifest.source_checksums[file] = _checksum(file, self.verified)
            if _written(file) != self.written[file]:
                raise DataError(
                    f"{file} was changed while it was being read: stop whatever writes to it, and prepare again"
                )
        for file in list(self.manifest.source_files)[: reached - 1]:
            self.written.pop(file, None)  # read completely
        self.verified.keep()


def _files_between(position: corpus.Position, file: int) -> int:
    """The number of files without documents that were skipped between `position` and the first document of file number
    `file`."""
    return file - position["file"] - (position["document"] > 0) if file > position["file"] else 0


def _from_the_start(manifest: Manifest) -> Manifest:
    """`manifest` before the first document."""
    files = {name: manifest.files[name] for name in tokenizer_names(manifest)}
    return replace(
        manifest, train=Split(), validation=Split(), empty_documents=0, bad_records=0, empty_files=0, licences={},
        source_checksums={}, position=corpus.START, begun=None, exhausted=False, cut=False, files=files,
    )  # fmt: skip


def _write_tokens(
    validation_fraction: float,
    folder: Path,
    manifest: Manifest,
    vocabulary: Vocabulary,
    documents: Iterator[Document],
    limit: int | None,
) -> None:
    """Append documents from `manifest.position` on, and keep progress.json and `manifest` up to date."""
    name = f"preparing {folder}"
    with ExitStack() as stack:
        writers = {split: stack.enter_context(_Writer(folder, split, manifest)) for split in SPLITS}
        read = _Read(folder, manifest)
        bar = stack.enter_context(
            tqdm(total=limit, initial=manifest.train.tokens, desc=name, unit=" tokens", unit_scale=True)
        )
        if _is_read(manifest, limit):  # killed after the last document and before the manifest
            return
        chunks = encoding.encoded(corpus.chunks(documents), vocabulary, validation_fraction, manifest.token_dtype)
        for chunk in stack.enter_context(closing(chunks)):
            encoded = zip(*chunk.encoded, strict=True)
            for document in chunk.documents:
                if document.file != manifest.position["file"] or manifest.position["document"] == 0:
                    manifest.begun = _so_far(manifest)
                manifest.empty_files += _files_between(manifest.position, document.file)
                manifest.position = document.position_after()
                if not document.text:
                    if document.fault is None:
                        manifest.empty_documents += 1
                    else:
                        manifest.bad_records += 1
                    continue
                tokens, held_out = next(encoded)
                writers["validation" if held_out else "train"].append(tokens)
                if document.licence is not None:
                    manifest.licences[document.licence] = manifest.licences.get(document.licence, 0) + 1
                if _is_read(manifest, limit):
                    break
            done = _is_read(manifest, limit)
            if done or chunk.at_rest:
                for writer in writers.values():
                    writer.flush()
                read.count(manifest.position["file"] + 1)
                write(manifest, folder, "progress.json")
            bar.update(manifest.train.tokens - bar.n)
            if done:
                return
        read.count(len(manifest.source_files))
    manifest.empty_files += _files_between(manifest.position, len(manifest.source_files))
    manifest.exhausted = True


def _is_read(manifest: Manifest, limit: int | None) -> bool:
    """Whether the documents read so far are enough, even after a cut."""
    left = manifest.train.tokens + manifest.validation.tokens - tokens_to_cut(manifest)
    return is_enough(manifest, limit) and (manifest.exhausted or (limit is not None and left >= limit))


def _cut(folder: Path, manifest: Manifest, held_out: int) -> None:
    """Cut the stream of training documents followed by held-out ones, on disk and in `manifest`: its last `held_out`
    tokens become the validation split, the others the training split."""
    train, validation = manifest.train, manifest.validation
    kept = train.tokens + validation.tokens - held_out
    paths = {(split, kind): folder / f"{split}.{kind}" for split in SPLITS for kind in ("tokens", "documents")}

    # Either the training tokens after the cut or the held-out tokens before the cut are empty.
    itemsize = np.dtype(manifest.token_dtype).itemsize
    after = np.fromfile(paths["train", "tokens"], manifest.token_dtype, offset=min(kept, train.tokens) * itemsize)
    held = np.fromfile(paths["validation", "tokens"], manifest.token_dtype)
    before = held[: max(0, kept - train.tokens)]
    of_train, of_held = (np.fromfile(paths[split, "documents"], DOCUMENT_DTYPE) for split in SPLITS)
    starts = np.concatenate([of_train, of_held + train.tokens])
    train_starts, held_starts = starts[starts < kept], starts[starts >= kept] - kept
    if len(held_starts) == 0 or held_starts[0] > 0:
        held_starts = np.insert(held_starts, 0, 0)  # the rest of the document at the cut

    _replace_end(paths["train", "tokens"], min(kept, train.tokens), before)
    _replace_end(paths["validation", "tokens"], 0, np.concatenate([after, held[len(before) :]]))
    _replace_end(paths["train", "documents"], 0, train_starts)
    _replace_end(paths["validation", "documents"], 0, held_starts)
    manifest.cut = True
    manifest.train = Split(len(train_starts), kept)
    manifest.validation = Split(len(held_starts), held_out)


def _replace_end(path: Path, kept: int, values: np.ndarray) -> None:
    """Truncate the file at `path` to its first `kept` numbers, and append `values`."""
    with regular.to_write(path, "r+b") as file:
        file.truncate(kept * values.itemsize)
        file.seek(0, os.SEEK_END)
        file.write(values.tobytes())
        file.flush()
        os.fsync(file.fileno())


def _too_short(manifest: Manifest) -> str:
    total, longest = manifest.train.tokens + manifest.validation.tokens, longest_sequence(manifest)
    remedy = f"shorten training.sequence_length to at most {longest}, or give more text"
    return (
        f"the text is {total:,} tokens long, but training.sequence_length {manifest.sequence_length} needs a block of"
        f" {manifest.sequence_length + 1:,} tokens to train on and another one to hold out:"
        f" {remedy if longest >= SHORTEST_SEQUENCE else 'give more text'}"
    )


def _remove(folder: Path, made: list[Path]) -> None:
    """Remove what a preparation wrote to the locked `folder`, and the folders `made` for it."""
    shutil.rmtree(folder / "tokenizer", ignore_errors=True)
    written = [f"{split}.{kind}" for split in SPLITS for kind in ("tokens", "documents")]
    for name in [*written, "progress.json", VERIFIED, "lock"]:
        (folder / name).unlink(missing_ok=True)
    for path in made or [folder]:
        try:
            path.rmdir()
        except OSError:  # not empty
            return


def _sizes(split: str, manifest: Manifest) -> dict[str, int]:
    """The sizes of one split's files."""
    counts: Split = getattr(manifest, split)
    return {
        f"{split}.tokens": counts.tokens * manifest.token_bytes,
        f"{split}.documents": counts.documents * DOCUMENT_BYTES,
    }


class _Writer:
    """Appends documents to one split's files, and maintains their counts and checksums in the manifest."""

    def __init__(self, folder: Path, split: str, manifest: Manifest) -> None:
        self.counts: Split = getattr(manifest, split)
        self.dtype = manifest.token_dtype
        self.tokens: list[np.ndarray] = []
        self.starts: list[int] = []
        self.recorded = manifest.files
        self.digests = {}
        sizes = _sizes(split, manifest)
        for name, size in sizes.items():
            path = folder / name
            regular.to_write(path, "ab").close()
            if path.stat().st_size < size:
                raise DataError(
                    f"{path} has {path.stat().st_size:,} bytes, but {folder}/progress.json says {size:,}: delete"
                    f" {folder} and prepare again"
                )
            self.digests[name] = digest_of(path, size)
            written = {"bytes": size, "xxh3": self.digests[name].hexdigest()}
            if size > 0 and self.recorded.get(name) != written:
                raise DataError(corrupt(folder, name))
            os.truncate(path, size)
        self.files = {name: regular.to_write(folder / name, "ab") for name in sizes}

    def __enter__(self) -> "_Writer":
        return self

    def __exit__(self, *_: object) -> None:
        for file in self.files.values():
            with suppress(OSError):  # a full disk again: `flush` has raised it already, or has written everything
                file.close()

    def append(self, document: np.ndarray) -> None:
        self.starts.append(self.counts.tokens)
        self.tokens.append(document)
        self.counts.documents += 1
        self.counts.tokens += len(document)

    def flush(self) -> None:
        """Sync everything appended so far to disk."""
        tokens = np.concatenate([np.empty(0, self.dtype), *self.tokens])
        contents = tokens.tobytes(), np.array(self.starts, DOCUMENT_DTYPE).tobytes()
        self.tokens, self.starts = [], []
        for (name, file), content in zip(self.files.items(), contents, strict=True):
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            self.digests[name].update(content)
            self.recorded[name] = {"bytes": file.tell(), "xxh3": self.digests[name].hexdigest()}


@contextmanager
def _writing(folder: Path, limit: int | None, made: list[Path]) -> Iterator[None]:
    """Convert write errors, such as a full disk, to DataError; if no document was prepared, leave nothing behind."""
    try:
        yield
    except OSError as error:
        progress = read(folder, "progress.json")
        tokens = progress.train.tokens if progress is not None else 0
        done = "prepare again"
        if (folder / "manifest.json").exists() or (progress is not None and progress.position != corpus.START):
            done = f"run the same command again: it continues after the {tokens:,} training tokens that are there"
        elif progress is None or not progress.extends:
            _remove(folder, made)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise DataError(f"data.path={folder} cannot be written: {error}. Fix that, and {done}") from error
        parent = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        free = f"{shutil.disk_usage(parent).free / 2**20:,.0f} MiB are free there"
        if limit is not None and progress is not None and limit > tokens:
            needed = (limit - tokens) * progress.token_bytes / 2**20
            free += f", and the remaining {limit - tokens:,} training tokens take about {needed:,.0f} MiB"
        raise DataError(
            f"data.path={folder} cannot be written because the disk is full ({error.strerror}): {free}. Free some"
            f" space, and {done}"
        ) from error


@contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    """Lock `folder` so that one process at a time prepares it; the system releases the lock of a killed process."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = regular.to_write(folder / "lock", "w")
    except OSError as error:
        raise DataError(f"data.path={folder} cannot be written: {error}; choose another data.path") from error
    with file:
        locks.take(file, lambda: print(f"sparsellm: another process is preparing {folder}; waiting for it", flush=True))
        yield
