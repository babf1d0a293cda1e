"""A layer of random weights that fires as layers do: a few neurons often, most of them seldom.

Neuron j fires with probability proportional to (j + 1)^-skew, at most MOST_OFTEN, each independently, so that a token
fires `share` of all neurons on average. This is how: the first of the K values of a token is 1, the others are drawn
from a normal distribution, and so is z; and the weight of neuron j by the first value is the quantile of z that is
exceeded with j's probability, negated. So relu(z) is above zero as often as it should be, at any K.

Of 5,632 neurons at skew 1.3, 128 tokens that fire 36 each fire 1,140 together, and with 101 each 2,530: about as many
as in trained layers whose tokens are ordered (950 at 36, 2,640 at 116). With 101 at skew 0.7 they fire 4,200: by such a
pair, the cost of a nonzero and that of a neuron of a union are told apart.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from sparsellm.ops import Plan, feedforward
from sparsellm.ops.feedforward import forward
from sparsellm.ops.plan import Engine
from sparsellm.policy.costs import TILE_MAX_NONZEROS, room_for

MOST_OFTEN = 0.5
SETS = 3  # of weights, which take turns: calls of few tokens should not find theirs in the GPU's cache


class Firing(NamedTuple):
    """share: of the neurons, for the mean token. skew: how unlike the neurons are; 0: all alike."""

    share: float
    skew: float = 1.3

    def per_token(self, neurons: int) -> float:
        """At most as many as the tile engine is chosen for, unless the share is that of few tokens."""
        return self.share * neurons if self.share > 0.1 else min(self.share * neurons, 0.9 * TILE_MAX_NONZEROS)


class Call(NamedTuple):
    """One call of a layer, forward or forward and backward, by one engine."""

    tokens: int
    firing: Firing
    engine: Engine
    training: bool


class Layer:
    """Inputs and weights of a layer with `width` K and `neurons` N, for calls of up to `tokens` tokens."""

    def __init__(self, width: int, neurons: int, tokens: int, device: torch.device, dtype: torch.dtype) -> None:
        self.width, self.neurons, self.device, self.dtype = width, neurons, device, dtype
        self.generator = torch.Generator(device).manual_seed(0)
        self.x = self._normal(tokens, width)
        self.x[:, 0] = 1
        self.dy = self._normal(tokens, width)
        self.ups = [self._normal(neurons, width) / math.sqrt(width) for _ in range(SETS)]
        self.downs = [self._normal(width, neurons) / math.sqrt(neurons) for _ in range(SETS)]
        self.downs_t = [down.T.contiguous() for down in self.downs]
        self.gate = self._normal(neurons, width) / math.sqrt(width - 1)
        self.gates: dict[Firing, Tensor] = {}
        self.turn = 0

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device, dtype=self.dtype)

    def gate_of(self, firing: Firing) -> Tensor:
        """w_gate [N, K] that fires so."""
        if firing not in self.gates:
            probabilities = frequencies(self.neurons, firing).to(self.device)
            gate = self.gate.clone()
            gate[:, 0] = -torch.special.ndtri(1 - probabilities).to(self.dtype)
            self.gates[firing] = gate
        return self.gates[firing]

    def counts(self, call: Call) -> tuple[float, float]:
        """(nonzeros, union) of a call, as its engine counts them. Waits for the device."""
        results = self._forward(call, counting=True)
        nonzeros, _, _, union = results[3].tolist()
        return nonzeros, union

    def run(self, call: Call) -> object:
        """The call, once: without waiting for the device, and with weights of its own turn."""
        if not call.training:
            return self._forward(call, counting=call.engine != Engine.dense)
        with torch.enable_grad():
            gate, up, down = (w.detach().requires_grad_() for w in self._weights(call)[:3])
            x, dy = self.x[: call.tokens].detach().requires_grad_(), self.dy[: call.tokens]
            out = feedforward(x, gate, up, down, self._plan(call))
            dl1 = torch.ones_like(out.l1) / call.tokens
            return torch.autograd.grad((out.y, out.l1), (x, gate, up, down), (dy, dl1))

    def _forward(self, call: Call, counting: bool) -> tuple[Tensor, ...]:
        gate, up, down, down_t = self._weights(call)
        x = self.x[: call.tokens]
        with torch.no_grad():
            return forward(x, gate, up, down, self._plan(call), down_t, False, counting)

    def _weights(self, call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        self.turn = (self.turn + 1) % SETS
        return self.gate_of(call.firing), self.ups[self.turn], self.downs[self.turn], self.downs_t[self.turn]

    def _plan(self, call: Call) -> Plan:
        return Plan(call.engine, room_for(call.firing.per_token(self.neurons)))


def frequencies(neurons: int, firing: Firing) -> Tensor:
    """float64 [N]: how often each neuron fires; their sum is `firing.per_token`."""
    wanted = min(firing.per_token(neurons), MOST_OFTEN * neurons)
    rates = torch.arange(1, neurons + 1, dtype=torch.float64) ** -firing.skew
    low, high = 0.0, wanted / float(rates[-1])  # of what the rates are multiplied by; the cap makes it a search
    for _ in range(60):
        middle = (low + high) / 2
        if float((middle * rates).clamp(max=MOST_OFTEN).sum()) < wanted:
            low = middle
        else:
            high = middle
    return (high * rates).clamp(max=MOST_OFTEN)
