"""Evaluating a checkpoint from before its run's gate was a ReLU (sparsity.relu_tokens): hf/ has the final gate."""

import pytest

from sparsellm.config import EvaluateConfig
from sparsellm.evaluation.checkpoint import evaluate_checkpoint


@pytest.mark.parametrize(("step", "said"), [(2, True), (4, False)])
def test_it_says_that_the_held_out_loss_is_of_the_final_gate_until_the_run_has_it(run, rows, capsys, step, said):
    config = (run / "config.yaml").read_text().partition("\n")[2]  # without its checksum
    (run / "config.yaml").write_text(config.replace("relu_tokens: 0", "relu_tokens: 384"))  # three steps
    at = EvaluateConfig(checkpoint=str(run / f"checkpoints/step_{step:08}"), data_dir=str(rows), tasks=["piqa"])
    for _ in range(2):  # the second time the loss is there already
        assert evaluate_checkpoint(at)["failed"] == {}
        assert ("with a gate activation between SiLU and ReLU" in capsys.readouterr().err) == said
