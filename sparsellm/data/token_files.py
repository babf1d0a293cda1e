"""Writes the files in a folder of prepared tokens: appends documents, and cuts the stream (manifest.py)."""

import os
from contextlib import suppress
from pathlib import Path

import numpy as np

from sparsellm.data.checksums import digest_of
from sparsellm.data.errors import DataError
from sparsellm.data.manifest import DOCUMENT_BYTES, DOCUMENT_DTYPE, SPLITS, Manifest, Split, corrupt
from sparsellm.system import regular


def cut(folder: Path, manifest: Manifest, held_out: int) -> None:
    """Cut the stream of training documents followed by held-out ones, on disk and in `manifest`: the last
    `held_out` tokens of the stream become the validation split, the others the training split."""
    trained, kept = manifest.train.tokens, manifest.tokens - held_out
    paths = {(split, kind): folder / f"{split}.{kind}" for split in SPLITS for kind in ("tokens", "documents")}

    # At least one of the two is empty: the training tokens after the cut, or the held-out tokens before the cut.
    itemsize = np.dtype(manifest.token_dtype).itemsize
    after = np.fromfile(paths["train", "tokens"], manifest.token_dtype, offset=min(kept, trained) * itemsize)
    held = np.fromfile(paths["validation", "tokens"], manifest.token_dtype)
    before = held[: max(0, kept - trained)]
    of_train, of_held = (np.fromfile(paths[split, "documents"], DOCUMENT_DTYPE) for split in SPLITS)
    starts = np.concatenate([of_train, of_held + trained])
    train_starts, held_starts = starts[starts < kept], starts[starts >= kept] - kept
    if len(held_starts) == 0 or held_starts[0] > 0:
        held_starts = np.insert(held_starts, 0, 0)  # the rest of the document at the cut

    _replace_end(paths["train", "tokens"], min(kept, trained), before)
    _replace_end(paths["validation", "tokens"], 0, np.concatenate([after, held[len(before) :]]))
    _replace_end(paths["train", "documents"], 0, train_starts)
    _replace_end(paths["validation", "documents"], 0, held_starts)
    manifest.cut = True
    manifest.train = Split(len(train_starts), kept)
    manifest.validation = Split(len(held_starts), held_out)


def _replace_end(path: Path, kept: int, values: np.ndarray) -> None:
    """Truncate the file at `path` to its first `kept` integers, and append `values`."""
    with regular.to_write(path, "r+b") as file:
        file.truncate(kept * values.itemsize)
        file.seek(0, os.SEEK_END)
        file.write(values.tobytes())
        file.flush()
        os.fsync(file.fileno())


def sizes(split: str, manifest: Manifest) -> dict[str, int]:
    """The sizes in bytes of one split's files, by name."""
    counts: Split = getattr(manifest, split)
    return {
        f"{split}.tokens": counts.tokens * manifest.token_bytes,
        f"{split}.documents": counts.documents * DOCUMENT_BYTES,
    }


class Writer:
    """Appends documents to one split's files, and maintains their counts and checksums in the manifest."""

    def __init__(self, folder: Path, split: str, manifest: Manifest) -> None:
        self.counts: Split = getattr(manifest, split)
        self.dtype = manifest.token_dtype
        self.tokens: list[np.ndarray] = []
        self.starts: list[int] = []
        self.recorded = manifest.files
        self.digests = {}
        of_split = sizes(split, manifest)
        for name, size in of_split.items():
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
        self.files = {name: regular.to_write(folder / name, "ab") for name in of_split}

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *_: object) -> None:
        for file in self.files.values():
            with suppress(OSError):  # disk full: `flush` already raised this error, or has written everything
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
