"""Computes the numbers of an analysis from counts: deterministic and JSON-serializable.

Nonzeros are neurons that fired, per token and layer. T: the length of a sequence, L: layers.
"""

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from sparsellm.analysis.activity import Activity
from sparsellm.analysis.token_classes import CLASSES, PART_OF_A_CHARACTER

if TYPE_CHECKING:  # deferred: importing transformers' models takes two seconds
    from transformers import PreTrainedTokenizerBase

PERCENTILES = {"p01": 1, "p25": 25, "median": 50, "p75": 75, "p99": 99, "max": 100}
TOP_SHARES = (0.01, 0.05, 0.1, 0.25)  # shares of a layer's neurons, busiest first
FREQUENCY_QUANTILES = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
# The first tokens of a sequence fire more neurons, so tokens are compared only from this position on, or from T / 4 on
# if that is earlier.
SETTLED = 64
BINS_PER_OCTAVE = 4  # bins of positions, in the fit and in the figure
SCALES = 1_000  # candidates for the scale of the fit
SHOWN = 20  # number of most active tokens, least active tokens, and occurrences listed
CONTEXT = 12  # tokens on either side of an occurrence

Row = dict[str, Any]


def layers(activity: Activity) -> list[Row]:
    """One row per layer: nonzeros per token, how unequally its neurons fire, and the union over tiles of tokens."""
    rows, neurons = [], activity.neurons
    for layer, fired in enumerate(activity.fired):
        counts = activity.nonzeros[..., layer].ravel()
        total = int(fired.sum())
        busiest = np.cumsum(np.sort(fired)[::-1])
        tops = {f"{share:g}": int(busiest[max(1, round(share * neurons)) - 1]) for share in TOP_SHARES}
        percentiles = np.percentile(counts, list(PERCENTILES.values())).tolist()
        frequencies = np.quantile(fired / activity.tokens, FREQUENCY_QUANTILES).tolist()
        rows.append(
            {
                "layer": layer,
                "nonzeros": {"mean": total / activity.tokens, **dict(zip(PERCENTILES, percentiles, strict=True))},
                "zeros": 1 - total / (activity.tokens * neurons),
                "union_per_tile": int(activity.union[layer]) / activity.tiles,
                "dead": int((fired == 0).sum()),
                "share_of_top": {share: top / total if total else None for share, top in tops.items()},
                "frequency_quantiles": dict(zip(map(str, FREQUENCY_QUANTILES), frequencies, strict=True)),
            }
        )
    return rows


def by_position(activity: Activity) -> np.ndarray:
    """Mean nonzeros at each position of a sequence, float64 [T, L]."""
    return activity.nonzeros.mean(0, dtype=np.float64)


def positions(activity: Activity) -> list[Row]:
    """`by_position` in bins: positions 0, 1, 2 to 3, 4 to 7, and so on."""
    means = by_position(activity)
    return [
        {"first": first, "last": after - 1, "nonzeros": means[first:after].mean(0).tolist()}
        for first, after in pairwise(octaves(len(means)))
    ]


def octaves(length: int, per_octave: int = 1) -> list[int]:
    """0, 1, 2, 4, 8, ..., length: the edges of bins of equal width on a logarithmic axis."""
    edges = {round(2 ** (i / per_octave)) for i in range(per_octave * length.bit_length() + 1)}
    return [0, *sorted(edge for edge in edges if edge < length), length]


def position_bins(means: np.ndarray) -> np.ndarray:
    """Means of `means` [T, ...] over bins of equal width on a logarithmic axis, BINS_PER_OCTAVE per octave."""
    edges = octaves(len(means), BINS_PER_OCTAVE)
    return np.stack([means[first:after].mean(0) for first, after in pairwise(edges)])


def position_fit(activity: Activity) -> Row | None:
    """The fit of nonzeros, mean over layers, by floor + amplitude * exp(-position / scale), with position from 0.

    Minimizes the squared relative error over `position_bins`: otherwise the many late positions would outweigh the few
    early ones, where the decay is. For a given scale this is linear least squares; the scale is the best of SCALES.
    None for fewer than five bins, or if nothing fires in one of them.
    """
    means, fits = by_position(activity).mean(1), []
    wanted = position_bins(means)
    if len(wanted) < 5 or not wanted.all():
        return None
    for scale in np.geomspace(0.2, len(means), SCALES).tolist():
        relative = np.stack([1 / wanted, position_bins(np.exp(-np.arange(len(means)) / scale)) / wanted], 1)
        solution, *_ = np.linalg.lstsq(relative, np.ones(len(wanted)))
        error = np.sqrt(np.mean((relative @ solution - 1) ** 2))
        fits.append([float(error), *solution.tolist(), scale])
    return dict(zip(("relative_error", "floor", "amplitude", "scale"), min(fits), strict=True))


def token_classes(activity: Activity, classes: np.ndarray) -> list[Row]:
    """One row per class of `token_classes.classified` that was read from position `settled` on."""
    kinds, nonzeros = (each[:, settled(activity) :] for each in (classes, activity.nonzeros))
    return [
        {
            "class": CLASSES[i],
            "tokens": len(chosen),
            "nonzeros": float(chosen.mean(dtype=np.float64)),
            "nonzeros_per_layer": chosen.mean(0, dtype=np.float64).tolist(),
        }
        for i in np.unique(kinds).tolist()
        for chosen in [nonzeros[kinds == i]]
    ]


def settled(activity: Activity) -> int:
    """The first position from which tokens are compared."""
    return min(SETTLED, activity.blocks.shape[1] // 4)


def token_types(activity: Activity) -> list[Row]:
    """One row per token id read from position `settled` on: its count, and its nonzeros per layer."""
    first, depth = settled(activity), activity.nonzeros.shape[2]
    read = activity.blocks[:, first:].ravel()
    fired = activity.nonzeros[:, first:].sum(-1, dtype=np.int64).ravel()
    counts = np.bincount(read)
    totals = np.bincount(read, weights=fired)  # exact: integer sums far below 2^53
    most = np.zeros_like(counts)
    np.maximum.at(most, read, fired)
    return [
        {"id": i, "count": int(counts[i]), "nonzeros": totals[i] / counts[i] / depth, "max": int(most[i]) / depth}
        for i in np.flatnonzero(counts).tolist()
    ]


def extremes(types: list[Row], min_count: int) -> tuple[list[Row], list[Row]]:
    """The most and the least active tokens among those read at least `min_count` times."""
    common = sorted((row for row in types if row["count"] >= min_count), key=lambda row: (row["nonzeros"], row["id"]))
    return sorted(common[-SHOWN:], key=lambda row: (-row["nonzeros"], row["id"])), common[:SHOWN]


def occurrences(activity: Activity, tokenizer: "PreTrainedTokenizerBase") -> list[Row]:
    """The occurrences of tokens with the most nonzeros, from position `settled` on, with the text around them."""
    first, depth = settled(activity), activity.nonzeros.shape[2]
    fired = activity.nonzeros[:, first:].sum(-1, dtype=np.int64)
    found = []
    for index in np.argsort(-fired, axis=None, kind="stable")[:SHOWN].tolist():
        sequence, offset = divmod(index, fired.shape[1])
        at, block = first + offset, activity.blocks[sequence].tolist()
        found.append(
            {
                "sequence": sequence,
                "position": at,
                "id": block[at],
                "token": spelled(tokenizer, block[at]),
                "nonzeros": int(fired[sequence, offset]) / depth,
                "before": tokenizer.decode(block[max(0, at - CONTEXT) : at]),
                "after": tokenizer.decode(block[at + 1 : at + 1 + CONTEXT]),
            }
        )
    return found


def spelled(tokenizer: "PreTrainedTokenizerBase", token: int) -> str:
    """A token as text, or its vocabulary entry if it is only part of a character."""
    text = tokenizer.decode([token])
    return str(tokenizer.convert_ids_to_tokens(token) if PART_OF_A_CHARACTER in text else text)


def neurons(activity: Activity) -> list[Row]:
    """One row per neuron, by layer and busiest first: the number and the fraction of tokens on which it fired."""
    return [
        {"layer": layer, "rank": rank, "neuron": neuron, "fired": int(fired[neuron]), "frequency": share}
        for layer, fired in enumerate(activity.fired)
        for rank, neuron in enumerate(np.argsort(-fired, kind="stable").tolist())
        for share in [int(fired[neuron]) / activity.tokens]
    ]


def correlation(speeds: list[Row]) -> float | None:
    """Pearson correlation of speedup and nonzeros over layers; None if it is undefined."""
    pairs = np.array([[row["speedup"], row["nonzeros"]] for row in speeds]).T
    if len(speeds) < 2 or not pairs.std(axis=1).all():
        return None
    return float(np.corrcoef(pairs)[0, 1])
