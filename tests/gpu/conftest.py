"""The kernels, for tests that need them."""

import pytest
import torch

from sparsellm.ops import build, compiler, dispatch


@pytest.fixture(scope="session")
def loaded_kernels() -> None:
    """Builds and loads the kernels; skips where they cannot run, and fails where they should but do not."""
    try:
        build._check_device()
        build.prebuilt() or compiler.nvcc()
    except build.KernelsUnavailable as error:
        pytest.skip(str(error))
    build.load()


@pytest.fixture
def kernels(loaded_kernels, monkeypatch):
    """The loaded kernels beside a dense PyTorch at its most accurate: no sums of products in bfloat16."""
    monkeypatch.setattr(dispatch, "MIN_FUSED_TOKENS", 100)  # small tests, too, meet the fused kernels
    flags = torch.backends.cuda.matmul
    before = flags.allow_bf16_reduced_precision_reduction
    flags.allow_bf16_reduced_precision_reduction = False
    yield
    flags.allow_bf16_reduced_precision_reduction = before
