"""Tokenizes documents to disk, once for any number of runs; manifest.py describes the layout.

Every few chunks of documents, the files are synced to disk and progress.json records how far they are valid. After a
kill, the next start verifies them against the checksums in progress.json, truncates them to that point and continues,
so the result is byte-identical, and damage is detected instead of sealed in. A finished folder is changed only if more
tokens are requested than it holds: then it is extended, which keeps its tokens.

Every source file contributes its share of the tokens (shares.py). In folders prepared before 0.1.0, files were read in
order; such folders are extended in that order.

Source files from which text was taken must not change. The file that is being read, and files from which nothing was
taken, may change or disappear (a file with a bad record has to be fixed): the documents of the file being read are
rolled back, and it is read again from the start.

If a stream has to be cut (manifest.py), it is cut in place, when all text has been read. After a kill between the cut
and the manifest, and in an extension, all passes are repeated from the first document, which is cheap because a cut
means few documents. So the tokens before an earlier cut keep their positions.

While a folder is extended, even if the extension is killed or fails, runs can read the old tokens: an extension only
appends, and manifest.json counts only the old tokens until the end. A cut stream is extended in the folder again/,
whose files then replace the old ones.
"""

import errno
import shutil
from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

from sparsellm.config import SHORTEST_SEQUENCE, Source
from sparsellm.data import corpus, encoding, shares, sources, token_files, tokenizer
from sparsellm.data.checksums import VERIFIED, Verified
from sparsellm.data.corpus import Document
from sparsellm.data.errors import DataError
from sparsellm.data.manifest import (
    FILES,
    LEAST_BLOCKS,
    SPLITS,
    Manifest,
    Split,
    blocks,
    checksums,
    compare,
    read,
    size_mistakes,
    verify,
    write,
)
from sparsellm.data.request import Request
from sparsellm.data.tokenizer import Vocabulary
from sparsellm.system import locks, regular
from sparsellm.system.files import sync

# A tokenizer is trained on this many characters from the start of the text, which takes a few seconds and less than
# 1 GB of memory. The text is passed in pieces, because one string of this length would take twice the memory.
TOKENIZER_CHARACTERS, TOKENIZER_PIECE = 10_000_000, 100_000
AGAIN = "again"  # subfolder in which a cut stream is extended


def preparation_mistakes(request: Request) -> list[str]:
    """Error messages for everything that keeps tokens from being prepared and can be checked without network access or
    writes; empty if there is nothing."""
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
        if _again_is_finished(folder):
            return []  # `prepare` uses these finished tokens
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
    """An unfinished `manifest` with the data.files of `request`. `with_current_sources` decides whether the preparation
    can continue with these files."""
    key = "data.files"
    if key not in manifest.recipe or key not in request.recipe:
        return manifest
    return replace(manifest, recipe=manifest.recipe | {key: request.recipe[key]})


def prepare(request: Request) -> Manifest:
    """Prepare at least `request.token_limit` training tokens (or all that exist), and the held-out documents between
    them, in `data.path`. Returns the manifest, immediately if the tokens exist already. Raises DataError if preparation
    fails; then leaves nothing behind if no document was prepared or the text is too short for a block of each split. If
    the disk is full, prepared tokens are kept, and the next call continues after them.
    """
    folder, limit = request.data.folder, request.token_limit
    if not request.data.streaming and _again_is_finished(folder):
        with _exclusive(folder), _writing(folder, limit, []):
            if _again_is_finished(folder):
                _replace_by_again(folder)
    if mistakes := preparation_mistakes(request):
        raise DataError("; ".join(mistakes))
    ready, started = read(folder), None
    if ready is not None and ready.is_enough(limit):
        _remove_leftover(folder, ready)
        return ready
    if ready is None and not (folder / "progress.json").exists():
        started = _start(request)  # before anything is written, so that a failure leaves nothing behind
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    with _exclusive(folder), _writing(folder, limit, made):
        # Another process may have prepared this folder while this one waited.
        done, progress = read(folder), read(folder, "progress.json")
        if done is not None and done.is_enough(limit):
            return done
        if done is not None:
            verify(done, folder)  # otherwise new checksums would hide old damage
            if done.cut:
                return _prepare_again(request, folder, done)
        # If manifest.json and progress.json both exist, either an extension was stopped, or a preparation was stopped
        # right before its end. In the second case, both files count the same tokens.
        before = progress
        if done is not None and (progress is None or progress.tokens <= done.tokens):
            before = replace(done, extends=True)
        if before is not None:
            manifest, vocabulary = _continue(request, folder, before)
        else:
            manifest, vocabulary = started or _start(request)
            tokenizer.save(vocabulary, written := folder / "tokenizer")
            manifest.files = checksums(folder, sorted(f"tokenizer/{path.name}" for path in written.iterdir()))
        write(manifest, folder, "progress.json")

        try:
            _write_tokens(request, folder, manifest, vocabulary, limit)
        except DataError:
            reached = read(folder, "progress.json")
            if not manifest.extends and reached is not None and reached.tokens == 0:
                _remove(folder, made)
            raise
        compare(manifest, folder, list(manifest.files), verified := Verified(folder))
        held_out = manifest.tokens_to_cut
        some = held_out or not blocks(manifest.train.tokens, manifest.sequence_length)
        if some and manifest.longest_sequence < manifest.sequence_length:
            _remove(folder, made)
            raise DataError(_too_short(manifest))
        if held_out:
            write(_from_the_start(manifest), folder, "progress.json")
            token_files.cut(folder, manifest, held_out)
            manifest.files = checksums(folder, manifest.files, verified)
            verified.keep()
        manifest.extends, manifest.begun = False, None
        manifest.least_blocks = manifest.minimum_blocks if manifest.cut else 1
        if manifest.seed is not None:
            shares.finish(manifest)
        for split in (manifest.train, manifest.validation):
            split.blocks = blocks(split.tokens, manifest.sequence_length)
            split.dropped_tail = max(0, split.tokens - 1) - split.blocks * manifest.sequence_length
        manifest.files = dict(sorted(manifest.files.items()))
        write(manifest, folder, "manifest.json")
        (folder / "progress.json").unlink()
    return manifest


def _remove_leftover(folder: Path, done: Manifest) -> None:
    """Remove the progress.json left by a kill right before the end, unless `folder` is in use or not writable."""

    def is_leftover() -> bool:
        progress = read(folder, "progress.json")
        return progress is not None and (not progress.extends or progress.tokens <= done.tokens)

    with suppress(OSError, DataError):  # a damaged progress.json of a finished folder is not used
        if is_leftover():
            with regular.to_write(folder / "lock", "w") as file:
                if locks.take(file, give_up=lambda: True) and read(folder) == done and is_leftover():
                    (folder / "progress.json").unlink()


def _prepare_again(request: Request, folder: Path, done: Manifest) -> Manifest:
    """Extend the cut stream whose manifest is `done`, in the locked `folder`."""
    sources.with_current_sources(request.data, folder, done)  # otherwise the new tokens would not contain the old ones
    again = folder / AGAIN
    if read(again, "progress.json") is None:
        shutil.rmtree(again, ignore_errors=True)
        shutil.copytree(folder / "tokenizer", again / "tokenizer")
        write(_from_the_start(replace(done, extends=True)), again, "progress.json")
    manifest = prepare(replace(request, data=replace(request.data, path=str(again))))
    _replace_by_again(folder)
    return manifest


def _again_is_finished(folder: Path) -> bool:
    """Whether again/ exists and is finished, or no preparation was started in it."""
    return (folder / AGAIN).is_dir() and not (folder / AGAIN / "progress.json").exists()


def _replace_by_again(folder: Path) -> None:
    """Move the files in again/ to the locked `folder`. If this is killed, the next call of `prepare` completes it."""
    again = folder / AGAIN
    for name in [*FILES, "manifest.json"]:
        if (again / name).exists():
            (again / name).replace(folder / name)
    sync(folder)
    shutil.rmtree(again)
    (folder / "progress.json").unlink(missing_ok=True)


def _start(request: Request) -> tuple[Manifest, Vocabulary]:
    data = request.data
    files: corpus.Files = {}
    licence, unparsable, characters, seed = None, 0, None, None
    if data.source == Source.stdlib_docs:
        texts, unparsable = corpus.stdlib_docs()
        vocabulary = tokenizer.train(texts, data.tokenizer_vocab_size)
        characters = sum(map(len, texts))
    else:
        if data.tokenizer is not None:
            vocabulary = tokenizer.load(data.tokenizer, request.tokenizer_key)
            if found := request.vocabulary_mistakes(tokenizer.vocabulary_size(vocabulary)):
                raise DataError("; ".join(found))
            tokenizer.say_form(vocabulary, f"{request.tokenizer_key}={data.tokenizer}")
        files, seed = corpus.with_sizes(corpus.find_files(data)), data.seed
        documents = corpus.read(list(files), data.text_column, skip_bad_records=data.skip_bad_records)
        if data.tokenizer is None:
            vocabulary, characters = _trained_tokenizer(
                corpus.counted(documents, len(files)), data.tokenizer_vocab_size
            )
        else:
            next(documents, None)  # detect a wrong column before anything is written
        if data.source == Source.hub:
            assert data.dataset is not None
            licence = corpus.card_licence(data.dataset)
    manifest = Manifest(
        recipe=request.recipe,
        source_files=files,
        seed=seed,
        tokenizer_hash=tokenizer.digest(vocabulary),
        vocab_size=tokenizer.vocabulary_size(vocabulary),
        end_of_text_id=tokenizer.end_of_text_id(vocabulary),
        begin_of_text_id=tokenizer.begin_of_text_id(vocabulary),
        sequence_length=request.training.sequence_length,
        licence=licence,
        unparsable_modules=unparsable,
        tokenizer_characters=characters,
        least_blocks=LEAST_BLOCKS,
    )
    return manifest, vocabulary


def _trained_tokenizer(documents: Iterable[Document], vocab_size: int) -> tuple[Vocabulary, int]:
    """A tokenizer trained on the first TOKENIZER_CHARACTERS characters of `documents`, and the number actually used."""
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


def _continue(request: Request, folder: Path, manifest: Manifest) -> tuple[Manifest, Vocabulary]:
    """Continue a preparation. Hub files are read at the commit with which the preparation started. Local files that it
    has not read to their ends may have changed."""
    data = request.data
    compare(manifest, folder, manifest.tokenizer_files)
    corpus.require_hub(data)
    manifest = sources.with_current_sources(data, folder, manifest)
    if not manifest.extends:
        manifest = replace(_with_files_of(request, manifest), sequence_length=request.training.sequence_length)
    vocabulary = tokenizer.load(str(folder / "tokenizer"), "data.path")
    if manifest.tokenizer_hash not in tokenizer.digests(vocabulary):
        raise DataError(f"{folder}/tokenizer has changed since preparation started: delete {folder} and prepare again")
    if manifest.seed not in (None, data.seed):
        print(
            f"sparsellm: {folder} was begun with data.seed={manifest.seed}; that seed still chooses its text",
            flush=True,
        )
    return manifest, vocabulary


def _from_the_start(manifest: Manifest) -> Manifest:
    """`manifest` as it was before the first document."""
    files = {name: manifest.files[name] for name in manifest.tokenizer_files}
    return replace(
        manifest, train=Split(), validation=Split(), empty_documents=0, bad_records=0, empty_files=0, licences={},
        source_checksums={}, position=corpus.START, targets={}, taken={}, begun=None, exhausted=False, cut=False,
        files=files,
    )  # fmt: skip


def _write_tokens(
    request: Request, folder: Path, manifest: Manifest, vocabulary: Vocabulary, limit: int | None
) -> None:
    """Append documents until there are `limit` training tokens. Keeps `manifest` and progress.json up to date."""
    with ExitStack() as stack:
        writers = {split: stack.enter_context(token_files.Writer(folder, split, manifest)) for split in SPLITS}
        reading = sources.Reading(folder, manifest)
        bar = stack.enter_context(
            tqdm(
                total=limit, initial=manifest.train.tokens, desc=f"preparing {folder}", unit=" tokens", unit_scale=True
            )
        )
        while not manifest.is_enough(limit):
            goal = limit
            if limit is not None and manifest.seed is not None:
                goal = min(limit, shares.begin_pass(manifest, limit))
            with closing(_encoded(request, manifest, vocabulary)) as chunks:
                for chunk in chunks:
                    encoded = zip(*chunk.encoded, strict=True)
                    for document in chunk.documents:
                        tokens, held_out = next(encoded) if document.text else (None, False)
                        _count(document, manifest, reading)
                        if tokens is not None:
                            writers["validation" if held_out else "train"].append(tokens)
                            reading.count_tokens(0 if held_out else len(tokens))
                        if manifest.is_enough(goal):
                            break
                    done = manifest.is_enough(goal)
                    if done or chunk.at_rest:
                        for writer in writers.values():
                            writer.flush()
                        reading.sync()
                        write(manifest, folder, "progress.json")
                    bar.update(manifest.train.tokens - bar.n)
                    if done:
                        break
                else:  # the pass ends before its goal
                    manifest.targets = {}
                    left = manifest.source_files.keys() - shares.used_up(manifest)
                    manifest.exhausted = manifest.seed is None or not left


def _encoded(request: Request, manifest: Manifest, vocabulary: Vocabulary) -> Generator[encoding.Chunk, None, None]:
    """The documents from `manifest.position` on, with their tokens."""
    data = request.data
    if data.source == Source.stdlib_docs:
        documents = corpus.from_texts(corpus.stdlib_docs()[0], manifest.position)
    else:
        documents = shares.documents(manifest, vocabulary, data.text_column, data.skip_bad_records)
        documents = corpus.counted(documents, len(manifest.source_files))
    return encoding.encoded(corpus.chunks(documents), vocabulary, data.validation_fraction, manifest.token_dtype)


def _count(document: Document, manifest: Manifest, reading: sources.Reading) -> None:
    """Record in `manifest` that `document` was read."""
    if document.number == 0 and not document.end:
        manifest.begun = sources.so_far(manifest)
    elif document.end or document.file != manifest.position["file"]:
        manifest.begun = None
    manifest.position = document.position_after()
    reading.count_document(document)
    if document.end:
        manifest.empty_files += document.number == 0
    elif document.fault is not None:
        manifest.bad_records += 1
    elif not document.text:
        manifest.empty_documents += 1
    elif document.licence is not None:
        manifest.licences[document.licence] = manifest.licences.get(document.licence, 0) + 1


def _too_short(manifest: Manifest) -> str:
    longest = manifest.longest_sequence
    remedy = f"shorten training.sequence_length to at most {longest}, or give more text"
    block = f"a block of {manifest.sequence_length + 1:,} tokens to train on"
    if len(manifest.splits_to_fill) > 1:
        block += " and another one to hold out"
    return (
        f"the text is {manifest.tokens:,} tokens long, but training.sequence_length {manifest.sequence_length} needs"
        f" {block}: {remedy if longest >= SHORTEST_SEQUENCE else 'give more text'}"
    )


def _remove(folder: Path, made: list[Path]) -> None:
    """Remove what a preparation wrote to the locked `folder`, and the folders `made` for the preparation."""
    shutil.rmtree(folder / "tokenizer", ignore_errors=True)
    for name in [*FILES, "progress.json", VERIFIED, "lock"]:
        (folder / name).unlink(missing_ok=True)
    for path in made or [folder]:
        try:
            path.rmdir()
        except OSError:  # not empty
            return


@contextmanager
def _writing(folder: Path, limit: int | None, made: list[Path]) -> Iterator[None]:
    """Convert write errors, such as a full disk, to DataError; if no document was prepared, leave nothing behind."""
    try:
        yield
    except OSError as error:
        progress = read(folder, "progress.json") or read(folder)
        tokens = progress.train.tokens if progress is not None else 0
        done = "prepare again"
        if (folder / "manifest.json").exists() or (progress is not None and progress.tokens > 0):
            done = f"run the same command again: it continues after the {tokens:,} training tokens already prepared"
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
    """Lock `folder`, so that only one process at a time prepares it. The system releases a killed process's lock."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = regular.to_write(folder / "lock", "w")
    except OSError as error:
        raise DataError(f"data.path={folder} cannot be written: {error}; choose another data.path") from error
    with file:
        locks.take(file, lambda: print(f"sparsellm: another process is preparing {folder}; waiting for it", flush=True))
        yield
