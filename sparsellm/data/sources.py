"""Checks whether the source text of prepared tokens has changed.

A finished folder keeps the checksum of each local source file (`Manifest.source_checksums`), and verified.json its size
and times. A file with a different size or time is read again: a copy, or a file that was only touched, counts as
unchanged. Files from which no document was read may change. If none of the files exist, as on a machine that has only
the tokens, nothing is reported.
"""

from pathlib import Path

from sparsellm.data import corpus
from sparsellm.data.checksums import Verified, stamp
from sparsellm.data.manifest import Manifest

NAMED = 3  # most files listed in one message


def changes(manifest: Manifest, folder: Path) -> list[str]:
    """How the text of a finished `folder` has changed, as a list of at most one message."""
    read = _read_for(manifest)
    there = [file for file in read if stamp(Path(file)) is not None]
    if not there:
        return []
    verified = Verified(folder)
    try:
        others = [file for file in there if _is_changed(file, manifest, folder, verified)]
    except OSError as error:
        return [f"{error.filename} cannot be read ({error.strerror}): fix that, or remove the file"]
    verified.keep()
    gone = [file for file in read if file not in there]
    found = [
        f"{names(files)} {one if len(files) == 1 else several}"
        for files, one, several in (
            (others, "has changed since", "have changed since"),
            (gone, "was removed since", "were removed since"),
            (_added(manifest), "was not there when", "were not there when"),
        )
        if files
    ]
    return [f"{' and '.join(found)} {folder} was prepared"] if found else []


def refusal(change: str, folder: Path) -> str:
    """The message `change` from `changes`, with its remedy."""
    return (
        f"{change}, so its tokens are those of the old text: prepare the current text in another folder (another"
        f" data.name), delete {folder} and prepare again, or restore the old text"
    )


def names(files: list[str]) -> str:
    """The first few of `files`, and the number of others."""
    rest = len(files) - NAMED
    return ", ".join(files[:NAMED]) + (f" and {rest:,} other{'s' if rest > 1 else ''}" if rest > 0 else "")


def _read_for(manifest: Manifest) -> list[str]:
    """The local files that were read."""
    return [file for file in manifest.source_files if file in manifest.source_checksums]


def _is_changed(file: str, manifest: Manifest, folder: Path, verified: Verified) -> bool:
    now, key = stamp(Path(file)), key_of(file)
    assert now is not None
    if manifest.source_files[file] not in (None, now.bytes):
        return True
    if not verified.knows(key):  # without verified.json, which folders prepared before 0.1.0 lack
        made = stamp(folder / "manifest.json")
        if made is not None and now.mtime_ns < made.mtime_ns:
            return False
    return verified.checksum(key, Path(file)) != manifest.source_checksums[file]


def key_of(file: str) -> str:
    """The key of a source in verified.json, distinct from those of the folder's own files."""
    return f"source {file}"


def _added(manifest: Manifest) -> list[str]:
    """Files that match data.files now but did not when the text was read."""
    patterns = manifest.recipe.get("data.files")
    if not (manifest.exhausted and patterns):
        return []
    return [file for file in corpus.local_files(patterns)[0] if file not in manifest.source_files]
