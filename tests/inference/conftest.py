"""`tokenizer_folder`: a tokenizer of two words. `hollow`: accelerated models without a GPU.

There the operator runs dense. The whole machinery runs around stand-ins at the places where it is called, which note
the engine that each call asks for, and return the counts that a test sets.
"""

import pytest
import torch
from inference.small_models import is_float32, logits
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from sparsellm.inference import accelerate, engine_choice, feedforward
from sparsellm.model import Decoder
from sparsellm.ops import Engine, Plan, build


class Hollow:
    """Stand-in for a GPU's operator: `engines` are the requested ones, `nnz` and `union` the counts of each call."""

    def __init__(self):
        self.engines, self.copies, self.counted, self.nnz, self.union = [], [], [], None, None

    def stand_for_forward(self, forward):
        def run(x, w_gate, w_up, w_down, plan, w_down_t, saving, counting=True):
            self.engines.append(plan.engine.name)
            self.copies.append(w_down_t)
            assert plan.engine == Engine.dense or torch.equal(w_down_t, w_down.T)
            y, l1, fired, counts, saved = forward(x, w_gate, w_up, w_down, Plan(), None, saving)
            self.counted.append(counting)
            if self.nnz is not None:
                counts = torch.tensor([self.nnz, 0, 0, self.union, 0])
            return y, l1, fired, counts, saved

        return run

    def stand_for_feedforward(self, feedforward):
        def run(x, w_gate, w_up, w_down, plan, rounded):
            assert rounded is None
            name = "traced" if plan is None else (plan if isinstance(plan, Plan) else Plan.read(plan)).engine.name
            self.engines.append(name)
            return feedforward(x, w_gate, w_up, w_down, None if plan is None else Plan())

        return run

    def of(self, model, ids):
        """The engines of one forward pass."""
        self.engines.clear()
        with torch.no_grad():  # as is inference mode, in which logits are asked for
            logits(model, ids) if not isinstance(model, Decoder) else model(ids, ids)
        return self.engines[:]


@pytest.fixture
def tokenizer_folder(tmp_path):
    words = {"<|endoftext|>": 0, "a": 1}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<|endoftext|>")), eos_token="<|endoftext|>"
    )
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


@pytest.fixture
def small_choices(monkeypatch):
    """Choices as on a GPU, in models this small: the CPU's float32 for the GPU's bfloat16, few tokens for many."""
    monkeypatch.setattr(build, "load", lambda: None)
    monkeypatch.setattr(engine_choice, "MANY_TOKENS", 128)
    monkeypatch.setattr(engine_choice, "COUNT_EVERY", (1, 1, 1))
    for module in (engine_choice, accelerate, feedforward):
        monkeypatch.setattr(module, "sparse_engines_take", is_float32)


@pytest.fixture
def hollow(small_choices, monkeypatch):
    stand_in = Hollow()
    monkeypatch.setattr(engine_choice, "fuses", lambda _tokens: True)  # otherwise PyTorch would compute dense calls
    monkeypatch.setattr(engine_choice, "forward", stand_in.stand_for_forward(engine_choice.forward))
    monkeypatch.setattr(feedforward, "feedforward", stand_in.stand_for_feedforward(feedforward.feedforward))
    return stand_in
