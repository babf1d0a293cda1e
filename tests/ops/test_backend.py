"""The kernels that a machine selects, and the message if it cannot run them; needs no GPU."""

from types import SimpleNamespace

import pytest
import torch
import triton

from sparsellm.ops import Plan, backend, build, saved_bytes
from sparsellm.ops.compiler import KernelsUnavailable
from sparsellm.ops.triton import device, tuning


@pytest.fixture
def machine(monkeypatch):
    """A function that makes this process believe to be on such a GPU."""
    monkeypatch.setattr(backend, "_triton", None)
    monkeypatch.setattr(build, "_loaded", False)

    def make(capability=(8, 0), shared=163 << 10, driver=13_000, version="3.6.0", cuda="13.0"):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A100")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        properties = SimpleNamespace(shared_memory_per_block_optin=shared, multi_processor_count=108)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
        monkeypatch.setattr(device, "driver_version", lambda: driver)
        monkeypatch.setattr(triton, "__version__", version)

    return make


@pytest.mark.parametrize(
    ("of", "said"),
    [
        ({"capability": (7, 5)}, "the GPU is a A100 of compute capability 7.5: the Triton kernels need 8.0 or later"),
        ({"shared": 48 << 10}, "with 49,152 bytes of shared memory per block: the Triton kernels need 65,536"),
        ({"driver": 11_080}, "the NVIDIA driver supports CUDA 11.8: Triton's programs need a driver for 12.0 or later"),
        ({"version": "3.5.1"}, "triton is 3.5.1: the kernels need 3.6 or later"),
        ({"cuda": None}, "is built without CUDA: install a CUDA build of torch"),
    ],
)
def test_a_machine_that_cannot_is_told_what_it_lacks(machine, of, said):
    machine(**of)
    with pytest.raises(KernelsUnavailable, match=said):
        backend.load("triton")
    assert backend.loaded() is None


def test_auto_takes_triton_where_there_is_another_gpu_than_a_hopper_one(machine, monkeypatch):
    machine()
    assert backend.available() == (True, "")
    assert backend.loaded() == "triton"
    assert backend.driver().__name__ == "sparsellm.ops.triton.engines"
    with pytest.raises(ValueError, match="it should be 'triton', which this process has already loaded"):
        backend.load("cuda")
    monkeypatch.setattr(backend, "_triton", None)
    machine(capability=(9, 0))
    monkeypatch.setattr(build, "load", lambda: monkeypatch.setattr(build, "_loaded", True))
    backend.load("auto")
    assert backend.loaded() == "cuda"
    with pytest.raises(ValueError, match="it should be 'cuda'"):
        backend.load("triton")


def test_auto_says_once_why_there_are_no_kernels(machine, monkeypatch, capsys):
    monkeypatch.setattr(backend, "_said", set())
    machine(driver=11_080)
    for _ in range(2):
        assert not backend.available()[0]
    assert (
        capsys.readouterr().err.count("the Triton kernels are unavailable: the NVIDIA driver supports CUDA 11.8") == 1
    )


def test_a_machine_without_a_gpu_is_not_told_what_to_install(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(backend, "_said", set())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(backend, "DRIVER", tmp_path / "none")
    assert backend.available() == (False, "this machine has no NVIDIA GPU")
    assert "unavailable: this machine has no NVIDIA GPU" in capsys.readouterr().err
    monkeypatch.setattr(backend, "DRIVER", tmp_path)  # a GPU, and a torch that cannot use it
    assert "CUDA" in backend.available()[1]


def test_saved_bytes_are_those_of_the_kernels_that_are_loaded(machine):
    machine()
    backend.load("triton")
    per_token = saved_bytes(Plan.of("tile"), 16_384, 5632, True, torch.bfloat16) / 16_384
    assert 320 * 4 < per_token < 3000  # dense: 22,528


def test_a_gpu_gets_the_block_sizes_that_fit_it(machine):
    tuning._packaged.cache_clear()
    machine(shared=227 << 10)
    assert tuning.of(torch.device("cuda:0")) == (tuning.LARGE, 108 * tuning.LARGE.resident)
    tuning._packaged.cache_clear()
    machine()
    assert tuning.of(torch.device("cuda:0"))[0] is tuning.SMALL
    measured = tuning.SMALL._replace(resident=1)
    tuning.use(measured, torch.device("cuda:0"))
    assert tuning.of(torch.device("cuda:0")) == (measured, 108)
    assert tuning.of(torch.device("cuda:1"))[0] is tuning.SMALL
    tuning.use(None, torch.device("cuda:0"))
    assert tuning.of(torch.device("cuda:0"))[0] is tuning.SMALL
    tuning._packaged.cache_clear()
