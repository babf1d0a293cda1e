"""Common model families: read, trained for a step and written, with the logits of transformers at each stage."""

import json
import math

import pytest
import torch
from hf.small_families import CASES, LLAMA3, YARN, assert_same_logits, ids, stock_model
from transformers import AutoModelForCausalLM

from sparsellm.config import Activation, OptimizerConfig, parameters
from sparsellm.hf import conversion, pretrained
from sparsellm.inference.generation import Generator
from sparsellm.model import Decoder
from sparsellm.training.optimizer import Optimizer

CLASSES = {"mistral": "Llama", "mistral_nemo": "Mistral", "qwen2p5": "Qwen2", "qwen3": "Qwen3", "arcee": "Arcee"}


def decoder_of(folder):
    config, activation, weights = conversion.load(folder)
    decoder = Decoder(config, activation)
    decoder.load_state_dict(weights)  # raises for missing or unexpected names
    return decoder, activation


def written(folder):
    """The model loaded by stock transformers, with no missing or unexpected tensors."""
    stock, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return stock.eval()


def train(decoder):
    """One step of the trainer's loss and optimizer, at a rate that changes the logits."""
    tokens = ids(3)
    optimizer = Optimizer(decoder, OptimizerConfig())
    out = decoder(tokens[:, :-1], tokens[:, 1:])
    loss = (out.ce if out.l1 is None else out.ce + 1e-3 * out.l1.sum()) / tokens[:, 1:].numel()
    loss.backward()
    assert optimizer.step(1e-2).isfinite()


@pytest.mark.parametrize(("family", "activation", "tied"), CASES)
@torch.no_grad()
@pytest.mark.slow
def test_read_train_and_write(family, activation, tied, tmp_path, tokenizer_folder):
    theirs, tokens = stock_model(family, activation, tied), ids()
    theirs.save_pretrained(tmp_path / "given")
    decoder, read = decoder_of(tmp_path / "given")
    assert read.name == activation
    assert parameters(decoder.config) == sum(p.numel() for p in theirs.parameters())
    before = decoder.logits(tokens)
    assert_same_logits(before, theirs(tokens).logits)

    names = [name for name, _ in decoder.named_parameters()]
    conversion.export(decoder.state_dict(), decoder.config, read, tmp_path / "same", tokenizer_folder, 0)
    same = written(tmp_path / "same")
    assert type(same).__name__ == f"{CLASSES.get(family.partition('_yarn')[0], 'Llama')}ForCausalLM"
    ours, original = same.state_dict(), theirs.state_dict()
    assert ours.keys() == original.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in original.items())
    assert torch.equal(same(tokens).logits, theirs(tokens).logits)
    assert conversion.load(tmp_path / "same")[0] == decoder.config

    with torch.enable_grad():
        train(decoder)
    after = decoder.logits(tokens)
    assert (after - before).abs().max() > 0.1 * before.abs().max()
    assert [name for name, p in decoder.named_parameters() if p.grad is None] == names  # cleared by the step
    conversion.export(decoder.state_dict(), decoder.config, read, tmp_path / "hf", tokenizer_folder, 0)
    assert_same_logits(after, written(tmp_path / "hf")(tokens).logits)
    shared = conversion.view(
        {name: p.detach() for name, p in decoder.named_parameters()}, decoder.config, Activation[activation], 0
    )
    assert_same_logits(after, shared(tokens).logits)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama3", "mistral_nemo", "qwen2p5_yarn", "qwen3"])
def test_generated_tokens_are_those_of_transformers(family, tmp_path):
    theirs = stock_model(family, "relu")
    theirs.save_pretrained(tmp_path)
    theirs.generation_config.eos_token_id = None  # otherwise generation would end there, but ours would not
    prompts = [ids(1)[0, :length].tolist() for length in (7, 1, 12)]
    expected = []
    for prompt in prompts:
        given = torch.tensor([prompt])
        made = theirs.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=30, do_sample=False)
        expected.append(made[0, len(prompt) :].tolist())
    assert len({tuple(tokens) for tokens in expected}) == 3
    decoder, _ = decoder_of(tmp_path)
    steps = list(Generator(decoder).stream(prompts, 30))
    assert [list(tokens) for tokens in zip(*steps, strict=True)] == expected


def config_json(folder, family, **changes):
    """The configuration of a small model, changed; a key that is ABSENT is left out."""
    stock_model(family).config.save_pretrained(folder)
    path = folder / "config.json"
    described = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in described.items() if value != ABSENT}))
    return folder


def test_a_number_that_is_spelled_as_a_whole_one_gives_the_same_configuration(tmp_path):
    """As config.json often has it; a run's name depends on the configuration as text."""
    stock_model("llama3").save_pretrained(tmp_path)
    expected = conversion.load(tmp_path)[0]
    whole = {key: int(value) if value in (8.0, 1e4, 2.0) else value for key, value in LLAMA3.items()}
    assert type(whole["rope_theta"]) is int
    assert repr(conversion.load(config_json(tmp_path, "llama3", rope_parameters=whole))[0]) == repr(expected)


ABSENT = "absent"
ROPE = {"rope_theta": 1e4}
REFUSED = {
    "sliding_window is 16: it should be null, or at least max_position_embeddings": ("mistral", {"sliding_window": 16}),
    "layer_types has 'sliding_attention'": (
        "qwen2p5",
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1, "layer_types": None},
    ),
    "attention_bias is True": ("llama3", {"attention_bias": True}),
    "mlp_bias is True": ("llama3", {"mlp_bias": True}),
    "attention_bias is True: it should be False": ("qwen3", {"attention_bias": True}),
    "hidden_act is 'gelu': it should be 'relu' or 'silu'": ("qwen3", {"hidden_act": "gelu"}),
    "hidden_act is 'relu2': it should be 'relu'": ("arcee", {"hidden_act": "relu2"}),
    "partial_rotary_factor is 0.5": ("llama2", {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5}}),
    "rope_type is 'dynamic': it should be 'default' or 'linear' or 'llama3' or 'yarn'": (
        "llama2", {"rope_parameters": ROPE | {"rope_type": "dynamic", "factor": 2.0}}
    ),
    "rope_parameters has beta_fast 8, which rope_type 'linear' does not know": (
        "llama2", {"rope_parameters": ROPE | {"rope_type": "linear", "factor": 2.0, "beta_fast": 8}}
    ),
    "final_logit_softcapping is 30.0: it should be 'absent'": ("llama2", {"final_logit_softcapping": 30.0}),
    "num_local_experts is 8: it should be 0": ("llama2", {"num_local_experts": 8}),
    "model_type is 'mixtral': it should be 'llama'.*num_local_experts is 4": (
        "mistral", {"model_type": "mixtral", "num_local_experts": 4}
    ),
    "model_type is 'gemma2'.*softcapping is 50.0.*layer_types has 'sliding_attention'": (
        "llama2", {"model_type": "gemma2", "layer_types": None}
    ),
}  # fmt: skip


@pytest.mark.parametrize(("message", "family", "changes"), [(m, *case) for m, case in REFUSED.items()])
def test_what_does_not_fit_is_refused_by_name(message, family, changes, tmp_path):
    with pytest.raises(ValueError, match=f"is not a model that the decoder can represent: .*{message}"):
        conversion.load(config_json(tmp_path, family, **changes))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("mistral", {"sliding_window": 64}),
        ("qwen3", {"sliding_window": 16, "use_sliding_window": False, "layer_types": None}),
        ("qwen2p5", {"attention_bias": True}),
        ("llama2", {"rope_interleaved": False, "is_llama_config": True, "rope_parameters": None, "rope_theta": 1e4}),
    ],
)
def test_what_changes_nothing_is_taken(family, changes, tmp_path):
    theirs = stock_model(family)
    theirs.save_pretrained(tmp_path)
    decoder, _ = decoder_of(config_json(tmp_path, family, **changes))
    assert_same_logits(decoder.logits(ids()), theirs(ids()).logits)


def test_a_generator_in_bfloat16_takes_biases_and_norms(tmp_path):
    for family in ("qwen2p5", "qwen3"):
        stock_model(family).save_pretrained(tmp_path / family)
        generator = Generator(decoder_of(tmp_path / family)[0], dtype=torch.bfloat16)
        assert generator.weights[0].heads.dtype == torch.bfloat16
        assert len(list(generator.stream([[5, 17], [3]], 4))) == 4


@pytest.mark.parametrize(
    ("family", "key"),
    [("mistral", "num_key_value_heads"), ("qwen2p5", "num_key_value_heads"), ("qwen3", "head_dim")],
)
def test_a_key_that_transformers_would_make_up_is_asked_for(family, key, tmp_path):
    """Each has a default that differs from the derived value."""
    with pytest.raises(pretrained.BrokenModel, match=f"config.json of .* has no {key}"):
        conversion.load(config_json(tmp_path, family, **{key: ABSENT}))


def test_values_that_no_decoder_has_are_refused(tmp_path):
    for family, changes, message in (
        ("llama2", {"num_key_value_heads": 3}, "num_key_value_heads is 3: it should divide model.num_heads 4"),
        ("llama3", {"rope_parameters": {**LLAMA3, "factor": 0.5}}, "factor is 0.5: it should be at least 1"),
        ("llama3", {"rope_parameters": {**LLAMA3, "factor": "much"}}, "factor 'much': it should be a number"),
    ):
        with pytest.raises(ValueError, match=message):
            conversion.load(config_json(tmp_path, family, **changes))


WRONG = [
    ("rms_norm_eps", math.nan), ("rms_norm_eps", 0), ("rms_norm_eps", -1e-5), ("rms_norm_eps", "1e-5"),
    ("max_position_embeddings", 2**60), ("max_position_embeddings", 0), ("vocab_size", -1), ("hidden_size", 48.5),
    ("num_hidden_layers", 2**60), ("num_attention_heads", True), ("head_dim", math.inf), ("initializer_range", -0.1),
    ("num_key_value_heads", 0), ("intermediate_size", 1e300),
]  # fmt: skip
WRONG_ROPE = [
    ("rope_theta", math.nan), ("rope_theta", 0), ("rope_theta", -1e4), ("factor", 0), ("factor", math.inf),
    ("original_max_position_embeddings", 2**60), ("beta_fast", math.nan), ("attention_factor", -1),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), [*WRONG, *WRONG_ROPE])
def test_numbers_that_no_model_has_are_refused_by_name(key, value, tmp_path):
    changes = {key: value} if (key, value) in WRONG else {"rope_parameters": YARN | {key: value}}
    for family in ("qwen3", "qwen2p5_yarn", "llama2"):
        with pytest.raises(pretrained.BrokenModel, match=f"config.json of .* has {key} .*: it should be a") as refusal:
            pretrained.read_config(config_json(tmp_path / family, family, **changes))
        assert repr(value) in str(refusal.value)


def test_a_llama_of_before_rope_theta_has_its_base(tmp_path, capsys):
    theirs = stock_model("llama2")
    theirs.save_pretrained(tmp_path)
    for absent in ({"rope_parameters": ABSENT}, {"rope_parameters": None, "rope_scaling": None}):
        decoder, _ = decoder_of(config_json(tmp_path, "llama2", **absent))
        assert decoder.config.rope_theta == 10_000.0
        assert_same_logits(decoder.logits(ids()), theirs(ids()).logits)
    assert capsys.readouterr().err.count("has no rope_theta: using 10,000, as in Llama 1 and 2") == 1
    for family in ("mistral", "qwen2p5"):
        with pytest.raises(pretrained.BrokenModel, match="has no rope_theta"):
            pretrained.read_config(config_json(tmp_path / family, family, rope_parameters=ABSENT))
