"""A layer with random weights whose sparsity resembles a trained layer: a few neurons fire often, most rarely.

Neuron j fires independently with a probability proportional to (j + 1)^-skew, capped at MOST_OFTEN, so that a token
activates `share` of all neurons on average. To achieve this, the first of a token's K values is 1 and the other values
are normally distributed, so the sum z of their products with gate weights is normally distributed too. The gate weight
of neuron j for the first value shifts z so that relu(z) > 0 with exactly the neuron's probability, at any K.

Example with 5,632 neurons and skew 1.3: 128 tokens with 36 active neurons each have a union of 1,140 different neurons,
and a union of 2,530 with 101 active neurons each. Trained layers with ordered tokens are similar (950 at 36, 2,640 at
116). At skew 0.7, 101 active neurons each give a union of 4,200. Timing both skews separates the cost of a nonzero from
the cost of a neuron of the union.
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
SETS = 3  # sets of weights used in turn, so that a call of few tokens does not find its weights in the L2 cache


class Firing(NamedTuple):
    """share: fraction of neurons active in the mean token. skew: how much the neurons' frequencies differ; 0: equal."""

    share: float
    skew: float = 1.3

    def per_token(self, neurons: int) -> float:
        """Active neurons per token, limited to what the tile engine may compute. Shares above 0.1, which only calls of
        few tokens use, are not limited."""
        return self.share * neurons if self.share > 0.1 else min(self.share * neurons, 0.9 * TILE_MAX_NONZEROS)


class Call(NamedTuple):
    """One call of a layer on one engine: forward, or forward and backward."""

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
        """w_gate [N, K] with the sparsity that `firing` describes."""
        if firing not in self.gates:
            probabilities = frequencies(self.neurons, firing).to(self.device)
            gate = self.gate.clone()
            gate[:, 0] = -torch.special.ndtri(1 - probabilities).to(self.dtype)
            self.gates[firing] = gate
        return self.gates[firing]

    def counts(self, call: Call) -> tuple[float, float]:
        """(nonzeros, union) of a call, as its engine counts them. Waits for the device."""
        results = self._forward(call, counting=True)
        nonzeros, _, _, union, _ = results[3].tolist()
        return nonzeros, union

    def run(self, call: Call) -> object:
        """Run the call once, with the next set of weights, without waiting for the device."""
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
    low, high = 0.0, wanted / float(rates[-1])  # bounds of the factor of `rates`; the cap requires a bisection
    for _ in range(60):
        middle = (low + high) / 2
        if float((middle * rates).clamp(max=MOST_OFTEN).sum()) < wanted:
            low = middle
        else:
            high = middle
    return (high * rates).clamp(max=MOST_OFTEN)
