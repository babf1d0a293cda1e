"""The Triton kernels without a GPU: their logic in Triton's interpreter, and every kernel compiled for every supported
GPU, with its resources held to that GPU's limits. On a GPU: tests/gpu/test_triton_on_a_gpu.py."""

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from triton_launches import Recorder, bytes_read, compiled, of_decoding, of_float8_decoding, of_layers, of_prompts

from sparsellm.ops.triton import device, tuning

pytestmark = pytest.mark.slow

KB = 1 << 10
# Shared memory per block, and the block sizes for the GPU.
GPUS = {
    ("cuda", 80): (163 * KB, tuning.SMALL),
    ("cuda", 86): (99 * KB, tuning.SMALL),
    ("cuda", 89): (99 * KB, tuning.SMALL),
    ("cuda", 90): (227 * KB, tuning.LARGE),
    ("cuda", 100): (227 * KB, tuning.LARGE),
    ("cuda", 120): (99 * KB, tuning.SMALL),
    ("hip", "gfx942"): (64 * KB, tuning.SMALL),
}
HOPPER = ("cuda", 90)
LEAST_SHARED = 99 * KB  # of NVIDIA's
# `make test` compiles the largest of each kernel, for the least shared memory of NVIDIA's and for Hopper.
# `make test-all` compiles all of them for every GPU, also without their optional parts. Those that read e4m3
# weights are compiled for Hopper only.
FEW = (("cuda", 86), HOPPER)
CASES = [
    *(pytest.param(gpu, False, id=f"{gpu[0]}-{gpu[1]}") for gpu in FEW),
    *(pytest.param(gpu, True, id=f"{gpu[0]}-{gpu[1]}-all", marks=pytest.mark.exhaustive) for gpu in GPUS),
]
REGISTERS = {"cuda": 255, "hip": 512}
WARP = {"cuda": 32, "hip": 64}
FILE_REGISTERS = {"cuda": 65_536, "hip": 131_072}


def test_the_kernels_compute_the_operator_in_tritons_interpreter():
    """In a process of its own, because the interpreter is chosen before kernels are imported, for the whole process."""
    path = Path(__file__).with_name("triton_interpreted.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", str(path)]
    done = subprocess.run(command, env=environment, cwd=path.parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@pytest.mark.parametrize(("gpu", "everything"), CASES)
def test_every_kernel_compiles_within_the_limits_of_the_gpu(gpu, everything, tmp_path, monkeypatch):
    """Kernels whose blocks have the same sizes on all GPUs are compiled for Hopper, and held to the limit of all."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # so that everything is compiled again
    backend, architecture = gpu
    shared, sizes = GPUS[gpu]
    shape = {"k": 2048, "n": 5632}
    gated = (True, False) if everything else (True,)  # gated kernels are the largest
    launches = of_layers(sizes, **shape, gated=gated)
    assert len(launches) > 25
    if everything:
        launches += of_layers(sizes, **shape, gated=(True,), ordered=False)
    elsewhere = {
        launch.key()
        for ordered in (True, False)
        for launch in of_layers(tuning.SMALL if sizes is tuning.LARGE else tuning.LARGE, **shape, ordered=ordered)
    }
    if not everything and gpu == ("cuda", 86):
        launches = [launch for launch in launches if launch.key() not in elsewhere]
        assert {launch.kernel for launch in launches} == {"sampled", "gathered"}
    for launch in launches:
        found = compiled(launch, backend, architecture)
        what = f"{launch.kernel} {launch.options} on {architecture}: {found[:3]}"
        warps = launch.options.get("num_warps", 4)
        small = sizes is tuning.SMALL or launch.key() in elsewhere
        assert found.shared <= (device.SHARED_BYTES if small else shared), what
        assert not found.spills, what
        assert found.registers <= REGISTERS[backend], what
        assert found.registers * warps * WARP[backend] <= FILE_REGISTERS[backend], what
        if launch.kernel in ("sampled", "gathered") and backend == "cuda":
            assert "cp.async" in found.assembly, f"{what}: nothing is pipelined"
        if launch.kernel in ("hidden", "hidden_gradient") and backend == "cuda":
            assert "v4.b32" in found.assembly, f"{what}: not 16 bytes are read at once"
            assert not re.search(r"ld\.global[.\w]*\.b16", found.assembly), f"{what}: some values are read one by one"
            in_loop = found.assembly.partition("Inner Loop")[2].partition(" bra ")[0]
            assert "bar.sync" not in in_loop, f"{what}: warps wait for each other in every step"


def test_shapes_that_16_does_not_divide_compile_too():
    for launch in of_layers(tuning.SMALL, k=1000, n=264):
        assert not compiled(launch, "cuda", 86).spills


@pytest.mark.parametrize(("gpu", "everything"), CASES)
def test_kernels_of_decoding_compile_within_the_limits_of_the_gpu(gpu, everything, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    largest = not everything
    launches = [
        *of_decoding(4096, 32, 8, 128, torch.bfloat16, positions=4096, largest=largest),  # Llama 3 8B, in parts
        *of_decoding(1024, 8, 2, 256, torch.float32, largest=largest),
        *of_decoding(640, 8, 8, 80, torch.float16, largest=largest),
    ]
    if everything:
        launches += [
            *of_decoding(2048, 32, 32, 64, torch.bfloat16),  # 1.5B, one sequence
            *of_decoding(2048, 32, 32, 64, torch.bfloat16, batch=16),
            *of_decoding(896, 14, 2, 64, torch.float32),  # Qwen2.5 0.5B
        ]
    assert len(launches) == (43 if everything else 10)
    if gpu == HOPPER:
        launches += of_float8_decoding(2048, 5632)
        long_rows = [*of_float8_decoding(5632, 2048), *of_float8_decoding(11264, 2048)]
        launches += [launch for launch in long_rows if launch.kernel == "matrix_vector"]
    for launch, assembly in within_limits(launches, gpu):
        if gpu[0] == "cuda":
            assert "v4.b32" in assembly, f"{launch}: not 16 bytes are read at once"
        if gpu[0] == "cuda" and launch.kernel == "attend":
            assert "cp.async" in assembly, f"{launch}: nothing is pipelined"


def within_limits(launches, gpu):
    """Each launch with its assembly, compiled, held to the limits of the GPU and to the rules of early starts."""
    for launch in launches:
        found = compiled(launch, *gpu)
        what = f"{launch.kernel} {launch.arguments} on {gpu[1]}: {found[:3]}"
        assert found.shared <= (LEAST_SHARED if gpu[0] == "cuda" else GPUS[gpu][0]), what  # sizes are those of all GPUs
        # For float16 products, NVIDIA's assembler keeps up to 24 bytes on the stack: it uses only 72 or 80 registers.
        half = launch.kernel == "matrix_vector" and launch.arguments["weight"] == "*fp16"
        assert found.spills <= (24 if half else 0), what
        assert found.registers * launch.options["num_warps"] * WARP[gpu[0]] <= FILE_REGISTERS[gpu[0]], what
        assert_what_comes_before_the_wait(launch, found.assembly, waits=gpu[0] == "cuda" and gpu[1] >= 90)
        yield launch, found.assembly


BYTES = {"*fp32": 4, "*bf16": 2, "*fp16": 2, "*fp8e4nv": 1}


def assert_what_comes_before_the_wait(launch, assembly, waits):
    """A kernel that starts before the previous one has ended first reads only what no kernel of the chain writes:
    weights and the positions of sequences. After its wait, it lets the next one start, once."""
    assert assembly.count("griddepcontrol.wait") == assembly.count("griddepcontrol.launch_dependents") == waits
    if waits:
        before, _, after = assembly.partition("griddepcontrol.wait")
        assert "st.global" not in before, launch
        assert "griddepcontrol.launch_dependents" in after, launch
        known, read = launch.arguments, bytes_read(launch, before)
        if launch.kernel == "attend":
            assert read.keys() == {"lengths", "cos", "sin"}, launch
            return
        expected = {}
        if launch.kernel == "normed_sum":
            expected = {"weight": 4 * known["COLUMNS"]}
        if launch.kernel == "matrix_vector":
            read = {name: size for name, size in read.items() if "scales" not in name}
            of_each = known["ROWS"] * known["COLUMNS"] * BYTES[known["weight"]]
            expected = {name: of_each for name in ("weight", "up") if known[name] is not None}
        assert read == {name: size // (32 * launch.options["num_warps"]) for name, size in expected.items()}, launch


@pytest.mark.parametrize(("gpu", "everything"), CASES)
def test_kernels_of_prompts_compile_within_the_limits_of_the_gpu(gpu, everything, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    largest = not everything
    launches = [
        *of_prompts(2048, 32, 32, 64, torch.bfloat16, largest),  # 1.5B
        *of_prompts(8192, 64, 8, 128, torch.bfloat16, largest),  # Llama 3 70B
        *of_prompts(896, 14, 2, 64, torch.float32, largest),  # Qwen2.5 0.5B
        *of_prompts(16_384, 8, 2, 256, torch.float32, largest),
        *of_prompts(640, 8, 8, 80, torch.float16, largest),
    ]
    assert len(launches) == (15 if largest else 25)
    for launch, assembly in within_limits(launches, gpu):
        if gpu[0] == "cuda":
            assert re.search(r"ld\.global\S*v4\.b32", assembly), f"{launch}: not 16 bytes are read at once"
            assert re.search(r"st\.global\S*v4\.b32", assembly), f"{launch}: not 16 bytes are written at once"


def test_kernels_are_launched_where_their_inputs_are(monkeypatch):
    """Triton launches on the current device. A layer may be on another device, as in a model on several GPUs."""
    current, launch_of = [], Recorder.__getitem__

    @contextlib.contextmanager
    def device_of(tensor):
        current.append(tensor.device)
        yield
        current.pop()

    def launch(recorder, grid):
        assert current, f"{recorder.kernel.__name__} is launched on whichever device is current"
        return launch_of(recorder, grid)

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(Recorder, "__getitem__", launch)
    assert len(of_layers(tuning.SMALL, k=8, n=8)) > 25
