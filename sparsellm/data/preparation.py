"""Documents to tokens on disk, once, for any number of runs; the layout is in manifest.py.

After each chunk of documents the files are on disk and progress.json says how far they are good. A start after a kill
cuts them back to that and goes on from there, so the result is the same to the byte. A finished folder is not touched,
unless more tokens are wanted than it holds: then it is extended, which does not change the tokens that it has.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from tqdm import tqdm

from sparsellm.config import Config, Source
from sparsellm.data import corpus, tokenizer
from sparsellm.data.corpus import Document
from sparsellm.data.errors import DataError
from sparsellm.data.manifest import (
    DOCUMENT_DTYPE,
    SPLITS,
    Manifest,
    Split,
    blocks,
    checksums,
    is_enough,
    read,
    recipe,
    recipe_mistakes,
    size_mistakes,
    token_limit,
    verify,
    write,
)


def preparation_mistakes(config: Config) -> list[str]:
    """Everything that keeps `config` from being prepared and can be known with no network and no writes."""
    data = config.data
    folder = Path(data.path)
    if data.streaming:
        return [
            "data.streaming=true tokenizes while training, so there is nothing to prepare: set data.streaming=false"
        ]
    try:
        started = read(folder) or read(folder, "progress.json")
    except DataError as error:
        return [str(error)]
    if started is not None:
        return recipe_mistakes(started, config) + size_mistakes(started, folder)
    return source_mistakes(config)


def source_mistakes(config: Config) -> list[str]:
    """Missing files and a missing tokenizer."""
    data = config.data
    found = corpus.local_files(data.files)[1] if data.source == Source.files else []
    if data.tokenizer is not None and tokenizer.is_missing(data.tokenizer):
        found.append(f"data.tokenizer {data.tokenizer!r} does not exist: give a folder with tokenizer.json")
    return found


def prepare(config: Config) -> Manifest:
    """Fill `data.path` with at least `token_limit` training tokens, or all there are, and the held-out documents
    that came between; return the manifest. Returns at once if that is done already. Raises DataError.
    """
    folder, limit = Path(config.data.path), token_limit(config)
    if mistakes := preparation_mistakes(config):
        raise DataError("; ".join(mistakes))
    manifest = read(folder)
    if manifest is not None and is_enough(manifest, limit):
        return manifest
    if manifest is None and not (folder / "progress.json").exists():
        manifest, vocabulary, documents = _start(config)  # before anything is written: what fails, fails here
    with _exclusive(folder):
        # Another process may have worked here while this one waited.
        done, progress = read(folder), read(folder, "progress.json")
        if done is not None and is_enough(done, limit):
            return done
        if done is not None:
            verify(done, folder)  # or the new checksums would vouch for old damage
        if done is not None or progress is not None:
            # With both there, a kill came between the two steps below or at the end: they agree.
            manifest, vocabulary, documents = _continue(config, folder, done or progress)
        else:
            tokenizer.save(vocabulary, folder / "tokenizer")
        write(manifest, folder, "progress.json")
        (folder / "manifest.json").unlink(missing_ok=True)

        _write_tokens(config, folder, manifest, vocabulary, documents, limit)
        for split in (manifest.train, manifest.validation):
            split.blocks = blocks(split.tokens, manifest.sequence_length)
            split.dropped_tail = max(0, split.tokens - 1) - split.blocks * manifest.sequence_length
        manifest.files = checksums(folder)
        write(manifest, folder, "manifest.json")
        (folder / "progress.json").unlink()
    return manifest


def _start(config: Config) -> tuple[Manifest, Tokenizer, Iterator[Document]]:
    data = config.data
    files: corpus.Files = {}
    licence, unparsable = None, 0
    if data.source == Source.stdlib_docs:
        texts, unparsable = corpus.stdlib_docs()
        vocabulary = tokenizer.train(texts, data.tokenizer_vocab_size)
        documents = corpus.from_texts(texts)
    else:
        vocabulary = tokenizer.load(data.tokenizer)
        files = corpus.find_files(data)
        corpus.open_file(next(iter(files)), data.text_column)  # a wrong column shows before anything is written
        documents = corpus.read(list(files), data.text_column)
        licence = corpus.card_licence(data.dataset) if data.source == Source.hub else None
    manifest = Manifest(
        recipe=recipe(data),
        source_files=files,
        tokenizer_hash=tokenizer.digest(vocabulary),
        vocab_size=tokenizer.vocabulary_size(vocabulary),
        end_of_text_id=vocabulary.token_to_id(tokenizer.END_OF_TEXT),
        sequence_length=config.training.sequence_length,
        licence=licence,
        unparsable_modules=unparsable,
    )
    return manifest, vocabulary, documents


def _continue(config: Config, folder: Path, manifest: Manifest) -> tuple[Manifest, Tokenizer, Iterator[Document]]:
    """Hub files are those of the commit that preparation started with; local ones must not have changed."""
    data = config.data
    vocabulary = tokenizer.load(str(folder / "tokenizer"))
    if tokenizer.digest(vocabulary) != manifest.tokenizer_hash:
        raise DataError(f"{folder}/tokenizer has changed since preparation began: delete {folder} and start again")
    if data.source == Source.stdlib_docs:
        documents = corpus.from_texts(corpus.stdlib_docs()[0], manifest.position)
    else:
        if data.source == Source.files and corpus.find_files(data) != manifest.source_files:
            raise DataError(
                f"data.files matches other files, or files of other sizes, than when the preparation of {folder} began:"
                " bring them back, or choose another data.path"
            )
        documents = corpus.read(list(manifest.source_files), data.text_column, manifest.position)
    return replace(manifest, files={}, sequence_length=config.training.sequence_length), vocabulary, documents


def _write_tokens(
    config: Config,
    folder: Path,
    manifest: Manifest,
    vocabulary: Tokenizer,
    documents: Iterator[Document],
    limit: int | None,
) -> None:
    """Append to the files from `manifest.position` on, keeping progress.json and `manifest` in step with them."""
    fraction, name = config.data.validation_fraction, f"preparing {folder}"
    with ExitStack() as stack:
        writers = {split: stack.enter_context(_Writer(folder, split, manifest)) for split in SPLITS}
        bar = stack.enter_context(
            tqdm(total=limit, initial=manifest.train.tokens, desc=name, unit=" tokens", unit_scale=True)
        )
        if is_enough(manifest, limit):  # a kill came after the last document and before the manifest
            return
        for chunk in corpus.chunks(documents):
            tokens = iter(tokenizer.encode(vocabulary, [document.text for document in chunk if document.text]))
            for document in chunk:
                manifest.position = document.position_after()
                if not document.text:
                    manifest.empty_documents += 1
                    continue
                split = "validation" if corpus.is_held_out(document.text, fraction) else "train"
                writers[split].append(next(tokens))
                if document.licence is not None:
                    manifest.licences[document.licence] = manifest.licences.get(document.licence, 0) + 1
                if is_enough(manifest, limit):
                    break
            for writer in writers.values():
                writer.flush()
            write(manifest, folder, "progress.json")
            bar.update(manifest.train.tokens - bar.n)
            if is_enough(manifest, limit):
                return
    manifest.exhausted = True


class _Writer:
    """Appends documents to one split's files and counts them in the manifest."""

    def __init__(self, folder: Path, split: str, manifest: Manifest) -> None:
        self.counts: Split = getattr(manifest, split)
        self.dtype = manifest.token_dtype
        self.tokens: list[int] = []
        self.starts: list[int] = []
        sizes = {
            "tokens": self.counts.tokens * np.dtype(self.dtype).itemsize,
            "documents": self.counts.documents * np.dtype(DOCUMENT_DTYPE).itemsize,
        }
        for kind, size in sizes.items():
            path = folder / f"{split}.{kind}"
            path.touch()
            if path.stat().st_size < size:
                raise DataError(
                    f"{path} has {path.stat().st_size:,} bytes and {folder}/progress.json says {size:,}:"
                    f" delete {folder} and start again"
                )
            os.truncate(path, size)
        self.files = {kind: (folder / f"{split}.{kind}").open("ab") for kind in sizes}

    def __enter__(self) -> "_Writer":
        return self

    def __exit__(self, *_: object) -> None:
        for file in self.files.values():
            file.close()

    def append(self, document: list[int]) -> None:
        self.starts.append(self.counts.tokens)
        self.tokens += document
        self.counts.documents += 1
        self.counts.tokens += len(document)

    def flush(self) -> None:
        """Bring everything appended so far to disk."""
        self.files["tokens"].write(np.array(self.tokens, self.dtype).tobytes())
        self.files["documents"].write(np.array(self.starts, DOCUMENT_DTYPE).tobytes())
        self.tokens, self.starts = [], []
        for file in self.files.values():
            file.flush()
            os.fsync(file.fileno())


@contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    """One process at a time prepares `folder`; the system releases the lock of a killed one."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / "lock").open("w")
    except OSError as error:
        raise DataError(f"data.path={folder} cannot be written: {error}; choose another data.path") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"sparsellm: another process is preparing {folder}; waiting for it", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
