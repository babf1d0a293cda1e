"""A machine whose engines take what simple laws say, and a GPU as far as the cache looks."""

import random

import torch

from sparsellm.ops import Engine, backend
from sparsellm.ops.borders import MANY_TOKENS
from sparsellm.policy.choice import packaged
from sparsellm.policy.layer import Call, Layer, frequencies

K, N = 2048, 5632
CPU = torch.device("cpu")


class Machine:
    """Times by the H200's constants, `slower` times as long in the sparse engines, and up to 1.5% off."""

    def __init__(self, slower: float = 1.0, memory: int = 1 << 20) -> None:
        self.slower, self.memory, self.random, self.asked = slower, memory, random.Random(0), []

    def seconds(self, call: Call) -> float:
        tokens, engine = call.tokens, call.engine
        nonzeros, union = counts(call)
        if call.training or tokens >= MANY_TOKENS:
            taken = packaged("cuda", K, N).estimates(tokens, call.training)[engine].cost.seconds(nonzeros, union)
        elif engine == Engine.row:
            taken = 9e-6 + tokens * 6e-9 + 1.2e-9 * nonzeros
        else:
            taken = 18e-6 + tokens * 57e-9
        return taken * (1 if engine == Engine.dense else self.slower)

    def milliseconds(self, calls):
        self.asked += calls
        if any(call.tokens > self.memory for call in calls):
            return [None] * len(calls)
        return [1e3 * self.seconds(call) * self.random.uniform(0.985, 1.015) for call in calls]


def counts(call: Call) -> tuple[float, float]:
    """What such a call counts on average."""
    rates = frequencies(N, call.firing)
    union = float((1 - (1 - rates) ** min(128, call.tokens)).sum()) * -(-call.tokens // 128)
    return call.tokens * float(rates.sum()), union


def a_gpu(monkeypatch, cache):
    """Fakes a GPU that runs the CUDA kernels, as far as the store can tell; `cache` is the cache folder."""
    monkeypatch.setenv("SPARSELLM_CACHE_DIR", str(cache))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200 (test)")
    monkeypatch.setattr(backend, "loaded", lambda: "cuda")


def layer_of(width, neurons):
    layer = Layer(8, 8, 1, CPU, torch.float32)
    layer.width, layer.neurons, layer.counts = width, neurons, counts
    return layer
