"""What a run shows people: its progress; at the end curves as PNG, a summary in words, and a sample of its text."""

import sys
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from sparsellm.config import Config, L1Normalization, l1_coefficient_as
from sparsellm.training import run_folder
from sparsellm.training.metrics import METRICS, read

PLOTS = "plots"
LINE_EVERY = 10  # seconds, where there is no terminal


class Progress:
    """A bar on a terminal; elsewhere a line every few seconds, which a log file keeps readable."""

    def __init__(self, name: str, first: int, steps: int) -> None:
        self.name, self.steps = name, steps
        self.bar = tqdm(total=steps, initial=first, unit="step", desc=name) if sys.stderr.isatty() else None
        self.last_line = 0.0

    def step(self) -> None:
        if self.bar is not None:
            self.bar.update()

    def row(self, row: dict[str, Any]) -> None:
        """Show a logged step; the scores of an evaluated one on a line that stays."""
        words = {"loss": "loss", "nnz_mean": "nonzeros", "tokens_per_s": "tokens/s", "val_ce": "held-out"}
        shown = {word: f"{row[key]:,.4g}" for key, word in words.items() if row[key] is not None}
        if row["evaluation"] is not None:
            scores = "  ".join(
                f"{name} {'-' if score is None else f'{score:.4f}'}" for name, score in row["evaluation"].items()
            )
            tqdm.write(f"{self.name}  step {row['step']:,}/{self.steps:,}  {scores}", file=sys.stderr)
        if self.bar is not None:
            self.bar.set_postfix(shown)
        elif time.monotonic() - self.last_line >= LINE_EVERY or row["step"] == self.steps:
            self.last_line = time.monotonic()
            values = "  ".join(f"{word} {value}" for word, value in shown.items())
            print(f"{self.name}  step {row['step']:,}/{self.steps:,}  {values}", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


def plot(rows: list[dict[str, Any]], folder: Path) -> None:
    """Draw loss.png and, where there are statistics, nonzeros.png and dead_neurons.png into `folder`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    steps = [row["step"] for row in rows]
    gap = float("nan")

    def finish(figure, axes, name: str, ylabel: str) -> None:
        axes.set_xlabel("step")
        axes.set_ylabel(ylabel)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small", ncols=2)
        figure.savefig(folder / name, dpi=120, bbox_inches="tight")
        plt.close(figure)

    def per_layer(key: str, name: str, ylabel: str, logarithmic: bool) -> None:
        layers = next((len(row[key]) for row in rows if row[key] is not None), 0)
        if not layers:
            return
        figure, axes = plt.subplots(figsize=(7, 4.2))
        colors = plt.get_cmap("viridis")
        for layer in range(layers):
            values = [gap if row[key] is None else row[key][layer] for row in rows]
            axes.plot(steps, values, color=colors(layer / max(1, layers - 1)), label=f"layer {layer}")
        if logarithmic:
            axes.set_yscale("log", nonpositive="mask")  # a gap where a layer has none
        finish(figure, axes, name, ylabel)

    figure, axes = plt.subplots(figsize=(7, 4.2))
    for key, label in (("ce", "training cross entropy"), ("loss", "with the L1 term")):
        if key == "ce" or any(row["l1_coefficient"] for row in rows):
            axes.plot(steps, [gap if row[key] is None else row[key] for row in rows], label=label)
    validated = [(row["step"], row["val_ce"]) for row in rows if row["val_ce"] is not None]
    if validated:
        axes.plot(*zip(*validated, strict=True), "o-", markersize=4, label="held-out cross entropy")
    finish(figure, axes, "loss.png", "nats per token")
    per_layer("nnz_per_layer", "nonzeros.png", "nonzero activations per token", logarithmic=True)
    per_layer("dead_per_layer", "dead_neurons.png", "dead neurons", logarithmic=False)


def summary(config: Config, rows: list[dict[str, Any]], folder: Path) -> str:
    """A few lines: losses, nonzeros, throughput, coefficient, and where everything is."""
    first, last = rows[0], rows[-1]
    speed = sorted(row["tokens_per_s"] for row in rows)[len(rows) // 2]

    def change(key: str) -> str:
        return " -> ".join("not finite" if row[key] is None else f"{row[key]:,.3f}" for row in (first, last))

    lines = [
        f"{config.run.name}: {last['step']:,} steps, {last['tokens']:,} tokens",
        f"  loss                {change('loss')}  (first -> last step)",
        f"  cross entropy       {change('ce')}",
    ]
    validated = [row["val_ce"] for row in rows if row["val_ce"] is not None]
    if validated:
        lines.append(f"  held-out            {validated[-1]:,.3f}")
    scores = last.get("evaluation")  # rows of earlier versions have no such key
    if scores is not None and scores["mean"] is not None:
        lines.append(f"  accuracy            {scores['mean']:.4f}  (mean of {len(scores) - 1} tasks)")
    if last["nnz_mean"] is not None:
        width = config.model.intermediate_size
        lines.append(
            f"  nonzeros per token  {change('nnz_mean')}  of {width:,} per layer"
            f" ({100 * (1 - last['nnz_mean'] / width):.2f}% zeros)"
        )
        by = {n: f"{l1_coefficient_as(config, n):.3g} under `{n.name}`" for n in L1Normalization}
        lines.append(f"  L1 coefficient      {by[L1Normalization.sum]}, the same as {by[L1Normalization.mean]}")
    if last["reinitialized_per_layer"] is not None:
        lines.append(f"  reinitialized       {sum(last['reinitialized_per_layer']):,} gate rows of silent neurons")
    lines.append(f"  throughput          {speed:,.0f} tokens/s (median of logged steps)")
    if last["skipped_steps"]:
        lines.append(f"  skipped             {last['skipped_steps']} non-finite steps")
    lines.append(f"  checkpoint          {run_folder.checkpoint(folder, last['step']) / 'hf'}  (for transformers)")
    lines.append(f"  plots               {folder / PLOTS}")
    return "\n".join(lines)


def finish(config: Config, folder: Path) -> str:
    """Draw the plots of the run in `folder`, and sum it up in words."""
    rows = read(folder / METRICS)
    if not rows:
        return f"  {folder / METRICS} has no rows; checkpoint {run_folder.checkpoint(folder, config.training.steps)}"
    plot(rows, folder / PLOTS)
    return summary(config, rows, folder)


def sample(hf_folder: Path, prompt: str, new_tokens: int, seed: int = 0) -> str:
    """Text that transformers alone generates on the CPU from an exported checkpoint: top-k 50, temperature 0.8."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(hf_folder)
    model = AutoModelForCausalLM.from_pretrained(hf_folder)
    inputs = tokenizer(prompt, return_tensors="pt")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokens = model.generate(
            inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=new_tokens, do_sample=True,
            top_k=50, temperature=0.8, pad_token_id=model.config.eos_token_id,
        )  # fmt: skip
    return tokenizer.decode(tokens[0], skip_special_tokens=True)
