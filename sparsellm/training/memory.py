"""Estimates the GPU memory of training, and measures how much memory is available.

Symbols: P parameters, K model width, N neurons, V vocabulary, M tokens per micro-batch, E bytes per element (2 in
bfloat16), Q and R the total width of all query heads and of all key heads (both K, unless heads are grouped or head_dim
is set). Between a micro-batch's forward and backward pass a compiled layer keeps, for each token,

    8 K        the residual stream before attention and before the feedforward block, float32
    E K        one normalised input
    2 E (Q+R)  queries, keys, values and the heads' output; with qk_norm also unnormalised queries and keys, E (Q + R)
    saved      what the feedforward engine saves for backward (sparsellm.ops.saved_bytes), or, if PyTorch traces the
               block, the block's [M, N] tensors (`_traced_planes`)

and, for any number of tokens, its weights in the compute dtype. A layer that is not compiled keeps more. Memory peaks
while the head computes (`_head`) or during the last layer's backward (`_last_layer`).

If the micro-batches of a step share casts of the feedforward weights (`shared_casts`, as training/micro_batch.py
decides), a step needs E bytes more for each such weight.

A linear layer in FP8 by torchao (runtime.float8) keeps less, with either recipe. torchao saves its input and its
float32 weight, which exists anyway, and rounds both to FP8 again in backward. So there is no copy of the weight in the
compute dtype, and compiled backward computes the normalised input, and h of a feedforward layer, from other saved
tensors. A sparse layer whose gate product is in FP8 (runtime.float8=all on the kernels) keeps what it keeps in
bfloat16: its input and weight in FP8, M K + N K bytes, exist only in its forward pass, which takes less memory than its
backward pass.

On an H200 (torch 2.11) this estimate differs by at most 0.5%, with recomputation by 2.5%, from the peaks in
docs/RESULTS.md, "Training in 80 GB", and by 0.4% from peaks in FP8 on an H100 (docs/dev/LOG.md).
tests/gpu/test_memory_on_a_gpu.py verifies the estimate.
"""

import gc
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pynvml
import torch

from sparsellm.config import (
    FLOAT32,
    Activation,
    Float8,
    ModelConfig,
    RuntimeConfig,
    attention_weights,
    feedforward_weights,
    float8_gates,
    moments,
    parameters,
)
from sparsellm.model.cross_entropy import CHUNK
from sparsellm.model.dtypes import DTYPES
from sparsellm.ops import Plan, saved_bytes

GIB = 2**30
# Reserved for the CUDA context, NCCL and the kernels' code in deterministic runs, which do not measure memory.
UNMEASURED = 3 * GIB


class Sharing(NamedTuple):
    """How ranks share weights, gradients and optimizer state."""

    ranks: int = 1  # how many ranks share one model; 1: each rank holds a whole model
    gathered: int = 0  # elements of weights and gradients that a rank gathers temporarily


UNSHARED = Sharing()


class Usage(NamedTuple):
    """Bytes on each rank's GPU at the peak of a step."""

    weights: int
    optimizer: int
    gradients: int  # outside of DDP's buckets
    buckets: int  # gradients in DDP's buckets
    activations: int
    accumulates: bool  # whether earlier micro-batches of the step have left gradients when activations peak

    @property
    def total(self) -> int:
        """Bytes at the peak. With one micro-batch, gradients reuse the memory that activations free."""
        both = self.gradients + self.activations if self.accumulates else max(self.gradients, self.activations)
        return self.weights + self.optimizer + self.buckets + both


@dataclass(frozen=True)
class StepMemory:
    """Estimates the memory of a training step on one rank."""

    model: ModelConfig
    activation: Activation
    runtime: RuntimeConfig
    share: int  # sequences per step on one rank
    sequence_length: int
    world_size: int = 1
    sharing: Sharing = UNSHARED
    taught: bool = False  # whether the run has a teacher
    muon: bool = False

    def usage(self, sequences: int, plans: Sequence[Plan | None], recompute: bool = False) -> Usage:
        """Memory of a step with `sequences` sequences per micro-batch. `plans`: by layer, None if PyTorch traces it.
        `recompute`: whether layers are recomputed in the backward pass."""
        sharing, size = self.sharing, FLOAT32 * parameters(self.model)
        accumulates = sequences < self.share
        buckets = size if self.world_size > 1 and sharing.ranks == 1 else 0
        return Usage(
            weights=size // sharing.ranks + FLOAT32 * sharing.gathered,
            optimizer=FLOAT32 * moments(self.model, self.muon) // sharing.ranks,
            # DDP's buckets hold the gradients of the last micro-batch; those of earlier micro-batches are separate.
            gradients=size // sharing.ranks if accumulates or not buckets else 0,
            buckets=buckets,
            activations=self._activations(sequences, plans, recompute),
            accumulates=accumulates,
        )

    def shared_casts(self, plans: Sequence[Plan | None]) -> int:
        """Bytes of the copies of feedforward weights in the compute dtype that the micro-batches of a step may share
        (sparsellm.ops.accumulation). 0 in float32, and where ranks share weights, which are gathered anew each time."""
        if self.sharing != UNSHARED or self._dtype == torch.float32:
            return 0
        layers = sum(plan is not None for plan in plans)
        return layers * feedforward_weights(self.model) * self._dtype.itemsize

    def ffn_saved_bytes(self, sequences: int, plans: Sequence[Plan | None], recompute: bool = False) -> int | None:
        """Bytes that the feedforward layers save for the backward pass of `sequences` sequences, in addition to their
        inputs. None for SiLU, where autograd and the compiler decide."""
        if self.activation != Activation.relu:
            return None
        if recompute:
            return 0  # only the layer that is computing its backward pass keeps anything
        tokens, model = sequences * self.sequence_length, self.model
        return sum(saved_bytes(plan, tokens, model.intermediate_size, model.gated, self._dtype) for plan in plans)

    @property
    def _dtype(self) -> torch.dtype:
        return DTYPES[self.runtime.precision]

    @property
    def _all_linears_in_float8(self) -> bool:
        """Whether torchao computes the feedforward layers in FP8, in addition to attention."""
        return self.runtime.float8 == Float8.all and not float8_gates(self.runtime, self.activation)

    def _activations(self, sequences: int, plans: Sequence[Plan | None], recompute: bool) -> int:
        model, tokens, element = self.model, sequences * self.sequence_length, self._dtype.itemsize
        layers = [self._layer(tokens, plan) for plan in plans]
        kept, at_work = sum(layers), 0
        if recompute:
            each_input = FLOAT32 * tokens * model.hidden_size
            kept, at_work = len(layers) * each_input, max(layers) - each_input
        # In addition to saved [M, N] tensors, backward needs one such tensor if compiled; with kernels dh, dz and du.
        planes = element * (1 if plans[-1] is None else 3)
        if self._all_linears_in_float8:  # dh, dz, du, and one of them in FP8 in two layouts; an upper estimate
            planes = 3 * element + 2
        head = _head(model, tokens, element)
        if self.taught:  # the teacher's last hidden state, and a chunk of its logits
            head += element * (tokens * model.hidden_size + min(tokens, CHUNK) * model.vocab_size)
        return kept + max(head, at_work + _last_layer(model, tokens, planes))

    def _layer(self, tokens: int, plan: Plan | None) -> int:
        """Bytes that a layer keeps between forward and backward."""
        model, dtype = self.model, self._dtype
        width, neurons, element = model.hidden_size, model.intermediate_size, dtype.itemsize
        in_float8 = (self.runtime.float8 is not None) + self._all_linears_in_float8  # attention; feedforward layers too
        rotated = (model.num_heads + model.kv_heads) * model.head_width  # elements of queries and keys per token
        if self.runtime.compile:
            per_token = 2 * FLOAT32 * width + element * (width + 2 * rotated)
            per_token += element * rotated if model.qk_norm else 0
            # Compiled backward recomputes the normalised input of attention in FP8, and of feedforward layers in FP8.
            per_token -= element * width * in_float8
        else:  # an eager layer also keeps both norms' float32 results and the intermediates of the rotation
            per_token = 4 * FLOAT32 * width + element * (2 * width + 3 * rotated)
            per_token += 2 * FLOAT32 * rotated if model.qk_norm else 0
        matrices = 0 if in_float8 else attention_weights(model)
        if plan is None:
            matrices += 0 if self._all_linears_in_float8 else feedforward_weights(model)
            saved = self._traced_planes(element) * tokens * neurons
        else:
            saved = saved_bytes(plan, tokens, neurons, model.gated, dtype)
        casts = 0 if dtype == torch.float32 else matrices * element
        return tokens * (per_token + FLOAT32 * model.num_heads) + saved + casts

    def _traced_planes(self, element: int) -> int:
        """Bytes per token and neuron of the [M, N] tensors kept by a traced block."""
        if not self.model.gated:
            return element  # h
        if self._all_linears_in_float8:  # the results of gate and up; eager PyTorch also keeps h (and silu(z))
            return (2 if self.runtime.compile else 3 if self.activation == Activation.relu else 4) * element
        if self.activation == Activation.silu:
            return (3 if self.runtime.compile else 4) * element  # z, u and h; eager PyTorch also keeps silu(z)
        # If compiled, the operator saves g and u, and the compiler saves h and the mask of g's nonzeros.
        return 3 * element + 1 if self.runtime.compile else 2 * element


def _head(model: ModelConfig, tokens: int, element: int) -> int:
    """Bytes while the head computes: the last hidden state in float32 and in the compute dtype, the head's weight in
    the compute dtype, the logits of one chunk, and the gradients of these three."""
    logits = 2 * min(tokens, CHUNK) * model.vocab_size * element
    hidden = tokens * model.hidden_size * (2 * FLOAT32 + 2 * element)
    return logits + hidden + model.vocab_size * model.hidden_size * (FLOAT32 + element)


def _last_layer(model: ModelConfig, tokens: int, planes: int) -> int:
    """Bytes during the last layer's backward: the head's gradient, the float32 gradients of the residual stream and of
    the block's input, and `planes` bytes per token and neuron in the feedforward block."""
    hidden = 2 * FLOAT32 * tokens * model.hidden_size
    return hidden + planes * tokens * model.intermediate_size + FLOAT32 * model.vocab_size * model.hidden_size


class Gpu:
    """The GPU memory available to this process's tensors.

    In addition to tensors, a process holds its CUDA context, NCCL's buffers and the kernels' code, which torch's
    allocator does not count. A limit covers all of them, so tensors get less.
    """

    def __init__(self, device: torch.device, limit_gib: float | None) -> None:
        self.device, self.limited = device, limit_gib is not None
        _, self.total = torch.cuda.mem_get_info(device)
        self.limit = self.total if limit_gib is None else min(self.total, int(limit_gib * GIB))
        self.hold()

    def hold(self) -> None:
        """Limit torch's allocator to the process's limit minus what the process now holds outside of tensors."""
        share = max(0, self.limit - self._outside()) / self.total if self.limited else 1.0
        torch.cuda.set_per_process_memory_fraction(share, self.device)

    def available(self) -> int:
        """Bytes available to this process's tensors, including existing ones."""
        free, _ = torch.cuda.mem_get_info(self.device)
        found = free + torch.cuda.memory_reserved(self.device)
        return min(found, self.limit - self._outside()) if self.limited else found

    def peak_of(self, work: Callable[[], None]) -> int | None:
        """Peak bytes of tensors during the second of two calls of `work`; None if memory ran out.

        Also None if the second call only fitted because the allocator released cached blocks, since every step would
        then wait for such a release. The first call is not measured, because it compiles and may need more memory.
        """
        peak = None
        try:
            work()
            torch.cuda.reset_peak_memory_stats(self.device)
            before = self._retries()
            work()
            torch.cuda.synchronize(self.device)
            if self._retries() == before:
                peak = torch.cuda.max_memory_allocated(self.device)
        except torch.OutOfMemoryError:
            pass  # the exception keeps tensors alive, so the caller frees memory after this method returns
        return peak

    def _retries(self) -> int:
        return torch.cuda.memory_stats(self.device)["num_alloc_retries"]

    def _outside(self) -> int:
        """Bytes that this process holds on the GPU outside of tensors, according to the driver's list of processes. If
        that list does not show this process (in some containers), all used memory is assumed to be this process's."""
        free, total = torch.cuda.mem_get_info(self.device)
        reserved = torch.cuda.memory_reserved(self.device)
        used = _used_by_this_process(self.device)
        return (total - free if used is None or used < reserved else used) - reserved


def _used_by_this_process(device: torch.device) -> int | None:
    """Bytes used by this process according to the driver; None if unknown."""
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except pynvml.NVMLError:
        return None
    return next((process.usedGpuMemory for process in processes if process.pid == os.getpid()), None)


def give_back() -> None:
    """Release this process's cached memory to the device; does nothing if CUDA was not used."""
    gc.collect()
    torch.cuda.empty_cache()
