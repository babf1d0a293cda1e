"""Building the requests of tasks: they equal lm-eval's requests and tokens."""

import threading
import weakref
from types import SimpleNamespace

import lm_eval.utils
import pytest
from evaluation.test_downstream import both
from evaluation.test_evaluate import SHARED
from tokenizers.processors import TemplateProcessing

from sparsellm.evaluation import task_requests, tasks
from sparsellm.evaluation.task_requests import Builder, Share
from sparsellm.hf import hub

NAMES = ["arc_easy", "hellaswag", "winogrande"]  # one context for all choices, rows changed by code, a context for each
ALONE = SimpleNamespace(rank=0, world_size=1)


@pytest.fixture
def folder(trained):
    return trained / "checkpoints/step_00000004/hf"


def load(rows, *names):
    with hub.offline(True):
        return [tasks.load(name, str(rows)) for name in names]


def requests_of(share):
    return [(instance.doc_id, instance.idx, instance.args, instance.doc) for instance in share.instances]


def encoded(lm, pairs):
    """The tokens that the model gets for these (context, continuation)."""
    asked = []
    lm._loglikelihood_tokens = lambda requests, **_: asked.extend(requests)
    lm.loglikelihood([SimpleNamespace(args=pair) for pair in pairs], disable_tqdm=True)
    return asked


@pytest.mark.parametrize("adds_token", [False, True], ids=["no begin token", "its begin token"])
def test_tokens_are_those_of_encode_pair(folder, rows, adds_token):
    """Also if whitespace moves to the continuation, a text begins with the begin token, or there is no context."""
    source = SHARED if SHARED.is_dir() else rows
    pairs = [
        pair
        for loaded in load(source, *tasks.TASKS)
        for _, _, pair, _ in requests_of(Share(loaded.task, 12, ALONE, lambda _: {}))
    ]
    with both(folder) as (ours, theirs):
        token = theirs.tokenizer.decode(theirs.prefix_token_id)
        pairs += [
            ("a gate ", "fires"),
            ("two \n\t ", " \n"),
            ("  ", "x"),
            ("", " no context"),
            ("é\u3000", "ü"),
            ("x", ""),
        ]
        pairs += [(token, "y"), (f"{token} after", " it"), (f" {token}", "z"), ("", token + "w"), pairs[0]]
        if adds_token:
            single = [(token, theirs.prefix_token_id)]
            ours.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(f"{token} $A", special_tokens=single)
        assert encoded(ours, pairs) == encoded(theirs, pairs)


def test_a_text_is_encoded_once_and_in_batches(folder, monkeypatch):
    with both(folder) as (ours, _):
        called = []
        for name in ("__call__", "encode"):
            method = getattr(type(ours.tokenizer), name)
            monkeypatch.setattr(
                type(ours.tokenizer), name,
                lambda self, texts, *rest, method=method, **options: called.append(texts)
                or method(self, texts, *rest, **options),
            )  # fmt: skip
        encoded(ours, [("a question", f" answer {i}") for i in range(4)] * 2 + [("a question ", "x")])
    (texts,) = called
    assert sorted(texts) == ["a question", *(f"a question answer {i}" for i in range(4)), "a question x"]


def test_the_model_is_let_go_of_with_its_lm(folder):
    """At once, not at the next garbage collection: for a sharded run it is another copy of all weights."""
    with both(folder) as (ours, theirs):
        model = weakref.ref(ours.model)
    del ours, theirs
    assert model() is None


def test_a_template_is_compiled_once(rows, monkeypatch):
    compiled, compile_template = [], lm_eval.utils.env.compile
    monkeypatch.setattr(
        lm_eval.utils.env, "compile", lambda source, *rest: compiled.append(source) or compile_template(source, *rest)
    )
    (loaded,) = load(rows, "arc_easy")
    for _ in range(2):
        share = Share(loaded.task, None, ALONE, lambda _: {})
        share.process_results(share.instances[0].doc, [(0.0, True)] * 4)
    assert len(compiled) == len(set(compiled))


@pytest.mark.parametrize("name", ["arc_easy", "hellaswag", "winogrande"])
def test_what_lm_eval_asks_of_a_row_is_computed_once_for_each_row(rows, name, monkeypatch):
    """Also for equal rows, which a benchmark may repeat; not for the next share of the task."""
    (loaded,) = load(rows, name)
    asked = {method: [] for method in task_requests.OF_A_ROW}
    for method, of in asked.items():
        compute = getattr(loaded.task, method)
        monkeypatch.setattr(loaded.task, method, lambda row, of=of, compute=compute: of.append(row) or compute(row))
    same = [next(tasks.each_row(loaded.task.eval_docs)) for _ in range(3)]
    monkeypatch.setattr(task_requests, "each_row", lambda _: iter(same))
    for _ in range(2):
        for of in asked.values():
            of.clear()
        share = Share(loaded.task, 3, ALONE, lambda _: {})
        for row in same:
            choices = share.doc_to_choice(row)
            share.process_results(row, [(0.0, True)] * len(choices))
            share.doc_to_target(row)
        assert {method: [id(row) for row in of] for method, of in asked.items()} == {
            method: [id(row) for row in same] for method in task_requests.OF_A_ROW
        }


def test_the_choices_that_are_kept_of_a_row_cannot_be_changed(rows):
    for loaded in load(rows, *NAMES):
        share = Share(loaded.task, 1, ALONE, lambda _: {})
        row = share.instances[0].doc
        before = list(share.doc_to_choice(row))
        share.doc_to_choice(row).append("another")
        share.doc_to_choice(row)[0] = "changed"
        assert share.doc_to_choice(row) == before == loaded.task.doc_to_choice(row)
        assert share.doc_to_choice(row, ["given"]) == ["given"]  # not the task's own


def test_a_share_leaves_the_task_as_it_was(rows):
    (loaded,) = load(rows, "arc_easy")
    before = dict(vars(loaded.task))
    Share(loaded.task, None, ALONE, lambda _: {})
    assert vars(loaded.task) == before


@pytest.mark.parametrize("name", tasks.TASKS)
def test_rows_read_many_at_once_are_those_read_alone(rows, name, monkeypatch):
    """To the types and the order of their fields, which the samples show."""
    monkeypatch.setattr(tasks, "READ_AT_ONCE", 4)  # of six
    (loaded,) = load(rows, name)
    assert list(map(repr, tasks.each_row(loaded.task.eval_docs))) == list(map(repr, loaded.task.eval_docs))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("limit", [None, 4, 1])
def test_the_shares_of_ranks_are_the_requests_of_one(rows, name, limit):
    def share(rank, world_size):
        (loaded,) = load(rows, name)
        return Share(loaded.task, limit, SimpleNamespace(rank=rank, world_size=world_size), lambda _: {})

    whole = share(0, 1)
    parts = [share(rank, 3) for rank in range(3)]
    together = sorted((request for part in parts for request in requests_of(part)), key=lambda request: request[:2])
    assert together == requests_of(whole)
    numbers = [[number for number, _ in part.doc_iterator(rank=0, limit=limit, world_size=1)] for part in parts]
    assert numbers == [list(range(limit or 6))[rank::3] for rank in range(3)]


def test_the_next_two_tasks_are_built_while_one_is_scored(rows, monkeypatch):
    loaded, built = load(rows, *NAMES, "piqa"), []

    def tokenize(pairs):
        assert threading.current_thread() is not threading.main_thread()
        built.append(len(pairs))
        return {}

    builder = Builder(ALONE, tokenize)
    builder.announce(loaded, 2)
    first = builder.take(loaded[0], 2)
    assert len(first.instances) == 2 * 4
    builder.begun[NAMES[2], 2].result(timeout=60)
    assert built == [8, 8, 4]  # and the fourth is not started before the second is taken
    monkeypatch.setattr(task_requests, "Share", lambda *_: 1 / 0)
    builder.take(loaded[1], 2)
    builder.take(loaded[2], 2)
    with pytest.raises(ZeroDivisionError):
        builder.take(loaded[3], 2)
    monkeypatch.undo()
    builder.announce(loaded, 2)
    assert len(builder.take(loaded[2], None).instances) == 6 * 2  # with more rows than announced
    assert list(builder.begun) == [(NAMES[0], 2), (NAMES[1], 2)]  # always two ahead
