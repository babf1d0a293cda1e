"""Configuration files of one's own: --config, --config-dir, and environment variables."""

import pytest

from sparsellm.config import ConfigError, EvaluateConfig, composition, fingerprint, from_overrides, save, sweep_request
from sparsellm.config.command import refused
from sparsellm.config.overrides import PATHS
from sparsellm.config.schema import AnalyzeConfig, BenchmarkConfig, CalibrateConfig, Config, ImportConfig
from sparsellm.config.values import flat_types


@pytest.fixture
def written(tmp_path):
    """written(name, text): the path of a new file below tmp_path / "own"."""

    def write(name: str, text: str):
        path = tmp_path / "own" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write


@pytest.fixture
def saved(tmp_path):
    """(the configuration of a run, the path of its config.yaml)."""
    config = from_overrides(["training.steps=30", "optimizer.warmup_steps=20", "run.name=first"])
    save(config, tmp_path / "config.yaml")
    return config, tmp_path / "config.yaml"


def test_a_run_starts_again_from_its_own_file(saved):
    config, path = saved
    assert from_overrides(["--config", str(path)]) == config
    assert from_overrides([f"--config={path}", "logging.every=5"]).run.name == "first"  # does not define a run


def test_a_run_that_starts_from_another_ones_file_has_a_name_of_its_own(saved):
    _, path = saved
    changed = composition([f"--config={path}", "training.seed=5", "sparsity=relu"])
    assert changed.config.run.name == f"first-relu-seed_5-{fingerprint(changed.config)}"
    assert changed.config.sparsity.l1_coefficient == 0  # a typed choice wins over a key of the file
    assert changed.config.optimizer.warmup_steps == 20
    assert changed.notes == [f"this is another run than first, so run.name is {changed.config.run.name}"]
    shorter = composition([f"--config={path}", "training.steps=10", "data=files", "data.files=[x]"]).config
    assert (shorter.optimizer.warmup_steps, shorter.data.path) == (1, "data/files")
    (mistake,) = composition([f"--config={path}", "limit=3"], EvaluateConfig).mistakes
    assert mistake.startswith(f"{path} is the configuration of a run: it should set checkpoint, tasks")
    (mistake,) = composition([f"--config={path}", "experiment=0p5b"]).mistakes
    assert mistake.startswith(f"experiment=0p5b with --config={path}, which has a value for every key")


def test_a_file_of_ones_own_sets_keys_and_choices_and_what_is_typed_wins(written):
    path = written("my run.yaml", "experiment: 0p5b\nsparsity: relu\ntraining: {steps: 1e3, seed: 3}\nrun.root: r\n")
    config = from_overrides(["training.seed=4", "--config", str(path), "optimizer.warmup_steps=7"])
    assert (config.model.num_layers, config.training.steps, config.training.seed) == (8, 1000, 4)
    assert (config.sparsity.l1_coefficient, config.run.root) == (0, "r")
    assert config.run.name == f"my_run-warmup_steps_7-seed_4-{fingerprint(config)}"
    path = written("e.yaml", "checkpoint: c\ntasks: piqa\nlimit: 3")
    asked = from_overrides([f"--config={path}", "limit=4"], EvaluateConfig)
    assert (asked.checkpoint, asked.tasks, asked.limit) == ("c", ["piqa"], 4)


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("traning: {steps: 3}", ["traning.steps is not a key: did you mean training.steps?"]),
        (
            "training: {seed: x}\nsparsity: rleu\nlr: 3\ndata: {path: s3://x}",
            ["sparsity=rleu is not a choice: did you mean", "training.seed is x: it should be a whole number",
             "lr is not a key: did you mean optimizer.learning_rate?", "data.path=s3://x is a URL"],
        ),
        ("defaults: [smoke]\nmodle: tiny", ["defaults is not a key", "modle is not a key: did you mean model=tiny?"]),
        ("run: {name: '${training.seed}'}", ["run.name is ${training.seed}: interpolations are not supported"]),
    ],
)  # fmt: skip
def test_a_typo_in_a_file_is_told_like_one_that_is_typed(text, messages, written):
    path = written("x.yaml", text)
    found = composition([f"--config={path}"]).mistakes
    assert len(found) == len(messages)
    for mistake, message in zip(found, messages, strict=True):
        assert mistake.startswith(f"{path}: {message}")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a: [", "it is not YAML"),
        ("", "it contains no keys"),
        ("- 1", "no keys"),
        ("a line\nof text", "no keys"),
    ],
)
def test_a_file_that_holds_no_configuration_is_refused(text, why, written):
    (mistake,) = composition([f"--config={written('x.yaml', text)}"]).mistakes
    assert why in mistake
    assert mistake.endswith(": correct it, or give another file")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "a: 1\nrun: {root: ${oc.env:HOME}/runs}",
            """line 2: expected ',' or '}', but got '{'; write "${...}" in quotes""",
        ),
        ("a: 1\n b: 2\n", "line 2: mapping values are not allowed here"),
        ("a: 1\n\ttab: 2\n", "line 2: found character '\\t' that cannot start any token"),
        ('a: "${oc.env:HOME}\nb: [', "line 2: found unexpected end of stream"),
    ],
)
def test_a_syntax_error_is_one_sentence_with_its_line(text, why, written):
    path = written("x.yaml", text)
    (mistake,) = composition([f"--config={path}"]).mistakes
    assert mistake == f"--config={path} cannot be used (it is not YAML: {why}): correct it, or give another file"


def test_a_sweep_of_ones_own_may_have_yaml_lists_and_names_its_file(own, written):
    text = "optimizer.learning_rate: [1e-3, 0.01]\noptimizer.schedule: wsd,cosine\ndata.files: [[a, b], [c]]"
    path = written("sweep/lists.yaml", text)
    assert [len(texts) for texts in sweep_request([own, "sweep=lists"]).axes.values()] == [2, 2, 2]
    path.write_text("training.seed: [0, x]\ntraining.steps: 1,2\n")
    with pytest.raises(ConfigError) as refused:
        sweep_request([own, "sweep=lists", "training.seeds=1"])
    assert refused.value.mistakes[0] == f"{path}: training.seed is x: it should be a whole number"
    assert len(refused.value.mistakes) == 2
    assert sweep_request([own, "sweep=lists", "training.seed=3,4"]).axes["training.seed"][0] == "training.seed=3"
    path.write_text("training.seed: [0")
    with pytest.raises(ConfigError, match=f"{path} is not YAML: line 1: "):
        sweep_request([own, "sweep=lists"])


def test_a_choice_that_is_missing_without_config_dir_names_the_option(own):
    hint = "; --config-dir DIR adds your own"
    assert composition(["experiment=mine"]).mistakes[0].endswith(hint)
    assert hint not in composition([own, "experiment=gone"]).mistakes[0]


def test_a_file_that_is_not_there_is_a_sentence(saved, tmp_path):
    for typed, said in [
        (["--config"], "--config has no value: write --config FILE"),
        (["--config=no.yaml"], "--config=no.yaml cannot be read (No such file or directory): give a YAML file"),
        ([f"--config={tmp_path}"], f"did you mean {saved[1]}?"),
        (["--config=s3://a/b.yaml"], "--config=s3://a/b.yaml is a URL: it should be a local path"),
        (["--config=a", "--config=b"], "--config is a and b: it should be given once"),
        (["--config-dir=none"], "--config-dir=none is not a folder: it should hold files GROUP/CHOICE.yaml"),
        ([f"--config-dir={tmp_path}"], f"--config-dir={tmp_path} has no choices"),
    ]:
        assert said in composition(typed).mistakes[0]


MINE = """# @package _global_
defaults:
  - smoke
  - override /model: small
training: {steps: 1e2}
optimizer.schedule: wsd
"""


@pytest.fixture
def own(written, tmp_path):
    """The option that adds a folder with an experiment, a model and a sweep."""
    written("experiment/mine.yaml", MINE)
    written("model/small.yaml", "defaults: [tiny]\nnum_layers: 2\n")
    written("sweep/seeds.yaml", "training.seed: 0,1\n")
    return f"--config-dir={tmp_path / 'own'}"


def test_experiments_and_choices_of_ones_own_are_like_the_packages(own):
    config = from_overrides([own, "experiment=mine"])
    assert (config.model.num_layers, config.model.hidden_size, config.training.steps) == (2, 128, 100)
    assert (config.sparsity.l1_coefficient, config.optimizer.schedule.name) == (1e-3, "wsd")  # 1e-3 is smoke's
    assert config.run.name == f"mine-{fingerprint(config)}"
    chosen = from_overrides(["experiment=0p5b", own, "model=small", "model.context_length=2048"])
    assert (chosen.model.num_layers, chosen.model.hidden_size) == (2, 128)
    assert from_overrides([own, "model=small"], CalibrateConfig).model == ["128x512"]
    request = sweep_request([own, "sweep=seeds"])
    assert (request.options.texts, request.axes) == ([own], {"training.seed": ["training.seed=0", "training.seed=1"]})


@pytest.mark.parametrize(
    ("name", "text", "messages"),
    [
        ("experiment/x.yaml", "training: {step: 3}", [": the first line should be `# @package _global_`",
                                                      ": training.step is not a key: did you mean training.steps?"]),
        (
            "experiment/x.yaml",
            "# @package _global_\ndefaults: [{override /modle: tiny}, {override /model: tiy}, {model: tiny}, smok, x]\n"
            "training: {steps: many}",
            [": modle is not a key: did you mean model=tiny?", ": model=tiy is not a choice: did you mean model=tiny?",
             ": defaults has {'model': 'tiny'}: it should be CHOICE or `override /GROUP: CHOICE`",
             ": experiment=smok is not a choice: did you mean experiment=smoke?",
             ": defaults has x, which is based on this file", ": training.steps is many: it should be a whole number"],
        ),
        ("experiment/x.yaml", "# @package _global_\ndefaults: tiny\na: 1", [": defaults is tiny: it should be a list",
                                                                            ": a is not a key"]),
        ("experiment/x.yaml", "# @package _global_\nsparsity: relu\ntraining.steps: 3",
         [": sparsity is relu: write choices in the list `defaults`, as `- override /sparsity: relu`"]),
        ("experiment/x.yaml", "x: [", [" cannot be used (it is not YAML"]),
        ("model/x.yaml", "# @package model\nlayers: 3", [": remove the line `# @package model`",
                                                         ": model.layers is not a key"]),
    ],
)  # fmt: skip
def test_a_typo_in_a_choice_of_ones_own_is_told_like_one_that_is_typed(name, text, messages, own, written):
    path = written(name, text)
    group = path.parent.name
    found = composition([own, f"{group}=x"]).mistakes
    assert [mistake.startswith(f"{path}{message}") for mistake, message in zip(found, messages, strict=True)] == [
        True
    ] * len(messages), found


def test_a_value_in_a_file_is_shown_as_it_is_written(written):
    quoted = 'training: {steps: "8", batch_size: many}\nruntime.compile: "true"'
    path = written("x.yaml", f"{quoted}\nmodel: [tiny]\ndata:\n")
    shown = [
        mistake.removeprefix(f"{path}: ").partition(": ")[0] for mistake in composition([f"--config={path}"]).mistakes
    ]
    assert shown == [
        "data=null is not a choice", "model=['tiny'] is not a choice",
        "training.steps is '8'", "training.batch_size is many", "runtime.compile is 'true'",
    ]  # fmt: skip


def test_a_choice_may_not_hide_the_packages_and_a_folder_may_not_be_misspelt(own, written):
    taken, folder = written("model/tiny.yaml", "num_layers: 1"), written("modell/x.yaml", "num_layers: 1").parent
    other = written("model/other.yml", "num_layers: 1")
    assert composition([own]).mistakes == [
        f"{other} ends in .yml: it should end in .yaml",
        f"{folder} is not a group: did you mean {folder.parent / 'model'}?",
        f"{taken} has the name of a choice of this package: rename the file",
    ]


def test_environment_variables_are_read_in_values(monkeypatch, written):
    monkeypatch.setenv("STEPS", "12")
    monkeypatch.setenv("SCRATCH", "/s,[x]")
    typed = ["run.root=${oc.env:SCRATCH}/runs", "training.steps=${oc.env:STEPS}", "run.name=${oc.env:NOT_SET,a}"]
    config = from_overrides([*typed, "data.files=[${oc.env:SCRATCH}/a, b]"])
    assert (config.run.root, config.training.steps, config.run.name) == ("/s,[x]/runs", 12, "a")
    assert config.data.files == ["/s,[x]/a", "b"]
    path = written("x.yaml", "training: {steps: '${oc.env:STEPS}'}\nrun: {root: '${oc.env:NOT_SET}'}")
    (mistake,) = composition([f"--config={path}"]).mistakes
    assert mistake == (
        f"{path}: run.root is ${{oc.env:NOT_SET}}: the environment variable NOT_SET is not set; set it, or write"
        " ${oc.env:NOT_SET,DEFAULT}"
    )


@pytest.mark.parametrize("schema", [Config, EvaluateConfig, AnalyzeConfig, BenchmarkConfig, ImportConfig])
def test_a_url_is_refused_where_a_path_is_expected(schema):
    for key in (key for key in PATHS if key in flat_types(schema)):
        url = "s3://bucket/x"
        typed = f"[{{data: '{url}', weight: 1}}]" if key == "data.mix" else url
        (mistake,) = composition([f"{key}={typed}"], schema).mistakes
        assert mistake.startswith(f"{key}={url} is a URL: it should be a local path; mount the storage")
    with pytest.raises(ConfigError, match=r"sweep.root=gs://b is a URL"):
        sweep_request(["sweep.root=gs://b"])


def test_a_command_refuses_a_bad_file_before_it_imports_torch(written, capsys):
    path = written("x.yaml", "traning: {steps: 3}")
    assert refused("train", ["--config", str(path), "training.stps=3"])
    said = capsys.readouterr().err
    assert f"{path}: traning.steps is not a key" in said
    assert "training.stps is not a key: did you mean training.steps?" in said
