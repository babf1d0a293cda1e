"""Trains the small run to its end on all ranks; each saves the state that it ended with.

torchrun --nproc_per_node 2 small_ranks.py FOLDER OVERRIDE...
"""

import sys
from pathlib import Path

import torch
from small_run import small_trainer

folder = Path(sys.argv[1])
with small_trainer(folder / "run", *sys.argv[2:]) as trainer:
    rank = trainer.ranks.rank
    trainer.reinitialization.seed += rank  # other bits, as a GPU of another kind draws from one seed
    batches = trainer.data.batches(None)
    for _ in range(trainer.config.training.steps):
        trainer.advance(batches)
    torch.save(trainer._tensors(trainer.silent.reduced()), folder / f"rank_{rank}.pt")
