"""A trainer small enough for tests, on random tokens; run by torchrun it saves what one step gave to a file.

torchrun --nproc_per_node 2 small_run.py step.pt OVERRIDE...
"""

import os
import signal
import sys
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from sparsellm.config import Config, from_overrides
from sparsellm.data import Request
from sparsellm.distributed.groups import process_group
from sparsellm.inference.accelerate import accelerate
from sparsellm.ops import build
from sparsellm.training.loop import Trainer
from sparsellm.training.plans import Plans
from sparsellm.training.run import device_type

OVERRIDES = [
    "model.vocab_size=96", "model.hidden_size=32", "model.intermediate_size=48", "model.num_layers=2",
    "model.num_heads=2", "model.context_length=16", "model.init_std=0.2", "training.steps=12",
    "training.batch_size=8", "training.sequence_length=16", "sparsity.l1_coefficient=1e-2",
    "optimizer.warmup_steps=2", "logging=disabled", "logging.every=3", "logging.validation_every=4",
    "run.checkpoint_every=100", "runtime.device=cpu", "runtime.micro_batch_size=8",
]  # fmt: skip


def signal_after(trainer, step):
    """Ask the process to stop in the middle of the next step."""
    advance = trainer.advance

    def signalled(batches):
        if trainer.step == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return advance(batches)

    trainer.advance = signalled


def small_config(*overrides: str) -> Config:
    return from_overrides([*OVERRIDES, *overrides])


class RandomTokens:
    """What sparsellm.data.Data offers the trainer: sample n is drawn from a generator seeded with n."""

    end_of_text_id = 0
    begin_of_text_id = None
    training_tokens = None

    def __init__(self, asked: Config | Request, rank: int, world_size: int, folder: Path) -> None:
        request = Request.of(asked) if isinstance(asked, Config) else asked
        self.vocabulary, self.length = request.vocab_size, request.training.sequence_length
        self.batch_size, self.rank, self.world_size = request.training.batch_size, rank, world_size
        self.tokenizer_folder = folder / "tokenizer"
        self.validation, self.named_validation = self.samples(range(1000, 1005)), {}
        if rank == 0:
            words = Tokenizer(models.WordLevel({"<|endoftext|>": 0, "The": 1}, unk_token="<|endoftext|>"))
            PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|endoftext|>").save_pretrained(
                self.tokenizer_folder
            )

    def samples(self, numbers) -> torch.Tensor:
        seeded = [torch.Generator().manual_seed(n) for n in numbers]
        return torch.stack([torch.randint(self.vocabulary, (self.length + 1,), generator=g) for g in seeded])

    def batches(self, state):
        first, share = (state or {"samples": 0})["samples"], self.batch_size // self.world_size
        while True:
            begin = first + self.rank * share
            first += self.batch_size
            tokens = self.samples(range(begin, begin + share))
            yield tokens.pin_memory() if torch.cuda.is_available() else tokens, {"samples": first}


@contextmanager
def small_trainer(folder: Path, *overrides: str):
    config = small_config(*overrides)
    with process_group(device_type(config.runtime)) as ranks:
        folder.mkdir(parents=True, exist_ok=True)
        yield Trainer(config, ranks, RandomTokens(config, ranks.rank, ranks.world_size, folder), folder)


def force_plans(trainer: Trainer) -> None:
    """Let plans decide, as with the CUDA kernels; the registered operator's dense engine runs anywhere."""
    with patch.object(build, "load"):
        accelerate(trainer.decoder, "cuda")
    config = trainer.config
    trainer.plans = Plans(config.model, config.training, config.runtime, trainer.decoder, trainer.ranks)
    trainer.micro_batch.plans = trainer.plans


def first_gradients(trainer: Trainer) -> dict[str, torch.Tensor]:
    """The gradients that the first step hands to the optimizer."""
    kept = {}

    def keep(_rate):
        kept.update({name: p.grad.clone() for name, p in trainer.decoder.named_parameters()})
        return torch.zeros(())

    trainer.optimizer.step = keep
    trainer.advance(trainer.data.batches(None))
    return kept


if __name__ == "__main__":
    path, planned = Path(sys.argv[1]), "planned" in sys.argv
    with small_trainer(path.parent / "run", *(word for word in sys.argv[2:] if word != "planned")) as trainer:
        if planned:
            force_plans(trainer)
        gradients, silent_tokens = first_gradients(trainer), trainer.silent.reduced()
        if trainer.ranks.is_main:
            torch.save({"gradients": gradients, "silent_tokens": silent_tokens}, path)
