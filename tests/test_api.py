"""sparsellm.api: what the commands do, with exceptions, and nothing of the process changed afterwards."""

import os
import signal
from pathlib import Path

import pytest
import torch
from small_run import OVERRIDES

import sparsellm
from sparsellm.api import Config, ConfigError, SparsellmError, evaluate, prepare_data, train
from sparsellm.config.compose import from_values
from sparsellm.config.schema import Dtype, EvaluateConfig, RuntimeConfig
from sparsellm.training.loop import Trainer
from sparsellm.training.run import determinism

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with prepared text."""
    folder = tmp_path_factory.mktemp("api")
    (folder / "text.txt").write_text("".join(f"The number {n} comes before {n + 1}.\n" for n in range(400)))
    assert prepare_data(composed(folder)) == folder / "data"
    return folder


def composed(folder, *overrides):
    text = ["data=files", f"data.files={folder}/text.txt", "data.tokenizer_vocab_size=300", f"data.path={folder}/data"]
    small = ["model.vocab_size=300", "training.steps=8", "runtime.deterministic=false"]
    return Config.compose(*OVERRIDES, *text, *small, f"run.root={folder}/runs", *overrides)


def test_a_run_is_trained_stopped_resumed_and_loaded(folder, monkeypatch):
    monkeypatch.setattr("sparsellm.runs.report.sample", lambda *_: "")
    monkeypatch.setattr("sparsellm.runs.curves.Curves.draw", lambda *_: {})
    advance = Trainer.advance

    def signalled(trainer, batches):
        if trainer.step == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return advance(trainer, batches)

    handlers = [signal.getsignal(number) for number in NUMBERS]
    config = composed(folder, "run.name=a")
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "advance", signalled)
        stopped = train(config)
    assert (stopped.folder, stopped.stopped) == (folder / "runs/a", signal.SIGTERM)
    assert stopped.step == stopped.row["step"] < 8
    assert [signal.getsignal(number) for number in NUMBERS] == handlers
    assert not torch.distributed.is_initialized()

    done = train(Config.load(folder / "runs/a/config.yaml"))
    assert (done.folder, done.step, done.stopped, done.row["step"]) == (folder / "runs/a", 8, None, 8)
    assert train(config) == done  # a finished run is reported
    assert sparsellm.Generator.load(done.model).text(["The"], 2)


@pytest.mark.parametrize("compiles", [False, True])
def test_torch_is_deterministic_during_a_deterministic_run_only(compiles, monkeypatch):
    made = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", made.append)  # which imports torch's compiler
    with determinism(RuntimeConfig(deterministic=True, compile=compiles)):
        assert torch.are_deterministic_algorithms_enabled() != compiles
        assert made == [True] * compiles
    with determinism(RuntimeConfig(deterministic=False, compile=compiles)):
        pass
    assert not torch.are_deterministic_algorithms_enabled()
    assert made == [True, False] * compiles


def test_every_mistake_is_an_exception_and_leaves_nothing_behind(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = composed(folder, "run.name=b")
    config.training.steps = "many"
    config.training.step = 3
    config.run.root = "s3://bucket/runs"
    with pytest.raises(ConfigError) as refused:
        train(config)
    assert [mistake.partition(": ")[0] for mistake in refused.value.mistakes] == [
        "training.steps is many", "training.step is not a key", "run.root=s3://bucket/runs is a URL",
    ]  # fmt: skip
    for wrong in (composed(folder, "training.batch_size=0"), composed(folder, "data.path=none"), "experiment=smoke"):
        with pytest.raises(ConfigError):
            train(wrong)
    with pytest.raises(ConfigError, match="nothing matches"):
        prepare_data(Config.compose("data=files", "data.files=none.txt"))
    with pytest.raises(ConfigError, match=r"did you mean training\.steps"):
        Config.compose("traning.steps=3")
    with pytest.raises(ConfigError, match=r"no\.yaml cannot be read"):
        Config.load("no.yaml")
    for checkpoint, settings, message in [
        ("no/such/run", {}, "checkpoint=no/such/run does not exist"),
        ("s3://a/b", {"output_dir": "gs://c"}, r"checkpoint=s3://a/b is a URL[^$]*output_dir=gs://c is a URL"),
        (folder, {"limt": 3}, "limt is not a key: did you mean limit"),
        (folder, {"limit": "x", "tasks": "piqa"}, "limit is x: it should be a whole number or null"),
    ]:
        with pytest.raises(SparsellmError, match=message):
            evaluate(checkpoint, **settings)
    assert list(tmp_path.iterdir()) == []


def test_a_configuration_may_be_built_field_by_field(folder):
    config = Config()
    config.data.path, config.sparsity.activation, config.training.steps = folder / "none", "relu", 5
    with pytest.raises(ConfigError) as refused:
        train(config)
    assert config.run.name is None  # the caller's object is not changed
    assert all("is not a" not in mistake for mistake in refused.value.mistakes)


def test_an_export_is_the_commands_and_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match="use the command `sparsellm evaluate export=DIR`"):
        evaluate(None, export=str(tmp_path / "rows"))
    assert not (tmp_path / "rows").exists()


def test_enums_paths_and_tuples_are_taken_as_what_would_be_typed(tmp_path):
    typed = {"checkpoint": "x", "data_dir": str(tmp_path), "tasks": ["piqa"], "dtype": "bfloat16"}
    given = {"checkpoint": Path("x"), "data_dir": tmp_path, "tasks": ("piqa",), "dtype": Dtype.bfloat16}
    assert from_values(given, EvaluateConfig) == from_values(typed, EvaluateConfig)
