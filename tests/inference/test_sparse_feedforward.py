"""SparseFeedForward in other people's training: the gradients of Llama's block, engines chosen by its own counts."""

import copy
import weakref
from concurrent.futures import ProcessPoolExecutor
from unittest.mock import patch

import pytest
import torch
from processes import PATIENCE, SERVER, joined
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import ArceeConfig, LlamaConfig
from transformers.models.arcee.modeling_arcee import ArceeMLP
from transformers.models.llama.modeling_llama import LlamaMLP

import sparsellm
from sparsellm.inference import feedforward
from sparsellm.inference.engine_choice import _choice_of
from sparsellm.ops import Engine, Plan
from sparsellm.policy import Policy, training

HIDDEN, NEURONS = 16, 48
L1 = 0.1


def pair(gated=True, dtype=torch.float32):
    """Transformers' block and our layer with the same weights."""
    torch.manual_seed(0)
    config, block = (LlamaConfig, LlamaMLP) if gated else (ArceeConfig, ArceeMLP)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": NEURONS, "num_attention_heads": 2}
    theirs = block(config(**sizes, hidden_act="relu")).to(dtype)
    ours = sparsellm.SparseFeedForward(HIDDEN, NEURONS, gated).to(dtype)
    ours.load_state_dict(theirs.state_dict())  # strict: the names are the same
    return theirs, ours


def tokens(*shape, dtype=torch.float32):
    return torch.randn(*shape, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)


def hidden(block, x):
    gate = block.act_fn((block.gate_proj if hasattr(block, "gate_proj") else block.up_proj)(x))
    return gate * block.up_proj(x) if hasattr(block, "gate_proj") else gate


def gradients(block, x, y, l1):
    found = torch.autograd.grad(y.float().square().sum() + L1 * l1, [x, *block.parameters()])
    return [y, l1, *found]


def of_theirs(block, x):
    return gradients(block, x, block(x), hidden(block, x).abs().float().sum() / max(x.shape[:-1].numel(), 1))


def of_ours(layer, x):
    y = layer(x)
    return gradients(layer, x, y, layer.l1())


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "nongated"])
@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (2, 3, 4), (0, 4)], ids=str)
def test_values_and_gradients_are_those_of_the_models_block(shape, gated):
    theirs, ours = pair(gated, torch.float64)
    x = tokens(*shape, dtype=torch.float64).requires_grad_()
    for found, expected in zip(of_ours(ours, x), of_theirs(theirs, x), strict=True):
        torch.testing.assert_close(found, expected, check_dtype=False)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x))


def test_autocast_computes_in_bfloat16_and_gives_float32_gradients():
    theirs, ours = pair()
    x = tokens(2, 64).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = of_ours(ours, x), of_theirs(theirs, x)
    assert found[0].dtype == torch.bfloat16
    assert all(gradient.dtype == torch.float32 for gradient in found[2:])
    for mine, other in zip(found, expected, strict=True):
        # Sums of up to 128 products, each factor rounded to bfloat16 once or twice.
        assert (mine - other).norm() <= 4 * torch.finfo(torch.bfloat16).eps * other.norm()


def test_recomputation_gives_the_same_and_leaves_the_l1_of_the_forward_pass():
    _, ours = pair()
    x = tokens(2, 3).requires_grad_()
    expected = of_ours(ours, x)
    y = checkpoint(ours, x, use_reentrant=False)
    l1 = ours.l1()
    found = gradients(ours, x, y, l1)
    assert all(torch.equal(mine, other) for mine, other in zip(found, expected, strict=True))
    assert ours.in_training.last.l1.grad_fn is not None
    assert torch.equal(ours.l1(), l1)


def test_a_sharded_layer_trains_as_a_whole_one(tmp_path):
    whole, sharded = (nn.Sequential(pair()[1], nn.RMSNorm(HIDDEN)) for _ in range(2))
    x = tokens(2, 3)
    with joined(tmp_path / "store"):
        fully_shard(sharded, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
        for model in (whole, sharded):
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            for _ in range(2):
                (model(x).sum() + L1 * sparsellm.l1_loss(model)).backward()
                optimizer.step()
                optimizer.zero_grad()
        for mine, other in zip(sharded.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(mine.full_tensor(), other)


def test_a_subclass_of_linear_is_taken_if_it_adds_nothing_to_the_forward_pass():
    class Named(nn.Linear):
        """As torchtitan's."""

    theirs, ours = pair()
    weight, x = ours.up_proj.weight, tokens(5)
    ours.up_proj = Named(HIDDEN, NEURONS, bias=False)
    ours.up_proj.weight = weight
    torch.testing.assert_close(ours(x), theirs(x))
    ours.up_proj.register_forward_pre_hook(lambda *_: None)  # as FSDP2 does to the modules that it shards
    with pytest.raises(ValueError, match="up_proj of an accelerated block is now Named"):
        ours(x)
    nn.utils.parametrizations.weight_norm(ours.down_proj)
    ours.up_proj = nn.Linear(HIDDEN, NEURONS, bias=False)
    with pytest.raises(ValueError, match="down_proj of an accelerated block is now ParametrizedLinear"):
        ours(x)


def test_a_copy_is_a_layer_of_its_own():
    _, ours = pair()
    ours(tokens(3))
    other = copy.deepcopy(ours)
    assert torch.equal(other(tokens(3)), ours(tokens(3)))
    assert other.in_training is not ours.in_training
    assert other.in_training.plan.data_ptr() != ours.in_training.plan.data_ptr()


def test_a_layer_made_without_memory_trains_once_it_has_some():
    theirs, expected = pair()
    with torch.device("meta"):
        ours = sparsellm.SparseFeedForward(HIDDEN, NEURONS)
    ours.to_empty(device="cpu").load_state_dict(theirs.state_dict())
    x = tokens(3).requires_grad_()
    assert all(torch.equal(mine, other) for mine, other in zip(of_ours(ours, x), of_ours(expected, x), strict=True))
    assert ours.counts()["engine"] == "dense"


def test_what_cannot_be_made_or_asked_is_refused():
    with pytest.raises(ValueError, match="activation is 'silu': it should be 'relu'"):
        sparsellm.SparseFeedForward(16, 48, activation="silu")
    with pytest.raises(ValueError, match="intermediate is 50: it should be a multiple of 8 up to 65536"):
        sparsellm.SparseFeedForward(16, 50)
    with pytest.raises(RuntimeError, match="no call with gradients yet"):
        sparsellm.SparseFeedForward(16, 48).l1()
    accelerated = nn.ModuleList([pair()[0]])
    sparsellm.accelerate(accelerated, kernels="torch")
    with pytest.raises(RuntimeError, match=r"accelerate should be called with training=True"):
        sparsellm.l1_loss(accelerated)
    with pytest.raises(RuntimeError, match=r"nn\.DataParallel: it should have one process per GPU"):
        sparsellm.SparseFeedForward(16, 48)._replicate_for_data_parallel()  # as nn.DataParallel calls it
    with pytest.raises(ValueError, match="Linear has no SparseFeedForward"):
        sparsellm.l1_loss(nn.Linear(2, 2))


def test_counts_are_those_of_the_call():
    theirs, ours = pair()
    x = tokens(4, 5)
    ours(x)
    h = hidden(theirs, x).flatten(0, 1)
    found, fired = ours.counts(), h != 0
    assert (found.pop("engine"), found.pop("nonzeros")) == ("dense", fired.sum().item() / 20)
    assert found == pytest.approx(
        {"fired": fired.any(0).float().mean().item(), "l1": h.abs().sum().item() / 20, "rest_calls": 0}
    )


# Its own choice, around stand-ins for a GPU's kernels.


@pytest.fixture
def choosing(hollow, monkeypatch):
    """Layers choose on a CPU, and the policy chooses what a test puts into `engines`."""
    asked, engines = [], [Engine.tile]

    def choose(tokens, width, neurons, nnz, union, current):
        asked.append((tokens, width, neurons, nnz, union, current))
        return engines[0]

    monkeypatch.setattr(training, "takes_kernels", lambda _weight: True)
    monkeypatch.setattr(Policy, "choose_training_engine", staticmethod(choose))
    hollow.asked, hollow.choices = asked, engines
    return hollow


def step(layer, optimizer, x, recompute=False):
    y = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
    y.square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("recompute", [False, True], ids=["", "recompute"])
def test_the_layer_decides_at_the_steps_of_its_optimizer_as_the_trainer_does(recompute, choosing):
    _, ours = pair()
    optimizer, other = torch.optim.SGD(ours.parameters(), 0.0), torch.optim.SGD([nn.Parameter(torch.ones(1))])
    x, seen = tokens(2, 64).requires_grad_(), []
    for number in range(1, 12):
        choosing.engines.clear()
        ours(x)  # a second micro-batch
        step(ours, optimizer, x, recompute)
        other.step()  # of no layer
        assert len(choosing.engines) == 2 + recompute
        seen.append(set(choosing.engines))
        if number == 3:
            choosing.choices[0] = Engine.dense
    assert seen == [{"dense"}] * 2 + [{"tile"}] * 8 + [{"dense"}]
    with torch.no_grad():
        h = torch.relu(ours.gate_proj(x.flatten(0, 1))) != 0
    call = 128, HIDDEN, NEURONS, h.sum().item(), h.any(0).sum().item()
    assert choosing.asked == [(*call, Engine.dense), (*call, Engine.tile)]


def test_a_layer_that_is_not_trained_or_no_longer_accelerated_decides_nothing(choosing):
    model = nn.ModuleDict({"mlp": pair()[0], "frozen": pair()[0]})
    sparsellm.accelerate(model, "cuda", training=True)
    mlp, frozen = model["mlp"], model["frozen"]
    optimizer, x = torch.optim.SGD(mlp.parameters(), 0.0), tokens(2, 64)
    for _ in range(3):
        step(nn.Sequential(frozen, mlp), optimizer, x)
    assert [block.counts()["engine"] for block in (mlp, frozen)] == ["tile", "dense"]
    sparsellm.restore(model)
    choosing.asked.clear()
    for _ in range(9):
        step(mlp, optimizer, x)
    assert choosing.asked == []


@pytest.mark.usefixtures("small_choices")
def test_evaluation_keeps_no_copy_of_the_weights_of_a_layer_that_trains(monkeypatch):
    _, ours = pair()
    monkeypatch.setattr(feedforward.EngineChoice, "neuron_major", None)
    with torch.no_grad(), pytest.raises(ValueError, match="a CUDA device for the row engine"):  # only a GPU goes on
        ours.eval()(tokens(4))


def test_an_optimizer_inside_of_another_decides_nothing(choosing):
    """ZeroRedundancyOptimizer steps an inner optimizer, whose weights differ between the ranks."""

    class Outer(torch.optim.Optimizer):
        def step(self):
            inner.step()

    model = nn.Sequential(pair()[1], pair()[1])
    outer, inner = Outer(model.parameters(), {}), torch.optim.SGD(model[0].parameters(), 0.0)
    for _ in range(3):
        step(model, outer, tokens(2, 64))
    assert [layer.counts()["engine"] for layer in model] == ["tile"] * 2
    assert len(choosing.asked) == 2
    assert inner not in training._steps


def test_the_l1_loss_is_of_the_layers_that_this_step_has_called():
    model, x = nn.Sequential(pair()[1], pair()[1]), tokens(3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(x)
    both = sparsellm.l1_loss(model)
    both.backward()
    optimizer.step()
    assert torch.equal(sparsellm.l1_loss(model), both.detach())
    assert not sparsellm.l1_loss(model).requires_grad
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"L1 term is read under torch\.no_grad"):
        sparsellm.l1_loss(model)
    model[1](x)  # as LayerDrop does
    l1 = sparsellm.l1_loss(model)
    l1.backward()
    assert torch.equal(l1, model[1].l1())


def test_a_layer_made_by_its_sizes_needs_no_acceleration_and_is_freed_at_once():
    model = nn.Sequential(sparsellm.SparseFeedForward(16, 48))
    with pytest.raises(ValueError, match="has a SparseFeedForward made by its sizes: it should have none"):
        sparsellm.accelerate(model, training=True)
    sparsellm.restore(model)
    assert model[0] in training._layers
    layer = weakref.ref(model[0])
    del model
    assert layer() is None


def test_a_layer_that_fsdp_moves_is_found_by_compiled_code():
    _, ours = pair()
    ours.handle.data = ours.handle.clone()  # as fully_shard moves a buffer
    assert _choice_of(ours.handle) is ours.choice


def decided(rank, folder):
    """What a rank's policy is asked after the first steps, with the kernels of all ranks alike and not; each rank has
    other data."""
    found = []
    for alike in (True, False):
        asked = []

        def choose(*counts, current, asked=asked):
            asked.append(counts)
            return Engine.dense

        with (
            joined(folder / str(alike), rank, 2),
            patch.object(training, "takes_kernels", lambda _weight: True),
            patch.object(training.backend, "loaded", lambda alike=alike: None if alike or rank == 0 else "cuda"),
            patch.object(training.first_use, "policy_for", lambda *_: Policy()),
            patch.object(feedforward, "sparse_engines_take", lambda _x: True),
            patch.object(feedforward, "_kernels_run", lambda: True),
            patch.object(Policy, "choose_training_engine", staticmethod(choose)),
        ):
            _, ours = pair()
            optimizer, x = torch.optim.SGD(ours.parameters(), 0.0), tokens(64 * (rank + 1))
            for _ in range(2):
                step(ours, optimizer, x)
            found.append((asked, round(ours.counts()["nonzeros"] * len(x)), Plan.read(ours.in_training.plan)))
    return found


@pytest.mark.slow
def test_ranks_decide_together_or_each_alone_if_their_kernels_differ(tmp_path):
    with ProcessPoolExecutor(2, SERVER) as pool:
        first, second = (task.result(3 * PATIENCE) for task in [pool.submit(decided, n, tmp_path) for n in range(2)])
    (together, nonzeros, plan), (others, more, same) = first[0], second[0]
    assert together == others
    assert [counts[:4] for counts in together] == [(96, HIDDEN, NEURONS, (nonzeros + more) / 2)]
    assert plan == same
    for (asked, nonzeros, _), tokens_of_rank in ((first[1], 64), (second[1], 128)):
        assert [counts[:4] for counts in asked] == [(tokens_of_rank, HIDDEN, NEURONS, nonzeros)]
