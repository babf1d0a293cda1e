"""The generate command: streams one prompt's text, writes JSON for several prompts; and its refusals."""

import io
import json
import re

import pytest
import small_tokenizers
from attack.small_export import cut, damaged, keys, write_export
from transformers import PreTrainedTokenizerFast

from sparsellm.commands import generate, import_model
from sparsellm.commands.generate import main
from sparsellm.config import GenerateConfig, from_overrides
from sparsellm.inference.generation import Generator, Sampling

PROGRAM = "sparsellm generate"
SETTINGS = ["device=cpu", "tokens=20", "kernels=torch"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_export(tmp_path_factory.mktemp("export"))


def written(capsys, *arguments):
    assert main([*SETTINGS, *arguments], PROGRAM) == 0
    return capsys.readouterr()


def test_one_prompt_is_gone_on_from_and_lines_of_them_too(checkpoint, capsys, monkeypatch):
    for chosen in (["temperature=0"], ["temperature=1.5", "top_p=1", "seed=3"]):
        alone = written(capsys, f"checkpoint={checkpoint}", "prompt=why water", *chosen)
        assert alone.out.startswith("why water")
        said = (
            r"prompt of \d+ tokens? in [\d.]+ s \(setup included\), then \d+ tokens? at [\d.]+ ms per token \(median\)"
        )
        assert re.search(said, alone.err), alone.err
        assert "unavailable" not in alone.err  # one line says that nothing runs on kernels
        monkeypatch.setattr("sys.stdin", io.StringIO("why water\n\n"))
        (line,) = written(capsys, f"checkpoint={checkpoint}", *chosen).out.splitlines()
        assert json.loads(line) == {"prompt": "why water", "text": alone.out[len("why water") :].removesuffix("\n")}
    monkeypatch.setattr("sys.stdin", io.StringIO("why water\nbird\nfish tree stone\n"))
    lines = written(capsys, f"checkpoint={checkpoint}", "temperature=0").out.splitlines()
    assert [json.loads(line)["prompt"] for line in lines] == ["why water", "bird", "fish tree stone"]


def test_what_is_no_text_is_refused_in_a_sentence(checkpoint, capsys, monkeypatch):
    other = "prompt\u00e9".encode("latin-1")
    for errors in ("strict", "surrogateescape"):  # as by most locales, and by C
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(other), encoding="utf-8", errors=errors))
        assert main([f"checkpoint={checkpoint}"], PROGRAM) == 2
        assert "standard input is not UTF-8: it has the byte 0xe9;" in capsys.readouterr().err
    assert main([f"checkpoint={checkpoint}", f"prompt={other.decode('utf-8', 'surrogateescape')}"], PROGRAM) == 2
    assert "prompt is not UTF-8: it has the byte 0xe9;" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", None)  # closed, as by <&-
    assert main([f"checkpoint={checkpoint}"], PROGRAM) == 2
    assert "standard input contains no prompt" in capsys.readouterr().err


def test_a_text_of_tokens_that_are_bytes_and_leave_out_its_first_space_is_written_once(checkpoint, capsys, monkeypatch):
    words = small_tokenizers.llama2(["why water stone"] * 20, 280)
    tokens = [
        words.token_to_id(token) for token in ("▁", "w", "<0x0A>", "<0xE6>", "<0x97>", "<0xA5>", "▁", "y", "</s>")
    ]

    class Told(Generator):
        tokenizer, stop = PreTrainedTokenizerFast(tokenizer_object=words), frozenset([2])

        def __init__(self):
            pass

        def stream(self, prompts, *_):
            assert prompts == [words.encode("why").ids]
            yield from ([token] for token in tokens)

    monkeypatch.setattr(generate, "_load", lambda *_: Told())
    assert written(capsys, f"checkpoint={checkpoint}", "prompt=why").out == "why w\n日 y\n"
    assert Told().text(["why"], 9) == [" w\n日 y"]


def test_a_text_ends_at_each_end_that_the_folder_names_and_an_import_keeps_them(checkpoint, tmp_path, capsys):
    told = Generator.load(checkpoint, "cpu")
    prompt = told.tokenizer("why water").input_ids
    tokens = [token for (token,) in told.stream([prompt], 20, Sampling(2.0), 3)]
    first, second = list(dict.fromkeys(tokens))[1:3]
    changed = damaged(checkpoint, tmp_path / "hf", keys("config.json", eos_token_id=[0, second]))
    (changed / "generation_config.json").write_text(json.dumps({"eos_token_id": [first, 270]}))
    assert import_model.main([f"checkpoint={changed}", f"output_dir={tmp_path}/stock"], "sparsellm import_model") == 0
    expected = told.continuation(prompt, tokens[: min(map(tokens.index, (first, second)))])
    for folder in (changed, tmp_path / "stock"):
        generator = Generator.load(folder, "cpu")
        assert generator.stop == {0, first, second, 270}
        assert generator.text(["why water"], 20, Sampling(2.0), 3) == [expected]
    keys("generation_config.json", eos_token_id=["</s>"])(changed)
    assert main([f"checkpoint={changed}", "prompt=why", *SETTINGS], PROGRAM) == 1
    assert "eos_token_id has '</s>': it should be a token id or a list of token ids" in capsys.readouterr().err


def test_a_prompt_is_taken_as_it_was_typed():
    for text in ("why, water", '"why" {water}: [a] = $b', "3", "null", "a=b"):
        assert from_overrides([f"prompt={text}"], GenerateConfig).prompt == text


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["prompt=x"], 2, ["checkpoint has no value"]),
        (["checkpoint=nope/nope/nope", "prompt="], 2, ["nope/nope/nope", "prompt is empty"]),
        (
            ["checkpoint=WHOLE", "tokens=0", "temperature=-1", "top_p=0"],
            2,
            ["tokens is 0", "temperature is -1.0", "top_p is 0.0"],
        ),
        (["checkpoint=WHOLE", "prompt=why water", "tokens=64"], 1, ["exceed the model's context of 64"]),
        (["checkpoint=CUT", "prompt=why"], 1, ["cannot be read", "model.safetensors"]),
        (["checkpoint=WHOLE", "promt=why"], 2, ["did you mean prompt"]),
        (
            ["checkpoint=WHOLE", "float8=true"],
            2,
            ["float8=true, but device=cpu", "float8=true, but kernels=torch has no"],
        ),
    ],
)
def test_what_cannot_be_written_is_refused(arguments, code, words, checkpoint, tmp_path, capsys):
    broken = damaged(checkpoint, tmp_path / "hf", cut("model.safetensors", 0.5))
    arguments = [a.replace("WHOLE", str(checkpoint)).replace("CUT", str(broken)) for a in arguments]
    assert main(arguments + [s for s in SETTINGS if s.split("=")[0] not in " ".join(arguments)], PROGRAM) == code
    shown = capsys.readouterr()
    assert all(word in shown.err for word in words), shown.err
    assert shown.out == ""  # no prompt without a continuation
