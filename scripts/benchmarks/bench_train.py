r"""Throughput, memory and energy of whole training steps for any configurations, compared in one process.

    python -m scripts.benchmarks.bench_train COMMON_OVERRIDE... --variant "OVERRIDE ..." --variant "OVERRIDE ..."
    python -m scripts.benchmarks.bench_train experiment=1p5b training.batch_size=64 --firing recorded \
        --activations DIR --variant runtime.kernels=torch --variant runtime.kernels=cuda --micro-batches 8 16 32
    torchrun --standalone --nproc_per_node 8 -m scripts.benchmarks.bench_train ...
    python -m scripts.benchmarks.bench_train ... --variant "runtime.kernels=torch runtime.float8=all" \
        --variant runtime.float8=attention --variant runtime.float8=all    # the dense rival in FP8 (needs torchao),
                                              # ours with FP8 attention, and ours with FP8 gates too
    python -m scripts.benchmarks.bench_train ... --soon --micro-batches auto 8 16    # is the automatic size the best?

Each variant is the trainer itself on its real data. Variants alternate, and each is rebuilt in each of `--rounds`.
Printed for each variant: the median step of all rounds as tokens/s, its spread over rounds, MFU
(sparsellm/runs/mfu.py), peak memory, memory between steps (`states`: weights and moments) and its ratio to the
expected value (12 bytes per parameter, 8 where Muon updates it, sharded by runtime.shard), the fraction of the step in
which the host waited for data, the energy per token of all GPUs (NVML's counter over the measured steps), nonzeros per
token and layer, each layer's engine after the last step, and with --trace the fraction of a traced step in which the
GPU ran only NCCL.
Ratios are to the first variant at the same micro-batch. On one GPU, a variant that runs out of memory is shown as OOM,
and the others continue.

--firing gives all variants the same weights, shaped to fire a mean number of neurons per token, or at the `recorded`
rates (shaped_models.py). These weights are frozen, so that sparsity does not change: the learning rate is 0, which also
disables weight decay; the rest of a step is unchanged. --locality above 0 replaces the data with random text whose
neighbouring tokens share neurons: between 0.5 and 0.7, about as many as in recorded text.

--soon makes plans decide every second step instead of every eighth, and runtime.micro_batch_size=auto grow at the first
decision that allows it, so that a warm-up of a few steps is enough. Steps then wait for counts more often.
"""

import math
import os
import statistics
from contextlib import closing
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from scripts.benchmarks import harness, patterns, shaped_models
from scripts.benchmarks.harness import cell
from sparsellm import data
from sparsellm.benchmark.phases import prepared_trainer
from sparsellm.benchmark.timing import energy_mj
from sparsellm.config import (
    FLOAT32,
    Config,
    ConfigError,
    Precision,
    Shard,
    from_overrides,
    moments,
    parameters,
    ranks_that_share,
)
from sparsellm.distributed.groups import Ranks, process_group, world_size_from_environment
from sparsellm.runs.mfu import mfu, peak_flops
from sparsellm.training import micro_batch, plans
from sparsellm.training.memory import GIB, give_back
from sparsellm.training.micro_batch import AUTO, MicroBatchError, Setting
from sparsellm.training.run import check, device_type, set_determinism

RECORDED = "recorded"


def communication_share(trace: profile) -> float | None:
    """The fraction of the traced time in which this GPU ran NCCL's kernels and no others. None without a GPU."""
    on_gpu = [event for event in trace.events() if event.device_type == DeviceType.CUDA]
    kernels = [event for event in on_gpu if not event.is_user_annotation]  # such as Optimizer.step, nccl:all_reduce
    if not kernels:
        return None
    edges = []  # (time, change in the number of running NCCL kernels, change in the number of other kernels)
    for event in kernels:
        nccl = "nccl" in event.name.lower()
        edges += [(event.time_range.start, nccl, not nccl), (event.time_range.end, -nccl, -(not nccl))]
    edges.sort()
    alone, running, others = 0.0, 0, 0
    for (start, *changes), (end, *_) in pairwise(edges):
        running, others = running + changes[0], others + changes[1]
        alone += end - start if running and not others else 0
    return alone / (edges[-1][0] - edges[0][0])


def measure(
    config: Config,
    ranks: Ranks,
    opened: data.Data,
    weights: dict[str, Tensor] | None,
    warmup: int,
    steps: int,
    traced: bool = False,
) -> dict:
    """Build one trainer and measure its steps after a warm-up: seconds per step, memory, energy, counts, engines.

    `weights`: replace the trainer's initial weights. `traced`: whether to trace one more step for NCCL's share.
    """
    with prepared_trainer(config, ranks, opened, weights) as (trainer, batches):
        first = trainer.micro_batch.setting
        for _ in range(warmup):
            trainer.advance(batches)
        chosen = trainer.plans and trainer.plans.engines  # None without kernels
        energy = energy_mj(ranks.device)
        clocks = []
        for _ in range(steps):
            sums, _, clock = trainer.advance(batches)
            clocks.append(clock)
        energy = math.nan if energy is None else energy_mj(ranks.device) - energy
        states = torch.cuda.memory_allocated(ranks.device) if ranks.device.type == "cuda" else None
        if traced:
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
                trainer.advance(batches)
                torch.cuda.synchronize() if ranks.device.type == "cuda" else None
    engines = trainer.plans and trainer.plans.engines
    energy = torch.tensor(energy, dtype=torch.float64)
    dist.all_reduce(energy)
    seconds, tokens = [clock.seconds() for clock in clocks], config.training.tokens_per_step
    result = {
        "seconds": seconds,
        "peak": max((clock.peak_memory or 0) for clock in clocks),
        "states": states,
        "wait": sum(clock.data_wait for clock in clocks) / sum(seconds),
        "mj_per_token": None if energy.isnan() else energy.item() / (steps * tokens),
        "nonzeros": None, "union": None, "rest_calls": None,
        "engines": engines, "settled": engines == chosen,
        "chosen_by": trainer.plans and trainer.plans.policy.chosen_by(*trainer.plans.layer),
        "micro_batches": (first.size, trainer.micro_batch.size),
        "recompute": (first.recompute, trainer.micro_batch.setting.recompute),
        "nccl": communication_share(trace) if traced else None,
    }  # fmt: skip
    if sums.nnz is not None:
        counted = torch.stack([sums.nnz, sums.union, sums.rest_calls]).double()
        dist.all_reduce(counted)
        nonzeros, union, rest_calls = counted.tolist()
        result["nonzeros"], result["rest_calls"] = [count / tokens for count in nonzeros], int(sum(rest_calls))
        if min(union) >= 0:  # every layer has measured its union
            result["union"] = [count * patterns.TOKEN_TILE / tokens for count in union]
    return result


def measured(config: Config, ranks: Ranks, *args) -> dict | None:
    """The result of `measure`, or None if the trainer ran out of memory. Releases the trainer's memory afterwards.

    With several ranks, raises the trainer's exception instead of returning None, because others may wait for this rank.
    """
    result = None
    try:
        result = measure(config, ranks, *args)
    except (torch.OutOfMemoryError, MicroBatchError):
        if ranks.world_size > 1:
            raise
    give_back()  # not in the except block, where the exception's frames still hold the trainer
    return result


def freeze(configs: list[Config]) -> None:
    """Modify `configs` so that training steps change no weights. Raises ConfigError for options that would still change
    weights, and for variants that cannot share weights."""
    first, found = configs[0], []
    for config in configs:
        if config.sparsity.reinit_dead_after_tokens is not None:
            found.append("sparsity.reinit_dead_after_tokens reinitializes weights: with --firing it should be null")
        found += [
            f"{group} differs between variants: with --firing they share weights, so it should be the same"
            for group in ("model", "data", "training")
            if getattr(config, group) != getattr(first, group)
        ]
        config.optimizer.learning_rate = 0.0  # set after config validation, which refuses 0; also disables weight decay
    if found:
        raise ConfigError(list(dict.fromkeys(found)))


def shaped_weights(
    config: Config, ranks: Ranks, opened: data.Data, rates: np.ndarray, locality: float
) -> dict[str, Tensor]:
    """Decoder weights whose neurons fire at `rates` on the first training sequences; on the CPU, equal on all ranks."""
    length = config.training.sequence_length
    sequences, found = -(-shaped_models.CALIBRATION // length), []
    with closing(opened.batches(None)) as batches:
        while sum(map(len, found)) < sequences:
            found.append(next(batches)[0][:, :-1])
    tokens = torch.cat(found)[:sequences].to(ranks.device)
    with torch.autocast(ranks.device.type, torch.bfloat16, enabled=config.runtime.precision == Precision.bfloat16):
        decoder = shaped_models.shaped_decoder(config, tokens, rates, locality)
    for parameter in decoder.parameters():
        dist.broadcast(parameter.data, src=0)
    weights = {name: tensor.cpu() for name, tensor in decoder.state_dict().items()}
    del decoder
    give_back()
    return weights


def states_between_steps(config: Config) -> float:
    """Estimated bytes of weights and moments held by each rank between steps."""
    world_size = world_size_from_environment()
    sharing = ranks_that_share(world_size, int(os.environ.get("LOCAL_WORLD_SIZE", world_size)))
    elements = parameters(config.model) + moments(config.model, config.optimizer.muon)
    return FLOAT32 * elements / (1 if config.runtime.shard == Shard.none else sharing)


def rows(runs: list[tuple[str, Config]], results: list[list[dict | None]], peak: float | None) -> list[dict]:
    """A row per run. Ratios are relative to the first run with the same micro-batch."""
    found, bases = [], {}
    for (variant, config), rounds in zip(runs, results, strict=True):
        size = config.runtime.micro_batch_size
        row = {"variant": variant or "(no variant)", "micro_batch": size, "out_of_memory": None in rounds}
        found.append(row)
        base = bases.setdefault(size, row)
        if None in rounds:
            continue
        tokens = config.training.batch_size * config.training.sequence_length
        medians = [tokens / statistics.median(r["seconds"]) for r in rounds]
        speed = tokens / statistics.median([s for r in rounds for s in r["seconds"]])
        energies, last = [r["mj_per_token"] for r in rounds], rounds[-1]
        row |= {
            "tokens_per_s": speed,
            "spread": (max(medians) - min(medians)) / speed,
            "mfu": peak and mfu(speed, config.model, config.training.sequence_length, peak),
            "peak_bytes": max(r["peak"] for r in rounds),
            "states_bytes": last["states"],
            "states_ratio": last["states"] and last["states"] / states_between_steps(config),
            "data_wait": max(r["wait"] for r in rounds),
            "mj_per_token": None if None in energies else statistics.mean(energies),
            **{key: last[key] for key in ("nonzeros", "union", "rest_calls", "engines", "chosen_by", "micro_batches")},
            "recompute": last["recompute"], "nccl": last["nccl"],
            "settled": all(r["settled"] for r in rounds),
        }  # fmt: skip
        for ratio, key in (("ratio", "tokens_per_s"), ("peak_ratio", "peak_bytes"), ("mj_ratio", "mj_per_token")):
            row[ratio] = row[key] / base[key] if base.get(key) and row[key] else None
    return found


def show(found: list[dict]) -> None:
    harness.table(map(_line, found))
    if len({row["micro_batch"] for row in found}) > 1:
        print("each at its best micro-batch:")
        fits = sorted((row for row in found if not row["out_of_memory"]), key=lambda row: row["tokens_per_s"])
        best = {row["variant"]: row for row in fits}
        rows = [best[variant] for variant in dict.fromkeys(row["variant"] for row in found) if variant in best]
        harness.table(_speed(row) | {"ratio": f"{row['tokens_per_s'] / rows[0]['tokens_per_s']:.3f}"} for row in rows)
    for row in found:
        if row["micro_batch"] == AUTO and not row["out_of_memory"]:
            first, last = map(Setting, row["micro_batches"], row["recompute"])
            print(f"micro-batch of {row['variant']}: {first}" + f", then {last}" * (first != last))
        if row.get("engines"):
            notes = "" if row["settled"] else ", changed while it was measured (lengthen --warmup)"
            notes += f", {row['rest_calls']:,} overflowing calls in the last step" if row["rest_calls"] else ""
            print(f"engines of {row['variant']}, micro-batch {row['micro_batch']}{notes}: {' '.join(row['engines'])}")
            print(f"  chosen by {row['chosen_by']}")
    for key, title in (("nonzeros", "nonzeros per token"), ("union", "union of 128 tokens")):
        values = next((row[key] for row in found if row.get(key)), None)
        print(f"{title}: not counted by these variants" if values is None else harness.listed(title, values))


def _speed(row: dict) -> dict[str, str]:
    speed = "OOM" if row["out_of_memory"] else f"{row['tokens_per_s']:,.0f}"
    return {"variant": row["variant"], "micro": str(row["micro_batch"]), "tokens/s": speed}


def _line(row: dict) -> dict[str, str]:
    if row["out_of_memory"]:
        return _speed(row)
    return _speed(row) | {
        "spread": f"{row['spread']:.1%}", "ratio": cell(row["ratio"], ".3f"), "MFU": cell(row["mfu"], ".1%"),
        "peak GiB": f"{row['peak_bytes'] / GIB:.1f}", "peak ratio": cell(row["peak_ratio"], ".3f"),
        "states GiB": cell(row["states_bytes"] and row["states_bytes"] / GIB, ".2f"),
        "of expected": cell(row["states_ratio"], ".3f"), "data wait": f"{row['data_wait']:.2%}",
        "mJ/token": cell(row["mj_per_token"], ".2f"), "mJ ratio": cell(row["mj_ratio"], ".3f"),
        "nonzeros": cell(row["nonzeros"] and statistics.mean(row["nonzeros"]), ".1f"), "NCCL": cell(row["nccl"], ".1%"),
    }  # fmt: skip


def firing(text: str) -> float | str:
    return text if text == RECORDED else float(text)


def main(arguments: list[str] | None = None) -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("overrides", nargs="*", help="config overrides common to all variants")
    parser.add_argument("--variant", action="append", default=[], help="config overrides of one variant, in one string")
    parser.add_argument(
        "--micro-batches", nargs="+", default=[], metavar="SIZE", help="measure each variant at each size, or at `auto`"
    )
    parser.add_argument(
        "--firing",
        type=firing,
        metavar="MEAN",
        help="use frozen weights that fire MEAN neurons per token, or that fire at the `recorded` rates",
    )
    patterns.add_activations(parser)
    patterns.add_locality(parser)
    parser.add_argument("--soon", action="store_true", help="choose engines and micro-batches within a few steps")
    parser.add_argument("--trace", action="store_true", help="trace one more step for the share of communication alone")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--warmup", type=int, default=5, help="steps, in every round")
    parser.add_argument("--steps", type=int, default=15, help="measured steps, in every round")
    args = parser.parse_intermixed_args(arguments)
    if args.firing is None and (args.activations or args.locality):
        parser.error("--activations and --locality need --firing")
    if args.firing == RECORDED and args.activations is None:
        parser.error(f"--firing recorded needs --activations DIR: {patterns.RECORD}")
    if args.soon:
        plans.DECIDE_EVERY, micro_batch.SETTLED = 2, 1
    sizes = [[f"runtime.micro_batch_size={size}"] for size in args.micro_batches] or [[]]
    if not 0 <= args.locality <= 1:
        parser.error(f"--locality is {args.locality:g}: it should be from 0 to 1")
    try:
        runs = [
            (variant, from_overrides([*args.overrides, *variant.split(), *size]))
            for size in sizes
            for variant in args.variant or [""]
        ]
        configs = [config for _, config in runs]
        for config in configs:
            if found := check(config, saves=False):
                raise ConfigError(found)
        if args.firing is not None:
            freeze(configs)
    except ConfigError as error:
        raise SystemExit(str(error)) from None
    rates = None
    if args.firing is not None:
        model, mean = configs[0].model, None if args.firing == RECORDED else args.firing
        try:
            rates = shaped_models.layer_rates(model.num_layers, model.intermediate_size, args.activations, mean)
        except ValueError as error:
            parser.error(f"--firing: {error}")
    # All runs compile the same functions, for several shapes and layer types.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 8 * len(runs))
    set_determinism(replace(configs[0].runtime, compile=any(config.runtime.compile for config in configs)))
    with process_group(device_type(configs[0].runtime)) as ranks:
        weights, opened = None, []
        for config in configs:
            workers, samples = config.runtime.data_workers, config.logging.validation_samples
            opened.append(data.open_data(data.Request.of(config), config.run, samples, workers, ranks))
            if args.locality:
                tokens = shaped_models.ClusteredTokens(config, ranks, args.locality)
                opened[-1] = replace(opened[-1], tokens=tokens)
        if rates is not None:
            weights = shaped_weights(configs[0], ranks, opened[0], rates, args.locality)
        results: list[list[dict | None]] = [[] for _ in runs]
        for _ in range(args.rounds):
            for config, each, rounds in zip(configs, opened, results, strict=True):
                if None not in rounds:
                    rounds.append(measured(config, ranks, each, weights, args.warmup, args.steps, args.trace))
        if not ranks.is_main:
            return
        name = torch.cuda.get_device_name() if ranks.device.type == "cuda" else "CPU"
        peak = peak_flops(ranks.device)
        found = rows(runs, results, peak and peak * ranks.world_size)
        print(f"\n{ranks.world_size} x {name}, torch {torch.__version__}, {' '.join(args.overrides)}")
        if args.firing is not None:
            source = "lognormal" if args.activations is None else "recorded"
            text = f"random text of locality {args.locality:g}" if args.locality else "the run's data"
            print(f"weights frozen, shaped to {source} rates, --firing {args.firing}; {text}")
        show(found)
        harness.write(args.json, {
            "gpus": ranks.world_size, "gpu": name, "torch": torch.__version__, "overrides": args.overrides,
            "firing": args.firing, "recorded_rates": args.activations is not None, "locality": args.locality,
            "runs": found,
        })  # fmt: skip


if __name__ == "__main__":
    main()
