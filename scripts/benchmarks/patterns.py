"""Feedforward inputs and weights whose neurons fire in a chosen pattern, for benchmarks and GPU tests.

Symbols: M tokens, K model width, N neurons. A `Block` holds x [M, K], w_gate, w_up [N, K], w_down [K, N], all bfloat16,
and neuron n fires for token m if (x w_gate^T)[m, n] > 0. Sources:

    synthetic29, synthetic300, ...  `synthetic`: heavy-tailed tokens, lognormal neuron rates; the mean is in the name,
                                    and with N as the mean every neuron fires for every token
    heavy0 ... heavy100             `synthetic`: that percentage of the tokens, at random places, fires some 1,500
                                    neurons each, all others some 36
    sparse, layer1, ...             `fit`: x and w_gate trained until their product fires as recorded, token by token
    layer4gate                      a recorded input with the recorded gate weight

Synthetic patterns exist at any N, recorded ones at the N of the recording. All except the synthetic ones need a folder
of recordings, the argument `activations`, written by `python -m sparsellm.analyze checkpoint=PATH recordings=FOLDER`
(format: sparsellm/analysis/recordings.py; the recording of a 0.5B model has layers 0 to 7). Recorded tokens are
repeated up to the requested M.
"""

import argparse
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sparsellm.analysis.recordings import GATE_WEIGHT, INPUT

K, N = 2048, 5632
TOKEN_TILE = 128
CHUNK = 16_384  # tokens processed at a time, because a float32 or boolean [M, N] of all tokens would not fit

SYNTHETIC = {f"synthetic{mean}": mean for mean in (29, 300, 900, 2800, N)}
HEAVY = {f"heavy{percent}": percent / 100 for percent in (0, 1, 5, 10, 25, 50, 100)}  # share of heavy tokens
HEAVY_NONZEROS, LIGHT_NONZEROS = 1500, 36
RECORDED = {"sparse": "", **{f"layer{i}": f"layer{i}_" for i in (1, 2, 4, 7)}}  # pattern -> prefix of its arrays' names
LAYERS = "firing_patterns*.npz"  # file with all recorded patterns except `sparse`
SPARSE = "firing_pattern_sparse_l4.npz"  # file with the pattern `sparse`, one layer of a sparser model
RECORD = "`python -m sparsellm.analyze checkpoint=PATH recordings=DIR` writes recordings of a checkpoint"
PATTERNS = (*SYNTHETIC, *RECORDED, "layer4gate")

WEIGHT_STD = 0.02
DEAD = 0.3  # fraction of synthetic neurons that never fire
RATE_SIGMA = 1.5  # sigma of the other neurons' lognormal rates
RATE_CAP = 0.5  # maximum of the other neurons' rates
TOKEN_SIGMA = 0.3  # a token's z is scaled by exp(0.3 n) with a standard normal n (see `synthetic`)
NEVER = 40.0  # threshold for neurons that never fire, in standard deviations of z


@dataclass(frozen=True)
class Block:
    """A layer whose neurons fire in a chosen pattern; shapes are at the top of this file."""

    x: Tensor
    w_gate: Tensor
    w_up: Tensor
    w_down: Tensor
    note: str = ""  # how closely the layer reproduces the recorded pattern


def pattern_name(text: str) -> str:
    """An argparse type: the name of a pattern, one of PATTERNS or HEAVY or `synthetic` with any mean above zero."""
    if text in PATTERNS or text in HEAVY or re.fullmatch("synthetic[1-9][0-9]*", text):
        return text
    known = f"{', '.join((*PATTERNS, *HEAVY))}, or synthetic and any mean, such as synthetic36"
    raise argparse.ArgumentTypeError(f"{text!r} is not a pattern: use {known}")


BASES = ("torch eager", "torch compiled")  # baselines: the same layer in dense PyTorch


def add_locality(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--locality", type=float, default=0.0, help="0 to 1: how many neurons neighbouring tokens share in random text"
    )


def add_activations(parser: argparse.ArgumentParser) -> None:
    """Add the option --activations DIR to `parser`. The option refuses a DIR without a recording."""

    def folder(text: str) -> Path:
        try:
            return layers_file(Path(text)).parent
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    parser.add_argument("--activations", type=folder, metavar="DIR", help=f"recorded firing patterns: {RECORD}")


class MissingRecording(ValueError):
    """A pattern or rates need a recording that is not in the folder. The message says how to make one."""


def layers_file(activations: Path) -> Path:
    """The path of the recorded-layers file in a folder. Raises MissingRecording unless there is exactly one."""
    found = sorted(activations.glob(LAYERS))
    if len(found) == 1:
        return found[0]
    problem = f"has {', '.join(path.name for path in found)}, but should have one" if found else f"has no {LAYERS}"
    raise MissingRecording(f"{activations} {problem if activations.is_dir() else 'is not a folder'}: {RECORD}")


def _layers(arrays: np.lib.npyio.NpzFile) -> int:
    return sum(name.endswith("_cols") for name in arrays)


def _neurons(arrays: np.lib.npyio.NpzFile) -> int:
    """The recorded model's N; 5,632 if the file does not state it."""
    return int(arrays["neurons"]) if "neurons" in arrays else N


def build(
    name: str, tokens: int, device: str | torch.device, activations: Path | None = None, seed: int = 0, neurons: int = N
) -> Block:
    """Build the layer for pattern `name` (see `pattern_name`), with K=2048 and N=`neurons`, on `device`. To run fewer
    tokens on the same layer, slice its x.

    Raises MissingRecording if the pattern needs a recording with N=`neurons` that is not in `activations`.
    """
    if name.startswith("synthetic"):
        return synthetic(int(name.removeprefix("synthetic")), tokens, K, neurons, device, seed)
    if name in HEAVY:
        return synthetic(LIGHT_NONZEROS, tokens, K, neurons, device, seed, HEAVY[name])
    if name == "layer4gate":
        x, w_gate = (tensor.to(device) for tensor in recorded_gate(activations, neurons))
        return _block(repeat(x, tokens), w_gate, seed)
    firing = recorded(name, activations, neurons).to(device)
    fitted = fit(firing, K, seed)
    note = f"fit: {fitted.mismatches:,} of {firing.numel():,} differ from the recording, {fitted.steps} steps"
    return _block(repeat(fitted.x, tokens), fitted.w_gate, seed, note)


def _block(x: Tensor, w_gate: Tensor, seed: int, note: str = "") -> Block:
    neurons, width = w_gate.shape
    generator = torch.Generator(x.device).manual_seed(seed + 1)
    w_up, w_down = (
        torch.randn(shape, device=x.device, generator=generator).mul_(WEIGHT_STD).bfloat16()
        for shape in ((neurons, width), (width, neurons))
    )
    return Block(x, w_gate, w_up, w_down, note)


# Counts.


def firing_chunks(x: Tensor, w_gate: Tensor) -> Iterator[Tensor]:
    """Yields bool [chunk, N] for consecutive chunks of tokens: where x w_gate^T, in the dtype of x, is above zero."""
    for chunk in x.split(CHUNK):
        yield chunk @ w_gate.T > 0


def union_sum(firing: Tensor) -> int:
    """The number of neurons that fire in each tile of 128 consecutive tokens, summed over tiles. `firing`: bool
    [M, N]."""
    padded = F.pad(firing, (0, 0, 0, -len(firing) % TOKEN_TILE))
    return int(padded.view(-1, TOKEN_TILE, firing.shape[1]).any(1).sum())


def counts(x: Tensor, w_gate: Tensor) -> tuple[int, int]:
    """Returns (number of nonzeros, `union_sum`) for relu(x w_gate^T)."""
    each = [(int(firing.sum()), union_sum(firing)) for firing in firing_chunks(x, w_gate)]
    return sum(nnz for nnz, _ in each), sum(union for _, union in each)


# Synthetic patterns.


def synthetic(
    mean: float, tokens: int, width: int, neurons: int, device: str | torch.device, seed: int = 0, heavy: float = 0.0
) -> Block:
    """A block in which `mean` neurons per token fire on average, at rates from `firing_rates`. A share `heavy` of the
    tokens, at random places, fires HEAVY_NONZEROS on average instead.

    e is a random unit vector. A token is x = z + sqrt(K) e, where z is normal and orthogonal to e, and scaled for each
    token by exp(0.3 n) with a normal n, which gives heavy tails. Row i of w_gate is w_i - (t_i / sqrt(K)) e, where w_i
    is 0.02 times a normal vector and orthogonal to e. So x w_gate^T is z w_i - t_i, and neuron i fires if z w_i > t_i;
    t_i is set to give the neuron its rate. A heavy token has less of e, and so lower thresholds.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=generator)

    e = F.normalize(normal(width), dim=0)
    w_gate = normal(neurons, width) * WEIGHT_STD
    w_gate -= torch.outer(w_gate @ e, e)
    rates = firing_rates(mean, neurons, seed)
    thresholds = torch.from_numpy(_thresholds(rates)).float().to(device) * w_gate.norm(dim=1)
    w_gate -= torch.outer(thresholds / width**0.5, e)
    x = torch.empty((tokens, width), dtype=torch.bfloat16, device=device)
    for chunk in x.split(CHUNK):
        z = normal(len(chunk), width)
        z -= torch.outer(z @ e, e)
        z *= torch.exp(TOKEN_SIGMA * normal(len(chunk), 1))
        chunk.copy_(z + width**0.5 * e)
    w_gate = w_gate.bfloat16()
    if heavy:
        chosen = torch.randperm(tokens, device=device, generator=generator)[: round(heavy * tokens)]
        x[chosen] = _lowered(x[chosen], w_gate, width**0.5 * e)
    return _block(x, w_gate, seed)


def _lowered(x: Tensor, w_gate: Tensor, offset: Tensor) -> Tensor:
    """x [M, K] less such a part of `offset` [K] that HEAVY_NONZEROS neurons fire for a token on average."""
    low, high = 0.0, 1.0
    for _ in range(12):
        middle = (low + high) / 2
        nnz, _ = counts((x[:CHUNK] - middle * offset).to(x.dtype), w_gate)
        low, high = (low, middle) if nnz > HEAVY_NONZEROS * len(x[:CHUNK]) else (middle, high)
    return (x - high * offset).to(x.dtype)


def firing_rates(mean: float, neurons: int, seed: int = 0) -> np.ndarray:
    """float64 [N]: how often each neuron fires. Rates are lognormal, 30% of them zero, capped at 0.5, and sum to
    `mean`. If such rates cannot reach `mean`, all are 0.5; if `mean` is N, all are 1."""
    if mean >= neurons:
        return np.ones(neurons)
    random = np.random.default_rng(seed)
    rates = np.exp(RATE_SIGMA * random.standard_normal(neurons))
    rates[random.permutation(neurons)[: round(DEAD * neurons)]] = 0
    if mean >= RATE_CAP * np.count_nonzero(rates):
        return np.full(neurons, RATE_CAP)
    return scaled_rates(rates, mean)


def scaled_rates(rates: np.ndarray, mean: float) -> np.ndarray:
    """rates [..., N] multiplied by one factor, and capped at 0.5, so that their sums over N average `mean`."""
    low, high = 0.0, 1e12
    for _ in range(200):
        middle = (low + high) / 2 if low else high / 2
        too_many = np.minimum(rates * middle, RATE_CAP).sum(-1).mean() > mean
        low, high = (low, middle) if too_many else (middle, high)
    return np.minimum(rates * low, RATE_CAP)


def _thresholds(rates: np.ndarray) -> np.ndarray:
    """The threshold t with P(exp(0.3 n) n' > t) = rate, n and n' standard normal, for each rate; NEVER for rate 0, and
    -NEVER for rate 1."""
    scales, weights = np.polynomial.hermite_e.hermegauss(64)
    scales, weights = np.exp(TOKEN_SIGMA * scales), weights / weights.sum()
    grid = np.linspace(0, NEVER, 8_001)
    tail = torch.special.erfc(torch.from_numpy(grid[:, None] / (scales * 2**0.5))).numpy() / 2 @ weights
    seen = np.maximum(rates, 1e-12)
    found = np.interp(-np.log(seen), -np.log(np.maximum(tail, 1e-300)), grid)
    return np.where(rates == 1, -NEVER, np.where(rates > 0, found, NEVER))


# Recorded patterns.


def recorded(name: str, activations: Path | None, neurons: int = N) -> Tensor:
    """A RECORDED pattern, bool [M, N], on the CPU. Raises MissingRecording if its recording is missing."""
    if activations is None:
        raise MissingRecording(f"pattern {name!r} is recorded, so it needs --activations DIR: {RECORD}")
    path, prefix = activations / SPARSE if name == "sparse" else layers_file(activations), RECORDED[name]
    if not path.is_file():
        raise MissingRecording(f"pattern {name!r} needs {path}; for a recorded sparser model, use pattern 'layer4'")
    with np.load(path) as arrays:
        if f"{prefix}cols" not in arrays:
            raise MissingRecording(f"{path} has no {name}: its model has only {_layers(arrays)} layers; {RECORD}")
        if (found := _neurons(arrays)) != neurons:
            raise MissingRecording(
                f"{path} was recorded with N {found:,}: pattern {name!r} needs N {neurons:,}; {RECORD}"
            )
        return dense_firing(arrays[f"{prefix}row_counts"], arrays[f"{prefix}cols"], neurons)


def recorded_gate(activations: Path | None, neurons: int = N) -> tuple[Tensor, Tensor]:
    """x [M, K] and w_gate [N, K], bfloat16, from a recorded layer 4. Raises MissingRecording if they are missing, or
    have another shape."""
    if activations is None:
        raise MissingRecording(f"pattern 'layer4gate' is recorded, so it needs --activations DIR: {RECORD}")
    found = []
    for file, rows in ((INPUT, None), (GATE_WEIGHT, neurons)):
        path = activations / file
        if not path.is_file():
            raise MissingRecording(
                f"pattern 'layer4gate' needs {path}: {RECORD}, with this file if the model has a layer 4"
            )
        found.append(torch.from_numpy(np.load(path)).view(torch.bfloat16))
        if found[-1].shape != (rows or len(found[-1]), K):
            raise MissingRecording(
                f"{path} has shape {tuple(found[-1].shape)}: pattern 'layer4gate' needs K {K:,}, N {neurons:,}"
            )
    return found[0], found[1]


def recorded_rates(activations: Path) -> np.ndarray:
    """float64 [L, N]: the fraction of tokens for which each neuron in the recorded model fired.

    Raises MissingRecording if `activations` holds no recording.
    """
    with np.load(layers_file(activations)) as arrays:
        return np.stack([
            np.bincount(arrays[f"layer{i}_cols"], minlength=_neurons(arrays)) / len(arrays[f"layer{i}_row_counts"])
            for i in range(_layers(arrays))
        ])  # fmt: skip


def dense_firing(row_counts: np.ndarray, columns: np.ndarray, neurons: int) -> Tensor:
    """Converts a pattern from sparse form to bool [M, N]. `columns` holds the columns of row 0, then those of row 1,
    and so on; row m has row_counts[m] columns."""
    firing = torch.zeros((len(row_counts), neurons), dtype=torch.bool)
    rows = np.repeat(np.arange(len(row_counts)), row_counts)
    firing[torch.from_numpy(rows), torch.from_numpy(columns.astype(np.int64))] = True
    return firing


def repeat(rows: Tensor, tokens: int) -> Tensor:
    """`tokens` rows, made by repeating `rows` in order."""
    return rows[torch.arange(tokens, device=rows.device) % len(rows)]


class Fitted(NamedTuple):
    """The result of `fit`."""

    x: Tensor  # bfloat16 [M, K], each row with RMS 1
    w_gate: Tensor  # bfloat16 [N, K], with RMS 0.02
    mismatches: int  # entries that differ from the pattern
    steps: int


FIT_MARGIN = 0.3  # z is trained to be above FIT_MARGIN where a neuron fires, and below -FIT_MARGIN elsewhere
FIT_RATES = (5e-3, 1e-3)  # Adam's learning rates for x and w_gate
FIT_BALANCE = 10.0  # loss weight where a neuron fires; such entries are 50 to 300 times rarer
FIT_CHECK = 50  # steps between checks of the mismatches


def fit(firing: Tensor, width: int, seed: int = 0, steps: int = 600) -> Fitted:
    """Train x and w_gate until x w_gate^T > 0 exactly where firing bool [M, N] is True, for at most `steps` steps.

    Initially, neurons are random directions w_i, and a token is the sum of the directions of its firing neurons, minus
    the average token. So z is larger by 1 where a neuron fires, except for the overlaps of random directions. Training
    with a squared hinge loss and Adam, with bfloat16 matmuls (float32 on a CPU), removes the overlaps that matter. The
    lengths of x's rows and of w_gate do not change the sign of z, so they are chosen last.
    """
    device, neurons = firing.device, firing.shape[1]
    compute = torch.bfloat16 if firing.is_cuda else torch.float32
    generator = torch.Generator(device).manual_seed(seed)
    sign = torch.where(firing, 1.0, -1.0).to(compute)
    weight = torch.where(firing, -FIT_BALANCE, 1.0).to(compute)  # gradient weight, including the sign
    rates = firing.float().mean(0)

    directions = F.normalize(torch.randn((neurons, width), device=device, generator=generator), dim=1)
    e = F.normalize(torch.randn(width, device=device, generator=generator), dim=0)
    directions -= torch.outer(directions @ e, e)
    w = directions - torch.outer(0.5 - rates, e)
    x = torch.cat([(part.float() - rates) @ directions + e for part in firing.split(4096)])

    x_rate, w_rate = FIT_RATES
    optimizer = torch.optim.Adam([{"params": [x], "lr": x_rate}, {"params": [w], "lr": w_rate}], betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / (steps + 1))
    margin = sign.new_full((), FIT_MARGIN)
    done = 0
    for done in range(1, steps + 1):
        x_compute, w_compute = x.to(compute), w.to(compute)
        gap = torch.addcmul(margin, sign, x_compute @ w_compute.T, value=-1).clamp_(min=0)
        dz = gap.mul_(weight)
        x.grad, w.grad = (dz @ w_compute).float(), (dz.T @ x_compute).float()
        optimizer.step()
        schedule.step()
        if done % FIT_CHECK == 0 and not _mismatches(firing, *_as_gate(x, w)):
            break
    fitted = _as_gate(x, w)
    return Fitted(*fitted, _mismatches(firing, *fitted), done)


def _as_gate(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    rms = w.square().mean().sqrt()
    return F.rms_norm(x, x.shape[1:]).bfloat16(), (w * (WEIGHT_STD / rms)).bfloat16()


def _mismatches(firing: Tensor, x: Tensor, w_gate: Tensor) -> int:
    found = zip(firing.split(CHUNK), firing_chunks(x, w_gate), strict=True)
    return sum(int((wanted != fires).sum()) for wanted, fires in found)
