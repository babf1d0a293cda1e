"""The seven tasks, with lm-eval's own definitions, on rows from the hub or local files.

Local rows are files DIR/TASK/SPLIT.jsonl or .parquet in the schema of the hub's data set. Only the scored split is
read; zero-shot needs no other. If `test` is missing, `validation` is scored, with a note.
"""

import difflib
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from sparsellm.distributed.groups import Ranks, first_error
from sparsellm.evaluation import rows
from sparsellm.runs.committed import file_digest
from sparsellm.system.errors import SparsellmError, one_line


@dataclass(frozen=True)
class Stock:
    path: str  # lm-eval's definition of the task, relative to lm_eval/tasks
    split: str  # scored split
    chance: float  # accuracy of guessing; nearly all rows have 1 / chance choices


TASKS = {
    "arc_easy": Stock("arc/arc_easy.yaml", "test", 1 / 4),
    "arc_challenge": Stock("arc/arc_challenge.yaml", "test", 1 / 4),
    "hellaswag": Stock("hellaswag/hellaswag.yaml", "validation", 1 / 4),
    "openbookqa": Stock("openbookqa/openbookqa.yaml", "test", 1 / 4),
    "piqa": Stock("piqa/piqa.yaml", "validation", 1 / 2),
    "winogrande": Stock("winogrande/default.yaml", "validation", 1 / 2),
    "commonsense_qa": Stock("commonsense_qa/default.yaml", "validation", 1 / 5),
}
NONE = ["none"]  # the value of the key `tasks` with which no task is scored
FORMATS = {".jsonl": "json", ".parquet": "parquet"}  # suffix -> builder of the datasets library
# Zero-shot needs no examples. Without this setting, lm-eval reads all rows to sample examples.
NO_EXAMPLES: dict[str, Any] = {"fewshot_config": {"samples": []}}
READ_AT_ONCE = 1000  # rows: `datasets` takes 11 to 50 us per single row, and 1 to 4 us per row of a large batch


class TaskUnavailable(SparsellmError, ValueError):
    """A task cannot be loaded; the message names what is missing."""


@dataclass(frozen=True)
class LoadedTask:
    name: str
    task: Any  # an lm-eval task
    split: str
    note: str | None  # a caveat to show with the score
    identity: str  # identifies the rows and the version of the task


def chosen(names: list[str]) -> list[str]:
    """The tasks to score for the value `names` of the key `tasks`."""
    return [] if names == NONE else names or list(TASKS)


def mistakes(names: list[str], data_dir: str | None, prefix: str = "") -> list[str]:
    """Error messages for the keys PREFIXtasks and PREFIXdata_dir, each with a remedy; empty if there are none."""
    found = []
    if NONE[0] in names and len(names) > 1:
        found.append(
            f"{prefix}tasks is {', '.join(names)}: it should be none alone, or have some of {', '.join(TASKS)}"
        )
    elif unknown := [name for name in chosen(names) if name not in TASKS]:
        close = [match for name in unknown for match in difflib.get_close_matches(name, TASKS, n=1)]
        hint = f"did you mean {', '.join(close)}? " if close else ""
        found.append(f"{prefix}tasks has {', '.join(unknown)}: {hint}it should have some of {', '.join(TASKS)}")
    if len(set(names)) < len(names):
        found.append(f"{prefix}tasks has duplicates: {', '.join(names)}")
    if data_dir is not None and not Path(data_dir).expanduser().is_dir():
        found.append(f"{prefix}data_dir={data_dir} is not a folder: it should hold TASK/SPLIT.jsonl or .parquet")
    return found


def load_on_all(name: str, data_dir: str | None, ranks: Ranks) -> LoadedTask:
    """`load` on all ranks. From the hub, the main rank downloads first, and the other ranks read the main rank's cache.
    Raises TaskUnavailable on all ranks or on none."""
    loaded: LoadedTask | None = None
    first = ranks.is_main or data_dir is not None
    for turn in (True, False):
        error = None
        if first == turn:
            try:
                loaded = load(name, data_dir)
            except TaskUnavailable as exception:
                error = str(exception)
        if (found := first_error(error)) is not None:
            raise TaskUnavailable(found)
    assert loaded is not None
    return loaded


def load(name: str, data_dir: str | None) -> LoadedTask:
    """Load a task with rows from `data_dir` or the hub. Raises TaskUnavailable if they cannot be read or scored."""
    import datasets
    from lm_eval import tasks

    definition = Path(tasks.__file__).parent / TASKS[name].path
    source = None if data_dir is None else local_rows(name, data_dir)
    try:
        with _local_datasets() if source is not None else nullcontext(), tempfile.TemporaryDirectory() as folder:
            if source is not None:
                if source.stat().st_size == 0:
                    raise ValueError("the file is empty")
                local = on_local_rows(name, definition, source)
                definition = Path(folder, f"{name}.yaml")
                definition.write_text(json.dumps(local | NO_EXAMPLES))  # JSON is YAML
                # Check the rows before lm-eval reads them from the cache of `datasets`, because lm-eval's error would
                # not name the bad row.
                _require_whole(
                    name, datasets.load_dataset(local["dataset_path"], split=source.stem, **local["dataset_kwargs"])
                )
            task = tasks.TaskManager(include_defaults=False).load([str(definition)])["tasks"][name]
            task.set_config("num_fewshot", 0)
            task.set_fewshot_seed(1234)  # lm-eval's own seed, though nothing is sampled
            docs = task.eval_docs
            if source is None:
                _require_whole(name, task.dataset[TASKS[name].split])
    except Exception as error:  # from libraries, the network, or a row without a field
        where, remedy = f"the rows in {source}", "they should be in the schema of the hub's data set"
        if source is None:
            where = f"the data set of {name} on the hub"
            remedy = "data_dir=DIR takes the rows that `sparsellm evaluate export=DIR` writes where the hub answers"
        chain = [error] if error.__cause__ is None else [error, error.__cause__]  # the library's error and its cause
        reason = ": ".join(map(one_line, chain))
        raise TaskUnavailable(f"{where} cannot be used: {reason}; {remedy}") from error
    split = TASKS[name].split if source is None else source.stem
    note = None if split == TASKS[name].split else f"no {TASKS[name].split} rows in data_dir: scored {split} instead"
    content = docs._fingerprint if source is None else file_digest(source)
    return LoadedTask(name, task, split, note, f"{task.VERSION} {split} {content}")


def _require_whole(name: str, found: Any) -> None:
    """Raises ValueError, listing the rows that cannot be scored, if there are any."""
    if (wrong := rows.mistakes(name, each_row(found))) is not None:
        raise ValueError(wrong)


def each_row(dataset: Any) -> Iterator[dict[str, Any]]:
    """Iterate over the rows of a `datasets.Dataset`, reading many at a time."""
    for columns in dataset.iter(READ_AT_ONCE):
        yield from (dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))


def local_rows(name: str, data_dir: str) -> Path:
    """The file with the rows to score. If there is none, raises TaskUnavailable, which lists the accepted names."""
    splits, folder = dict.fromkeys((TASKS[name].split, "validation")), Path(data_dir).expanduser() / name
    wanted = [folder / f"{split}{suffix}" for split in splits for suffix in FORMATS]
    for path in wanted:
        if path.is_file():
            return path
    raise TaskUnavailable(f"no rows in {folder}: it should have {' or '.join(path.name for path in wanted)}")


def on_local_rows(name: str, stock: Path, source: Path) -> dict[str, Any]:
    """lm-eval's definition with local rows; `null` keeps lm-eval from requesting missing splits."""
    splits = {f"{split}_split": split if split == source.stem else None for split in ("training", "validation", "test")}
    data = {
        "dataset_path": FORMATS[source.suffix],
        "dataset_kwargs": {"data_files": {source.stem: str(source.resolve())}},
    }
    return {"include": str(stock), "task": name, "dataset_name": None, **data, **splits}


@contextmanager
def _local_datasets() -> Iterator[None]:
    """Prepare `datasets` for local files: hide its progress bars and, if its cache is not writable, use a temporary
    folder as its cache, which is removed when this process ends."""
    import datasets

    cache, bars = Path(datasets.config.HF_DATASETS_CACHE), not datasets.are_progress_bars_disabled()
    try:
        cache.expanduser().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache.expanduser()):
            pass
    except OSError:
        datasets.config.HF_DATASETS_CACHE = Path(_folder_of_this_process().name)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.config.HF_DATASETS_CACHE = cache
        if bars:
            datasets.enable_progress_bars()


@cache
def _folder_of_this_process() -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory(prefix="sparsellm-rows-", ignore_cleanup_errors=True)
