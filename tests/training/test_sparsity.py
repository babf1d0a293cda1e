"""The sparsity policy: schedules, normalisations, silent neurons."""

import pytest
import torch

from sparsellm.config import L1Normalization, L1Schedule, ModelConfig, SparsityConfig
from sparsellm.training import sparsity
from sparsellm.training.sparsity import SilentNeurons, l1_coefficient, l1_denominator


def test_the_coefficient_is_constant_or_warms_up_linearly():
    constant = SparsityConfig(l1_coefficient=2e-5)
    assert [l1_coefficient(step, constant) for step in (1, 100)] == [2e-5, 2e-5]
    warmup = SparsityConfig(l1_coefficient=2e-5, l1_schedule=L1Schedule.linear_warmup, l1_warmup_steps=4)
    assert [l1_coefficient(step, warmup) for step in range(1, 7)] == pytest.approx([5e-6, 1e-5, 1.5e-5] + [2e-5] * 3)


def test_mean_divides_by_neurons_and_layers():
    model = ModelConfig(intermediate_size=5632, num_layers=8)
    assert l1_denominator(SparsityConfig(), model) == 1
    assert l1_denominator(SparsityConfig(l1_normalization=L1Normalization.mean), model) == 5632 * 8


def test_silence_is_counted_in_tokens_and_ends_with_firing(monkeypatch):
    monkeypatch.setattr(sparsity.dist, "all_reduce", lambda *_args, **_kwargs: None)
    silent = SilentNeurons(ModelConfig(num_layers=1, intermediate_size=3), torch.device("cpu"))
    for fired in ([True, False, True], [False, False, True], [False, True, True]):
        silent.update(torch.tensor([fired]), 100)
    assert silent.tokens.tolist() == [[200, 0, 0]]
    assert silent.reduced() is not silent.tokens
    assert torch.equal(silent.reduced(), silent.tokens)
