"""The summary of a run."""

import pytest
from small_run import small_config

from sparsellm.runs.report import summary


@pytest.mark.parametrize(("tokens", "said"), [(999, False), (1_000, True)])
def test_dead_neurons_are_told_once_a_run_is_as_long_as_their_silence(tokens, said, tmp_path):
    config = small_config("sparsity.dead_after_tokens=1000")
    row = {
        "step": 1, "tokens": tokens, "tokens_per_s": 1.0, "loss": 1.0, "ce": 1.0, "val_ce": None, "val_tokens": None,
        "evaluation": None, "nnz_mean": 1.0, "dead_per_layer": [5, 7], "reinitialized_per_layer": None,
        "skipped_steps": 0,
    }  # fmt: skip
    text = " ".join(summary(config.model, config.sparsity, [], [row], tmp_path).split())
    assert ("dead neurons 12 of 96 (12.5%), inactive for the last 1,000 tokens" in text) == said
