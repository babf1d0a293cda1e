"""The curves of several runs in one picture, and their last values as a table.

    python scripts/compare_runs.py runs/SPARSE runs/DENSE ... --output docs/comparison.png

Left: training and held-out cross entropy. Middle: how far each run's training cross entropy is from the mean of all
runs, at the steps that all have logged. Right: nonzero activations per token, the mean over layers; the first run's
layers are drawn thin.
"""

import argparse
from pathlib import Path
from statistics import fmean

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from sparsellm.training.metrics import METRICS, read


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders")
    parser.add_argument("--output", type=Path, required=True, help="the picture to write")
    args = parser.parse_args()
    runs = {folder.name: read(folder / METRICS) for folder in args.runs}
    if empty := [name for name, rows in runs.items() if not rows]:
        parser.error(f"no {METRICS} with rows in: {', '.join(empty)}")

    figure, (losses, apart, nonzeros) = plt.subplots(1, 3, figsize=(17, 4.4), layout="constrained")
    ce = {name: {r["step"]: r["ce"] for r in rows} for name, rows in runs.items()}
    shared = sorted(set.intersection(*(set(of_run) for of_run in ce.values())))
    means = [fmean(of_run[step] for of_run in ce.values()) for step in shared]
    print(f"{'run':<16}{'steps':>8}{'ce':>9}{'held-out':>10}{'nonzeros':>10}{'dead':>8}")
    for number, (name, rows) in enumerate(runs.items()):
        color = f"C{number}"
        losses.plot([r["step"] for r in rows], [r["ce"] for r in rows], color=color, alpha=0.45, linewidth=1)
        validated = [r for r in rows if r["val_ce"] is not None]
        losses.plot([r["step"] for r in validated], [r["val_ce"] for r in validated], "o-", color=color, label=name)
        distances = [ce[name][step] - mean for step, mean in zip(shared, means, strict=True)]
        apart.plot(shared, distances, color=color, linewidth=1.5, label=name)
        counted = [r for r in rows if r["nnz_mean"] is not None]
        steps = [r["step"] for r in counted]
        if counted:
            nonzeros.plot(steps, [r["nnz_mean"] for r in counted], color=color, linewidth=2.5, label=name)
            if number == 0:
                nonzeros.plot(steps, [r["nnz_per_layer"] for r in counted], color=color, alpha=0.35, linewidth=0.8)
        last = rows[-1]
        held_out = f"{validated[-1]['val_ce']:.3f}" if validated else "-"
        count = f"{last['nnz_mean']:.1f}" if counted else "-"
        dead = f"{sum(last['dead_per_layer'])}" if counted else "-"
        print(f"{name:<16}{last['step']:>8}{last['ce']:>9.3f}{held_out:>10}{count:>10}{dead:>8}")
    losses.set(xlabel="step", ylabel="cross entropy, nats per token", title="thin: training, dots: held out")
    apart.set(xlabel="step", ylabel="nats per token", title="training cross entropy, less the mean of all runs")
    nonzeros.set(xlabel="step", ylabel="nonzeros per token", title="mean over layers; thin: each layer", yscale="log")
    for axes in (losses, apart, nonzeros):
        axes.grid(alpha=0.3)
        axes.legend()
    args.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.output, dpi=110, bbox_inches="tight")
    print(f"drawn: {args.output}")


if __name__ == "__main__":
    main()
