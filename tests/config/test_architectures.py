"""Models other than the paper's: their shapes by name, and impossible models."""

import pytest

from sparsellm.config import definition, from_dict, from_overrides, load, mistakes, parameters, save, to_dict
from sparsellm.config.groups import choices

# Parameters as the hub counts them, a tied embedding once.
PUBLISHED = {
    "llama2_7b": 6_738_415_616, "llama3_8b": 8_030_261_248, "llama3p2_1b": 1_235_814_400, "mistral_7b": 7_248_023_552,
    "qwen2p5_0p5b": 494_032_768, "qwen2p5_7b": 7_615_616_512, "qwen3_0p6b": 596_049_920, "qwen3_8b": 8_190_735_360,
    "smollm2_135m": 134_515_008, "smollm2_360m": 361_821_120, "smollm2_1p7b": 1_711_376_384,
}  # fmt: skip
OWN = {"0p5b", "1b", "1p5b", "2b", "0p5b_wide", "1b_wide", "1p5b_wide", "2b_wide", "7b", "mini", "tiny"}
LLAMA3 = [
    "model.rope_parameters.rope_type=llama3", "model.rope_parameters.factor=8",
    "model.rope_parameters.original_max_position_embeddings=8192", "model.rope_parameters.low_freq_factor=1",
    "model.rope_parameters.high_freq_factor=4",
]  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_shape_has_the_parameters_of_the_published_model(name):
    config = from_overrides([f"model={name}", "sparsity=dense_silu"])
    assert parameters(config.model) == PUBLISHED[name]
    assert mistakes(config, 1) == []


def test_every_shape_is_held_to_a_published_number():
    assert set(choices("model")) == PUBLISHED.keys() | OWN


def test_a_model_that_says_nothing_new_has_the_name_that_it_had():
    """Earlier runs are found by these hashes. tests/config/test_values.py has those of whole experiments."""
    assert from_overrides(["experiment=0p5b", "model=tiny"]).run.name == "0p5b-tiny-c82c165d"
    assert from_overrides(["model.qk_norm=true"]).run.name.startswith("smoke-qk_norm_true-")


def test_a_configuration_saved_before_0_1_0_lacks_keys_and_is_the_same_run():
    config = from_overrides(["experiment=0p5b"])
    values = to_dict(config)
    del values["data"]["verify"], values["data"]["skip_bad_records"]
    assert from_dict(values) == config


def test_every_key_of_the_rotary_embedding_names_another_run(tmp_path):
    names = {from_overrides([*LLAMA3, *more]).run.name for more in ([], ["model.rope_parameters.factor=4"])}
    assert len(names | {from_overrides([]).run.name}) == 3
    config = from_overrides(["model=llama3p2_1b", "experiment=1b"])
    save(config, tmp_path / "config.yaml")
    assert load(tmp_path / "config.yaml") == config
    assert definition(config)["model.rope_parameters.factor"] == 32.0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.num_key_value_heads=3"], "model.num_key_value_heads is 3: it should divide model.num_heads 4"),
        (["model.num_key_value_heads=0"], "model.num_key_value_heads is 0"),
        (["model.head_dim=7"], "model.head_dim is 7: it should be an even number"),
        (["model.attention_bias=true", "model.qk_norm=true"], "model.attention_bias is true with model.qk_norm=true"),
        (["model.qk_norm=true", "model.gated=false"], "model.qk_norm is true with model.gated=false"),
        (["model.gated=false", "model.num_heads=3", "model.head_dim=16"], "should divide model.hidden_size 128"),
        (["model.rope_parameters.factor=2"], "model.rope_parameters.factor is 2.0: rope_type=default does not use it"),
        (["model.rope_parameters.rope_type=linear"], "model.rope_parameters.factor is null"),
        ([*LLAMA3, "model.rope_parameters.factor=0.5"], "factor is 0.5: it should be at least 1"),
        ([*LLAMA3, "model.rope_parameters.high_freq_factor=1"], "low_freq_factor is 1.0: it should be below"),
        ([*LLAMA3, "model.rope_parameters.low_freq_factor=-1"], "low_freq_factor is -1.0: it should be a positive"),
        ([*LLAMA3, "model.rope_parameters.truncate=true"], "truncate is True: rope_type=llama3 does not use it"),
    ],
)
def test_what_no_decoder_is_gets_refused(overrides, message):
    found = mistakes(from_overrides(overrides), 1)
    assert any(message in mistake for mistake in found), found


def test_heads_of_a_width_of_their_own_need_not_divide_the_model():
    assert mistakes(from_overrides(["model.num_heads=3", "model.head_dim=16"]), 1) == []
