"""The content of a folder of prepared tokens, and whether it is complete.

    tokenizer/              loads with AutoTokenizer
    train.tokens            one stream of token ids; each document ends with the end-of-text token, and starts with the
                            begin-of-text token if there is one; little-endian uint16, or uint32 for a vocabulary above
                            65,536
    train.documents         where each document starts in train.tokens; little-endian int64
    validation.tokens, validation.documents
    manifest.json           this file's `Manifest`; written last, so its presence means that the rest is complete.
                            While tokens are added, files are longer than it says; the excess is not read
    progress.json           the `Manifest` during preparation, with the checksums of what is written so far
    verified.json           which files were read and verified (checksums.py); may be missing
    lock                    held by the process that prepares

manifest.json and progress.json contain their own checksums (sparsellm.system.files). Their counts are compared with the
files, so every file and number that training relies on is verified twice.

Block n of a stream consists of tokens n T to n T + T inclusive, so blocks overlap by one token and any length T works.

Whole documents are held out, chosen by content (corpus.is_held_out). If too few are held out, as in a single text file,
the manifest says `cut`: the training documents followed by the held-out ones form one stream, whose last tokens are the
validation split and whose other tokens are the training split. No token is in both; the document at the cut is counted
in both splits.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from sparsellm.data import tokenizer
from sparsellm.data.checksums import Verified, digest_of
from sparsellm.data.errors import DataError
from sparsellm.system.files import read_sealed, write_sealed

VERSION = 2  # version of the layout above
SPLITS = ("train", "validation")
FILES = [f"{split}.{kind}" for split in SPLITS for kind in ("tokens", "documents")]
DOCUMENT_DTYPE, DOCUMENT_BYTES = "<i8", 8
# A loss over two blocks is mostly noise. So if a corpus is read to its end, or is a single file, at least this many
# blocks are held out, or this fraction of its text if that is less. If a corpus has more text, whole documents from all
# files are the better sample: a cut would hold out the last file alone.
LEAST_BLOCKS, LEAST_FRACTION = 50, 0.05
# Whole documents are held out at random, so they may have fewer tokens than this minimum by chance. This fraction of
# the minimum is accepted; below this fraction, the end of the text is held out instead.
NEARLY = 0.9


@dataclass
class Split:
    """Counts of one split. `blocks` and `dropped_tail` assume the sequence length of the preparation."""

    documents: int = 0
    tokens: int = 0
    blocks: int = 0
    dropped_tail: int = 0  # tokens after the last whole block


@dataclass
class Manifest:
    recipe: dict[str, Any]  # configuration keys that determine the tokens: see `Request.recipe`
    source_files: dict[str, int | None]  # in reading order, see corpus.Files
    tokenizer_hash: str  # tokenizer.digest of tokenizer/
    vocab_size: int
    end_of_text_id: int
    sequence_length: int  # requested when preparation began; decides whether and where the stream is cut
    begin_of_text_id: int | None = None  # None: no begin-of-text token
    licence: str | None = None  # from the card of the hub data set
    licences: dict[str, int] = field(default_factory=dict)  # number of documents per value of the licence column
    train: Split = field(default_factory=Split)
    validation: Split = field(default_factory=Split)
    source_checksums: dict[str, str] = field(default_factory=dict)  # local source files read so far (sources.py)
    empty_documents: int = 0  # skipped because they have no text
    bad_records: int = 0  # skipped with data.skip_bad_records
    empty_files: int = 0  # skipped because they have no documents
    unparsable_modules: int = 0  # modules of the standard library that could not be parsed
    tokenizer_characters: int | None = None  # how many characters of text a tokenizer was trained on; None: not trained
    position: dict[str, Any] = field(default_factory=lambda: {"file": 0, "document": 0})  # after the last document read
    # How many tokens each file contributes (shares.py). seed=None: files are read completely, in order (before 0.1.0).
    seed: int | None = None  # seed for shuffling each file's blocks
    goals: list[int] = field(default_factory=list)  # training tokens requested so far, in ascending order
    targets: dict[str, int] = field(default_factory=dict)  # current pass: training tokens after each file
    # file -> documents and training tokens taken from the file, and whether the whole file was read
    taken: dict[str, dict[str, int]] = field(default_factory=dict)
    # In progress.json: counts and position before the current file's first document, so that its documents can be
    # rolled back. None if no document of the file is used yet, or an earlier pass or a finished folder used some.
    begun: dict[str, Any] | None = None
    exhausted: bool = False  # the source has no more documents
    cut: bool = False  # the end of the stream is held out, because it has too few documents to hold out whole ones
    # Minimum number of held-out blocks: LEAST_BLOCKS while a folder is prepared; 1 in folders prepared before this
    # minimum existed, and in finished folders to which the minimum did not apply, because applying it when they are
    # extended could hold out tokens that runs have trained on.
    least_blocks: int = 1
    # Whether this preparation extends a finished folder. Runs may have trained on its tokens, so `sequence_length` must
    # not change: then a cut only moves towards the end, and no token that was trained on is held out later.
    extends: bool = False
    files: dict[str, dict[str, Any]] = field(default_factory=dict)  # name -> bytes and xxh3 of what was written so far
    version: int = VERSION

    @property
    def tokens(self) -> int:
        return self.train.tokens + self.validation.tokens

    @property
    def token_dtype(self) -> str:
        return "<u2" if self.vocab_size <= 65_536 else "<u4"

    @property
    def token_bytes(self) -> int:
        return np.dtype(self.token_dtype).itemsize

    @property
    def validation_fraction(self) -> float:
        return self.recipe["data.validation_fraction"]

    @property
    def splits_to_fill(self) -> list[Split]:
        """The splits that need at least one block: both, or only the training split if nothing is held out."""
        return [self.train, self.validation] if self.validation_fraction > 0 else [self.train]

    @property
    def minimum_blocks(self) -> int:
        """The minimum number of held-out blocks for the text read so far."""
        return self.least_blocks if self.exhausted or len(self.source_files) <= 1 else 1

    @property
    def tokens_to_cut(self) -> int:
        """The number of tokens to hold out at the end of the stream, if holding out whole documents leaves a split too
        small; otherwise 0. The requested fraction, but at least one block, and at least `minimum_blocks` or
        LEAST_FRACTION."""
        block = self.sequence_length + 1
        least = min(self.minimum_blocks * self.sequence_length + 1, int(LEAST_FRACTION * self.tokens))
        enough = self.train.tokens >= block and self.validation.tokens >= max(block, NEARLY * least)
        if enough or len(self.splits_to_fill) == 1:
            return 0
        return max(block, least, int(self.validation_fraction * self.tokens))

    @property
    def tokens_left(self) -> int:
        """The number of training tokens that remain after a cut, if the stream has to be cut."""
        return min(self.train.tokens, self.tokens - self.tokens_to_cut)

    def is_enough(self, limit: int | None) -> bool:
        """Whether there are `limit` training tokens, even after a cut, or there is no more text."""
        return self.exhausted or (limit is not None and self.train.tokens >= limit and self.tokens_left >= limit)

    @property
    def longest_sequence(self) -> int:
        """The largest sequence length at which, after a cut, every split that needs a block has one; below
        SHORTEST_SEQUENCE if there is no such length."""
        total = self.tokens
        return min(total // len(self.splits_to_fill), total - int(self.validation_fraction * total)) - 1

    @property
    def tokenizer_files(self) -> list[str]:
        return [name for name in self.files if name.startswith("tokenizer/")]


def blocks(tokens: int, sequence_length: int) -> int:
    """The number of blocks of sequence_length + 1 tokens, one starting every sequence_length tokens, in a stream."""
    return max(0, tokens - 1) // sequence_length


def read(folder: Path, name: str = "manifest.json") -> Manifest | None:
    """The manifest (or progress.json, by `name`) in `folder`; None without one. Raises DataError if it is damaged."""
    path = folder / name
    if not path.is_file():
        return None
    values = read_sealed(path, DataError, _again(folder))
    if values.get("version") != VERSION:
        raise DataError(
            f"{path} has layout version {values.get('version')}, but this sparsellm reads version {VERSION}:"
            f" {_again(folder)}"
        )
    try:
        return Manifest(**{**values, **{split: Split(**values[split]) for split in SPLITS}})
    except (TypeError, KeyError) as error:
        raise DataError(f"{path} is damaged ({type(error).__name__}: {error}): {_again(folder)}") from None


def write(manifest: Manifest, folder: Path, name: str) -> None:
    """Write `manifest` to the file `name` in `folder`, atomically, and sync it to disk."""
    write_sealed(folder / name, asdict(manifest))


def checksums(folder: Path, names: Iterable[str], verified: Verified | None = None) -> dict[str, dict[str, Any]]:
    """Size and xxh3 of the files `names` in `folder`. `verified`: a cache of known checksums."""
    return _checksums(folder, {name: (folder / name).stat().st_size for name in names}, verified)


def _checksums(folder: Path, sizes: dict[str, int], verified: Verified | None) -> dict[str, dict[str, Any]]:
    """Size and xxh3 of the first `sizes[name]` bytes of each file."""
    known = {name for name in sizes if verified is not None and verified.is_known(name, folder / name)}
    unknown = sum(size for name, size in sizes.items() if name not in known)
    # The bar appears only if reading takes long: 1 GB takes a second or two.
    with tqdm(total=unknown, desc=f"checksums of {folder}", unit="B", unit_scale=True, delay=5) as bar:
        return {
            name: {"bytes": size, "xxh3": _digest(name, folder / name, size, verified, bar)}
            for name, size in sizes.items()
        }


def _digest(name: str, path: Path, size: int, verified: Verified | None, bar: tqdm) -> str:
    if verified is None or size < path.stat().st_size:  # the cache holds checksums of whole files only
        return digest_of(path, size, bar).hexdigest()
    return verified.checksum(name, path, bar)


def size_mistakes(manifest: Manifest, folder: Path) -> list[str]:
    """Error messages for files of `manifest` that are missing or have a wrong size, and for counts that do not fit."""
    found = []
    for name, expected in manifest.files.items():
        path = folder / name
        if not path.is_file():
            found.append(f"{path} is missing: {_again(folder)}")
        elif (size := path.stat().st_size) != expected["bytes"] and not (name in FILES and size > expected["bytes"]):
            found.append(
                f"{path} has {size:,} bytes, but {folder}/manifest.json says {expected['bytes']:,}: {_again(folder)}"
            )
    return found or _count_mistakes(manifest, folder)


def _count_mistakes(manifest: Manifest, folder: Path) -> list[str]:
    path, bytes_of = folder / "manifest.json", {name: file["bytes"] for name, file in manifest.files.items()}
    if unknown := sorted({*FILES, "tokenizer/tokenizer.json"} - bytes_of.keys()):
        return [f"{path} does not list {', '.join(unknown)}: {_again(folder)}"]
    found = []
    for name in SPLITS:
        split: Split = getattr(manifest, name)
        count = blocks(split.tokens, manifest.sequence_length)
        for what, said, follows in (
            (f"bytes of {name}.tokens", split.tokens * manifest.token_bytes, bytes_of[f"{name}.tokens"]),
            (f"bytes of {name}.documents", split.documents * DOCUMENT_BYTES, bytes_of[f"{name}.documents"]),
            (f"blocks of {name}", split.blocks, count),
            (
                f"tokens of {name} after the last block",
                split.dropped_tail,
                max(0, split.tokens - 1) - count * manifest.sequence_length,
            ),
        ):
            if said != follows:
                found.append(f"{path} counts {said:,} {what}, but there are {follows:,}: {_again(folder)}")
    return found


def _tokenizer_mistakes(manifest: Manifest, folder: Path) -> list[str]:
    """Error messages if `manifest` disagrees with the files in tokenizer/."""
    file = folder / "tokenizer" / "tokenizer.json"
    vocabulary = tokenizer.load(str(file), "data.path")
    return [
        f"{folder}/manifest.json says {key} {getattr(manifest, key)}, but {file} says {there}: {_again(folder)}"
        for key, there in (
            ("tokenizer_hash", tokenizer.digest(vocabulary, file.read_bytes())),
            ("vocab_size", tokenizer.vocabulary_size(vocabulary)),
            ("end_of_text_id", tokenizer.end_of_text_id(vocabulary)),
            ("begin_of_text_id", tokenizer.begin_of_text_id(vocabulary)),
        )
        if getattr(manifest, key) != there
    ]


def verify(manifest: Manifest, folder: Path, names: list[str] | None = None, verified: Verified | None = None) -> None:
    """Verify checksums, counts and tokenizer of a finished `folder`, or only the checksums of `names`. Raises DataError
    that lists what is missing or changed. `verified`: see `compare`."""
    if found := size_mistakes(manifest, folder):
        raise DataError("; ".join(found))
    compare(manifest, folder, list(manifest.files) if names is None else names, verified)
    if names is None and (found := _tokenizer_mistakes(manifest, folder)):
        raise DataError("; ".join(found))


def compare(manifest: Manifest, folder: Path, names: list[str], verified: Verified | None = None) -> None:
    """Compare the checksums of the files `names` with those in `manifest`. Raises DataError if a file differs.

    `verified`: a cache of checksums; cached files are not read, and files that are read are added to the cache.
    """
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise DataError("; ".join(f"{folder / name} is missing: {_again(folder)}" for name in missing))
    sizes = {name: (folder / name).stat().st_size for name in names}
    for name in names:
        if name in manifest.files and name in FILES:
            sizes[name] = min(sizes[name], manifest.files[name]["bytes"])
    actual = _checksums(folder, sizes, verified)
    if changed := [name for name in names if actual[name] != manifest.files.get(name)]:
        raise DataError("; ".join(corrupt(folder, name) for name in changed))
    if verified is not None:
        verified.keep()


def corrupt(folder: Path, name: str) -> str:
    return f"{folder / name} is corrupt (its xxh3 differs from what was written): {_again(folder)}"


def _again(folder: Path) -> str:
    return f"restore it, or delete {folder} and prepare again"
