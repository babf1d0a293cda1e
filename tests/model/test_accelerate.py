"""Accelerated models: same results and weights, refusals that change nothing, engines chosen from earlier counts.

Without a GPU the operator runs dense. `hollow` lets the whole machinery run around it: it stands where the operator is
called, notes the engine that each call asks for, and returns the counts that a test sets.
"""

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn
from transformers import ArceeConfig, ArceeForCausalLM, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import sparsellm
from sparsellm.config import Activation, ModelConfig
from sparsellm.model import Decoder
from sparsellm.model import accelerate as module
from sparsellm.ops import ENGINES, plan_of
from sparsellm.ops.build import KernelsUnavailable
from sparsellm.ops.layout import check_fresh

SIZE = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
# Sums of K and of N float32 products in another order, once per layer, relative to the largest logit.
TOLERANCE = torch.finfo(torch.float32).eps * (32 + 64) * 2
MODELS = ["llama", "arcee", "decoder", "nongated_decoder"]


def make(name, **changes):
    torch.manual_seed(0)
    if "decoder" in name:
        config = ModelConfig(96, 32, 64, 2, 4, context_length=256, init_std=0.2, gated=name == "decoder")
        return Decoder(config, changes.get("activation", Activation.relu)).eval()
    config, model = (LlamaConfig, LlamaForCausalLM) if name == "llama" else (ArceeConfig, ArceeForCausalLM)
    settings = {**SIZE, "hidden_act": "relu", "initializer_range": 0.2, "max_position_embeddings": 256, **changes}
    return model(config(**settings)).eval()


def layers(model):
    return model.layers if isinstance(model, Decoder) else model.model.layers


def blocks(model):
    return [layer.mlp for layer in layers(model)]


def tokens(positions, sequences=1):
    return torch.randint(96, (sequences, positions), generator=torch.Generator().manual_seed(positions))


def logits(model, ids):
    with torch.no_grad():
        return model.logits(ids) if isinstance(model, Decoder) else model(ids).logits


def assert_same(ours, expected):
    torch.testing.assert_close(ours, expected, rtol=0, atol=TOLERANCE * expected.abs().max().item())


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


# The same model.


@pytest.mark.parametrize("name", MODELS)
def test_results_are_the_models_own(name, hollow):
    model = make(name)
    for ids in (tokens(5, 2), tokens(200)):
        expected = logits(model, ids)
        for kernels, engine in (("torch", None), ("cuda", None), ("cuda", "tile")):
            sparsellm.accelerate(model, kernels, engine)
            assert_same(logits(model, ids), expected)
            assert_same(logits(model, ids), expected)
            sparsellm.restore(model)


@pytest.mark.parametrize("name", MODELS)
def test_restoring_puts_the_same_objects_back(name, hollow):
    model = make(name)
    before, children = blocks(model), [dict(block.named_children()) for block in blocks(model)]
    expected = logits(model, tokens(9))
    sparsellm.accelerate(model, "cuda")
    assert all(isinstance(block, module.SparseFeedForward) for block in blocks(model))
    logits(model, tokens(9))
    assert sparsellm.restore(model) is model
    assert [id(block) for block in blocks(model)] == [id(block) for block in before]
    assert [dict(block.named_children()) for block in blocks(model)] == children
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert torch.equal(logits(model, tokens(9)), expected)
    assert sparsellm.restore(model) is model  # nothing to undo


@pytest.mark.parametrize("name", MODELS)
def test_the_state_dict_is_the_same_in_both_directions(name, hollow):
    model, other = make(name), make(name)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2)
    before = model.state_dict(keep_vars=True)
    sparsellm.accelerate(model, "cuda")
    logits(model, tokens(200))
    during = model.state_dict(keep_vars=True)
    assert list(during) == list(before)
    assert all(during[key] is before[key] for key in before)
    model.load_state_dict(other.state_dict())
    assert_same(logits(model, tokens(5)), logits(other, tokens(5)))
    sparsellm.restore(model)
    assert all(torch.equal(value, other.state_dict()[key]) for key, value in model.state_dict().items())


def test_an_accelerated_model_saves_as_a_stock_one(hollow, tmp_path):
    model = make("llama")
    expected = logits(model, tokens(9))
    sparsellm.accelerate(model, "cuda")
    logits(model, tokens(9))
    model.save_pretrained(tmp_path)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.equal(logits(loaded, tokens(9)), expected)


@pytest.mark.parametrize("name", ["llama", "arcee"])
def test_generation_is_the_same_and_decodes_on_rows(name, hollow):
    model, prompt = make(name), tokens(150)
    hollow.nnz, hollow.union = 5, 5
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(prompt, **settings)
    sparsellm.accelerate(model, "cuda")
    assert torch.equal(model.generate(prompt, **settings), expected)
    assert hollow.engines == ["dense"] * 2 + ["row"] * 14


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_right_in_either_mode(name, hollow):
    def gradients(model):
        out = model(tokens(9), tokens(9)) if isinstance(model, Decoder) else model(tokens(9)).logits
        (out.ce if isinstance(model, Decoder) else out.square().sum()).backward()
        found = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        return found

    model = make(name)
    expected = gradients(model)
    sparsellm.accelerate(model, "cuda")
    with torch.inference_mode():  # what it leaves behind must not get in the way of gradients
        logits(model, tokens(9))
    for training, engines in ((False, {"dense"}), (True, {"traced"})):  # the row engine has no backward
        hollow.engines.clear()
        for ours, theirs in zip(gradients(model.train(training)), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE * theirs.abs().max().item())
        assert set(hollow.engines) == engines


def test_a_copy_of_an_accelerated_model_is_a_model_of_its_own(hollow):
    model = sparsellm.accelerate(make("llama"), "cuda")
    other = copy.deepcopy(model)
    hollow.nnz, hollow.union = 64 * 5, 0
    for _ in range(2):
        engines = hollow.of(other, tokens(5))
    assert engines == ["dense"] * 2
    assert hollow.of(model, tokens(5)) == ["row"] * 2
    assert blocks(other)[0].w_down_t is not blocks(model)[0].w_down_t


# What is refused.


class Scaled(nn.Module):
    """A block that looks like Llama's, and multiplies by a constant."""

    def __init__(self, inner):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = inner.gate_proj, inner.up_proj, inner.down_proj
        self.act_fn = nn.ReLU()

    def forward(self, x):
        return 1.25 * self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Quantised(nn.Linear):
    pass


def spoil(change):
    def build():
        model = make("llama")
        change(model.model.layers[1].mlp, model)
        return model

    return build


def scale(mlp, model):
    model.model.layers[1].mlp = Scaled(mlp)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: make("llama", hidden_act="silu"), r"model.layers.0.mlp.act_fn is SiLU\w*: it should be ReLU"),
        (lambda: make("llama", hidden_act="gelu"), r"model.layers.0.mlp.act_fn is GELU\w*: it should be ReLU"),
        (lambda: make("arcee", hidden_act="relu2"), "model.layers.0.mlp.act_fn is ReLUSquared.*: it should be ReLU"),
        (lambda: make("decoder", activation=Activation.silu), "activation of layers.0.mlp is SiLU: it should be ReLU"),
        (lambda: make("llama", mlp_bias=True), "model.layers.0.mlp.gate_proj has a bias: it should have none"),
        (
            lambda: make("llama", intermediate_size=60),
            "model.layers.0.mlp.up_proj.out_features is 60: it should be a multiple of 8 up to 65536",
        ),
        (lambda: make("llama").half(), "gate_proj.weight is torch.float16: it should be torch.bfloat16"),
        (lambda: make("llama").to("meta"), "gate_proj.weight is on the meta device: it should be loaded"),
        (
            spoil(lambda mlp, _: setattr(mlp, "up_proj", Quantised(32, 64, bias=False))),
            "model.layers.1.mlp.up_proj is Quantised with a weight of type Parameter: it should be a plain nn.Linear",
        ),
        (
            spoil(lambda mlp, _: setattr(mlp, "down_proj", nn.Linear(72, 32, bias=False))),
            r"model.layers.1.mlp.down_proj.weight is \[32, 72\]: it should be \[32, 64\]",
        ),
        (spoil(lambda mlp, _: mlp.add_module("norm", nn.LayerNorm(64))), "model.layers.1.mlp also has norm: it should"),
        (spoil(lambda mlp, _: mlp.up_proj.register_forward_hook(print)), "model.layers.1.mlp has hooks.*remove them"),
        (spoil(scale), "model.layers.1.mlp, a Scaled, computes something else: it should compute down"),
        (lambda: nn.Sequential(nn.Linear(8, 8)), "Sequential has no feedforward block: it should hold modules with up"),
    ],
)
def test_other_models_are_refused_by_name_and_left_alone(build, message, hollow):
    model = build()
    before = list(model.modules())
    with pytest.raises(ValueError, match=message):
        sparsellm.accelerate(model, "cuda")
    assert [id(m) for m in model.modules()] == [id(m) for m in before]
    assert not model._forward_hooks


def test_weights_made_in_inference_mode_are_refused(hollow):
    with torch.inference_mode():
        model = make("llama")
    with pytest.raises(ValueError, match="was made in inference mode: it should be loaded outside"):
        sparsellm.accelerate(model, "cuda")


def test_arguments_are_refused(hollow):
    model = make("llama")
    with pytest.raises(ValueError, match="kernels is 'gpu': it should be 'auto', 'cuda' or 'torch'"):
        sparsellm.accelerate(model, "gpu")
    for kernels, engine in (("cuda", "fast"), ("torch", "row")):
        with pytest.raises(ValueError, match=f"engine is '{engine}' with kernels='{kernels}'"):
            sparsellm.accelerate(model, kernels, engine)
    sparsellm.accelerate(model, "cuda")
    with pytest.raises(ValueError, match=r"accelerated already: call sparsellm.restore\(model\) first"):
        sparsellm.accelerate(model, "cuda")


def test_without_kernels_auto_leaves_the_model_and_cuda_refuses(monkeypatch):
    def unavailable():
        raise KernelsUnavailable("there is no GPU")

    monkeypatch.setattr(module.build, "load", unavailable)
    model = make("llama")
    before = blocks(model)
    assert sparsellm.accelerate(model) is model
    with pytest.raises(KernelsUnavailable, match="there is no GPU"):
        sparsellm.accelerate(model, "cuda")
    assert [id(block) for block in blocks(model)] == [id(block) for block in before]
    with pytest.raises(ValueError, match="act_fn is SiLU"):  # wherever it runs
        sparsellm.accelerate(make("llama", hidden_act="silu"))


def test_a_module_changed_while_accelerated_is_refused(hollow):
    model = sparsellm.accelerate(make("llama"), "cuda")
    blocks(model)[1].up_proj = Quantised(32, 64, bias=False)
    with pytest.raises(ValueError, match="up_proj of an accelerated block has become Quantised"):
        logits(model, tokens(5))


# Which engine runs.


@pytest.mark.parametrize("name", ["llama", "decoder"])
def test_engines_follow_the_counts_of_earlier_calls_of_the_same_kind(name, hollow, monkeypatch):
    monkeypatch.setattr(  # the real one leaves layers as small as these dense
        module, "choose_engine", lambda tokens, width, neurons, nnz, union, current: int(nnz <= tokens * neurons // 10)
    )
    model, many, few = make(name), tokens(256), tokens(5)
    sparsellm.accelerate(model, "cuda")
    sparse, full = (1, 1), (5 * 60, 5)
    hollow.nnz, hollow.union = sparse
    assert hollow.of(model, many) == ["dense"] * 2  # unmeasured
    hollow.nnz, hollow.union = full
    assert hollow.of(model, few) == ["row"] * 2  # unmeasured, too
    assert hollow.of(model, few) == ["dense"] * 2
    assert hollow.of(model, many) == ["row"] * 2  # what few tokens counted is theirs
    hollow.nnz, hollow.union = 5 * 6, 5
    hollow.of(model, few)
    assert hollow.of(model, few) == ["row"] * 2


def test_between_few_and_many_tokens_calls_stay_dense_and_count_nothing(hollow, monkeypatch):
    monkeypatch.setattr(module, "choose_engine", lambda *arguments, current: 1)
    model = sparsellm.accelerate(make("llama"), "cuda")
    hollow.nnz, hollow.union = 1, 1
    for count, engines in ((64, ["row", "row"]), (65, ["dense", "dense"]), (127, ["dense", "dense"])):
        for _ in range(2):
            assert hollow.of(model, tokens(count)) == engines
    assert vars(model)[module.ATTRIBUTE].sent is None
    with monkeypatch.context() as capture:
        capture.setattr(module, "_is_capturing", lambda: True)
        hollow.of(model, tokens(5))
    hollow.of(model, tokens(100))
    assert vars(model)[module.ATTRIBUTE].sent is None  # what the graph will count is not there yet
    assert hollow.of(model, tokens(128)) == ["dense"] * 2  # unmeasured
    assert hollow.of(model, tokens(128)) == ["row"] * 2


def test_every_engine_can_be_reached_and_each_block_has_its_own(hollow, monkeypatch):
    asked = []

    def choose(*arguments, current):
        asked.append((*arguments, current))
        return len(asked) % 3

    monkeypatch.setattr(module, "choose_engine", choose)
    model = sparsellm.accelerate(make("llama"), "cuda")
    hollow.nnz, hollow.union = 7, 9
    seen = [hollow.of(model, tokens(200)) for _ in range(4)]
    assert seen == [["dense", "dense"], ["row", "tile"], ["dense", "row"], ["tile", "dense"]]
    assert asked[:4] == [(200, 32, 64, 7, 9, 0), (200, 32, 64, 7, 9, 0), (200, 32, 64, 7, 9, 1), (200, 32, 64, 7, 9, 2)]


def test_the_tile_engine_has_room_for_several_times_what_was_counted(hollow, monkeypatch):
    monkeypatch.setattr(module, "choose_engine", lambda *arguments, current: 2)
    model = sparsellm.accelerate(make("llama"), "cuda")
    ids = tokens(200)
    for nnz, room in ((200 * 80, 320), (200 * 100, 416), (200 * 320, 1280)):
        hollow.nnz, hollow.union = nnz, 9
        for _ in range(2):  # the second call decides from the first
            hollow.of(model, ids)
        assert [block.plans[1].tolist() for block in blocks(model)] == [[2, 8, room]] * 2


def test_blocks_that_do_not_count_are_no_hindrance(hollow):
    """A model in training of which one layer is not: its block alone runs on the operator."""
    model = sparsellm.accelerate(make("llama"), "cuda").train()
    layers(model)[1].eval()
    hollow.nnz, hollow.union = 1, 1
    ids = tokens(200)
    model(input_ids=ids)
    dispatch = vars(model)[module.ATTRIBUTE]
    assert [block for block, _ in dispatch.sent[1]] == [blocks(model)[1]]
    model.eval()
    with torch.no_grad():
        model(input_ids=ids)


def test_counts_under_way_are_not_waited_for(hollow):
    class Event:
        there = False

        def query(self):
            return self.there

    model = sparsellm.accelerate(make("llama"), "cuda")
    dispatch = vars(model)[module.ATTRIBUTE]
    hollow.nnz, hollow.union = 64 * 5, 5
    hollow.of(model, tokens(5))
    sent, dispatch.arrival = dispatch.sent, Event()
    assert hollow.of(model, tokens(5)) == ["row"] * 2
    assert dispatch.sent is sent  # one at a time
    dispatch.arrival.there = True
    assert hollow.of(model, tokens(5)) == ["dense"] * 2
    assert dispatch.sent is not sent


def test_nothing_is_prepared_or_chosen_during_capture(hollow, monkeypatch):
    model = sparsellm.accelerate(make("llama"), "cuda")
    hollow.nnz, hollow.union = 64 * 5, 5
    hollow.of(model, tokens(5))
    with monkeypatch.context() as capture:
        capture.setattr(module, "_is_capturing", lambda: True)
        assert hollow.of(model, tokens(5)) == ["row"] * 2
    assert hollow.of(model, tokens(5)) == ["dense"] * 2


@pytest.mark.parametrize("engine", ["dense", "row", "tile"])
def test_a_fixed_engine_is_kept_and_counts_nothing(engine, hollow):
    model = sparsellm.accelerate(make("llama"), "cuda", engine)
    hollow.nnz, hollow.union = 64 * 5, 5
    for ids in (tokens(5), tokens(200), tokens(5)):
        assert hollow.of(model, ids) == [engine] * 2
    assert vars(model)[module.ATTRIBUTE].sent is None
    assert all((block.w_down_t is None) == (engine == "dense") for block in blocks(model))


def test_training_makes_no_copies(hollow):
    model = sparsellm.accelerate(make("llama").train(), "cuda")
    model(tokens(5)).logits.sum().backward()
    assert [block.w_down_t for block in blocks(model)] == [None] * 2


@pytest.mark.parametrize("name", MODELS)
def test_training_follows_its_own_plan(name, hollow):
    """Whatever calls without gradients have left: copies that have become stale, counts under way."""
    model = sparsellm.accelerate(make(name).train(), "cuda")
    plans = [plan_of("dense", room=room) for room in (1, 2)]
    for block, plan in zip(blocks(model), plans, strict=True):
        block.training_plan = plan
    for _ in range(2):
        logits(model, tokens(200))
        counts = [block.counts.clone() for block in blocks(model)]
        with torch.no_grad():
            for block in blocks(model):
                block.down_proj.weight.mul_(2)
        assert all(block.w_down_t is not None for block in blocks(model))
        hollow.engines.clear()
        hollow.copies.clear()
        (model.logits(tokens(9)) if isinstance(model, Decoder) else model(tokens(9)).logits).sum().backward()
        assert (hollow.engines, hollow.copies) == (["dense"] * 2, [None] * 2)
        assert all(torch.equal(block.counts, count) for block, count in zip(blocks(model), counts, strict=True))


def test_other_dtypes_run_dense_without_a_copy(hollow):
    model = sparsellm.accelerate(make("llama").double(), "cuda")
    assert hollow.of(model, tokens(5)) == ["dense"] * 2
    assert hollow.copies == [None] * 2


# The neuron-major copy of W_d: the stand-in refuses one that is not of the weight as it is.


def test_the_copy_is_made_once_for_each_change_of_the_weight(hollow):
    model = sparsellm.accelerate(make("llama"), "cuda", "row")

    def copies():
        hollow.copies.clear()
        hollow.of(model, tokens(5))
        return hollow.copies[:]

    first = copies()
    assert all(a is b for a, b in zip(copies(), first, strict=True))
    weight = blocks(model)[0].down_proj.weight
    with torch.no_grad():
        weight.mul_(2)
    changed = copies()
    assert changed[0] is not first[0]
    assert changed[1] is first[1]
    model.load_state_dict({key: value + 1 for key, value in model.state_dict().items()})
    loaded = copies()
    assert all(a is not b for a, b in zip(loaded, changed, strict=True))
    blocks(model)[0].down_proj.weight = nn.Parameter(torch.randn(32, 64))
    assert copies()[1] is loaded[1]
    weight = blocks(model)[1].down_proj.weight
    weight.data = weight.data.clone() * 2
    assert copies()[1] is not loaded[1]


def test_moves_to_another_dtype_and_back_are_noticed(hollow):
    model = sparsellm.accelerate(make("llama"), "cuda")
    assert hollow.of(model, tokens(5)) == ["row"] * 2
    hollow.of(model.to(torch.bfloat16), tokens(5))
    assert [block.w_down_t for block in blocks(model)] == [None] * 2
    hollow.copies.clear()
    hollow.of(model.float(), tokens(5))
    assert all(a.weight.dtype == torch.float32 for a in hollow.copies)


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


# Compilation. The operator itself reads the plan when it runs, so that a sparse one fails here, on the CPU.


def compiled(how):
    model = make("llama")
    if how == "whole":
        sparsellm.accelerate(model, "cuda")
        return model, torch.compile(model, backend="aot_eager")
    if how == "fullgraph":
        whole = torch.compile(model, backend="aot_eager", fullgraph=True)
        sparsellm.accelerate(whole, "cuda")
        return model, whole
    sparsellm.accelerate(model, "cuda")
    for layer in layers(model):
        layer.compile(backend="aot_eager", fullgraph=True)
    return model, model


@pytest.mark.parametrize("how", ["whole", "fullgraph", "layers"])
def test_new_plans_and_weights_recompile_nothing(how, monkeypatch):
    monkeypatch.setattr(module.build, "load", lambda: None)
    monkeypatch.setattr(module, "MANY_TOKENS", 128)
    monkeypatch.setattr(module, "sparse_engines_take", lambda _device, dtype: dtype == torch.float32)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    graphs = torch._dynamo.utils.counters["stats"]
    ids = tokens(200)
    expected = logits(make("llama"), ids)
    model, run = compiled(how)
    assert_same(logits(run, ids), expected)
    assert_same(logits(run, ids), expected)
    seen = graphs["unique_graphs"]
    assert seen >= 1
    assert all(block.counts[0] > 0 for block in blocks(model))  # counted inside the graph
    with torch.no_grad():
        for block in blocks(model):
            block.down_proj.weight.mul_(1)
            block.plans[1].copy_(plan_of("dense", 16))
    assert_same(logits(run, ids), expected)
    vars(run if how == "fullgraph" else model)[module.ATTRIBUTE].sent = None
    blocks(model)[1].plans[1].copy_(plan_of("tile"))
    with pytest.raises(ValueError, match="for the tile engine"):
        logits(run, ids)
    assert graphs["unique_graphs"] == seen


def test_lengths_that_vary_compile_once_for_few_and_once_for_many_tokens(monkeypatch):
    monkeypatch.setattr(module.build, "load", lambda: None)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    block = blocks(sparsellm.accelerate(make("llama"), "cuda"))[0]
    run = torch.compile(block, backend="aot_eager", fullgraph=True, dynamic=True)
    with torch.no_grad():
        for positions in (200, 300, 129, 5, 7, 90):
            x = torch.randn(1, positions, 32)
            torch.testing.assert_close(run(x), block.original[0](x))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


def test_a_compiled_decoder_trains_the_same_bits_and_validates_on_the_operator(monkeypatch):
    """What the trainer does: steps with gradients, validation without, compiled layer by layer."""
    monkeypatch.setattr(module.build, "load", lambda: None)
    monkeypatch.setattr(module, "MANY_TOKENS", 128)
    monkeypatch.setattr(module, "sparse_engines_take", lambda _device, dtype: dtype == torch.float32)
    ids, results = tokens(100, 2), []
    for accelerated in (False, True):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = make("decoder").train()
        if accelerated:
            sparsellm.accelerate(model, "cuda")
        model.compile_parts()
        for _ in range(2):
            out = model(ids, ids)
            (out.ce + 1e-2 * out.l1.sum()).backward()
            with torch.no_grad():
                validated = model(ids, ids).ce
                for parameter in model.parameters():
                    parameter -= 1e-3 * parameter.grad
        results.append((validated, torch._dynamo.utils.counters["stats"]["unique_graphs"], list(model.parameters())))
    (ce, graphs, weights), (our_ce, our_graphs, our_weights) = results
    assert our_graphs == graphs
    assert all(torch.equal(a, b) for a, b in zip(weights, our_weights, strict=True))
    assert vars(model)[module.ATTRIBUTE].sent is not None
    torch.testing.assert_close(our_ce, ce, rtol=TOLERANCE, atol=0)


def test_importing_the_package_is_light():
    code = "import sys, sparsellm; assert 'torch' not in sys.modules; assert callable(sparsellm.restore)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
