"""Values derived from the keys alone."""

import pytest

from sparsellm.config import L1Normalization, from_overrides, l1_coefficient_as


def test_coefficients_under_all_normalizations():
    config = from_overrides(["experiment=0p5b"])
    assert l1_coefficient_as(config.sparsity, config.model, L1Normalization.sum) == 2e-5
    assert l1_coefficient_as(config.sparsity, config.model, L1Normalization.mean) == pytest.approx(
        0.90, abs=2e-3
    )  # DESIGN §2
    assert l1_coefficient_as(config.sparsity, config.model, L1Normalization.layer_mean) == 1.6e-4
    mean = from_overrides(["experiment=0p5b", "sparsity.l1_normalization=mean", "sparsity.l1_coefficient=0.90112"])
    assert l1_coefficient_as(mean.sparsity, mean.model, L1Normalization.sum) == pytest.approx(2e-5)
    assert l1_coefficient_as(mean.sparsity, mean.model, L1Normalization.layer_mean) == pytest.approx(1.6e-4)
