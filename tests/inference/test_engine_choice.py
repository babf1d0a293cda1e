"""Which engine the blocks of an accelerated model choose from earlier counts, and the copy of W_d for sparse
engines."""

import pytest
import torch
from inference.small_models import MODELS, assert_same, blocks, layers, logits, make, tokens
from ops import kernel_stand_ins
from torch import nn

import sparsellm
from sparsellm.inference import engine_choice as module
from sparsellm.inference import feedforward
from sparsellm.model import Decoder
from sparsellm.ops import Plan, backend, build, cuda
from sparsellm.policy import Policy

# Which engine runs.


def by(monkeypatch, rule, name="choose_engine"):
    """Let every policy choose by `rule`: the real one leaves layers as small as these dense."""
    monkeypatch.setattr(Policy, name, staticmethod(rule))


@pytest.mark.parametrize("name", ["llama", "decoder"])
def test_engines_follow_the_counts_of_earlier_calls_of_the_same_kind(name, hollow, monkeypatch):
    by(monkeypatch, lambda tokens, width, neurons, nnz, union, current: int(nnz <= tokens * neurons // 10))
    model, many, few = make(name), tokens(256), tokens(5)
    sparsellm.accelerate(model, "cuda")
    sparse, full = (1, 1), (5 * 60, 5)
    hollow.nnz, hollow.union = sparse
    assert hollow.of(model, many) == ["dense"] * 2  # unmeasured
    hollow.nnz, hollow.union = full
    assert hollow.of(model, few) == ["row"] * 2  # also unmeasured
    assert hollow.of(model, few) == ["dense"] * 2
    assert hollow.of(model, many) == ["row"] * 2  # counts of few tokens apply only to few tokens
    hollow.nnz, hollow.union = 5 * 6, 5
    hollow.of(model, few)
    assert hollow.of(model, few) == ["row"] * 2


@pytest.fixture
def quick(monkeypatch):
    """An accelerated bfloat16 model on stand-ins of the kernels' operators; .slow: how often blocks checked a call."""
    slow, checked = [], feedforward.check
    monkeypatch.setattr(build, "load", lambda: None)
    monkeypatch.setattr(module, "forward", cuda.forward)
    by(monkeypatch, lambda *arguments, current: 1)
    for each in (module, feedforward):
        monkeypatch.setattr(each, "sparse_engines_take", lambda tensor: tensor.dtype == torch.bfloat16)
    monkeypatch.setattr(feedforward, "check", lambda *arguments: slow.append(1) or checked(*arguments))
    with kernel_stand_ins.registered():
        model = sparsellm.accelerate(make("llama").bfloat16(), "cuda")
        monkeypatch.setattr(backend, "loaded", lambda: "cuda")
        model.slow = slow
        yield model


def slow_calls_and_logits(model, ids):
    model.slow.clear()
    with torch.no_grad():
        found = logits(model, ids)
    return len(model.slow), found


@pytest.mark.parametrize("count", [5, 100])
@pytest.mark.parametrize("engine", ["row", "dense"])
def test_calls_like_one_before_are_not_checked_again_and_compute_the_same(engine, count, quick, monkeypatch):
    by(monkeypatch, lambda *arguments: 1e9 if engine == "row" else -1.0, "row_density")
    for block in blocks(quick):
        block.choice.plans[module.FEW] = Plan.of(engine)
    few = tokens(count)
    slow, expected = slow_calls_and_logits(quick, few)
    assert slow == 2  # two blocks
    slow_calls_and_logits(quick, few)  # reads what was counted
    for block in blocks(quick):
        block.choice.plans[module.FEW] = Plan.of(engine)
    _, expected = slow_calls_and_logits(quick, few)
    for _ in range(61):
        slow, found = slow_calls_and_logits(quick, few)
        assert slow == 0
        assert torch.equal(found, expected)
    assert slow_calls_and_logits(quick, few)[0] == 2  # one call in 64 is counted


def test_calls_unlike_the_one_before_are_checked(quick):
    few = tokens(5)
    for _ in range(3):
        slow, expected = slow_calls_and_logits(quick, few)
    assert slow == 0
    assert slow_calls_and_logits(quick, tokens(2000))[0] == 2
    block = blocks(quick)[0]
    for change in (
        lambda: block.down_proj.weight.mul_(2),
        lambda: setattr(block.up_proj.weight, "data", block.up_proj.weight.data * 2),
        lambda: setattr(block.gate_proj, "weight", nn.Parameter(block.gate_proj.weight.detach() * 2)),
    ):
        with torch.no_grad():
            change()
        slow, found = slow_calls_and_logits(quick, few)
        assert slow >= 1
        assert not torch.equal(found, expected)
        expected = found
        assert torch.equal(slow_calls_and_logits(quick, few)[1], expected)
        assert slow_calls_and_logits(quick, few)[0] == 0
    quick.to(torch.bfloat16)
    assert slow_calls_and_logits(quick, few)[0] == 2
    with torch.autocast("cpu", torch.bfloat16):
        assert slow_calls_and_logits(quick, few)[0] == 2
    with pytest.raises(ValueError, match=r"x.dtype|w_down.dtype|x has|w_down is"):
        block(torch.zeros(1, 5, 16, dtype=torch.bfloat16))


def test_between_few_and_many_tokens_each_call_is_chosen_for_its_own_number_of_tokens(hollow, monkeypatch):
    by(monkeypatch, lambda *arguments, current: 1)
    asked = []

    def density(tokens, width, neurons):
        asked.append((tokens, width, neurons))
        return 0.1 * tokens  # 6.5 nonzeros per token at 65 tokens, 12.7 at 127

    by(monkeypatch, density, "row_density")
    model = sparsellm.accelerate(make("llama"), "cuda")
    hollow.nnz, hollow.union = 65 * 10, 1
    assert hollow.of(model, tokens(64)) == ["row"] * 2
    assert hollow.of(model, tokens(65)) == ["dense"] * 2  # unmeasured: counts of few tokens do not apply
    assert asked == []
    assert hollow.of(model, tokens(65)) == ["dense"] * 2  # 10 per token are too many
    hollow.nnz = 127 * 10
    assert hollow.of(model, tokens(127)) == ["row"] * 2
    assert asked == [(65, 32, 64)] * 2 + [(127, 32, 64)] * 2
    for block in blocks(model):
        block.choice.per_token = None
        block.choice.counted = 0
    with monkeypatch.context() as capture:
        capture.setattr(module, "is_capturing", lambda: True)
        hollow.of(model, tokens(5))
    hollow.of(model, tokens(100))
    assert [block.choice.counted for block in blocks(model)] == [
        100
    ] * 2  # not from the graph, which has not counted yet
    assert hollow.of(model, tokens(128)) == ["dense"] * 2  # unmeasured
    assert hollow.of(model, tokens(128)) == ["row"] * 2


def test_every_engine_can_be_reached_and_each_block_has_its_own(hollow, monkeypatch):
    asked = []

    def choose(*arguments, current):
        asked.append((*arguments, current))
        return len(asked) % 3

    by(monkeypatch, choose)
    model = sparsellm.accelerate(make("llama"), "cuda")
    hollow.nnz, hollow.union = 7, 9
    seen = [hollow.of(model, tokens(200)) for _ in range(4)]
    assert seen == [["dense", "dense"], ["row", "tile"], ["dense", "row"], ["tile", "dense"]]
    assert asked[:4] == [(200, 32, 64, 7, 9, 0), (200, 32, 64, 7, 9, 0), (200, 32, 64, 7, 9, 1), (200, 32, 64, 7, 9, 2)]


def test_the_tile_engine_has_room_for_several_times_what_was_counted(hollow, monkeypatch):
    by(monkeypatch, lambda *arguments, current: 2)
    model = sparsellm.accelerate(make("llama"), "cuda")
    ids = tokens(200)
    for nnz, room in ((200 * 80, 320), (200 * 100, 416), (200 * 320, 1280)):
        hollow.nnz, hollow.union = nnz, 9
        for _ in range(2):  # the second call decides from the first
            hollow.of(model, ids)
        assert [block.choice.plans[module.MANY] for block in blocks(model)] == [Plan.of("tile", room)] * 2


def test_blocks_that_do_not_count_are_no_hindrance(hollow):
    """A model in training of which one layer is not: its block alone computes without its training plan."""
    model = sparsellm.accelerate(make("llama"), "cuda").train()
    layers(model)[1].eval()
    hollow.nnz, hollow.union = 1, 1
    model(input_ids=tokens(200))
    assert hollow.engines == ["traced", "dense"]
    assert [block.choice.counted for block in blocks(model)] == [0, 0]
    assert hollow.of(model.eval(), tokens(200)) == ["dense"] * 2
    assert [block.choice.counted for block in blocks(model)] == [200] * 2


def test_counts_under_way_are_not_waited_for(hollow):
    model = sparsellm.accelerate(make("llama"), "cuda")
    hollow.nnz, hollow.union = 64 * 5, 5
    hollow.of(model, tokens(5))
    for block in blocks(model):
        block.choice.counts[3] = module.UNDER_WAY  # as if the copy were not finished
    hollow.nnz = 1
    for _ in range(2):
        assert hollow.of(model, tokens(5)) == ["row"] * 2
        assert [block.choice.counts.tolist() for block in blocks(model)] == [[64 * 5, 0, 0, -1, 0]] * 2  # one at a time
    for block in blocks(model):
        block.choice.counts[3] = 5
    assert hollow.of(model, tokens(5)) == ["dense"] * 2
    assert hollow.of(model, tokens(5)) == ["row"] * 2


def test_most_calls_copy_nothing_to_the_host(hollow, monkeypatch):
    monkeypatch.setattr(module, "COUNT_EVERY", (8, 2, 4))
    model = sparsellm.accelerate(make("llama"), "cuda")
    hollow.nnz, hollow.union = 1, 1
    sent = []
    for _ in range(18):
        hollow.of(model, tokens(5))
        sent.append(blocks(model)[0].choice.counted)
    assert [i for i, tokens_ in enumerate(sent) if tokens_] == [0, 8, 16]
    sent.clear()
    for _ in range(6):  # calls of many tokens are counted separately
        hollow.of(model, tokens(200))
        sent.append(blocks(model)[0].choice.counted)
    assert [i for i, tokens_ in enumerate(sent) if tokens_ == 200] == [0, 4]
    sent.clear()
    for _ in range(5):  # and so are calls of medium size
        hollow.of(model, tokens(100))
        sent.append(blocks(model)[0].choice.counted)
    assert [i for i, tokens_ in enumerate(sent) if tokens_ == 100] == [0, 2, 4]


def test_a_graph_is_captured_with_what_the_call_before_it_counted_and_counts_nothing(hollow, monkeypatch):
    model = sparsellm.accelerate(make("llama"), "cuda")
    hollow.nnz, hollow.union = 64 * 5, 5
    assert hollow.of(model, tokens(5)) == ["row"] * 2
    with monkeypatch.context() as capture:
        capture.setattr(module, "is_capturing", lambda: True)
        hollow.nnz = 1
        assert hollow.of(model, tokens(5)) == ["dense"] * 2
        assert [block.choice.counted for block in blocks(model)] == [0] * 2
        assert hollow.of(model, tokens(5)) == ["dense"] * 2


@pytest.mark.parametrize("name", MODELS)
def test_dense_calls_that_nobody_counts_are_the_same(name, hollow, monkeypatch):
    """PyTorch computes them if the block has no statistics to return."""
    monkeypatch.setattr(module, "COUNT_EVERY", (3, 1000, 3))
    monkeypatch.setattr(module, "fuses", lambda tokens: False)
    model = make(name)
    expected = logits(model, tokens(100))
    sparsellm.accelerate(model, "cuda")
    hollow.of(model, tokens(100))  # the first of a thousand is counted
    counts = "decoder" in name
    for engines in (["dense"] * 2, ["dense"] * 2 * counts, ["dense"] * 2 * counts):
        hollow.engines.clear()
        assert_same(logits(model, tokens(100)), expected)
        assert hollow.engines == (["dense"] * 2 if counts else [])
        hollow.of(model, tokens(200))
        assert hollow.engines == engines
    monkeypatch.setattr(module, "is_capturing", lambda: True)
    hollow.counted.clear()
    hollow.of(model, tokens(100))
    assert hollow.counted == [counts] * 2


@pytest.mark.parametrize("engine", ["dense", "row", "tile"])
def test_a_fixed_engine_is_kept_and_counts_nothing(engine, hollow):
    model = sparsellm.accelerate(make("llama"), "cuda", engine)
    hollow.nnz, hollow.union = 64 * 5, 5
    for ids in (tokens(5), tokens(200), tokens(5)):
        assert hollow.of(model, ids) == [engine] * 2
    assert [block.choice.counted for block in blocks(model)] == [0] * 2
    assert all((block.choice.w_down_t is None) == (engine == "dense") for block in blocks(model))


def test_training_makes_no_copies(hollow):
    model = sparsellm.accelerate(make("llama").train(), "cuda")
    model(tokens(5)).logits.sum().backward()
    assert [block.choice.w_down_t for block in blocks(model)] == [None] * 2


@pytest.mark.parametrize("name", MODELS)
def test_training_follows_its_own_plan(name, hollow):
    """Leftovers of calls without gradients: stale copies, counts in flight."""
    model = sparsellm.accelerate(make(name).train(), "cuda")
    for block in blocks(model):
        block.training_plan = Plan().tensor()
        block.choice.plans[module.MANY] = Plan.of("row")
    for _ in range(2):
        logits(model, tokens(200))
        with torch.no_grad():
            for block in blocks(model):
                block.down_proj.weight.mul_(2)
        left = [(block.choice.w_down_t, block.choice.counted) for block in blocks(model)]
        assert all(copy is not None and counted for copy, counted in left)
        hollow.engines.clear()
        (model.logits(tokens(9)) if isinstance(model, Decoder) else model(tokens(9)).logits).sum().backward()
        assert hollow.engines == ["dense"] * 2
        assert [(block.choice.w_down_t, block.choice.counted) for block in blocks(model)] == left


def test_other_dtypes_run_dense_without_a_copy(hollow):
    model = sparsellm.accelerate(make("llama").double(), "cuda")
    assert hollow.of(model, tokens(5)) == ["dense"] * 2
    assert hollow.copies == [None] * 2


# The neuron-major copy of W_d: the stand-in refuses a copy that does not match the current weight.


def test_the_copy_is_made_once_for_each_change_of_the_weight(hollow):
    model = sparsellm.accelerate(make("llama"), "cuda", "row")

    def made():
        """Whether this call made each block's copy; the stand-in checks that it matches the current weight."""
        before = [block.choice.w_down_t for block in blocks(model)]
        hollow.of(model, tokens(5))
        return [block.choice.w_down_t is not copy for block, copy in zip(blocks(model), before, strict=True)]

    assert made() == [False, False]  # accelerate made them
    addresses = [block.choice.w_down_t.weight.data_ptr() for block in blocks(model)]
    weight = blocks(model)[0].down_proj.weight
    with torch.no_grad():
        weight.mul_(2)
    assert made() == [True, False]
    model.load_state_dict({key: value + 1 for key, value in model.state_dict().items()})
    assert made() == [True, True]
    blocks(model)[0].down_proj.weight = nn.Parameter(torch.randn(32, 64))
    assert made() == [True, False]
    weight = blocks(model)[1].down_proj.weight
    weight.data = weight.data.clone() * 2
    assert made() == [False, True]
    assert made() == [False, False]
    assert [block.choice.w_down_t.weight.data_ptr() for block in blocks(model)] == addresses  # always the same memory


def test_a_new_weight_never_takes_the_place_of_the_old_one(hollow):
    """Otherwise, weights of the same size created one after the other would get the same address and version."""
    model = sparsellm.accelerate(make("llama"), "cuda", "row")
    for _ in range(8):
        blocks(model)[0].down_proj.weight = nn.Parameter(torch.randn(32, 64))
        hollow.of(model, tokens(5))


def test_a_weight_that_changed_is_refused_during_capture(hollow, monkeypatch):
    model = sparsellm.accelerate(make("llama"), "cuda", "row")
    with torch.no_grad():
        blocks(model)[0].down_proj.weight.mul_(2)
    with monkeypatch.context() as capture:
        capture.setattr(module, "is_capturing", lambda: True)
        with pytest.raises(ValueError, match="call the model once before the capture"):
            hollow.of(model, tokens(5))
    hollow.of(model, tokens(5))


def test_a_weight_made_in_inference_mode_is_refused(hollow):
    model = sparsellm.accelerate(make("llama"), "cuda", "row")
    with torch.inference_mode():
        blocks(model)[0].down_proj.weight = nn.Parameter(torch.randn(32, 64), requires_grad=False)
    with pytest.raises(ValueError, match="was created in inference mode"):
        hollow.of(model, tokens(5))


def test_moves_to_another_dtype_and_back_are_noticed(hollow):
    model = sparsellm.accelerate(make("llama"), "cuda")
    hollow.nnz, hollow.union = 1, 1
    assert hollow.of(model, tokens(5)) == ["row"] * 2
    assert hollow.of(model.to(torch.bfloat16), tokens(5)) == ["dense"] * 2
    assert [block.choice.w_down_t for block in blocks(model)] == [None] * 2
    hollow.copies.clear()
    assert hollow.of(model.float(), tokens(5)) == ["row"] * 2
    assert all(copy.dtype == torch.float32 for copy in hollow.copies)


@pytest.mark.parametrize("layer_count", [1, 2])
def test_a_stack_called_without_its_head_chooses_too(layer_count, hollow):
    model = sparsellm.accelerate(make("llama", num_hidden_layers=layer_count), "cuda")
    hollow.nnz, hollow.union = 64 * 5, 5
    for engine in ("row", "dense"):
        hollow.engines.clear()
        with torch.no_grad():
            model.model(tokens(5))
        assert hollow.engines == [engine] * layer_count


def test_parts_called_without_the_model_are_right_too(hollow):
    model = make("decoder")
    expected = logits(model, tokens(200))
    sparsellm.accelerate(model, "cuda", "tile")
    assert_same(model.logits(tokens(200)).detach(), expected)
    with torch.no_grad():
        blocks(model)[0].down_proj.weight.mul_(2)
    model.logits(tokens(200))
