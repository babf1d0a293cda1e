"""Accelerated models: same results and weights, refusals that change nothing, compilation."""

import contextlib
import copy
import subprocess
import sys

import float8_stand_in
import pytest
import torch
from inference.small_models import MODELS, TOLERANCE, assert_same, blocks, layers, logits, make, tokens
from torch import nn
from transformers import AutoModelForCausalLM

import sparsellm
from sparsellm.config import Activation
from sparsellm.inference import accelerate as module
from sparsellm.inference.engine_choice import MANY, _choice_of
from sparsellm.model import Decoder
from sparsellm.ops import Plan, cuda, float8_gate
from sparsellm.ops.build import KernelsUnavailable
from sparsellm.ops.feedforward import forward
from sparsellm.policy import Policy

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
    with torch.inference_mode():  # its leftovers must not interfere with gradients
        logits(model, tokens(9))
    for training, engines in ((False, {"dense"}), (True, {"traced"})):  # the row engine has no backward
        hollow.engines.clear()
        for ours, theirs in zip(gradients(model.train(training)), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE * theirs.abs().max().item())
        assert set(hollow.engines) == engines


@pytest.mark.parametrize("name", ["llama", "arcee"])
def test_a_model_that_trains_has_the_gradients_of_its_own_blocks_and_of_the_l1_term(name):
    def gradients(l1_loss):
        (model(ids, labels=ids).loss + 0.1 * l1_loss()).backward()
        found = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        return found

    model, ids, terms = make(name).train(), tokens(9, 2), []
    hooks = [
        block.down_proj.register_forward_pre_hook(lambda _module, inputs: terms.append(inputs[0].abs().sum() / 18))
        for block in blocks(model)
    ]
    expected = gradients(lambda: sum(terms))
    for hook in hooks:
        hook.remove()
    sparsellm.accelerate(model, training=True)
    for ours, theirs in zip(gradients(lambda: sparsellm.l1_loss(model)), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE * theirs.abs().max().item())
    model.eval()
    assert_same(logits(model, ids), logits(sparsellm.restore(model), ids))


def test_a_copy_of_an_accelerated_model_is_a_model_of_its_own(hollow):
    model = sparsellm.accelerate(make("llama"), "cuda")
    other = copy.deepcopy(model)
    hollow.nnz, hollow.union = 64 * 5, 0
    for _ in range(2):
        engines = hollow.of(other, tokens(5))
    assert engines == ["dense"] * 2
    assert hollow.of(model, tokens(5)) == ["row"] * 2
    assert blocks(other)[0].choice is not blocks(model)[0].choice
    assert blocks(other)[0].handle.data_ptr() != blocks(model)[0].handle.data_ptr()


# What is refused.


class Scaled(nn.Module):
    """A block that looks like Llama's but multiplies by a constant."""

    def __init__(self, inner, factor):
        super().__init__()
        self.factor = factor
        self.gate_proj, self.up_proj, self.down_proj = inner.gate_proj, inner.up_proj, inner.down_proj
        self.act_fn = nn.ReLU()

    def forward(self, x):
        return self.factor * self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Quantised(nn.Linear):
    pass


def spoil(change):
    def build():
        model = make("llama")
        change(model.model.layers[1].mlp, model)
        return model

    return build


def scale(mlp, model):
    """All blocks are of one class, and one of them computes something else."""
    for layer, factor in zip(model.model.layers, (1, 1.25), strict=True):
        layer.mlp = Scaled(layer.mlp, factor)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: make("llama", hidden_act="silu"), r"act_fn is SiLU\w*: it should be ReLU.* init_from=MODEL"),
        (lambda: make("llama", hidden_act="gelu"), r"model.layers.0.mlp.act_fn is GELU\w*: it should be ReLU"),
        (lambda: make("arcee", hidden_act="relu2"), "model.layers.0.mlp.act_fn is ReLUSquared.*: it should be ReLU"),
        (lambda: make("decoder", activation=Activation.silu), "activation of layers.0.mlp is SiLU: it should be ReLU"),
        (lambda: make("llama", mlp_bias=True), "model.layers.0.mlp.gate_proj has a bias: it should have none"),
        (
            lambda: make("llama", intermediate_size=60),
            "model.layers.0.mlp.up_proj.out_features is 60: it should be a multiple of 8 up to 65536",
        ),
        (lambda: make("llama").half(), "gate_proj.weight is torch.float16: .*torch.bfloat16, or torch.float32"),
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
        (
            spoil(lambda mlp, _: mlp.register_parameter("scale", nn.Parameter(torch.ones(1)))),
            "model.layers.1.mlp also has scale: it should",
        ),
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
    with pytest.raises(ValueError, match="was created in inference mode: it should be loaded outside"):
        sparsellm.accelerate(model, "cuda")


def test_arguments_are_refused(hollow):
    with pytest.raises(TypeError, match="model is 'runs/x/hf': it should be a loaded model"):
        sparsellm.accelerate("runs/x/hf")
    model = make("llama")
    with pytest.raises(ValueError, match="float8 is 'all': it should be True, False or 'gate'"):
        sparsellm.accelerate(model, float8="all")
    with pytest.raises(ValueError, match="kernels is 'gpu': it should be 'auto', 'cuda', 'triton' or 'torch'"):
        sparsellm.accelerate(model, "gpu")
    for kernels, engine in (("cuda", "fast"), ("torch", "row")):
        with pytest.raises(ValueError, match=f"engine is '{engine}' with kernels='{kernels}'"):
            sparsellm.accelerate(model, kernels, engine)
    with pytest.raises(ValueError, match="engine is 'tile' with training=True: it should be None"):
        sparsellm.accelerate(model, "cuda", "tile", training=True)
    for arguments in ({"kernels": "torch"}, {"kernels": "triton"}, {"training": True}):
        with pytest.raises(ValueError, match=r"float8 is True with kernels=.*: it should be False, because only the"):
            sparsellm.accelerate(model, **arguments, float8=True)
    with pytest.raises(ValueError, match="float8 is True: it should be False here, because "):
        sparsellm.accelerate(model, "cuda", float8=True)
    sparsellm.accelerate(model, "cuda")
    with pytest.raises(ValueError, match=r"accelerated already: call sparsellm.restore\(model\) first"):
        sparsellm.accelerate(model, "cuda")


def test_a_model_in_float8_rounds_attention_and_the_gate_of_long_calls(hollow, monkeypatch):
    float8_stand_in.install(monkeypatch)
    monkeypatch.setattr(module.torchao, "obstacle", lambda: None)
    monkeypatch.setattr(module.backend, "loaded", lambda: "cuda")
    monkeypatch.setattr(cuda, "quantize_rows", float8_gate.quantize_rows)
    monkeypatch.setattr(module, "sparse_engines_take", lambda _: False)
    model = make("llama")
    with pytest.raises(
        ValueError, match=r"a block is torch.float32 on cpu: for float8=True it should be torch.bfloat16"
    ):
        sparsellm.accelerate(model, "cuda", "tile", float8=True)
    monkeypatch.setattr(module, "sparse_engines_take", lambda _: True)
    with monkeypatch.context() as patched:
        patched.setattr(module.torchao, "MULTIPLE", 1024)
        with pytest.raises(ValueError, match=r"q_proj.weight of the attention is \[.*should be multiples of 1024"):
            sparsellm.accelerate(model, "cuda", "tile", float8=True)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    sparsellm.accelerate(model, "cuda", "tile", float8=True)
    after = model.state_dict()
    changed = {name for name, weight in before.items() if not torch.equal(after[name], weight)}
    assert changed == {name for name in before if "self_attn" in name and "norm" not in name}
    assert all(layer.mlp.choice.float8 for layer in model.model.layers)


def test_the_gate_alone_in_float8_needs_no_torchao_and_takes_the_tile_engine_before_any_counts(hollow, monkeypatch):
    monkeypatch.setattr(module.torchao, "obstacle", lambda: pytest.fail("asked for torchao"))
    monkeypatch.setattr(cuda, "quantize_rows", float8_gate.quantize_rows)
    said, gates, traced = [], [], []
    monkeypatch.setattr(module, "warn", said.append)

    def gate_in_float8(x, w_gate, w_up, w_down_t, thresholded, room, rounded):
        gates.append(len(x))
        if rounded is not None:
            expected = float8_gate.quantize_rows(x)
            assert torch.equal(rounded.scales, expected.scales)
            assert torch.equal(rounded.values.float(), expected.values.float())
            traced.append(len(x))
        return forward(x, w_gate, w_up, w_down_t.T, Plan(), None, False)[:4]

    monkeypatch.setattr(cuda, "float8_forward", gate_in_float8)
    monkeypatch.setattr(cuda, "readable", lambda tensor: tensor)
    model = make("llama")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    sparsellm.accelerate(model, float8="gate")
    assert said == [
        "FP8: the gate product of calls of at least 1,536 tokens that the tile engine computes; everything else, such"
        " as attention and decoding steps, stays bfloat16"
    ]
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    hollow.of(model, tokens(128))
    assert gates == [128] * len(model.model.layers)
    gates.clear()
    hollow.of(model, tokens(127))
    assert gates == [] == traced
    model = sparsellm.accelerate(make("llama"), float8="gate")
    for layer in model.model.layers:
        layer.mlp.compile(backend="eager")  # compiled code rounds x itself, so that inductor can fuse it
    hollow.of(model, tokens(128))
    assert traced == [128] * len(model.model.layers)


def test_float8_is_never_left_out_silently(monkeypatch):
    def unavailable():
        raise KernelsUnavailable("there is no GPU")

    monkeypatch.setattr(module.backend.build, "load", unavailable)
    for float8 in (True, "gate"):
        with pytest.raises(KernelsUnavailable, match="there is no GPU"):
            sparsellm.accelerate(make("llama"), float8=float8)


def test_without_kernels_auto_leaves_the_model_and_cuda_refuses(monkeypatch):
    def unavailable():
        raise KernelsUnavailable("there is no GPU")

    monkeypatch.setattr(module.backend.build, "load", unavailable)
    model = make("llama")
    before = blocks(model)
    assert sparsellm.accelerate(model) is model
    with pytest.raises(KernelsUnavailable, match="there is no GPU"):
        sparsellm.accelerate(model, "cuda")
    assert [id(block) for block in blocks(model)] == [id(block) for block in before]
    with pytest.raises(ValueError, match="act_fn is SiLU"):  # wherever it runs
        sparsellm.accelerate(make("llama", hidden_act="silu"))


def test_engines_are_chosen_by_what_was_measured_of_the_layers(monkeypatch):
    asked, given = [], Policy("triton")

    def policy_for(layers, device, missing):
        asked.append((list(layers), device.type, list(missing)))
        return given

    monkeypatch.setattr(module.first_use, "policy_for", policy_for)
    monkeypatch.setattr(module.backend, "load", lambda _: None)
    sparsellm.accelerate(make("llama"), "torch")
    sparsellm.accelerate(make("llama"), "cuda")  # not really loaded: the GPU's name is not queried
    monkeypatch.setattr(module.backend, "loaded", lambda: "cuda")
    sparsellm.accelerate(make("llama"), "cuda", engine="dense")
    own = Policy()
    assert module.policy_of(sparsellm.accelerate(make("llama"), "cuda", policy=own)) is own
    assert asked == []
    assert module.policy_of(sparsellm.accelerate(make("llama"), "cuda")) is given
    assert asked.pop() == ([(32, 64)], "cpu", [])  # a model that is not on the GPU, and in bfloat16, is not measured
    monkeypatch.setattr(module, "sparse_engines_take", lambda _: True)
    sparsellm.accelerate(make("llama").train(), "cuda", calibrate=False)
    assert asked.pop() == ([(32, 64)], "cpu", [])
    sparsellm.accelerate(make("llama").train(), "cuda")
    assert asked == [([(32, 64)], "cpu", [(32, 64)])]


def test_what_was_measured_is_of_the_gpu_that_the_layers_are_on(monkeypatch):
    """It is kept by the name of the current GPU, which may be of another model."""
    current, found = [], []

    @contextlib.contextmanager
    def device_of(weight):
        current.append(weight)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(module.first_use, "policy_for", lambda *_: found.extend(current))
    monkeypatch.setattr(module.backend, "load", lambda _: None)
    monkeypatch.setattr(module.backend, "loaded", lambda: "cuda")
    model = make("llama").train()
    second = blocks(model)[1].down_proj.weight
    monkeypatch.setattr(module, "sparse_engines_take", lambda weight: weight is second)
    sparsellm.accelerate(model, "cuda")
    assert [weight is second for weight in found] == [True]


def test_a_module_changed_while_accelerated_is_refused(hollow):
    model = sparsellm.accelerate(make("llama"), "cuda")
    blocks(model)[1].up_proj = Quantised(32, 64, bias=False)
    with pytest.raises(ValueError, match="up_proj of an accelerated block is now Quantised"):
        logits(model, tokens(5))


# Compilation.


def compiled(how):
    model = make("decoder" if how == "layers" else "llama")  # Llama's layers compile once each, for their cache
    if how == "fullgraph":
        whole = torch.compile(model, backend="aot_eager", fullgraph=True)
        sparsellm.accelerate(whole, "cuda")
        return model, whole
    sparsellm.accelerate(model, "cuda")
    if how == "whole":
        return model, torch.compile(model, backend="aot_eager")
    for layer in layers(model):
        layer.compile(backend="aot_eager", fullgraph=True)
    return model, model


def graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("how", ["whole", "fullgraph", "layers"])
def test_new_plans_and_weights_recompile_nothing(how, hollow):
    hollow.nnz, hollow.union = 9, 5
    ids = tokens(200)
    model, run = compiled(how)
    expected = logits(make("decoder" if how == "layers" else "llama"), ids)
    assert_same(logits(run, ids), expected)
    assert [block.choice.counted for block in blocks(model)] == [200] * 2  # inside of the graph
    assert graphs() == 1
    for engines in (["dense", "row"], ["tile", "dense"]):
        with torch.no_grad():
            for block, engine in zip(blocks(model), engines, strict=True):
                block.down_proj.weight.mul_(1)
                block.choice.counted, block.choice.plans[MANY] = 0, Plan.of(engine, 16)
        hollow.engines.clear()
        assert_same(logits(run, ids), expected)
        assert hollow.engines == engines
    hollow.nnz = 128 * 64  # completely dense: a later call uses what a compiled call counted
    logits(run, ids)
    hollow.engines.clear()
    assert_same(logits(run, ids), expected)
    assert hollow.engines == ["dense"] * 2
    assert graphs() == 1


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("how", ["whole", "layers"])
@pytest.mark.slow
def test_many_layers_compile_to_one_graph(how, hollow):
    """More layers than the compiler compiles one function for anew."""
    name = "decoder" if how == "layers" else "llama"
    many = torch._dynamo.config.recompile_limit + 1
    model = sparsellm.accelerate(make(name, num_hidden_layers=many), "cuda")
    expected = logits(model, tokens(9))
    for part in [model] if how == "whole" else layers(model):
        part.compile(backend="aot_eager", fullgraph=True)
    assert_same(logits(model, tokens(9)), expected)
    assert graphs() == 1


@pytest.mark.usefixtures("fresh_compiler")
def test_a_copy_and_a_moved_model_compile_with_choices_of_their_own(hollow):
    model = sparsellm.accelerate(make("llama"), "cuda")
    other = copy.deepcopy(model).double().float()
    for block in blocks(other):
        block.choice.plans[0] = Plan.of("tile")
    for which, engine in ((model, "row"), (other, "tile")):
        hollow.engines.clear()
        logits(torch.compile(which, backend="aot_eager"), tokens(5))
        assert hollow.engines == [engine] * 2


@pytest.mark.usefixtures("small_choices")
def test_a_decoder_may_be_accelerated_before_it_has_memory():
    with torch.device("meta"):
        model = make("decoder")
    sparsellm.accelerate(model, "torch")
    with pytest.raises(ValueError, match="handle belongs to no existing accelerated block"):
        _choice_of(blocks(model)[0].handle)
    model.to_empty(device="cpu")
    assert [_choice_of(block.handle) for block in blocks(model)] == [block.choice for block in blocks(model)]


def test_a_handle_of_no_block_is_refused():
    weights = torch.ones(24, 16), torch.ones(24, 16), torch.ones(16, 24)
    with pytest.raises(ValueError, match="handle belongs to no existing accelerated block"):
        torch.ops.sparsellm.chosen_feedforward(torch.ones(3, 16), *weights, torch.zeros(1, dtype=torch.uint8))


@pytest.mark.usefixtures("fresh_compiler", "small_choices")
def test_lengths_that_vary_compile_once():
    block = blocks(sparsellm.accelerate(make("llama"), "cuda", "dense"))[0]
    run = torch.compile(block, backend="aot_eager", fullgraph=True, dynamic=True)
    with torch.no_grad():
        for positions in (200, 300, 129, 5, 7, 90):
            x = torch.randn(1, positions, 32)
            torch.testing.assert_close(run(x), block.original[0](x))
    assert graphs() == 1


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler", "small_choices")
def test_a_layer_that_trains_compiles_to_one_graph_whatever_its_plan():
    layer, x = sparsellm.SparseFeedForward(16, 48), torch.randn(2, 3, 16)

    def results(call):
        y = call(x)
        l1 = layer.l1()
        return [y, l1, *torch.autograd.grad(y.square().sum() + l1, layer.parameters())]

    expected, run = results(layer), torch.compile(layer, backend="aot_eager", fullgraph=True)
    for room in (320, 640):
        layer.in_training.plan.copy_(Plan(room=room).tensor())
        for ours, theirs in zip(results(run), expected, strict=True):
            torch.testing.assert_close(ours, theirs)
    assert layer.in_training.is_new
    assert graphs() == 1


@pytest.mark.slow
@pytest.mark.usefixtures("small_choices")
def test_a_compiled_decoder_trains_the_same_bits_and_validates_on_the_operator():
    """What the trainer does: steps with gradients, validation without, compiled layer by layer."""
    ids, results = tokens(100, 2), []
    for accelerated in (False, True):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = make("decoder").train()
        if accelerated:
            sparsellm.accelerate(model, "cuda", "dense")
        model.compile_parts()
        for _ in range(2):
            out = model(ids, ids)
            (out.ce + 1e-2 * out.l1.sum()).backward()
            with torch.no_grad():
                validated = model(ids, ids)
                for parameter in model.parameters():
                    parameter -= 1e-3 * parameter.grad
        results.append((validated, graphs(), list(model.parameters())))
    (theirs, seen, weights), (ours, our_seen, our_weights) = results
    assert our_seen == seen
    assert all(torch.equal(a, b) for a, b in zip(weights, our_weights, strict=True))
    torch.testing.assert_close(ours.ce, theirs.ce, rtol=TOLERANCE, atol=0)
    assert (ours.union >= 0).all()  # the traced reference does not measure it


@pytest.mark.slow
def test_importing_the_package_is_light():
    code = "import sys, sparsellm; assert 'torch' not in sys.modules; assert callable(sparsellm.restore)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
