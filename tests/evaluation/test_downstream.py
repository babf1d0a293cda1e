"""The answers of SharedLM compared with those of lm-eval's `hf` model, token by token."""

import random
from contextlib import contextmanager

import pytest
import torch
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM, AutoTokenizer

from sparsellm.distributed.groups import process_group
from sparsellm.evaluation import downstream
from sparsellm.evaluation.downstream import SharedLM

CONTEXT, BATCH = 192, 3
BFLOAT16 = torch.bfloat16


@pytest.fixture
def folder(trained):
    return trained / "checkpoints/step_00000004/hf"


@contextmanager
def both(folder, dtype=torch.float32, autocast=None, **theirs):
    """(ours, lm-eval's) for one model, in a process group of one."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype), AutoTokenizer.from_pretrained(folder)
    with process_group("cpu") as ranks:
        softmax = None if autocast is None else torch.float32
        plain = HFLM(
            pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=BATCH, mixed_precision_dtype=autocast,
            softmax_dtype=softmax, **theirs,
        )  # fmt: skip
        yield SharedLM(model, tokenizer, ranks, BATCH, autocast), plain


def tokens(draw, count):
    return [draw.randrange(400) for _ in range(count)]


def requests_of(pairs):
    return [((f"context {i}", f"continuation {i}"), context, after) for i, (context, after) in enumerate(pairs)]


@pytest.mark.parametrize(
    ("dtype", "autocast"), [(torch.float32, None), (BFLOAT16, None), (torch.float32, BFLOAT16)],
    ids=["float32", "bfloat16", "mixed"],
)  # fmt: skip
def test_answers_are_lm_evals(folder, dtype, autocast):
    """Bit for bit: the batches have the same sequences, and each logarithm the same logits."""
    draw = random.Random(0)
    pairs = [(tokens(draw, draw.randint(1, 30)), tokens(draw, draw.randint(1, 9))) for _ in range(8)]
    question = tokens(draw, 20)
    pairs += [(question, [token]) for token in (5, 9, 9, 300)]  # of one sequence, two of them the same
    ending = tokens(draw, 6)
    pairs += [(question, [*ending, token]) for token in (7, 8)]  # alike up to the last token
    pairs += [pairs[0], pairs[3], (question, ending)]
    pairs += [(tokens(draw, CONTEXT + 1 - after + more), tokens(draw, after)) for after in (1, 4) for more in (0, 1, 9)]
    pairs += [(tokens(draw, 3), tokens(draw, CONTEXT))]  # all that is predicted, and two of the three tokens are cut
    with both(folder, dtype, autocast) as (ours, theirs):
        for context in (question, tokens(draw, CONTEXT + 5)):  # what the model itself computes
            said = list(context)
            for _ in range(3):
                logits = theirs._model_call(torch.tensor([said[-CONTEXT:]]))
                said.append(logits[0, -1].argmax().item())
            pairs += [(context, said[-3:]), (context, [*said[-3:-1], (said[-1] + 1) % 400])]
        requests = requests_of(pairs)
        answers = ours._loglikelihood_tokens(requests)
        assert answers == theirs._loglikelihood_tokens(requests, disable_tqdm=True)
    if autocast is None and dtype == torch.float32:  # in bfloat16 a CPU may break near-ties by the size of the batch
        assert [likeliest for _, likeliest in answers[-4:]] == [True, False, True, False]
    assert ours.truncated == 2 * 2 + 1 + 2 * 1


def test_a_batchs_answers_are_asked_for_before_the_next_batch(folder, monkeypatch):
    """A device works in order: a copy that is enqueued later also waits for the next batch."""
    order, draw = [], random.Random(0)
    pairs = [(tokens(draw, 12), tokens(draw, 3)) for _ in range(3 * BATCH)]
    with both(folder) as (ours, _):
        called, received = ours._model_call, ours._received
        monkeypatch.setattr(ours, "_model_call", lambda batch: order.append("batch") or called(batch))
        monkeypatch.setattr(ours, "_received", lambda *found: order.append("copy") or received(*found))
        ours._loglikelihood_tokens(requests_of(pairs))
    assert order == ["batch", "copy"] * 3


def test_batches_padded_to_a_multiple_have_lm_evals_answers(folder, monkeypatch):
    """As on a GPU: no batch exceeds the context, and the padding behind a sequence changes the last bits at most."""
    draw = random.Random(0)
    pairs = [(tokens(draw, length), tokens(draw, 3)) for length in (1, 14, 15, 40, 100, CONTEXT - 3, CONTEXT + 5)]
    multiple = 80  # CONTEXT is not a multiple of it
    monkeypatch.setitem(downstream.MULTIPLE, "cpu", multiple)
    requests, lengths = requests_of(pairs), []
    with both(folder) as (ours, theirs):
        model_call = ours._model_call
        monkeypatch.setattr(ours, "_model_call", lambda batch: lengths.append(batch.shape[1]) or model_call(batch))
        answers = ours._loglikelihood_tokens(requests)
        expected = theirs._loglikelihood_tokens(requests, disable_tqdm=True)
    assert lengths == [CONTEXT, multiple, multiple]  # up to three sequences each, the longest first
    for (score, likeliest), (other, as_likely) in zip(answers, expected, strict=True):
        assert score == pytest.approx(other, rel=1e-5)
        assert likeliest == as_likely


def test_one_sequence_answers_whatever_is_asked_of_it(folder):
    """lm-eval computes each request by itself here: with its cache, it takes a shorter continuation's logits too early.

    Other batches round otherwise: sums of up to 9 logarithms, of float32 logits.
    """
    draw = random.Random(0)
    sequence, ending = tokens(draw, 30), tokens(draw, CONTEXT)
    pairs = [(sequence[:at], sequence[at:]) for at in (21, 29, 25)]
    pairs += [(tokens(draw, more) + ending[:-3], ending[-3:]) for more in (1, 2, 9)]  # alike once they are cut
    requests = requests_of(pairs)
    with both(folder, logits_cache=False) as (ours, theirs):
        calls, model_call = [], ours._model_call
        ours._model_call = lambda padded: calls.append(len(padded)) or model_call(padded)
        answers = ours._loglikelihood_tokens(requests)
        expected = theirs._loglikelihood_tokens(requests, disable_tqdm=True)
    assert sum(calls) < len(requests)
    for (ours, likeliest), (theirs, as_likely) in zip(answers, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
        assert likeliest == as_likely
    assert len({round(answer, 3) for answer, _ in answers[:3]}) == 3


@pytest.mark.parametrize(("context", "continuation"), [([], [1]), ([1], []), ([1], [2] * (CONTEXT + 1))])
def test_requests_without_an_answer_are_refused(context, continuation, folder):
    numbers = rf"{len(context)} \+ {len(continuation)} tokens: .* should have 1 to {CONTEXT}"
    with both(folder) as (ours, _), pytest.raises(ValueError, match=numbers):
        ours._loglikelihood_tokens(requests_of([([1, 2], [3]), (context, continuation)]))
