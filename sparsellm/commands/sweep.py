"""Train, evaluate and compare runs over lists of values.

    python -m sparsellm.sweep experiment=0p5b 'sparsity.l1_coefficient=0,1e-5,2e-5,3e-5' sweep.baseline=true
    python -m sparsellm.sweep experiment=1p5b sweep=paper_l1

Every key of sparsellm.train accepts a list of values. Each combination is an ordinary run, trained on all GPUs of this
machine and evaluated with the options evaluate.*. sweep=paper_l1 lists eight L1 coefficients, as in the paper.
sweep.parallel=N trains N runs at once, each on its own GPUs. Repeat the command to resume; finished work is skipped.
Writes sweep.csv, .json, .md, .png, .pdf and one log per run to sweeps/NAME/. sweep.benchmark=true also benchmarks each
run. sweep.mode=print prints the commands instead of running them, and sweep.mode=slurm writes a script for a SLURM job
array.

Exit codes: 0 complete, 1 if a run failed (the others are still done), 128 + signal when stopped, 2 for a refused
configuration.
"""

import time

from sparsellm.config import ConfigError, SweepMode
from sparsellm.runs import folder as run_folder
from sparsellm.runs import report as run_report
from sparsellm.sweep import commands, report
from sparsellm.sweep.launch import Launcher, Work
from sparsellm.sweep.plan import Point, Sweep, plan
from sparsellm.sweep.progress import Progress
from sparsellm.system.console import quantity, warn
from sparsellm.system.files import write_whole

POLL = 0.1  # seconds between checks for finished commands and signals


def main(arguments: list[str], program: str) -> int:
    try:
        sweep = plan(arguments)
    except (ConfigError, OSError) as error:
        warn(str(error))
        return 2
    if sweep.options.mode == SweepMode.print:
        print(commands.text(sweep, arguments))
        return 0
    try:
        sweep.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        warn(f"{sweep.folder} cannot be written: {error}; choose another sweep.root")
        return 2
    if sweep.options.mode == SweepMode.slurm:
        script = sweep.folder / "slurm.sh"
        write_whole(script, commands.slurm_script(sweep, arguments))
        print(f"{script} starts {quantity(len(sweep.points), 'run')}, one per task: sbatch {script}")
        return 0
    return run(sweep)


def run(sweep: Sweep) -> int:
    """Train and evaluate the unfinished points; update the table and the figure after each run."""
    count, failures, unwritten, text = len(sweep.points), [], None, ""
    waiting = list(range(count)) if sweep.options.point is None else [sweep.options.point]
    trained, several = sum(point.is_finished() for point in sweep.points), len(sweep.slots) > 1
    print(f"{sweep.folder}: {count} run{'s' * (count > 1)}, {trained} of them trained")
    progress = Progress(sweep.points) if several else None
    working: dict[int, tuple[int, Work[str | None]]] = {}  # slot -> (index of the point, work in progress)
    with Launcher(shown=not several) as launcher:
        while working or (waiting and launcher.signal is None):
            for slot, environment in enumerate(sweep.slots):
                if slot not in working and waiting and launcher.signal is None:
                    number = waiting.pop(0)
                    point = sweep.points[number]
                    print("" if several else "\n", title(sweep, number), f"  {point.describe()}", sep="", flush=True)
                    working[slot] = number, do(sweep, point, launcher, environment)
            for slot, (number, work) in list(working.items()):
                failure, point = None, sweep.points[number]
                try:
                    next(work)
                    continue
                except StopIteration as ended:
                    failure = ended.value
                except OSError as error:  # mostly a log on a full disk
                    failure = f"{error}; see {sweep.log(point)}"
                del working[slot]
                if failure:
                    failures.append(f"{title(sweep, number)}: {failure}")
                    warn(failures[-1])
                text, found = report.write_all(sweep)
                if found not in (None, unwritten):
                    warn(found)
                unwritten = found
                if progress is not None:
                    progress.ended.add(point.name)
            if progress is not None:
                progress.show([sweep.points[number] for number, _ in working.values()])
            if working:
                time.sleep(POLL)
        if progress is not None:
            progress.close()
        if launcher.signal is not None:
            print(f"{sweep.name}: stopped; run the same command to continue", flush=True)
            return 128 + launcher.signal
    print(f"\n{text}")
    for failure in [*failures, *([] if unwritten is None else [unwritten])]:
        warn(failure)
    return 1 if failures or unwritten else 0


def title(sweep: Sweep, number: int) -> str:
    return f"[{number + 1}/{len(sweep.points)}] {sweep.points[number].name}"


def do(sweep: Sweep, point: Point, launcher: Launcher, environment: dict[str, str]) -> Work[str | None]:
    """Train and evaluate one point, unless done. Returns an error message; None on success or after a signal."""
    log = sweep.log(point)
    if point.is_finished():
        run_folder.tidy(point.folder)
        if not run_report.is_drawn(point.folder, point.checkpoint):  # training was killed before all plots were drawn
            run_report.finish(point.config, point.folder)
    with (yield from launcher.claim(log)) as file:
        steps = [] if point.is_finished() else [("training", commands.train(sweep, point))]
        if sweep.options.evaluate and not sweep.is_evaluated(point):
            steps.append(("evaluation", commands.evaluate(sweep, point)))
        # A benchmark's results are in the folder of the final checkpoint, so an unfinished run has none.
        if sweep.options.benchmark and not (point.is_finished() and sweep.benchmark(point).exists()):
            steps.append(("benchmark", commands.benchmark(point)))
        for step, command in steps:
            if launcher.signal is not None:
                return None
            code = yield from launcher.run(command, file, environment)
            if code and launcher.signal is None:
                return f"its {step} ended with exit code {code}; see {log}"
    return None
