"""The command line `python -m sparsellm.prepare_data`."""

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from whole_config import mistakes

from sparsellm.commands import prepare_data, train
from sparsellm.config import Config, from_overrides
from sparsellm.data import corpus, tokenizer
from sparsellm.data.manifest import read
from sparsellm.data.request import Request


@pytest.fixture
def refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[list[str]], str]:
    """The output of the command line in an empty folder when it refuses its arguments."""

    def run(arguments: list[str]) -> str:
        monkeypatch.chdir(tmp_path)
        assert prepare_data.main(arguments, "prepare_data") == 2
        return capsys.readouterr().err

    return run


def test_an_interrupted_preparation_says_that_it_goes_on_and_not_that_it_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_config: Config) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prepare_data, "prepare", interrupted)
    assert prepare_data.main([], "prepare_data") == 130
    assert "stopped; run the same command to continue from the prepared tokens" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_in_a_refusal_prepares_what_was_missing(
    make_config: Callable[..., Config], parquet: list[str], tmp_path: Path
) -> None:
    # The command composes another experiment, so what preparation checks of the model and the training is on it.
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
    assert "skipped: " in done.stdout
    assert mistakes(config) == []
    assert read(Path(config.data.path)).train.tokens >= 2_561


@pytest.mark.parametrize("choice", ["fineweb_edu", "files"])
def test_the_command_says_all_that_decides_the_tokens(choice: str) -> None:
    extra = ["data.files=[x.parquet]", "data.tokenizer=gpt2"] if choice == "files" else ["experiment=1b"]
    config = from_overrides([f"data={choice}", "data.text_column=content", "data.validation_fraction=0.01", *extra])
    again = from_overrides(shlex.split(Request.of(config).command())[3:])
    assert Request.of(again).recipe == Request.of(config).recipe
    assert (again.data.path, again.data.name) == (config.data.path, config.data.name)
    assert Request.of(again).token_limit == Request.of(config).token_limit > 500_000


@pytest.mark.parametrize(
    ("typed", "needed"),
    [
        (["experiment=0p5b"], ["experiment=0p5b"]),
        (
            ["experiment=0p5b", "sparsity=relu", "data.name=mine", "runtime.device=cpu", "run.name=x"],
            ["experiment=0p5b", "data.name=mine"],
        ),
        (
            ["experiment=1b", "data.files=[a b.txt]", "data=files"],
            ["experiment=1b", "data.files=[a b.txt]", "data=files"],
        ),
    ],
)
def test_the_remedy_is_what_was_typed_as_far_as_it_decides_the_tokens(typed: list[str], needed: list[str]) -> None:
    assert shlex.split(Request.of(from_overrides(typed)).command(typed))[3:] == needed


def test_training_without_data_says_the_shortest_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert train.main(["experiment=smoke", "data=fineweb_edu", "model.vocab_size=49152", "logging=disabled"], "t") == 2
    command = "python -m sparsellm.prepare_data data=fineweb_edu model.vocab_size=49152\n"
    assert f"there are no prepared tokens; run {command}" in capsys.readouterr().err


def test_mistakes_come_in_one_list_and_leave_nothing(refused: Callable[[list[str]], str], tmp_path: Path) -> None:
    found = refused(["data=files", "data.max_tokens=0", "data.validation_fraction=2", "data.tokenizer_vocab_size=9"])
    for expected in ("4 mistakes", "data.files", "data.tokenizer_vocab", "data.max_tokens", "data.validation_fraction"):
        assert expected in found
    assert list(tmp_path.iterdir()) == []


def test_mistakes_of_the_model_do_not_matter(refused: Callable[[list[str]], str]) -> None:
    found = refused(["data=files", "data.files=[none.txt]", "data.tokenizer=./none", "model.hidden_size=3"])
    assert "2 mistakes" in found
    assert "nothing matches 'none.txt'" in found
    assert "data.tokenizer=./none does not exist" in found


def test_too_little_text_is_refused_with_the_length_that_fits_and_leaves_nothing(
    refused: Callable[[list[str]], str], tokenizer_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "one.txt").write_text("block token stream\n" * 40)
    arguments = ["data=files", "data.files=[one.txt]", f"data.tokenizer={tokenizer_folder}"]
    found = refused(arguments)
    length = int(re.search(r"needs a block of 257 .* shorten training.sequence_length to at most (\d+)", found)[1])
    assert [path.name for path in tmp_path.iterdir()] == ["one.txt"]
    assert prepare_data.main([*arguments, f"training.sequence_length={length}"], "prepare_data") == 0
    assert "data/files is ready" in capsys.readouterr().out
    again = [*arguments, f"training.sequence_length={length + 1}"]
    assert f"shorten training.sequence_length to at most {length}" in refused([*again, "data.path=other"])
    assert not (tmp_path / "other").exists()
    # The existing folder is equally short, and keeps its tokens.
    assert f"shorten training.sequence_length to at most {length}, or give more text" in refused(again)
    assert (tmp_path / "data" / "files" / "manifest.json").exists()


def test_one_text_file_alone_is_prepared_with_no_tokenizer_and_no_network(
    tmp_path: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "input.txt").write_text("\n".join(texts))
    arguments = ["data=files", "data.files=[input.txt]", "data.tokenizer_vocab_size=500"]
    assert prepare_data.main(arguments, "prepare_data") == 0
    said = capsys.readouterr().out
    assert "training a tokenizer of 500 ids on the first" in said
    manifest = read(tmp_path / "data/files")
    assert manifest is not None
    held_out = int(0.05 * manifest.tokens)
    assert f"too few documents to hold out whole ones: the last {held_out:,} tokens of the text are held out" in said
    assert "(data.validation_fraction=0.005 of it, and at least 50 blocks, or 5% of a short text)" in said
    assert "the source is exhausted: training on 819,201 tokens will repeat it" in said
    config = from_overrides(arguments)
    assert mistakes(config) == []
    assert Request.of(config).command().count("data.tokenizer_vocab_size=500") == 1


def test_nothing_is_said_to_be_ready_before_all_that_training_checks_is(
    tmp_path: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "input.txt").write_text("\n".join(texts))
    arguments = ["data=files", "data.files=[input.txt]", "data.tokenizer_vocab_size=500", "training.steps=1"]
    assert prepare_data.main(arguments, "prepare_data") == 0
    capsys.readouterr()
    manifest = read(tmp_path / "data/files")
    assert manifest is not None
    longest = manifest.validation.tokens - 1
    for change, expected in (
        (f"training.sequence_length={longest + 1}", f"shorten training.sequence_length to at most {longest}"),
        ("model.vocab_size=400", "has 500 ids, but model.vocab_size is 400"),
    ):
        assert prepare_data.main([*arguments, change], "prepare_data") == 2
        said = capsys.readouterr()
        assert expected in said.err
        assert "ready" not in said.out
        assert expected in mistakes(from_overrides([*arguments, change]))[0]


def test_a_tokenizer_too_large_for_the_model_is_refused_before_anything_is_read(
    refused: Callable[[list[str]], str], tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "input.txt").write_text("a text")
    monkeypatch.setattr(corpus, "read", lambda *_: pytest.fail("the text was read"))
    arguments = ["data=files", "data.files=[input.txt]", "model.vocab_size=399"]
    found = refused([*arguments, f"data.tokenizer={tokenizer_folder}"])
    assert f"the tokenizer of data.tokenizer={tokenizer_folder} has 400 ids, but model.vocab_size is 399" in found
    assert "model.vocab_size=400), or train one on the text (data.tokenizer=null" in found
    assert "(data.tokenizer_vocab_size=4096) has 4,096 ids" in refused(arguments)
    # A hub tokenizer, once it is cached.
    large = tokenizer.load(str(tokenizer_folder))
    monkeypatch.setattr(tokenizer, "load", lambda *_: large)
    assert "the tokenizer of data.tokenizer=owner/name has 400 ids" in refused(
        [*arguments, "data.tokenizer=owner/name"]
    )
    assert [path.name for path in tmp_path.iterdir()] == ["input.txt"]


def test_streaming_has_nothing_to_prepare(refused: Callable[[list[str]], str]) -> None:
    assert "there is nothing to prepare: set data.streaming=false" in refused(["data=fineweb_edu_stream"])
