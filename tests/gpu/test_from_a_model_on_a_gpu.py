"""Runs from an existing model, as only a GPU can test them: the kernels take over once the gate is a ReLU, and neither
the gate nor a teacher makes the host wait or the layers recompile."""

import pytest
import torch
from hf.small_families import stock_model
from kernel_cases import no_waiting
from small_run import small_trainer

from sparsellm.training.distillation import Teacher

pytestmark = pytest.mark.gpu
STEP, CHANGED = 128, 4  # tokens; the first step whose gate is a ReLU
CUDA = [
    "runtime.device=cuda", "runtime.precision=bfloat16", "runtime.compile=true", "runtime.micro_batch_size=4",
    "runtime.deterministic=false", f"sparsity.relu_tokens={CHANGED * STEP}",
]  # fmt: skip


def trained(folder, teacher, *overrides):
    """(losses, engines) of eight steps, and the number of graphs after each."""
    torch._dynamo.reset()
    losses, graphs = [], []
    with small_trainer(folder, *CUDA, f"distill.teacher={teacher}", *overrides) as trainer:
        config = trainer.config
        trainer.teacher = Teacher(config.distill, config.runtime, config.run.name, trainer.ranks, trainer.autocast)
        batches, reports = trainer.data.batches(None), []
        for step in range(1, 9):
            with no_waiting(step not in (1, CHANGED)):  # those compile, which waits
                reports.append(trainer._reduce(*trainer.advance(batches), stop=False))
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        for report in reports:
            values = report.read()
            losses.append([values.ce, values.kl, sum(values.l1)])
        engines = [set(report.known["plan_per_layer"]) for report in reports]
    return losses, engines, graphs


@pytest.mark.usefixtures("kernels")
def test_the_kernels_take_over_from_a_mixed_gate_and_losses_are_those_of_pytorch(tmp_path):
    stock_model("llama3").save_pretrained(tmp_path / "teacher")
    losses, engines, graphs = trained(tmp_path / "kernels", tmp_path / "teacher")
    assert engines[: CHANGED - 1] == [{"torch"}] * (CHANGED - 1)
    assert not any("torch" in each for each in engines[CHANGED - 1 :])
    assert graphs == [graphs[0]] * (CHANGED - 1) + [graphs[CHANGED]] * (9 - CHANGED)
    expected, _, _ = trained(tmp_path / "torch", tmp_path / "teacher", "runtime.kernels=torch")
    # The same bfloat16 products are summed in another order, and eight steps of training propagate the difference.
    for ours, theirs in zip(losses, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=0.02)
