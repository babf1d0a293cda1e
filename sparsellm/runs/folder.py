"""A run's folder: runs/NAME/{config.yaml, metrics.jsonl, checkpoints/, plots/, wandb/}. A lock keeps a second process
group from writing to the same folder."""

import json
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from sparsellm.config import (
    FLOAT32,
    Config,
    ConfigError,
    ModelConfig,
    OptimizerConfig,
    Precision,
    RunConfig,
    Schedule,
    SparsityConfig,
    TrainingConfig,
    definition,
    load,
    moments,
    parameters,
    save,
)
from sparsellm.distributed.groups import Ranks, on_main, require_shared
from sparsellm.model.dtypes import DTYPES
from sparsellm.runs.checkpoint import clear_leftovers, leftovers, size_of, spelled
from sparsellm.runs.committed import UNREADABLE, recorded
from sparsellm.runs.layout import CHECKPOINTS, CONFIG, STATE, VALUES, WAITING_ROW, checkpoint, checkpoints_by_step
from sparsellm.runs.retention import Retention, last_common_step
from sparsellm.system import locks, regular
from sparsellm.system.console import quantity, warn
from sparsellm.system.errors import SparsellmError
from sparsellm.system.files import sync, unused

LOCK = "lock"
WARMUP = "optimizer.warmup_steps"
PATIENCE = 0.5  # seconds to wait at the start for another process that is about to end, for example after a kill
SEEN_WITHIN = 60  # seconds until a node on a network file system sees what another node has written


class RunFolderError(SparsellmError, RuntimeError):
    """The folder cannot be used: it is not writable, or another process is using it."""


def mistakes(config: Config, typed: Sequence[str] = ()) -> list[str]:
    """Error messages if `config` cannot resume the existing run of its name, for example because keys differ. Empty if
    it can, or if no such run exists.

    A run with optimizer.schedule=wsd may be made longer. run.restart=true never resumes a run; with torchrun's
    restarts, each restart would lose all progress, so this combination is refused. `typed`: the overrides from which
    `config` was composed.
    """
    if config.run.restart and (restarts := int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))):
        return [
            f"run.restart=true with torchrun --max-restarts={restarts}: each restart would start over in a new folder;"
            " choose another run.name instead, or leave out --max-restarts"
        ]
    try:
        begun = begun_as(config.run)
    except ConfigError as error:
        return [f"{'; '.join(error.mistakes)}; or choose another run.name"]
    if begun is None:
        return []
    before, now = definition(begun), definition(config)
    remedy, reasons = "choose another run.name, or add run.restart=true", {}
    steps, schedules = config.training.steps, {begun.optimizer.schedule, config.optimizer.schedule}
    warmup_typed = any(text.lstrip("+").startswith(f"{WARMUP}=") for text in typed)
    # By default, the warm-up is derived from the number of steps, so its own difference is not reported.
    if (steps != begun.training.steps or schedules == {Schedule.wsd}) and not warmup_typed:
        now[WARMUP] = before[WARMUP]
    start = _return_to(begun.training, begun.optimizer, begun.sparsity, config.optimizer.schedule, steps)
    if start is not None:
        for key in ("training.steps", "data.max_tokens"):  # data.max_tokens only decides how much is prepared
            now[key] = before[key]
        if (saved := saved_steps(config.run.folder)) and saved[0] > start:
            return [
                f"run {config.run.name} cannot be made longer: it has no checkpoint up to step {start}, the last step"
                f" that it shares with a longer run; {remedy}"
            ]
    elif steps > begun.training.steps and begun.optimizer.schedule == Schedule.wsd:
        reasons["training.steps"] = " and optimizer.schedule=wsd; type it again to make the run longer"
    elif steps > begun.training.steps:
        reasons["training.steps"] = (
            " and a cosine schedule, whose learning rate depends on the number of steps from the start, so the run"
            " cannot be made longer (only runs with optimizer.schedule=wsd can)"
        )
    return [
        f"{key} is {now[key]!r}, but run {config.run.name} was started with {before.get(key)!r}{reasons.get(key, '')}:"
        f" {remedy}"
        for key in now
        if now[key] != before.get(key)
    ]


def begun_as(run: RunConfig) -> Config | None:
    """The configuration with which `run` was started; None for a new run. Raises ConfigError if the file is damaged."""
    path = run.folder / CONFIG
    return None if run.restart or not path.is_file() else load(path)


def _return_to(
    training: TrainingConfig, optimizer: OptimizerConfig, sparsity: SparsityConfig, schedule: Schedule, steps: int
) -> int | None:
    """The last step that a run, started with these groups, has in common with a run with `steps` and `schedule`.

    None if the run with `steps` is not a longer version of the started run.
    """
    if not optimizer.schedule == schedule == Schedule.wsd or steps <= training.steps:
        return None
    return last_common_step(training, optimizer, sparsity)


def _set_decay_aside(folder: Path, steps: int, start: int) -> None:
    """Rename checkpoints after step `start`, so that the longer run does not resume from them: in these steps, the
    learning rate was already decaying towards the former end at `steps`."""
    for step in saved_steps(folder):
        if step > start:
            path = checkpoint(folder, step)
            aside = unused(path.with_name(f"{path.name}.decayed"))
            path.rename(aside)
            sync(aside.parent)
            warn(
                f"{aside} holds a checkpoint of the run's decay at {quantity(steps, 'step')}: remove it if you do not"
                " need it"
            )


def is_finished(run: RunConfig, steps: int) -> bool:
    """Whether the run has saved its last step, `steps`, with scores, in a checkpoint with an intact COMMITTED."""
    if run.restart:
        return False
    last = checkpoint(run.folder, steps)
    try:
        if recorded(last)[0] != steps:
            return False
    except UNREADABLE:
        return False
    try:
        return json.loads(regular.content(last / STATE / VALUES)).get(WAITING_ROW) is None
    except (OSError, ValueError, AttributeError, RecursionError):
        return True  # values.json is damaged, so the run could not be resumed either


def view(run: RunConfig, steps: int) -> str:
    """A description of the run's folder, for comparison between nodes."""
    try:
        if run.restart or not (run.folder / CONFIG).is_file():
            return f"no run in {run.folder}"
    except OSError as error:  # no permission; checking the configuration reports this
        return f"{run.folder} that cannot be read ({error.strerror})"
    return f"{'a finished' if is_finished(run, steps) else 'an unfinished'} run in {run.folder}"


def checkpoint_bytes(model: ModelConfig, muon: bool, hf_dtype: Precision) -> int:
    """Bytes of a checkpoint: float32 weights and the optimizer's moments in state/, weights of `hf_dtype` in hf/."""
    count = parameters(model)
    return (count + moments(model, muon)) * FLOAT32 + count * DTYPES[hf_dtype].itemsize


def room_mistakes(
    run: RunConfig,
    hf_dtype: Precision,
    model: ModelConfig,
    training: TrainingConfig,
    optimizer: OptimizerConfig,
    sparsity: SparsityConfig,
) -> list[str]:
    """Error messages if the disk lacks space for the run's checkpoints: those kept plus a new one."""
    folder = run.folder
    size = checkpoint_bytes(model, optimizer.muon, hf_dtype)
    steps = [] if run.restart else saved_steps(folder)
    with suppress(ConfigError):  # `mistakes` reports a damaged config.yaml
        if (begun := begun_as(run)) is not None:
            old = begun.training, begun.optimizer, begun.sparsity
            if (start := _return_to(*old, optimizer.schedule, training.steps)) is not None:
                steps = [step for step in steps if step <= start]
    retention = Retention(run, training.steps, last_common_step(training, optimizer, sparsity))
    new = retention.most_at_once(steps) - len(steps)
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free + sum(map(size_of, leftovers(folder / CHECKPOINTS)))
    if size * new <= free:
        return []
    for_good = "permanent ones, " if run.keep_every or optimizer.schedule == Schedule.wsd else ""
    return [
        f"run {run.name} needs space for {new} more checkpoint{'s' * (new > 1)} of {spelled(size)} each in {folder}"
        f" (run.keep_checkpoints={run.keep_checkpoints}, {for_good}and one being written), {spelled(size * new)}, but"
        f" only {spelled(free)} are free: free some space, choose another run.root, or keep fewer checkpoints"
    ]


def names_by_hash(root: Path) -> dict[str, str]:
    """{hash: name} for the runs in `root` whose names end with a hash of the keys that define a run."""
    runs = sorted(path.parent.name for path in root.glob(f"*/{CONFIG}"))
    return {found[1]: name for name in runs if (found := re.search(r"-([0-9a-f]{8})$", name))}


def saved_steps(folder: Path) -> list[int]:
    """The steps of the checkpoints in the run's `folder`, from their names, ascending."""
    return list(checkpoints_by_step((folder / CHECKPOINTS).glob("step_*")))


def tidy(folder: Path) -> None:
    """Remove a finished run's incomplete checkpoints, left by a kill, unless another process is using its `folder`."""
    if leftovers(folder / CHECKPOINTS):
        try:
            with claim(folder, patience=0):
                clear_leftovers(folder / CHECKPOINTS)
        except (RunFolderError, OSError) as error:
            warn(f"{folder}: leftovers of a killed save cannot be removed: {error}")


@contextmanager
def open_folder(config: Config, ranks: Ranks) -> Iterator[tuple[Config, Path]]:
    """Create the run's folder and config.yaml if needed, and lock out other processes. Collective.

    Yields `config` with the run's final name, and the folder: with run.restart a new folder, NAME-2, NAME-3, ... if
    NAME is taken. If `config` makes an existing run longer, the run keeps its warm-up, and checkpoints from its decay
    are renamed to step_N.decayed. For a new run, everything created here is removed if the block raises ConfigError,
    for example because the initial model cannot be read. Raises RunFolderError if the folder is in use or not writable.
    """
    begins = False  # on the main rank: no config.yaml exists yet
    made: list[Path] = []

    def as_of(name: str, warmup: int) -> Config:
        run, optimizer = replace(config.run, name=name), replace(config.optimizer, warmup_steps=warmup)
        return replace(config, run=run, optimizer=optimizer)

    with ExitStack() as held:

        def claim_folder() -> tuple[str, int, str]:
            nonlocal begins
            folder, number = config.run.folder, 2
            while config.run.restart and folder.exists():
                folder, number = Path(config.run.root, f"{config.run.name}-{number}"), number + 1
            made.extend(path for path in (folder, *folder.parents) if not path.exists())
            lock = held.enter_context(claim(folder))
            begins = not (folder / CONFIG).is_file()
            if saved_steps(folder) and begins:
                warn(
                    f"{folder / CONFIG} was missing and has been rewritten: whether the run was started with the same"
                    " values cannot be checked"
                )
            warmup, steps = config.optimizer.warmup_steps, config.training.steps
            if config.optimizer.schedule == Schedule.wsd and (begun := begun_as(config.run)) is not None:
                warmup = begun.optimizer.warmup_steps
                old = begun.training, begun.optimizer, begun.sparsity
                if (start := _return_to(*old, Schedule.wsd, steps)) is not None:
                    _set_decay_aside(folder, begun.training.steps, start)
                    warn(
                        f"{folder.name} is extended from {begun.training.steps:,} to {steps:,} steps, with its warm-up"
                        f" of {quantity(warmup, 'step')}: it resumes from its last checkpoint up to step {start:,},"
                        " the last step that both share"
                    )
            try:
                save(as_of(folder.name, warmup), folder / CONFIG)
            except OSError as error:
                raise RunFolderError(f"{folder / CONFIG} cannot be written: {error}") from error
            signature = f"{socket.gethostname()} {os.getpid()} {time.time_ns()}"  # unique for this start
            lock.truncate(0)
            lock.write(signature)
            lock.flush()
            os.fsync(lock.fileno())
            return folder.name, warmup, signature

        name, warmup, signature = on_main(ranks, claim_folder)
        config = as_of(name, warmup)
        require_shared(f"run.root={config.run.root}", _has_signature(config.run.folder / LOCK, signature))
        try:
            yield config, config.run.folder
        except ConfigError:
            if begins:
                _remove(config.run.folder, made)
            raise


def _remove(folder: Path, made: list[Path]) -> None:
    """Remove the files that a run which failed to start left in its `folder`, and the folders `made` for it. A folder
    that holds anything else, such as a scheduler's log or another run, stays."""
    with suppress(OSError):  # a folder is not empty
        if (folder / CHECKPOINTS).exists():
            (folder / CHECKPOINTS).rmdir()
        for name in (CONFIG, LOCK):
            (folder / name).unlink()
        for path in made:
            path.rmdir()


def _has_signature(lock: Path, signature: str) -> bool:
    deadline = time.monotonic() + SEEN_WITHIN
    while not (lock.is_file() and lock.read_text() == signature):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def claim(folder: Path, patience: float = PATIENCE) -> TextIO:
    """Lock the folder and return the open lock file; the system releases the lock however the process ends.

    The lock belongs to the open file. A forked process inherits the file and closes it, so as not to hold the lock.
    Raises RunFolderError if another process holds the lock for `patience` seconds, or the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Append mode, so that a process that does not get the lock leaves the content unchanged.
        file: TextIO = regular.to_write(folder / LOCK, "a")
    except OSError as error:
        raise RunFolderError(f"{folder} cannot be written: {error}; choose another run.root") from error
    os.register_at_fork(after_in_child=file.close)
    deadline = time.monotonic() + patience
    if locks.take(
        file,
        lambda: warn(f"{folder} is in use by another process: waiting up to {patience:g} s"),
        lambda: time.monotonic() >= deadline,
    ):
        return file
    file.close()
    raise RunFolderError(
        f"{folder} is in use: the same run is active in another process. Wait for it to end, stop that process (the run"
        " saves a checkpoint, from which this command resumes), or choose another run.name"
    )
