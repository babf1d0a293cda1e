"""Finds the model that a name refers to: a run, a checkpoint, a Hugging Face folder, or a repository on the hub."""

import difflib
import hashlib
import json
import os
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from sparsellm.config import RunConfig
from sparsellm.hf import pretrained
from sparsellm.hf.hub import is_missing
from sparsellm.runs.committed import HASH_THREADS, file_digest, problems, recorded
from sparsellm.runs.layout import (
    ANALYSIS,
    BENCHMARK,
    CHECKPOINTS,
    COMMITTED,
    CONFIG,
    EVALUATION,
    HF,
    STEP,
    checkpoints_by_step,
)
from sparsellm.system.errors import SparsellmError

RUNS = RunConfig.root  # default folder of runs
LISTED = 10  # maximum number of existing folders that the message about a missing folder lists
TEXTS = "plain text, or parquet or jsonl with a column `text`"  # accepted as text=FILE
OTHER_ROWS = (".csv", ".tsv", ".ndjson", ".jsonlines", ".arrow")
# Output folders, in the working directory, for results of checkpoints that are read-only or on the hub.
ELSEWHERE = {EVALUATION: "evaluations", ANALYSIS: "analyses", BENCHMARK: "benchmarks"}


class CheckpointNotFound(SparsellmError, ValueError):
    """A name refers to no model; the message says what is missing."""


@dataclass(frozen=True)
class Checkpoint:
    """A model that transformers can load, and its run, if any."""

    model: str  # a folder, or a hub name
    folder: Path | None  # a run's checkpoint or an hf/ folder; None on the hub
    run: Path | None  # the folder of the run; None for a model that belongs to no run
    step: int | None  # the training step; None if unknown

    def __str__(self) -> str:
        return self.model if self.folder is None else str(self.folder)

    @property
    def title(self) -> str:
        """ "RUN, step N" for a run's checkpoint, the last two parts of any other folder, or the hub name."""
        if self.run is not None:
            return f"{self.run.resolve().name}, step {self.step:,}"
        return self.model if self.folder is None else "/".join(self.folder.resolve().parts[-2:])

    @property
    def has_checksums(self) -> bool:
        """Whether the model is in a checkpoint with COMMITTED, with or without the rest of the run."""
        return self.folder is not None and (self.folder / COMMITTED).is_file()

    @property
    def unchecked(self) -> str | None:
        """A warning if the model's files have no checksums; None if they do, or if the model is on the hub."""
        if self.folder is None or self.has_checksums:
            return None
        return f"{self} has no {COMMITTED} file: its files are not verified against checksums"

    @property
    def wanted(self) -> str:
        """How messages refer to a name that is looked up on the hub."""
        return f"checkpoint={self}, which is not a local folder,"

    def output(self, added: str, asked: str | None = None, limit: int | None = None) -> Path:
        """The output folder for `added`, one of layout.ADDED: `asked` unless None, otherwise a folder inside the
        checkpoint or, if the checkpoint is not writable, in the working directory (ELSEWHERE, e.g. evaluations/NAME).
        With `limit`, a subfolder.
        """
        if asked is not None:
            return Path(asked).expanduser()
        inside = None if self.folder is None else self.folder / added
        if inside is not None and os.access(inside if inside.exists() else inside.parent, os.W_OK | os.X_OK):
            whole = inside
        elif self.run is not None:
            whole = Path(ELSEWHERE[added], f"{self.run.resolve().name}-{self.step}")
        elif self.folder is not None:
            whole = Path(ELSEWHERE[added], "-".join(self.folder.resolve().parts[-2:]))
        else:
            whole = Path(ELSEWHERE[added], self.model.replace("/", "--"))
        return whole if limit is None else whole / f"limit_{limit}"

    def identity(self) -> str:
        """A hash of the model's files; on the hub, the commit.

        Raises CheckpointNotFound if a file differs from COMMITTED.
        """
        if self.folder is None:
            return f"{self.model}@{pretrained.commit(self.model)}"
        if self.has_checksums:
            self.verify(HF)
            digests = {Path(name).name: digest for name, (_, digest) in recorded(self.folder, f"{HF}/")[1].items()}
        else:
            try:
                pretrained.require_files(Path(self.model))
            except pretrained.BrokenModel as error:
                raise CheckpointNotFound(str(error)) from error
            files = [path for path in Path(self.model).iterdir() if path.is_file()]
            with ThreadPoolExecutor(HASH_THREADS) as pool:
                digests = dict(zip((path.name for path in files), pool.map(file_digest, files), strict=True))
        return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()

    def verify(self, inside: str) -> None:
        """Raises CheckpointNotFound if a file in the checkpoint's subfolder `inside` differs from COMMITTED."""
        assert self.folder is not None
        if wrong := problems(self.folder, self.step, f"{inside}/"):
            raise CheckpointNotFound(f"checkpoint {self} is damaged: {'; '.join(wrong)}; choose another checkpoint")


def unreadable(checkpoint: Checkpoint, error: Exception) -> str:
    """The message for a checkpoint whose files cannot be read."""
    reason = " ".join(str(error).split())
    if checkpoint.run is not None and checkpoint.folder is not None and not checkpoint.folder.exists():
        return (
            f"checkpoint={checkpoint} is gone: a run that is training keeps its newest checkpoints only"
            f" (run.keep_checkpoints). Run the command again with checkpoint={checkpoint.run} for the newest"
        )
    if checkpoint.folder is not None:
        return f"checkpoint={checkpoint} cannot be read: {reason}"
    return (
        f"checkpoint={checkpoint} is not a local folder, and no model of that name can be read from the hub"
        f" ({reason}): give the folder of a run, a checkpoint or an {HF}/ folder, or the name of a model on the hub"
    )


def locate(name: str) -> Checkpoint:
    """The model that `name` refers to; for a run, its last checkpoint. Raises CheckpointNotFound if there is none."""
    try:
        return _located(name)
    except OSError as error:  # no permission for a folder on the path
        raise CheckpointNotFound(f"checkpoint={name} cannot be read: {error.strerror}: {error.filename}") from error


def _located(name: str) -> Checkpoint:
    path = Path(name).expanduser()
    if not path.exists():
        if _means_a_path(name):
            raise CheckpointNotFound(_missing(name))
        return Checkpoint(name, None, None, None)
    if (path / CHECKPOINTS).is_dir():
        whole = [f for f in checkpoints_by_step((path / CHECKPOINTS).iterdir()).values() if (f / COMMITTED).is_file()]
        if not whole:
            raise CheckpointNotFound(
                f"checkpoint={name} is a run without a complete checkpoint: continue its training first"
            )
        return _of_run(whole[-1])
    if (path / HF).is_dir():
        if not (path / COMMITTED).is_file():
            raise CheckpointNotFound(f"checkpoint={name} was not saved completely: it has no {COMMITTED} file")
        return _of_run(path)
    if not (path / "config.json").is_file():
        # The Trainer of transformers saves to checkpoint-STEP/. The longest name has the most digits.
        saved = sorted(path.glob("checkpoint-*/config.json"), key=lambda f: (len(f.parent.name), f.parent.name))
        raise CheckpointNotFound(
            f"checkpoint={name} contains no model: it should have {CHECKPOINTS}/ (a run), {HF}/ (a checkpoint) or"
            " config.json (a Hugging Face folder)" + "".join(f"; try checkpoint={f.parent}" for f in saved[-1:])
        )
    inside = path.resolve().parent
    if path.resolve().name == HF and (inside / COMMITTED).is_file():
        return _of_run(inside if path.parent.resolve() != inside or path.name != HF else path.parent)
    return Checkpoint(str(path), path, None, None)


def not_found(name: str | None) -> list[str]:
    """Error messages if `name` refers to no model; [] if it refers to one, or is None."""
    try:
        if name is not None:
            locate(name)
    except CheckpointNotFound as error:
        return [str(error)]
    return []


def text_mistakes(text: str | None, models: Iterable[tuple[str, str]]) -> list[str]:
    """Error messages if the file `text` cannot be used, or a name in `models`, pairs (key, name), refers to no model.
    Without `text`, every model must belong to a run, whose held-out data is used."""
    found = []
    if text is not None and not Path(text).expanduser().is_file():
        found.append(f"text={text} is not a file: it should be {TEXTS}")
    elif text is not None and Path(text.removesuffix(".gz")).suffix.lower() in OTHER_ROWS:
        found.append(f"text={text} has an unsupported format: it should be {TEXTS}")
    for key, name in models:
        try:
            checkpoint = locate(name)
        except CheckpointNotFound as error:
            found.append(str(error).replace("checkpoint=", f"{key}=", 1))
            continue
        if text is None and checkpoint.run is None:
            what = "is not a local folder, but a hub name" if checkpoint.folder is None else "belongs to no run"
            found.append(f"{key}={checkpoint} {what}, so it has no held-out text: give a text with text=FILE")
    return found


def _means_a_path(name: str) -> bool:
    """Whether `name`, which does not exist locally, is a path rather than a hub name OWNER/NAME."""
    first, *rest = Path(name).parts or [""]
    near = Path(first).is_dir() or first in (RUNS, CHECKPOINTS) if rest else Path(RUNS, name).exists()
    return near or is_missing(name) or re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) is None


def _missing(name: str) -> str:
    """The message that the path `name` does not exist, with suggestions."""
    path, text = Path(name).expanduser(), f"checkpoint={name} does not exist"
    if (run := Path(RUNS, name)).exists():
        return f"{text}: did you mean {run}?"
    absent = next(p for p in (path, *path.parents) if p.parent.exists())  # the first missing part of the path
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
    """The Checkpoint for a checkpoint's folder; run is None if the folder was copied without its run."""
    where = folder.resolve()
    step, run = re.fullmatch(STEP, where.name), where.parents[1]
    if step is None or where.parent.name != CHECKPOINTS or not (run / CONFIG).is_file():
        return Checkpoint(str(folder / HF), folder, None, None)
    return Checkpoint(str(folder / HF), folder, run, int(step[1]))
