"""The micro-batches of a step share casts of weights and sums of gradients, with the same results, bit for bit."""

import sys
from itertools import pairwise

import pytest
import torch
from torch import nn

from sparsellm.ops import Plan, accumulation, cuda, feedforward
from sparsellm.ops.accumulation import accumulating

M, K, N = 24, 16, 40
LAYERS = pytest.mark.parametrize("gated", [True, False], ids=["gated", "nongated"])


class Layer(nn.Module):
    def __init__(self, gated, plan):
        super().__init__()
        shapes = [(N, K), (N, K), (K, N)][0 if gated else 1 :]
        self.weights = nn.ParameterList([torch.randn(shape) for shape in shapes])
        self.plan = plan.tensor()

    def forward(self, x):
        *gate, up, down = self.weights
        out = feedforward(x, *(gate or [None]), up, down, self.plan)
        return out.y.float().square().sum() + 0.1 * out.l1


def layer(gated=True, plan=None, seed=0):
    torch.manual_seed(seed)
    return Layer(gated, plan or Plan.of("dense"))


def micro_batches(count=4):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(M, K, generator=generator) for _ in range(count)]


def step(model, run=None, shares=True, keeps_casts=True, after=lambda model: None):
    """The gradients of a step of four micro-batches, under autocast."""
    weights = list(model.weights) if shares else []
    with accumulating(weights, keeps_casts) as shared:
        for x in micro_batches():
            shared.next_micro_batch()
            with torch.autocast("cpu", torch.bfloat16):
                loss = (model if run is None else run)(x)
            loss.backward()
            after(model)
    return [w.grad for w in model.weights]


def assert_same(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


@LAYERS
@pytest.mark.parametrize("way", ["eager", "compiled"])
def test_the_gradients_of_a_step_are_those_that_autograd_adds(gated, way):
    expected = step(layer(gated), shares=False)
    assert all(gradient.count_nonzero() > 0 for gradient in expected)
    model = layer(gated)
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if way == "compiled" else model
    assert_same(step(model, run), expected)


@LAYERS
@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("engine", ["dense", "tile"])
@pytest.mark.parametrize("keeps_casts", [True, False])
def test_the_driver_of_the_kernels_adds_and_shares(gated, engine, keeps_casts, monkeypatch):
    """`cuda.forward` and `cuda.backward`, in the way of the operator."""
    monkeypatch.setattr(sys.modules["sparsellm.ops.feedforward"], "_kernels", lambda *_: cuda)
    plan = Plan.of(engine)
    made, readable = [], cuda.readable
    monkeypatch.setattr(
        cuda, "readable", lambda t, *dtype: (made.append((t.data_ptr(), dtype)), readable(t, *dtype))[1]
    )
    expected = step(layer(gated, plan), shares=False)
    without, model = len(made), layer(gated, plan)
    made.clear()
    assert_same(step(model, keeps_casts=keeps_casts), expected)
    casts = [address for address, dtype in made if address in {w.data_ptr() for w in model.weights}]
    each = len(model.weights)
    assert len(casts) == (each if keeps_casts else 8 * each)  # four micro-batches, forward and backward
    assert len(made) == without - (7 * each if keeps_casts else 0)


@pytest.mark.parametrize("way", ["eager", "inductor"])
def test_sums_are_added_in_place_and_nothing_is_copied(way):
    """Autograd takes the sum that backward returns as the weight's gradient, without a copy."""
    where, model = [], layer()
    run = torch.compile(model, fullgraph=True) if way == "inductor" else None
    step(model, run, after=lambda model: where.append([w.grad.data_ptr() for w in model.weights]))
    assert len(where) == 4
    assert all(earlier == later for earlier, later in pairwise(where))


def test_a_weight_without_a_gradient_from_a_micro_batch_is_an_error():
    model, other = layer(), layer(seed=1)
    models = iter([model, model, other])
    with pytest.raises(RuntimeError, match=r"3 weights of shape \(16, 40\), \(40, 16\) got no gradient"):
        step(model, run=lambda x: next(models)(x))
    assert_same(step(layer()), step(layer(), shares=False))  # nothing of it is left


def test_an_error_inside_a_step_leaves_nothing_behind():
    model = layer()

    def fails(_):
        raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        step(model, after=fails)
    assert accumulation.sum_of(model.weights[0]) is None
    made = []
    for _ in range(2):
        accumulation.shared(model.weights[0], "cast", lambda: made.append(1) or torch.zeros(1))
    assert len(made) == 2


def test_a_weight_that_changes_is_cast_anew():
    weight, made = nn.Parameter(torch.ones(3)), []

    def make():
        made.append(weight.detach().bfloat16())
        return made[-1]

    with accumulating([weight], keeps_casts=True):
        assert accumulation.shared(weight, "cast", make) is accumulation.shared(weight, "cast", make) is made[0]
        with torch.no_grad():
            weight += 1
        assert accumulation.shared(weight, "cast", make).tolist() == [2, 2, 2]
        other = torch.ones(3)
        accumulation.shared(other, "cast", make), accumulation.shared(other, "cast", make)
    assert len(made) == 4


def test_a_weight_of_two_layers_gets_the_gradients_of_both():
    def twice(model):
        return lambda x: model(x) + model(0.5 * x)

    expected, model = (layer(), layer())
    assert_same(step(model, twice(model)), step(expected, twice(expected), shares=False))
