"""Chooses the engine of a layer outside of training, from the counts of the layer's own earlier calls.

Each accelerated block has an `EngineChoice`. One in COUNT_EVERY calls starts to copy its counts to the host, and does
not wait for the copy. A later call reads the counts, and chooses the engine for itself and for the calls after it.
Calls of few tokens (decoding), of many tokens, and of token counts in between are counted and chosen separately
(sparsellm.ops.borders). For few and for many tokens, the plan is stored. Token counts in between, 65 to 1,535, differ
too much for one plan, so the nonzeros per token are stored, and each call's engine is chosen from this density and the
call's number of tokens.

The host never waits for counts, so the call at which a new choice takes effect may differ between runs, and with it the
last bits of results. During a CUDA graph capture nothing is counted and W_d is not copied: the graph keeps the engines
of its capture, chosen from the counts of earlier calls.

Compiled code calls the registered operator `torch.ops.sparsellm.chosen_feedforward` and passes a `handle`: a one-byte
tensor on the layer's device, whose address identifies the layer. The operator looks up the layer's choice at run time,
so the choice is not traced, no hook breaks a graph, and a new choice recompiles nothing. Two alternatives fail. A
Python number instead of the handle would be a constant of the graph, so every layer would be compiled separately. A
plan on the CPU would prevent torch from using CUDA graphs.
"""

import threading
import weakref
from collections.abc import Callable
from functools import lru_cache
from typing import Generic, NamedTuple, TypeVar
from warnings import warn

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsellm.ops import Engine, Plan, backend, cuda
from sparsellm.ops.borders import FEW_TOKENS, MANY_TOKENS, fuses
from sparsellm.ops.cuda import COUNTS
from sparsellm.ops.feedforward import check, fake_results, forward, in_forward_mode
from sparsellm.ops.float8_gate import Float8Rows
from sparsellm.ops.float8_weights import Float8Layer
from sparsellm.policy import Policy
from sparsellm.policy.costs import room_for

FEW, BETWEEN, MANY = range(3)  # kinds of calls, by number of tokens
# One in this many calls of each kind is counted. Counting costs as much host time as the call itself, so few calls are
# counted where calls are host-bound, as in decoding. Calls of many tokens are device-bound and are counted more often,
# because those that overflow the tile engine's lists take longer than dense until a count enlarges the lists.
COUNT_EVERY = (64, 64, 16)
UNDER_WAY = -1  # placeholder for counts that have not arrived
DENSE, ROW = Plan(), Plan.of("row")

Results = tuple[Tensor, Tensor, Tensor, Tensor]
T = TypeVar("T")


class Copy(NamedTuple, Generic[T]):
    """A weight in another layout or dtype, and which weight it was made from."""

    weight: T
    source: Tensor  # the weight itself, kept alive so that its address is not reused
    state: tuple[int, int]  # `state_of(source)` at the time of the copy


def current(kept: Copy[T] | None, source: Tensor, make: Callable[[Tensor, T | None], T]) -> Copy[T]:
    """`kept` if `source` has not changed since, otherwise a new copy, made by `make(source, old)` in the memory of the
    old one, because CUDA graphs read this memory. The host waits for the copy, because other threads may use it
    immediately on other streams.

    Raises ValueError if a copy is needed during a CUDA graph capture.
    """
    if kept is not None and kept.state == state_of(source):
        return kept
    if is_capturing():
        raise ValueError(
            "a weight of an accelerated model changed since its last call, and a CUDA graph is being captured: call"
            " the model once before the capture"
        )
    state = state_of(source)  # read before copying, so that a change during the copy makes the copy stale
    with torch.inference_mode(False):
        detached = source.detach()
        weight = make(detached, None if kept is None else kept.weight)
    if source.is_cuda:
        torch.cuda.current_stream(source.device).synchronize()
    return Copy(weight, detached, state)


def transposed(w_down: Tensor, old: Tensor | None) -> Tensor:
    """W_d in the layout of the sparse engines, [N, K]: one contiguous row of K values per neuron."""
    wanted = w_down.t()
    if old is None or (old.shape, old.dtype, old.device) != (wanted.shape, wanted.dtype, wanted.device):
        return wanted.contiguous()
    return old.copy_(wanted)


def in_float8(weight: Tensor, old: Float8Rows | None) -> Float8Rows:
    """The weight of the gate product, rounded to FP8."""
    rows = cuda.quantize_rows(cuda.readable(weight))
    if old is None or (old.values.shape, old.values.device) != (weight.shape, weight.device):
        return rows
    return Float8Rows(old.values.copy_(rows.values), old.scales.copy_(rows.scales))


def state_of(weight: Tensor) -> tuple[int, int]:
    """(address, version): which tensor a weight is, and how often the tensor was changed in place. A copy is stale if
    its source's state has changed since. In-place writes through `weight.data` are not detected, because `weight.data`
    has a version counter of its own.

    Raises ValueError for a tensor created in inference mode, which has no version.
    """
    if weight.is_inference():
        raise ValueError(
            "a weight of an accelerated model was created in inference mode: create it outside of inference mode"
        )
    return weight.data_ptr(), weight._version


class Checked(NamedTuple):
    """A block's weights that passed the check: bfloat16, contiguous and aligned, on a GPU on which the CUDA kernels
    run. The same tensor objects may change later: `model.to(...)` and similar calls make the block forget what was
    checked (SparseFeedForward._apply), and `weight.data = ...` changes an address."""

    w_gate: Tensor | None
    w_up: Tensor
    w_down: Tensor
    width: int  # K
    device: torch.device
    addresses: tuple[int, int]  # data pointers of w_gate (0 if not gated) and w_up


class EngineChoice:
    """One layer's plans, its neuron-major copy of W_d, and the counts in flight to the host."""

    def __init__(self, engine: str | None, policy: Policy, copies: bool = True, float8: bool = False) -> None:
        """engine: the name of the engine that computes every call, or None: `policy` chooses, from counts. copies: keep
        a neuron-major copy of W_d, without which the sparse engines transpose W_d in every call. float8: the tile
        engine computes the gate product of calls of many tokens in FP8; needs `copies` and the CUDA kernels."""
        self.engine, self.policy, self.copies, self.float8 = engine, policy, copies, float8
        # Indexed by FEW, BETWEEN, MANY. Until counts arrive, calls of many tokens use the dense engine; in FP8 they use
        # the tile engine, so that the first call is in FP8 too.
        first = (policy.first_of_few(), DENSE, Plan.of("tile") if float8 else DENSE)
        self.plans = [plan if engine is None else Plan.of(engine) for plan in first]
        self.calls = [0, 0, 0]
        self.per_token: float | None = None  # nonzeros per token of the last counted call of medium size
        self.w_down_t: Copy[Tensor] | None = None
        self.float8_copy: Copy[Float8Rows] | None = None
        self.checked: Checked | None = None
        self.counted = 0  # tokens of the call whose counts are in flight to the host; 0: none
        self.counts: Tensor | None = None  # int64 [COUNTS] on the host, pinned if the layer is on a GPU
        self.deciding = threading.Lock()  # held by the one thread that sends or reads counts
        self.handle: Tensor | None = None  # by which compiled code finds this choice

    def __getstate__(self) -> dict:
        """The state of a copy of the model, without the neuron-major W_d and the counts in flight."""
        kept = ("engine", "policy", "copies", "float8")
        return {name: getattr(self, name) for name in kept} | {"plans": list(self.plans)}

    def __setstate__(self, state: dict) -> None:
        EngineChoice.__init__(self, state["engine"], state["policy"], state["copies"], state["float8"])
        self.plans = state["plans"]

    def run(
        self, x: Tensor, w_gate: Tensor | None, w_up: Tensor, w_down: Tensor, rounded: Float8Rows | None = None
    ) -> Results:
        """(y, l1, fired, counts) of the operator, without gradients, for inputs that ops.feedforward.check accepts.

        rounded: x in FP8, if the caller has it."""
        return self._run(x, w_gate, w_up, w_down, *self._plan(x, w_up), rounded=rounded)

    def output(
        self, x: Tensor, w_gate: Tensor | None, w_up: Tensor, w_down: Tensor, rounded: Float8Rows | None = None
    ) -> Tensor:
        """Only y of `run`. A dense call that is not due to be counted skips the statistics.

        Such a call is computed in one of two ways. In a CUDA graph only device time matters, and the operator is faster
        on the device. Outside a graph, calls of few tokens are host-bound, and PyTorch's own five operators cost less
        host time.
        """
        plan, counting = self._plan(x, w_up)
        if x.shape[0] < MANY_TOKENS:
            self._note(x, w_gate, w_up, w_down)
        of_pytorch = plan.engine == Engine.dense and not counting and not fuses(x.shape[0]) and w_down.dtype == x.dtype
        if not of_pytorch or is_capturing():
            return self._run(x, w_gate, w_up, w_down, plan, counting, returning=False, rounded=rounded)[0]
        return _by_pytorch(x, w_gate, w_up, w_down)

    def output_as_before(self, x: Tensor, w_gate: Tensor | None, w_up: Tensor, w_down: Tensor) -> Tensor | None:
        """`output` [..., K] of x [..., K] for a call that is not of many tokens and whose weights were checked before;
        otherwise None, and the caller must use `output`.

        The results equal those of `output`, with less host time. Eager decoding is host-bound, so checking a block's
        weights in each call would cost more than the kernels gain.
        """
        known = self.checked
        if known is None or self.counted or in_forward_mode() or torch.is_autocast_enabled(known.device.type):
            return None
        if w_gate is not known.w_gate or w_up is not known.w_up or w_down is not known.w_down:
            return None
        if x.dtype != torch.bfloat16 or x.device != known.device or x.shape[-1] != known.width:
            return None
        tokens = x.numel() // known.width
        kind = kind_of(tokens)
        if not tokens or kind == MANY or (self.engine is None and self._is_due(kind)):
            return None
        plan = self._plan_of(kind, tokens, w_up)
        if plan.engine == Engine.row and known.addresses == _addresses(w_gate, w_up):
            kept = self.w_down_t
            if kept is None or kept.state != state_of(w_down) or not x.is_contiguous() or x.data_ptr() % cuda.ALIGNMENT:
                return None
            y = cuda.row_output(x, w_gate, w_up, kept.weight)
        elif plan.engine == Engine.dense and not fuses(tokens) and not is_capturing():
            y = _by_pytorch(x, w_gate, w_up, w_down)
        else:
            return None
        self.calls[kind] += 1
        return y

    def _is_due(self, kind: int) -> bool:
        return self.calls[kind] % COUNT_EVERY[kind] == 0

    def _plan_of(self, kind: int, tokens: int, w_up: Tensor) -> Plan:
        if kind == BETWEEN and self.engine is None and self.per_token is not None:
            neurons, width = w_up.shape
            return ROW if self.per_token <= self.policy.row_density(tokens, width, neurons) else DENSE
        return self.plans[kind]

    def _note(self, x: Tensor, w_gate: Tensor | None, w_up: Tensor, w_down: Tensor) -> None:
        """Remember weights that passed the check, if `output_as_before` can use them."""
        weights = [w for w in (w_gate, w_up, w_down) if w is not None]
        ready = all(w.dtype == x.dtype and w.is_contiguous() and w.data_ptr() % cuda.ALIGNMENT == 0 for w in weights)
        ready = ready and backend.loaded() == "cuda" and sparse_engines_take(x)
        found = Checked(w_gate, w_up, w_down, x.shape[1], x.device, _addresses(w_gate, w_up))
        self.checked = found if ready else None

    def _plan(self, x: Tensor, w_up: Tensor) -> tuple[Plan, bool]:
        """(the plan of a call, whether to send the call's counts to the host)"""
        m = x.shape[0]
        kind = kind_of(m)
        if not sparse_engines_take(x):
            self.w_down_t = self.float8_copy = None  # frees the copies made while the model was bfloat16 on a GPU
            if x.is_cuda and self.engine is None:
                _say_dense(x.dtype)
            return (DENSE if self.engine is None else self.plans[kind]), False
        if self.engine is not None:
            return self.plans[kind], False
        if self.counted:
            self._read(w_up)
        due = self._is_due(kind)
        self.calls[kind] += 1
        return self._plan_of(kind, m, w_up), due and not self.counted

    def _run(
        self,
        x: Tensor,
        w_gate: Tensor | None,
        w_up: Tensor,
        w_down: Tensor,
        plan: Plan,
        sending: bool,
        returning: bool = True,
        rounded: Float8Rows | None = None,
    ) -> Results:
        """sending: start copying the counts to the host. returning: the caller needs the statistics."""
        w_down_t = None
        if self.copies and plan.engine != Engine.dense and w_down.dtype == x.dtype and sparse_engines_take(x):
            w_down_t = self.neuron_major(w_down)
        rows = None
        if self.float8 and w_down_t is not None and _multiplies_in_float8(plan, x):
            rows = self.float8_weight(w_up if w_gate is None else w_gate)
        return self._computed(x, w_gate, w_up, w_down, w_down_t, rows, plan, sending, returning, rounded)

    def output_float8(self, x: Tensor, layer: Float8Layer) -> Tensor:
        """y [M, K] of a layer that has e4m3 weights only: by the row engine up to FEW_TOKENS, otherwise by the chosen
        engine from the weights in bfloat16, which are made for this call, and the gate product in FP8 in calls of many
        tokens on the tile engine. x is bfloat16, on a GPU on which the CUDA kernels run."""
        if x.shape[0] <= FEW_TOKENS:
            return cuda.row_output_float8(cuda.readable(x), layer)
        w_gate, w_up, w_down_t = layer.to(x.dtype)
        plan, sending = self._plan(x, w_up)
        rows = layer.thresholded if _multiplies_in_float8(plan, x) else None
        return self._computed(x, w_gate, w_up, w_down_t.t(), w_down_t, rows, plan, sending, False)[0]

    def _computed(
        self,
        x: Tensor,
        w_gate: Tensor | None,
        w_up: Tensor,
        w_down: Tensor,
        w_down_t: Tensor | None,
        rows: Float8Rows | None,
        plan: Plan,
        sending: bool,
        returning: bool,
        rounded: Float8Rows | None = None,
    ) -> Results:
        """rows: the weight of the gate product in FP8, or None: bfloat16. rounded: x in FP8, if the caller has it."""
        if rows is not None:
            assert w_down_t is not None
            weights = (None if w_gate is None else cuda.readable(w_gate), cuda.readable(w_up), w_down_t)
            results = cuda.float8_forward(cuda.readable(x), *weights, rows, plan.room, rounded)[:4]
        else:
            results = forward(x, w_gate, w_up, w_down, plan, w_down_t, False, sending or returning)[:4]
        if sending:
            self._send(x.shape[0], results[3])
        return results

    def neuron_major(self, w_down: Tensor) -> Tensor:
        """The neuron-major W_d, [N, K]. Raises what `current` raises."""
        self.w_down_t = current(self.w_down_t, w_down, transposed)
        return self.w_down_t.weight

    def float8_weight(self, weight: Tensor) -> Float8Rows:
        """`weight` in FP8. Raises what `current` raises."""
        self.float8_copy = current(self.float8_copy, weight, in_float8)
        return self.float8_copy.weight

    @torch.inference_mode(False)  # a tensor created in inference mode cannot be written outside inference mode
    def _send(self, m: int, counts: Tensor) -> None:
        """Start the copy of a call's counts to the host."""
        if is_capturing() or not self.deciding.acquire(blocking=False):
            return
        try:
            if self.counted:
                return
            if self.counts is None:
                self.counts = torch.empty(COUNTS, dtype=torch.int64, pin_memory=counts.is_cuda)
            self.counts.fill_(UNDER_WAY)
            self.counts.copy_(counts.detach(), non_blocking=True)
            self.counted = m
        finally:
            self.deciding.release()

    def _read(self, w_up: Tensor) -> None:
        """Choose the engines from the counts on the host, once all have arrived, so that none is UNDER_WAY.

        This method must not query a CUDA event, which is forbidden during a graph capture. Counts must be readable
        during a capture too, because the counts of torch's warm-up call, right before the capture, should choose the
        captured engines.
        """
        if not self.deciding.acquire(blocking=False):
            return
        try:
            assert self.counts is not None
            nnz, *_, union, _ = counts = self.counts.tolist()
            if self.counted and UNDER_WAY not in counts:
                m, self.counted = self.counted, 0
                kind = kind_of(m)
                if kind == BETWEEN:
                    self.per_token = nnz / m
                    return
                neurons, width = w_up.shape
                engine = self.policy.choose_engine(m, width, neurons, nnz, union, current=self.plans[kind].engine)
                self.plans[kind] = Plan(Engine(engine), room_for(nnz / m))
        finally:
            self.deciding.release()


def _multiplies_in_float8(plan: Plan, x: Tensor) -> bool:
    """Whether there is an FP8 gate product for this call."""
    return plan.engine == Engine.tile and x.shape[0] >= MANY_TOKENS


def _addresses(w_gate: Tensor | None, w_up: Tensor) -> tuple[int, int]:
    return 0 if w_gate is None else w_gate.data_ptr(), w_up.data_ptr()


def _by_pytorch(x: Tensor, w_gate: Tensor | None, w_up: Tensor, w_down: Tensor) -> Tensor:
    """Compute y with five PyTorch operators (three if w_gate is None)."""
    h = F.linear(x, w_up if w_gate is None else w_gate).relu_()
    if w_gate is not None:
        h.mul_(F.linear(x, w_up))
    return F.linear(h, w_down)


def kind_of(tokens: int) -> int:
    """FEW, BETWEEN or MANY."""
    return FEW if tokens <= FEW_TOKENS else BETWEEN if tokens < MANY_TOKENS else MANY


def sparse_engines_take(tensor: Tensor) -> bool:
    """Whether the sparse engines support the tensor's device and dtype."""
    return tensor.is_cuda and tensor.dtype == torch.bfloat16


def is_capturing() -> bool:
    """Whether the current stream is being captured into a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


@lru_cache
def _say_dense(dtype: torch.dtype) -> None:
    warn(
        f"the accelerated model computes in {dtype}, so its feedforward blocks run dense: the sparse kernels compute in"
        " bfloat16; load it with dtype=torch.bfloat16",
        stacklevel=2,
    )


# Operators that compiled code calls.

# Choices by handle address.
_choices: weakref.WeakValueDictionary[int, EngineChoice] = weakref.WeakValueDictionary()


def register(handle: Tensor, choice: EngineChoice) -> None:
    """Let compiled code find `choice` by the address of `handle`, as long as the caller keeps both alive. A handle on
    the meta device, which has no address yet, is not registered."""
    if not handle.is_meta:
        _choices[handle.data_ptr()] = choice
        choice.handle = handle


def _choice_of(handle: Tensor) -> EngineChoice:
    choice = _choices.get(handle.data_ptr())
    if choice is None:  # FSDP2 moves a handle to the GPU by an assignment to `handle.data`, unnoticed by the layer
        moved = {known.handle.data_ptr(): known for known in list(_choices.values()) if known.handle is not None}
        _choices.update(moved)
        choice = moved.get(handle.data_ptr())
    if choice is None:
        raise ValueError(
            "handle belongs to no existing accelerated block: compile the model after sparsellm.accelerate and after"
            " moving it to its device"
        )
    return choice


def _rounded(values: Tensor | None, scales: Tensor | None) -> Float8Rows | None:
    return None if values is None or scales is None else Float8Rows(values, scales)


@torch.library.custom_op("sparsellm::chosen_feedforward", mutates_args=())
def _chosen_feedforward(
    x: Tensor,
    w_gate: Tensor | None,
    w_up: Tensor,
    w_down: Tensor,
    handle: Tensor,
    values: Tensor | None = None,
    scales: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """values, scales: x in FP8, or None."""
    check(x, w_gate, w_up, w_down, cast=True)
    return _choice_of(handle).run(x, w_gate, w_up, w_down, _rounded(values, scales))


@_chosen_feedforward.register_fake
def _(x: Tensor, w_gate: Tensor | None, w_up: Tensor, w_down: Tensor, *_: Tensor | None) -> Results:
    return fake_results(x, w_down.shape[1])


@torch.library.custom_op("sparsellm::chosen_output", mutates_args=())
def _chosen_output(
    x: Tensor,
    w_gate: Tensor | None,
    w_up: Tensor,
    w_down: Tensor,
    handle: Tensor,
    values: Tensor | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """values, scales: x in FP8, or None."""
    check(x, w_gate, w_up, w_down, cast=True)
    return _choice_of(handle).output(x, w_gate, w_up, w_down, _rounded(values, scales))


@_chosen_output.register_fake
def _(x: Tensor, w_gate: Tensor | None, w_up: Tensor, w_down: Tensor, *_: Tensor | None) -> Tensor:
    return fake_results(x, w_down.shape[1])[0]
