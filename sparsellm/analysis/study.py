"""Analyzes a checkpoint: locate it, read text, count, and write the results."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparsellm.analysis import activity, numbers, recordings, report, speed, token_classes
from sparsellm.analysis.errors import AnalysisError
from sparsellm.config import AnalyzeConfig, ConfigError, analyze_mistakes
from sparsellm.distributed.groups import device_type
from sparsellm.hf import conversion, hub, pretrained
from sparsellm.inference.matching import feedforward_blocks
from sparsellm.ops import backend
from sparsellm.runs.layout import ANALYSIS
from sparsellm.runs.locate import Checkpoint, CheckpointNotFound, locate, text_mistakes, unreadable
from sparsellm.runs.precision import computation, computed_in, dtype_name
from sparsellm.system import regular
from sparsellm.system.console import progress, warn
from sparsellm.system.files import write_whole
from sparsellm.system.packages import needed_by

if TYPE_CHECKING:  # deferred: importing transformers' models takes two seconds
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

COUNTING = "counting reads every activation, and only PyTorch stores them all"


def mistakes(config: AnalyzeConfig) -> list[str]:
    """Error messages for `config`, as far as they can be known before any work; empty if there are none."""
    given = [] if config.checkpoint is None else [("checkpoint", config.checkpoint)]
    return analyze_mistakes(config) + text_mistakes(config.text, given)


def analyze_checkpoint(config: AnalyzeConfig) -> tuple[dict[str, Any], Path]:
    """Analyze, and write analysis.json, tables and figures. Returns the contents of analysis.json and the folder.

    Raises ConfigError with all messages of `mistakes`, and AnalysisError if the checkpoint cannot be analyzed.
    """
    if found := mistakes(config):
        raise ConfigError(found)
    assert config.checkpoint is not None
    checkpoint = locate(config.checkpoint)
    with hub.offline(checkpoint.folder is not None or not hub.answers(checkpoint.wanted)):
        opened = _open(config, checkpoint)
        warn(computation(opened.model.dtype, opened.why, COUNTING))
        with progress("reading", len(opened.blocks), "sequence") as advance:
            counted = activity.count(opened.model, opened.blocks, config.batch_size, advance)
        speeds, obstacle = _speeds(config, opened)
        if (folder := opened.recordings) is not None:
            try:
                with progress("recording", recordings.recorded_sequences(opened.blocks), "sequence") as advance:
                    recordings.write(folder, opened.model, opened.blocks, config.batch_size, advance)
            except OSError as error:
                raise AnalysisError(f"recordings={folder} cannot be written: {error}") from error
    types = numbers.token_types(counted)
    most, least = numbers.extremes(types, config.min_count)
    for row in types:
        row["token"] = numbers.spelled(opened.tokenizer, row["id"])
    layers = numbers.layers(counted)
    results = {
        "checkpoint": str(checkpoint),
        "identity": opened.identity,
        "step": checkpoint.step,
        "model": {
            "architecture": type(opened.model).__name__,
            "gated": opened.model.config.model_type != "arcee",
            "layers": len(layers),
            "neurons": counted.neurons,
            "dtype": dtype_name(opened.model.dtype),
        },
        "text": {
            "source": config.text or "held-out",
            "sequences": counted.blocks.shape[0],
            "sequence_length": counted.blocks.shape[1],
            "tokens": counted.tokens,
        },
        "layers": layers,
        "positions": numbers.positions(counted),
        "position_fit": numbers.position_fit(counted),
        "token_classes": numbers.token_classes(counted, token_classes.classified(counted.blocks, opened.tokenizer)),
        "tokens": {
            "from_position": numbers.settled(counted),
            "min_count": config.min_count,
            "types": len(types),
            "most_active": most,
            "least_active": least,
            "occurrences": numbers.occurrences(counted, opened.tokenizer),
        },
        "speed": speeds and {
            "gpu": torch.cuda.get_device_name(opened.model.device),
            "dtype": "bfloat16",
            "layers": speeds,
            "correlation_with_nonzeros": numbers.correlation(speeds),
        },
        "speed_missing": obstacle,
        "figures": report.FIGURES,
    }  # fmt: skip
    try:
        report.write_all(opened.output, results, counted, types)
    except OSError as error:
        print(report.table(results), flush=True)  # the results took minutes to compute, so print them
        raise AnalysisError(f"{opened.output} cannot be written: {error}; choose another output_dir") from error
    _draw(opened.output, checkpoint.title, results, counted)
    return results, opened.output


def _draw(folder: Path, title: str, results: dict[str, Any], counted: activity.Activity) -> None:
    """Write the figures. Stops at the first error, which is reported as a warning."""
    try:
        with needed_by("drawing"):
            from sparsellm.analysis import figures  # deferred: this import takes 0.5 s

        for name, content in figures.draw(title, results, counted).items():
            write_whole(folder / name, content)
    except (ImportError, OSError) as error:
        warn(f"the figures in {folder} are not complete: {error}")


@dataclass(frozen=True)
class Opened:
    model: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"
    blocks: Tensor  # int64 [S, T]
    identity: str
    output: Path
    recordings: Path | None
    why: str  # the reason for the model's dtype


def _open(config: AnalyzeConfig, checkpoint: Checkpoint) -> Opened:
    """Before counting starts, load everything that can fail. Raises AnalysisError if something does."""
    if not sys.stderr.isatty():
        from transformers.utils import logging

        logging.disable_progress_bar()
    try:
        described = pretrained.read_config(checkpoint.model)
        activation = getattr(described, "hidden_act", None)
        if described.model_type not in conversion.CLASSES or activation != "relu":
            raise AnalysisError(
                f"checkpoint {checkpoint} is a {described.model_type} model with hidden_act {activation}: it should be"
                f" {' or '.join(conversion.CLASSES)} with relu, which has exact zeros"
            )
        if checkpoint.unchecked:
            print(checkpoint.unchecked, file=sys.stderr, flush=True)
        identity = checkpoint.identity()
        output = _writable(checkpoint.output(ANALYSIS, config.output_dir), "output_dir")
        recorded = _for_recordings(config)
        tokenizer = pretrained.read_tokenizer(checkpoint.model, described.vocab_size)
        from sparsellm.analysis import text

        context = described.max_position_embeddings
        blocks = text.blocks(checkpoint, config.text, described.vocab_size, context, config.sequences)
        if blocks.max() >= described.vocab_size:
            raise AnalysisError(
                f"token {blocks.max()} is outside the vocabulary of {checkpoint}, {described.vocab_size:,}"
            )
        dtype, why = computed_in(config.dtype, checkpoint)
        model = pretrained.read_model(checkpoint.model, dtype)
        feedforward_blocks(model)
    except CheckpointNotFound as error:  # damaged checkpoint
        raise AnalysisError(str(error)) from error
    except (OSError, ValueError) as error:  # a damaged file, an unsupported architecture, or an unreachable hub
        raise AnalysisError(unreadable(checkpoint, error)) from error
    return Opened(model.to(device_type(config.device.name)).eval(), tokenizer, blocks, identity, output, recorded, why)


def _writable(folder: Path, key: str) -> Path:
    """Create the folder given by `key`. Raises AnalysisError if it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        regular.to_write(folder / ".writable", "a").close()
        (folder / ".writable").unlink()
    except OSError as error:
        raise AnalysisError(f"{folder} cannot be written: {error}; choose another folder for {key}") from error
    return folder


def _for_recordings(config: AnalyzeConfig) -> Path | None:
    """Create the folder for recordings; None if none are requested. Raises AnalysisError if it cannot be used."""
    if config.recordings is None:
        return None
    folder = _writable(Path(config.recordings).expanduser(), "recordings")
    others = sorted(path.name for path in folder.glob("firing_patterns*.npz") if path.name != recordings.FIRING)
    if others:
        raise AnalysisError(
            f"recordings={folder} already has {', '.join(others)}, but scripts/ expect one recording per folder: choose"
            " another folder"
        )
    return folder


def _speeds(config: AnalyzeConfig, opened: Opened) -> tuple[list[dict[str, Any]] | None, str | None]:
    """(the rows of sparsellm.analysis.speed, None), or (None, why there are none)."""
    if not config.speed:
        return None, "speed=false"
    if opened.model.device.type != "cuda":
        return None, "needs a CUDA GPU"
    try:
        backend.load()
    except backend.KernelsUnavailable as error:
        return None, str(error)
    return speed.layer_speeds(opened.model, opened.blocks), None
