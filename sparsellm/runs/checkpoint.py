"""Checkpoints of a run: saved while training goes on, committed atomically, verified before anything is read.

    checkpoints/step_00000400/
        state/      every tensor, through torch.distributed.checkpoint (DCP); values.json; rank_00003.json of each rank
        hf/         the model for exchange, written by the caller's `export`
        COMMITTED   JSON: size and checksum of every file above; written last
        evaluation/ scores, if the checkpoint was evaluated, and analysis/, if analyzed: no part of it, gone with it

What a kill at any instant can leave behind, by the suffix of a folder's name. A folder without one is a checkpoint.

    .partial    being written. It holds COMMITTED and is on disk before it is renamed to step_N.
    .replaced   the former step_N while a new one takes its place: put back if the new one did not arrive.
    .deleting   on its way out. Renamed before the first file goes, so that no half of a checkpoint looks like one.
    .damaged    a checkpoint that failed its checksums and was skipped because the user said so. Never deleted.

Leftovers of the first three kinds are cleared at construction and at each save, so a run has one writer: two runs must
not share a folder. All ranks see it, on several nodes through a shared file system, with room for one checkpoint more
than are kept.

The checksums prove that a checkpoint is what was saved (xxh3_128 finds every accident at memory speed), not who saved
it. So nothing that `state/` holds is run (state_reader.py). `hf/` is the part to exchange.

Which rank writes what is in snapshot.py. Tensors in shards (DTensors) are loaded into whatever shards, or whole
tensors, the loading ranks have: DCP cuts and joins them.

All collectives run on `ranks.checkpoint_group`, those of a save in its thread, and every method but `__init__` first
waits for that thread: so two threads never use the group at once. An exception on one rank becomes a CheckpointError on
all of them at the end of the phase it happened in; no rank waits for one that gave up.
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
import xxhash
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from sparsellm.distributed.groups import Ranks, explain_failure, gather
from sparsellm.runs.layout import ADDED, COMMITTED, STATE, STEP, VALUES, rank_json
from sparsellm.runs.snapshot import MODEL_PREFIX, own_copies, to_host, write
from sparsellm.runs.state_reader import StateReader, StateRefused
from sparsellm.system import regular
from sparsellm.system.console import warn
from sparsellm.system.errors import SparsellmError
from sparsellm.system.files import sync, unused

LEFTOVER = rf"({STEP})\.(partial|replaced|deleting)"
RANK_PREFIX = "rank."
HASH_THREADS = 8  # one file each: as many as the ranks of a node wrote
HASH_CHUNK = 1 << 23  # bytes; large enough to read at the disk's speed, and xxhash lets other threads run meanwhile
NAMED_DIFFERENCES = 8  # a wrong model differs in hundreds of tensors: a message names the first ones

T = TypeVar("T")


class CheckpointError(SparsellmError, RuntimeError):
    """A checkpoint could not be saved, is damaged, or does not fit. Raised alike on every rank."""


class RankGone(CheckpointError):
    """A rank has died or left the group, so that the others can agree on nothing any more."""


class Checkpoints:
    """A run's `checkpoints/` folder. Built, and every method called, on all ranks together."""

    def __init__(
        self, folder: Path, ranks: Ranks, keep: int, export: Callable[[dict[str, torch.Tensor], Path], None],
        for_good: Callable[[list[int]], set[int]] = lambda _: set(),
    ) -> None:  # fmt: skip
        """Makes `folder` and clears what a killed run left unfinished in it.

        `keep` is the number of checkpoints kept, those with the highest steps; beside them stay those of
        `for_good(all steps, ascending)`. `export(weights, hf_folder)` is called on the main rank, in the writing
        thread, with whole CPU copies of the tensors whose names start with "model.", that prefix removed, and a folder
        that exists and is empty. Raises CheckpointError if `folder` cannot be written.
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
        """Copy everything to CPU memory and write it in a thread; a step saved before is replaced.

        `tensors` (any shapes, dtypes and devices) are the same on all ranks, whole or in shards: each rank copies and
        writes its share of the whole ones, the main rank the model's, and its own shards. `rank_tensors` and
        `rank_values` are each rank's own, `values` the main rank's. Both are JSON: keys come back as strings and tuples
        as lists. All of them may change once this returns.

        Waits for the save before, and raises its CheckpointError instead of saving; raises one if the copy fails.
        """
        self.wait()
        copies, texts = self._together(
            f"copying the state of step {step}", lambda: self._snapshot(tensors, values, rank_tensors, rank_values)
        )
        wanted = sum(tensor.nbytes for tensor in tensors.values())
        shards = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, DTensor)}
        self._writing = self._writer.submit(self._write, step, copies, shards, texts, wanted)

    def wait(self) -> None:
        """Until nothing is being written. Raises CheckpointError, naming the step, if the last save failed."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def settle(self) -> None:
        """Until nothing is being written, well or not: `wait` still raises what went wrong."""
        if self._writing is not None:
            futures.wait([self._writing])

    def failure(self) -> str | None:
        """Why the last save failed, if it is known already. Asks nobody and waits for nothing."""
        if self._writing is None or not self._writing.done():
            return None
        error = self._writing.exception()
        return None if error is None else str(error)

    def find(self, skip_damaged: bool) -> int | None:
        """The newest checkpoint's step, after all its checksums were verified; None if there is none.

        A damaged checkpoint newer than the newest whole one is a CheckpointError that names its files and what is
        wrong with them; with `skip_damaged` it is renamed to step_N.damaged, which the main rank says on stderr.
        """
        self.wait()
        self._verified = self._on_main(f"looking into {self.folder}", lambda: self._find(skip_damaged))
        return self._verified

    def load(self, step: int, tensors: dict[str, torch.Tensor]) -> tuple[dict, dict, dict[str, torch.Tensor]]:
        """Fill `tensors` in place, on whatever device; return the values, this rank's values, its tensors (on CPU).

        A rank that did not exist when `step` was saved gets rank 0's: where the data stands is the same on all ranks,
        and random numbers drawn from there are then the same as rank 0's. Verifies the checksums of a step that `find`
        did not just return.

        Raises CheckpointError if the checkpoint is damaged, or if it and `tensors` differ in names, shapes or dtypes;
        `tensors` are then untouched.
        """
        self.wait()
        state = self._path(step) / STATE
        task = f"loading {state}"
        if step != self._verified:
            self._on_main(task, lambda: self._require_whole(step))
        owner = self.ranks.rank if (state / rank_json(self.ranks.rank)).exists() else 0
        prefix = f"{RANK_PREFIX}{owner:05}."
        rank_tensors = self._together(task, lambda: _match(state, tensors, prefix))

        def read() -> tuple[dict, dict]:
            # The collective part comes first: a rank that failed before it would leave the others waiting inside.
            dcp.load(
                {**tensors, **rank_tensors},
                storage_reader=StateReader(state),
                process_group=self.ranks.checkpoint_group,
            )
            return json.loads(regular.content(state / VALUES)), json.loads(regular.content(state / rank_json(owner)))

        values, rank_values = self._together(task, read)
        return values, rank_values, {name.removeprefix(prefix): tensor for name, tensor in rank_tensors.items()}

    # ---- saving

    def _snapshot(
        self, tensors: dict[str, torch.Tensor], values: dict, rank_tensors: dict[str, torch.Tensor], rank_values: dict
    ) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """CPU copies of what this rank writes, and the text of its JSON files by name."""
        if reserved := [name for name in tensors if name.startswith(RANK_PREFIX)]:
            raise ValueError(f"tensors {reserved}: names that start with {RANK_PREFIX!r} are for rank_tensors")
        prefix = f"{RANK_PREFIX}{self.ranks.rank:05}."
        copies = own_copies(tensors, self.ranks)
        copies |= {f"{prefix}{name}": to_host(tensor) for name, tensor in rank_tensors.items()}
        if self.ranks.device.type == "cuda":
            torch.cuda.synchronize(self.ranks.device)  # the copies into pinned memory were only enqueued
        texts = {rank_json(self.ranks.rank): json.dumps(rank_values)}
        if self.ranks.is_main:
            texts[VALUES] = json.dumps(values)
        return copies, texts

    def _write(
        self,
        step: int,
        copies: dict[str, torch.Tensor],
        shards: dict[str, DTensor],
        texts: dict[str, str],
        wanted: int,
    ) -> None:
        """In the thread of every rank: the save of `step`, in phases after each of which all ranks know of failures.

        `copies`, `shards`: those of `snapshot.write`. `wanted`: bytes of the tensors that all ranks write together.
        """
        final = self._path(step)
        partial = final.with_name(final.name + ".partial")
        state = partial / STATE
        task = f"saving step {step} to {final}"
        weights: dict[str, torch.Tensor] = {}  # whole, of the main rank

        def make_folder() -> None:
            clear_leftovers(self.folder)
            state.mkdir(parents=True)

        def write_state() -> None:
            # The collective part comes first: a rank that failed before it would leave the others waiting inside.
            weights.update(write(copies, shards, state, self.ranks))
            for name, text in texts.items():
                (state / name).write_text(text)
                sync(state / name)

        def commit() -> None:
            hf = partial / "hf"
            hf.mkdir()
            self.export({name.removeprefix(MODEL_PREFIX): tensor for name, tensor in weights.items()}, hf)
            _seal(partial, step)
            replaced = final.with_name(final.name + ".replaced")
            if os.path.lexists(final):
                _rename(final, replaced)
            _rename(partial, final)
            if os.path.lexists(replaced):
                _delete(replaced)

        def prune() -> None:
            steps = self._steps()
            for old in sorted({*steps[: -self.keep]} - self.for_good(steps)):
                _delete(self._path(old))

        try:
            self._on_main(task, make_folder)
            self._together(task, write_state)
            self._on_main(task, commit)
        except RankGone:
            raise  # the next start clears the folder
        except CheckpointError as error:
            # All ranks have ended the phase: nobody writes into the folder any more.
            said = str(error)
            if self.ranks.is_main and partial.exists():
                shutil.rmtree(partial, ignore_errors=True)
                said = self._without_room(task, error, wanted)
            raise CheckpointError(self._gather(task, said)[0]) from error
        self._on_main(f"saved step {step}; removing the checkpoints before the last {self.keep}", prune)

    def _without_room(self, task: str, error: CheckpointError, wanted: int) -> str:
        """`error` with what is free for a save, once the failed one has given back what it had taken."""
        free = shutil.disk_usage(self.folder).free
        room = f"its tensors take {spelled(wanted)}, hf/ comes on top, with {spelled(free)} free there"
        # Libraries do not always name a full disk, so the room that is free now is asked, too. Where that would do for
        # the tensors, hf/ had none, or a quota is less than the disk.
        if free < wanted or os.strerror(errno.ENOSPC) in str(error):
            full = "the disk is full" if free < wanted else "the disk is full or a quota reached"
            return (
                f"{task} failed, for {full}: {room}. What was written of it is removed, and the checkpoints before it"
                " are untouched"
            )
        return f"{error}. What was written of it is removed: {room}"

    # ---- the folder (main rank)

    def _path(self, step: int) -> Path:
        return self.folder / f"step_{step:08}"

    def _steps(self) -> list[int]:
        """Steps of all folders that are checkpoints by their names, ascending."""
        names = (re.fullmatch(r"step_(\d{8,})", path.name) for path in self.folder.iterdir())
        return sorted(int(name[1]) for name in names if name)

    def _find(self, skip_damaged: bool) -> int | None:
        damaged: dict[int, str] = {}
        whole = None
        for step in reversed(self._steps()):
            try:
                self._require_whole(step)
            except CheckpointError as error:
                damaged[step] = str(error)
            else:
                whole = step
                break
        fallback = "starts from the beginning" if whole is None else f"resumes from step {whole} before it"
        if damaged and not skip_damaged:
            raise CheckpointError(
                "\n".join(damaged.values())
                + f"\nrun.skip_damaged=true {fallback}, and keeps what is damaged as step_N.damaged"
            )
        for step, what in damaged.items():
            kept = unused(self._path(step).with_name(self._path(step).name + ".damaged"))
            _rename(self._path(step), kept)
            warn(f"{what}; kept as {kept.name}: the run {fallback}")
        return whole

    def _require_whole(self, step: int) -> None:
        if found := problems(self._path(step), step):
            raise CheckpointError(f"checkpoint {self._path(step)} is damaged: {'; '.join(found)}")

    # ---- agreement

    def _together(self, task: str, work: Callable[[], T]) -> T:
        """This rank's `work()`. If it raised on any rank, CheckpointError on all of them, with every rank's reason."""
        result: T | None = None
        cause: BaseException | None = None
        error: str | None = None
        try:
            result = work()
        except (CheckpointError, StateRefused) as exception:
            cause, error = exception, str(exception)
        except CheckpointException as exception:  # DCP's own, a BaseException: it tells every rank what failed where
            reasons = {rank: reason for rank, (reason, _) in exception.failures.items()}
            cause, error = exception, _failed(task, reasons)
        except Exception as exception:
            cause, error = exception, _failed(task, {self.ranks.rank: exception})
        if found := dict.fromkeys(e for e in self._gather(task, error) if e is not None):
            raise CheckpointError("\n".join(found)) from cause
        return cast(T, result)

    def _on_main(self, task: str, work: Callable[[], T]) -> T:
        """The main rank's `work()`, its result and its CheckpointError on all ranks."""
        found = self._gather(task, self._together(task, lambda: work() if self.ranks.is_main else None))[0]
        return cast(T, found)

    def _gather(self, task: str, item: T) -> list[T]:
        """Every rank's `item`. Raises RankGone."""
        try:
            return gather(item, self.ranks.checkpoint_group)
        except (RuntimeError, ValueError) as exception:
            explain_failure()
            note = "" if item is None else f"; rank {self.ranks.rank} has {item}"
            raise RankGone(
                f"{task}: a rank is gone ({exception}){note}. Start the same command again: it resumes from the newest"
                " checkpoint"
            ) from exception


def leftovers(folder: Path) -> list[Path]:
    """What a killed writer has left in the checkpoints/ `folder` beside checkpoints."""
    return [path for path in sorted(folder.glob("step_*")) if re.fullmatch(LEFTOVER, path.name)]


def clear_leftovers(folder: Path) -> None:
    """Make the checkpoints/ `folder` hold checkpoints only, whole or damaged, whenever its last writer was killed."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in leftovers(folder):
        name, suffix = path.name.rsplit(".", 1)
        final = folder / name
        if suffix == "replaced" and not os.path.lexists(final):
            warn(f"{final}: its replacement was interrupted, the former one is back")
            _rename(path, final)
        elif suffix == "deleting":
            warn(f"{path}: removing what an interrupted removal left, {spelled(size_of(path))}")
            _remove(path)
        else:
            warn(f"{path}: removing what an interrupted save left, {spelled(size_of(path))}")
            _delete(path)


def size_of(folder: Path) -> int:
    """Bytes of all files in `folder`; of those that are gone meanwhile, as another process may save here, none. A link
    has none."""
    size = 0
    if folder.is_symlink():
        return size
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                size += Path(parent, name).stat().st_size
    return size


def spelled(size: int) -> str:
    """So many bytes, in GB or MB."""
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"


def _match(state: Path, tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """Empty CPU tensors for those in `state` that start with `prefix`, by full name.

    Raises CheckpointError, naming them, if the others in `state` are not `tensors` in names, shapes and dtypes.
    """
    saved = {
        name: (str(entry.properties.dtype), list(entry.size), entry)
        for name, entry in StateReader(state).read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    shared = {name: entry[:2] for name, entry in saved.items() if not name.startswith(RANK_PREFIX)}
    asked = {name: (str(tensor.dtype), list(tensor.shape)) for name, tensor in tensors.items()}
    differences = []
    for name in sorted(shared.keys() | asked.keys()):
        if name not in shared:
            differences.append(f"{name} is not in it")
        elif name not in asked:
            differences.append(f"{name} is in it and has no place here")
        elif shared[name] != asked[name]:
            (dtype, shape), (asked_dtype, asked_shape) = shared[name], asked[name]
            differences.append(f"{name} is {dtype} {shape} in it and {asked_dtype} {asked_shape} here")
    if differences:
        more = len(differences) - NAMED_DIFFERENCES
        raise CheckpointError(
            f"checkpoint {state.parent} does not fit: {'; '.join(differences[:NAMED_DIFFERENCES])}"
            + (f"; and {more} more" if more > 0 else "")
            + ". Resume with the model and optimizer that it was made with, or start anew with run.restart=true"
        )
    mine = {name: entry for name, (_, _, entry) in saved.items() if name.startswith(prefix)}
    return {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in mine.items()}


def _seal(folder: Path, step: int) -> None:
    """Bring everything in `folder` to disk and write COMMITTED, the size and checksum of each file."""
    files = _files(folder)
    for path in [*files.values(), *(path for path in folder.rglob("*") if path.is_dir())]:
        sync(path)
    with ThreadPoolExecutor(HASH_THREADS) as pool:
        checksums = pool.map(_checksum, files.values())
        entries = {
            name: {"bytes": path.stat().st_size, "xxh3_128": checksum}
            for (name, path), checksum in zip(files.items(), checksums, strict=True)
        }
    (folder / COMMITTED).write_text(json.dumps({"step": step, "files": entries}, indent=1))
    sync(folder / COMMITTED)
    sync(folder)


def problems(folder: Path, step: int | None, inside: str = "") -> list[str]:
    """How the files in `folder` differ from what COMMITTED says; empty when it is whole.

    `step`: of the checkpoint, None if that is not known. `inside`: only files whose names begin with it are compared.
    """
    try:
        commit = json.loads(regular.content(folder / COMMITTED))
        committed_step = commit["step"]
        recorded = {name: (entry["bytes"], entry["xxh3_128"]) for name, entry in commit["files"].items()}
    except FileNotFoundError:
        return [f"{COMMITTED} is missing"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return [f"{COMMITTED} cannot be read ({type(error).__name__}: {error})"]
    recorded = {name: entry for name, entry in recorded.items() if name.startswith(inside)}
    files = {name: path for name, path in _files(folder).items() if name.startswith(inside)}
    found = [] if step in (None, committed_step) else [f"{COMMITTED} is that of step {committed_step}"]
    found += [f"{name} is missing" for name in sorted(recorded.keys() - files.keys())]
    found += [f"{name} does not belong to it" for name in sorted(files.keys() - recorded.keys())]

    def compare(name: str) -> list[str]:
        size, checksum = recorded[name]
        try:
            if (held := files[name].stat().st_size) != size:
                return [f"{name} has {held} bytes instead of {size}"]
            if (digest := _checksum(files[name])) != checksum:
                return [f"{name} has checksum {digest} instead of {checksum}"]
        except OSError as error:
            return [f"{name} cannot be read ({error})"]
        return []

    with ThreadPoolExecutor(HASH_THREADS) as pool:
        return sum(pool.map(compare, sorted(recorded.keys() & files.keys())), found)


def _files(folder: Path) -> dict[str, Path]:
    """Every file under `folder` that belongs to the checkpoint, by its path relative to it."""
    paths = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if not path.is_dir()}
    return {name: path for name, path in paths.items() if name.split("/")[0] not in (COMMITTED, *ADDED)}


def _checksum(path: Path) -> str:
    digest, chunk = xxhash.xxh3_128(), memoryview(bytearray(HASH_CHUNK))
    with regular.to_read(path, buffering=0) as file:
        while count := file.readinto(chunk):
            digest.update(chunk[:count])
    return digest.hexdigest()


def _rename(source: Path, target: Path) -> None:
    source.rename(target)
    sync(target.parent)


def _delete(folder: Path) -> None:
    deleting = folder.with_name(folder.name.split(".")[0] + ".deleting")
    if os.path.lexists(deleting):
        _remove(deleting)
    _rename(folder, deleting)
    _remove(deleting)


def _remove(path: Path) -> None:
    """A folder with all that it holds; of what stands in its place, a link or a file, no more than that."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _failed(task: str, reasons: dict[int, BaseException]) -> str:
    each = "; ".join(f"rank {rank}: {type(reason).__name__}: {reason}" for rank, reason in sorted(reasons.items()))
    return (
        f"{task} failed: {each}. The checkpoints on disk are untouched: remove the cause; started again, the same"
        " command resumes from the newest"
    )
