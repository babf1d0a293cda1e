"""The CUDA kernels where launches are hard to get right: graphs, captures, several streams, early launches, memory
beyond 2^32 elements, and another device than the current one."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import kernel_cases as cases
import pytest
import torch
from kernel_cases import GATED, assert_equal
from test_gradients import DL1, gradients, small, stepwise

from sparsellm.ops import borders, cuda
from sparsellm.ops.plan import Engine, Plan

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels")]
ROOT = Path(__file__).parents[2]


def case(m, k, n, gated=True, seed=0, sparser=0):
    """(x, (w_gate or None, w_up, w_down), dy) of integers. `sparser` lowers thresholds, so that fewer neurons fire."""
    x, ws = cases.integers(m, k, n, gated, seed)
    ws[0][:, 0] -= sparser
    return x, cases.layer(ws), small(m, k, seed=seed + 1)


def step(engine, x, ws, dy):
    """The results of forward and backward, without the saved buffer."""
    out = cuda.forward(x, *ws, Plan(engine, ws[1].shape[0]), None, True)
    return [*out[:4], *cuda.backward(x, *ws, dy, torch.full((), DL1, device=x.device), out[4])]


def assert_all_equal(found, expected, what):
    for i, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert_equal(ours, theirs, f"{what}: result {i}")


@GATED
@pytest.mark.parametrize(
    ("engine", "m", "capacity"),
    [("dense", 300, None), ("tile", 300, None), ("tile", 3000, None), ("tile", 17_000, None), ("tile", 700, 128)],
)
def test_a_captured_backward_computes_what_its_buffers_hold(engine, m, capacity, gated, monkeypatch):
    if capacity is not None:
        monkeypatch.setattr(borders, "capacity", lambda *_: capacity)
    k, n = 264, 1000
    x, ws, dy = case(m, k, n, gated)
    step(Engine[engine], x, ws, dy)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(Engine[engine], x, ws, dy)
    for seed, sparser in enumerate((0, 25, -12, 0, 25, -12)):  # as usual, hardly any neuron fires, most fire
        new_x, new_ws, new_dy = case(m, k, n, gated, seed + 1, sparser)
        for buffer, new in zip((x, *ws, dy), (new_x, *new_ws, new_dy), strict=True):
            if buffer is not None:
                buffer.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        assert_all_equal(captured, step(Engine[engine], x, ws, dy), f"replay {seed}")


FIRST_CALL = """
import sys
import kernel_cases as cases
import torch
from sparsellm.ops import Plan, build, cuda

build.load()
x, ws = cases.integers(int(sys.argv[2]), 264, 1000)
expected = cases.stepwise(x, ws)[-1]
x @ ws[0].T  # allocates the workspace of cuBLAS
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    y = cuda.forward(x, *ws, Plan.of(sys.argv[1]), None, False)[0]
graph.replay()
torch.cuda.synchronize()
cases.assert_equal(y, expected, "y")
"""


@pytest.mark.parametrize(("engine", "m"), [("dense", 2000), ("row", 300), ("tile", 300)])
def test_a_process_may_capture_its_first_call(engine, m):
    """In a first call, CUDA loads the kernels, raises their limits of shared memory, and looks up a driver function."""
    done = subprocess.run(
        [sys.executable, "-c", FIRST_CALL, engine, str(m)], cwd=ROOT, timeout=120, text=True, capture_output=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_forward_and_backward_on_several_streams_give_the_same_bits():
    layers = [
        (Engine.tile, *case(20_000, 264, 1000, seed=1, sparser=3)),
        (Engine.tile, *case(3000, 1024, 5632, seed=2, sparser=5)),
        (Engine.dense, *case(2000, 264, 1000, seed=3)),
    ]
    expected = [step(*layer) for layer in layers]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in layers]
    for round_ in range(50):
        found = []
        for layer, stream in zip(layers, streams, strict=True):
            with torch.cuda.stream(stream):
                found.append(step(*layer))
        torch.cuda.synchronize()
        for i, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            assert_all_equal(ours, theirs, f"round {round_}, layer {i}")


def test_early_launches_in_chains_do_not_overwrite_memory_that_is_still_read():
    """The output and workspace of a call are freed at once and taken by the next call, whose kernels start before those
    of the previous call have ended. No other kernel runs in between."""
    x, (w_gate, w_up, w_down) = cases.integers(1600, 2048, 5632)
    w_gate[:, 0] -= 10
    w_down_t = w_down.T.contiguous()
    generator = torch.Generator().manual_seed(0)
    heights = torch.cat(
        [torch.randint(1, 70, (200,), generator=generator), torch.randint(65, 1600, (100,), generator=generator)]
    )
    heights = heights[torch.randperm(len(heights), generator=generator)].tolist()

    def sums(wait):
        found = []
        for m in heights:
            y = x[:m]
            for _ in range(3):
                y = cuda.row_output(y, w_gate, w_up, w_down_t)
                if wait:
                    torch.cuda.synchronize()
            found.append(y.view(torch.int16).sum(dtype=torch.int64))
        return torch.stack(found)

    expected = sums(wait=True)
    for i in range(4):
        assert_equal(sums(wait=False), expected, f"chain {i}: sums of the bits of y, by call")


@GATED
def test_more_than_4e9_activations(gated, monkeypatch):
    """The packed gate, its wide segments, the operands and the dense planes exceed 4 GiB and 2^31 elements."""
    if torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated() < 64 << 30:
        pytest.skip("the GPU has less than 64 GiB of free memory")
    monkeypatch.setattr(cases, "poison", lambda: None)  # it would hold memory that is needed here
    repeats, m, k, n = 64, 4096, 64, 16_384
    x, ws = cases.integers(m, k, n, gated)
    ws[0][:, 0] -= 12
    dy = small(m, k, seed=2)
    g, _, y = cases.stepwise(x, ws)
    # Every sum over the repeated tokens is 64 times as large, and so is its rounded value.
    dx, *dws = stepwise(x, ws, dy)
    assert max(dw.abs().max() for dw in dws) * repeats < cases.EXACT / 2
    nnz, rows = int((g != 0).sum()) * repeats, (repeats, 1)
    right = [dx.repeat(rows), *(dw * repeats for dw in dws)]
    x, dy, y = x.repeat(rows), dy.repeat(rows), y.repeat(rows)
    for engine in ("row", "tile", "dense"):
        torch.cuda.empty_cache()
        if engine == "row":
            with torch.no_grad():
                out, found = cases.run(engine, x, ws), []
        else:
            out, found = gradients(engine, x, ws, dy)
        assert_equal(out.y, y, f"{engine}: y")
        assert (int(out.nnz), int(out.rest_calls)) == (nnz, 0)
        for i, (ours, theirs) in enumerate(zip(found, right, strict=False)):
            if engine != "dense" or i > 0 or not gated:  # the dense engine rounds dx twice
                assert_equal(ours, theirs, f"{engine}: gradient {i}")
        del out, found


# Work that a barrier of the whole grid could hang: two kernels that each need all SMs, and a kernel with more CTAs than
# SMs that it may use. Each test runs in a process of its own, which is killed after a minute.
OVERFLOW = """
import sys
import torch
from test_kernel_hazards import case, step
from sparsellm.ops import borders, build
from sparsellm.ops.plan import Engine

build.load()
borders.capacity = lambda *_: 128
layers = [case(700, 264, 1000, seed=1), case(520, 264, 1400, seed=2)]
expected = [step(Engine.tile, *layer) for layer in layers]
assert all(int(results[3][2]) == 1 for results in expected)
torch.cuda.synchronize()
if sys.argv[1] == "two streams":
    streams, rounds = [torch.cuda.Stream() for _ in layers], 200
else:
    from torch.cuda.green_contexts import GreenContext

    context = GreenContext.create(num_sms=16, device_id=0)
    streams, rounds = [context.Stream()] * 2, 3
for _ in range(rounds):
    found = []
    for layer, stream in zip(layers, streams):
        with torch.cuda.stream(stream):
            found.append(step(Engine.tile, *layer))
torch.cuda.synchronize()
assert all(torch.equal(a, b) for ours, right in zip(found, expected) for a, b in zip(ours, right))
"""


@pytest.mark.parametrize("where", ["two streams", "a green context"])
def test_calls_that_overflow_end_where_they_do_not_have_all_sms(where):
    green = pytest.importorskip("torch.cuda.green_contexts")
    if where == "a green context" and not green.SUPPORTED:
        pytest.skip("this build of torch has no green contexts")
    done = subprocess.run(
        [sys.executable, "-c", OVERFLOW, where], cwd=ROOT, timeout=60, text=True, capture_output=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_transpose_does_not_report_the_error_of_an_earlier_launch():
    x, (w_gate, w_up, w_down), _ = case(40, 264, 1000)
    w_down_t = w_down.T.contiguous()
    cuda.row_output(x, w_gate, w_up, w_down_t)
    transposed = torch.empty_like(w_down_t)
    torch.ops.sparsellm_cuda.transpose(w_down, transposed)
    torch.cuda.synchronize()
    with contextlib.suppress(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph()):
        with contextlib.suppress(RuntimeError):
            x.sum().item()  # not allowed in a capture, which it invalidates
        cuda.row_output(x, w_gate, w_up, w_down_t)  # so this launch fails
    torch.cuda.synchronize()
    transposed.fill_(torch.nan)
    torch.ops.sparsellm_cuda.transpose(w_down, transposed)
    assert_equal(transposed, w_down_t, "w_down by neuron")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are not two GPUs")
@pytest.mark.parametrize("engine", ["dense", "row", "tile"])
def test_a_layer_on_another_device_than_the_current_one(engine):
    for m in (1, 40, 300, 2000, 17_000):
        x, ws, dy = case(m, 264, 1000, seed=m)
        results = []
        for device in ("cuda:0", "cuda:1"):
            x, dy, ws = x.to(device), dy.to(device), [w.to(device) for w in ws]
            assert torch.cuda.current_device() == 0
            if engine == "row":
                found = cuda.forward(x, *ws, Plan(Engine.row, 1000), None, False)[:4]
            else:
                found = step(Engine[engine], x, ws, dy)
            results.append([t.cpu() for t in found])
        assert_all_equal(results[1], results[0], f"M {m}")
