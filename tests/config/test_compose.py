"""Every shipped choice composes and is accepted; what the schema does not have is refused by name."""

from itertools import pairwise, product, zip_longest

import pytest
import yaml

from sparsellm.config import (
    Activation,
    ConfigError,
    EvaluateConfig,
    composition,
    fingerprint,
    from_overrides,
    load,
    mistakes,
    save,
    to_dict,
)
from sparsellm.config.command import refused
from sparsellm.config.groups import CONFIGS, groups
from sparsellm.config.overrides import PATHS, quoted, sweep_request
from sparsellm.config.schema import AnalyzeConfig, BenchmarkConfig, Config, GenerateConfig, ImportConfig, SweepConfig
from sparsellm.config.values import OTHER_NAMES, flat, flat_types


def choices(group):
    return sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))


SIZES = {"0p5b", "1b", "1p5b", "2b", "0p5b_wide", "1b_wide", "1p5b_wide", "2b_wide", "7b", "mini", "tiny"}


def test_shipped_groups_are_the_documented_ones():
    assert set(choices("model")) > SIZES  # the others: test_architectures.py
    assert choices("data") == ["files", "fineweb_edu", "fineweb_edu_stream", "paper", "stdlib_docs"]
    assert choices("sparsity") == ["dense_silu", "l1", "relu"]
    assert choices("logging") == ["disabled", "offline", "online"]


def of(experiment):
    """The overrides of an experiment, with its required values."""
    return [f"experiment={experiment}", *(["data.files=[x.parquet]"] if experiment == "mini" else [])]


@pytest.mark.parametrize("experiment", choices("experiment"))
def test_every_experiment_is_accepted_on_one_and_eight_ranks(experiment):
    config = from_overrides(of(experiment))
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
        "model=mini": ["training.sequence_length=1024"],
    }
    config = from_overrides(["experiment=0p5b", choice, *extra.get(choice, [])])
    assert mistakes(config, 1) == []


# Billions of parameters and tokens: DESIGN §3's table, 7b, and twice the paper's width.
BILLIONS = {
    "0p5b": (0.51, 10), "1b": (1.03, 20), "1p5b": (1.54, 30), "2b": (2.05, 40), "7b": (6.68, 140),
    "0p5b_wide": (0.79, 16), "1b_wide": (1.65, 33), "1p5b_wide": (2.51, 50), "2b_wide": (3.37, 67),
}  # fmt: skip


@pytest.mark.parametrize("size", BILLIONS)
def test_the_papers_sizes_and_larger_ones(size):
    config = from_overrides([f"experiment={size}"])
    model, training = config.model, config.training
    per_layer = 4 * model.hidden_size**2 + 3 * model.hidden_size * model.intermediate_size
    parameters = model.vocab_size * model.hidden_size + model.num_layers * per_layer
    tokens = training.steps * training.batch_size * training.sequence_length
    assert (round(parameters / 1e9, 2), round(tokens / 1e9, 2)) == BILLIONS[size]


def test_yaml_round_trip(tmp_path):
    config = from_overrides(["experiment=0p5b", "data=files", "data.files=[a,b]", "data.tokenizer=t"])
    save(config, tmp_path / "config.yaml")
    assert load(tmp_path / "config.yaml") == config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("+sparsity.l1_coeficient=3", "sparsity.l1_coeficient is not a key: did you mean sparsity.l1_coefficient? "),
        ("traning.steps=3", "traning.steps is not a key: did you mean training.steps? there are model, data"),
        ("l1_coefficient=3", "l1_coefficient is not a key: did you mean sparsity.l1_coefficient? "),
        ("seed=3", "seed is not a key: did you mean data.seed or training.seed? "),
        ("lr=3", "lr is not a key: did you mean optimizer.learning_rate?"),
        ("optimizer.lr=3", "optimizer.lr is not a key: did you mean optimizer.learning_rate?"),
        ("betas=3", "betas is not a key: did you mean optimizer.beta1 and optimizer.beta2?"),
        ("max_steps=3", "max_steps is not a key: did you mean training.steps?"),
        ("epochs=3", "epochs is not a key: did you mean training.steps?"),
        ("wd=0", "wd is not a key: did you mean optimizer.weight_decay?"),
        ("batch_size=3", "batch_size is not a key: did you mean training.batch_size or evaluation.batch_size? "),
        ("experimnt=smoke", "experimnt is not a key: did you mean experiment=smoke?"),
        ("modle=tiny", "modle is not a key: did you mean model=tiny?"),
        ("+spelling=3", "spelling is not a key: there are model"),
        ("+model.layer.depth=3", "model.layer.depth is not a key: model has vocab_size"),
        ("training=3", "training is a group of keys: write training.KEY=VALUE; it has steps, batch_size"),
        ("model=giant", "model=giant is not a choice: model has 0p5b, 0p5b_wide, 1b"),
        ("experiment=smok", "experiment=smok is not a choice: did you mean experiment=smoke? "),
        ("model", "model has no choice: write model=CHOICE, one of 0p5b"),
        ("training.steps", "training.steps has no value: write training.steps=VALUE"),
        ("~experiment", "~experiment: a key cannot be removed"),
        ("training.steps=many", "training.steps is many: it should be a whole number"),
        ("training.steps=1.5", "training.steps is 1.5: it should be a whole number"),
        ("training.steps=", "training.steps is empty: it should be a whole number"),
        ("init_from=", "init_from is empty: it should be text or null"),
        ("training.steps=null", "training.steps is null: it should be a whole number"),
        ("data.max_tokens=many", "data.max_tokens is many: it should be a whole number or null"),
        ("runtime.compile=1", "runtime.compile is 1: it should be true or false"),
        ("sparsity.activation=gelu", "sparsity.activation is gelu: it should be one of relu, silu"),
        ("optimizer.learning_rate=[1,2]", "optimizer.learning_rate is [1,2]: it should be a number"),
        ("data.mix=[a,b]", "data.mix is [a,b]: it should be a list of mappings, like [{a: b}]"),
        (
            "training.seed=1,2",
            "training.seed is 1,2: it takes one value; only the command `sweep` takes lists of values",
        ),
        ("run.name=${nope}", "run.name is ${nope}: interpolations are not supported"),
        ("model.num_layers=???", "model.num_layers has no value"),
    ],
)
def test_what_is_typed_wrong_is_refused_by_name_with_a_remedy(override, message):
    with pytest.raises(ConfigError) as refused:
        from_overrides([override])
    (mistake,) = refused.value.mistakes
    assert mistake.startswith(message)


def test_a_word_alone_is_told_what_to_write():
    with pytest.raises(ConfigError) as refused:
        from_overrides(["runs/NAME", "training"])
    word, group = refused.value.mistakes
    assert word.startswith("runs/NAME is not a key: there are model, data")
    assert word.endswith("; write KEY=VALUE")
    assert group.startswith("training is a group of keys: write training.KEY=VALUE")
    assert group.count("=VALUE") == 1


def test_all_mistakes_are_found_at_once_and_the_rest_is_composed():
    composed = composition(["traning.steps=3", "sparsity.activation=gelu", "training.steps=x", "training.seed=5"])
    assert len(composed.mistakes) == 3
    assert (composed.config.training.steps, composed.config.training.seed) == (400, 5)


def test_options_are_answered_with_what_to_write():
    found = composition(["--experiment", "smoke", "--training.steps=3", "--multirun", "training.seed=1"]).mistakes
    assert [mistake.partition(": ")[2] for mistake in found[:2]] == ["write experiment=smoke", "write training.steps=3"]
    assert "start one command per job" in found[2]
    assert len(found) == 3


def test_values_are_read_as_people_spell_them():
    typed = ["data=files", "data.files=x.jsonl", "data.tokenizer=~/a=b/t (1)", "training.steps=1e3", "run.name=7"]
    config = from_overrides(typed)
    assert config.data.files == ["x.jsonl"]
    assert config.data.tokenizer == "~/a=b/t (1)"
    assert config.training.steps == 1000
    assert isinstance(config.training.steps, int)
    assert config.run.name == "7"
    assert from_overrides(["tasks=piqa", "batch_size=8"], EvaluateConfig).tasks == ["piqa"]
    assert from_overrides(["data.files=[a,'b c']"]).data.files == ["a", "b c"]


# What is typed wins.


def set_by(group: str, choice: str) -> dict:
    """The values that a choice's file and its base files set, read without Hydra."""
    values = yaml.safe_load((CONFIGS / group / f"{choice}.yaml").read_text())
    based_on = [base for base in values.pop("defaults", []) if base != "_self_"]
    found = {}
    for base in based_on:
        found |= set_by(group, base)
    return found | flat(values, f"{group}.")


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        ("[~/x.jsonl]", ["~/x.jsonl"]), ("[Übung/x.jsonl]", ["Übung/x.jsonl"]), ("[a(1).txt]", ["a(1).txt"]),
        ("[a&b.txt, c[v2]/*.txt]", ["a&b.txt", "c[v2]/*.txt"]), ('["a,b.txt",~/x]', ["a,b.txt", "~/x"]),
        ("[it's.txt,that's.txt]", ["it's.txt", "that's.txt"]), ("[a[1,2].txt,~/b]", ["a[1,2].txt", "~/b"]),
        ("[x].jsonl", ["[x].jsonl"]), ("c[v2]/*.jsonl", ["c[v2]/*.jsonl"]), ("[a=b.txt]", ["a=b.txt"]),
    ],
)  # fmt: skip
def test_a_list_of_names_is_a_list_whatever_signs_are_in_them(typed, read):
    composed = composition([f"data.files={typed}"])
    assert composed.config.data.files == read


def test_a_tilde_is_the_home_folder(monkeypatch):
    """Shells do not expand "~" after the "=" of a key: a run would be written to a folder called "~"."""
    monkeypatch.setenv("HOME", "/home/me")
    config = from_overrides(["data.path=~/tokens", "run.root=~/runs", "run.name=a"])
    assert (str(config.data.folder), str(config.run.folder)) == ("/home/me/tokens", "/home/me/runs/a")


@pytest.mark.slow
@pytest.mark.parametrize("experiment", choices("experiment"))
def test_a_choice_that_is_typed_sets_every_value_of_its_file(experiment):
    """Each command line types one choice of every group that still has one."""
    every = {group: choices(group) for group in groups() if group != "experiment"}
    if experiment != "smoke":  # all shapes set the same keys, so one experiment types all of them
        every["model"] = [choice for choice in every["model"] if choice in SIZES][:3]
    for typed in zip_longest(*every.values()):
        chosen = [(group, choice) for group, choice in zip(every, typed, strict=True) if choice is not None]
        overrides = [f"{group}={choice}" for group, choice in chosen]
        config = flat(to_dict(from_overrides([f"experiment={experiment}", "run.name=x", *overrides])))
        for group, choice in chosen:
            for key, value in set_by(group, choice).items():
                number = float(value) if isinstance(config[key], float) else value
                assert config[key] == number, f"{experiment}: {group}={choice} does not set {key}"


def test_a_choice_changes_nothing_that_its_file_does_not_set():
    config = from_overrides(["experiment=0p5b"])
    deterministic = from_overrides(["experiment=0p5b", "runtime=deterministic"])
    assert differences(config, deterministic) == {"runtime.deterministic"}
    smoke = from_overrides(["experiment=smoke"])
    assert differences(smoke, from_overrides(["sparsity=relu"])) == {"sparsity.l1_coefficient", "run.name"}


def differences(a, b) -> set[str]:
    a, b = flat(to_dict(a)), flat(to_dict(b))
    return {key for key in a if a[key] != b[key]}


def test_a_key_that_is_typed_wins_over_a_choice_wherever_it_stands():
    for typed in (["sparsity.l1_coefficient=5e-3", "sparsity=l1"], ["sparsity=l1", "sparsity.l1_coefficient=5e-3"]):
        assert from_overrides(typed).sparsity.l1_coefficient == 5e-3


def test_the_documented_baselines_are_what_they_say():
    """README: `sparsity=relu` is ReLU without L1, `sparsity=dense_silu` the dense baseline."""
    for experiment in choices("experiment"):
        relu = from_overrides([*of(experiment), "sparsity=relu"])
        assert (relu.sparsity.activation, relu.sparsity.l1_coefficient) == (Activation.relu, 0)
        dense = from_overrides([*of(experiment), "sparsity=dense_silu"])
        assert mistakes(dense, 1) == mistakes(relu, 1) == []


@pytest.mark.parametrize("experiment", choices("experiment"))
def test_a_warm_up_that_is_not_typed_takes_at_most_a_tenth_of_the_steps(experiment):
    whole = composition(of(experiment))
    assert whole.notes == []
    assert whole.config.optimizer.warmup_steps == {"smoke": 40, "mini": 200}.get(experiment, 600)
    for steps in (1, 10, 35):
        short = composition([*of(experiment), f"training.steps={steps}"])
        assert short.config.optimizer.warmup_steps == steps // 10
        assert mistakes(short.config, 1) == []
        (note,) = short.notes
        assert note.startswith(
            f"optimizer.warmup_steps is {steps // 10} instead of {whole.config.optimizer.warmup_steps}"
        )
    typed = composition([*of(experiment), "training.steps=10", "optimizer.warmup_steps=9"])
    assert (typed.config.optimizer.warmup_steps, typed.notes) == (9, [])


@pytest.mark.parametrize(
    ("typed", "begins"),
    [
        ([], "smoke"),
        (["sparsity=relu"], "smoke-relu"),
        (["sparsity=l1"], "smoke-l1"),
        (["sparsity=l1", "sparsity.l1_coefficient=1e-3"], "smoke"),  # what the experiment has
        (["sparsity=relu", "model=1b", "training.seed=3"], "smoke-1b-relu-seed_3"),
        (["experiment=0p5b", "data=stdlib_docs"], "0p5b-stdlib_docs"),
        (["experiment=0p5b", "sparsity.l1_coefficient=3e-5"], "0p5b-l1_coefficient_3e-05"),
        (["experiment=0p5b", "data=files", "data.files=[a/b.txt]", "data.tokenizer=/t"], "0p5b-files"),
        (["training.steps=10"], "smoke-steps_10"),
        (["model.gated=false", "training.seed=3", "runtime.compile=true"], "smoke-gated_false-seed_3"),
        (["sparsity.l1_coefficient=1e-3"], "smoke"),
        (["experiment=null"], "run"),
    ],
)
def test_a_runs_name_says_what_differs_from_its_experiment(typed, begins):
    config = from_overrides(typed)
    assert config.run.name == f"{begins}-{fingerprint(config)}"
    assert mistakes(config, 1) == [] or typed == ["experiment=null"]
    assert from_overrides(typed[::-1]).run.name == config.run.name


def test_a_runs_name_stays_short():
    everything = [f"optimizer.{key}=0.5" for key in ("beta1", "beta2", "eps", "weight_decay", "grad_clip")]
    assert len(from_overrides(everything).run.name) < 64


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


def test_the_names_that_other_frameworks_use_lead_to_keys():
    keys = flat_types(Config).keys() | flat_types(GenerateConfig).keys()
    assert {key for meant in OTHER_NAMES.values() for key in meant} <= keys
    with pytest.raises(ConfigError, match=r"max_new_tokens is not a key: did you mean tokens\?"):
        from_overrides(["checkpoint=x", "max_new_tokens=8"], GenerateConfig)


BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join(['*' + before] * 10)}]\n" for before, name in pairwise("abcdefghij")
)


@pytest.mark.parametrize(("text", "why"), [
    (BOMB, "it has aliases"), ("[" * 100_000, "nested more than 16 levels"), ("data: {a: " * 20, "nested more than"),
    ("x" * 1_000_001, "it has 1,000,001 characters"),
])  # fmt: skip
def test_a_file_that_would_take_any_memory_or_time_is_refused(text, why, tmp_path):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=f"config.yaml is damaged .*{why}"):
        load(tmp_path / "config.yaml")


@pytest.mark.parametrize("schema", [Config, EvaluateConfig, AnalyzeConfig, BenchmarkConfig, ImportConfig])
def test_a_path_that_can_be_none_is_refused_under_every_key(schema):
    nobody, long = "~no-such-user/x", f"a/{'é' * 128}"
    keys = [key for key in PATHS if key in flat_types(schema)]
    assert keys
    for key in keys:
        for path, why in [(nobody, "an unknown user, no-such-user"), (long, "a name of 256 bytes")]:
            typed = f"[{{data: '{path}'}}]" if key == "data.mix" else f"'{path}'"
            (mistake,) = composition([f"{key}={typed}"], schema).mistakes
            assert mistake.startswith(f"{key}={path:.40}")
            assert why in mistake


def test_every_key_of_a_path_is_one_of_some_schema():
    schemas = [Config, EvaluateConfig, AnalyzeConfig, BenchmarkConfig, ImportConfig]
    known = set().union(*map(flat_types, schemas)) | {f"sweep.{key}" for key in flat_types(SweepConfig)}
    assert known >= set(PATHS)
    with pytest.raises(ConfigError, match=r"sweep.root=~no-such-user/x refers to the home folder of an unknown user"):
        sweep_request(["sweep.root=~no-such-user/x"])


@pytest.mark.parametrize(
    "path", ["a b", "a'b", "a\\", "a\\'b", "\\\\'", "a\nb", 'a"b', "a[b]{c}", "a,b", "a$b=c", "null", "(a)#;", "é"]
)
def test_a_path_comes_back_from_the_command_that_spells_it(path):
    assert from_overrides([f"output_dir={quoted(path)}"], EvaluateConfig).output_dir == path


def test_a_path_that_cannot_be_looked_at_is_a_sentence(capsys):
    """As with missing permission; here the path is longer than the system allows."""
    assert refused("import_model", [f"output_dir={'a/' * 2100}", "checkpoint=x"])
    said = capsys.readouterr().err
    assert "a/a cannot be read (File name too long): ask its owner" in said
    assert "Traceback" not in said
