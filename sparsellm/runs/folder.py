"""A run's folder: runs/NAME/{config.yaml, metrics.jsonl, checkpoints/, plots/, wandb/}. One process group writes it."""

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
    MOMENTS,
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
    parameters,
    save,
)
from sparsellm.distributed.groups import Ranks, on_main, require_shared
from sparsellm.model.dtypes import DTYPES
from sparsellm.runs.checkpoint import clear_leftovers, leftovers, size_of, spelled
from sparsellm.runs.layout import CHECKPOINTS, COMMITTED, CONFIG, STATE, STEP, VALUES, WAITING_ROW, checkpoint
from sparsellm.runs.retention import Retention, last_common_step
from sparsellm.system import locks, regular
from sparsellm.system.console import warn
from sparsellm.system.errors import SparsellmError
from sparsellm.system.files import sync, unused

__all__ = [
    "CHECKPOINTS", "CONFIG", "RunFolderError", "begun_as", "checkpoint", "claim", "is_finished", "mistakes",
    "open_folder", "room_mistakes", "saved_steps", "tidy",
]  # fmt: skip

LOCK = "lock"
WARMUP = "optimizer.warmup_steps"
PATIENCE = 0.5  # seconds for which a start waits for another process that is about to end, as after a kill
SEEN_WITHIN = 60  # seconds after which a node of a network file system sees what another one has written


class RunFolderError(SparsellmError, RuntimeError):
    """The folder cannot be used: it cannot be written, or another process is using it."""


def mistakes(config: Config, typed: Sequence[str] = ()) -> list[str]:
    """The keys in which a run of this name, begun earlier, differs from `config`: such a run is not resumed.

    Nor is any under run.restart, so ranks that torchrun starts again would lose what they have done: that is refused.
    A run with optimizer.schedule=wsd may be made longer. `typed`: the overrides that `config` was composed from.
    """
    if config.run.restart and (restarts := int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))):
        return [
            f"run.restart=true with torchrun --max-restarts={restarts}, each of whose restarts would begin anew, in"
            " another folder: choose another run.name instead, or leave out --max-restarts"
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
    # The warm-up follows from the steps.
    if (steps != begun.training.steps or schedules == {Schedule.wsd}) and not warmup_typed:
        now[WARMUP] = before[WARMUP]
    start = _return_to(begun.training, begun.optimizer, begun.sparsity, config.optimizer.schedule, steps)
    if start is not None:
        for key in ("training.steps", "data.max_tokens"):  # the latter decides only how much is prepared
            now[key] = before[key]
        if (saved := saved_steps(config.run.folder)) and min(saved) > start:
            return [
                f"run {config.run.name} cannot be made longer, for it has no checkpoint up to step {start}, the"
                f" last that a longer one has in common with it: {remedy}"
            ]
    elif steps > begun.training.steps and begun.optimizer.schedule == Schedule.wsd:
        reasons["training.steps"] = " and optimizer.schedule=wsd, which makes it longer if it is typed again"
    elif steps > begun.training.steps:
        reasons["training.steps"] = (
            " and a cosine schedule, which has lowered the learning rate towards that step from the warm-up on: none of"
            " its checkpoints is one of a longer run, as those before the decay of optimizer.schedule=wsd are"
        )
    return [
        f"{key} is {now[key]!r}, and run {config.run.name} was begun with {before.get(key)!r}{reasons.get(key, '')}:"
        f" {remedy}"
        for key in now
        if now[key] != before.get(key)
    ]


def begun_as(run: RunConfig) -> Config | None:
    """The configuration that the run of this name was begun with; None: it begins. Raises ConfigError."""
    path = run.folder / CONFIG
    return None if run.restart or not path.is_file() else load(path)


def _return_to(
    training: TrainingConfig, optimizer: OptimizerConfig, sparsity: SparsityConfig, schedule: Schedule, steps: int
) -> int | None:
    """The last step that a run, as it was begun with these groups, has in common with one of `steps` and `schedule`.

    None: that one does not make it longer.
    """
    if not optimizer.schedule == schedule == Schedule.wsd or steps <= training.steps:
        return None
    return last_common_step(training, optimizer, sparsity)


def _set_decay_aside(folder: Path, steps: int, start: int) -> None:
    """Leave no checkpoint after step `start` to resume from: they are from the end of the run of `steps`."""
    for step in saved_steps(folder):
        if step > start:
            path = checkpoint(folder, step)
            aside = unused(path.with_name(f"{path.name}.decayed"))
            path.rename(aside)
            sync(aside.parent)
            warn(f"{aside} is what the run of {steps:,} steps had there: remove it if it is not wanted")


def is_finished(run: RunConfig, steps: int) -> bool:
    """Whether the run has saved the last of its `steps`, scored; not if that checkpoint's COMMITTED is damaged."""
    if run.restart:
        return False
    last = checkpoint(run.folder, steps)
    try:
        committed = json.loads(regular.content(last / COMMITTED))
        if committed["step"] != steps or not isinstance(committed["files"], dict):
            return False
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False
    try:
        return json.loads(regular.content(last / STATE / VALUES)).get(WAITING_ROW) is None
    except (OSError, ValueError, AttributeError, RecursionError):
        return True  # it is damaged, and would not be resumed either


def view(run: RunConfig, steps: int) -> str:
    """What is in the run's folder, in words that nodes compare."""
    try:
        if run.restart or not (run.folder / CONFIG).is_file():
            return f"no run in {run.folder}"
    except OSError as error:  # of a folder of somebody else, which the check of the configuration names
        return f"{run.folder} that cannot be read ({error.strerror})"
    return f"{'a finished' if is_finished(run, steps) else 'an unfinished'} run in {run.folder}"


def room_mistakes(
    run: RunConfig,
    hf_dtype: Precision,
    model: ModelConfig,
    training: TrainingConfig,
    optimizer: OptimizerConfig,
    sparsity: SparsityConfig,
) -> list[str]:
    """Whether the disk lacks room for the checkpoints that the run will have at once: those kept, and a new one."""
    folder = run.folder
    size = parameters(model) * ((1 + MOMENTS) * FLOAT32 + DTYPES[hf_dtype].itemsize)  # of state/ and of hf/
    steps = [] if run.restart else sorted(saved_steps(folder))
    with suppress(ConfigError):  # `mistakes` names it
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
    for_good = "those kept for good, " if run.keep_every or optimizer.schedule == Schedule.wsd else ""
    return [
        f"run {run.name} needs room for {new} more checkpoint{'s' * (new > 1)} of {spelled(size)} each in {folder}"
        f" (run.keep_checkpoints={run.keep_checkpoints}, {for_good}and one that is being written),"
        f" {spelled(size * new)}, and {spelled(free)} are free: free the rest, choose another run.root, or keep fewer"
        " checkpoints"
    ]


def names_by_hash(root: Path) -> dict[str, str]:
    """The names of the runs in `root` that end with a hash of what defines them, by that hash."""
    runs = sorted(path.parent.name for path in root.glob(f"*/{CONFIG}"))
    return {found[1]: name for name in runs if (found := re.search(r"-([0-9a-f]{8})$", name))}


def saved_steps(folder: Path) -> list[int]:
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
    where NAME is taken. A run that `config` makes longer has the warm-up that it was begun with, and what its decay
    saved is set aside, as step_N.decayed. Of a run that begins, all that this has made goes again where a ConfigError
    ends what is done with it: a model that the run starts from cannot be read. Raises RunFolderError.
    """
    begins = False  # on the main rank: whether there is no config.yaml yet
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
                    f"{folder / CONFIG} is gone, and written anew: whether the run was begun with the same values"
                    " cannot be checked"
                )
            warmup = config.optimizer.warmup_steps
            schedule, steps = config.optimizer.schedule, config.training.steps
            if schedule == Schedule.wsd and (begun := begun_as(config.run)) is not None:
                warmup = begun.optimizer.warmup_steps
                start = _return_to(begun.training, begun.optimizer, begun.sparsity, schedule, steps)
                if start is not None:
                    _set_decay_aside(folder, begun.training.steps, start)
                    warn(
                        f"{folder.name} is made longer, from {begun.training.steps:,} to {steps:,} steps, with its"
                        f" warm-up of {warmup:,}: it goes on from its last checkpoint up to step"
                        f" {start:,}, the last that both have in common"
                    )
            try:
                save(as_of(folder.name, warmup), folder / CONFIG)
            except OSError as error:
                raise RunFolderError(f"{folder / CONFIG} cannot be written: {error}") from error
            return folder.name, warmup, _sign(lock)

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
    """Take away what a run that has not begun has in its `folder`, and the folders `made` for it, unless there is more
    in them, as the log of a scheduler or another run."""
    with suppress(OSError):  # there are checkpoints, or more
        if (folder / CHECKPOINTS).exists():
            (folder / CHECKPOINTS).rmdir()
        for name in (CONFIG, LOCK):
            (folder / name).unlink()
        for path in made:
            path.rmdir()


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


def claim(folder: Path, patience: float = PATIENCE) -> TextIO:
    """The folder's lock, an open file; the system releases it with the process, however that ends.

    The lock belongs to the open file, which a forked process would inherit and keep: such a process closes it.
    Raises RunFolderError if another process holds it for `patience` seconds, or the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file: TextIO = regular.to_write(folder / LOCK, "a")  # whoever is refused leaves it as it is
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
