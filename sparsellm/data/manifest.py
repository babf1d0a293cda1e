"""What is in a folder of prepared tokens, and whether it is whole.

    tokenizer/              loads with AutoTokenizer
    train.tokens            one stream of token ids, each document between the tokens that begin and end
                            a text, or only ended by one; little-endian uint16, or uint32 for a vocabulary above 65,536
    train.documents         where each document starts in it; little-endian int64
    validation.tokens, validation.documents
    manifest.json           this file's `Manifest`; written last, so its presence means that the rest is complete.
                            While tokens are added the others are longer than it says: what comes after is not read
    progress.json           the same while preparation goes on, with the checksums of what is written so far
    verified.json           which files were read and found to be right (checksums.py); may be missing
    lock                    held by the process that prepares

Both manifests are sealed with a checksum of their own (sparsellm.files). What they count is held against the files:
every file and every number that training relies on is found in two places, or refused.

Block n of a stream is its tokens [n T, n T + T], so blocks overlap by one token and the files fit every length T.

Held out are whole documents, chosen by their content (corpus.is_held_out). Where these leave a split without a single
block, as with one text file, the manifest says `cut`: take the training documents, and after them the held-out ones, as
one stream; its last tokens are the validation split, the tokens before them the training split, and no token is in
both. The document that the cut goes through is counted in both splits.
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

VERSION = 2  # of the layout above
SPLITS = ("train", "validation")
DOCUMENT_DTYPE, DOCUMENT_BYTES = "<i8", 8


@dataclass
class Split:
    """Of one split; blocks and dropped tail at the sequence length that it was prepared for."""

    documents: int = 0
    tokens: int = 0
    blocks: int = 0
    dropped_tail: int = 0  # tokens after the last whole block


@dataclass
class Manifest:
    recipe: dict[str, Any]  # the configuration that decides the tokens: see `Request.recipe`
    source_files: dict[str, int | None]  # in reading order; see corpus.Files
    tokenizer_hash: str  # tokenizer.digest of what is in tokenizer/
    vocab_size: int
    end_of_text_id: int
    sequence_length: int  # that was asked for when preparation began; decides whether the stream is cut, and where
    begin_of_text_id: int | None = None  # None: documents begin with no such token
    licence: str | None = None  # as the card of the hub data set names it
    licences: dict[str, int] = field(default_factory=dict)  # documents by the value of their licence column
    train: Split = field(default_factory=Split)
    validation: Split = field(default_factory=Split)
    source_checksums: dict[str, str] = field(default_factory=dict)  # xxh3 of the local source files read so far
    empty_documents: int = 0  # read, and left out for having no text
    bad_records: int = 0  # passed over for data.skip_bad_records
    empty_files: int = 0  # passed over for having no documents
    unparsable_modules: int = 0  # of the standard library
    tokenizer_characters: int | None = None  # of the text, from its start, that a tokenizer was trained on
    position: dict[str, int] = field(default_factory=lambda: {"file": 0, "document": 0})  # after the last document read
    # In progress.json: the counts and position before the first document of the file at `position`, whose documents can
    # be cut off again. None where the file has no document yet, or has some in a finished folder.
    begun: dict[str, Any] | None = None
    exhausted: bool = False  # whether the source has no more documents
    cut: bool = False  # whether the end of the stream is held out, because the documents are too few
    # Whether this preparation adds to a finished folder. Runs may have trained on its tokens, so `sequence_length`
    # stays: then a cut moves only towards the end, and no token of theirs is held out later.
    extends: bool = False
    files: dict[str, dict[str, Any]] = field(default_factory=dict)  # name -> bytes, xxh3, of what was written so far
    version: int = VERSION

    @property
    def token_dtype(self) -> str:
        return "<u2" if self.vocab_size <= 65_536 else "<u4"

    @property
    def token_bytes(self) -> int:
        return np.dtype(self.token_dtype).itemsize


def blocks(tokens: int, sequence_length: int) -> int:
    """How many blocks of sequence_length + 1 tokens, one starting every sequence_length, a stream holds."""
    return max(0, tokens - 1) // sequence_length


def is_enough(manifest: Manifest, limit: int | None) -> bool:
    return manifest.exhausted or (limit is not None and manifest.train.tokens >= limit)


def tokens_to_cut(manifest: Manifest) -> int:
    """How many tokens at the end of the stream to hold out, because whole documents leave a split without a block;
    0 where they do not. The share asked for, and at least one block."""
    length, (train, validation) = manifest.sequence_length, (manifest.train, manifest.validation)
    if min(blocks(train.tokens, length), blocks(validation.tokens, length)) > 0:
        return 0
    return max(length + 1, int(_fraction(manifest) * (train.tokens + validation.tokens)))


def longest_sequence(manifest: Manifest) -> int:
    """The largest sequence length at which a cut leaves both splits a block of these tokens; below 1 if none does."""
    total = manifest.train.tokens + manifest.validation.tokens
    return min(total // 2, total - int(_fraction(manifest) * total)) - 1


def _fraction(manifest: Manifest) -> float:
    return manifest.recipe["data.validation_fraction"]


def read(folder: Path, name: str = "manifest.json") -> Manifest | None:
    """The manifest in `folder`, or its progress.json; None if there is none. Raises DataError if it is damaged."""
    path = folder / name
    if not path.is_file():
        return None
    values = read_sealed(path, DataError, _again(folder))
    if values.get("version") != VERSION:
        raise DataError(
            f"{path} has layout version {values.get('version')} and this sparsellm reads {VERSION}: {_again(folder)}"
        )
    return _manifest(values, path)


def write(manifest: Manifest, folder: Path, name: str) -> None:
    """Write `manifest` to `folder`, whole or not at all, and on disk when this returns."""
    write_sealed(folder / name, asdict(manifest))


def _manifest(values: dict[str, Any], path: Path) -> Manifest:
    try:
        return Manifest(**{**values, **{split: Split(**values[split]) for split in SPLITS}})
    except (TypeError, KeyError) as error:
        raise DataError(f"{path} is damaged ({type(error).__name__}: {error}): {_again(path.parent)}") from None


def tokenizer_names(manifest: Manifest) -> list[str]:
    """The tokenizer's files among those of `manifest`."""
    return [name for name in manifest.files if name.startswith("tokenizer/")]


def checksums_of_tokenizer(folder: Path) -> dict[str, dict[str, Any]]:
    return checksums(folder, sorted(path.relative_to(folder).as_posix() for path in (folder / "tokenizer").iterdir()))


def checksums(folder: Path, names: Iterable[str], verified: Verified | None = None) -> dict[str, dict[str, Any]]:
    """Bytes and xxh3 of the files `names` of `folder`. `verified`: what knows some of them."""
    return _checksums(folder, {name: (folder / name).stat().st_size for name in names}, verified)


def _checksums(folder: Path, sizes: dict[str, int], verified: Verified | None) -> dict[str, dict[str, Any]]:
    """The same of their first bytes, as many as `sizes` says."""
    known = {name for name in sizes if verified is not None and verified.is_known(name, folder / name)}
    unknown = sum(size for name, size in sizes.items() if name not in known)
    # The bar appears only where reading takes long: 1 GB takes a second or two.
    with tqdm(total=unknown, desc=f"checksums of {folder}", unit="B", unit_scale=True, delay=5) as bar:
        return {
            name: {"bytes": size, "xxh3": _digest(name, folder / name, size, verified, bar)}
            for name, size in sizes.items()
        }


def _digest(name: str, path: Path, size: int, verified: Verified | None, bar: tqdm) -> str:
    if verified is None or size < path.stat().st_size:  # more was appended
        return digest_of(path, size, bar).hexdigest()
    return verified.checksum(name, path, bar)


def _may_be_longer(name: str) -> bool:
    """Whether what comes after the bytes that a manifest counts may be there, and is not read: while tokens are added,
    a folder is what it was until all of them are there."""
    return name in {f"{split}.{kind}" for split in SPLITS for kind in ("tokens", "documents")}


def size_mistakes(manifest: Manifest, folder: Path) -> list[str]:
    """Every file of `manifest` that is missing from `folder` or has another size, and every count in it that does not
    follow from those sizes."""
    found = []
    for name, expected in manifest.files.items():
        path = folder / name
        if not path.is_file():
            found.append(f"{path} is missing: {_again(folder)}")
        elif (size := path.stat().st_size) != expected["bytes"] and not (
            _may_be_longer(name) and size > expected["bytes"]
        ):
            found.append(
                f"{path} has {size:,} bytes and {folder}/manifest.json says {expected['bytes']:,}: {_again(folder)}"
            )
    return found or _count_mistakes(manifest, folder)


def _count_mistakes(manifest: Manifest, folder: Path) -> list[str]:
    path, bytes_of = folder / "manifest.json", {name: file["bytes"] for name, file in manifest.files.items()}
    needed = {f"{split}.{kind}" for split in SPLITS for kind in ("tokens", "documents")} | {"tokenizer/tokenizer.json"}
    if unknown := sorted(needed - bytes_of.keys()):
        return [f"{path} does not count {', '.join(unknown)}: {_again(folder)}"]
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
                found.append(f"{path} counts {said:,} {what} and there are {follows:,}: {_again(folder)}")
    return found


def _tokenizer_mistakes(manifest: Manifest, folder: Path) -> list[str]:
    """Whether `manifest` says another thing of the tokenizer than the files in tokenizer/ do."""
    file = folder / "tokenizer" / "tokenizer.json"
    vocabulary = tokenizer.load(str(file), "data.path")
    return [
        f"{folder}/manifest.json says {key} {getattr(manifest, key)} and {file} says {there}: {_again(folder)}"
        for key, there in (
            ("tokenizer_hash", tokenizer.digest(vocabulary, file.read_bytes())),
            ("vocab_size", tokenizer.vocabulary_size(vocabulary)),
            ("end_of_text_id", tokenizer.end_of_text_id(vocabulary)),
            ("begin_of_text_id", tokenizer.begin_of_text_id(vocabulary)),
        )
        if getattr(manifest, key) != there
    ]


def verify(manifest: Manifest, folder: Path, names: list[str] | None = None, verified: Verified | None = None) -> None:
    """Read every file of a finished `folder`, or `names`, and compare: the checksums, what the manifest counts and what
    it says of the tokenizer. Raises DataError naming what is missing or changed. `verified`: see `compare`."""
    if found := size_mistakes(manifest, folder):
        raise DataError("; ".join(found))
    compare(manifest, folder, list(manifest.files) if names is None else names, verified)
    if names is None and (found := _tokenizer_mistakes(manifest, folder)):
        raise DataError("; ".join(found))


def compare(manifest: Manifest, folder: Path, names: list[str], verified: Verified | None = None) -> None:
    """Read `names` and compare their checksums with those in `manifest`, from when the files were written.

    `verified`: files that it knows are not read, and those that are read it knows from then on.
    """
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise DataError("; ".join(f"{folder / name} is missing: {_again(folder)}" for name in missing))
    sizes = {name: (folder / name).stat().st_size for name in names}
    for name in names:
        if name in manifest.files and _may_be_longer(name):
            sizes[name] = min(sizes[name], manifest.files[name]["bytes"])
    actual = _checksums(folder, sizes, verified)
    if changed := [name for name in names if actual[name] != manifest.files.get(name)]:
        raise DataError("; ".join(corrupt(folder, name) for name in changed))
    if verified is not None:
        verified.keep()


def corrupt(folder: Path, name: str) -> str:
    return f"{folder / name} is corrupt: its xxh3 is not that of what was written there: {_again(folder)}"


def _again(folder: Path) -> str:
    return f"restore it, or delete {folder} and prepare again"
