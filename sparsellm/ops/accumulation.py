"""What the micro-batches of one optimizer step share, so that each of them does less.

Inside `accumulating(weights)`, the feedforward operator

    keeps casts   the bfloat16 copies of weights that the first micro-batch makes serve all others, forward and backward
    adds          backward adds a weight's gradient to the sum over the earlier micro-batches, in place, and returns the
                  sum as its gradient, so that autograd has nothing to add

Results are the same, bit for bit, with one exception: where tiles overflow, the gradients of w_gate and w_up are added
in another order. The operator finds copies and sums by the weight's address, because it receives only tensors, and its
backward may run on another thread.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


class Accumulation:
    """Casts and gradient sums of `weights`, while one step's micro-batches run."""

    def __init__(self, weights: Sequence[Tensor], keeps_casts: bool) -> None:
        self.weights = {weight.data_ptr(): weight for weight in weights}
        self.keeps_casts = keeps_casts
        # (the weight's version, its copy), by the weight's address and the copy's layout
        self.casts: dict[tuple[int, str], tuple[int, Tensor]] = {}
        self.sums: dict[int, Tensor] = {}  # the gradients of earlier micro-batches by the address of the weight

    def next_micro_batch(self) -> None:
        """Call before each micro-batch. Its backward pass must reach all weights."""
        self.check()
        for address, weight in self.weights.items():
            if weight.grad is not None:
                self.sums[address], weight.grad = weight.grad, None

    def check(self) -> None:
        """Raise RuntimeError if the last backward pass did not reach a weight, whose gradient would be lost."""
        if self.sums:
            shapes = sorted({tuple(self.weights[address].shape) for address in self.sums})
            raise RuntimeError(
                f"{len(self.sums)} weights of shape {', '.join(map(str, shapes))} got no gradient from a micro-batch:"
                " every micro-batch should pass backward through all of them"
            )


_current = Accumulation([], False)  # of this process's trainer; without weights between steps


@contextmanager
def accumulating(weights: Sequence[Tensor], keeps_casts: bool) -> Iterator[Accumulation]:
    """Within this context, the micro-batches of a step share what this module's docstring describes.

    weights: of feedforward layers that the registered operator computes, which must receive these tensors, not copies
    of them; contiguous and unsharded, and not changed within the context.
    keeps_casts: whether to keep copies in the compute dtype, which take half of the memory of float32 weights.
    """
    global _current
    _current = Accumulation(weights, keeps_casts)
    try:
        yield _current
        _current.check()
    finally:
        _current = Accumulation([], False)


def shared(weight: Tensor, layout: str, make: Callable[[], Tensor]) -> Tensor:
    """`make()`, a copy of `weight` in a layout that has this name; or the copy that an earlier call made and kept."""
    now = _current
    if not now.keeps_casts or weight.data_ptr() not in now.weights:
        return make()
    key = weight.data_ptr(), layout
    version, copy = now.casts.get(key, (None, None))
    if copy is None or version != weight._version:
        copy = make()
        now.casts[key] = weight._version, copy
    return copy


def sum_of(weight: Tensor) -> Tensor | None:
    """The gradient of earlier micro-batches, or None. The caller must add to it and return it."""
    return _current.sums.pop(weight.data_ptr(), None)


def added(total: Tensor | None, gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum `total` after adding `gradient` in place, unless `gradient` is `total`, to which an engine has added
    already. Without a sum, `gradient` in `dtype`."""
    if total is None:
        return gradient.to(dtype).contiguous()
    return total if gradient is total else total.add_(gradient)
