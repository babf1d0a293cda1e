"""Which engine computes a layer outside of training, chosen by what its own calls have counted.

Each accelerated block has an `EngineChoice`. Now and then a call's counts are copied to the host without waiting; a
later call finds them there and chooses for the calls after it, separately for calls of few tokens (decoding) and of
many; between the two a call stays dense (sparsellm.ops.dispatch). So the host never waits, and the choice, and with it
the last bits, may differ from run to run. While a CUDA graph is captured nothing is counted, and W_d is not copied: the
graph keeps the engines it was captured with, chosen by what the calls before it counted.

Compiled code calls the registered operator `torch.ops.sparsellm.chosen_feedforward`, which is told the layer by a
`handle`, a small tensor on the layer's device whose address says whose call it is. All of the above happens inside of
the operator when it runs: nothing is traced, no hook breaks a graph, and a new choice recompiles nothing. (A number in
the handle's place would be a constant of the graph, and layers that share code would compile once each; a plan on the
CPU would keep torch's own CUDA graphs away.)
"""

import threading
import weakref
from functools import lru_cache
from typing import NamedTuple
from warnings import warn

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsellm.ops import Engine, Plan, choose_engine
from sparsellm.ops.dispatch import FEW_TOKENS, MANY_TOKENS, fuses, room_for
from sparsellm.ops.feedforward import check, fake_results, forward

COUNT_EVERY = 64  # calls of few tokens, and of many: one is counted, which takes twice the host's time
UNDER_WAY = -1  # in place of counts that have not arrived
DENSE = Plan()

Results = tuple[Tensor, Tensor, Tensor, Tensor]


class NeuronMajor(NamedTuple):
    """W_d as the sparse engines read it: one contiguous row of K values for each neuron."""

    weight: Tensor  # [N, K], the dtype of w_down
    source: Tensor  # w_down itself, kept alive so that no other tensor can take its place in memory
    state: tuple[int, int]  # w_down's `state_of` when it was copied

    @classmethod
    def of(cls, w_down: Tensor, into: Tensor | None) -> "NeuronMajor":
        """w_down [K, N] transposed, without gradients; in the memory of `into` where that is as large and alike."""
        source = w_down.detach()
        wanted = source.t()
        if into is None or (into.shape, into.dtype, into.device) != (wanted.shape, wanted.dtype, wanted.device):
            return cls(wanted.contiguous(), source, state_of(w_down))
        return cls(into.copy_(wanted), source, state_of(w_down))


def state_of(weight: Tensor) -> tuple[int, int]:
    """(address, version): which tensor a weight is, and how often it has been changed in place.

    Raises ValueError for a tensor made in inference mode, which has no version to tell a stale copy by.
    """
    if weight.is_inference():
        raise ValueError("a weight of an accelerated model was made in inference mode: make it outside of it")
    return weight.data_ptr(), weight._version


class EngineChoice:
    """One layer's plans, the copy of W_d that sparse engines read, and the counts that are on their way to the host."""

    def __init__(self, engine: str | None) -> None:
        """engine: the name of the one that is always taken, or None: as counted."""
        self.engine = engine
        # Until measured, few tokens are taken to be sparse and many to be dense.
        self.plans = [Plan.of(engine or "row"), Plan.of(engine or "dense")]
        self.calls = [0, 0]
        self.w_down_t: NeuronMajor | None = None
        self.counted = 0  # tokens of the call whose counts are on their way; 0: none are
        self.counts: Tensor | None = None  # int64 [4] on the host, pinned where the layer is on a GPU
        self.deciding = threading.Lock()  # of several threads that call the layer at once, one counts

    def __getstate__(self) -> dict:
        """For copies of the model: what is on its way stays with the original."""
        return {"engine": self.engine, "plans": list(self.plans)}

    def __setstate__(self, state: dict) -> None:
        self.__init__(state["engine"])
        self.plans = state["plans"]

    def run(self, x: Tensor, w_gate: Tensor | None, w_up: Tensor, w_down: Tensor) -> Results:
        """(y, l1, fired, counts) of sparsellm.ops.feedforward, without gradients; inputs as that checks them."""
        return self._run(x, w_gate, w_up, w_down, *self._plan(x))

    def output(self, x: Tensor, w_gate: Tensor | None, w_up: Tensor, w_down: Tensor) -> Tensor:
        """y of `run`, whose statistics nobody asks for: where nothing is counted either, fewer launches give it."""
        plan, counting = self._plan(x)
        if plan.engine != Engine.dense or counting or fuses(x.shape[0]) or w_down.dtype != x.dtype:
            return self._run(x, w_gate, w_up, w_down, plan, counting)[0]
        h = F.linear(x, w_up if w_gate is None else w_gate).relu_()
        if w_gate is not None:
            h.mul_(F.linear(x, w_up))
        return F.linear(h, w_down)

    def _plan(self, x: Tensor) -> tuple[Plan, bool]:
        """The plan of a call, and whether its counts are to be sent."""
        m = x.shape[0]
        kind = int(m >= MANY_TOKENS)
        if not sparse_engines_take(x):
            self.w_down_t = None  # the memory of a copy that was made when the model was of another dtype
            if x.is_cuda and self.engine is None:
                _say_dense(x.dtype)
            return (DENSE if self.engine is None else self.plans[kind]), False
        if self.engine is not None:
            return self.plans[kind], False
        if not has_choice(m):
            return DENSE, False
        if self.counted:
            self._read()
        due = self.calls[kind] % COUNT_EVERY == 0
        self.calls[kind] += 1
        return self.plans[kind], due and not self.counted

    def _run(
        self, x: Tensor, w_gate: Tensor | None, w_up: Tensor, w_down: Tensor, plan: Plan, counting: bool
    ) -> Results:
        w_down_t = None
        if plan.engine != Engine.dense and w_down.dtype == x.dtype and sparse_engines_take(x):
            w_down_t = self.neuron_major(w_down).weight
        results = forward(x, w_gate, w_up, w_down, plan, w_down_t, False)[:4]
        if counting:
            self._send(x.shape[0], results[3], w_up)
        return results

    def neuron_major(self, w_down: Tensor) -> NeuronMajor:
        """W_d by neuron, of the weight as it is now: made anew, in the same memory, if the weight has changed."""
        kept = self.w_down_t
        if kept is not None and kept.state == state_of(w_down):
            return kept
        if is_capturing():
            raise ValueError(
                "a weight of an accelerated model changed since its last call, and a CUDA graph is being captured: call"
                " the model once before the capture"
            )
        with torch.inference_mode(False):
            self.w_down_t = NeuronMajor.of(w_down, None if kept is None else kept.weight)
        return self.w_down_t

    @torch.inference_mode(False)  # a tensor made in inference mode could not be written outside of it
    def _send(self, m: int, counts: Tensor, weight: Tensor) -> None:
        """Start the copy of a call's counts to the host."""
        if is_capturing() or not self.deciding.acquire(blocking=False):
            return
        try:
            if self.counted:
                return
            if self.counts is None:
                self.counts = torch.empty(4, dtype=torch.int64, pin_memory=counts.is_cuda)
            self.counts.fill_(UNDER_WAY)
            self.counts.copy_(counts.detach(), non_blocking=True)
            self.size = weight.shape
            self.counted = m
        finally:
            self.deciding.release()

    def _read(self) -> None:
        """Choose by the counts that were sent, if they are there: the copy has then written over every UNDER_WAY.

        No event is asked, for that is forbidden while a graph is captured; and what is captured should be chosen by
        what the call before it, torch's warm-up, has counted.
        """
        if not self.deciding.acquire(blocking=False):
            return
        try:
            nnz, *others, union = self.counts.tolist()
            if self.counted and UNDER_WAY not in (nnz, *others, union):
                m, self.counted = self.counted, 0
                neurons, width = self.size
                kind = int(m >= MANY_TOKENS)
                engine = choose_engine(m, width, neurons, nnz, union, current=self.plans[kind].engine)
                self.plans[kind] = Plan(Engine(engine), room_for(nnz / m))
        finally:
            self.deciding.release()


def has_choice(tokens: int) -> bool:
    """Whether a call of so many tokens may take a sparse engine: few may, and many; between the two it stays dense."""
    return not FEW_TOKENS < tokens < MANY_TOKENS


def sparse_engines_take(tensor: Tensor) -> bool:
    return tensor.is_cuda and tensor.dtype == torch.bfloat16


def is_capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


@lru_cache
def _say_dense(dtype: torch.dtype) -> None:
    warn(
        f"the accelerated model computes in {dtype}, so its feedforward blocks run dense: the sparse kernels compute in"
        " bfloat16; load it with dtype=torch.bfloat16",
        stacklevel=2,
    )


# Compiled code.

_choices: weakref.WeakValueDictionary[int, EngineChoice] = weakref.WeakValueDictionary()  # by their handles' addresses


def register(handle: Tensor, choice: EngineChoice) -> None:
    """Let compiled code find `choice` by the address of `handle`, which must live as long."""
    _choices[handle.data_ptr()] = choice


def _choice_of(handle: Tensor) -> EngineChoice:
    choice = _choices.get(handle.data_ptr())
    if choice is None:
        raise ValueError(
            "handle is not of an accelerated block that still exists: compile the model as it is now, after"
            " sparsellm.accelerate and after moving it to its device"
        )
    return choice


@torch.library.custom_op("sparsellm::chosen_feedforward", mutates_args=())
def _chosen_feedforward(
    x: Tensor, w_gate: Tensor | None, w_up: Tensor, w_down: Tensor, handle: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    check(x, w_gate, w_up, w_down, cast=True)
    return _choice_of(handle).run(x, w_gate, w_up, w_down)


@_chosen_feedforward.register_fake
def _(x, w_gate, w_up, w_down, handle):
    return fake_results(x, w_down.shape[1])


@torch.library.custom_op("sparsellm::chosen_output", mutates_args=())
def _chosen_output(x: Tensor, w_gate: Tensor | None, w_up: Tensor, w_down: Tensor, handle: Tensor) -> Tensor:
    check(x, w_gate, w_up, w_down, cast=True)
    return _choice_of(handle).output(x, w_gate, w_up, w_down)


@_chosen_output.register_fake
def _(x, w_gate, w_up, w_down, handle):
    return fake_results(x, w_down.shape[1])[0]
