"""What a run prints: an overview before the first step, a summary at the end, and a sample of generated text."""

import json
from pathlib import Path
from typing import Any

import torch

from sparsellm.config import Activation, Config, L1Normalization, ModelConfig, SparsityConfig, l1_coefficient_as
from sparsellm.distributed.groups import Ranks
from sparsellm.hf import pretrained
from sparsellm.runs import layout
from sparsellm.runs.divergence import LossRange
from sparsellm.runs.layout import COMMITTED, LOSS_PLOT, PLOTS, STATE, VALUES
from sparsellm.runs.metrics import IN_EVERY_ROW, METRICS, NAMED, Saved, history
from sparsellm.runs.mfu import peak_flops
from sparsellm.runs.wandb_record import sync_command
from sparsellm.system import regular
from sparsellm.system.console import quantity
from sparsellm.system.files import write_whole
from sparsellm.system.packages import needed_by

# Sufficient number of held-out tokens: single tokens' losses have a standard deviation of about 3 nats, so the mean
# over 20,000 tokens has a standard error of 0.02.
ENOUGH = 20_000


def aligned(name: str, value: str) -> str:
    """One aligned line of an overview or a summary."""
    return f"  {name:<18}  {value}"


def opening(config: Config, ranks: Ranks, parameters: int, engine: str, available: int | None, folder: Path) -> str:
    """The overview: a few lines about what will be trained, on which data, and where.

    `engine`: what computes the feedforward layers. `available`: number of training tokens; None for a stream.
    """
    model, training, sparsity, data = config.model, config.training, config.sparsity, config.data
    unknown_peak = ranks.device.type == "cuda" and peak_flops(ranks.device) is None
    per_step = training.tokens_per_step
    planned = training.steps * per_step
    activation = sparsity.activation.name
    if sparsity.relu_tokens:
        activation += f" from silu over {sparsity.relu_tokens:,} tokens"
    if sparsity.activation == Activation.relu:
        activation += f", L1 {sparsity.l1_coefficient:g} (`{sparsity.l1_normalization.name}`)"
    if available is None:
        tokens = "tokenized while training"
    else:
        epochs = f", read {planned / available:,.1f} times" if planned > available else ""
        tokens = f"{available:,} training tokens{epochs}"
    where = f"{data.name} in {data.path}"
    if data.mix:
        total = sum(source["weight"] for source in data.mix)
        shares = [f"{source['weight'] / total:.3g}" for source in data.mix]
        where = " + ".join(f"{share} {name}" for share, name in zip(shares, data.mix_names, strict=True))
        tokens = f"{available:,} training tokens until one of the sources repeats"
    return "\n".join(
        [
            f"{config.run.name}: {quantity(training.steps, 'step')} of {per_step:,} tokens, {planned:,} in all",
            aligned("device", f"{_device(ranks)}; {config.runtime.precision.name}, feedforward layers {engine}"),
            *([aligned("MFU", "not computed, because the peak FLOP/s of this GPU is unknown")] if unknown_peak else []),
            aligned("model", f"{parameters:,} parameters, {quantity(model.num_layers, 'layer')} of"
                             f" {model.intermediate_size:,} neurons, {activation}"),
            *([] if config.distill.teacher is None else [aligned("teacher", config.distill.teacher)]),
            *([] if config.init_from is None else [aligned("initial weights", config.init_from)]),
            aligned("data", f"{where}: {tokens}"),
            aligned("folder", str(folder)),
        ]
    )  # fmt: skip


def _device(ranks: Ranks) -> str:
    if ranks.device.type == "cuda":
        return f"{ranks.world_size} x {torch.cuda.get_device_name(ranks.device)}"
    threads = torch.get_num_threads()
    return f"{ranks.world_size} x CPU, {quantity(threads, 'thread')}{' each' * (ranks.world_size > 1)}"


def to_upload(folder: Path) -> list[str]:
    """A line with the command that uploads the rest of the run's record; [] if everything is uploaded."""
    command = sync_command(folder)
    return [] if command is None else [aligned("Weights & Biases", f"to upload: {command}")]


def caveat(tokens: int) -> str:
    """A caveat if a held-out loss is measured over few `tokens`; empty if there are enough."""
    return "" if tokens >= ENOUGH else f"; under {ENOUGH:,} tokens, small differences may be chance"


def summary(
    model: ModelConfig, sparsity: SparsityConfig, sources: list[str], rows: list[dict[str, Any]], folder: Path
) -> str:
    """The summary: losses, nonzeros, throughput, L1 coefficient, and where the run's files are.

    `sources`: names of the data.mix sources.
    """
    first, last = rows[0], rows[-1]
    speed = sorted(row["tokens_per_s"] for row in rows)[len(rows) // 2]

    def change(key: str) -> str:
        return " -> ".join("not finite" if row[key] is None else f"{row[key]:,.3f}" for row in (first, last))

    lines = {"loss": f"{change('loss')}  (first -> last step)", "cross entropy": change("ce")}
    validated = [row for row in rows if None not in (row["val_ce"], row["val_tokens"])]
    if validated:
        ce, tokens = validated[-1]["val_ce"], validated[-1]["val_tokens"]
        lines["held-out"] = f"{ce:,.3f}  (cross entropy of {tokens:,} tokens{caveat(tokens)})"
        for name in sources:
            each = [row[f"{NAMED}{name}"] for row in rows if row.get(f"{NAMED}{name}") is not None]
            lines[f"held-out {name}"] = f"{each[-1]:,.3f}"
    scores = last["evaluation"]
    if scores is not None and scores["mean"] is not None:
        of = len(scores) - 1
        lines["accuracy"] = f"{scores['mean']:.4f}  (mean of {quantity(of, 'task')})"
    if last["nnz_mean"] is not None:
        width = model.intermediate_size
        zeros = f"{100 * (1 - last['nnz_mean'] / width):.2f}% zeros"
        lines["nonzeros per token"] = f"{change('nnz_mean')}  of {width:,} per layer ({zeros})"
        same = [f"{l1_coefficient_as(sparsity, model, n):.3g} under `{n.name}`" for n in L1Normalization]
        lines["L1 coefficient"] = ", the same as ".join([same[0], " and ".join(same[1:])])
    if last["dead_per_layer"] is not None and last["tokens"] >= sparsity.dead_after_tokens:
        dead, neurons = sum(last["dead_per_layer"]), len(last["dead_per_layer"]) * model.intermediate_size
        silence = f"inactive for the last {sparsity.dead_after_tokens:,} tokens"
        lines["dead neurons"] = f"{dead:,} of {neurons:,} ({dead / neurons:.1%}), {silence}"
    if last["reinitialized_per_layer"] is not None:
        lines["reinitialized"] = f"{sum(last['reinitialized_per_layer']):,} gate rows of dead neurons"
    lines["throughput"] = f"{speed:,.0f} tokens/s (median of logged steps)"
    if (loss_range := LossRange(rows)).exits:
        steps = " and ".join(f"{step:,}" for step in loss_range.exits)
        lines["diverged"] = f"at step {steps}: {loss_range if loss_range.outside else 'the loss has recovered'}"
    if last["skipped_steps"]:
        lines["skipped"] = quantity(last["skipped_steps"], "non-finite step")
    lines["checkpoint"] = f"{layout.checkpoint(folder, last['step']) / 'hf'}  (for transformers)"
    lines["plots"] = str(folder / PLOTS)
    title = f"{folder.name}: {quantity(last['step'], 'step')}, {last['tokens']:,} tokens"
    return "\n".join([title, *(aligned(*line) for line in lines.items()), *to_upload(folder)])


def finish(config: Config, folder: Path) -> str:
    """Draw the plots of the run in `folder`, and return its summary."""
    checkpoint = layout.checkpoint(folder, config.training.steps)
    found = history(folder / METRICS, saved_rows(checkpoint), IN_EVERY_ROW, config.model.num_layers)
    damage = []
    if found.problems:
        rest = f"this summary covers {quantity(len(found.rows), 'other row')}" if found.rows else "there is no summary"
        damage = [f"  {found.report(folder / METRICS)}; {rest}"]
    if not found.rows:
        return "\n".join([f"  {folder / METRICS} has no rows; checkpoint {checkpoint}", *damage])
    try:
        with needed_by("drawing"):
            from sparsellm.runs import curves

        (folder / PLOTS).mkdir(exist_ok=True)
        drawn = curves.Curves(
            folder.name, config.training.tokens_per_step, config.model.intermediate_size,
            config.sparsity.dead_after_tokens, config.optimizer.warmup_steps, config.data.mix_names,
            taught=config.distill.teacher is not None,
        ).draw(found.rows)  # fmt: skip
        for name, content in drawn.items():
            write_whole(folder / PLOTS / name, content)
    except (ImportError, OSError) as error:
        damage.append(f"  {folder / PLOTS} is incomplete: {error}")
    return "\n".join([summary(config.model, config.sparsity, config.data.mix_names, found.rows, folder), *damage])


def is_drawn(folder: Path, checkpoint: Path) -> bool:
    """Whether `finish` has drawn the run in `folder` since `checkpoint` was saved."""
    try:
        return (folder / PLOTS / LOSS_PLOT).stat().st_mtime_ns >= (checkpoint / COMMITTED).stat().st_mtime_ns
    except OSError:
        return False


def saved_rows(checkpoint: Path) -> Saved | None:
    """Size and checksum of metrics.jsonl when `checkpoint` was saved; None if the checkpoint does not record them."""
    try:
        saved = Saved(**json.loads(regular.content(checkpoint / STATE / VALUES))["metrics"])
    except (OSError, ValueError, KeyError, TypeError):  # values.json is missing or damaged
        return None
    return saved if isinstance(saved.bytes, int) else None


def sample(hf_folder: Path, prompt: str, new_tokens: int) -> str:
    """Text that transformers generates from an exported checkpoint on the CPU, with top-k 50 and temperature 0.8."""
    model = pretrained.read_model(hf_folder)
    tokenizer = pretrained.read_tokenizer(hf_folder, model.config.vocab_size)
    inputs = tokenizer(prompt, return_tensors="pt")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tokens = model.generate(
            inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=new_tokens, do_sample=True,
            top_k=50, temperature=0.8, pad_token_id=model.config.eos_token_id,
        )  # fmt: skip
    return tokenizer.decode(tokens[0], skip_special_tokens=True)
