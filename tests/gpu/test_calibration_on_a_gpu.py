"""`sparsellm calibrate` here: its costs choose the fastest engine of what it timed, and the policy takes them."""

import os
import re
import subprocess
import sys
import time

import pytest
import torch

from sparsellm import calibration
from sparsellm.ops import backend

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
CASES = re.compile(r"in (\d+) of (\d+) cases; at most ([\d.]+)% behind")


@pytest.mark.parametrize(("kernels", "seconds"), [("cuda", 60), ("triton", 240)])
def test_it_chooses_by_what_it_measured(loaded_kernels, kernels, seconds, tmp_path, monkeypatch):
    """In a process of its own, for one process takes one kind of kernels. Triton compiles its candidates first."""
    command = [sys.executable, "-m", "sparsellm.calibrate", "model=2048x5632", f"kernels={kernels}"]
    started = time.monotonic()
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "SPARSELLM_CACHE_DIR": str(tmp_path / "cache")}
    )
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    assert time.monotonic() - started < seconds
    near, cases, worst = CASES.search(done.stdout).groups()
    assert int(near) >= 0.95 * int(cases)
    assert float(worst) <= 15
    assert ("block sizes: Tuning" in done.stdout) == (kernels == "triton")
    if kernels == "cuda":
        monkeypatch.setattr(backend, "measured", {})
        monkeypatch.setenv("SPARSELLM_CACHE_DIR", str(tmp_path / "cache"))
        calibration.take([(2048, 5632)])
        assert backend.measured[2048, 5632].kernels == "cuda"
