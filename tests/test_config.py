"""The configuration: every shipped choice composes and is accepted, every mistake is named at once."""

import re
from itertools import product

import pytest

from sparsellm import config as c
from sparsellm.config import CONFIGS, Activation, ConfigError, Kernels, L1Normalization, from_overrides, mistakes
from sparsellm.ops.build import KernelsUnavailable


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
    assert config.run.name == f"{experiment}-{c.fingerprint(config)}"
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


def test_yaml_and_dict_round_trips(tmp_path):
    config = from_overrides(["experiment=0p5b", "data=files", "data.files=[a,b]", "data.tokenizer=t"])
    assert c.from_dict(c.to_dict(config)) == config
    c.save(config, tmp_path / "config.yaml")
    assert c.load(tmp_path / "config.yaml") == config


def test_the_fingerprint_ignores_only_runtime_logging_evaluation_and_run():
    base = from_overrides([])
    for free in ("runtime.micro_batch_size=2", "runtime.kernels=torch", "logging.every=5", "evaluation.every=5",
                 "run.checkpoint_every=7"):  # fmt: skip
        assert c.fingerprint(from_overrides([free])) == c.fingerprint(base), free
    for change in ("sparsity.l1_coefficient=2e-3", "training.seed=1", "data.seed=1", "optimizer.eps=1e-7"):
        assert c.fingerprint(from_overrides([change])) != c.fingerprint(base), change


def test_coefficients_under_both_normalizations():
    config = from_overrides(["experiment=0p5b"])
    assert c.l1_coefficient_as(config, L1Normalization.sum) == 2e-5
    assert c.l1_coefficient_as(config, L1Normalization.mean) == pytest.approx(0.90, abs=2e-3)  # DESIGN §2
    mean = from_overrides(["experiment=0p5b", "sparsity.l1_normalization=mean", "sparsity.l1_coefficient=0.90112"])
    assert c.l1_coefficient_as(mean, L1Normalization.sum) == pytest.approx(2e-5)


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


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["sparsity.l1_coefficient=-1"], "sparsity.l1_coefficient is -1.0: it must be zero or a positive number"),
        (["sparsity.l1_coefficient=nan"], "sparsity.l1_coefficient is nan"),
        (["training.batch_size=7"], "training.batch_size 7 does not divide over 2 ranks"),
        (["training.sequence_length=512"], "training.sequence_length 512 is longer than model.context_length 256"),
        (["model.intermediate_size=500"], "model.intermediate_size is 500: it must be a multiple of 8"),
        (["model.intermediate_size=65544"], "model.intermediate_size is 65544: it must be at most 65536"),
        (["model.num_heads=3"], "model.hidden_size 128 does not divide into 3 heads"),
        (["model.num_heads=0"], "model.num_heads is 0: it must be at least 1"),
        (["sparsity.activation=silu"], "sparsity.l1_coefficient is 0.001 with sparsity.activation=silu"),
        (["sparsity.l1_warmup_tokens=5"], "l1_warmup_tokens is 5 with sparsity.l1_schedule=constant"),
        (["sparsity.l1_schedule=linear"], "l1_warmup_tokens is 0 with sparsity.l1_schedule=linear"),
        (["sparsity.l1_start_tokens=-1"], "sparsity.l1_start_tokens is -1: it must be at least 0"),
        (["sparsity.l1_start_tokens=819200"], "exceed the run's 819200 tokens together"),
        (["sparsity.reinit_dead_after_tokens=0"], "sparsity.reinit_dead_after_tokens is 0: .* at least 1, or null"),
        (["sparsity.reinit_every=0"], "sparsity.reinit_every is 0: it must be at least 1"),
        (["sparsity=dense_silu", "sparsity.reinit_dead_after_tokens=9"], "=silu, whose neurons are never silent"),
        (
            ["sparsity.reinit_dead_after_tokens=204801", "sparsity.reinit_every=300"],
            "never draws a row in the run's 400 steps: the first could be drawn at step 300, .* in the last 101",
        ),
        (["optimizer.warmup_steps=401"], "optimizer.warmup_steps 401 exceeds training.steps 400"),
        (["optimizer.learning_rate=0"], "optimizer.learning_rate is 0.0: it must be a positive number"),
        (["optimizer.beta2=1"], "optimizer.beta2 is 1.0"),
        (["logging.every=11"], "logging.every is 11: it must be 1 to 10"),
        (["run.name=A/B"], "run.name is 'A/B': use only"),
        (["run.name=.."], r"run.name is '\.\.'"),
        (["data.source=hub"], "data.source=hub needs the data set's name"),
        (["data.source=files"], "data.source=files needs data.files"),
        (["data.streaming=true"], "there is nothing to stream"),
        (["data.max_tokens=0"], "data.max_tokens is 0"),
    ],
)
def test_values_that_cannot_be_are_refused_by_name(overrides, message):
    found = mistakes(from_overrides(overrides), 2)
    assert any(re.search(message, problem) for problem in found), found


@pytest.mark.parametrize(
    ("overrides", "obstacle"),
    [
        (["runtime.device=cpu"], "runtime.device=cpu has no GPU"),
        (["runtime.precision=float32"], "runtime.precision=float32 is not bfloat16"),
        (["runtime=deterministic"], "runtime.deterministic=true excludes engines that are chosen by timing"),
        (
            ["sparsity=dense_silu", "sparsity.l1_coefficient=0"],
            "sparsity.activation=silu never gives exact zeros",
        ),
    ],
)
def test_kernels_that_could_never_run_are_refused_and_auto_goes_without(overrides, obstacle):
    def found(kernels):
        return mistakes(from_overrides(["experiment=0p5b", *overrides, f"runtime.kernels={kernels}"]), 1)

    assert found("cuda") == [f"runtime.kernels=cuda, but {obstacle}: change it, or use runtime.kernels=auto"]
    assert found("auto") == found("torch") == []


def test_kernels_are_refused_with_the_machines_own_reason(monkeypatch):
    def unavailable():
        raise KernelsUnavailable("no nvcc in PATH: install the CUDA toolkit")

    config = from_overrides(["experiment=0p5b", "runtime.kernels=cuda"])
    assert config.runtime.kernels == Kernels.cuda
    monkeypatch.setattr(c.build, "load", unavailable)
    assert mistakes(config, 1) == [
        "runtime.kernels=cuda does not run here (runtime.kernels=auto goes without): no nvcc in PATH: install the CUDA"
        " toolkit"
    ]
    monkeypatch.setattr(c.build, "load", lambda: None)
    assert mistakes(config, 1) == []


def test_schedules_and_reinitialization_that_just_fit_are_accepted():
    for overrides in (
        ["sparsity.l1_start_tokens=819199"],
        ["sparsity.l1_schedule=linear", "sparsity.l1_start_tokens=800000", "sparsity.l1_warmup_tokens=19200"],
        ["sparsity.reinit_dead_after_tokens=204800", "sparsity.reinit_every=300"],
        ["sparsity.reinit_dead_after_tokens=1", "sparsity.reinit_every=399"],
    ):
        assert mistakes(from_overrides(overrides), 1) == []


def test_all_mistakes_are_listed_at_once():
    bad = ["training.batch_size=7", "model.intermediate_size=500", "run.name=X", "logging.every=0"]
    assert len(mistakes(from_overrides(bad), 2)) == 4
    assert str(ConfigError(["a", "b"])).startswith("2 mistakes in the configuration:\n  - a\n  - b")


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
