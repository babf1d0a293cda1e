"""Fixtures that load the kernels, for tests that need them."""

from types import SimpleNamespace

import pytest
import torch

from sparsellm.model import accelerate
from sparsellm.ops import build, compiler, dispatch


@pytest.fixture(scope="session")
def loaded_kernels() -> None:
    """Builds and loads the kernels. Skips the test on a machine that cannot run or build them; fails it if the machine
    could, but building or loading fails."""
    try:
        build._check_device()
        build.prebuilt() or compiler.nvcc()
    except build.KernelsUnavailable as error:
        pytest.skip(str(error))
    build.load()


@pytest.fixture(autouse=True)
def _packaged_constants(monkeypatch):
    """Tests name the engines that the package's constants choose, whatever was measured on this machine."""
    monkeypatch.setattr(accelerate, "calibration", SimpleNamespace(take=lambda _: None))


@pytest.fixture
def kernels(loaded_kernels, monkeypatch):
    """Loads the kernels, and keeps cuBLAS from summing products in bfloat16: errors are compared with those of dense
    PyTorch, which is then at its most accurate."""
    monkeypatch.setattr(dispatch, "MIN_FUSED_TOKENS", 100)  # so that small tests run the fused kernels, too
    flags = torch.backends.cuda.matmul
    before = flags.allow_bf16_reduced_precision_reduction
    flags.allow_bf16_reduced_precision_reduction = False
    yield
    flags.allow_bf16_reduced_precision_reduction = before
