"""Runs one small case of each CUDA kernel, through the operators. scripts/sanitize.sh runs it under compute-sanitizer.

    python -m scripts.sanitize_kernels [forward] [few] [backward] [--without-products]

Runs all parts unless some are named; few: cases of few tokens.

Entries are small integers, so every engine must return the y and l1 of the reference on the CPU, bit for bit. A
difference means that the sanitizer stopped a kernel, or that a kernel computes something else when it is slowed down.
The backward part compares the gradients of the weights, bfloat16 and (rounded) float32, with enough capacity in the
tile engine's lists, with so little that all token tiles leave the engine, and in float32 with a capacity for some, and
added in place to those of another micro-batch. A layer contains the cases at which kernels branch: a token that fires
almost no neuron, a token that fires every neuron, a neuron that fires for every token.

--without-products skips the dense engine's cuBLAS GEMMs, because under racecheck (2025.3, driver 580) any of them
ends in an illegal access, whichever kernels are checked. Results that depend on them are then not compared.
"""

import argparse
import ctypes
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

from sparsellm.ops import Plan, borders, build, cuda, feedforward, float8_gate, twell
from sparsellm.ops.accumulation import accumulating
from sparsellm.ops.borders import MANY_TOKENS
from sparsellm.ops.feedforward import forward
from sparsellm.ops.float8_gate import Float8Rows
from sparsellm.ops.float8_weights import Float8Layer

# Token counts for which different kernels run: gate_pack up to 16 tokens, gate_pack and the row engine up to 64, the
# row engine up to 1,535. Here, calls with at least ORDERED_TOKENS tokens order their tokens; the policy does so only in
# larger calls, which would take too long here.
CASES = [(m, gated) for m in (300, 16, 48, 100) for gated in (True, False)] + [(1600, True)]
FEW_TOKENS = 128  # maximum tokens per case in the part "few"
ORDERED_TOKENS = 1024
K, N = 256, 512
PARTS = ("forward", "few", "backward")


def layer(m: int, gated: bool) -> tuple[Tensor, ...]:
    """Returns (x [M, K], w_gate [N, K] if gated, w_up [N, K], w_down [K, N]): small integers, bfloat16, on the CPU."""
    generator = torch.Generator().manual_seed(m)

    def draw(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high + 1, shape, generator=generator).bfloat16()

    x = draw(-1, 1, m, K) * (torch.rand((m, K), generator=generator) < 12 / K)
    x[:, :2] = torch.tensor([1.0, 0.0])
    # token 1 fires almost no neuron, token 2 every neuron
    x[1, :2], x[2, :2] = torch.tensor([64.0, 0.0]), torch.tensor([1.0, 64.0])
    first = draw(-3, 3, N, K)
    first[:, 0], first[:, 1] = draw(-12, -6, N), 1
    first[7, 0] = 100  # neuron 7 fires for every token
    second = draw(-3, 3, N, K)
    second[:, 1] = 0  # otherwise token 2's sums would exceed 2^24, above which their order matters
    ws = [first, *([second] if gated else []), draw(-2, 2, K, N)]
    return x, *ws


def gated_layer(x: Tensor, *ws: Tensor) -> tuple[Tensor | None, ...]:
    """Returns (x, w_gate or None, w_up, w_down)."""
    return x, *(() if len(ws) == 3 else (None,)), *ws


def run(engine: str, *inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (y, l1, nnz), computed by `engine` on the inputs' device."""
    return feedforward(*gated_layer(*inputs), Plan.of(engine))[:3]


def gradients(
    engine: str, *inputs: Tensor, stored: torch.dtype = torch.bfloat16, in_float8: bool = False, added: bool = False
) -> tuple[Tensor, ...]:
    """Returns (dw of each weight, rounded to bfloat16, ..., nnz), computed by `engine` on the inputs' device, from
    weights of dtype `stored`. dy alternates between 0 and 1, and dl1 is 1. in_float8: the gate product is in FP8.
    added: the gradients of two equal micro-batches, added in place, and halved."""
    x, *ws = inputs
    ws = [w.detach().to(stored).requires_grad_() for w in ws]
    dy = (torch.arange(x.numel(), device=x.device) % 2).view(x.shape).to(x.dtype)
    with accumulating(ws if added else [], keeps_casts=True) as shared:
        for _ in range(2 if added else 1):
            shared.next_micro_batch()
            with torch.autocast(x.device.type, torch.bfloat16):
                rounded = cuda.quantize_rows(x) if in_float8 else None
                out = feedforward(*gated_layer(x, *ws), Plan.of(engine), rounded)
            torch.autograd.backward([out.y, out.l1], [dy, torch.ones_like(out.l1)])
    return *((w.grad / (2 if added else 1)).bfloat16() for w in ws), out.nnz


def leave_out_products() -> None:
    """Replace torch's matmuls with functions that do nothing, for libraries loaded after this call."""
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "nothing.c"), Path(folder, "nothing.so")
        source.write_text("".join(f"int aoti_torch_cuda_{name}_out() {{ return 0; }}\n" for name in ("mm", "addmm")))
        subprocess.run(["cc", "-shared", "-fPIC", source, "-o", library], check=True)
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}: all, unless parts are named")
    parser.add_argument("--without-products", action="store_true", help="do not call cuBLAS")
    args = parser.parse_args()
    parts = args.parts or PARTS
    for part in set(parts) - set(PARTS):
        parser.error(f"PART is {part}: it should be one of {', '.join(PARTS)}")
    if args.without_products:
        leave_out_products()
    build.load()
    with patch.object(borders, "MIN_ORDERED_TOKENS", ORDERED_TOKENS):
        wrong = check(parts, not args.without_products)
    print("all equal to the reference" if not wrong else f"different from the reference: {'; '.join(wrong)}")
    return 1 if wrong else 0


def check(parts: Sequence[str], products: bool) -> list[str]:
    """Compare all cases in `parts` with the reference. Returns the names of the cases that differ.

    `products`: whether cuBLAS's matrix products are computed. If not, only the dense engine's statistics are compared,
    and only where one of its own kernels computes them.
    """
    wrong: list[str] = []

    def compare(name: str, found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
        same = all(torch.equal(f.cpu(), e) for f, e in zip(found, expected, strict=True))
        print(f"{name}: {'equal to the reference' if same else 'DIFFERENT from the reference'}", flush=True)
        wrong.extend([] if same else [name])

    for m, gated in CASES:
        inputs = layer(m, gated)
        on_device = [t.cuda() for t in inputs]
        name = f"M {m}, {'gated' if gated else 'non-gated'}"
        if ("few" if m <= FEW_TOKENS else "forward") in parts:
            expected = run("dense", *inputs)
            for engine in ("row", "tile") if products or m >= MANY_TOKENS else ("tile",):
                compare(f"{name}, {engine}", run(engine, *on_device), expected)
            rounded, right = cuda.quantize_rows(on_device[0]), float8_gate.quantize_rows(inputs[0])
            compare(
                f"{name}, rounding to FP8",
                (rounded.values.float(), rounded.scales),
                (right.values.float(), right.scales),
            )
            gate = [Float8Rows(t.to(torch.float8_e4m3fn), torch.full((len(t),), 0.5)) for t in inputs[:2]]
            packed = cuda.gate_pack_float8(*(Float8Rows(*(t.cuda() for t in rows)) for rows in gate))
            compare(f"{name}, FP8 gate", (twell.unpack(packed, N),), (float8_gate.gate(*gate),))
            if products and m <= borders.FEW_TOKENS:
                of_cpu, of_gpu = (Float8Layer.of(*gated_layer(*each)[1:]) for each in (inputs, on_device))
                w_gate, w_up, w_down_t = of_cpu.to(torch.bfloat16)
                in_bf16 = feedforward(inputs[0], w_gate, w_up, w_down_t.T.contiguous(), Plan()).y
                compare(f"{name}, row, FP8 weights", (cuda.row_output_float8(on_device[0], of_gpu),), (in_bf16,))
            for fused in (True, False):
                with fusing(fused):
                    found = run("dense", *on_device)
                of = slice(0 if products else 1 if fused else 3, None)  # which of y, l1, nnz to compare
                compare(f"{name}, dense, {'' if fused else 'not '}fused", found[of], expected[of])
            with fusing(False), torch.no_grad():
                y, *_ = forward(*gated_layer(*on_device), Plan(), None, False, counting=False)
            if products:
                compare(f"{name}, dense, without statistics", (y,), expected[:1])
        if "backward" in parts and m == CASES[0][0]:
            right = gradients("dense", *inputs)
            for fused in (True, False):
                with fusing(fused):
                    found = gradients("dense", *on_device)
                if products:
                    compare(f"{name}, backward, dense, {'' if fused else 'not '}fused", found, right)
            for stored in (torch.bfloat16, torch.float32):
                # In bfloat16, the gradients of tiles that stay are rounded before those of other tiles are added.
                limits = {"": None, ", all tiles overflow": 64}
                if stored == torch.float32:
                    limits[", some tiles overflow"] = int(right[-1]) * 3 // 5
                for limited, capacity in limits.items():
                    of_call = patch.object(borders, "capacity", lambda *_, capacity=capacity: capacity)
                    for added in (False, True) if stored == torch.float32 else (False,):
                        with nullcontext() if capacity is None else of_call:
                            found = gradients("tile", *on_device, stored=stored, added=added)
                        compare(f"{name}, backward, {stored}{limited}{', added' * added}", found, right)
                with patch.object(borders, "capacity", lambda *_: 64):  # all tiles overflow, and none is in FP8
                    found = gradients("tile", *on_device, stored=stored, in_float8=True)
                compare(f"{name}, backward, {stored}, all tiles overflow, FP8", found[:-1], right[:-1])
                # For the sanitizers alone, because rounding changes the results of this layer.
                gradients("tile", *on_device, stored=stored, in_float8=True)
    return wrong


def fusing(fused: bool) -> AbstractContextManager:
    """Make the dense engine run the kernels for many tokens (fused=True), or those for few tokens."""
    return patch.object(borders, "MIN_FUSED_TOKENS", 0 if fused else 1 << 62)


if __name__ == "__main__":
    raise SystemExit(main())
