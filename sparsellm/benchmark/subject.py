"""A checkpoint to measure: its weights, the text that it reads, and its scores from `evaluate`."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sparsellm.analysis import AnalysisError
from sparsellm.config import Activation, BenchmarkConfig, ConfigError, ModelConfig, parameters
from sparsellm.evaluation.results import RESULTS, STORED, VALIDATION
from sparsellm.hf import conversion, hub
from sparsellm.runs.layout import EVALUATION
from sparsellm.runs.locate import Checkpoint, CheckpointNotFound, unreadable
from sparsellm.system.errors import SparsellmError
from sparsellm.system.files import read_json

LEAST = 8  # minimum tokens in a sequence


class BenchmarkError(SparsellmError, RuntimeError):
    """A checkpoint cannot be measured as requested; the message says why."""


@dataclass(frozen=True)
class Subject:
    checkpoint: Checkpoint
    identity: str
    config: ModelConfig
    activation: Activation
    weights: dict[str, Tensor]  # float32, on the CPU, by the decoder's names
    blocks: Tensor  # int64 [S, T]: the text
    scores: dict[str, Any] | None  # from `evaluate`; None if these weights were not evaluated

    @classmethod
    def open(cls, checkpoint: Checkpoint, config: BenchmarkConfig, length: int | None = None) -> "Subject":
        """Open `checkpoint` and its text; `length`: sequence length for text=FILE, instead of the run's.

        Raises BenchmarkError if either cannot be read or sequences are too short.
        """
        from transformers.utils import logging

        logging.disable_progress_bar()  # loading takes seconds
        try:
            with hub.offline(checkpoint.folder is not None or not hub.answers(checkpoint.wanted)):
                identity = checkpoint.identity()
                model, activation, weights = conversion.load(checkpoint.model)
                from sparsellm.analysis import text

                context = model.context_length
                blocks = text.blocks(checkpoint, config.text, model.vocab_size, context, config.sequences, length)
        except (CheckpointNotFound, AnalysisError, ConfigError) as error:
            raise BenchmarkError(str(error)) from error
        except (OSError, ValueError) as error:  # a damaged file, an unsupported architecture, or an unreachable hub
            raise BenchmarkError(unreadable(checkpoint, error)) from error
        if blocks.shape[1] < LEAST:
            raise BenchmarkError(
                f"the text of {checkpoint} has sequences of {blocks.shape[1]} tokens: it should have {LEAST} or more"
            )
        return cls(checkpoint, identity, model, activation, weights, blocks, _scores(checkpoint, identity))

    def limited_to(self, other: "Subject") -> "Subject":
        """This subject, reading at most as many sequences as `other`. Raises BenchmarkError if their sequence lengths
        differ."""
        own, others = self.blocks.shape[1], other.blocks.shape[1]
        if own != others:
            raise BenchmarkError(
                f"{self.name} reads sequences of {own:,} tokens, and {other.name} of {others:,}: they should be equal"
                " for a comparison; give both the same text=FILE"
            )
        return replace(self, blocks=self.blocks[: len(other.blocks)])

    @property
    def name(self) -> str:
        return self.checkpoint.title

    def described(self) -> dict[str, Any]:
        """The subject's description, for JSON."""
        return {
            "name": self.name,
            "checkpoint": str(self.checkpoint),
            "identity": self.identity,
            "step": self.checkpoint.step,
            "parameters": parameters(self.config),
            "layers": self.config.num_layers,
            "width": self.config.hidden_size,
            "neurons": self.config.intermediate_size,
            "gated": self.config.gated,
            "activation": self.activation.name,
            "scores": self.scores,
        }


def _scores(checkpoint: Checkpoint, identity: str) -> dict[str, Any] | None:
    """{"mean", "tasks": {name: score}, "validation_loss", "dtype" of the scores} of these weights on whole tasks; None
    if there are none."""
    path = checkpoint.output(EVALUATION) / RESULTS
    if not path.is_file():
        return None
    found = read_json(path, BenchmarkError, "evaluate the checkpoint again")
    if found.get("identity") != identity:
        return None
    loss = found[VALIDATION] and found[VALIDATION]["loss"]
    tasks = {name: task["score"] for name, task in found["tasks"].items()}
    return {"mean": found["mean"], "tasks": tasks, "validation_loss": loss, "dtype": found.get("dtype", STORED)}


def dtype_on(device: torch.device) -> torch.dtype:
    """The dtype of matmuls and activations."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32
