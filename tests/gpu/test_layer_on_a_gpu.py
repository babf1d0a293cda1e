"""SparseFeedForward and accelerate(training=True) on a GPU: gradients of the tile engine, however a loop calls the
layer; engines chosen at an optimizer's steps, without waiting in a forward or backward pass; CUDA graphs."""

import copy

import kernel_cases as cases
import pytest
import torch
from kernel_cases import DEVICE, no_waiting
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

import sparsellm
from sparsellm.ops import Engine, Plan
from sparsellm.policy import Policy

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels")]
M, K, N = 2048, 256, 1024
TILE = Plan.of("tile").tensor()


def made(gated=True, dtype=torch.float32):
    """(x [2, M / 2, K] with a gradient, a layer in which a tenth of the neurons fire)"""
    x, ws = cases.normal(M, K, N, gated)
    layer = sparsellm.SparseFeedForward(K, N, gated).to(DEVICE, dtype)
    with torch.no_grad():
        for parameter, weight in zip(layer.parameters(), ws, strict=True):
            parameter.copy_(weight)
    return x.view(2, -1, K).requires_grad_(), layer


def gradients(layer, x, call=None):
    """y and the gradients of x and the weights, in float32."""
    with torch.autocast("cuda", torch.bfloat16):
        y = (layer if call is None else call)(x)
        loss = y.float().square().sum() + 0.1 * layer.l1()
    return [each.float() for each in (y, *torch.autograd.grad(loss, [x, *layer.parameters()]))]


def assert_close(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        # The engines sum in another order, and round a few intermediate values to bfloat16.
        assert (ours - theirs).norm() <= 8 * torch.finfo(torch.bfloat16).eps * theirs.norm()


@pytest.mark.parametrize("way", ["eager", "recomputed", "compiled"])
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "nongated"])
def test_the_tile_engine_has_the_gradients_of_pytorch(gated, way):
    torch._dynamo.reset()
    x, layer = made(gated)
    layer.traced = True
    expected = gradients(layer, x)
    layer.traced = False
    layer.in_training.plan.copy_(TILE)
    calls = {
        "eager": layer,
        "recomputed": lambda x: checkpoint(layer, x, use_reentrant=False),
        "compiled": torch.compile(layer, fullgraph=True) if way == "compiled" else None,
    }
    assert_close(gradients(layer, x, calls[way]), expected)
    assert layer.in_training.last.rest_calls == 0


def test_a_layer_goes_over_to_the_tile_engine_and_only_the_decision_waits(monkeypatch):
    monkeypatch.setattr(Policy, "choose_training_engine", staticmethod(lambda *_, current: Engine.tile))
    x, layer = made()
    optimizer, engines = torch.optim.AdamW(layer.parameters(), 0.0), []
    for number in range(1, 4):
        engines.append(Plan.read(layer.in_training.plan).engine.name)
        with no_waiting(number > 1), torch.autocast("cuda", torch.bfloat16):
            (layer(x).float().square().sum() + layer.l1()).backward()
        optimizer.step()
    assert engines == ["dense", "dense", "tile"]
    assert layer.counts()["nonzeros"] == pytest.approx(0.1 * N, rel=0.2)


def test_a_cuda_graph_replays_the_engine_of_its_capture():
    x, layer = made(dtype=torch.bfloat16)
    layer.in_training.plan.copy_(TILE)

    def passes():
        y = layer(x)
        loss = y.float().square().sum() + layer.l1()
        return y, *torch.autograd.grad(loss, [x, *layer.parameters()])

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            passes()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = passes()
    with torch.no_grad():
        x.copy_(x.flip(1))
    graph.replay()
    for ours, expected in zip(captured, passes(), strict=True):
        torch.testing.assert_close(ours, expected)


def test_an_accelerated_model_trains_on_the_tile_engine(monkeypatch):
    monkeypatch.setattr(Policy, "choose_training_engine", staticmethod(lambda *_, current: Engine.tile))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=K, intermediate_size=N // 4, num_hidden_layers=2, num_attention_heads=4,
        hidden_act="relu", initializer_range=0.1,
    )  # fmt: skip
    theirs = LlamaForCausalLM(config).to(DEVICE)
    ours = sparsellm.accelerate(copy.deepcopy(theirs), "cuda", calibrate=False, training=True)
    ids = torch.randint(96, (16, 128), device=DEVICE, generator=cases.random(0))
    optimizer = torch.optim.SGD(ours.parameters(), 0.0)
    for model in (ours, ours, ours, theirs):
        model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()  # with a learning rate of 0
    blocks = [layer.mlp for layer in ours.model.layers]
    assert [block.counts()["engine"] for block in blocks] == ["tile"] * 2
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert (mine.grad - other.grad).norm() <= 0.05 * other.grad.norm()
