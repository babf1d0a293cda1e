"""Text from a decoder, token by token: fixed memory for keys and values, and one CUDA graph for each shape of a batch.

    generator = Generator.load("runs/NAME/checkpoints/step_100/hf")
    for tokens in generator.stream([[5, 17], [3]], 64): ...    # an id of each sequence, None where it has ended
    generator.text(["The water", "Why"], 64)                   # both continuations, as text

Prompts of different lengths are computed without padding, but for attention: the feedforward layers see the tokens that
there are, and count those alone. A decoding step is one CUDA graph: embedding, layers, head, and the choice of the next
token, so the host only starts it and reads the tokens of the step before. The graph is captured after two steps that
run one operator after the other, from whose counts each layer has chosen its engine; it keeps these engines.

Several threads may use one generator, and several streams of it may be under way at once: each has memory and graphs of
its own until it ends or is dropped.

Numerics: weights of the embedding and of all products are in `dtype`, products and attention are computed in it with
float32 accumulation; residual stream, norms, rotation, logits' softmax and sampling are float32. Letters: B sequences,
R tokens of a call, all sequences together, T the longest, S positions of the cache, H heads of width D, H_kv heads of
keys and values, each of which H / H_kv query heads share.
"""

import math
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsellm.config import ModelConfig
from sparsellm.model import huggingface, pretrained
from sparsellm.model.accelerate import SparseFeedForward, accelerate
from sparsellm.model.decoder import (
    Attention,
    Decoder,
    DecoderLayer,
    GatedFeedForward,
    NonGatedFeedForward,
    SiluFeedForward,
    causal_attention,
    rotate,
)
from sparsellm.model.rotary import rotary_tables

CACHE_MULTIPLE = 64  # positions: so that prompts of about the same length share a graph
COMPILED_SHAPES = 1024  # sizes of batches and of their memory; beyond, torch warns and computes without compiling
UNCAPTURED_STEPS = 2  # the first steps of a shape: engines are chosen from what they count
# One capture at a time in a process, and none beside a step that may compile: both wait for the whole device, the
# compiler because it times its kernels, and CUDA refuses that while a capture is under way.
CAPTURE = threading.Lock()


class Sampling(NamedTuple):
    """How the next token is drawn from the logits: the likeliest (temperature 0), or at random from the smallest set of
    tokens whose probabilities add up to top_p, after the logits were divided by the temperature."""

    temperature: float = 0.0
    top_p: float = 1.0

    def draw(self, logits: Tensor, generator: torch.Generator) -> Tensor:
        """logits [B, V] float32 -> [B] int64."""
        if self.temperature == 0:
            return logits.argmax(-1)
        logits = logits / self.temperature
        if self.top_p < 1:
            ordered, tokens = logits.sort(-1, descending=True)
            chances = F.softmax(ordered, -1)
            ordered = ordered.where(chances.cumsum(-1) - chances < self.top_p, -torch.inf)  # the likeliest always stays
            logits = torch.empty_like(logits).scatter_(-1, tokens, ordered)
        # The Gumbel-max trick: the largest of logits - log E, where E is drawn from Exp(1), is each token with its
        # softmax probability. Unlike torch.multinomial this needs no look at the numbers by the host, and can be
        # captured.
        return (logits - torch.empty_like(logits).exponential_(generator=generator).log_()).argmax(-1)


GREEDY = Sampling()


class Batch:
    """Fixed memory for B sequences of up to S positions: the cache, where each sequence is, and its last token."""

    def __init__(
        self, config: ModelConfig, size: int, positions: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        shape = config.num_layers, size, positions, config.kv_heads, config.head_width
        # Zeros, because PyTorch's attention multiplies what positions hold that are not there yet by zero.
        self.keys, self.values = (torch.zeros(shape, device=device, dtype=dtype) for _ in range(2))
        self.cos, self.sin = rotary_tables(positions, config, device)
        self.tokens, self.lengths = (torch.zeros(size, device=device, dtype=torch.int64) for _ in range(2))
        self.generator = torch.Generator(device)  # of the draws
        self.graphs: dict[Sampling, torch.cuda.CUDAGraph] = {}
        self.steps = 0  # that were taken without a graph
        self.left: torch.cuda.Event | None = None  # after the last work of the stream that had this memory


class Generator:
    """Generates with a decoder that it has taken for itself: in inference, its matrices in one dtype, accelerated."""

    def __init__(
        self,
        decoder: Decoder,
        stop: Collection[int] = (),
        tokenizer: Any = None,
        dtype: torch.dtype = torch.float32,
        kernels: str | None = "auto",
        calibrate: bool = True,
    ) -> None:
        """stop: ids of tokens that end a sequence. kernels, calibrate: as of `accelerate`; kernels=None: not
        accelerated, as SiLU models never are."""
        self.config, self.stop, self.tokenizer, self.dtype = decoder.config, frozenset(stop), tokenizer, dtype
        self.decoder = decoder.requires_grad_(False).eval()
        for parameter in decoder.parameters():
            parameter.data = parameter.data.to(dtype if parameter.dim() == 2 else torch.float32)
        if kernels is not None and not isinstance(decoder.layers[0].mlp, SiluFeedForward):
            accelerate(decoder, kernels, calibrate=calibrate)
        for block in decoder.modules():
            if isinstance(block, SparseFeedForward):
                block.returns_statistics = False  # nobody looks at them
        self.layers = [layer for layer in decoder.layers if isinstance(layer, DecoderLayer)]
        self.merged = [_merge_projections(layer.self_attn) for layer in self.layers]
        self.device = decoder.embed_tokens.weight.device
        self._layer = _decode_layer
        if self.device.type == "cuda":  # captured: inductor fuses what stands between the products
            self._layer = _compiled()
        self._idle: dict[tuple[int, int], Batch] = {}  # by size and positions; no stream that is under way has it

    @classmethod
    def load(
        cls, path: str | Path, device: str | None = None, dtype: torch.dtype | None = None, **settings: Any
    ) -> Self:
        """The model, tokenizer and stop tokens of an hf/ folder or a hub name, as `huggingface.load` takes them.

        device: a GPU where there is one. dtype: bfloat16 on a GPU, float32 on a CPU. settings: those of Generator.
        """
        config, activation, weights = huggingface.load(path)
        tokenizer = pretrained.read_tokenizer(path, config.vocab_size)
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        dtype = dtype or (torch.bfloat16 if device.startswith("cuda") else torch.float32)
        with torch.device("meta"):
            decoder = Decoder(config, activation)
        decoder.load_state_dict(weights, assign=True)
        return cls(decoder.to(device), pretrained.stop_tokens(path, tokenizer), tokenizer, dtype, **settings)

    def text(self, prompts: Sequence[str], new_tokens: int, sampling: Sampling = GREEDY, seed: int = 0) -> list[str]:
        """The continuation of each prompt, without the prompt and without the token that ended it."""
        if isinstance(prompts, str):  # each of its characters would be a prompt
            raise ValueError(f"prompts is one text, {prompts!r:.80}: it should be a list of texts")
        made: list[list[int]] = [[] for _ in prompts]
        given = [self.tokenizer(prompt).input_ids for prompt in prompts]
        for tokens in self.stream(given, new_tokens, sampling, seed):
            for sequence, token in zip(made, tokens, strict=True):
                if token is not None and token not in self.stop:
                    sequence.append(token)
        return [self.continuation(prompt, sequence) for prompt, sequence in zip(given, made, strict=True)]

    def continuation(self, prompt: Sequence[int], new: Sequence[int]) -> str:
        """The text of the tokens `new` behind those of `prompt`. Some tokenizers, as Llama 2's, leave out the space
        with which a text begins, so `new` alone might be another text."""
        return str(self.tokenizer.decode([*prompt, *new]))[len(self.tokenizer.decode(prompt)) :]

    def stream(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, sampling: Sampling = GREEDY, seed: int = 0
    ) -> Iterator[list[int | None]]:
        """Up to `new_tokens` times the next token of each sequence; None after one that is in `stop`. Ends early when
        all sequences have ended.

        Raises ValueError, at once, for a prompt without tokens or with ids that the vocabulary lacks, for prompts that
        have no room for `new_tokens` in the model's context, and for a `sampling` that cannot be drawn by.
        """
        lengths = self._check(prompts, new_tokens, sampling)
        return self._stream(prompts, max(lengths) + new_tokens, new_tokens, sampling, seed)

    @torch.no_grad()
    def _stream(
        self, prompts: Sequence[Sequence[int]], positions: int, new_tokens: int, sampling: Sampling, seed: int
    ) -> Iterator[list[int | None]]:
        batch = self._take(len(prompts), positions)
        try:
            batch.generator.manual_seed(seed)
            self._prefill(batch, prompts, sampling)
            going = [True] * len(prompts)
            read = self._send(batch)
            for step in range(new_tokens):
                here = read
                if step + 1 < new_tokens:
                    self._step(batch, sampling)  # starts while the host waits for the tokens of the step before
                    read = self._send(batch)
                tokens = here()
                yield [token if go else None for token, go in zip(tokens, going, strict=True)]
                going = [go and token not in self.stop for token, go in zip(tokens, going, strict=True)]
                if not any(going):
                    return
        finally:
            self._leave(batch)

    def _check(self, prompts: Sequence[Sequence[int]], new_tokens: int, sampling: Sampling) -> list[int]:
        if not 0 <= sampling.temperature < math.inf:
            raise ValueError(f"temperature is {sampling.temperature}: it should be 0 or a positive number")
        if not 0 < sampling.top_p <= 1:
            raise ValueError(f"top_p is {sampling.top_p}: it should be above 0 and at most 1")
        lengths = [len(prompt) for prompt in prompts]
        if not lengths or not min(lengths):
            raise ValueError(f"the prompts have {lengths} tokens: each needs at least one, and there must be a prompt")
        if new_tokens < 1:
            raise ValueError(f"new_tokens is {new_tokens}: it should be at least 1")
        context, vocabulary = self.config.context_length, self.config.vocab_size
        if max(lengths) + new_tokens > context:
            raise ValueError(
                f"a prompt of {max(lengths):,} tokens and {new_tokens:,} new ones exceed the model's context of"
                f" {context:,}: shorten the prompt, or ask for fewer new tokens"
            )
        for token in (min(map(min, prompts)), max(map(max, prompts))):
            if not 0 <= token < vocabulary:
                raise ValueError(f"token {token} is not in the vocabulary of {vocabulary:,} tokens")
        return lengths

    def _take(self, size: int, positions: int) -> Batch:
        """Memory of this size with room for so many positions, which is the caller's until `_leave`."""
        room = min(-(-positions // CACHE_MULTIPLE) * CACHE_MULTIPLE, self.config.context_length)
        batch = self._idle.pop((size, room), None)
        if batch is None:
            self._idle.clear()  # before there is a larger one beside it
            return Batch(self.config, size, room, self.device, self.dtype)
        if batch.left is not None:
            torch.cuda.current_stream(self.device).wait_event(batch.left)  # which other threads' streams do not follow
        return batch

    def _leave(self, batch: Batch) -> None:
        """Keep this memory and its graphs, and those of no other batch, for the next stream of its size."""
        if self.device.type == "cuda":
            batch.left = torch.cuda.current_stream(self.device).record_event()
        self._idle = {(batch.keys.shape[1], batch.keys.shape[2]): batch}

    def _prefill(self, batch: Batch, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
        """Compute all prompts, and draw each one's first new token."""

        def on_device(numbers: list[int]) -> Tensor:
            return torch.tensor(numbers, device=self.device)

        tokens = on_device([token for prompt in prompts for token in prompt])
        lengths, longest = on_device([len(prompt) for prompt in prompts]), max(map(len, prompts))
        sequences = torch.arange(len(prompts), device=self.device)
        rows = sequences.repeat_interleave(lengths, output_size=len(tokens))
        ends = lengths.cumsum(0)
        positions = torch.arange(len(tokens), device=self.device) - (ends - lengths)[rows]
        # Where a token of the call is among all positions of the batch: of attention's input, and of the cache.
        within, cached = (rows * width + positions for width in (longest, batch.keys.shape[2]))
        x, y = self._embedded(tokens)
        cos, sin = batch.cos[positions, None], batch.sin[positions, None]
        rooms: list[Tensor] | None = None
        for i, layer in enumerate(self.layers):
            x, heads = _heads(layer, self.merged[i], x, y)
            parts: tuple[Tensor, ...] = _positioned(layer.self_attn, heads, cos, sin)
            for cache, part in zip((batch.keys[i], batch.values[i]), parts[1:], strict=True):
                cache.flatten(0, 1).index_copy_(0, cached, part)
            if len(tokens) < len(prompts) * longest:
                # Behind a sequence's end there are zeros, which none of its own tokens looks at.
                rooms = rooms or [part.new_zeros(len(prompts) * longest, *part.shape[1:]) for part in parts]
                parts = tuple(room.index_copy_(0, within, part) for room, part in zip(rooms, parts, strict=True))
            q, k, v = (part.unflatten(0, (len(prompts), longest)).transpose(1, 2) for part in parts)
            found = causal_attention(q, k, v).transpose(1, 2).flatten(0, 1)
            x, y = _after_attention(layer, x, found if rooms is None else found[within])
        batch.tokens.copy_(sampling.draw(self._logits(x[ends - 1], y[ends - 1]), batch.generator))
        batch.lengths.copy_(lengths)

    def _embedded(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """tokens [R] -> [R, K] float32, and what is to be added to it, nothing yet, in the dtype of the products."""
        x = self.decoder.embed_tokens(tokens)
        return x.float(), torch.zeros_like(x)

    def _logits(self, x: Tensor, y: Tensor) -> Tensor:
        """x + y [B, K] -> [B, V] float32."""
        return F.linear(self.decoder.norm(x + y).to(self.dtype), self.decoder.head).float()

    def _step(self, batch: Batch, sampling: Sampling) -> None:
        if self.device.type != "cuda":
            return self._decode(batch, sampling)
        if batch.steps < UNCAPTURED_STEPS:
            batch.steps += 1
            with CAPTURE:
                return self._decode(batch, sampling)
        if sampling not in batch.graphs:
            graph = torch.cuda.CUDAGraph()
            graph.register_generator_state(batch.generator)
            stream = torch.cuda.Stream(self.device)
            # By thread: other threads may go on with what is forbidden in a capture, such as taking memory.
            with CAPTURE, torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                self._decode(batch, sampling)
            batch.graphs[sampling] = graph
        batch.graphs[sampling].replay()
        return None

    def _decode(self, batch: Batch, sampling: Sampling) -> None:
        """One token of each sequence: from batch.tokens, at batch.lengths, to the next ones."""
        x, y = self._embedded(batch.tokens)
        for i, layer in enumerate(self.layers):
            memory = batch.cos, batch.sin, batch.lengths, batch.keys[i], batch.values[i]
            x, y = self._layer(layer, self.merged[i], x, y, *memory)
        batch.tokens.copy_(sampling.draw(self._logits(x, y), batch.generator))
        batch.lengths.add_(1)

    def _send(self, batch: Batch) -> Any:
        """Start the copy of the newest tokens to the host. Returns what waits for them: a function of nothing."""
        if self.device.type != "cuda":
            tokens = batch.tokens.tolist()
            return lambda: tokens
        there = torch.empty(batch.tokens.shape, dtype=torch.int64, pin_memory=True)
        there.copy_(batch.tokens, non_blocking=True)
        arrived = torch.cuda.current_stream(self.device).record_event()

        def read() -> list[int]:
            arrived.synchronize()
            return there.tolist()

        return read


class Projection(NamedTuple):
    """The projections of queries, keys and values as one, for one product instead of three."""

    weight: Tensor  # [(H + 2 H_kv) D, K]
    bias: Tensor | None  # [(H + 2 H_kv) D], in the dtype of the weight


def _merge_projections(attention: Attention) -> Projection:
    """The weights become parts of the merged one."""
    projections = attention.q_proj, attention.k_proj, attention.v_proj
    weight = torch.cat([proj.weight for proj in projections])
    for proj, part in zip(projections, weight.split([len(proj.weight) for proj in projections]), strict=True):
        proj.weight.data = part
    biases: list[Tensor] = [proj.bias for proj in projections if proj.bias is not None]
    return Projection(weight, torch.cat(biases).to(weight.dtype) if biases else None)


def _compiled(backend: str | Callable = "inductor") -> Callable:
    """`_decode_layer`, compiled anew for each size of a batch and of its memory. backend: one of torch.compile's."""
    settings = torch._dynamo.config
    # Dynamo counts for all generators of a process, and would go on without compiling after 8 shapes.
    settings.recompile_limit = max(COMPILED_SHAPES, settings.recompile_limit)
    settings.accumulated_recompile_limit = max(COMPILED_SHAPES, settings.accumulated_recompile_limit)
    return torch.compile(_decode_layer, dynamic=False, backend=backend)


def _by_kernels(x: Tensor) -> bool:
    """Whether x is of a step that is compiled for a GPU: by inductor and Triton, not operator by operator."""
    return torch.compiler.is_compiling() and x.is_cuda


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """x [R, K], weight [N, K] -> [R, N]. For a GPU one row is multiplied and summed, because inductor fuses that with
    its neighbours, which it cannot do with a library's product."""
    if len(x) > 1 or not _by_kernels(x):
        return F.linear(x, weight)
    return (x.float() * weight.float()).sum(-1).to(x.dtype)[None]


def _heads(layer: DecoderLayer, merged: Projection, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """x [R, K], and what the layer before has left to be added to it, y -> (x + y, heads [R, H + 2 H_kv, D]). The
    sum is made here, because one kernel then computes it, the norm and, for one sequence, the product."""
    norm = layer.input_layernorm
    if len(x) == 1 and _by_kernels(x):
        from sparsellm.ops.triton.decoding import sum_norm_product

        x, heads = sum_norm_product(x, y, norm.weight, norm.eps, *merged)
    else:
        x = x + y
        heads = F.linear(norm(x).to(merged.weight.dtype), *merged)
    return x, heads.view(len(x), -1, layer.self_attn.head_dim)


def _positioned(attention: Attention, heads: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """heads [R, H + 2 H_kv, D], cos and sin [R, 1, D] -> rotated queries [R, H, D], rotated keys and values
    [R, H_kv, D]."""
    q, k, v = heads.split(attention.heads, 1)
    if attention.q_norm is not None:
        return *attention.positioned(q, k, cos, sin), v
    rotated = rotate(heads[:, : -v.shape[1]], cos, sin).to(heads.dtype)  # both at once: half as many operations
    return *rotated.split(attention.heads[:2], 1), v


def _attend(
    attention: Attention, heads: Tensor, cos: Tensor, sin: Tensor, lengths: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    """One token of each sequence, heads [B, H + 2 H_kv, D] -> [B, H, D]. The caches [B, S, H_kv, D] get its keys and
    values at `lengths` [B]; cos and sin are tables [S, D]."""
    if _by_kernels(heads):
        from sparsellm.ops.triton.decoding import attend_to_the_past

        norms = None
        if attention.q_norm is not None and attention.k_norm is not None:
            norms = attention.q_norm.weight, attention.k_norm.weight, attention.q_norm.eps
        return attend_to_the_past(heads, norms, cos, sin, lengths, keys, values)
    q, k, v = _positioned(attention, heads, cos[lengths, None], sin[lengths, None])
    rows, positions = (torch.arange(n, device=heads.device) for n in keys.shape[:2])
    keys[rows, lengths], values[rows, lengths] = k, v
    there = positions <= lengths[:, None]
    # Query heads that share a head of keys stand where queries of several positions would: [B, H_kv, H / H_kv, D].
    queries, past = q.unflatten(1, (keys.shape[2], -1)), (keys.transpose(1, 2), values.transpose(1, 2))
    return F.scaled_dot_product_attention(queries, *past, attn_mask=there[:, None, None]).flatten(1, 2)


def _after_attention(layer: DecoderLayer, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """x [R, K] with what attention has found, y [R, H, D]; and the feedforward block's output [R, K], to be added."""
    x = x + _product(y.flatten(1), layer.self_attn.o_proj.weight)
    return x, _feedforward(layer.mlp, layer.post_attention_layernorm(x).to(y.dtype))


def _feedforward(block: nn.Module, x: Tensor) -> Tensor:
    """The output [R, K] of a feedforward block, without the statistics that a block of the decoder counts beside it."""
    if isinstance(block, SparseFeedForward):
        return cast(Tensor, block(x))
    if isinstance(block, NonGatedFeedForward):
        return _product(F.relu(_product(x, block.up_proj.weight)), block.down_proj.weight)
    assert isinstance(block, GatedFeedForward)
    activation = F.silu if isinstance(block, SiluFeedForward) else F.relu
    h = activation(_product(x, block.gate_proj.weight)) * _product(x, block.up_proj.weight)
    return _product(h, block.down_proj.weight)


def _decode_layer(
    layer: DecoderLayer, merged: Projection, x: Tensor, y: Tensor, cos: Tensor, sin: Tensor, lengths: Tensor,
    keys: Tensor, values: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One token of each sequence: x [B, K], and what the layer before has left to be added to it, y [B, K], to the same
    of this layer. The other tensors are those of `_attend`."""
    x, heads = _heads(layer, merged, x, y)
    return _after_attention(layer, x, _attend(layer.self_attn, heads, cos, sin, lengths, keys, values))
