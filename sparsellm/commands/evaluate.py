"""Score a checkpoint on seven tasks and its held-out text.

For a run's checkpoint, also computes the held-out loss. Alone or under torchrun. Exit codes: 0 if everything has a
score, 1 if a score is missing (the rest is reported), 2 for a refused configuration, 130 when interrupted. export=DIR
writes the tasks' rows instead, for data_dir=DIR on machines without a network.
"""

import json
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

from sparsellm.config import EvaluateConfig, entry_point
from sparsellm.distributed.groups import MainRankFailed, agreed
from sparsellm.evaluation import results, tasks
from sparsellm.evaluation.record import record
from sparsellm.evaluation.request import mistakes
from sparsellm.hf import hub
from sparsellm.system.console import quantity, warn
from sparsellm.system.files import write_whole
from sparsellm.system.garbage_collection import without_garbage_collection


@entry_point("evaluate", lambda config, _typed: agreed(mistakes(config)))
def main(config: EvaluateConfig) -> int:
    # Deferred: this import takes seconds, and a wrong command should fail at once.
    from sparsellm.evaluation.checkpoint import evaluate_checkpoint

    try:
        if config.export is not None:
            return export(tasks.chosen(config.tasks), Path(config.export).expanduser())
        # Garbage collection over the requests and samples, millions of objects, would take a quarter of the time.
        with without_garbage_collection():
            found = evaluate_checkpoint(config, record, partial(show, tasks.chosen(config.tasks)))
    except MainRankFailed:
        return 1  # the main rank reports why
    except KeyboardInterrupt:
        print("\nsparsellm: stopped; run the same command to continue with the unfinished tasks", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:
        raise  # standard output was closed, as with `| head`; handled in cli.py
    except OSError as error:  # mostly a full disk
        warn(str(error))
        return 1
    return 1 if found["failed"] else 0


def export(names: list[str], folder: Path) -> int:
    """Write each task's rows from the hub to `folder`, in the layout of data_dir. Returns 1 if a task has no rows."""
    try:  # before the hub is asked, which takes minutes
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        warn(f"export={folder} cannot be written: {error}; choose another folder")
        return 1
    failed = 0
    with hub.offline(not hub.answers(f"the rows of {', '.join(names)}")):
        for name in names:
            try:
                loaded = tasks.load(name, None)
            except tasks.TaskUnavailable as error:
                warn(str(error))
                failed = 1
                continue
            path = folder / name / f"{loaded.split}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = [json.dumps(row, ensure_ascii=False) for row in tasks.each_row(loaded.task.dataset[loaded.split])]
            write_whole(path, "\n".join([*lines, ""]))
            print(f"{path}  {quantity(len(lines), 'row')}", flush=True)
    return failed


def show(asked: list[str], found: dict[str, Any]) -> None:
    written = Path(found["output_dir"], results.RESULTS)
    where = written if results.has_scores(found) else f"there are no scores, so {written} was not written"
    print(f"{results.table(found, asked)}\n\n{where}", flush=True)
