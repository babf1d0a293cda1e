"""The peak FLOP/s of GPUs by the names that torch gives them."""

from types import SimpleNamespace

import pytest
import torch
from small_run import small_config

from sparsellm.runs import report
from sparsellm.runs.mfu import peak_flops


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA A100 80GB PCIe", 312), ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756), ("NVIDIA H100 NVL", 835), ("NVIDIA H200", 989), ("NVIDIA H200 NVL", 835),
        ("NVIDIA GH200 480GB", 989), ("NVIDIA L40S", 362), ("NVIDIA L40", 181), ("NVIDIA L4", 121),
        ("NVIDIA GeForce RTX 3090", 71), ("NVIDIA GeForce RTX 3090 Ti", 80), ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 5090", 209.5), ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 503.8),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 503.8), ("NVIDIA RTX 6000 Ada Generation", 364.2),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 438.9), ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500), ("NVIDIA GeForce RTX 4090 Laptop GPU", None), ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None), ("Tesla T4", None),
    ],
)  # fmt: skip
def test_a_gpu_has_the_peak_of_its_data_sheet(monkeypatch, name, teraflops):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: name)
    assert peak_flops(torch.device("cuda")) == (teraflops and teraflops * 1e12)


def test_a_cpu_has_no_known_peak():
    assert peak_flops(torch.device("cpu")) is None


@pytest.mark.parametrize(("name", "said"), [("Tesla T4", 1), ("NVIDIA A100-SXM4-80GB", 0)])
def test_a_run_on_a_gpu_of_unknown_peak_says_so_once(monkeypatch, tmp_path, name, said):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: name)
    ranks = SimpleNamespace(device=torch.device("cuda"), world_size=1)
    text = report.opening(small_config(), ranks, 1, "in PyTorch", 1, tmp_path)
    assert text.count("  MFU                 not computed, because the peak FLOP/s of this GPU is unknown") == said
