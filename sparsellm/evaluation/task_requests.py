"""Builds the requests of tasks with lm-eval and tokenizes them, in a thread, two tasks ahead of the GPU.

Each rank builds the requests for its share of a task's rows (every `world_size`-th row), and computes the metrics of
its rows. A rank sees only the tokens of other ranks' requests.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from functools import cache, partial
from itertools import islice
from typing import Any

import lm_eval.api.task
import lm_eval.utils

from sparsellm.distributed.groups import Ranks
from sparsellm.evaluation.tasks import LoadedTask, each_row

# lm-eval compiles a template for each string of each row, which takes most of the time. A compiled template depends
# only on its source, so lm-eval's `from_string` is cached here. The upstream fix would be a cache in lm-eval's
# `apply_template`.
setattr(lm_eval.utils.env, "from_string", cache(lm_eval.utils.env.from_string))  # noqa: B010 (mypy forbids `=`)
# lm-eval draws progress bars on every rank while building requests, and has no setting for them.
lm_eval.api.task.tqdm = partial(lm_eval.api.task.tqdm, disable=True)

Pairs = list[tuple[str, str]]  # (context, continuation) of each request
Tokens = dict[str, list[int]]  # string -> tokens
AHEAD = 2  # tasks built ahead, because building a large task takes longer than answering a small one
TEXTS = 4096  # strings per tokenizer call; limited, because offsets and masks take memory
OF_A_ROW = ("doc_to_text", "doc_to_target", "doc_to_choice")  # lm-eval's task methods that render a row's template


def tokenize(tokenizer: Any, begin: str, pairs: Pairs) -> Tokens:
    """The tokens of every string that lm-eval encodes for requests with these contexts and continuations.

    The tokens equal those of lm-eval's `tok_encode`, but are computed on all cores, and once per string, because a
    question has several answers. Strings that start with the token `begin` are left out, because lm-eval encodes such
    strings differently.
    """
    wanted = {text for a, b in pairs if a for text in (a.rstrip(), a + b) if not text.startswith(begin)}
    texts = list(wanted)
    found: Tokens = {}
    for batch in (texts[i : i + TEXTS] for i in range(0, len(texts), TEXTS)):
        encoded = tokenizer(batch, return_attention_mask=False, return_token_type_ids=False, verbose=False)
        found |= zip(batch, encoded["input_ids"], strict=True)
    return found


def once_for_each_row(method: Callable[..., Any]) -> Callable[..., Any]:
    """Cache `method(row)` by row object (by identity, not equality).

    lm-eval calls `method` two to four times: for the row's requests, metrics and sample. A list is returned as a copy,
    so that callers cannot change the cached list.
    """
    known: dict[int, tuple[Any, Any]] = {}  # by id(row); keeps the row alive, so that its id is not reused

    def answer(row: Any, *options: Any, **named: Any) -> Any:
        if options or named:  # not the task's own template
            return method(row, *options, **named)
        if id(row) not in known:
            known[id(row)] = row, method(row)
        _, found = known[id(row)]
        return list(found) if isinstance(found, list) else found

    return answer


class Share:
    """An lm-eval task for `lm_eval.evaluator.evaluate`, restricted to this rank's rows, with its requests built."""

    def __init__(self, task: Any, limit: int | None, ranks: Ranks, tokenize: Callable[[Pairs], Tokens]) -> None:
        # A copy of the task, so that requests and cached rows are freed with the share.
        self.task = copy(task)
        for name in OF_A_ROW:
            setattr(self.task, name, once_for_each_row(getattr(task, name)))
        docs = task.eval_docs
        self.task.doc_iterator = lambda *, rank, limit, world_size, samples: islice(
            enumerate(each_row(docs)), rank, limit, world_size
        )
        self.task._instances = []
        if ranks.rank < (len(docs) if limit is None else min(limit, len(docs))):  # lm-eval refuses to build zero rows
            self.task.build_all_requests(limit=limit, rank=ranks.rank, world_size=ranks.world_size)
        self.encoded = tokenize([instance.args for instance in self.task.instances])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.task, name)

    def build_all_requests(self, **_: Any) -> None:
        """Does nothing: the constructor has built the requests."""

    def doc_iterator(self, **_: Any) -> Iterator[tuple[int, Any]]:
        """(index, row) of this rank's rows, in order."""
        return iter({instance.doc_id: instance.doc for instance in self.task.instances}.items())


class Builder:
    """Builds the shares of announced tasks in a thread; starts the next share whenever one is taken."""

    def __init__(self, ranks: Ranks, tokenize: Callable[[Pairs], Tokens]) -> None:
        """`tokenize`: returns the tokens of all strings that requests need. Called in the thread."""
        self.ranks, self.tokenize = ranks, tokenize
        self.thread = ThreadPoolExecutor(1, "requests")
        self.announced: list[tuple[LoadedTask, int | None]] = []
        self.begun: dict[tuple[str, int | None], Future[Share]] = {}  # at most AHEAD, by task and limit

    def announce(self, loaded: list[LoadedTask], limit: int | None) -> None:
        """Announce the tasks that will be taken, in order, with their first `limit` rows, and start building them."""
        self.announced = [(task, limit) for task in loaded]
        self.begun.clear()
        self._begin()

    def take(self, loaded: LoadedTask, limit: int | None) -> Share:
        """This rank's share of the task, announced or not. Waits until it is built, and raises what building raised."""
        building = self.begun.pop((loaded.name, limit), None) or self._submit(loaded, limit)
        try:
            return building.result()
        finally:
            self._begin()

    def _begin(self) -> None:
        while self.announced and len(self.begun) < AHEAD:
            task, limit = self.announced.pop(0)
            self.begun[task.name, limit] = self._submit(task, limit)

    def _submit(self, loaded: LoadedTask, limit: int | None) -> Future[Share]:
        return self.thread.submit(Share, loaded.task, limit, self.ranks, self.tokenize)
