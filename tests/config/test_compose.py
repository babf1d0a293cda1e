"""Every shipped choice composes and is accepted; what the schema does not have is refused by name."""

from itertools import product

import pytest

from sparsellm.config import CONFIGS, Activation, ConfigError, fingerprint, from_overrides, load, mistakes, save


def choices(group):
    return sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))


def test_shipped_groups_are_the_documented_ones():
    assert choices("model") == ["0p5b", "1b", "1p5b", "2b", "tiny"]
    assert choices("data") == ["files", "fineweb_edu", "fineweb_edu_stream", "stdlib_docs"]
    assert choices("sparsity") == ["dense_silu", "l1", "relu"]
    assert choices("logging") == ["disabled", "offline", "online"]


@pytest.mark.parametrize("experiment", choices("experiment"))
def test_every_experiment_is_accepted_on_one_and_eight_ranks(experiment):
    config = from_overrides([f"experiment={experiment}"])
    assert [mistakes(config, ranks) for ranks in (1, 8)] == [[], []]
    assert config.run.name == f"{experiment}-{fingerprint(config)}"
    assert config.data.path == f"data/{config.data.name}"


@pytest.mark.parametrize(
    "choice",
    [f"{g}={v}" for g in ("model", "data", "sparsity", "optimizer", "runtime", "logging") for v in choices(g)],
)
def test_every_choice_of_every_group_is_accepted(choice):
    extra = {
        "data=files": ["data.files=[x.parquet]", "data.tokenizer=x"],
        "model=tiny": ["training.sequence_length=256"],
        "sparsity=dense_silu": ["sparsity.l1_coefficient=0"],
    }
    config = from_overrides(["experiment=0p5b", choice, *extra.get(choice, [])])
    assert mistakes(config, 1) == []


@pytest.mark.parametrize("size", ["0p5b", "1b", "1p5b", "2b"])
def test_the_papers_sizes(size):
    """Parameters and tokens of DESIGN §3's table."""
    config = from_overrides([f"experiment={size}"])
    model, training = config.model, config.training
    per_layer = 4 * model.hidden_size**2 + 3 * model.hidden_size * model.intermediate_size
    parameters = model.vocab_size * model.hidden_size + model.num_layers * per_layer
    tokens = training.steps * training.batch_size * training.sequence_length
    expected = {"0p5b": (0.51, 10), "1b": (1.03, 20), "1p5b": (1.54, 30), "2b": (2.05, 40)}[size]
    assert (round(parameters / 1e9, 2), round(tokens / 1e9, 2)) == expected


def test_yaml_round_trip(tmp_path):
    config = from_overrides(["experiment=0p5b", "data=files", "data.files=[a,b]", "data.tokenizer=t"])
    save(config, tmp_path / "config.yaml")
    assert load(tmp_path / "config.yaml") == config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("+sparsity.l1_coeficient=3", "sparsity.l1_coeficient is not a key: sparsity has activation, l1_coefficient"),
        ("+spelling=3", "spelling is not a key"),
        ("+model.layer.depth=3", "model.layer is not a key"),
    ],
)
def test_added_keys_are_refused_by_name(override, message):
    with pytest.raises(ConfigError, match=message):
        from_overrides([override])


def test_baselines_and_ablations_compose():
    for gated, coefficient in product((True, False), (0, 2e-5)):
        width = 5632 if gated else 8448
        config = from_overrides(
            ["experiment=1p5b", f"model.gated={gated}", f"model.intermediate_size={width}",
             f"sparsity.l1_coefficient={coefficient}"]
        )  # fmt: skip
        assert mistakes(config, 8) == []
    dense = from_overrides(["experiment=1p5b", "sparsity=dense_silu"])
    assert (dense.sparsity.activation, dense.sparsity.l1_coefficient) == (Activation.silu, 0)
