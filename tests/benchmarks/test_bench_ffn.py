"""bench_ffn: gradients, errors, saved bytes and tables; tiny, on the CPU."""

from types import SimpleNamespace

import pytest
import torch

from scripts.benchmarks import bench_ffn, patterns
from scripts.benchmarks.bench_ffn import dense_layer, operator
from sparsellm.ops import Plan

M, K, N = 300, 32, 64
GATED = pytest.mark.parametrize("gated", [True, False], ids=["gated", "nongated"])
PLAN = pytest.mark.parametrize("plan", [None, Plan()], ids=["traced", "dense"])


def step_of(gated: bool, dtype: torch.dtype, dl1: float = 0.0) -> bench_ffn.Step:
    block = patterns.synthetic(20, M, K, N, "cpu")
    weights = (block.w_gate, *((block.w_up,) if gated else ()), block.w_down)
    dy = torch.randn((M, K), generator=torch.Generator().manual_seed(1)).to(dtype)
    return bench_ffn.Step([t.to(dtype).requires_grad_() for t in (block.x, *weights)], dy, torch.tensor(dl1))


@GATED
@pytest.mark.parametrize("chunk", [128, M])
def test_the_right_gradients_are_those_of_dense_pytorch(gated, chunk, monkeypatch):
    monkeypatch.setattr(patterns, "CHUNK", chunk)
    step = step_of(gated, torch.float64)
    found = bench_ffn.forward_backward(dense_layer(gated), step)
    torch.testing.assert_close(bench_ffn.exact(step), found)


@GATED
@PLAN
def test_our_variants_are_given_the_l1_loss(gated, plan):
    step = step_of(gated, torch.float64, dl1=0.25)
    x, *up, w_down = step.leaves
    h = torch.relu(x @ up[0].T) * (x @ up[1].T if gated else 1)
    loss = (h @ w_down.T * step.dy).sum() + 0.25 * h.abs().sum()
    y, *gradients = bench_ffn.forward_backward(operator(gated, plan), step)
    torch.testing.assert_close(y, h @ w_down.T)
    torch.testing.assert_close(gradients, list(torch.autograd.grad(loss, step.leaves)))


@GATED
def test_saved_bytes_are_the_planes_and_not_the_inputs(gated):
    step = step_of(gated, torch.bfloat16)
    registered = operator(gated, Plan())
    compiled = torch.compile(registered, dynamic=False, backend="aot_eager")
    bench_ffn.forward_backward(compiled, step)
    ours, theirs = (2, 3) if gated else (1, 1)  # g, u and PyTorch's h; h
    planes = {dense_layer(gated): theirs, operator(gated, None): ours, registered: ours, compiled: ours}
    for forward, expected in planes.items():
        assert bench_ffn.saved_by(forward, step.leaves) == expected * M * N * torch.bfloat16.itemsize


@GATED
def test_a_table_has_every_variant_whatever_fails(gated, monkeypatch, capsys):
    def one_call(candidates, _budget_ms):
        times = {}
        for i, (name, call) in enumerate(candidates.items()):
            try:
                call(0)
                times[name] = 5.0 - i
            except ValueError as error:
                times[name] = error
        return times

    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, dynamic: compiler(f, dynamic=dynamic, backend="aot_eager"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(L2_cache_size=1 << 16))
    monkeypatch.setattr(bench_ffn, "alternating_ms", one_call)
    args = SimpleNamespace(gated=gated, training=True, decode=False)
    with torch.no_grad():
        result = bench_ffn.measure(args, "synthetic20", patterns.synthetic(20, M, K, N, "cpu"), M - 1)
    rows = {row["variant"]: row for row in result["variants"]}
    assert list(rows) == ["torch eager", "torch compiled", "torch ours", "tile", "dense", "auto: dense"]
    assert [name for name, row in rows.items() if "failure" in row] == ["tile"]  # there is no tile engine on a CPU
    gradients = ["dw_gate", "dw_up", "dw_down"] if gated else ["dw_up", "dw_down"]
    for name, row in rows.items():
        if name != "tile":
            assert list(row["errors"]) == ["y", "dx", *gradients]
            assert all(0 < error < 0.02 for error in row["errors"].values())  # of bfloat16, whose ulp is 2^-8
    assert rows["torch ours"]["speedup"] == 4 / 3
    bench_ffn.show(result)
    bench_ffn.summary([result])
    out = capsys.readouterr().out
    assert "FAILED ValueError: x.device is cpu" in out
    assert "dense 4.00" in out


def test_a_nan_is_the_worst_error(capsys):
    def variant(ms, error):
        return {"ms": ms, "errors": {"y": 1e-3, "dx": error}, "saved_mib": 1.0}

    errors = {"torch eager": 2e-3, "torch compiled": 9e-3, "torch ours": 3e-3, "tile": float("nan"), "dense": 2e-3}
    for worst in ("nan", "1.50"):
        variants = {name: variant(1.0, error) for name, error in errors.items()}
        rows = bench_ffn.rows(variants, "dense")
        result = {
            "tokens": 8, "neurons": 64, "pattern": "sparse", "nonzeros_per_token": 1.0, "union_per_128": 1.0,
            "auto": "dense", "training": True, "variants": rows,
        }  # fmt: skip
        bench_ffn.summary([result])
        assert worst in capsys.readouterr().out.splitlines()[-1].split()
        errors["tile"] = 2e-3


@pytest.mark.parametrize("tokens", bench_ffn.DECODE_TOKENS)
def test_decoded_tokens_are_evenly_spaced_and_not_the_first_of_a_sequence(tokens):
    pitch = bench_ffn.DECODE_FROM // tokens
    found = bench_ffn.spread(torch.arange(bench_ffn.DECODE_FROM), tokens)
    assert found.tolist() == [pitch // 3 + pitch * i for i in range(tokens)]


def test_a_failed_variant_leaves_the_others_their_ratios(capsys):
    times = {
        "torch eager": 2.0, "torch compiled": RuntimeError("no compiler"), "cuBLAS gate": 0.5, "gate_pack": 0.55,
        "row": ValueError("no\nrow"), "tile": 1.0, "dense": 2.0,
    }  # fmt: skip
    errors = {"torch eager": 1e-3, "tile": 2e-3, "dense": 1e-3}
    variants = bench_ffn.measured(times, lambda name: {"errors": {"y": errors[name]}} if name in errors else {})
    rows = bench_ffn.rows(variants, "tile")
    by_name = {row["variant"]: row for row in rows}
    assert by_name["tile"]["speedup"] == by_name["auto: tile"]["speedup"] == 2
    assert by_name["tile"]["of_dense_errors"] == {"y": 2}
    assert by_name["gate_pack"]["of_gate"] == pytest.approx(1.1)
    assert [name for name, row in by_name.items() if "failure" in row] == ["torch compiled", "row"]
    result = {
        "tokens": 8, "neurons": 64, "pattern": "sparse", "note": "", "nonzeros_per_token": 1.0, "union_per_128": 1.0,
        "auto": "tile", "training": False, "variants": rows,
    }  # fmt: skip
    bench_ffn.show(result)
    bench_ffn.summary([result])
    out = capsys.readouterr().out
    assert "FAILED ValueError: no row" in out
    assert out.splitlines()[-2].split()[:5] == ["M", "N", "pattern", "nonzeros", "union"]
    assert " ".join(out.splitlines()[-1].split()) == "8 64 sparse 1.0 1 2.000 1.10 - 2.00 1.00 tile 2.00 2.00"
