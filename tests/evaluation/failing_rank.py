"""Scores a run's tasks once for each place where rank 1 then fails, once, and once without; each rank saves its scores.

torchrun --nproc_per_node 2 failing_rank.py FOLDER OVERRIDE...
"""

import json
import sys
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import torch
from lm_eval.api.task import ConfigurableTask
from lm_eval.models.huggingface import HFLM

from sparsellm import data
from sparsellm.config import from_overrides
from sparsellm.distributed import groups
from sparsellm.evaluation import live
from sparsellm.evaluation.downstream import AUTO_LOGITS, SharedLM
from sparsellm.model import Decoder

PLACES = {
    "model": (HFLM, "__init__"),
    "requests": (ConfigurableTask, "build_all_requests"),
    "tokens": (SharedLM, "tok_encode"),
    "answers": (SharedLM, "_answers"),
    "metrics": (ConfigurableTask, "process_results"),
    "nowhere": None,
}


def failing_once(method, place):
    errors = [MemoryError(f"no room for {place}")]

    def wrapped(*args, **kwargs):
        if errors:
            raise errors.pop()
        return method(*args, **kwargs)

    return wrapped


def main(folder: Path, overrides: list[str]) -> None:
    config, found = from_overrides(overrides), {}
    groups.TIMEOUT = timedelta(seconds=60)  # ranks that wait for each other fail
    with groups.process_group("cpu") as ranks:
        AUTO_LOGITS["cpu"] = config.model.vocab_size * 512 * (1 + ranks.rank)  # as with less memory on one of two GPUs
        evaluation = live.load(config.evaluation, config.model, config.sparsity.activation, config.runtime, ranks)
        opened = data.open_data(data.Request.of(config), config.run, config.logging.validation_samples, 0, ranks)
        torch.manual_seed(0)
        decoder = Decoder(config.model, config.sparsity.activation)
        for step, (place, target) in enumerate(PLACES.items()):
            if ranks.rank == 0 or target is None:
                found[place] = evaluation.scores(step, decoder, opened)
            else:
                with patch.object(*target, failing_once(getattr(*target), place)):
                    found[place] = evaluation.scores(step, decoder, opened)
        (folder / f"rank_{ranks.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
