"""Tunes the block sizes of the Triton kernels: picks the fastest on this GPU from a short list."""

from collections.abc import Callable, Iterator

import torch

from sparsellm.ops.gpu_timing import alternating_ms
from sparsellm.ops.plan import Engine
from sparsellm.ops.triton import tuning
from sparsellm.ops.triton.tuning import LARGE, SMALL, Shape, Tuning
from sparsellm.policy.layer import Call, Firing, Layer

TOKENS = 8192
CALL = Call(TOKENS, Firing(0.0065), Engine.tile, training=True)
LISTED: dict[str, tuple[Shape | int, ...]] = {
    "sampled": (SMALL.sampled, LARGE.sampled, Shape(128, 64, 8, 4), Shape(128, 64, 4, 3), Shape(128, 32, 8, 3)),
    "gathered": (SMALL.gathered, LARGE.gathered, Shape(128, 64, 8, 5), Shape(128, 32, 4, 5)),
    "neurons": (64, 128),
    "weights": (SMALL.weights, LARGE.weights, Shape(128, 64, 8, 5)),
    "down_weights": (SMALL.down_weights, LARGE.down_weights, Shape(128, 64, 4, 5)),
    "resident": (1, 2),
}


def find(layer: Layer, advance: Callable[[int], object] = lambda _: None) -> Tuning:
    """The fastest block sizes for a layer's forward and backward pass, tuned one after the other.

    Sizes that need more shared memory or registers than this GPU has are skipped. If not even the package's block sizes
    for this GPU run, Triton's error is raised.
    """
    best = tuning.of(layer.device)[0]
    for name in LISTED:
        listed = {str(each): each for each in others(best, name)}
        times = gpu_milliseconds(layer, listed)
        if isinstance(error := times[str(best)], Exception):
            raise error
        found = {text: ms for text, ms in times.items() if not isinstance(ms, Exception)}
        best = listed[min(found, key=found.__getitem__)]
        advance(1)
    return best


def others(best: Tuning, name: str) -> Iterator[Tuning]:
    """Yields `best`, then `best` with block size `name` set to each other listed value."""
    yield best
    for value in LISTED[name]:
        if value != getattr(best, name):
            yield Tuning(**{**best._asdict(), name: value})


def gpu_milliseconds(layer: Layer, sizes: dict[str, Tuning]) -> dict[str, float | Exception]:
    """Milliseconds of CALL with each of `sizes`, or the exception that CALL raised."""

    def runs(each: Tuning) -> Callable[[int], object]:
        def run(_: int) -> object:
            tuning.use(each, layer.device)
            return layer.run(CALL)

        return run

    try:
        return alternating_ms({name: runs(each) for name, each in sizes.items()}, 40, most=15)
    finally:
        tuning.use(None, layer.device)
        torch.cuda.empty_cache()
