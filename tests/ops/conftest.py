"""Fixtures of the operator's tests."""

import kernel_stand_ins
import pytest

from sparsellm.ops import build, cuda


@pytest.fixture
def stand_ins():
    """The kernels' operators, computed by PyTorch."""
    if build.loaded():
        pytest.skip("the kernels themselves are loaded")
    cuda.limit.cache_clear()
    with kernel_stand_ins.registered():
        yield
    cuda.limit.cache_clear()
