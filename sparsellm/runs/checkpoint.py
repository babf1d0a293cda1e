"""Checkpoints of a run: saved in the background, committed atomically, verified before anything is read.

    checkpoints/step_00000400/
        state/      every tensor, through torch.distributed.checkpoint (DCP); values.json; rank_00003.json, one per rank
        hf/         the model in Hugging Face format, written by the caller's `export`
        COMMITTED   JSON: size and checksum of every file above; written last
        evaluation/ scores, if evaluated; also analysis/ and benchmark/. Not in COMMITTED; deleted with the checkpoint

A kill at any instant can leave behind folders with these suffixes. A folder without a suffix is a checkpoint.

    .partial    being written. COMMITTED is written, and all files are synced, before the folder is renamed to step_N.
    .replaced   the old step_N while a new one replaces it: restored if the new one was never completed.
    .deleting   being deleted. Renamed before the first file is deleted, so that no partial checkpoint looks complete.
    .damaged    a checkpoint with wrong checksums, skipped at the user's request. Never deleted.

Leftovers of the first three kinds are cleared at construction and at each save, so two runs must not share a folder.
All ranks must see the folder (on several nodes, through a shared file system). The disk must have space for one more
checkpoint than is kept.

A checkpoint may come from anyone, so nothing in `state/` is executed (state_reader.py). `hf/` is the part to be shared.
snapshot.py decides which rank writes what. DCP loads sharded tensors (DTensors) into any other sharding, or whole.

All collectives run on `ranks.checkpoint_group`. A save runs its collectives in a thread, and every method except
`__init__` first waits for that thread, so two threads never use the group at once. An exception on one rank becomes a
CheckpointError on all ranks at the end of the phase; no rank waits for a rank that gave up.
"""

import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar, cast

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from sparsellm.distributed.groups import Ranks, explain_failure, gather
from sparsellm.runs.committed import problems, seal
from sparsellm.runs.layout import STATE, STEP, VALUES, checkpoints_by_step, rank_json
from sparsellm.runs.snapshot import MODEL_PREFIX, own_copies, to_host, write
from sparsellm.runs.state_reader import StateReader, StateRefused
from sparsellm.system import regular
from sparsellm.system.console import warn
from sparsellm.system.errors import SparsellmError, listed
from sparsellm.system.files import sync, unused

LEFTOVER = rf"({STEP})\.(partial|replaced|deleting)"
RANK_PREFIX = "rank."
NAMED_DIFFERENCES = 8  # maximum number listed in a message, because another model differs in hundreds of tensors

T = TypeVar("T")


class CheckpointError(SparsellmError, RuntimeError):
    """A checkpoint could not be saved, is damaged, or does not fit the model. Raised on every rank."""


class RankGone(CheckpointError):
    """A rank has died or left the group, so the others can no longer communicate."""


class Checkpoints:
    """A run's `checkpoints/` folder. All ranks construct the object and call its methods together."""

    def __init__(
        self, folder: Path, ranks: Ranks, keep: int, export: Callable[[dict[str, torch.Tensor], Path], None],
        for_good: Callable[[list[int]], set[int]] = lambda _: set(),
    ) -> None:  # fmt: skip
        """Creates `folder` and clears unfinished leftovers of a killed run.

        `keep` is the number of newest checkpoints to keep, in addition to those that `for_good(all steps, ascending)`
        returns.
        `export(weights, hf_folder)` is called on the main rank, in the writing thread, with whole CPU copies of the
        tensors whose names start with "model." (prefix removed) and an existing empty folder. Raises CheckpointError if
        `folder` is not writable.
        """
        self.folder, self.ranks, self.keep, self.export, self.for_good = folder, ranks, keep, export, for_good
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        self._verified: int | None = None
        self._on_main(f"opening {folder}", lambda: clear_leftovers(folder))

    def save(
        self,
        step: int,
        tensors: dict[str, torch.Tensor],
        values: dict,
        rank_tensors: dict[str, torch.Tensor],
        rank_values: dict,
    ) -> None:
        """Copy everything to CPU memory and write it in a thread; an existing checkpoint of `step` is replaced.

        `tensors` (any shapes, dtypes and devices) are the same on all ranks, whole or sharded: each rank copies and
        writes its own shards and its share of the whole tensors; the main rank writes the model's. `rank_tensors` and
        `rank_values` are per rank, `values` are the main rank's. Values are JSON: keys come back as strings and tuples
        as lists. Once this method returns, the caller may modify everything.

        Waits for the previous save; if that save failed, raises its CheckpointError instead of saving. Raises
        CheckpointError if the copy fails.
        """
        self.wait()

        def snapshot() -> tuple[dict[str, torch.Tensor], dict[str, str]]:
            """Returns CPU copies of the tensors that this rank writes, and the contents of its JSON files by name."""
            if reserved := [name for name in tensors if name.startswith(RANK_PREFIX)]:
                raise ValueError(f"tensors {reserved}: names that start with {RANK_PREFIX!r} are for rank_tensors")
            prefix = f"{RANK_PREFIX}{self.ranks.rank:05}."
            copies = own_copies(tensors, self.ranks)
            copies |= {f"{prefix}{name}": to_host(tensor) for name, tensor in rank_tensors.items()}
            if self.ranks.device.type == "cuda":
                torch.cuda.synchronize(self.ranks.device)  # copies into pinned memory are asynchronous
            texts = {rank_json(self.ranks.rank): json.dumps(rank_values)}
            return copies, texts | ({VALUES: json.dumps(values)} if self.ranks.is_main else {})

        copies, texts = self._together(f"copying the state of step {step}", snapshot)
        wanted = sum(tensor.nbytes for tensor in tensors.values())
        shards = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, DTensor)}
        self._writing = self._writer.submit(self._write, step, copies, shards, texts, wanted)

    def wait(self) -> None:
        """Wait until nothing is being written. Raises CheckpointError, with the step, if the last save failed."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def settle(self) -> None:
        """Wait until nothing is being written. A failed save raises nothing here, but in the next `wait`."""
        if self._writing is not None:
            futures.wait([self._writing])

    def failure(self) -> str | None:
        """Why the last save failed; None if it did not, or is still running. Not collective, does not wait."""
        if self._writing is None or not self._writing.done():
            return None
        error = self._writing.exception()
        return None if error is None else str(error)

    def find(self, skip_damaged: bool) -> int | None:
        """The step of the newest checkpoint, with its checksums verified; None if there is none.

        A damaged checkpoint newer than the newest intact one raises a CheckpointError that lists the damage; with
        `skip_damaged` such a checkpoint is renamed to step_N.damaged instead, with a warning.
        """
        self.wait()
        self._verified = self._on_main(f"looking for checkpoints in {self.folder}", lambda: self._find(skip_damaged))
        return self._verified

    def load(self, step: int, tensors: dict[str, torch.Tensor]) -> tuple[dict, dict, dict[str, torch.Tensor]]:
        """Fill `tensors` in place, on any device; return the values, this rank's values, and its tensors (on CPU).

        A rank that did not exist when `step` was saved gets rank 0's values: the data position is the same on all
        ranks, and its random state then equals rank 0's. Verifies the checksums unless `find` just returned this step.

        Raises CheckpointError if the checkpoint is damaged, or differs from `tensors` in names, shapes or dtypes;
        `tensors` are then unchanged.
        """
        self.wait()
        state = self._path(step) / STATE
        task = f"loading {state}"
        if step != self._verified and (damage := self._on_main(task, lambda: self._damage(step))):
            raise CheckpointError(damage)
        owner = self.ranks.rank if (state / rank_json(self.ranks.rank)).exists() else 0
        prefix = f"{RANK_PREFIX}{owner:05}."
        rank_tensors = self._together(task, lambda: _match(state, tensors, prefix))

        def read() -> tuple[dict, dict]:
            # The collective comes first: a rank that failed before the collective would leave the others waiting in it.
            dcp.load(
                {**tensors, **rank_tensors},
                storage_reader=StateReader(state),
                process_group=self.ranks.checkpoint_group,
            )
            return json.loads(regular.content(state / VALUES)), json.loads(regular.content(state / rank_json(owner)))

        values, rank_values = self._together(task, read)
        return values, rank_values, {name.removeprefix(prefix): tensor for name, tensor in rank_tensors.items()}

    def _write(
        self,
        step: int,
        copies: dict[str, torch.Tensor],
        shards: dict[str, DTensor],
        texts: dict[str, str],
        wanted: int,
    ) -> None:
        """Save `step` in phases, in a thread on every rank. After each phase, all ranks know whether a rank failed.

        `copies`, `shards`: see `snapshot.write`. `wanted`: total bytes of all tensors, over all ranks.
        """
        final = self._path(step)
        partial = final.with_suffix(".partial")
        state = partial / STATE
        task = f"saving step {step} to {final}"
        weights: dict[str, torch.Tensor] = {}  # whole tensors, on the main rank only

        def make_folder() -> None:
            clear_leftovers(self.folder)
            state.mkdir(parents=True)

        def write_state() -> None:
            # The collective comes first: a rank that failed before the collective would leave the others waiting in it.
            weights.update(write(copies, shards, state, self.ranks))
            for name, text in texts.items():
                (state / name).write_text(text)
                sync(state / name)

        def commit() -> None:
            hf = partial / "hf"
            hf.mkdir()
            self.export({name.removeprefix(MODEL_PREFIX): tensor for name, tensor in weights.items()}, hf)
            seal(partial, step)
            replaced = final.with_suffix(".replaced")
            if os.path.lexists(final):
                _rename(final, replaced)
            _rename(partial, final)
            if os.path.lexists(replaced):
                _delete(replaced)

        def prune() -> None:
            steps = list(checkpoints_by_step(self.folder.iterdir()))
            for old in sorted({*steps[: -self.keep]} - self.for_good(steps)):
                _delete(self._path(old))

        try:
            self._on_main(task, make_folder)
            self._together(task, write_state)
            self._on_main(task, commit)
        except RankGone:
            raise  # ranks cannot communicate any more; the next start removes the partial checkpoint
        except CheckpointError as error:
            # All ranks have left the phase, so no rank writes into the folder any more.
            said = str(error)
            if self.ranks.is_main and partial.exists():
                shutil.rmtree(partial, ignore_errors=True)
                said = self._without_room(task, error, wanted)
            raise CheckpointError(self._gather(task, said)[0]) from error
        self._on_main(f"saved step {step}; removing checkpoints older than the last {self.keep}", prune)

    def _without_room(self, task: str, error: CheckpointError, wanted: int) -> str:
        """The message of `error` plus the free disk space, once the failed save has been removed."""
        free = shutil.disk_usage(self.folder).free
        room = f"its tensors take {spelled(wanted)}, plus hf/; {spelled(free)} are free"
        # Libraries do not always report a full disk, so check free space too. If the tensors would fit, then hf/ did
        # not, or a quota was reached.
        if free >= wanted and os.strerror(errno.ENOSPC) not in str(error):
            return f"{error}. The partial checkpoint was removed: {room}"
        full = "the disk is full" if free < wanted else "the disk is full or a quota was reached"
        return f"{task} failed: {full} ({room}). The partial checkpoint was removed; earlier checkpoints are untouched"

    def _path(self, step: int) -> Path:
        return self.folder / f"step_{step:08}"

    def _find(self, skip_damaged: bool) -> int | None:
        damaged: dict[int, str] = {}
        whole = None
        for step in reversed(checkpoints_by_step(self.folder.iterdir())):
            if (damage := self._damage(step)) is None:
                whole = step
                break
            damaged[step] = damage
        fallback = "starts from the beginning" if whole is None else f"resumes from step {whole} before it"
        if damaged and not skip_damaged:
            remedy = f"run.skip_damaged=true {fallback}, and keeps damaged checkpoints as step_N.damaged"
            raise CheckpointError("\n".join([*damaged.values(), remedy]))
        for step, what in damaged.items():
            kept = unused(self._path(step).with_suffix(".damaged"))
            _rename(self._path(step), kept)
            warn(f"{what}; kept as {kept.name}: the run {fallback}")
        return whole

    def _damage(self, step: int) -> str | None:
        found = problems(self._path(step), step)
        return f"checkpoint {self._path(step)} is damaged: {'; '.join(found)}" if found else None

    def _together(self, task: str, work: Callable[[], T]) -> T:
        """The result of this rank's `work()`. If any rank raises, all raise CheckpointError with every rank's
        reason."""
        result: T | None = None
        cause: BaseException | None = None
        error: str | None = None
        try:
            result = work()
        except (CheckpointError, StateRefused) as exception:
            cause, error = exception, str(exception)
        except CheckpointException as exception:  # DCP's exception, a BaseException with the failures of all ranks
            reasons = {rank: reason for rank, (reason, _) in exception.failures.items()}
            cause, error = exception, _failed(task, reasons)
        except Exception as exception:
            cause, error = exception, _failed(task, {self.ranks.rank: exception})
        if found := dict.fromkeys(e for e in self._gather(task, error) if e is not None):
            raise CheckpointError("\n".join(found)) from cause
        return cast(T, result)

    def _on_main(self, task: str, work: Callable[[], T]) -> T:
        """The result of the main rank's `work()`, or its CheckpointError, on all ranks."""
        found = self._gather(task, self._together(task, lambda: work() if self.ranks.is_main else None))[0]
        return cast(T, found)

    def _gather(self, task: str, item: T) -> list[T]:
        """Every rank's `item`. Raises RankGone if a rank has died."""
        try:
            return gather(item, self.ranks.checkpoint_group)
        except (RuntimeError, ValueError) as exception:
            explain_failure()
            note = "" if item is None else f"; rank {self.ranks.rank} has {item}"
            raise RankGone(
                f"{task}: a rank died ({exception}){note}. Run the same command again to resume from the newest"
                " checkpoint"
            ) from exception


def leftovers(folder: Path) -> list[Path]:
    """Leftovers of a killed writer in the checkpoints/ `folder`."""
    return [path for path in sorted(folder.glob("step_*")) if re.fullmatch(LEFTOVER, path.name)]


def clear_leftovers(folder: Path) -> None:
    """Clean up the checkpoints/ `folder` after its last writer was killed, so that only checkpoints remain."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in leftovers(folder):
        final = path.with_suffix("")
        if path.suffix == ".replaced" and not os.path.lexists(final):
            warn(f"{final}: its replacement was interrupted; the old checkpoint is restored")
            _rename(path, final)
        else:
            what = "deletion" if path.suffix == ".deleting" else "save"
            warn(f"{path}: removing leftovers of an interrupted {what}, {spelled(size_of(path))}")
            _delete(path)


def size_of(folder: Path) -> int:
    """Total bytes of all files in `folder`. If `folder` is a link, 0. Files deleted in the meantime count as 0."""
    if folder.is_symlink():
        return 0
    size = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                size += Path(parent, name).stat().st_size
    return size


def spelled(size: int) -> str:
    """Formats a number of bytes in GB or MB."""
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"


def _match(state: Path, tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """Allocate CPU tensors for the tensors in `state` whose names start with `prefix`, by full name.

    Raises CheckpointError, listing the differences, if the other tensors in `state` differ from `tensors` in names,
    shapes or dtypes.
    """
    saved = StateReader(state).described()
    shared = {n: (str(e.properties.dtype), list(e.size)) for n, e in saved.items() if not n.startswith(RANK_PREFIX)}
    asked = {name: (str(tensor.dtype), list(tensor.shape)) for name, tensor in tensors.items()}
    differences = []
    for name in sorted(shared.keys() | asked.keys()):
        if name not in shared:
            differences.append(f"{name} is missing from the checkpoint")
        elif name not in asked:
            differences.append(f"{name} is unknown to this run")
        elif shared[name] != asked[name]:
            (dtype, shape), (asked_dtype, asked_shape) = shared[name], asked[name]
            differences.append(f"{name} is {dtype} {shape} in the checkpoint, but {asked_dtype} {asked_shape} here")
    if differences:
        raise CheckpointError(
            f"checkpoint {state.parent} does not fit: {listed(differences, NAMED_DIFFERENCES, '; ')}"
            ". Resume with the model and optimizer of the checkpoint, or start over with run.restart=true"
        )
    return {n: torch.empty(e.size, dtype=e.properties.dtype) for n, e in saved.items() if n.startswith(prefix)}


def _rename(source: Path, target: Path) -> None:
    source.rename(target)
    sync(target.parent)


def _delete(folder: Path) -> None:
    deleting = folder.with_suffix(".deleting")
    if folder != deleting:
        if os.path.lexists(deleting):
            _remove(deleting)
        _rename(folder, deleting)
    _remove(deleting)


def _remove(path: Path) -> None:
    """Remove a folder recursively; if it is a link or a file, remove only that."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _failed(task: str, reasons: dict[int, BaseException]) -> str:
    each = "; ".join(f"rank {rank}: {type(reason).__name__}: {reason}" for rank, reason in sorted(reasons.items()))
    return (
        f"{task} failed: {each}. The checkpoints on disk are untouched. Fix the cause and run the same command again to"
        " resume from the newest"
    )
