"""A run's folder: runs/NAME/{config.yaml, metrics.jsonl, checkpoints/, plots/, wandb/}. One process group writes it."""

import json
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from sparsellm import locks
from sparsellm.config import Config, ConfigError, Precision, definition, load, parameters, save
from sparsellm.console import warn
from sparsellm.distributed import Ranks, on_main, require_shared
from sparsellm.files import sync
from sparsellm.run_layout import CHECKPOINTS, COMMITTED, CONFIG, STEP, checkpoint
from sparsellm.training.checkpoint import clear_leftovers, leftovers, size_of, spelled

__all__ = [
    "CHECKPOINTS", "CONFIG", "RunFolderError", "checkpoint", "claim", "is_finished", "mistakes", "open_folder",
    "room_mistakes", "tidy",
]  # fmt: skip

LOCK = "lock"
PATIENCE = 0.5  # seconds for which a start waits for another process that is about to end, as after a kill
SEEN_WITHIN = 60  # seconds after which a node of a network file system sees what another one has written
STATE_BYTES = 12  # of a parameter in a checkpoint's state/: the weight and two moments of AdamW, float32
HF_BYTES = {Precision.float32: 4, Precision.bfloat16: 2}


class RunFolderError(RuntimeError):
    """The folder cannot be used: it cannot be written, or another process is using it."""


def mistakes(config: Config) -> list[str]:
    """The keys in which a run of this name, begun earlier, differs from `config`: such a run is not resumed."""
    path = config.run.folder / CONFIG
    if config.run.restart or not path.is_file():
        return []
    try:
        before, now = definition(load(path)), definition(config)
    except ConfigError as error:
        return [f"{'; '.join(error.mistakes)}; or choose another run.name"]
    return [
        f"{key} is {now[key]!r}, and run {config.run.name} was begun with {before.get(key)!r}:"
        " choose another run.name, or add run.restart=true"
        for key in now
        if now[key] != before.get(key)
    ]


def is_finished(config: Config) -> bool:
    """Whether the run that `config` names has saved its last step; not if that checkpoint's COMMITTED is damaged."""
    if config.run.restart:
        return False
    try:
        committed = json.loads((checkpoint(config.run.folder, config.training.steps) / COMMITTED).read_bytes())
        return committed["step"] == config.training.steps and isinstance(committed["files"], dict)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def view(config: Config) -> str:
    """What is in the folder of the run that `config` names, in words that nodes compare."""
    if config.run.restart or not (config.run.folder / CONFIG).is_file():
        return f"no run in {config.run.folder}"
    return f"{'a finished' if is_finished(config) else 'an unfinished'} run in {config.run.folder}"


def room_mistakes(config: Config) -> list[str]:
    """Whether the disk lacks room for the checkpoints that the run will have at once: those kept, and a new one."""
    run, training, folder = config.run, config.training, config.run.folder
    size = parameters(config.model) * (STATE_BYTES + HF_BYTES[run.hf_dtype])
    steps = [] if run.restart else _steps(folder)
    left = training.steps - max(steps, default=0)
    new = min(run.keep_checkpoints + 1 - min(len(steps), run.keep_checkpoints), -(-left // run.checkpoint_every))
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free + sum(map(size_of, leftovers(folder / CHECKPOINTS)))
    if size * new <= free:
        return []
    return [
        f"run {run.name} needs room for {new} more checkpoint{'s' * (new > 1)} of {spelled(size)} each in {folder}"
        f" (run.keep_checkpoints={run.keep_checkpoints}, and one that is being written), {spelled(size * new)},"
        f" and {spelled(free)} are free: free the rest, choose another run.root, or keep fewer checkpoints"
    ]


def _steps(folder: Path) -> list[int]:
    """Of the checkpoints in the run's `folder`, by their names."""
    names = (re.fullmatch(STEP, path.name) for path in (folder / CHECKPOINTS).glob("step_*"))
    return [int(name[1]) for name in names if name]


def tidy(folder: Path) -> None:
    """Remove what a kill has left among the checkpoints of a finished run, unless a process is using its `folder`."""
    if leftovers(folder / CHECKPOINTS):
        try:
            with claim(folder, patience=0):
                clear_leftovers(folder / CHECKPOINTS)
        except (RunFolderError, OSError) as error:
            warn(f"{folder}: what a kill has left stays there: {error}")


@contextmanager
def open_folder(config: Config, ranks: Ranks) -> Iterator[tuple[Config, Path]]:
    """Make the run's folder if need be, with its config.yaml, and keep other processes out of it. Collective.

    Yields `config` with the name that the run got, and the folder: with run.restart a new one, NAME-2, NAME-3, ...
    where NAME is taken. Raises RunFolderError.
    """
    with ExitStack() as held:

        def claim_folder() -> tuple[str, str]:
            folder, number = config.run.folder, 2
            while config.run.restart and folder.exists():
                folder, number = Path(config.run.root, f"{config.run.name}-{number}"), number + 1
            lock = held.enter_context(claim(folder))
            if _steps(folder) and not (folder / CONFIG).is_file():
                warn(
                    f"{folder / CONFIG} is gone, and written anew: whether the run was begun with the same values"
                    " cannot be checked"
                )
            try:
                save(_named(config, folder.name), folder / CONFIG)
            except OSError as error:
                raise RunFolderError(f"{folder / CONFIG} cannot be written: {error}") from error
            return folder.name, _sign(lock)

        name, signature = on_main(ranks, claim_folder)
        config = _named(config, name)
        require_shared(f"run.root={config.run.root}", _has_signature(config.run.folder / LOCK, signature))
        yield config, config.run.folder


def _sign(lock: TextIO) -> str:
    """Write into the file what no other start of any run writes into its lock."""
    signature = f"{socket.gethostname()} {os.getpid()} {time.time_ns()}"
    lock.seek(0)
    lock.truncate()
    lock.write(signature)
    lock.flush()
    sync(Path(lock.name))
    return signature


def _has_signature(lock: Path, signature: str) -> bool:
    deadline = time.monotonic() + SEEN_WITHIN
    while not (lock.is_file() and lock.read_text() == signature):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _named(config: Config, name: str) -> Config:
    return replace(config, run=replace(config.run, name=name))


def claim(folder: Path, patience: float = PATIENCE) -> TextIO:
    """The folder's lock, an open file; the system releases it with the process, however that ends.

    The lock belongs to the open file, which a forked process would inherit and keep: such a process closes it.
    Raises RunFolderError if another process holds it for `patience` seconds, or the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("a")  # whoever is refused leaves it as it is
    except OSError as error:
        raise RunFolderError(f"{folder} cannot be written: {error}; choose another run.root") from error
    os.register_at_fork(after_in_child=file.close)
    deadline = time.monotonic() + patience
    if locks.take(
        file,
        lambda: warn(f"{folder} is in use: waiting {patience:g} s for that to end"),
        lambda: time.monotonic() >= deadline,
    ):
        return file
    file.close()
    raise RunFolderError(
        f"{folder} is in use: the same run is going on in another process. Wait for it to end, stop that process (the"
        " run saves, and goes on from there), or choose another run.name"
    )
