"""Accuracy of a model in memory on downstream tasks, computed by lm-eval, with requests distributed over ranks.

Every rank holds the model and builds the requests for its share of a task's rows (task_requests.py). All ranks have the
tokens of all requests, sort the requests by length and cut them into batches independently of the number of ranks; then
the ranks take turns with the batches. So batches have the same shapes on one rank and on eight, and scores are equal.

The ranks exchange data three times per task: tokens before the first batch, answers after the last, and then the
metrics. A rank that fails reports it in the next exchange, so that all ranks fail together and stay in step.
"""

import logging
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from lm_eval import evaluator
from lm_eval.api.metrics import stderr_for_metric
from lm_eval.models.huggingface import HFLM
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sparsellm.distributed.groups import Ranks, gather
from sparsellm.evaluation.task_requests import Builder, Tokens, tokenize
from sparsellm.evaluation.tasks import LoadedTask
from sparsellm.system.console import progress, quantity
from sparsellm.system.errors import SparsellmError

# Maximum logits in a batch of size `auto`: with a vocabulary of 49,152, that is 21,845 tokens on a GPU, 1,365 on a CPU.
# The logits that predict a continuation are copied twice, the second time as log-probabilities.
AUTO_LOGITS = {"cuda": 2**30, "cpu": 2**26}
BYTES_PER_LOGIT = 16  # free GPU memory per logit: 8 for two float32, 8 for the layers

# Batches are padded to a multiple of this many tokens, so that few shapes are new: cuDNN's attention, which PyTorch
# prefers on Hopper, costs 43 ms of host time for each new shape (H100, torch 2.11). Flash attention has no such cost,
# but scores near-ties differently from lm-eval, whose own model uses cuDNN's attention.
MULTIPLE = {"cuda": 8, "cpu": 1}

# lm-eval's warnings about loading do not apply to a model in memory.
logging.getLogger("lm_eval.models.huggingface").setLevel(logging.ERROR)

Request = tuple[list[int], list[int]]  # tokens of context and of continuation
Answer = tuple[float, bool]  # the continuation's log-probability, and whether greedy decoding gives the continuation


class ScoringFailed(SparsellmError, RuntimeError):
    """A rank could not build its requests or compute its share. Raised on all ranks."""


class SharedLM(HFLM):
    """lm-eval's Hugging Face model, with its own batches, distributed over ranks. All ranks call it together."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        ranks: Ranks,
        batch_size: int | str,
        autocast: torch.dtype | None = None,
    ) -> None:
        """`batch_size`: sequences per batch, or "auto" for as many as `AUTO_LOGITS` allows at their length.

        `autocast`: the dtype of mixed precision, with float32 log-probabilities; None: everything in the model's dtype.
        """
        super().__init__(
            pretrained=model, tokenizer=tokenizer, backend="causal", batch_size="auto", mixed_precision_dtype=autocast,
            softmax_dtype=None if autocast is None else torch.float32,
        )  # fmt: skip
        self._max_length = self.max_length  # cached: lm-eval searches the model's configuration each time (8 us)
        self.ranks, self.sequences = ranks, batch_size
        self.task_name, self.truncated = "", 0  # the current task, and how many of its requests exceed the context
        self.failed_together = False  # whether all ranks know of an error in the current task
        self.encoded: Tokens | None = None  # tokens of the next call's strings, if already computed
        begin = str(tokenizer.decode(self.prefix_token_id))
        # The builder has no reference to this object: a cycle would keep the weights until a garbage collection.
        self.builder = Builder(ranks, partial(tokenize, tokenizer, begin))
        logits = AUTO_LOGITS[ranks.device.type]
        if ranks.device.type == "cuda":
            logits = min(logits, torch.cuda.mem_get_info(ranks.device)[0] // BYTES_PER_LOGIT)
        # The size of an "auto" batch that fits on this rank's device. The ranks then agree on the smallest size.
        self.tokens_per_batch = max(1, logits // model.config.get_text_config().vocab_size)

    def exchange(self, value: Any, error: str | None = None) -> list[Any]:
        """The `value` of every rank. Collective. Raises ScoringFailed on all ranks if some rank has an `error`."""
        found = gather((value, error))
        for rank, (_, reason) in enumerate(found):
            if reason is not None:
                self.failed_together = True
                raise ScoringFailed(f"rank {rank}: {reason}")
        return [value for value, _ in found]

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[Answer]:
        """Answers to this rank's `requests`. Collective."""
        if self.encoded is None:
            self.encoded = self.builder.tokenize([request.args for request in requests])
        try:
            return super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        finally:
            self.encoded = None

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """The tokens from `tokenize`, or from lm-eval, which encodes one string at a time."""
        known = None if self.encoded is None or add_special_tokens is not None else self.encoded.get(string)
        return super().tok_encode(string, add_special_tokens, **kwargs) if known is None else known

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = True,
        override_bs: int | None = None,
    ) -> list[Answer]:
        """Answers to this rank's `requests` (strings, context tokens, continuation tokens), in order. Collective.

        Raises ScoringFailed if a rank fails, and ValueError, before any exchange, for a request that cannot be scored.
        """
        for texts, context, continuation in requests:
            if not context or not 1 <= len(continuation) <= self.max_length:
                raise ValueError(
                    f"the request {texts!s:.200} has {len(context)} + {len(continuation)} tokens: its context should"
                    f" not be empty, and its continuation should have 1 to {self.max_length} tokens, the model's"
                    " context"
                )
        exchanged = self.exchange((self.tokens_per_batch, [request[1:] for request in requests]))
        self.tokens_per_batch = min(tokens for tokens, _ in exchanged)
        everyones: list[Request] = [request for _, share in exchanged for request in share]
        first = sum(len(share) for _, share in exchanged[: self.ranks.rank])
        self.truncated = sum(len(before) + len(after) > self.max_length + 1 for before, after in everyones)
        mine: dict[int, Answer] = {}
        error = None
        try:
            batches = self._batches(everyones)[self.ranks.rank :: self.ranks.world_size]
            total = sum(map(len, batches))
            with progress(self.task_name, total, "request", self.ranks.is_main) as advance:
                under_way: list[tuple[list[int], Callable[[], list[Answer]]]] = []
                for batch in [*batches, None]:  # launch one batch ahead, so that the GPU does not wait for the host
                    if batch is not None:
                        under_way.append((batch, self._answers([everyones[i] for i in batch])))
                    if len(under_way) > (batch is not None):
                        numbers, answers = under_way.pop(0)
                        mine |= zip(numbers, answers(), strict=True)
                        advance(len(numbers))
        except Exception as exception:
            advice = "; lower batch_size" if isinstance(exception, torch.cuda.OutOfMemoryError) else ""
            error = f"{type(exception).__name__}: {exception}{advice}"
        everything = {i: answer for share in self.exchange(mine, error) for i, answer in share.items()}
        return [everything[i] for i in range(first, first + len(requests))]

    def _answers(self, batch: list[Request]) -> Callable[[], list[Answer]]:
        """Launch a batch. Returns a function that waits for the device and returns the answers of lm-eval's `hf` model.

        Uses a few transfers per batch; lm-eval uses a few per request.
        """
        rows: dict[tuple[int, ...], int] = {}  # sequence -> row of the batch
        requests: list[tuple[int, int, int]] = []  # row, length of the sequence, length of the continuation
        for context, continuation in batch:
            tokens = tuple((context + continuation)[-self.max_length - 1 : -1])
            requests.append((rows.setdefault(tokens, len(rows)), len(tokens), len(continuation)))
        row, end, lengths = np.array(requests).T
        first = np.cumsum(lengths) - lengths  # index of each continuation's first token in the batch
        # The logits at the last positions of a sequence predict its continuation.
        position = np.repeat(end - lengths - first, lengths) + np.arange(lengths.sum())
        at = self._sent(torch.from_numpy(np.stack((np.repeat(row, lengths), position))))
        padded = self._sent(_padded(list(rows), self._padded_length(max(map(len, rows)))))
        predicted = self._sent(torch.tensor([token for _, continuation in batch for token in continuation]))
        logits = self._model_call(padded)[at[0], at[1]]
        scores = nn.functional.log_softmax(logits, dim=-1, dtype=self.softmax_dtype)
        hits = scores.argmax(-1) == predicted
        received = self._received(scores.gather(1, predicted[:, None])[:, 0], hits)

        def read() -> list[Answer]:
            of_tokens, hit = received()
            sums = [float(tokens.sum()) for tokens in of_tokens.split(lengths.tolist())]
            return list(zip(sums, np.logical_and.reduceat(hit.numpy(), first).tolist(), strict=True))

        return read

    def _padded_length(self, longest: int) -> int:
        """The padded length of a batch whose longest sequence has `longest` tokens."""
        multiple = MULTIPLE[self.ranks.device.type]
        return min(-(-longest // multiple) * multiple, self.max_length)

    def _sent(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a CPU `tensor` to the device without synchronizing."""
        cuda = self.ranks.device.type == "cuda"
        return (tensor.pin_memory() if cuda else tensor).to(self.device, non_blocking=cuda)

    def _received(self, *tensors: torch.Tensor) -> Callable[[], list[torch.Tensor]]:
        """Start copying device `tensors` to the CPU. Returns a function that waits for the copies and returns them.

        The copies start now because the device works in order: a copy enqueued after the next batch would wait for that
        batch, and then the device would wait for the host.
        """
        copies = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
        done = torch.cuda.current_stream(self.device).record_event() if self.ranks.device.type == "cuda" else None

        def wait() -> list[torch.Tensor]:
            if done is not None:
                done.synchronize()
            return copies

        return wait

    def _batches(self, requests: list[Request]) -> list[list[int]]:
        """Indices of requests by batch, longest first; for a fixed batch size, the batches of lm-eval's `hf` model.

        Requests that differ only in the last token share one sequence, whose logits answer all of them.
        """
        sequences: dict[tuple[int, ...], list[int]] = {}
        for i, (context, continuation) in enumerate(requests):
            sequences.setdefault((*context, *continuation[:-1]), []).append(i)
        batches: list[list[int]] = []
        room: Any = 0
        for tokens in sorted(sorted(sequences), key=len, reverse=True):
            if not room:
                length = self._padded_length(min(len(tokens), self.max_length))
                room = max(1, self.tokens_per_batch // length) if self.sequences == "auto" else self.sequences
                batches.append([])
            batches[-1] += sequences[tokens]
            room -= 1
        return batches


def score(lm: SharedLM, loaded: LoadedTask, limit: int | None) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Score one task: its entry of results.json, and lm-eval's samples. Collective; the same on all ranks.

    `limit`: score only this many rows. Raises ScoringFailed if a rank fails.
    """
    lm.task_name, lm.failed_together = loaded.name, False
    mine: list[dict[str, Any]] = []
    try:
        share = lm.builder.take(loaded, limit)
        lm.encoded = share.encoded
        if share.instances:
            tasks = {"tasks": {loaded.name: share}, "groups": {}}
            mine = evaluator.evaluate(lm, tasks, limit=limit, bootstrap_iters=0)["samples"][loaded.name]
        else:  # fewer rows than ranks
            lm.loglikelihood([])
    except Exception as exception:  # an unreadable row, the tokenizer, or out of memory
        if not lm.failed_together:
            lm.exchange(None, f"{type(exception).__name__}: {exception}")
        raise
    samples = sorted((sample for share in lm.exchange(mine) for sample in share), key=lambda sample: sample["doc_id"])
    values = _metrics(loaded.task, samples)
    metric = "acc_norm" if "acc_norm" in values else "acc"
    notes = [] if loaded.note is None else [loaded.note]
    if lm.truncated:
        notes.append(
            f"{quantity(lm.truncated, 'request')} truncated on the left, to the context of {lm.max_length:,} tokens"
        )
    result = {
        "metric": metric,
        "score": values[metric],
        "stderr": values[f"{metric}_stderr"],
        **{name: values.get(name) for name in ("acc", "acc_stderr", "acc_norm", "acc_norm_stderr")},
        "split": loaded.split,
        "rows": len(samples),
        "note": "; ".join(notes) or None,
    }
    return result, samples


def _metrics(task: Any, samples: list[dict[str, Any]]) -> dict[str, float | None]:
    """Each metric of the task with its standard error (None for a single row), computed by lm-eval's functions."""
    found: dict[str, float | None] = {}
    for name in samples[0]["metrics"]:
        aggregate, values = task.aggregation()[name], [sample[name] for sample in samples]
        error = stderr_for_metric(metric=aggregate, bootstrap_iters=100_000) if len(values) > 1 else None
        found |= {name: float(aggregate(values)), f"{name}_stderr": None if error is None else float(error(values))}
    return found


def _padded(sequences: list[tuple[int, ...]], length: int) -> torch.Tensor:
    """The sequences as rows of `length` tokens, padded with zeros."""
    lengths = np.array([len(tokens) for tokens in sequences])
    padded = np.zeros((len(sequences), length), np.int64)
    padded[np.arange(length) < lengths[:, None]] = list(chain.from_iterable(sequences))
    return torch.from_numpy(padded)
