"""Trains the small run to its end on all ranks; each saves the state that it ended with, and its plans of each step.

torchrun --nproc_per_node 2 small_ranks.py FOLDER OVERRIDE...
"""

import sys
from pathlib import Path

import torch
from small_run import force_plans, small_trainer

from sparsellm.policy import costs

costs.ROOM = costs.ROOM_MULTIPLE = 1  # so that plans show differences in counts
folder = Path(sys.argv[1])
with small_trainer(folder / "run", *sys.argv[2:]) as trainer:
    rank = trainer.ranks.rank
    trainer.reinitialization.seed += rank  # different bits, like another GPU model with the same seed
    force_plans(trainer)
    batches, decided = trainer.data.batches(None), []
    for _ in range(trainer.config.training.steps):
        trainer.advance(batches)
        decided.append(trainer.plans.state()["plans"])
    torch.save((trainer._tensors(trainer.silent.reduced()), decided), folder / f"rank_{rank}.pt")
