"""The command line `python -m sparsellm.prepare_data`."""

import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sparsellm.commands import prepare_data
from sparsellm.config import Config, from_overrides
from sparsellm.data import mistakes
from sparsellm.data.manifest import preparation_command, read, recipe, token_limit


@pytest.fixture
def refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[list[str]], str]:
    """What the command line says, in an empty folder, when it refuses its arguments."""

    def run(arguments: list[str]) -> str:
        monkeypatch.chdir(tmp_path)
        assert prepare_data.main(arguments, "prepare_data") == 2
        return capsys.readouterr().err

    return run


def test_the_command_in_a_refusal_prepares_what_was_missing(
    make_config: Callable[..., Config], parquet: list[str], tmp_path: Path
) -> None:
    # Of the model only the size of the run matters: the command composes another model, whose vocabulary is smaller.
    odd = tmp_path / "odd [name], a=b"
    odd.mkdir()
    (odd / "x.parquet").write_bytes(Path(parquet[0]).read_bytes())
    config = make_config([str(tmp_path / "odd ?name?, a=b" / "*.parquet")], max_tokens=None, path=str(odd / "out"))
    (found,) = mistakes(config)
    command = shlex.split(found[found.index("python -m") :])
    assert command[:3] == ["python", "-m", "sparsellm.prepare_data"]
    done = subprocess.run([sys.executable, *command[1:]], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "Preparing 2,561 training tokens (data.max_tokens) in" in done.stdout
    assert "left out: " in done.stdout
    assert mistakes(config) == []
    assert read(Path(config.data.path)).train.tokens >= 2_561


@pytest.mark.parametrize("choice", ["fineweb_edu", "files"])
def test_the_command_says_all_that_decides_the_tokens(choice: str) -> None:
    extra = ["data.files=[x.parquet]", "data.tokenizer=gpt2"] if choice == "files" else ["experiment=1b"]
    config = from_overrides([f"data={choice}", "data.text_column=content", "data.validation_fraction=0.01", *extra])
    again = from_overrides(shlex.split(preparation_command(config))[3:])
    assert recipe(again.data) == recipe(config.data)
    assert (again.data.path, again.data.name) == (config.data.path, config.data.name)
    assert token_limit(again) == token_limit(config) > 500_000


def test_mistakes_come_in_one_list_and_leave_nothing(refused: Callable[[list[str]], str], tmp_path: Path) -> None:
    found = refused(["data=files", "data.max_tokens=0", "data.validation_fraction=2"])
    for expected in ("4 mistakes", "data.files", "data.tokenizer", "data.max_tokens", "data.validation_fraction"):
        assert expected in found
    assert list(tmp_path.iterdir()) == []


def test_mistakes_of_the_model_do_not_matter(refused: Callable[[list[str]], str]) -> None:
    found = refused(["data=files", "data.files=[none.txt]", "data.tokenizer=./none", "model.hidden_size=3"])
    assert "2 mistakes" in found
    assert "nothing matches 'none.txt'" in found
    assert "'./none' does not exist" in found


def test_too_little_text_is_refused_in_the_end(
    refused: Callable[[list[str]], str], tokenizer_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "one.txt").write_text("a single document")
    found = refused(["data=files", "data.files=[one.txt]", f"data.tokenizer={tokenizer_folder}"])
    assert "0 validation tokens in 0 documents, less than one block of 257" in found
    assert "a text file is one document" in found


def test_streaming_has_nothing_to_prepare(refused: Callable[[list[str]], str]) -> None:
    assert "there is nothing to prepare: set data.streaming=false" in refused(["data=fineweb_edu_stream"])
