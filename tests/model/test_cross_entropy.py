"""The chunked loss against torch's own on whole logits."""

import pytest
import torch
import torch.nn.functional as F

from sparsellm.model import cross_entropy
from sparsellm.model.cross_entropy import linear_cross_entropy, softmax_cross_entropy


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(cross_entropy, "CHUNK", 7)


def inputs(dtype, m=20, k=16, v=33):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(m, k, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(v, k, generator=generator, dtype=dtype).requires_grad_()
    return x, weight, torch.randint(v, (m,), generator=generator)


def test_loss_and_gradients_equal_those_on_whole_logits():
    x, weight, targets = inputs(torch.float64)
    ours = linear_cross_entropy(x, weight, targets, softmax_cross_entropy) * 0.3
    whole = F.cross_entropy(x @ weight.T, targets, reduction="sum") * 0.3
    torch.testing.assert_close(ours, whole)
    for a, b in zip(*(torch.autograd.grad(loss, [x, weight]) for loss in (ours, whole)), strict=True):
        torch.testing.assert_close(a, b)
    with torch.no_grad():
        without_gradients = linear_cross_entropy(x, weight, targets, softmax_cross_entropy) * 0.3
    torch.testing.assert_close(without_gradients, whole)


def test_bfloat16_is_as_accurate_as_whole_logits_in_float32_softmax():
    x, weight, targets = inputs(torch.float32, m=64, k=64, v=512)
    exact = torch.autograd.grad(
        F.cross_entropy(x.double() @ weight.double().T, targets, reduction="sum") / 3, [x, weight]
    )
    with torch.autocast("cpu", torch.bfloat16):
        ours = torch.autograd.grad(linear_cross_entropy(x, weight, targets, softmax_cross_entropy) / 3, [x, weight])
        dense = torch.autograd.grad(F.cross_entropy((x @ weight.T).float(), targets, reduction="sum") / 3, [x, weight])
    for e, o, d in zip(exact, ours, dense, strict=True):
        assert o.dtype == torch.float32
        assert (o - e).norm() <= 2 * (d - e).norm()


def test_never_holds_more_logits_than_a_chunk():
    largest = 0

    def kernel(logits, targets):
        nonlocal largest
        largest = max(largest, len(logits))
        return softmax_cross_entropy(logits, targets)

    x, weight, targets = inputs(torch.float32)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        linear_cross_entropy(x, weight, targets, kernel)
    assert largest == 7
    assert set(kept) == {x.shape, weight.shape}
