"""The requests of tasks, built by lm-eval and tokenized by a thread, two tasks ahead of the GPU.

Each rank builds the requests of its share of a task's rows, every `world_size`-th one, and computes the metrics of the
same rows. Of other ranks' requests a rank sees only the tokens.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from copy import copy
from functools import cache, partial
from itertools import islice
from typing import Any

import lm_eval.api.task
import lm_eval.utils

from sparsellm.distributed.groups import Ranks
from sparsellm.evaluation.tasks import LoadedTask, each_row

# lm-eval compiles a template for each text that it makes of a row, which takes most of the time of building. A compiled
# template depends on its source alone, so lm-eval's `from_string` is replaced here by one that remembers. A change of
# lm-eval for the same would be such a cache in its `apply_template`.
setattr(lm_eval.utils.env, "from_string", cache(lm_eval.utils.env.from_string))  # noqa: B010 (a method, says mypy)

Pairs = list[tuple[str, str]]  # (context, continuation) of each request
Tokens = dict[str, list[int]]  # of texts
AHEAD = 2  # tasks: to build a large one takes longer than to answer a small one before it
TEXTS = 4096  # tokenized in one call, whose offsets and masks take memory until it ends
OF_A_ROW = ("doc_to_text", "doc_to_target", "doc_to_choice")  # methods of a task, by lm-eval's names: a template each


def tokenize(tokenizer: Any, begin: str, pairs: Pairs) -> Tokens:
    """The tokens of every text that lm-eval encodes for requests of these contexts and continuations.

    They are those of its `tok_encode`, found on all cores, and each text once: a question has several answers. Texts
    that start with the token `begin` are left out, for lm-eval encodes them in another way.
    """
    wanted = {text for a, b in pairs if a for text in (a.rstrip(), a + b) if not text.startswith(begin)}
    texts = list(wanted)
    found: Tokens = {}
    for batch in (texts[i : i + TEXTS] for i in range(0, len(texts), TEXTS)):
        encoded = tokenizer(batch, return_attention_mask=False, return_token_type_ids=False, verbose=False)
        found |= zip(batch, encoded["input_ids"], strict=True)
    return found


def once_for_each_row(method: Callable[..., Any]) -> Callable[..., Any]:
    """`method` of a row, computed once for each row object; of equal rows each has its own.

    lm-eval asks two to four times: when it builds the requests of a row, when it computes its metrics, and for its
    sample. A list is handed out as a new one each time, so that nobody can change what is kept.
    """
    known: dict[int, tuple[Any, Any]] = {}  # by id(row); with the row, so that no other one comes to have its id

    def answer(row: Any, *options: Any, **named: Any) -> Any:
        if options or named:  # another template than the task's own
            return method(row, *options, **named)
        if id(row) not in known:
            known[id(row)] = row, method(row)
        _, found = known[id(row)]
        return list(found) if isinstance(found, list) else found

    return answer


class Share:
    """A task of lm-eval as `lm_eval.evaluator.evaluate` uses it, of this rank's rows, their requests built."""

    def __init__(self, task: Any, limit: int | None, ranks: Ranks, tokenize: Callable[[Pairs], Tokens]) -> None:
        # A copy: the requests, and what is kept of the rows, go with the share, and the next one begins without.
        self.task = copy(task)
        for name in OF_A_ROW:
            setattr(self.task, name, once_for_each_row(getattr(task, name)))
        docs = task.eval_docs
        self.task.doc_iterator = lambda *, rank, limit, world_size, samples: islice(
            enumerate(each_row(docs)), rank, limit, world_size
        )
        self.task._instances = []
        if ranks.rank < (len(docs) if limit is None else min(limit, len(docs))):  # of no rows lm-eval refuses to build
            with _without_bars():
                self.task.build_all_requests(limit=limit, rank=ranks.rank, world_size=ranks.world_size)
        self.encoded = tokenize([instance.args for instance in self.task.instances])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.task, name)

    def build_all_requests(self, **_: Any) -> None:
        """Nothing, where lm-eval would build the requests, for the constructor has built them."""

    def doc_iterator(self, **_: Any) -> Iterator[tuple[int, Any]]:
        """(number, row) of this rank's rows, in their order."""
        return iter({instance.doc_id: instance.doc for instance in self.task.instances}.items())


class Builder:
    """Builds the shares of tasks in a thread: the next one of those announced whenever one is taken."""

    def __init__(self, ranks: Ranks, tokenize: Callable[[Pairs], Tokens]) -> None:
        """`tokenize`: the tokens of all texts that requests need. Called in the thread."""
        self.ranks, self.tokenize = ranks, tokenize
        self.thread = ThreadPoolExecutor(1, "requests")
        self.announced: list[tuple[LoadedTask, int | None]] = []
        self.begun: dict[tuple[str, int | None], Future[Share]] = {}  # at most AHEAD, by task and limit

    def announce(self, loaded: list[LoadedTask], limit: int | None) -> None:
        """Say which tasks will be taken, in this order, each of its first `limit` rows, so that the first are begun."""
        self.announced = [(task, limit) for task in loaded]
        self.begun.clear()
        self._begin()

    def take(self, loaded: LoadedTask, limit: int | None) -> Share:
        """This rank's share of the task, once it is built, announced or not. Raises whatever building it raised."""
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


@contextmanager
def _without_bars() -> Iterator[None]:
    """lm-eval draws one on every rank while it builds the requests of a task, and has no setting for it."""
    before = lm_eval.api.task.tqdm
    lm_eval.api.task.tqdm = partial(before, disable=True)
    try:
        yield
    finally:
        lm_eval.api.task.tqdm = before
