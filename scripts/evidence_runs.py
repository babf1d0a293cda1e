r"""The training runs behind docs/RESULTS.md, "What sparsity costs": several at once, over several sessions.

    python -m scripts.evidence_runs docs/mini.jsonl experiment=mini 'data.files=[TEXT/*.parquet]' \
        --tasks EVAL --root RUNS --at-once 2 --minutes 9
    python -m scripts.evidence_runs docs/0p5b.jsonl experiment=0p5b OVERRIDE... --only silu,relu,l1_2e-5

The runs: ReLU without L1 and with seven coefficients; dense SiLU; a second seed of SiLU and of the recommended
coefficient; and the recommended coefficient with dead gate rows reinitialized, with dead gate rows blended a little in
every step, and with a coefficient that rises over the first third of the tokens. Each is `sparsellm train` with the
given overrides and its own, and, with --tasks, scored on the downstream tasks at its last step. --run replaces these
runs, each by a name and overrides: --run "twice training.batch_size=128" --run "late training.seed=2".

RESULTS has a line of JSON for each finished run: its overrides, its configuration, about 80 of its rows. A run with a
line is not trained again, so only this file must be moved between machines. If --root is kept, a stopped run resumes
from its checkpoint.

After --minutes, unfinished runs save a checkpoint and end. --last starts no run that would not finish in that time,
judged by the longest run in RESULTS: for the last command before --root is lost.

Exit codes: 0 if all runs asked for are in RESULTS, 1 if one failed, 3 if some are left for another call.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch

from sparsellm.config import Config, ConfigError, definition, fingerprint, from_overrides
from sparsellm.evaluation.tasks import TASKS, local_rows
from sparsellm.runs.metrics import METRICS, read
from sparsellm.system.processes import end_with_parent

RECOMMENDED = 8e-5
# Under `sum`, most informative first, because perhaps not all are trained. The eighth is 0.
COEFFICIENTS = (8e-5, 2e-5, 3.2e-4, 4e-5, 1.6e-4, 1e-5, 6.4e-4)
BLEND = 0.1
LAST_ROWS, FIRST_ROWS = 48, 32  # rows kept of a run, evenly and logarithmically spaced
KEPT = (
    "step", "tokens", "lr", "ce", "val_ce", "l1", "l1_coefficient", "nnz_mean", "nnz_per_layer", "dead_per_layer",
    "reinitialized_per_layer", "tokens_per_s", "peak_memory_bytes", "micro_batch_size", "plan_per_layer", "evaluation",
)  # fmt: skip
TRAIN = sys.executable, "-m", "sparsellm.train"
POLL = 0.2  # seconds
COMPLETE, FAILED, LEFT = 0, 1, 3


def runs(config: Config, recommended: float) -> dict[str, list[str]]:
    """{name: overrides}, most informative first; tokens are fractions of those of `config`."""
    tokens = config.training.steps * config.training.tokens_per_step
    silence = f"sparsity.reinit_dead_after_tokens={max(1, tokens // 30)}"

    def l1(coefficient: float, suffix: str = "", *more: str) -> dict[str, list[str]]:
        return {f"l1_{spelled(coefficient)}{suffix}": ["sparsity=l1", f"sparsity.l1_coefficient={coefficient}", *more]}

    found = {"silu": ["sparsity=dense_silu"], "relu": ["sparsity=relu"]}
    for coefficient in dict.fromkeys((recommended, *COEFFICIENTS)):
        found |= l1(coefficient)
    blend = f"sparsity.reinit_blend={BLEND}"
    warm_up = "sparsity.l1_schedule=linear", f"sparsity.l1_warmup_tokens={max(1, tokens // 3)}"
    return (
        found
        | {"silu_seed_1": ["sparsity=dense_silu", "training.seed=1"]}
        | l1(recommended, "_seed_1", "training.seed=1")
        | l1(recommended, "_redrawn", silence)
        | l1(recommended, "_blended", silence, blend, "sparsity.reinit_every=1")
        | l1(recommended, "_warm_up", *warm_up)
    )


def spelled(coefficient: float) -> str:
    """3.2e-4, and 0."""
    mantissa, _, exponent = f"{coefficient:e}".partition("e")
    return f"{float(mantissa):g}e{int(exponent)}" if coefficient else "0"


class Running(NamedTuple):
    name: str
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    begun: float


class Runs:
    """Starts, watches and stops the requested runs on GPU slots, and writes their results."""

    def __init__(self, args: argparse.Namespace, overrides: list[str]) -> None:
        self.args, self.results, self.root = args, args.results, args.root
        self.common = [*overrides, "logging=disabled", "run.keep_checkpoints=1", f"run.root={args.root}"]
        if args.tasks is not None:
            steps = from_overrides(overrides).training.steps
            self.common += [f"evaluation.every={steps}", f"evaluation.data_dir={args.tasks}"]
        known = {name: own for name, *own in map(shlex.split, args.run)}
        known = known or runs(from_overrides(overrides), args.recommended)
        only = [name for name in args.only.split(",") if name]
        if unknown := [name for name in only if name not in known]:
            raise SystemExit(f"--only {' '.join(unknown)}: there are {', '.join(known)}")
        self.wanted = {name: known[name] for name in only or known}
        self.waiting = [name for name in self.wanted if name not in self._done()]
        self.failed: list[str] = []

    def config(self, name: str) -> Config:
        return from_overrides(self._overrides(name))

    def _overrides(self, name: str) -> list[str]:
        return [*self.common, *self.wanted[name], f"run.name={name}"]

    def _done(self) -> dict[str, dict[str, Any]]:
        """The lines of the results by name. Exits if a run with a wanted name has another configuration."""
        found = load(self.results)
        for name in [name for name in self.wanted if name in found]:
            if found[name]["fingerprint"] != fingerprint(self.config(name)):
                raise SystemExit(
                    f"{self.results} has a run {name} of another configuration ({' '.join(found[name]['command'])}):"
                    " give the overrides that it had, or another file"
                )
        return found

    def work(self) -> int:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = visible.split(",") if visible else [str(number) for number in range(torch.cuda.device_count())]
        slots: list[str | None] = [gpu for _ in range(self.args.at_once) for gpu in gpus or [None]]
        running: dict[int, Running] = {}
        deadline = time.monotonic() + 60 * self.args.minutes
        while time.monotonic() < deadline and (self.waiting or running):
            for slot, gpu in enumerate(slots):
                beside = [run for other, run in running.items() if slots[other] == gpu]
                staggered = all(time.monotonic() - run.begun >= self.args.stagger for run in beside)
                if slot not in running and staggered and (name := self._next(deadline)):
                    running[slot] = self._start(name, gpu)
            if not running:
                break
            time.sleep(POLL)
            for slot, run in list(running.items()):
                if run.process.poll() is not None:
                    self._ended(running.pop(slot), stopped=False)
        for run in running.values():
            run.process.send_signal(signal.SIGTERM)
        for run in running.values():
            run.process.wait()
            self._ended(run, stopped=True)
        left = [name for name in self.wanted if name not in self._done()]
        print(f"{len(self.wanted) - len(left)} of {len(self.wanted)} runs are in {self.results}", *left, flush=True)
        return FAILED if self.failed else LEFT if left else COMPLETE

    def _next(self, deadline: float) -> str | None:
        """The next run to begin, those that have begun first; None: there is none, or none that would end in time."""
        self.waiting.sort(key=lambda name: not (self.root / name / METRICS).exists())
        if not self.waiting or (self.args.last and self._needed(self.waiting[0]) > deadline - time.monotonic()):
            return None
        return self.waiting.pop(0)

    def _needed(self, name: str) -> float:
        """Seconds that a run needs after its last checkpoint, if it takes as long as the longest run."""
        steps = self.config(name).training.steps
        saved = [int(path.name.partition("_")[2]) for path in (self.root / name / "checkpoints").glob("step_*")]
        longest = max((line["seconds"] for line in load(self.results).values()), default=0.0)
        return longest * (1 - max(saved, default=0) / steps)

    def _start(self, name: str, gpu: str | None) -> Running:
        self.root.mkdir(parents=True, exist_ok=True)
        command = [*TRAIN, *self._overrides(name)]
        log = (self.root / f"{name}.log").open("ab")
        environment = os.environ if gpu is None else os.environ | {"CUDA_VISIBLE_DEVICES": gpu}
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment,
            preexec_fn=partial(end_with_parent, signal.SIGTERM),
        )  # fmt: skip
        print(f"{_now()} {name} begins{'' if gpu is None else f' on GPU {gpu}'}", flush=True)
        return Running(name, process, log, time.monotonic())

    def _ended(self, run: Running, stopped: bool) -> None:
        run.log.close()
        seconds, code = time.monotonic() - run.begun, run.process.returncode
        taken = self.root / f"{run.name}.seconds"  # time of earlier starts
        seconds += float(taken.read_text()) if taken.exists() else 0
        taken.write_text(str(seconds))
        if code and stopped:
            print(f"{_now()} {run.name} is stopped (exit code {code})", flush=True)
        elif code:
            self.failed.append(run.name)
            end = Path(run.log.name).read_text(errors="replace")[-2000:]
            print(f"{_now()} {run.name} failed (exit code {code}); the end of {run.log.name}:\n{end}", flush=True)
        else:
            line = self._line(run.name, seconds)
            with self.results.open("a") as file:
                file.write(json.dumps(line, allow_nan=False) + "\n")
            print(f"{_now()} {run.name} has ended after {seconds:.0f} s: {_said(line['rows'][-1])}", flush=True)

    def _task_rows(self, limit: int | None) -> dict[str, int] | None:
        """Rows of each task to score."""
        if self.args.tasks is None:
            return None
        rows = {name: local_rows(name, str(self.args.tasks)).read_text().splitlines() for name in TASKS}
        return {name: len(lines[:limit]) for name, lines in rows.items()}

    def _line(self, name: str, seconds: float) -> dict[str, Any]:
        config = self.config(name)
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        return {
            "name": name,
            "command": ["sparsellm", "train", *self._overrides(name)],
            "fingerprint": fingerprint(config),
            "config": definition(config),
            "seconds": round(seconds, 1),  # from start to end, with other runs alongside
            "at_once": self.args.at_once,
            "device": device,
            "task_rows": self._task_rows(config.evaluation.limit),
            "rows": thinned(read(self.root / name / METRICS)),
        }


def load(results: Path) -> dict[str, dict[str, Any]]:
    """The lines of a results file by name; {} if there is no file."""
    lines = results.read_text().splitlines() if results.exists() else []
    return {line["name"]: line for line in map(json.loads, lines)}


def thinned(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A subset of rows: denser at the start, all validated ones, the first and the last; numbers to six digits."""
    wanted = np.concatenate([np.geomspace(1, len(rows), FIRST_ROWS), np.linspace(1, len(rows), LAST_ROWS)])
    chosen = {round(number) - 1 for number in wanted} | {i for i, row in enumerate(rows) if row["val_ce"] is not None}
    return [{key: _short(rows[i].get(key)) for key in KEPT} for i in sorted(chosen)]


def _short(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _short(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_short(each) for each in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _said(row: dict[str, Any]) -> str:
    """A short description of the last row."""
    found = {"held-out cross entropy": row["val_ce"], "nonzeros": row["nnz_mean"]}
    found["mean accuracy"] = (row["evaluation"] or {}).get("mean")
    return ", ".join(f"{name} {value:.4g}" for name, value in found.items() if value is not None)


def _now() -> str:
    return time.strftime("%H:%M:%S")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="a line of JSON for each finished run")
    parser.add_argument("overrides", nargs="*", help="of all runs, as of `sparsellm train`")
    parser.add_argument("--tasks", type=Path, help="local rows of the tasks, TASK/SPLIT.jsonl; without: no scores")
    parser.add_argument("--root", type=Path, default=Path("runs/evidence"), help="the folder of the runs")
    parser.add_argument(
        "--run", action="append", default=[], metavar="'NAME OVERRIDE...'", help="in place of the runs above"
    )
    parser.add_argument("--only", default="", metavar="NAME,NAME", help="these runs; without: all")
    parser.add_argument(
        "--recommended", type=float, default=RECOMMENDED, help="coefficient of the second seed and so on"
    )
    parser.add_argument("--at-once", type=int, default=1, help="runs on each GPU")
    parser.add_argument(
        "--stagger", type=float, default=45.0, help="seconds between two starts on a GPU, so that one trains meanwhile"
    )
    parser.add_argument("--minutes", type=float, default=9.0, help="after which unfinished runs are stopped")
    parser.add_argument("--last", action="store_true", help="begin only what would end in that time")
    args = parser.parse_intermixed_args(arguments)
    try:
        asked_for = Runs(args, args.overrides)
    except ConfigError as error:
        parser.error(str(error))
    args.results.parent.mkdir(parents=True, exist_ok=True)
    return asked_for.work()


if __name__ == "__main__":
    sys.exit(main())
