"""Fixtures that load the kernels, for tests that need them."""

import pytest
import torch

from sparsellm import calibration
from sparsellm.ops import build, compiler, dispatch


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
    """Tests expect the engines that the packaged constants choose, so nothing is measured, and no measurement used."""
    monkeypatch.setattr(calibration, "take", lambda _: None)
    monkeypatch.setattr(calibration, "measure_missing", lambda *_: None)


@pytest.fixture
def kernels(loaded_kernels, monkeypatch):
    """Load the kernels, and keep cuBLAS from summing products in bfloat16, because errors are compared with those of
    dense PyTorch at its most accurate."""
    monkeypatch.setattr(dispatch, "MIN_FUSED_TOKENS", 100)  # so that small tests run the fused kernels too
    flags = torch.backends.cuda.matmul
    before = flags.allow_bf16_reduced_precision_reduction
    flags.allow_bf16_reduced_precision_reduction = False
    yield
    flags.allow_bf16_reduced_precision_reduction = before
