r"""Training and evaluation on 1, 2, 4 and 8 GPUs of one machine, in commands of --minutes that continue each other.

    python -m scripts.benchmarks.bench_scaling OUT OVERRIDE... [--parts train shard run evaluate] [--gpus 1 2 4 8]
    python -m scripts.benchmarks.bench_scaling build/scaling data=files 'data.files=[TEXT/*.parquet]' \
        data.tokenizer=TOKENIZER --data-dir EVAL --json docs/results/scaling.json

The kernels are built and the data prepared once, before any rank starts. Then each measurement is one command, whose
result is OUT/NAME.json and whose output is OUT/NAME.log:

- train: bench_train with PyTorch (runtime.kernels=torch) and the kernels (auto), with new weights (dense) and with
  weights that fire --firing neurons per token, in steps of 512 sequences; each side at its largest micro-batch
  (`auto`), and on the most GPUs, if several, also both at the same one.
- shard: the same for 2b and 7b with runtime.shard=optimizer and full, on the most GPUs.
- run: bench_run, a real run of 1p5b on the most GPUs, as long as --minutes allow. One rank is killed in it.
- evaluate: bench_evaluate_command, the seven tasks, and with the checkpoint of `run` its held-out loss.

A measurement starts if it is estimated to end in time (50% MFU of H100s), and is ended when the time is over. The same
command continues with those that have no result yet, those that failed last, and ends with the tables of the others.
Use a new OUT on another machine. OUT needs room for two checkpoints of `run` (44 GB).

"over 1 GPU" is at the same global batch. "NCCL" is the fraction of one traced step of rank 0 in which its GPU ran
NCCL's kernels and no others, which includes the time in which they wait for the other ranks.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from scripts.benchmarks import harness, patterns
from scripts.benchmarks.harness import cell
from sparsellm.config import ConfigError, Shard, from_overrides
from sparsellm.runs.mfu import PEAK_FLOPS, mfu

# Micro-batch that fits on 80 GB for both, when dense and not sharded.
BOTH_FIT = {"0p5b": 32, "1b": 16, "1p5b": 8, "2b": 4, "0p5b_wide": 16, "1b_wide": 8, "1p5b_wide": 2}
SHARDED = {"2b": (Shard.optimizer, Shard.full), "7b": (Shard.optimizer, Shard.full), "2b_wide": (Shard.optimizer,)}
EXPERIMENTS = ["1p5b", "0p5b", "1b", "2b", "7b", "0p5b_wide", "1b_wide", "1p5b_wide", "2b_wide"]
BATCH = 512  # sequences, over all GPUs
REAL = "1p5b"  # experiment of the part `run`
# Seconds that are not training steps, for estimates: of any measurement, of each trainer that it builds (compilation,
# the choice of a micro-batch), and of a run (start, restart, steps lost to the kill, checkpoints).
START, TRAINER, RUN = 60, 20, 260
# Builds the kernels. Fails on a GPU that does not get them; a CPU computes the variant of the kernels in PyTorch.
BUILD = "import torch; from sparsellm.ops import backend; torch.cuda.is_available() and backend.load()"
EVALUATION = ("--only", "sparsellm", "--rounds", "2")  # the first round calibrates


def tokens_per_s(overrides: Sequence[str], gpus: int) -> tuple[float, int]:
    """(estimated tokens/s of dense training on H100s at 50% MFU, tokens per step)"""
    config = from_overrides([f"training.batch_size={BATCH}", *overrides])
    of_one = 0.5 / mfu(1.0, config.model, config.training.sequence_length, PEAK_FLOPS["H100"])
    return gpus * of_one, config.training.tokens_per_step


def torchrun(gpus: int) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={gpus}"]


@dataclass(frozen=True)
class Training:
    """Steps of an experiment in PyTorch and with the kernels."""

    experiment: str
    gpus: int
    shard: Shard
    firing: float | None  # None: the initial weights, which are dense
    micro_batches: tuple[str, ...]

    @property
    def name(self) -> str:
        sparsity = "dense" if self.firing is None else f"{self.firing:g}"
        return f"{self.experiment}-{self.gpus}-{self.shard.name}-{sparsity}"

    def seconds(self, args: argparse.Namespace) -> float:
        speed, tokens = tokens_per_s([f"experiment={self.experiment}", *args.overrides], self.gpus)
        steps = args.warmup + args.steps + (self.gpus > 1)
        return START + 2 * len(self.micro_batches) * (TRAINER + steps * tokens / speed)

    def command(self, result: Path, args: argparse.Namespace, _left: float) -> list[str]:
        sparse = [] if self.firing is None else ["--firing", f"{self.firing:g}", "--locality", f"{args.locality:g}"]
        sparse += [] if self.firing is None or args.activations is None else ["--activations", str(args.activations)]
        return [
            *torchrun(self.gpus), "-m", "scripts.benchmarks.bench_train", f"experiment={self.experiment}",
            f"training.batch_size={BATCH}", f"runtime.shard={self.shard.name}", "logging=disabled", *args.overrides,
            "--variant", "runtime.kernels=torch", "--variant", "runtime.kernels=auto", "--soon",
            "--micro-batches", *self.micro_batches, "--rounds", "1",
            "--warmup", str(args.warmup), "--steps", str(args.steps), *(["--trace"] if self.gpus > 1 else []),
            *sparse, "--json", str(result),
        ]  # fmt: skip


@dataclass(frozen=True)
class Run:
    """A real run, in which a rank is killed. Its steps depend on --minutes alone, so a later command continues it."""

    gpus: int

    @property
    def name(self) -> str:
        return f"run-{self.gpus}"

    def seconds(self, args: argparse.Namespace) -> float:
        return max(RUN, 60 * args.minutes - START)  # so it is the first measurement of a command

    def command(self, result: Path, args: argparse.Namespace, left: float) -> list[str]:
        speed, tokens = tokens_per_s([f"experiment={REAL}", *args.overrides], self.gpus)
        steps = max(4, math.floor((60 * args.minutes - RUN) * speed / tokens))
        return [
            sys.executable, "-m", "scripts.benchmarks.bench_run", str(result.with_suffix("")), f"experiment={REAL}",
            f"training.batch_size={BATCH}", f"training.steps={steps}", *args.overrides, "--ranks", str(self.gpus),
            "--minutes", f"{left / 60:.2f}", "--json", str(result),
        ]  # fmt: skip


@dataclass(frozen=True)
class Evaluation:
    gpus: int

    @property
    def name(self) -> str:
        return f"evaluate-{self.gpus}"

    def seconds(self, _args: argparse.Namespace) -> float:
        return START + 2 * (40 + 60 / self.gpus)

    def command(self, result: Path, args: argparse.Namespace, _left: float) -> list[str]:
        checkpoint = args.checkpoint or result.with_name(f"run-{max(args.gpus)}") / "run"
        return [
            sys.executable, "-m", "scripts.benchmarks.bench_evaluate_command", "--data-dir", args.data_dir,
            "--checkpoint", str(checkpoint), "--ranks", str(self.gpus), *EVALUATION, "--json", str(result),
        ]  # fmt: skip


Measurement = Training | Run | Evaluation


def training(experiments: Sequence[str], gpus: Sequence[int], firing: float) -> Iterator[Training]:
    for each in (firing, None):
        for count in sorted(gpus, reverse=True):
            for name in experiments:
                if name in BOTH_FIT:
                    sizes = (str(BOTH_FIT[name]), "auto") if count == max(gpus) > 1 else ("auto",)
                    yield Training(name, count, Shard.none, each, sizes)


def sharded(experiments: Sequence[str], gpus: int, firing: float) -> Iterator[Training]:
    for each in (firing, None):
        for name in experiments if gpus > 1 else ():
            for shard in SHARDED.get(name, ()):
                yield Training(name, gpus, shard, each, ("auto",))


def measurements(args: argparse.Namespace) -> Iterator[Measurement]:
    """The measurements of args.parts, starting with the sparse ones and those on the most GPUs."""
    most = max(args.gpus)
    for part in args.parts:
        match part:
            case "train":
                yield from training(args.experiments, args.gpus, args.firing)
            case "shard":
                yield from sharded(args.experiments, most, args.firing)
            case "run":
                yield Run(most)
            case "evaluate":
                yield from map(Evaluation, sorted(args.gpus, reverse=True))


def training_rows(found: dict[Training, dict[str, Any]]) -> Iterator[dict[str, str]]:
    """A row per measurement, variant and micro-batch, with the speedup over one GPU, which shards nothing."""

    def side(of: Training, run: dict[str, Any]) -> tuple:
        return of.experiment, of.firing, run["variant"], run["micro_batch"]

    runs = [(of, run) for of, result in found.items() for run in result["runs"]]
    singles = {side(of, run): run.get("tokens_per_s") for of, run in runs if of.gpus == 1}
    for of, run in runs:
        speed, single = run.get("tokens_per_s"), singles.get(side(of, run))
        size, chosen = str(run["micro_batch"]), run.get("micro_batches")
        yield {
            "measurement": of.name, "kernels": run["variant"].removeprefix("runtime.kernels="),
            "micro": f"auto: {chosen[-1]}" if size == "auto" and chosen else size,
            "tokens/s": "OOM" if speed is None else f"{speed:,.0f}",
            "over PyTorch": cell(run.get("ratio"), ".2f"), "MFU": cell(run.get("mfu"), ".1%"),
            "over 1 GPU": cell(single and speed and speed / single, ".2f"), "NCCL": cell(run.get("nccl"), ".1%"),
            "peak GiB": cell(run.get("peak_bytes") and run["peak_bytes"] / 2**30, ".1f"),
        }  # fmt: skip


def run_rows(found: dict[Run, dict[str, Any]]) -> Iterator[dict[str, str]]:
    for of, result in found.items():
        sizes = list(dict.fromkeys(str(row["micro_batch_size"]) for row in result["rows"]))
        yield {
            "measurement": of.name, "steps": str(result["steps"]), "tokens/s": f"{result['tokens_per_s']:,.0f}",
            "micro": " -> ".join(sizes), "loss": cell(result["rows"][-1]["loss"], ".3f"),
            "killed after": str(result["killed"]["step"]), "back after s": cell(result["back_s"], ".0f"),
            "exit code": str(result["exit_code"]),
        }  # fmt: skip


def evaluation_rows(found: dict[Evaluation, dict[str, Any]]) -> Iterator[dict[str, str]]:
    best = {of.gpus: (min(each["seconds"]["sparsellm"]), min(each["scoring"])) for of, each in found.items()}
    for gpus, (whole, scoring) in best.items():
        yield {
            "measurement": Evaluation(gpus).name, "seconds": f"{whole:.1f}", "scoring": f"{scoring:.1f}",
            "scoring over 1 GPU": cell(best[1][1] / scoring if 1 in best else None, ".2f"),
        }  # fmt: skip


def show(found: dict[Measurement, dict[str, Any]]) -> None:
    for rows in (
        training_rows({of: result for of, result in found.items() if isinstance(of, Training)}),
        run_rows({of: result for of, result in found.items() if isinstance(of, Run)}),
        evaluation_rows({of: result for of, result in found.items() if isinstance(of, Evaluation)}),
    ):
        harness.table(rows)
    for machine in dict.fromkeys(result["machine"] for result in found.values()):
        print(f"measured on {machine}")


def prepare(todo: Sequence[Measurement], args: argparse.Namespace, end: float) -> list[str]:
    """Build the kernels, and prepare the data for trainings. Returns a line if this failed."""
    commands = [["-c", BUILD]]
    if not all(isinstance(each, Evaluation) for each in todo):
        commands.append(["-m", "sparsellm.prepare_data", f"experiment={REAL}", *args.overrides])
    log = args.out / "prepare.log"
    print("building the kernels and preparing the data", flush=True)
    for command in commands:
        if harness.run([sys.executable, *command], log, end - time.monotonic()) != 0:
            return [f"the kernels or the data were not prepared: see {log}"]
    return []


def measure(todo: Sequence[Measurement], args: argparse.Namespace, end: float) -> list[str]:
    """Make the measurements that are estimated to end before `end` (time.monotonic()). Returns lines about those that
    failed. A result that a command has written counts, however the command ended."""

    def left() -> float:
        return end - time.monotonic()

    todo = [each for each in todo if each.seconds(args) <= left()]
    failed = prepare(todo, args, end) if todo else []
    for each in [] if failed else todo:
        result, log = args.out / f"{each.name}.json", args.out / f"{each.name}.log"
        if (needed := each.seconds(args)) > left():
            continue
        print(f"{each.name}: about {needed:.0f} s, {left() / 60:.1f} minutes left", flush=True)
        code = harness.run(each.command(result, args, left()), log, left())
        if not result.exists():
            how = "was ended when the time was over" if code is None else f"failed with exit code {code}"
            failed.append(f"{each.name} {how}: see {log}")
            print(failed[-1], flush=True)
    return failed


def main(arguments: list[str] | None = None) -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder of the results")
    parser.add_argument("overrides", nargs="*", help="config overrides of every training, such as the data")
    parts = ["train", "shard", "run", "evaluate"]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    counts = [count for count in (1, 2, 4, 8) if count <= max(1, torch.cuda.device_count())]
    parser.add_argument("--gpus", nargs="+", type=int, default=counts, help="default: up to those of this machine")
    parser.add_argument("--minutes", type=float, default=9)
    parser.add_argument("--experiments", nargs="+", choices=EXPERIMENTS, default=EXPERIMENTS[:5])
    parser.add_argument("--firing", type=float, default=36.0, metavar="MEAN", help="neurons per token when sparse")
    patterns.add_activations(parser)
    patterns.add_locality(parser)
    parser.add_argument("--warmup", type=int, default=3, help="steps, as in bench_train; the third may grow")
    parser.add_argument("--steps", type=int, default=3, help="measured steps, as in bench_train")
    parser.add_argument("--data-dir", metavar="EVAL", help="rows of the tasks, for the part `evaluate`")
    parser.add_argument("--checkpoint", type=Path, help="for the part `evaluate`; default: the run of the part `run`")
    args = parser.parse_intermixed_args(arguments)
    end = time.monotonic() + 60 * args.minutes
    if "evaluate" in args.parts and args.data_dir is None:
        parser.error("the part `evaluate` needs --data-dir")
    args.out.mkdir(parents=True, exist_ok=True)
    wanted = {each: args.out / f"{each.name}.json" for each in measurements(args)}
    todo = [each for each, result in wanted.items() if not result.exists()]
    todo.sort(key=lambda each: (args.out / f"{each.name}.log").exists())  # what failed before comes last
    try:
        failed = measure(todo, args, end)
    except ConfigError as error:
        parser.error(str(error))
    found = {each: json.loads(result.read_text()) for each, result in wanted.items() if result.exists()}
    show(found)
    print("".join(f"{line}\n" for line in failed), end="")
    if missing := [f"{each.name} ({each.seconds(args):.0f} s)" for each in wanted if each not in found]:
        print(f"{len(missing)} measurements are missing (run the same command again): {' '.join(missing)}")
        shortest = min(each.seconds(args) for each in wanted if each not in found)
        if not failed and args.minutes and not set(todo) & set(found):
            print(
                f"none was started: the shortest needs --minutes {math.ceil((shortest + START) / 60)}, with preparation"
            )
    harness.write(args.json, {each.name: result for each, result in found.items()})
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
