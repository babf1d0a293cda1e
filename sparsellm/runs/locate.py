"""Which model a name means: a run, a checkpoint of a run, a Hugging Face folder, or a repository on the hub."""

import difflib
import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import xxhash

from sparsellm.config import RunConfig
from sparsellm.hf import pretrained
from sparsellm.hf.hub import is_missing
from sparsellm.runs.layout import ANALYSIS, BENCHMARK, CHECKPOINTS, COMMITTED, CONFIG, EVALUATION, HF, STEP
from sparsellm.system import regular
from sparsellm.system.errors import SparsellmError
from sparsellm.system.files import read_json

DIGEST_THREADS = 8
RUNS = RunConfig.root  # where runs are by default
LISTED = 10  # folders at most, that are named where another one is missing
TEXTS = "plain text, or parquet or jsonl with a column `text`"  # what a text=FILE may be
OTHER_ROWS = (".csv", ".tsv", ".ndjson", ".jsonlines", ".arrow")
# For checkpoints that cannot be written.
ELSEWHERE = {EVALUATION: "evaluations", ANALYSIS: "analyses", BENCHMARK: "benchmarks"}


class CheckpointNotFound(SparsellmError, ValueError):
    """A name that means no model, with what is missing."""


@dataclass(frozen=True)
class Checkpoint:
    """A model that transformers can load, and the run that it is from, if any."""

    model: str  # a folder, or a hub name
    folder: Path | None  # that it lies in: a run's checkpoint or an hf/ folder; None on the hub
    run: Path | None  # the folder of its run
    step: int | None  # of that run

    def __str__(self) -> str:
        return self.model if self.folder is None else str(self.folder)

    @property
    def has_checksums(self) -> bool:
        """Whether it lies in a checkpoint of ours, also one without the rest of its run."""
        return self.folder is not None and (self.folder / COMMITTED).is_file()

    @property
    def unchecked(self) -> str | None:
        """That nothing says which numbers its files should hold; None where something does, as of the hub's files."""
        if self.folder is None or self.has_checksums:
            return None
        return f"{self} has no {COMMITTED} file beside it: whether its numbers are those that were saved is not checked"

    @property
    def wanted(self) -> str:
        """What is looked for on the hub."""
        return f"checkpoint={self}, which is no folder here,"

    def output(self, added: str, asked: str | None = None, limit: int | None = None) -> Path:
        """The folder for what is `added`, one of run_layout.ADDED: `asked` if given, else inside, or, where that cannot
        be written, evaluations/NAME and so on (ELSEWHERE) in the working directory. Of so many rows only, `limit`, a
        folder in that one.
        """
        if asked is not None:
            return Path(asked).expanduser()
        whole = self._whole(added)
        return whole if limit is None else whole / f"limit_{limit}"

    def _whole(self, added: str) -> Path:
        if self.folder is not None:
            inside = self.folder / added
            if os.access(inside if inside.exists() else self.folder, os.W_OK | os.X_OK):
                return inside
        if self.run is not None:
            name = f"{self.run.resolve().name}-{self.step}"
        elif self.folder is not None:
            name = "-".join(self.folder.resolve().parts[-2:])
        else:
            name = self.model.replace("/", "--")
        return Path(ELSEWHERE[added], name)

    def identity(self) -> str:
        """What its files hold, in one hash; on the hub, the commit.

        Raises CheckpointNotFound if a file is not the one that a run's checkpoint was committed with.
        """
        if self.folder is None:
            return f"{self.model}@{pretrained.commit(self.model)}"
        files = {path.name: path for path in sorted(Path(self.model).iterdir()) if path.is_file()}
        if self.has_checksums:
            # First what takes no time: a file may have grown by more than can be read.
            self._require({name: path.stat().st_size for name, path in files.items()}, "bytes")
        else:
            try:
                pretrained.require_files(Path(self.model))
            except pretrained.BrokenModel as error:
                raise CheckpointNotFound(str(error)) from error
        with ThreadPoolExecutor(DIGEST_THREADS) as pool:
            digests = dict(zip(files, pool.map(file_digest, files.values()), strict=True))
        if self.has_checksums:
            self._require(digests, "xxh3_128")
        return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()

    def _require(self, found: Mapping[str, object], entry: str) -> None:
        """Raises CheckpointNotFound if what is `found` of each file is not the `entry` that COMMITTED has of it."""
        assert self.folder is not None
        remedy = "give another one"
        committed = read_json(self.folder / COMMITTED, CheckpointNotFound, remedy)
        try:
            files = committed["files"].items()
            wanted = {Path(n).name: e[entry] for n, e in files if n.startswith(f"{HF}/")}
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointNotFound(f"{self.folder / COMMITTED} is damaged: {remedy}") from error
        if wrong := sorted(n for n in wanted.keys() | found.keys() if wanted.get(n) != found.get(n)):
            raise CheckpointNotFound(
                f"checkpoint {self} is damaged: {', '.join(f'{HF}/{name}' for name in wrong)} is not as"
                f" {COMMITTED} says; {remedy}"
            )


def unreadable(checkpoint: Checkpoint, error: Exception) -> str:
    """What is said of a checkpoint whose files cannot be read."""
    reason = " ".join(str(error).split())
    if checkpoint.folder is not None:
        return f"checkpoint={checkpoint} cannot be read: {reason}"
    return (
        f"checkpoint={checkpoint} is no folder here, and no model of that name can be read from the hub"
        f" ({reason}): give the folder of a run, a checkpoint or an {HF}/ folder, or the name of a model on the hub"
    )


def file_digest(path: Path) -> str:
    """xxh3_128 of a file's contents, in hex, as a run's checkpoints record it."""
    digest = xxhash.xxh3_128()
    with regular.to_read(path) as file:
        while piece := file.read(1 << 24):
            digest.update(piece)
    return digest.hexdigest()


def locate(name: str) -> Checkpoint:
    """The model that `name` means; a run's folder means its last checkpoint. Raises CheckpointNotFound."""
    try:
        return _located(name)
    except OSError as error:  # it lies in a folder of somebody else
        raise CheckpointNotFound(f"checkpoint={name} cannot be read: {error.strerror}: {error.filename}") from error


def _located(name: str) -> Checkpoint:
    path = Path(name).expanduser()
    if not path.exists():
        if _means_a_path(name):
            raise CheckpointNotFound(_missing(name))
        return Checkpoint(name, None, None, None)
    if (path / CHECKPOINTS).is_dir():
        steps = {int(m[1]): p for p in (path / CHECKPOINTS).iterdir() if (m := re.fullmatch(STEP, p.name))}
        whole = [step for step, folder in steps.items() if (folder / COMMITTED).is_file()]
        if not whole:
            raise CheckpointNotFound(f"checkpoint={name} is a run without a whole checkpoint: let it train on")
        return _of_run(steps[max(whole)])
    if (path / HF).is_dir():
        if not (path / COMMITTED).is_file():
            raise CheckpointNotFound(f"checkpoint={name} was not saved to its end, for it has no {COMMITTED} file")
        return _of_run(path)
    if not (path / "config.json").is_file():
        raise CheckpointNotFound(
            f"checkpoint={name} holds no model: it should have {CHECKPOINTS}/ (a run), {HF}/ (a checkpoint) or"
            " config.json (a Hugging Face folder)"
        )
    inside = path.resolve().parent
    if path.resolve().name == HF and (inside / COMMITTED).is_file():
        return _of_run(inside if path.parent.resolve() != inside or path.name != HF else path.parent)
    return Checkpoint(str(path), path, None, None)


def not_found(name: str | None) -> list[str]:
    """Why `name` means no model, as a command's mistakes; [] if it does, or if there is no name."""
    try:
        if name is not None:
            locate(name)
    except CheckpointNotFound as error:
        return [str(error)]
    return []


def text_mistakes(text: str | None, models: Iterable[tuple[str, str]]) -> list[str]:
    """Why some of `models`, (key, name) each, mean none, or have nothing to read: neither the file `text` nor, where
    that is None, held-out text of a run of theirs."""
    found = []
    if text is not None and not Path(text).expanduser().is_file():
        found.append(f"text={text} is not a file: it should be {TEXTS}")
    elif text is not None and Path(text.removesuffix(".gz")).suffix.lower() in OTHER_ROWS:
        found.append(f"text={text} has rows of a kind that is not read: it should be {TEXTS}")
    for key, name in models:
        try:
            checkpoint = locate(name)
        except CheckpointNotFound as error:
            found.append(str(error).replace("checkpoint=", f"{key}=", 1))
            continue
        if text is None and checkpoint.run is None:
            what = "is not here, so taken for a hub name" if checkpoint.folder is None else "is of no run"
            found.append(f"{key}={checkpoint} {what}: it has no held-out text, so give it some by text=FILE")
    return found


def _means_a_path(name: str) -> bool:
    """Whether `name`, which does not exist here, can be no hub name, OWNER/NAME, or is more likely a path."""
    first, *rest = Path(name).parts or [""]
    near = Path(first).is_dir() or first in (RUNS, CHECKPOINTS) if rest else Path(RUNS, name).exists()
    return near or is_missing(name) or re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) is None


def _missing(name: str) -> str:
    """That nothing is at the path `name`, and what is near it."""
    path, text = Path(name).expanduser(), f"checkpoint={name} does not exist"
    if (run := Path(RUNS, name)).exists():
        return f"{text}: did you mean {run}?"
    absent = next(p for p in (path, *path.parents) if p.parent.exists())  # the first part of the path that is not there
    folder = absent.parent
    names = sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    close = difflib.get_close_matches(absent.name, names, n=1) or [n for n in names if n.startswith(absent.name)][:1]
    here = f"the working directory, {Path.cwd()}," if folder == Path() else str(folder)
    if close:
        meant = folder / close[0]
        whole = meant / path.relative_to(absent)
        text += f": did you mean {whole if whole.exists() else meant}?"
    else:
        text += f": {here} has no {absent.name}; give a run, a checkpoint, an {HF}/ folder, or a hub name."
    if folder != Path() and 0 < len(names) <= LISTED:
        text += f" In {folder} there {'is' if len(names) == 1 else 'are'} {', '.join(names)}"
    return text


def _of_run(folder: Path) -> Checkpoint:
    """A checkpoint's folder; without the rest of its run, for one that was copied alone."""
    where = folder.resolve()
    step, run = re.fullmatch(STEP, where.name), where.parents[1]
    if step is None or where.parent.name != CHECKPOINTS or not (run / CONFIG).is_file():
        return Checkpoint(str(folder / HF), folder, None, None)
    return Checkpoint(str(folder / HF), folder, run, int(step[1]))
