"""Throughput of whole training steps, for any configurations, side by side in one process.

    python scripts/bench_train.py COMMON_OVERRIDE... --variant "OVERRIDE ..." --variant "OVERRIDE ..."
    torchrun --standalone --nproc_per_node 8 scripts/bench_train.py ...

Each variant is the trainer itself on its real data, built anew `--rounds` times in alternation. Printed per variant:
the median step of all rounds as tokens/s, its spread over rounds, MFU (sparsellm/training/metrics.py), the largest
memory, and the share of the step in which the host waited for data. The first variant is the base of the ratio.
"""

import argparse
import gc
import shutil
import statistics
import tempfile
from contextlib import closing
from pathlib import Path

import torch

from sparsellm import data
from sparsellm.config import ConfigError, from_overrides
from sparsellm.distributed import process_group
from sparsellm.train import check, device_type, set_determinism
from sparsellm.training.loop import Trainer
from sparsellm.training.metrics import PEAK_FLOPS, mfu


def measure(config, ranks, warmup: int, steps: int) -> dict:
    """One trainer's steps: seconds of each after the warm-up, peak bytes, data wait, parameters."""
    folder = Path(tempfile.mkdtemp())
    trainer = Trainer(config, ranks, data.open_data(config, ranks), folder)
    with closing(trainer.data.batches(None)) as batches:
        clocks = [trainer.advance(batches)[2] for _ in range(warmup + steps)][warmup:]
    seconds = [clock.seconds() for clock in clocks]
    result = {
        "seconds": seconds,
        "peak": max((clock.peak_memory or 0) for clock in clocks),
        "wait": sum(clock.data_wait for clock in clocks) / sum(seconds),
        "parameters": sum(p.numel() for p in trainer.decoder.parameters()),
    }
    shutil.rmtree(folder, ignore_errors=True)
    del trainer, clocks
    gc.collect()
    if ranks.device.type == "cuda":
        torch.cuda.empty_cache()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="config overrides common to all variants")
    parser.add_argument("--variant", action="append", default=[], help="config overrides of one variant, in one string")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--warmup", type=int, default=5, help="steps, in every round")
    parser.add_argument("--steps", type=int, default=15, help="measured steps, in every round")
    args = parser.parse_args()
    variants = args.variant or [""]
    configs = [from_overrides([*args.overrides, *variant.split()]) for variant in variants]
    for config in configs:
        if found := check(config):
            raise SystemExit(str(ConfigError(found)))
    set_determinism(configs[0].runtime.deterministic)
    with process_group(device_type(configs[0].runtime)) as ranks:
        results = [[] for _ in variants]
        for _ in range(args.rounds):
            for config, rounds in zip(configs, results, strict=True):
                rounds.append(measure(config, ranks, args.warmup, args.steps))
        if not ranks.is_main:
            return
        name = torch.cuda.get_device_name() if ranks.device.type == "cuda" else "CPU"
        peak_flops = next((flops for gpu, flops in PEAK_FLOPS.items() if gpu in name), None)
        print(f"\n{ranks.world_size} x {name}, torch {torch.__version__}, {' '.join(args.overrides)}")
        print(f"{'variant':<44}{'tokens/s':>12}{'spread':>8}{'ratio':>8}{'MFU':>8}{'peak GiB':>10}{'data wait':>11}")
        base = None
        for variant, config, rounds in zip(variants, configs, results, strict=True):
            tokens = config.training.batch_size * config.training.sequence_length
            medians = [tokens / statistics.median(r["seconds"]) for r in rounds]
            speed = tokens / statistics.median([s for r in rounds for s in r["seconds"]])
            base = base or speed
            use = peak_flops and mfu(
                speed, rounds[0]["parameters"], config.model.num_layers, config.training.sequence_length,
                config.model.hidden_size, peak_flops * ranks.world_size,
            )  # fmt: skip
            print(
                f"{variant or '(as given)':<44}{speed:>12,.0f}{(max(medians) - min(medians)) / speed:>8.1%}"
                f"{speed / base:>8.3f}{f'{use:.1%}' if use else '-':>8}"
                f"{max(r['peak'] for r in rounds) / 2**30:>10.1f}{max(r['wait'] for r in rounds):>11.2%}"
            )


if __name__ == "__main__":
    main()
