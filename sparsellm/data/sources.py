"""Checks whether the text from which tokens were prepared has changed.

A manifest identifies each local source file by a checksum (`Manifest.source_checksums`): of all bytes if the file was
read to its end, otherwise of its first and last MiB, because preparing a share of a large corpus should not require
reading all of it. verified.json has the file's size and times. A file whose size or times differ is read again, so that
a copy, or a file that was only touched, counts as unchanged. Files from which no document was read may change. If none
of the files exist, as on a machine that has only the tokens, nothing is reported.
"""

from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from sparsellm.config import DataConfig, Source
from sparsellm.data import corpus, token_files
from sparsellm.data.checksums import Verified, digest_of, digest_of_ends, stamp
from sparsellm.data.corpus import Document
from sparsellm.data.errors import DataError
from sparsellm.data.manifest import SPLITS, Manifest, Split
from sparsellm.system.errors import listed

NAMED = 3  # maximum number of files listed in one message
_ENDS = "ends "  # prefix of checksums over a file's first and last MiB only


def changes(manifest: Manifest, folder: Path) -> list[str]:
    """A message that says how the source text of a finished `folder` has changed; an empty list if it has not."""
    read = [file for file in manifest.source_files if file in manifest.source_checksums]
    there = [file for file in read if stamp(Path(file)) is not None]
    if not there:
        return []
    verified = Verified(folder)
    try:
        others = [file for file in there if _is_changed(file, manifest, folder, verified)]
    except DataError as error:
        return [str(error)]
    verified.keep()
    gone = [file for file in read if file not in there]
    found = [
        f"{listed(files, NAMED)} {one if len(files) == 1 else several}"
        for files, one, several in (
            (others, "has changed since", "have changed since"),
            (gone, "was removed since", "were removed since"),
            (_added(manifest), "was not there when", "were not there when"),
        )
        if files
    ]
    return [f"{' and '.join(found)} {folder} was prepared"] if found else []


def refusal(change: str, folder: Path) -> str:
    """The message `change`, returned by `changes`, with a remedy."""
    return (
        f"{change}, so its tokens are those of the old text: prepare the current text in another folder (another"
        f" data.name), delete {folder} and prepare again, or restore the old text"
    )


def _is_changed(file: str, manifest: Manifest, folder: Path, verified: Verified) -> bool:
    now, recorded = stamp(Path(file)), manifest.source_checksums[file]
    assert now is not None
    if manifest.source_files[file] not in (None, now.bytes):
        return True
    if not verified.knows(_key(file, _is_whole(recorded))):  # folders prepared before 0.1.0 lack verified.json
        made = stamp(folder / "manifest.json")
        if made is not None and now.mtime_ns < made.mtime_ns:
            return False
    return _checksum(file, _is_whole(recorded), verified) != recorded


def _is_whole(recorded: str) -> bool:
    return not recorded.startswith(_ENDS)


def _key(file: str, whole: bool) -> str:
    """The key for a source file in verified.json, distinct from the keys for the folder's own files."""
    return f"source {file}" if whole else f"ends of source {file}"


def _checksum(file: str, whole: bool, verified: Verified) -> str:
    """A source file's checksum for the manifest; empty without the file. Raises DataError if it cannot be read."""
    key, path = _key(file, whole), Path(file)
    try:
        return verified.checksum(key, path) if whole else _ENDS + verified.checksum(key, path, digest=digest_of_ends)
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror}): restore the file") from error


def _added(manifest: Manifest) -> list[str]:
    """Files that match data.files now, but were missing when the text was read."""
    patterns = manifest.recipe.get("data.files")
    if not (manifest.exhausted and patterns):
        return []
    return [file for file in corpus.local_files(patterns)[0] if file not in manifest.source_files]


def with_current_sources(data: DataConfig, folder: Path, manifest: Manifest) -> Manifest:
    """`manifest` with the current source files. Files not read yet, and the file being read (which is then read again),
    may have changed or disappeared. Raises DataError if any other file has changed, or if files were added.
    """
    before = manifest.source_files
    now = corpus.find_files(data) if data.source == Source.files else before
    verified, recorded = Verified(folder), manifest.source_checksums
    other = {
        file for file in _checking(before)
        if now.get(file, 0) != before[file]
        or (file in recorded and _checksum(file, _is_whole(recorded[file]), verified) != recorded[file])
    }  # fmt: skip
    verified.keep()
    if added := [file for file in now if file not in before]:
        raise DataError(
            f"{listed(added, NAMED)} {'was' if len(added) == 1 else 'were'} not there when the preparation of {folder}"
            " started: remove the addition, or prepare all files in another folder (another data.name)"
        )
    current = _current(manifest)
    if finished := [file for file in _kept(manifest) if file in other and file != current]:
        since = "has changed since it was" if len(finished) == 1 else "have changed since they were"
        raise DataError(
            f"{listed(finished, NAMED)} {since} read for {folder}: restore the original, or choose another"
            " data.name or data.path"
        )
    if not other:
        return manifest
    print(
        f"sparsellm: {listed(sorted(other), NAMED)}, not completely read for {folder} yet, changed or disappeared: the"
        " preparation continues with the current files",
        flush=True,
    )
    if current in other:
        print(f"sparsellm: removed the tokens of {current}, which is read again", flush=True)
        manifest = _before_the_file(folder, manifest, current)

    def among_current(position: dict[str, Any]) -> dict[str, Any]:
        gone = sum(file not in now for file in list(before)[: position["file"]])
        return {**position, "file": position["file"] - gone}

    begun = manifest.begun and {**manifest.begun, "position": among_current(manifest.begun["position"])}
    return replace(manifest, source_files=now, position=among_current(manifest.position), begun=begun)


def _kept(manifest: Manifest) -> list[str]:
    """The files that must not change, because they contributed tokens, or decide which documents do."""
    files, position = list(manifest.source_files), manifest.position
    if manifest.seed is None:
        return files[: position["file"] + (position["document"] > 0)]
    return files if manifest.cut else [file for file in files if file in manifest.taken]


def _current(manifest: Manifest) -> str | None:
    """The file being read, if its documents can be rolled back."""
    if manifest.begun is None or manifest.position["document"] == 0:
        return None
    return list(manifest.source_files)[manifest.position["file"]]


def _before_the_file(folder: Path, manifest: Manifest, current: str) -> Manifest:
    """`manifest` as it was before the first document of the file `current`."""
    begun = manifest.begun
    assert begun is not None
    for split in SPLITS:
        with token_files.Writer(folder, split, manifest):
            pass  # opening a Writer verifies everything written so far; the part to keep has no separate checksum
    manifest = replace(
        manifest,
        **{**begun, **{split: Split(**begun[split]) for split in SPLITS}},
        begun=None,
        source_checksums={file: known for file, known in manifest.source_checksums.items() if file != current},
        taken={file: taken for file, taken in manifest.taken.items() if file != current},
    )
    sizes = token_files.sizes("train", manifest) | token_files.sizes("validation", manifest)
    kept = {name: {"bytes": size, "xxh3": digest_of(folder / name, size).hexdigest()} for name, size in sizes.items()}
    return replace(manifest, files=manifest.files | kept)


def so_far(manifest: Manifest) -> dict[str, Any]:
    """The state that `_before_the_file` restores."""
    return {
        **{split: asdict(getattr(manifest, split)) for split in SPLITS},
        "empty_documents": manifest.empty_documents,
        "bad_records": manifest.bad_records,
        "empty_files": manifest.empty_files,
        "licences": dict(manifest.licences),
        "position": dict(manifest.position),
    }


def _checking(files: Iterable[str]) -> Iterable[str]:
    return tqdm(files, desc="checksums of the text", unit=" files", delay=5, leave=False)


class Reading:
    """Tracks in the manifest how much of each source file was used, and the checksums of local files."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.manifest, self.verified = manifest, Verified(folder)
        self.files = list(manifest.source_files)
        self.stamps = {file: stamp(Path(file)) for file in self.files if "://" not in file}
        self.read: dict[str, bool] = {}  # for each file read since the last `sync`: whether it was read to its end
        self.taken: dict[str, int] = {}  # counts of documents and tokens taken from the current file

    def count_document(self, document: Document) -> None:
        """Count a document, or the end of a file if `document.end` is set."""
        if not self.files:  # the embedded corpus
            return
        file = self.files[document.file]
        self.read[file] = document.end
        if self.manifest.seed is not None:
            self.taken = self.manifest.taken.setdefault(file, {"documents": 0, "tokens": 0, "all": 0})
            self.taken["documents"] += not document.end
            self.taken["all"] = int(document.end)

    def count_tokens(self, tokens: int) -> None:
        """Add `tokens`, the last document's training tokens, to the count for the current file."""
        if self.taken:
            self.taken["tokens"] += tokens

    def sync(self) -> None:
        """Record the checksums of the files read since the last `sync`. Raises DataError if one changed meanwhile."""
        for file in _checking(self.read):
            if file not in self.stamps:
                continue
            self.manifest.source_checksums[file] = _checksum(file, self.read[file], self.verified)
            if stamp(Path(file)) != self.stamps[file]:
                raise DataError(
                    f"{file} was changed while it was being read: stop whatever writes to it, and prepare again"
                )
        self.read = dict([*self.read.items()][-1:])
        self.verified.keep()
