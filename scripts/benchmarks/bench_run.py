r"""A real run on several ranks, one of which is killed: its speed, and whether torchrun's restart completes it.

    python -m scripts.benchmarks.bench_run OUT OVERRIDE... --ranks 8 [--minutes 9] [--json run.json]
    python -m scripts.benchmarks.bench_run build/run experiment=1p5b training.steps=100 --ranks 8 data=files \
        'data.files=[TEXT/*.parquet]' data.tokenizer=TOKENIZER

Trains in OUT/run with `torchrun --max-restarts=1`, with a checkpoint after each quarter of the steps and a row
for every step. Once the first checkpoint is complete and a later step is logged, the last rank gets SIGKILL. Then

- torchrun must end with exit code 0,
- the last row must be that of training.steps,
- and metrics.jsonl must have one row for each step, none missing and none twice.

Otherwise the command says what differs and ends with 1. When --minutes are over, torchrun is ended; the same command
continues the run, and kills no second rank. OUT/train.log has the output, OUT/run/plots the curves.

Prints about ten rows of the run, as they are in metrics.jsonl at the end: the steps between checkpoint and kill are
those of the restarted run. "Back" is the time from the kill until a later step than the last one before it was logged.
"""

import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from scripts.benchmarks import harness
from scripts.benchmarks.harness import cell
from sparsellm.config import ConfigError, from_overrides
from sparsellm.runs import layout
from sparsellm.runs.metrics import METRICS

KILLED = "killed.json"  # in OUT: {"rank", "step": the last one logged before the kill, "checkpoint": its step}
KEPT = (
    "step", "tokens", "loss", "ce", "val_ce", "nnz_mean", "tokens_per_s", "mfu", "mj_per_token", "data_wait_fraction",
    "micro_batch_size", "peak_memory_bytes", "grad_norm", "skipped_steps",
)  # fmt: skip


def logged(folder: Path) -> list[dict[str, Any]]:
    """The whole rows of the run's metrics.jsonl, in the order of the file, with their keys in KEPT."""
    with suppress(FileNotFoundError):
        lines = (folder / METRICS).read_bytes().split(b"\n")[:-1]
        return [{key: row.get(key) for key in KEPT} for row in map(json.loads, lines)]
    return []


def complete_checkpoint(folder: Path) -> int | None:
    """The step of the run's newest complete checkpoint."""
    found = layout.checkpoints_by_step((folder / layout.CHECKPOINTS).glob("step_*"))
    return max((step for step, path in found.items() if (path / layout.COMMITTED).exists()), default=None)


def process_of_rank(torchrun: int, rank: int) -> int | None:
    """The process of `rank`, a child of torchrun's process; not the rank's own children, which have its environment."""
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # another user's, or ended
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == torchrun and f"RANK={rank}".encode() in (path / "environ").read_bytes().split(b"\0"):
                return int(path.name)
    return None


def watch(process: subprocess.Popen, folder: Path, rank: int, record: Path, seconds: float) -> float | None:
    """Wait for torchrun, at most `seconds`, and kill `rank` once, as `record` then says. Returns the seconds until the
    run was back, None if it was not or no rank was killed."""
    end, killed_at, restarted, back = time.monotonic() + seconds, None, False, None
    while process.poll() is None and time.monotonic() < end:
        rows = logged(folder)
        last = rows[-1]["step"] if rows else 0
        if not record.exists():
            saved = complete_checkpoint(folder)
            if saved is not None and last > saved and (victim := process_of_rank(process.pid, rank)):
                os.kill(victim, signal.SIGKILL)
                killed_at, before = time.monotonic(), last
                record.write_text(json.dumps({"rank": rank, "step": last, "checkpoint": saved}))
                print(f"rank {rank} was killed after step {last}, with a checkpoint of step {saved}", flush=True)
        elif killed_at is not None and back is None:
            restarted |= last < before  # a resumed run drops the rows after its checkpoint
            if restarted and last > before:
                back = time.monotonic() - killed_at
        time.sleep(0.05)
    return back


def mistakes(exit_code: int | None, rows: list[dict[str, Any]], steps: int, killed: bool) -> list[str]:
    """What differs from a run that a killed rank has not harmed. `exit_code`: None if the time was over."""
    if exit_code is None:
        return ["the time is over: run the same command again to continue the run"]
    found = [] if exit_code == 0 else [f"torchrun ended with exit code {exit_code}: it should be 0"]
    found += [] if killed else ["no rank was killed, because the run ended first: give it more training.steps"]
    logged_steps = [row["step"] for row in rows]
    if logged_steps != list(range(1, steps + 1)):
        missing = sorted(set(range(1, steps + 1)) - set(logged_steps))
        twice = sorted({step for step in logged_steps if logged_steps.count(step) > 1})
        last = logged_steps[-1] if logged_steps else None
        found.append(f"rows missing: {missing}; rows there twice: {twice}; last row: {last}, it should be {steps}")
    return found


def show(rows: list[dict[str, Any]]) -> None:
    every = math.ceil(len(rows) / 10)
    harness.table(
        {
            "step": str(row["step"]), "tokens/s": cell(row["tokens_per_s"], ",.0f"), "MFU": cell(row["mfu"], ".1%"),
            "loss": cell(row["loss"], ".3f"), "nonzeros": cell(row["nnz_mean"], ",.0f"),
            "micro": str(row["micro_batch_size"]), "data wait": cell(row["data_wait_fraction"], ".2%"),
            "peak GiB": cell(row["peak_memory_bytes"] and row["peak_memory_bytes"] / 2**30, ".1f"),
        }
        for row in rows if row["step"] % every == 0 or row["step"] == 1
    )  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder of the run and its log")
    parser.add_argument("overrides", nargs="*", help="config overrides of the run, at least training.steps")
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--minutes", type=float, default=9)
    args = parser.parse_intermixed_args(arguments)
    begin = time.monotonic()
    name = ["run.name=run", f"run.root={args.out.absolute()}", "logging.every=1"]
    try:
        steps = from_overrides([*args.overrides, *name]).training.steps
    except ConfigError as error:
        parser.error(str(error))
    folder, record, log = args.out / "run", args.out / KILLED, args.out / "train.log"
    args.out.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=1",
        f"--nproc_per_node={args.ranks}", "-m", "sparsellm.train", "logging=disabled", "run.keep_checkpoints=1",
        f"run.checkpoint_every={math.ceil(steps / 4)}", *args.overrides, *name,
    ]  # fmt: skip
    with harness.started(command, log) as process:
        back = watch(process, folder, args.ranks - 1, record, 60 * args.minutes)
        exit_code = process.poll()
    rows = logged(folder)
    show(rows)
    if found := mistakes(exit_code, rows, steps, record.exists()):
        print("\n".join([*found, f"the output is in {log}"]))
        return 1
    said = [line for line in log.read_text(errors="replace").splitlines() if "micro-batch" in line]
    print("\n".join(said))
    speed = statistics.median(row["tokens_per_s"] for row in rows)
    print(f"exit code 0, {steps} steps, {steps} rows; median {speed:,.0f} tokens/s; back after {cell(back, '.0f')} s")
    harness.write(args.json, {
        "ranks": args.ranks, "overrides": args.overrides, "steps": steps, "exit_code": exit_code,
        "killed": json.loads(record.read_text()), "back_s": back, "seconds": time.monotonic() - begin,
        "tokens_per_s": speed, "micro_batches": said, "rows": rows,
    })  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
