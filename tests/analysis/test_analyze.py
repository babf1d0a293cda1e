"""`python -m sparsellm.analyze` and `analyze_checkpoint` on a tiny trained run, on the CPU and without a network."""

import csv
import gzip
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from analysis.test_activity import small_model
from datasets import Dataset
from evaluation.conftest import LAST
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer
from whole_config import open_validation

from sparsellm import benchmark
from sparsellm.analysis import AnalysisError, analyze_checkpoint, figures, report, study
from sparsellm.analysis.text import documents, of_file
from sparsellm.commands import analyze
from sparsellm.config import AnalyzeConfig, BenchmarkConfig, ConfigError, Dtype, load
from sparsellm.data import tokenizer
from sparsellm.distributed.groups import process_group
from sparsellm.runs.checkpoint import Checkpoints

FIGURES = sorted(set(report.FIGURES) - {report.SPEEDUP})
FILES = sorted([*FIGURES, "analysis.json", "layers.csv", "neurons.csv", "positions.csv", "tokens.csv"])
LENGTH = 32  # sequence length of the run


@pytest.fixture
def text(tmp_path):
    return text_file(tmp_path)


def text_file(folder):
    path = folder / "notes.md"
    path.write_text("why water stone bird <|endoftext|> fish tree " * 40)
    return path


def analyzed(**values):
    return analyze_checkpoint(AnalyzeConfig(**{key: str(v) if isinstance(v, Path) else v for key, v in values.items()}))


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_run_on_its_held_out_blocks(run):
    results, folder = analyzed(checkpoint=run, sequences=5, batch_size=2, min_count=2)
    assert folder == run / LAST / "analysis"
    assert sorted(path.name for path in folder.iterdir()) == FILES
    assert results == json.loads((folder / "analysis.json").read_text())
    assert results["text"] == {"source": "held-out", "sequences": 5, "sequence_length": LENGTH, "tokens": 5 * LENGTH}
    assert results["model"] == {
        "architecture": "LlamaForCausalLM", "gated": True, "layers": 2, "neurons": 48, "dtype": "bfloat16",
    }  # fmt: skip
    assert (results["speed"], results["speed_missing"]) == (None, "needs a CUDA GPU")
    # The files describe the same tokens: those on which the run would validate with as many samples.
    config = load(run / "config.yaml")
    config = replace(config, logging=replace(config.logging, validation_samples=5))
    blocks = open_validation(config, run / LAST / "hf", run)[:, :-1]
    settled = blocks[:, results["tokens"]["from_position"] :].flatten().bincount()
    of_tokens = rows_of(folder / "tokens.csv")
    assert {int(row["id"]): int(row["count"]) for row in of_tokens} == {
        i: n for i, n in enumerate(settled.tolist()) if n
    }
    assert len(rows_of(folder / "positions.csv")) == LENGTH
    neurons = rows_of(folder / "neurons.csv")
    assert len(neurons) == 2 * 48
    for row, layer in zip(rows_of(folder / "layers.csv"), results["layers"], strict=True):
        fired = [int(each["fired"]) for each in neurons if each["layer"] == row["layer"]]
        assert fired == sorted(fired, reverse=True)
        assert sum(fired) / (5 * LENGTH) == layer["nonzeros"]["mean"] == float(row["nonzeros_mean"])
        assert fired.count(0) == layer["dead"] == int(row["dead"])
        assert layer["nonzeros"]["mean"] <= layer["union_per_tile"] <= 48 - layer["dead"]
    assert sum(row["tokens"] for row in results["token_classes"]) == settled.sum()
    assert results["position_fit"].keys() == {"floor", "amplitude", "scale", "relative_error"}
    shown = report.table(results)
    assert f"exponential fit, position from 0: {report.fitted(results['position_fit'])}, relative error" in shown
    assert "by token class, from position 8 on: " in shown


@pytest.mark.slow
def test_the_same_bytes_every_time_and_nothing_of_an_earlier_analysis(run):
    _, folder = analyzed(checkpoint=run)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    (folder / "speedup.png").write_bytes(b"of an analysis on a GPU")
    analyzed(checkpoint=run)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_model_in_which_nothing_fires_is_analyzed_and_drawn(run, capsys):
    _, before = analyzed(checkpoint=run)
    names = {path.name for path in before.iterdir()}
    weights = next(run.glob("checkpoints/step_00000004/hf")) / "model.safetensors"
    tensors = load_file(weights)
    zeros = {name: tensor * (0 if "gate_proj" in name else 1) for name, tensor in tensors.items()}
    bare = shutil.copytree(weights.parent, run.parent / "silent")
    save_file(zeros, bare / "model.safetensors", metadata={"format": "pt"})
    results, folder = analyzed(checkpoint=bare, text=text_file(run.parent))
    assert all(row["zeros"] == 1 for row in results["layers"])
    assert {path.name for path in folder.iterdir()} == names
    assert "cannot be drawn" not in capsys.readouterr().err


def test_a_figure_that_cannot_be_drawn_takes_no_number_away(run, monkeypatch, capsys):
    def fails(*_):
        raise ValueError("all values are <= 0")

    monkeypatch.setattr(figures, "_frequency", fails)
    _, folder = analyzed(checkpoint=run)
    assert (folder / "analysis.json").exists()
    assert (folder / "union_by_layer.png").exists()
    assert not (folder / "firing_frequency.png").exists()
    assert "firing_frequency.png cannot be drawn (ValueError: all values are <= 0)" in capsys.readouterr().err


def test_batches_change_no_count(run):
    whole, _ = analyzed(checkpoint=run, sequences=6, batch_size=6)
    parts, _ = analyzed(checkpoint=run, sequences=6, batch_size=4)  # 128 tokens each, so the tiles are the same
    assert whole == parts


def test_an_analyzed_checkpoint_is_still_whole(run):
    analyzed(checkpoint=run)
    with process_group("cpu") as ranks:
        assert Checkpoints(run / "checkpoints", ranks, 2, lambda *_: None).find(skip_damaged=False) == 4


def test_a_text_file_is_read_with_the_checkpoints_tokenizer(bare, text):
    results, folder = analyzed(checkpoint=bare, text=text, sequences=2)
    assert folder == bare / "analysis"
    vocabulary = tokenizer.load(str(bare))
    (expected,) = tokenizer.encode(vocabulary, [text.read_text()])
    assert results["text"] == {"source": str(text), "sequences": 2, "sequence_length": 192, "tokens": 384}
    counted = {int(row["id"]): int(row["count"]) for row in rows_of(folder / "tokens.csv")}
    read = expected[48:192] + expected[192 + 48 : 384]  # from position 48 on, a quarter of the context
    assert counted == {i: read.count(i) for i in set(read)}
    assert (
        vocabulary.tokenizer.token_to_id(tokenizer.END_OF_TEXT) not in counted
    )  # its spelling in a text is plain text


def test_a_parquet_file_and_a_run_of_shorter_sequences(run, tmp_path):
    path = tmp_path / "[texts].parquet"
    Dataset.from_dict({"text": ["why water", None, "stone bird fish"] * 30, "other": list(range(90))}).to_parquet(path)
    results, _ = analyzed(checkpoint=run, text=path, sequences=3, min_count=1)
    assert results["text"] == {"source": str(path), "sequences": 3, "sequence_length": LENGTH, "tokens": 3 * LENGTH}
    seen = {row["token"] for row in results["tokens"]["most_active"]}
    assert tokenizer.END_OF_TEXT in seen  # after every document


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".jsonl.gz", ".parquet", ".txt", ".md"])
def test_the_texts_of_a_file_are_read_whatever_its_kind(suffix, tmp_path):
    texts, path = ["why <|endoftext|> {water}\n", 'a "stone"'], tmp_path / f"texts{suffix}"
    if suffix in (".txt", ".md"):
        path.write_bytes(b"\xef\xbb\xbf" * (suffix == ".md") + texts[0].encode())
        texts = texts[:1]
    elif suffix == ".parquet":
        Dataset.from_dict({"text": [*texts, None]}).to_parquet(path)
    else:
        rows = "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate([*texts, None]))
        path.write_bytes(gzip.compress(rows.encode()) if suffix == ".jsonl.gz" else rows.encode())
    assert list(documents(path, 1 << 20)) == texts


@pytest.mark.parametrize("suffix", [".csv", ".ndjson"])
def test_rows_of_other_kinds_are_refused_before_any_work(suffix, run, tmp_path):
    (tmp_path / f"rows{suffix}").write_text("text\nwhy\n")
    for config in (AnalyzeConfig, BenchmarkConfig):
        (found,) = {AnalyzeConfig: study, BenchmarkConfig: benchmark.study}[config].mistakes(
            config(
                checkpoint=[str(run)] if config is BenchmarkConfig else str(run), text=str(tmp_path / f"rows{suffix}")
            )
        )
        assert "has an unsupported format: it should be plain text, or parquet or jsonl" in found


@pytest.mark.parametrize("ending", [".txt", ".md"])
def test_a_long_text_is_read_as_far_as_its_tokens_are_needed(bare, tmp_path, monkeypatch, ending):
    path, auto = tmp_path / f"text{ending}", AutoTokenizer.from_pretrained(bare)
    path.write_text("why wäter " * 300)
    whole = of_file(path, auto, 2, 50)
    monkeypatch.setattr("sparsellm.analysis.text.BYTES_PER_TOKEN", 0)
    for least in range(1, 400):
        monkeypatch.setattr("sparsellm.analysis.text.LEAST_READ", least)
        assert torch.equal(of_file(path, auto, 2, 50), whole)
    os.truncate(path, 10**10)
    assert torch.equal(of_file(path, auto, 2, 50), whole)


def test_a_text_shorter_than_a_sequence(run, tmp_path):
    (tmp_path / "short.txt").write_text("why")
    results, folder = analyzed(checkpoint=run, text=tmp_path / "short.txt")
    assert results["text"]["sequences"] == 1
    assert 1 < results["text"]["tokens"] < LENGTH
    assert "no token was read 20 times" in report.table(results)
    assert sorted(path.name for path in folder.iterdir()) == FILES


def test_a_non_gated_model(bare, text, tmp_path):
    for name in ("model.safetensors", "config.json"):
        (bare / name).unlink()
    small_model(False, vocab_size=400).save_pretrained(bare)
    results, _ = analyzed(checkpoint=bare, text=text, dtype=Dtype.bfloat16, output_dir=tmp_path / "out" / "here")
    assert results["model"] == {
        "architecture": "ArceeForCausalLM", "gated": False, "layers": 3, "neurons": 48, "dtype": "bfloat16",
    }  # fmt: skip
    assert (tmp_path / "out/here/analysis.json").is_file()


def test_results_go_elsewhere_where_the_checkpoint_cannot_be_written(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "access", lambda *_: False)
    _, folder = analyzed(checkpoint=run)
    assert str(folder) == "analyses/tiny-4"
    assert not (run / LAST / "analysis").exists()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"hidden_act": "silu"},
            "llama model with hidden_act silu: it should be llama or mistral or qwen2 or qwen3 or arcee with relu",
        ),
        ({"model_type": "phi3"}, "phi3 model with hidden_act relu: it should be"),
        ({"mlp_bias": True}, r"has broken tensors: missing: .*mlp\.gate_proj\.bias"),
        ({"vocab_size": 10}, "outside the model's vocabulary of 10"),
    ],
)
def test_other_models_are_refused(bare, text, changes, problem):
    config = json.loads((bare / "config.json").read_text())
    (bare / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(AnalysisError, match=problem):
        analyzed(checkpoint=bare, text=text)
    assert not (bare / "analysis" / "analysis.json").exists()


def test_a_damaged_checkpoint_is_refused(run):
    path = run / LAST / "hf" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(AnalysisError, match=r"is damaged: hf/model\.safetensors"):
        analyzed(checkpoint=run)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("empty.txt", b"", "contains no text"),
        ("latin.txt", b"\xe9t\xe9", r"text=.*latin\.txt, line 1: the byte 0xe9 is not UTF-8"),
        ("latin.md", b"\xe9t\xe9", "cannot be read as text"),
        ("no.parquet", b"PAR?", "cannot be read as parquet"),
        ("no.jsonl", b"why water", "line 1: it is not JSON"),
    ],
)
def test_unreadable_texts_are_refused(run, tmp_path, name, content, problem):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(AnalysisError, match=problem) as refused:
        analyzed(checkpoint=run, text=tmp_path / name)
    assert "data." not in str(refused.value), "the command has no such key"


def test_a_parquet_file_without_text_is_refused(run, tmp_path):
    Dataset.from_dict({"content": ["why"], "id": [1]}).to_parquet(tmp_path / "other.parquet")
    with pytest.raises(AnalysisError, match="has no column 'text': rename one of content"):
        analyzed(checkpoint=run, text=tmp_path / "other.parquet")


def test_missing_held_out_text_is_named(run):
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.partition("\n")[2].replace("/tokens\n", "/gone\n"))  # without its checksum
    with pytest.raises(
        AnalysisError, match=r"the prepared tokens of .* are not in .*gone.* give another text with text=FILE"
    ):
        analyzed(checkpoint=run)


def test_every_mistake_is_listed(bare, tmp_path):
    with pytest.raises(ConfigError) as error:
        analyzed(checkpoint=tmp_path / "none", text=tmp_path, sequences=0, batch_size=-1, min_count=0)
    assert len(error.value.mistakes) == 5
    with pytest.raises(ConfigError, match="belongs to no run, so it has no held-out text: give a text with text=FILE"):
        analyzed(checkpoint=bare)
    with pytest.raises(
        ConfigError, match="checkpoint=tinny is not a local folder, but a hub name, so it has no held-out text"
    ):
        analyzed(checkpoint="tinny")


def test_speed_ups_are_shown_where_they_were_measured(run, monkeypatch):
    measured = {"tokens": 64, "union": 30.0, "dense_ms": 2.0, "engine_ms": 1.0}
    speeds = [
        {"layer": 0, "nonzeros": 20.0, "engine": "tile", "speedup": 2.0, **measured},
        {"layer": 1, "nonzeros": 40.0, "engine": "dense", "speedup": 1.0, **measured},
    ]
    monkeypatch.setattr(study, "_speeds", lambda *_: (speeds, None))
    monkeypatch.setattr(study.torch.cuda, "get_device_name", lambda _: "a GPU")
    results, folder = analyzed(checkpoint=run)
    assert results["speed"]["layers"] == speeds
    assert results["speed"]["correlation_with_nonzeros"] == pytest.approx(-1)
    assert (folder / "speedup.png").is_file()
    shown = report.table(results)
    assert {"tile", "2.00x"} <= set(shown.split())
    assert "speedup and nonzeros over layers: -1.00" in shown


@pytest.mark.parametrize(("argument", "code"), [("sequences=4", 0), ("sequences=0", 2), ("output_dir=FILE/x", 1)])
def test_the_command(run, text, argument, code, monkeypatch, capsys):
    arguments = [f"checkpoint={run}", argument.replace("FILE", str(text))]
    assert analyze.main(arguments, "analyze") == code
    shown = capsys.readouterr()
    if code:
        assert shown.out == ""
        assert "sparsellm: " in shown.err
    else:
        assert f"{LAST}: 2 gated layers of 48 neurons, bfloat16\n128 tokens of held-out text: 4 sequences" in shown.out
        assert "in these 128 tokens" in shown.out
        for name in FIGURES:  # the speedups were not measured
            assert f"\n  {report.FIGURES[name]}: {name}\n" in shown.out
        assert report.SPEEDUP not in shown.out
        assert shown.err.endswith("reading  4/4 sequences\n")
        assert "sparsellm: dtype bfloat16 (as the run trained), kernels none (counting reads every" in shown.err
