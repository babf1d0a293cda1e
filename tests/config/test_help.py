"""`--help` has every key with its default and meaning, and appears before anything slow is imported."""

import subprocess
import sys

import pytest

from sparsellm.config import AnalyzeConfig, BenchmarkConfig, Config, EvaluateConfig, SweepConfig, help
from sparsellm.config.commands import COMMANDS
from sparsellm.config.compose import composition
from sparsellm.config.groups import default_choices
from sparsellm.config.values import flat_types


@pytest.mark.parametrize(
    ("command", "schema", "prefix", "left_out"),
    [
        ("train", Config, "", ()),
        ("evaluate", EvaluateConfig, "", ()),
        ("analyze", AnalyzeConfig, "", ()),
        ("benchmark", BenchmarkConfig, "", ()),
        ("sweep", SweepConfig, "sweep.", ()),
        ("sweep", EvaluateConfig, "evaluate.", ("checkpoint", "export", "output_dir")),
    ],
)
def test_every_key_stands_there_with_its_default_and_its_meaning(command, schema, prefix, left_out):
    lines = help.text(command, f"sparsellm {command}").splitlines()
    for key in flat_types(schema):
        rows = [line.split(maxsplit=2) for line in lines if line.startswith(f"  {prefix}{key} ")]
        assert [len(row) for row in rows] == ([] if key in left_out else [3]), key
    assert lines[0].startswith(f"usage: sparsellm {command} ")


@pytest.mark.parametrize("command", COMMANDS)
def test_the_options_for_files_of_ones_own_stand_there(command):
    shown = help.text(command, "program")
    assert "--config FILE" in shown
    assert ("--config-dir DIR" in shown) == (command in ("train", "prepare_data", "sweep", "calibrate"))


def test_only_what_applies_stands_there():
    shown = help.text("prepare_data", "sparsellm prepare_data")
    assert "data.files" in shown
    assert "training.sequence_length" in shown
    assert not any(line.startswith(("  optimizer.", "  runtime.", "  logging ")) for line in shown.splitlines())


def test_the_marked_choices_are_those_that_are_composed():
    assert default_choices() == composition([]).choices


@pytest.mark.parametrize("command", COMMANDS)
def test_help_imports_nothing_slow(command):
    code = (
        "import sys; from sparsellm import cli\n"
        f"try: cli.run({command!r}, ['--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "assert not {'torch', 'transformers', 'matplotlib', 'datasets', 'hydra'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: python -m sparsellm.{command} ")
