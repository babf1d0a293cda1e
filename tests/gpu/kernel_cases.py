"""Inputs of the kernels' tests, their right results, and comparisons that say where two results differ.

Letters: M tokens, K model width, N neurons. A layer is (x, weights): x [M, K], weights (w_gate, w_up [N, K], w_down
[K, N]), without w_gate for the non-gated operator; all bfloat16.

Two kinds of layers have one right answer, bit for bit, for any order of summation:
    `integers`  all entries are small integers, so every sum is an integer below 2^24, which is exact in float32
    `one_hot`   each token's x selects one column of w_gate, so the gate is any bfloat16 matrix, value for value
For other layers, `assert_as_accurate` compares the error against float64 with the error of dense PyTorch.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from scripts.benchmarks import patterns
from sparsellm.inference.engine_choice import EngineChoice
from sparsellm.ops import ENGINES, FeedForwardOutput, Plan, borders, cuda, feedforward, reference, twell
from sparsellm.ops.feedforward import output_of
from sparsellm.ops.twell import COLUMN_TILE, TOKEN_TILE

DEVICE = "cuda"
HEIGHTS = (1, 16, 64, 65, 127, 128, 129, 255, 257, 4088)
WIDTHS = (8, 264, 768, 1000, 1024, 2048)
NEURONS = (8, 264, 1000, 5632)
LAYERS = [(8, 8), (264, 264), (768, 1000), (1000, 264), (1024, 1000), (2048, 5632)]  # (K, N) of whole layers
GATED = pytest.mark.parametrize("gated", [True, False], ids=["gated", "nongated"])
ENGINE = pytest.mark.parametrize("engine", ENGINES)

EXACT = 2**24  # integers up to this value are exact in float32
# kRowCapacity of launch.h: a row with more nonzeros is a long row, which the tile engine stores apart
ROW_CAPACITY = 512
CHUNKS = (8, 9, 63, 64, 65, 128, 129, 255, 256)  # nonzeros of a row at which the row engine or token_order branches
LONGEST_CHAIN = 8192  # no float32 partial sum of l1 has more additions
ACTIVATIONS = Path(os.environ.get("SPARSELLM_ACTIVATIONS", Path(__file__).parents[3] / "shared/data/activations"))


@contextmanager
def no_waiting(enforced: bool = True) -> Iterator[None]:
    """Make torch raise an error for calls that wait for the device, if `enforced`."""
    torch.cuda.set_sync_debug_mode("error" if enforced else "default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def random(seed: int) -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(seed)


def round_up(length: int, multiple: int = 8) -> int:
    return -(-length // multiple) * multiple


# Layers.


def integers(m: int, k: int, n: int, gated: bool = True, seed: int = 0) -> tuple[Tensor, list[Tensor]]:
    """A layer of small integers, whose neurons fire for a few to sixty percent of the tokens."""
    generator = random(seed)

    def draw(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high + 1, shape, device=DEVICE, generator=generator).bfloat16()

    x = draw(-1, 1, m, k) * (torch.rand((m, k), device=DEVICE, generator=generator) < 12 / k)
    x[:, 0] = 1
    first = draw(-3, 3, n, k)
    first[:, 0] = draw(-12, 0, n)  # each neuron's threshold
    return x, [first, *([draw(-3, 3, n, k)] if gated else []), draw(-2, 2, k, n)]


def normal(m: int, k: int, n: int, gated: bool = True, rate: float = 0.1, seed: int = 0) -> tuple[Tensor, list[Tensor]]:
    """A layer of normal numbers, in which every neuron fires for about a fraction `rate` of the tokens."""
    generator = random(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device=DEVICE, generator=generator)

    x, first = draw(m, k), draw(n, k) / k**0.5
    x[:, 0] = 1
    first[:, 0] = -(2**0.5) * torch.special.erfinv(torch.tensor(1 - 2 * rate)).item()
    ws = [first, *([draw(n, k) / k**0.5] if gated else []), draw(k, n) / n**0.5]
    return x.bfloat16(), [w.bfloat16() for w in ws]


def one_hot(gate: Tensor, k: int = 0) -> tuple[Tensor, Tensor]:
    """(x, w) with relu(x w^T) = relu(gate), for any finite bfloat16 gate [M, N]. K is M rounded up to 8, or k if k is
    larger."""
    m, n = gate.shape
    k = max(round_up(m), k)
    x = torch.eye(m, k, device=DEVICE, dtype=torch.bfloat16)
    w = gate.new_zeros((n, k))
    w[:, :m] = gate.T
    return x, w


def layer_of(gate: Tensor, gated: bool, seed: int = 0, k: int = 0) -> tuple[Tensor, list[Tensor]]:
    """A layer whose gate is `gate`, bit for bit. If `gate` has small integers, the whole layer has too."""
    x, first = one_hot(gate, k)
    _, ws = integers(1, x.shape[1], len(first), gated, seed)
    return x, [first, *ws[1:]]


def recorded(name: str, tokens: int) -> patterns.Block:
    """The block of a pattern of patterns. Skips the test if it needs recordings that do not exist."""
    try:
        if name not in patterns.RECORDED:
            return patterns.build(name, tokens, DEVICE, ACTIVATIONS)
        fitted = patterns.fit(patterns.recorded(name, ACTIVATIONS)[:tokens].to(DEVICE), patterns.K)
    except patterns.MissingRecording as problem:
        pytest.skip(f"{problem}; SPARSELLM_ACTIVATIONS names their folder")
    return patterns._block(fitted.x, fitted.w_gate, 0)


# Which neurons fire: patterns of a gate, bool [M, N].

SLOTS = {"one free slot": -2, "all slots full": -1, "one too many": 0}  # nonzeros of every segment, minus its words W
PATTERNS = (
    *patterns.SYNTHETIC, "none", "all", "one neuron for every token", "one token for every neuron",
    "every other tile", "last columns", *SLOTS, "255 of a tile", "256 of a tile", "full rows",
)  # fmt: skip


def firing(name: str, m: int, n: int) -> Tensor:
    """bool [M, N] of one of PATTERNS."""
    generator = random(len(name))
    fires = torch.zeros((m, n), dtype=torch.bool, device=DEVICE)
    noise = torch.rand((m, n), device=DEVICE, generator=generator)
    if name in patterns.SYNTHETIC:
        rates = patterns.firing_rates(patterns.SYNTHETIC[name] * n / patterns.N, n)
        of_tokens = torch.exp(0.8 * torch.randn((m, 1), device=DEVICE, generator=generator))
        fires = noise < torch.from_numpy(rates).to(DEVICE) * of_tokens
    elif name == "all":
        fires[:] = True
    elif name == "one neuron for every token":
        fires[:, n // 2] = True
    elif name == "one token for every neuron":
        fires[m // 2] = True
    elif name == "every other tile":
        fires = noise < 0.05
        fires[torch.arange(m, device=DEVICE) // TOKEN_TILE % 2 == 1] = False
        fires[:, torch.arange(n, device=DEVICE) // COLUMN_TILE % 2 == 0] = False
    elif name == "last columns":
        fires[:, -1] = fires[-1, -8:] = True
    elif name == "full rows":  # counts at which kernels branch, and rows that fire every neuron
        counts = [ROW_CAPACITY - 1, ROW_CAPACITY, ROW_CAPACITY + 1, n, 0, 1, *CHUNKS]
        for row, count in enumerate(counts):
            of_row = noise[row :: len(counts)]
            fires[row :: len(counts)] = of_row.argsort(1).argsort(1) < count
    elif name != "none":
        count = twell.WORDS + SLOTS[name] if name in SLOTS else int(name.split()[0])
        for of_tile, its_noise in zip(fires.split(COLUMN_TILE, 1), noise.split(COLUMN_TILE, 1), strict=True):
            of_tile[:] = its_noise.argsort(1).argsort(1) < count
    return fires


def any_values(fires: Tensor, seed: int = 0) -> Tensor:
    """A gate of arbitrary normal bfloat16 numbers: positive where `fires`, negative elsewhere."""
    bits = torch.randint(0x0080, 0x7F80, fires.shape, device=DEVICE, generator=random(seed))
    values = bits.to(torch.int16).view(torch.bfloat16)
    return torch.where(fires, values, -values)


def small_integers(fires: Tensor, seed: int = 0) -> Tensor:
    """A gate of small integers: positive where `fires`, negative elsewhere."""
    values = torch.randint(1, 5, fires.shape, device=DEVICE, generator=random(seed)).bfloat16()
    return torch.where(fires, values, -values)


# Memory.


def poison(reserve: int = 1 << 30) -> None:
    """Fill the free memory of torch's allocator with 0xff, which is NaN as a float and -1 as an integer. torch.empty
    then returns such memory, so a kernel that reads memory that was never written gives a wrong result."""
    mib = 1 << 20

    def take(size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=DEVICE)

    held = [take(reserve), *(take(mib) for _ in range(32))]
    stream = torch.cuda.current_stream().cuda_stream
    sizes = []
    for segment in torch.cuda.memory_snapshot():
        if segment["stream"] != stream or tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0):
            continue  # another stream's or a CUDA graph's memory, which this stream's torch.empty does not return
        free = [block["size"] for block in segment["blocks"] if block["state"] == "inactive"]
        if segment["segment_type"] == "small":  # a request above a MiB would be served from large segments
            free = [part for size in free for part in [mib] * (size // mib) + [size % mib]]
        sizes += free
    held += [take(size) for size in sorted(sizes) if size]
    for tensor in held:
        tensor.fill_(0xFF)


# Right results.


def product(a: Tensor, w: Tensor) -> Tensor:
    """a w^T, computed in float64 and rounded to bfloat16 once."""
    return (a.double() @ w.double().T).bfloat16()


def stepwise(x: Tensor, ws: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """(g, h, y) with exact products, rounded where the operator rounds."""
    g = torch.relu(product(x, ws[0]))
    h = g if len(ws) == 2 else (g.float() * product(x, ws[1]).float()).bfloat16()
    return g, h, product(h, ws[-1])


def dense(x: Tensor, *ws: Tensor) -> Tensor:
    """y by dense PyTorch, in the dtype of the inputs."""
    h = torch.relu(x @ ws[0].T)
    if len(ws) == 3:
        h = h * (x @ ws[1].T)
    return h @ ws[-1].T


def layer(ws: list[Tensor]) -> list[Tensor | None]:
    """(w_gate or None, w_up, w_down)"""
    return ws if len(ws) == 3 else [None, *ws]


def gradients(x: Tensor, ws: list[Tensor], dy: Tensor, dl1: Tensor) -> tuple[Tensor, ...]:
    """The reference's gradients of x and ws, in the dtype of the inputs."""
    return reference.backward(x, *layer(ws), reference.forward(x, *layer(ws))[4:], dy, dl1)


def exact_gradients(x: Tensor, ws: list[Tensor], dy: Tensor, dl1: Tensor) -> tuple[Tensor, ...]:
    """The same in float64."""
    return gradients(x.double(), [w.double() for w in ws], dy.double(), dl1.double())


def run(engine: str, x: Tensor, ws: list[Tensor], choice: EngineChoice | None = None) -> FeedForwardOutput:
    """The results of `engine`: through the operator, or through `choice`, as an accelerated block calls it, with a copy
    of w_down by neuron."""
    if choice is None:
        return feedforward(x, *layer(ws), Plan.of(engine))
    y, l1, fired, counts = choice.run(x, *layer(ws))
    return output_of(y, l1, fired, counts)


def either_way(engines: tuple[str, ...]) -> Iterator[tuple[str, str, AbstractContextManager]]:
    """Yields (name, engine, context to run it in) for each engine; twice for dense, so that its kernels for many and
    for few tokens both run."""
    for engine in engines:
        if engine == "dense":
            yield "dense, fused", engine, patch.object(borders, "MIN_FUSED_TOKENS", 0)
            yield "dense, apart", engine, patch.object(borders, "MIN_FUSED_TOKENS", sys.maxsize)
        else:
            yield engine, engine, nullcontext()


def check_exact(x: Tensor, ws: list[Tensor], what: str, engines: tuple[str, ...] = ENGINES) -> None:
    """Assert that every engine's results on a layer of integers are right, bit for bit."""
    g, h, y = stepwise(x, ws)
    sums = torch.where(h.isfinite(), h, 0).abs().double() @ ws[-1].abs().double().T
    assert sums.max() < EXACT, f"{what}: the test's own sums are not exact"
    l1 = h.abs().sum(dtype=torch.float64)
    for way, engine, there in either_way(engines):
        name = f"{what}, {way}"
        poison()
        with there:
            out = run(engine, x, ws)
        assert_equal(out.y, y, f"{name}: y")
        if l1 < EXACT or l1.isnan():
            assert_equal(out.l1, l1.float(), f"{name}: l1")
        else:
            assert_close(out.l1, l1, LONGEST_CHAIN * 2**-24, f"{name}: l1")
        check_statistics(out, g, engine, name)
        segments = twell.pack(g).wide_segments if engine != "dense" and len(x) else 0
        assert out.wide_segments == segments, f"{name}: {out.wide_segments} wide segments, and {segments} do not fit"


def check_statistics(out: FeedForwardOutput, g: Tensor, engine: str, name: str) -> None:
    """Assert that the counts are right for the gate g [M, N]."""
    active = g != 0
    nnz, fired, union = active.sum(), active.any(0), reference.union(active)
    assert_equal(out.nnz, nnz, f"{name}: nnz")
    assert_equal(out.fired, fired, f"{name}: fired")
    if engine == "tile" and borders.orders(len(g)):  # the tiles of ordered tokens are not known here
        assert fired.sum() <= out.union <= nnz, f"{name}: union {out.union}, of {fired.sum()} neurons, {nnz} nonzeros"
    else:
        assert_equal(out.union, union, f"{name}: union")


def leaving(counts: Tensor, capacity: int, long_capacity: int) -> Tensor:
    """bool [MT]: the token tiles that leave the tile engine (kernels/portable/tile/plan.cu), whose lists hold
    `capacity` nonzeros. counts [M]: the nonzeros of the token at each position."""
    tiled = torch.nn.functional.pad(counts.long(), (0, -len(counts) % TOKEN_TILE)).view(-1, TOKEN_TILE)
    is_long = tiled > ROW_CAPACITY
    if tiled.sum() <= capacity and tiled[is_long].sum() <= long_capacity:
        return torch.zeros(len(tiled), dtype=torch.bool, device=counts.device)
    never = is_long.any(1) & bool(tiled[is_long].sum() > long_capacity)
    fullness, order = torch.where(never, EXACT, tiled.sum(1)).sort(stable=True)
    leaves = torch.empty_like(never)
    leaves[order] = fullness.cumsum(0) > capacity
    return leaves | never


def check_packed(packed: twell.PackedGate, gate: Tensor, what: str) -> None:
    """Assert that `packed` is the packed `gate` [M, N] in all that the format defines; NaN may be any NaN."""
    expected = twell.pack(gate)
    words, expected_words = (twell.segments(p.words) for p in (packed, expected))
    for field in ("row_counts", "fired", "mask", "nnz", "wide_segments", "union"):
        assert_equal(getattr(packed, field), getattr(expected, field), f"{what}: {field}")
    counts = expected_words[..., :1]
    assert_equal(words[..., :1], counts, f"{what}: counts")
    position = torch.arange(words.shape[2], device=DEVICE)
    used = (position > 0) & (position <= counts) & (counts < words.shape[2])
    columns = (torch.where(used, w & 0xFFFF, 0) for w in (words, expected_words))
    assert_equal(*columns, f"{what}: columns")
    n = gate.shape[1]
    assert_equal(twell.unpack(packed, n), twell.unpack(expected, n), f"{what}: values")


def check_accuracy(x: Tensor, ws: list[Tensor], what: str) -> None:
    """Assert that every engine's y is as accurate as dense PyTorch's, and its statistics are those of its own gate."""
    exact, theirs = dense(x.double(), *(w.double() for w in ws)), dense(x, *ws)
    for engine in ENGINES:
        name = f"{what}, {engine}"
        poison()
        out = run(engine, x, ws)
        assert_as_accurate(out.y, theirs, exact, f"{name}: y")
        g = torch.relu(x @ ws[0].T) if engine == "dense" else twell.unpack(cuda.gate_pack(x, ws[0]), len(ws[0]))
        check_statistics(out, g, engine, name)
        h = g.double() if len(ws) == 2 else (g.float() * product(x, ws[1]).float()).bfloat16().double()
        l1 = h.abs().sum()
        # Summed in another order, u may round to a neighbouring bfloat16 number, and so may h. Neurons round
        # independently, up or down, so the errors add up like a norm.
        neighbours = 2**-7 * (h.norm() / l1.clamp(min=1e-30)).item()
        assert_close(out.l1, l1, LONGEST_CHAIN * 2**-24 + neighbours, f"{name}: l1")


# Comparisons that say where and by how much.


def assert_equal(found: Tensor, expected: Tensor, what: str) -> None:
    """Assert equal values; NaN equals NaN, and -0.0 equals 0.0."""
    assert found.shape == expected.shape, f"{what}: shape {list(found.shape)}, not {list(expected.shape)}"
    same = (found == expected) | (found.isnan() & expected.isnan())
    if same.all():
        return
    places = (~same).nonzero()
    first, last = tuple(places[0].tolist()), tuple(places[-1].tolist())
    pytest.fail(
        f"{what}: {len(places):,} of {same.numel():,} differ, from {first} ({found[first].item()} instead of"
        f" {expected[first].item()}) to {last} ({found[last].item()} instead of {expected[last].item()})"
    )


def assert_close(found: Tensor, expected: Tensor, relative: float, what: str) -> None:
    error = (found.double() - expected.double()).abs().item()
    allowed = relative * expected.abs().item()
    assert error <= allowed, (
        f"{what}: {found.item()} instead of {expected.item()}, {error:.2e} off, {allowed:.2e} allowed"
    )


def assert_as_accurate(found: Tensor, theirs: Tensor, exact: Tensor, what: str, factor: float = 2) -> None:
    """Assert that neither the norm of the error nor its largest entry is more than `factor` times that of `theirs`."""
    assert found.shape == exact.shape, f"{what}: shape {list(found.shape)}, not {list(exact.shape)}"
    if not found.numel():
        return
    ours, other = (t.double() - exact for t in (found, theirs))
    for measure, mine, allowed in (
        ("error", ours.norm(), other.norm()), ("largest error", ours.abs().max(), other.abs().max())
    ):  # fmt: skip
        if not mine <= factor * allowed:  # `not <=`, so that NaN fails
            bad = torch.where(ours.isnan(), torch.inf, ours.abs())
            place = tuple(int(i) for i in torch.unravel_index(bad.argmax(), bad.shape))
            pytest.fail(
                f"{what}: {measure} {mine:.3e}, {factor} x {allowed:.3e} allowed (the result's norm is"
                f" {exact.norm():.3e}); worst at {place}: {found[place].item()} instead of {exact[place].item()}"
            )
