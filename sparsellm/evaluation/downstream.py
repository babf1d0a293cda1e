"""Accuracy of a model in memory on downstream tasks, computed by lm-eval, its requests shared between ranks.

Every rank holds the model and builds all requests of a task. They are sorted by length and cut into batches in one way,
whatever the number of ranks; the ranks take turns with the batches and exchange the answers. So a batch has the same
shape on one rank and on eight, and the scores are the same.

The ranks exchange twice for each task: before its first batch, that all have the requests, and after its last, the
answers. A rank that fails says so in the next exchange, so that all fail alike and stay in step.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import lm_eval.api.task
import torch
from lm_eval import evaluator
from lm_eval.models.huggingface import HFLM
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sparsellm.console import progress
from sparsellm.distributed import Ranks, gather
from sparsellm.evaluation.tasks import LoadedTask

# A batch of size `auto` has at most so many logits, here of a vocabulary of 49,152: 21,845 tokens on a GPU, 1,365 on a
# CPU. Those that predict a continuation exist twice more, the second time as logarithms of probabilities.
AUTO_LOGITS = {"cuda": 2**30, "cpu": 2**26}
BYTES_PER_LOGIT = 16  # of free GPU memory, at most: two float32, and as much again for the layers before them

Request = tuple[tuple[str, str], list[int], list[int]]  # (context, continuation) as texts, then each as tokens
Answer = tuple[float, bool]  # the continuation's log-probability, and whether it is the likeliest


class ScoringFailed(RuntimeError):
    """A rank could not build the requests or compute its share. Raised alike on all ranks."""


class SharedLM(HFLM):
    """lm-eval's Hugging Face model, with batches of its own making that the ranks share. Used by all ranks together."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        ranks: Ranks,
        batch_size: int | str,
        autocast: torch.dtype | None = None,
    ) -> None:
        """`batch_size`: sequences per batch, or "auto" for as many as `AUTO_LOGITS` allow at their length.

        `autocast`: the dtype of mixed precision, whose log-probabilities are float32; None: all in the model's own.
        """
        with _without_warnings():
            super().__init__(
                pretrained=model, tokenizer=tokenizer, backend="causal", batch_size="auto",
                mixed_precision_dtype=autocast, softmax_dtype=None if autocast is None else torch.float32,
            )  # fmt: skip
        self.ranks, self.sequences = ranks, batch_size
        self.task_name, self.truncated = "", 0  # requests of the latest task that exceeded the context
        self.exchanged = False  # anything with the other ranks, for the latest task
        self.tokens_per_batch = self._tokens_per_batch(model.config.get_text_config().vocab_size)

    def _tokens_per_batch(self, vocabulary: int) -> int:
        """Of size "auto", as far as this rank's device goes; the smallest of all ranks is taken."""
        device = self.ranks.device
        logits = AUTO_LOGITS[device.type]
        if device.type == "cuda":
            logits = min(logits, torch.cuda.mem_get_info(device)[0] // BYTES_PER_LOGIT)
        return max(1, logits // vocabulary)

    def exchange(self, value: Any, error: str | None = None) -> list[Any]:
        """The `value` of every rank. Collective. Raises ScoringFailed on all ranks if some rank has an `error`."""
        self.exchanged = True
        found = gather((value, error))
        for rank, (_, reason) in enumerate(found):
            if reason is not None:
                raise ScoringFailed(f"rank {rank}: {reason}")
        return [value for value, _ in found]

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[Answer]:
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def _loglikelihood_tokens(
        self, requests: list[Request], disable_tqdm: bool = True, override_bs: int | None = None
    ) -> list[Answer]:
        """The answers to `requests`, in their order, the same on all ranks. Collective.

        Raises ScoringFailed; and ValueError before the ranks exchange anything.
        """
        for texts, context, continuation in requests:
            if not context or not 1 <= len(continuation) <= self.max_length:
                raise ValueError(
                    f"the request {texts!s:.200} has {len(context)} + {len(continuation)} tokens: it should have some"
                    f" of context, and a continuation of 1 to {self.max_length}, the model's context"
                )
        self.truncated = sum(len(before) + len(after) > self.max_length + 1 for _, before, after in requests)
        self.tokens_per_batch = min(self.exchange(self.tokens_per_batch))
        mine: dict[int, Answer] = {}
        error = None
        try:
            batches = self._batches(requests)[self.ranks.rank :: self.ranks.world_size]
            total = sum(map(len, batches))
            with progress(self.task_name, total, "request", self.ranks.is_main) as advance:
                for batch in batches:
                    mine |= zip(batch, self._answers([requests[i] for i in batch]), strict=True)
                    advance(len(batch))
        except Exception as exception:
            advice = "; lower batch_size" if isinstance(exception, torch.cuda.OutOfMemoryError) else ""
            error = f"{type(exception).__name__}: {exception}{advice}"
        everything = {i: answer for share in self.exchange(mine, error) for i, answer in share.items()}
        return [everything[i] for i in range(len(requests))]

    def _answers(self, batch: list[Request]) -> list[Answer]:
        """What lm-eval's `hf` model answers, in a few transfers; it takes as many for each request."""
        rows: dict[tuple[int, ...], int] = {}
        at: list[tuple[int, int]] = []  # row and position of the logits that predict each token of the continuations
        for _, context, continuation in batch:
            tokens = tuple((context + continuation)[-self.max_length - 1 : -1])
            row = rows.setdefault(tokens, len(rows))
            at += ((row, position) for position in range(len(tokens) - len(continuation), len(tokens)))
        padded = pad_sequence([torch.tensor(tokens) for tokens in rows], batch_first=True)
        predicted = torch.tensor([token for *_, continuation in batch for token in continuation]).to(self.device)
        row, position = torch.tensor(at).T.to(self.device)
        logits = self._model_call(padded.to(self.device))[row, position]
        scores = nn.functional.log_softmax(logits, dim=-1, dtype=self.softmax_dtype)
        likeliest = (scores.argmax(-1) == predicted).cpu()
        scores = scores.gather(1, predicted[:, None])[:, 0].cpu()
        lengths = [len(continuation) for *_, continuation in batch]
        by_request = zip(scores.split(lengths), likeliest.split(lengths), strict=True)
        return [(float(score.sum()), bool(hits.all())) for score, hits in by_request]

    def _batches(self, requests: list[Request]) -> list[list[int]]:
        """Numbers of requests by batch, longest first: those of lm-eval's own `hf` model at a fixed batch size.

        Requests that differ only in the last token are one sequence, whose logits answer them all.
        """
        sequences: dict[tuple[int, ...], list[int]] = {}
        for i, (_, context, continuation) in enumerate(requests):
            sequences.setdefault(tuple(context + continuation[:-1]), []).append(i)

        def longest_first(numbers: list[int]) -> tuple[int, list[int]]:
            _, context, continuation = requests[max(numbers, key=lambda i: len(requests[i][2]))]
            return -len(context + continuation), context + continuation

        batches: list[list[int]] = []
        room: Any = 0
        for numbers in sorted(sequences.values(), key=longest_first):
            if not room:
                length = min(-longest_first(numbers)[0] - 1, self.max_length)
                room = max(1, self.tokens_per_batch // length) if self.sequences == "auto" else self.sequences
                batches.append([])
            batches[-1] += numbers
            room -= 1
        return batches


def score(lm: SharedLM, loaded: LoadedTask, limit: int | None) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """One task: what results.json says of it, and lm-eval's samples. Collective; the same on all ranks.

    `limit`: only so many of its first rows. Raises ScoringFailed; and whatever the task's metrics raise, perhaps on
    some ranks only.
    """
    lm.task_name, lm.exchanged = loaded.name, False
    try:
        with _without_bars():
            found = evaluator.evaluate(lm, {"tasks": {loaded.name: loaded.task}, "groups": {}}, limit=limit)
    except Exception as exception:  # of a row that the task cannot read, of the tokenizer, or for want of memory
        if not lm.exchanged:
            lm.exchange(None, f"{type(exception).__name__}: {exception}")
        raise
    values = found["results"][loaded.name]
    metric = "acc_norm" if "acc_norm,none" in values else "acc"

    def value(name: str) -> float | None:
        number = values.get(f"{name},none")
        return float(number) if isinstance(number, int | float) else None  # lm-eval says "N/A" of a single row's error

    notes = [] if loaded.note is None else [loaded.note]
    if lm.truncated:
        notes.append(f"{lm.truncated:,} requests exceed the context of {lm.max_length:,} tokens: cut on the left")
    result = {
        "metric": metric,
        "score": value(metric),
        "stderr": value(f"{metric}_stderr"),
        **{name: value(name) for name in ("acc", "acc_stderr", "acc_norm", "acc_norm_stderr")},
        "split": loaded.split,
        "rows": values["sample_len"],
        "note": "; ".join(notes) or None,
    }
    return result, found["samples"][loaded.name]


@contextmanager
def _without_bars() -> Iterator[None]:
    """lm-eval draws one on every rank while it builds the requests of a task, and has no setting for it."""
    before = lm_eval.api.task.tqdm
    lm_eval.api.task.tqdm = partial(before, disable=True)
    try:
        yield
    finally:
        lm_eval.api.task.tqdm = before


@contextmanager
def _without_warnings() -> Iterator[None]:
    """lm-eval says of a model that it is given in memory what it would do if it loaded one."""
    logger = logging.getLogger("lm_eval.models.huggingface")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
