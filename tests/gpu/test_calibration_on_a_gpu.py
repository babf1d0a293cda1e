"""Calibration on a GPU: its costs choose the fastest engine for the timed calls, the policy uses them, and a model with
layers that were never measured measures them, once."""

import os
import re
import subprocess
import sys
import time

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import sparsellm
from sparsellm.inference.accelerate import policy_of
from sparsellm.policy import first_use, store

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
POLICY_FOR = first_use.policy_for  # which the fixture of all GPU tests replaces
CASES = re.compile(r"in (\d+) of (\d+) cases; at most ([\d.]+)% behind")


@pytest.mark.parametrize(("kernels", "seconds"), [("cuda", 60), ("triton", 240)])
def test_it_chooses_by_what_it_measured(loaded_kernels, kernels, seconds, tmp_path, monkeypatch):
    """In a process of its own, because a process uses one kind of kernels. Triton compiles its candidates first."""
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
        monkeypatch.setenv("SPARSELLM_CACHE_DIR", str(tmp_path / "cache"))
        assert store.kept([(2048, 5632)])[2048, 5632].kernels == "cuda"


def test_a_model_of_a_shape_that_nobody_measured_has_it_measured_once(loaded_kernels, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(first_use, "policy_for", POLICY_FOR)
    monkeypatch.setenv("SPARSELLM_CACHE_DIR", str(tmp_path))
    config = LlamaConfig(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=1, num_attention_heads=8, vocab_size=64,
        hidden_act="relu",
    )  # fmt: skip
    model = LlamaForCausalLM(config).cuda().bfloat16().eval()
    torch.cuda.manual_seed(1)
    random = torch.get_rng_state(), torch.cuda.get_rng_state()
    held = torch.cuda.memory_allocated()
    assert policy_of(sparsellm.accelerate(model, "cuda", calibrate=False)).measured == {}
    sparsellm.restore(model)
    costs = policy_of(sparsellm.accelerate(model, "cuda")).measured
    sparsellm.restore(model)
    assert torch.cuda.memory_allocated() <= held + (64 << 20)  # cuBLAS keeps its workspace
    assert all(map(torch.equal, random, (torch.get_rng_state(), torch.cuda.get_rng_state())))
    said = capsys.readouterr().err
    print(said)
    assert float(re.search(r"layers of 1024 x 4096: measured in ([\d.]+) s, cached in ", said)[1]) < 20
    assert set(costs) == {(1024, 4096)}
    started = time.monotonic()
    assert policy_of(sparsellm.accelerate(model, "cuda")).measured == costs
    assert time.monotonic() - started < 1
    assert capsys.readouterr().err == ""
