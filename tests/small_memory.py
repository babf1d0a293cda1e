"""A GPU's memory for tests without one: `FakeGpu` in place of sparsellm.training.memory.Gpu; and, run by torchrun, a
run of the real command on it, which grows, and of which rank 1 runs out of memory in step OUT_OF_MEMORY.

torchrun --nproc_per_node 2 --max-restarts 1 small_memory.py FOLDER OVERRIDE...
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import torch
from small_run import OVERRIDES, RandomTokens, force_plans

from sparsellm import cli, data
from sparsellm.ops import Engine, Plan, saved_bytes
from sparsellm.training import loop, memory, micro_batch, plans
from sparsellm.training.loop import Trainer
from sparsellm.training.micro_batch import Setting

# Small layers keep most beside the feedforward block's planes: with many neurons, sparse ones have room for twice as
# many sequences.
ROOMY = [
    "model.intermediate_size=768", "runtime.micro_batch_size=auto", "runtime.recompute=false",
    "runtime.deterministic=false",
]  # fmt: skip
OUT_OF_MEMORY = 11


class FakeGpu:
    """`sequences` at a time fit its memory by arithmetic, with layers that are all `engine`; real passes of more than
    `most()` run out of memory, inside a step as well."""

    def __init__(self, trainer: Trainer, sequences: int, engine="dense", most: Callable[[], int] = lambda: 10**6):
        self.trainer, self.most, self.tried = trainer, most, []
        planned = [None if trainer.plans is None else Plan.of(engine)] * trainer.config.model.num_layers
        self.bytes = int(trainer.micro_batch.memory.usage(sequences, planned).total * 1.021)
        self.limit = self.bytes + micro_batch.UNMEASURED
        trainer.micro_batch.gpu = self
        self.last = 0
        trainer.decoder.register_forward_pre_hook(self._before_passes)

    def _before_passes(self, _module, inputs):
        self.last = len(inputs[0])
        if torch.is_grad_enabled() and self.last > self.most():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def hold(self):
        pass

    def available(self):
        return self.bytes

    def peak_of(self, work):
        torch.rand(1)  # as something that times itself might
        try:
            for _ in range(2):
                assert all(p.grad is None for p in self.trainer.decoder.parameters())
                work()
        except torch.OutOfMemoryError:
            return None
        finally:
            self.tried.append(self.last)
        return self.trainer.micro_batch.usage(Setting(self.last, self.trainer.decoder.recompute)).total


def sparse_layers_save_nothing(plan, tokens, neurons, gated, dtype):
    """Replaces saved_bytes, which asks the kernels about the tile engine."""
    return 0 if plan is not None and plan.engine == Engine.tile else saved_bytes(plan, tokens, neurons, gated, dtype)


def become_sparse(trainer: Trainer, steps: Callable[[int], bool]) -> None:
    """Make the plans sparse for all layers in `steps`. The dense engine still computes, because only it runs here."""
    force_plans(trainer)

    class Said(plans.Plans):
        @property
        def plans(self):
            return [Plan.of("tile") if steps(trainer.step) else Plan()] * len(self.tensors)

    trainer.plans.__class__ = Said
    trainer.micro_batch.plans = trainer.plans
    trainer.micro_batch._take(trainer.micro_batch.setting)


def be_one_of_two_ranks(folder: Path, overrides: list[str]) -> None:
    plans.DECIDE_EVERY, micro_batch.SETTLED = 3, 2
    memory.saved_bytes = sparse_layers_save_nothing
    first_start = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    make = Trainer.__init__

    def made(trainer, *arguments):
        make(trainer, *arguments)
        become_sparse(trainer, lambda step: step >= 4)
        rank = trainer.ranks.rank

        def most():
            return 4 if rank == 1 and first_start and trainer.step == OUT_OF_MEMORY else 8

        FakeGpu(trainer, 8 if rank == 1 else 40, "tile", most)

    def opened(request, *_, ranks):
        return RandomTokens(request, ranks.rank, ranks.world_size, folder)

    loop.Trainer.__init__ = made
    with (
        patch.object(data, "open_data", opened),
        patch.object(data, "mistakes", lambda *_: []),
    ):
        cli.run("train", [*OVERRIDES, *ROOMY, f"run.root={folder}", *overrides])


if __name__ == "__main__":
    be_one_of_two_ranks(Path(sys.argv[1]), sys.argv[2:])
