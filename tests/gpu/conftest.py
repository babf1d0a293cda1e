"""Fixtures that load the kernels, for tests that need them."""

import pytest
import torch

from sparsellm.ops import borders, build, compiler
from sparsellm.policy import Policy, first_use


@pytest.fixture(scope="session")
def loaded_kernels() -> None:
    """Build and load the kernels. Skips the test on a machine that cannot run or build them; fails the test if the
    machine could, but building or loading fails."""
    try:
        build._check_device()
        build.prebuilt() or compiler.nvcc()
    except build.KernelsUnavailable as error:
        pytest.skip(str(error))
    build.load()


@pytest.fixture(autouse=True)
def _packaged_constants(monkeypatch):
    """Tests expect the engines that the packaged costs choose, so nothing is measured, and no measurement used."""
    monkeypatch.setattr(first_use, "policy_for", lambda *_: Policy())


@pytest.fixture
def kernels(loaded_kernels, monkeypatch):
    """Load the kernels, and keep cuBLAS from summing products in bfloat16, because errors are compared with those of
    dense PyTorch at its most accurate."""
    monkeypatch.setattr(borders, "MIN_FUSED_TOKENS", 100)  # so that small tests run the fused kernels too
    flags = torch.backends.cuda.matmul
    before = flags.allow_bf16_reduced_precision_reduction
    flags.allow_bf16_reduced_precision_reduction = False
    yield
    flags.allow_bf16_reduced_precision_reduction = before
