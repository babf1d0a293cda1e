"""One small case of each CUDA kernel, through the operators: what scripts/sanitize.sh runs under compute-sanitizer.

    python -m scripts.sanitize_kernels

Entries are small integers, so that every engine must give the dense engine's y and l1, bit for bit: a kernel that the
sanitizer stops, or that computes something else when slowed down, is noticed. A layer holds what makes kernels branch:
a token that fires next to nothing, one that fires every neuron, a neuron that fires for every token.
"""

import torch
from torch import Tensor

from sparsellm.ops import FeedForwardOutput, build, gated_ffn, nongated_ffn, plan_of

# Kernels of their own: gate_pack up to 64 tokens, the row engine up to 128, the order of tokens from 1,024 on.
CASES = [(300, True), (300, False), (16, True), (16, False), (1100, True)]
K, N = 256, 512
COMPRESSION = 8


def layer(m: int, gated: bool) -> tuple[Tensor, ...]:
    """(x [M, K], w_gate if gated, w_up [N, K], w_down [K, N]), made on the CPU, which no sanitizer slows down."""
    generator = torch.Generator().manual_seed(m)

    def draw(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high + 1, shape, generator=generator).bfloat16()

    x = draw(-1, 1, m, K) * (torch.rand((m, K), generator=generator) < 12 / K)
    x[:, :2] = torch.tensor([1.0, 0.0])
    x[1, :2], x[2, :2] = torch.tensor([64.0, 0.0]), torch.tensor([1.0, 64.0])  # nothing, everything
    first = draw(-3, 3, N, K)
    first[:, 0], first[:, 1] = draw(-12, -6, N), 1
    first[7, 0] = 100  # for every token
    second = draw(-3, 3, N, K)
    second[:, 1] = 0  # or what fires everything would take sums past 2^24, where their order shows
    ws = [first, *([second] if gated else []), draw(-2, 2, K, N)]
    return tuple(t.cuda() for t in (x, *ws))


def run(engine: str, inputs: tuple[Tensor, ...]) -> FeedForwardOutput:
    operator = gated_ffn if len(inputs) == 4 else nongated_ffn
    return operator(*inputs, plan_of(engine, COMPRESSION))


def main() -> int:
    build.load()
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    wrong = []
    for m, gated in CASES:
        inputs = layer(m, gated)
        expected = run("dense", inputs)
        for engine in ("row", "tile"):
            found = run(engine, inputs)
            same = torch.equal(found.y, expected.y) and torch.equal(found.l1, expected.l1)
            name = f"M {m}, {'gated' if gated else 'non-gated'}, {engine}"
            wrong += [] if same else [name]
            print(f"{name}: {int(found.nnz)} nonzeros, {'as dense' if same else 'NOT as dense'}", flush=True)
    print("all as dense" if not wrong else f"not as dense: {'; '.join(wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
