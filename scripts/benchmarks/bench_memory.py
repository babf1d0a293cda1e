r"""Speed and memory of runtime.micro_batch_size=auto on a part of a GPU, compared with given sizes.

    python -m scripts.benchmarks.bench_memory --limit 77 data=stdlib_docs --locality 0.6 --json OUT
    python -m scripts.benchmarks.bench_memory --limit 77 --experiments 2b --ways torch sparse OVERRIDE...

Each experiment trains in up to three ways, for a few steps of `--batch` sequences, with frozen weights:

    torch     dense PyTorch, runtime.kernels=torch
    dense     with the kernels, freshly initialized weights: how every run starts
    sparse    with the kernels, weights shaped to fire --firing neurons per token, as in bench_train.py

Printed for each: auto's first and last micro-batch, tokens/s and peak memory of tensors (and of the whole GPU,
according to the driver) in the steps after that; tokens/s with half and with twice the sequences; and auto relative to
the best of the three. Then sparse relative to the best of torch.

To need only a few steps, plans decide every second step here, and auto grows at the first decision that allows it.
"""

import argparse
import json
import statistics

import torch

from scripts.benchmarks import bench_train, harness, patterns, shaped_models
from sparsellm import data
from sparsellm.commands.train import check, device_type
from sparsellm.config import Config, ConfigError, from_overrides
from sparsellm.distributed.groups import Ranks, process_group
from sparsellm.training.memory import GIB

EXPERIMENTS = ("0p5b", "1b", "1p5b", "2b")
WAYS = {"torch": "runtime.kernels=torch", "dense": "runtime.kernels=auto", "sparse": "runtime.kernels=auto"}
WARMUP = 5  # steps: auto grows at the third


def measured(config: Config, ranks: Ranks, opened: data.Data, weights: dict | None, steps: int) -> dict:
    """The result of one trainer of `config`: out of memory, or micro-batches, tokens/s and GiB."""
    torch._dynamo.reset()  # graphs of all sizes and ways would exceed dynamo's limit
    found = bench_train.measured(config, ranks, opened, weights, WARMUP, steps)
    if found is None:
        return {"tokens_per_s": None}
    row = {
        "tokens_per_s": config.training.tokens_per_step / statistics.median(found["seconds"]),
        "micro_batches": found["micro_batches"],
        "tensors_gib": found["peak"] / GIB,
        "gpu_gib": found["gpu_bytes"] / GIB,
        "nonzeros": found["nonzeros"] and statistics.mean(found["nonzeros"]),
        "engines": found["engines"],
    }
    print(f"  {config.runtime.micro_batch_size:>6}  {json.dumps({k: v for k, v in row.items() if k != 'engines'})}")
    return row


def experiment(name: str, args: argparse.Namespace, ranks: Ranks) -> list[dict]:
    """A row for each way."""
    limit = [] if args.limit is None else [f"runtime.memory_limit_gib={args.limit}"]
    # no checkpoint is saved, so little disk space is needed
    short = ["training.steps=100", "run.checkpoint_every=100", "logging=disabled"]
    common = [f"experiment={name}", f"training.batch_size={args.batch}", *short, *limit, *args.overrides]

    def config_of(way: str, size: int | str) -> Config:
        config = from_overrides([*common, WAYS[way], f"runtime.micro_batch_size={size}"])
        if found := check(config):
            raise ConfigError(found)
        bench_train.freeze([config])
        return config

    first = config_of(args.ways[0], "auto")
    opened, weights = bench_train.opened_data(first, ranks), None
    if args.locality:
        opened = shaped_models.clustered(opened, first, ranks, args.locality)
    if "sparse" in args.ways:
        rates = shaped_models.layer_rates(
            first.model.num_layers, first.model.intermediate_size, args.activations, args.firing
        )
        weights = bench_train.shaped_weights(first, ranks, opened, rates, args.locality)
    rows = []
    for way in args.ways:
        print(f"{name} {way}", flush=True)
        of_way = weights if way == "sparse" else None
        auto = measured(config_of(way, "auto"), ranks, opened, of_way, args.steps)
        given = {}
        if auto["tokens_per_s"] is not None:
            last = auto["micro_batches"][1]
            for size in (last // 2, 2 * last):
                if 1 <= size <= args.batch // ranks.world_size:
                    given[size] = measured(config_of(way, size), ranks, opened, of_way, args.steps)
        rows.append({"experiment": name, "way": way, "auto": auto, "given": given})
    return rows


def best(row: dict) -> float:
    """The highest tokens/s of auto and the given sizes; 0 if all ran out of memory."""
    return max([each["tokens_per_s"] or 0.0 for each in (row["auto"], *row["given"].values())])


def show(rows: list[dict]) -> None:
    lines = []
    for row in rows:
        auto, line = row["auto"], {"experiment": row["experiment"], "way": row["way"]}
        if auto["tokens_per_s"] is None:
            lines.append(line | {"start": "OOM"})
            continue
        start, end = auto["micro_batches"]
        given = (f"{size}: {harness.cell(each['tokens_per_s'], ',.0f')}" for size, each in row["given"].items())
        lines.append(line | {
            "start": str(start), "end": str(end), "tokens/s": f"{auto['tokens_per_s']:,.0f}",
            "tensors GiB": f"{auto['tensors_gib']:.1f}", "GPU GiB": f"{auto['gpu_gib']:.1f}",
            "given (-: OOM), tokens/s": ", ".join(given), "auto / best": f"{auto['tokens_per_s'] / best(row):.3f}",
        })  # fmt: skip
    print()
    harness.table(lines)
    for name in dict.fromkeys(row["experiment"] for row in rows):
        of = {row["way"]: row for row in rows if row["experiment"] == name}
        if {"torch", "sparse"} <= of.keys() and best(of["torch"]) and of["sparse"]["auto"]["tokens_per_s"]:
            ratio = of["sparse"]["auto"]["tokens_per_s"] / best(of["torch"])
            print(f"{name}: kernels with an automatic micro-batch: {ratio:.3f} times the best dense PyTorch tokens/s")


def main(arguments: list[str] | None = None) -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("overrides", nargs="*", help="config overrides common to all")
    parser.add_argument("--limit", type=float, metavar="GIB", help="runtime.memory_limit_gib; without it the whole GPU")
    parser.add_argument("--experiments", nargs="+", default=list(EXPERIMENTS))
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--batch", type=int, default=64, help="sequences of a step, over all ranks")
    parser.add_argument("--steps", type=int, default=3, help="measured, after a warm-up")
    parser.add_argument("--firing", type=float, default=shaped_models.DEFAULT_MEAN, help="neurons per token and layer")
    patterns.add_activations(parser)
    patterns.add_locality(parser)
    args = parser.parse_intermixed_args(arguments)
    bench_train.decide_soon()
    try:
        runtime = from_overrides([f"experiment={args.experiments[0]}", *args.overrides]).runtime
        with process_group(device_type(runtime)) as ranks:
            rows = [row for name in args.experiments for row in experiment(name, args, ranks)]
            if not ranks.is_main:
                return
            show(rows)
            harness.write(args.json, {"limit_gib": args.limit, "torch": torch.__version__, "rows": rows})
    except ConfigError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
