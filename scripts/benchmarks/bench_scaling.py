r"""Training throughput on 1, 2, 4 and 8 GPUs of one machine, for several experiments, dense and sparse, in one table.

    python -m scripts.benchmarks.bench_scaling OUT OVERRIDE... [--gpus 8] [--minutes 9] [--experiments 0p5b 1b 1p5b 2b]
    python -m scripts.benchmarks.bench_scaling build/scaling data=files 'data.files=[TEXT/*.parquet]' data.tokenizer=TOK

Each measurement is one command of bench_train, whose result is OUT/NAME.json: PyTorch (runtime.kernels=torch) and the
kernels (runtime.kernels=auto), at the same micro-batch and at the largest one that fits, with new weights (dense) and
with weights that fire --firing neurons per token (sparse). 2b is also sharded (runtime.shard), and 7b and 2b_wide only
sharded, on all GPUs.

The command stops --minutes after it started. The same command continues with the measurements that have no result yet,
and always ends with the table of those that have one. Speedups over one GPU are at the same global batch. "NCCL" is
the fraction of a step in which a GPU ran only communication.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from scripts.benchmarks import harness
from scripts.benchmarks.harness import cell
from sparsellm.config import Shard

# Micro-batch that fits on 80 GB for both, when dense.
BOTH_FIT = {
    "0p5b": 32, "1b": 16, "1p5b": 8, "2b": 4, "7b": 4, "0p5b_wide": 16, "1b_wide": 8, "1p5b_wide": 2, "2b_wide": 4,
}  # fmt: skip
SHARDED = {"2b": (Shard.optimizer, Shard.full), "7b": (Shard.full,), "2b_wide": (Shard.optimizer,)}
ONLY_SHARDED = {"7b", "2b_wide"}
BATCH = 512  # sequences, over all GPUs


class Measurement(NamedTuple):
    experiment: str
    gpus: int
    shard: Shard
    firing: float | None  # None: the initial weights, which are dense

    @property
    def name(self) -> str:
        sparsity = "dense" if self.firing is None else f"{self.firing:g}"
        return f"{self.experiment}-{self.gpus}-{self.shard.name}-{sparsity}"

    def command(self, result: Path, overrides: Sequence[str], options: Sequence[str]) -> list[str]:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={self.gpus}"]
        return [
            sys.executable, *torchrun, "-m", "scripts.benchmarks.bench_train", f"experiment={self.experiment}",
            f"training.batch_size={BATCH}", f"runtime.shard={self.shard.name}", *overrides,
            "--variant", "runtime.kernels=torch", "--variant", "runtime.kernels=auto", "--soon",
            "--micro-batches", str(BOTH_FIT[self.experiment]), "auto", "--rounds", "1", "--trace",
            *([] if self.firing is None else ["--firing", f"{self.firing:g}"]), *options, "--json", str(result),
        ]  # fmt: skip


def measurements(experiments: Sequence[str], gpus: int, firing: float) -> Iterator[Measurement]:
    """The measurements to make, starting with those on the most GPUs."""
    sizes = [size for size in (8, 4, 2, 1) if size <= gpus]
    for size in sizes:
        for experiment in experiments:
            for shard in (Shard.none, *SHARDED.get(experiment, ())):
                fits = experiment not in ONLY_SHARDED or shard != Shard.none
                if fits and (shard == Shard.none or size == sizes[0] > 1):
                    for each in (None, firing):
                        yield Measurement(experiment, size, shard, each)


def rows(found: dict[Measurement, dict]) -> Iterator[dict[str, str]]:
    """A row per measurement, variant and micro-batch, with the speedup over one GPU."""
    speeds = {
        (measurement, run["variant"], run["micro_batch"]): run.get("tokens_per_s")
        for measurement, result in found.items()
        for run in result["runs"]
    }
    for measurement, result in found.items():
        for run in result["runs"]:
            key = run["variant"], run["micro_batch"]
            speed, single = run.get("tokens_per_s"), speeds.get((measurement._replace(gpus=1), *key))
            yield {
                "measurement": measurement.name, "kernels": run["variant"].removeprefix("runtime.kernels="),
                "micro": str(run["micro_batch"]), "tokens/s": "OOM" if speed is None else f"{speed:,.0f}",
                "over PyTorch": cell(run.get("ratio"), ".2f"), "MFU": cell(run.get("mfu"), ".1%"),
                "over 1 GPU": cell(single and speed and speed / single, ".2f"), "NCCL": cell(run.get("nccl"), ".1%"),
                "peak GiB": cell(run.get("peak_bytes") and run["peak_bytes"] / 2**30, ".1f"),
            }  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("out", type=Path, help="folder of the results")
    parser.add_argument("overrides", nargs="*", help="config overrides of every measurement, such as the data")
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=9)
    parser.add_argument("--experiments", nargs="+", choices=BOTH_FIT, default=["0p5b", "1b", "1p5b", "2b"])
    parser.add_argument("--firing", type=float, default=36.0, metavar="MEAN", help="neurons per token when sparse")
    parser.add_argument("--warmup", default="5", help="steps, as in bench_train")
    parser.add_argument("--steps", default="5", help="measured steps, as in bench_train")
    args = parser.parse_intermixed_args(arguments)
    end = time.monotonic() + 60 * args.minutes
    args.out.mkdir(parents=True, exist_ok=True)
    found, missing, failed = {}, [], []
    for measurement in measurements(args.experiments, args.gpus, args.firing):
        result = args.out / f"{measurement.name}.json"
        if not result.exists() and (left := end - time.monotonic()) > 0:
            command = measurement.command(result, args.overrides, ["--warmup", args.warmup, "--steps", args.steps])
            print(f"{measurement.name}: {left / 60:.1f} minutes left", flush=True)
            with result.with_suffix(".log").open("w") as log:
                running = subprocess.Popen(command, stdout=log, stderr=log)
                try:
                    if code := running.wait(left):
                        failed.append(f"{measurement.name} failed with exit code {code}: see {log.name}")
                except subprocess.TimeoutExpired:
                    running.terminate()  # SIGKILL would leave torchrun's ranks on the GPUs
                    running.wait()
        if result.exists():
            found[measurement] = json.loads(result.read_text())
        else:
            missing.append(measurement.name)
    harness.table(rows(found))
    for line in failed:
        print(line)
    if missing:
        print(f"{len(missing)} measurements are missing (run the same command again): {' '.join(missing)}")
    harness.write(args.json, {measurement.name: result for measurement, result in found.items()})
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
