"""The seven tasks on local rows."""

import json
from pathlib import Path

import datasets
import lm_eval.tasks
import pytest
from datasets import Dataset
from evaluation.small_rows import rows_of, write_rows
from lm_eval.tasks._yaml_loader import load_yaml

from sparsellm.commands import evaluate
from sparsellm.evaluation.tasks import TASKS, TaskUnavailable, load
from sparsellm.hf import hub


@pytest.mark.parametrize("name", TASKS)
def test_a_local_task_is_the_stock_one_but_for_its_rows(name, tmp_path):
    stock = load_yaml(Path(lm_eval.tasks.__file__).parent / TASKS[name].path)
    assert stock["task"] == name
    assert TASKS[name].split == (stock.get("test_split") or stock["validation_split"])
    write_rows(tmp_path, name, TASKS[name].split)
    loaded = load(name, str(tmp_path))
    assert (loaded.split, loaded.note) == (TASKS[name].split, None)
    kept = ("doc_to_text", "doc_to_target", "doc_to_choice", "output_type", "metric_list", "process_docs")
    for key in kept:
        ours, theirs = getattr(loaded.task.config, key), stock.get(key)
        if callable(theirs):
            ours, theirs = ours.__code__.co_code, theirs.__code__.co_code
        assert ours == theirs, key
    assert stock.get("metadata", {"version": "Yaml"})["version"] == loaded.task.VERSION
    assert len(loaded.task.eval_docs) == 6


def test_the_scored_split_is_read_and_validation_only_stands_in(tmp_path):
    write_rows(tmp_path, "arc_easy", "validation", count=3)
    loaded = load("arc_easy", str(tmp_path))
    assert (loaded.split, loaded.note) == ("validation", "no test rows in data_dir: scored validation instead")
    (tmp_path / "arc_easy/test.jsonl").write_text((tmp_path / "arc_easy/validation.jsonl").read_text() * 2)
    assert load("arc_easy", str(tmp_path)).split == "test"
    assert len(load("arc_easy", str(tmp_path)).task.eval_docs) == 6


def test_parquet(tmp_path):
    (tmp_path / "piqa").mkdir()
    Dataset.from_list(rows_of("piqa", 5, 0)).to_parquet(tmp_path / "piqa/validation.parquet")
    assert load("piqa", str(tmp_path)).task.eval_docs["goal"][4] == rows_of("piqa", 5, 0)[4]["goal"]


def test_local_rows_need_no_cache_that_can_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", Path("/proc/none/datasets"))  # not even root can
    write_rows(tmp_path, "piqa", "validation", count=3)
    assert len(load("piqa", str(tmp_path)).task.eval_docs) == 3
    assert Path("/proc/none/datasets") == datasets.config.HF_DATASETS_CACHE


def test_what_is_missing_is_named(tmp_path):
    write_rows(tmp_path, "piqa", "train")
    with pytest.raises(TaskUnavailable, match=r"no rows in .*piqa: it should have validation.jsonl or validation.parq"):
        load("piqa", str(tmp_path))
    (tmp_path / "piqa/validation.jsonl").write_text('{"goal": "x"}\n')
    with pytest.raises(
        TaskUnavailable, match=r"piqa/validation\.jsonl cannot be used: .* the schema of the hub's data set"
    ):
        load("piqa", str(tmp_path))
    for text, reason in (("", "the file is empty"), ('{"goal": "x"\n', "JSON parse error")):
        (tmp_path / "piqa/validation.jsonl").write_text(text)
        with pytest.raises(TaskUnavailable, match=reason):
            load("piqa", str(tmp_path))


@pytest.mark.parametrize(
    ("name", "field", "value", "said"),
    [
        ("piqa", "label", None, "label is None: it should be one of 0, 1"),
        ("piqa", "label", 2, "label is 2: it should be one of 0, 1"),
        ("piqa", "label", -1, "label is -1: it should be one of 0, 1"),
        ("piqa", "sol2", "", "sol2 is '': it should be a text"),
        ("hellaswag", "label", "", "label is '': it should be one of '0', '1', '2', '3'"),
        ("hellaswag", "label", "4", "label is '4': it should be one of '0', '1', '2', '3'"),
        ("hellaswag", "endings", ["a", None], "endings is ['a', None]: it should be several texts"),
        ("winogrande", "answer", None, "answer is None: it should be one of '1', '2'"),
        ("winogrande", "answer", "3", "answer is '3': it should be one of '1', '2'"),
        ("winogrande", "sentence", "no gap", "sentence is 'no gap': it should be a text with a gap, _"),
        ("arc_easy", "answerKey", "E", "answerKey is 'E': it should be one of 'A', 'B', 'C', 'D'"),
        ("arc_challenge", "question", None, "question is None: it should be a text"),
        ("openbookqa", "answerKey", None, "answerKey is None: it should be one of 'A', 'B', 'C', 'D'"),
        ("openbookqa", "choices", None, "choices is None: it should be texts, with one label each"),
        ("commonsense_qa", "answerKey", "", "answerKey is '': it should be one of 'A', 'B', 'C', 'D', 'E'"),
    ],
)
def test_a_row_without_a_possible_label_or_text_is_named(name, field, value, said, tmp_path):
    rows = rows_of(name, 5, 0)
    rows[2][field] = value
    (tmp_path / name).mkdir()
    path = tmp_path / name / "validation.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(TaskUnavailable) as error:
        load(name, str(tmp_path))
    assert str(error.value).startswith(f"the rows in {path} cannot be used: ")
    assert f"row 3: {said}" in str(error.value)


def test_an_export_writes_the_rows_of_the_hub_as_a_data_dir_and_names_what_has_none(tmp_path, monkeypatch, capsys):
    on_hub = {"allenai/ai2_arc": ("arc_easy", "test"), "baber/piqa": ("piqa", "validation")}
    load_dataset = datasets.load_dataset

    def stand_in(path, name=None, **options):
        if path == "json":
            return load_dataset(path, name, **options)
        task, split = on_hub[path]
        of_split = {each: Dataset.from_list(rows_of(task, 3, 0)) for each in ("train", "validation", "test")}
        return datasets.DatasetDict(of_split | {split: Dataset.from_list(rows_of(task, 6, 1))})

    monkeypatch.setattr(datasets, "load_dataset", stand_in)
    monkeypatch.setattr(hub, "answers", lambda _: True)
    command = [f"export={tmp_path}", "tasks=[arc_easy,piqa,winogrande]"]
    assert evaluate.main(command, "sparsellm evaluate") == 1
    shown = capsys.readouterr()
    assert shown.out == f"{tmp_path}/arc_easy/test.jsonl  6 rows\n{tmp_path}/piqa/validation.jsonl  6 rows\n"
    assert "the data set of winogrande on the hub cannot be used" in shown.err
    assert (
        "; data_dir=DIR takes the rows that `sparsellm evaluate export=DIR` writes where the hub answers" in shown.err
    )
    for task, split in on_hub.values():
        lines = (tmp_path / task / f"{split}.jsonl").read_text().splitlines()
        assert list(map(json.loads, lines)) == rows_of(task, 6, 1)
        assert len(load(task, str(tmp_path)).task.eval_docs) == 6
    assert evaluate.main([f"export={tmp_path}", "checkpoint=x", "data_dir=."], "sparsellm evaluate") == 2
    assert "writes the hub's rows and scores nothing: leave out checkpoint, data_dir" in capsys.readouterr().err


def test_an_export_that_cannot_be_written_is_refused_before_the_hub_is_asked(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setattr(hub, "answers", lambda _: pytest.fail("the hub was asked"))
    for export in (tmp_path / "file", tmp_path / "file/below"):
        assert evaluate.main([f"export={export}"], "sparsellm evaluate") == 1
        assert f"export={export} cannot be written: " in capsys.readouterr().err
