"""`hollow`: accelerated models without a GPU.

There the operator runs dense. The whole machinery runs around a stand-in at the place where it is called, which notes
the engine that each call asks for, and returns the counts that a test sets.
"""

import pytest
import torch
from model.small_models import logits

from sparsellm.model import Decoder
from sparsellm.model import accelerate as module
from sparsellm.ops import ENGINES, plan_of
from sparsellm.ops.layout import check_fresh


class Hollow:
    """Stands for the operator of a GPU: `engines` are those asked for, `nnz` and `union` what each call counts."""

    def __init__(self):
        self.engines, self.copies, self.nnz, self.union = [], [], None, None

    def stand_for(self, operator):
        def run(*arguments):
            *tensors, plan, w_down_t = arguments
            if plan is None:
                self.engines.append("traced")
                return operator(*tensors, None)
            self.engines.append(ENGINES[int(plan[0])])
            self.copies.append(w_down_t)
            if self.engines[-1] != "dense":
                check_fresh(w_down_t.weight, w_down_t.stamp, tensors[-1])
                assert torch.equal(w_down_t.weight, tensors[-1].T)
            out = operator(*tensors, plan_of("dense"), w_down_t)
            return out if self.nnz is None else out._replace(nnz=out.nnz * 0 + self.nnz, union=out.nnz * 0 + self.union)

        return run

    def of(self, model, ids):
        """The engines of one forward pass."""
        self.engines.clear()
        with torch.no_grad():  # as is inference mode, in which logits are asked for
            logits(model, ids) if not isinstance(model, Decoder) else model(ids, ids)
        return self.engines[:]


@pytest.fixture
def hollow(monkeypatch):
    stand_in = Hollow()
    monkeypatch.setattr(module.build, "load", lambda: None)
    monkeypatch.setattr(module, "MANY_TOKENS", 128)  # enough tokens to be many, in models this small
    monkeypatch.setattr(module, "sparse_engines_take", lambda _device, dtype: dtype == torch.float32)
    for name in ("gated_ffn", "nongated_ffn"):
        monkeypatch.setattr(module, name, stand_in.stand_for(getattr(module, name)))
    return stand_in
