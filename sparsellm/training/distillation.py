"""Distillation from a dense teacher, added to the cross entropy (distill.teacher, docs/TRAINING.md).

The loss per token is CE + weight x temperature^2 x KL(teacher || student). Each rank holds the whole teacher, with
matrices in the compute dtype. The teacher computes a micro-batch's last hidden state right before the student does. The
teacher's logits exist for one chunk of tokens at a time (model/cross_entropy.py).
"""

import torch
import xxhash
from torch import Tensor

from sparsellm.config import Activation, ConfigError, DistillConfig, ModelConfig, RuntimeConfig
from sparsellm.distributed.groups import Ranks, on_main
from sparsellm.hf import conversion
from sparsellm.model import Decoder
from sparsellm.model.cross_entropy import TeacherOutput
from sparsellm.model.dtypes import DTYPES
from sparsellm.runs.precision import load_float32
from sparsellm.training.warm_start import send, source

KEY = "distill.teacher"


def mistakes(distill: DistillConfig, model: ModelConfig, length: int) -> list[str]:
    """Error messages if the teacher's config.json does not fit `model` and sequences of `length` tokens.

    Empty if it fits, and without a teacher.
    """
    name = distill.teacher
    if name is None:
        return []
    try:
        with source(KEY, name) as checkpoint:
            teacher, _ = conversion.architecture(checkpoint.model)
    except ConfigError as error:
        return error.mistakes
    found = []
    if teacher.vocab_size != model.vocab_size:
        found.append(
            f"{KEY}={name} has a vocabulary of {teacher.vocab_size:,}, but the model has {model.vocab_size:,}: give a"
            " teacher with the same vocabulary"
        )
    if teacher.context_length < length:
        found.append(
            f"{KEY}={name} has a context of {teacher.context_length:,} tokens, but training.sequence_length is"
            f" {length:,}: shorten the sequences, or give another teacher"
        )
    return found


class Teacher:
    """A run's frozen teacher, on this rank's device."""

    def __init__(
        self,
        config: DistillConfig,
        runtime: RuntimeConfig,
        run_name: str | None,
        ranks: Ranks,
        autocast: torch.autocast,
        before: str | None = None,
    ) -> None:
        """Read the teacher on the main rank and send it to the others. Collective. `before`: digest of the teacher
        used by the run so far, if any.

        Raises ConfigError on the main rank, MainRankFailed on the others, if the teacher changed or cannot be read.
        """
        self.config, self.autocast = config, autocast
        dtype, weights = DTYPES[runtime.precision], dict[str, Tensor]()

        def read() -> tuple[ModelConfig, Activation, str]:
            name = str(config.teacher)
            with source(KEY, name) as checkpoint:
                checkpoint.identity()  # verifies the checksums if sparsellm wrote the checkpoint
                model, activation, found = load_float32(checkpoint)
            if before not in (None, digest := _digest(found)):
                raise ConfigError([
                    f"{KEY}={name} is no longer the model that run {run_name} has used as teacher: restore it, choose"
                    " another run.name, or add run.restart=true"
                ])  # fmt: skip
            weights.update(found)
            return model, activation, digest

        model, activation, self.digest = on_main(ranks, read)
        with torch.device(ranks.device), torch.random.fork_rng([ranks.device] if ranks.device.type == "cuda" else []):
            self.decoder = Decoder(model, activation).requires_grad_(False)
        send(weights, self.decoder, ranks)
        for layer in self.decoder.layers:  # cast each matrix once; autocast would cast it in every pass
            for parameter in layer.parameters():
                if parameter.dim() == 2:
                    parameter.data = parameter.data.to(dtype)
        self.head = self.decoder.head.to(dtype)
        sizes = {tensor.data_ptr(): tensor.nbytes for tensor in (*self.decoder.parameters(), self.head)}
        self.bytes = sum(sizes.values())
        if runtime.compile:
            # Student and teacher share the code of their layers, so dynamo counts the graphs of both models together.
            torch._dynamo.config.recompile_limit = max(16, torch._dynamo.config.recompile_limit)
            self.decoder.compile_parts()

    @torch.no_grad()
    def output(self, tokens: Tensor) -> TeacherOutput:
        """The teacher's output for tokens [B, T] int64; M = B x T."""
        with self.autocast:
            hidden, _ = self.decoder.hidden(tokens)
        return TeacherOutput(
            hidden.flatten(0, 1).to(self.head.dtype), self.head, self.config.weight, self.config.temperature
        )


def _digest(weights: dict[str, Tensor]) -> str:
    """Hex xxh3_128 digest of float32 CPU tensors and their names."""
    digest = xxhash.xxh3_128()
    for name, weight in sorted(weights.items()):
        digest.update(name.encode())
        digest.update(weight.contiguous().numpy().data)
    return digest.hexdigest()
