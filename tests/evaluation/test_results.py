"""The table on screen, the mean, and the finished parts."""

import pytest

from sparsellm.evaluation.results import Finished, discard_others, kept, means, only, record_table, scores, table

SETTINGS = {"dtype": "float32", "kernels": "torch", "device": "cpu", "data": "hub", "limit": None, "lm_eval": "0.4.9"}


def task(score, metric="acc_norm", note=None, **measured):
    norm = score if metric == "acc_norm" else None
    return {
        "metric": metric, "score": score, "stderr": 0.01, "acc": score - 0.1 if norm else score, "acc_stderr": 0.01,
        "acc_norm": norm, "acc_norm_stderr": norm and 0.01, "split": "test", "rows": 1234, "note": note,
        "measured": {**SETTINGS, **measured},
    }  # fmt: skip


def results(**changed):
    tasks = {"arc_easy": task(0.5, note="x" * 300), "winogrande": task(0.25, "acc")}
    validation = {"loss": 2.0, "perplexity": 7.389, "tokens": 1000}
    found = {"tasks": tasks, "failed": {}, "validation": validation, **changed}
    return {**means(found["tasks"], found["failed"]), **found}


def shown(found):
    return table(found, list(found["tasks"])).splitlines()


def test_a_line_per_task_never_cut():
    lines = shown(results())
    assert lines[1].startswith("arc_easy    0.5000  acc_norm  0.4000  0.0100  0.5000    0.0100  1,234  test")
    assert lines[2] == "winogrande  0.2500  acc       0.2500  0.0100  -         -       1,234  test"
    assert lines[3] == "mean of 2   0.3750            0.3250"  # mean of the scores, and under `acc` the mean of `acc`
    assert lines[4] == f"arc_easy  note: {'x' * 300}"
    assert lines[5] == "measured with  dtype float32  kernels torch  device cpu  data hub  limit none  lm_eval 0.4.9"
    assert lines[6] == (
        "validation  loss 2.0000  perplexity 7.389  over 1,000 held-out tokens, as the run validates; under 20,000"
        " tokens, small differences may be chance"
    )
    assert len(lines) == 7


def test_without_a_task_there_is_no_mean_and_a_line_says_why():
    failed = results(failed={"piqa": "no rows\nin it", "validation": "no tokens"}, validation=None)
    assert (failed["mean"], failed["mean_acc"]) == (None, None)
    assert shown(failed)[4:7] == [
        "piqa  failed: no rows in it", "validation  failed: no tokens", "mean of 3  none: not all tasks have a score",
    ]  # fmt: skip
    nothing = results(tasks={}, failed={"piqa": "no rows"}, validation=None)
    assert shown(nothing) == ["piqa  failed: no rows", "mean of 1  none: not all tasks have a score"]


def test_scores_that_were_measured_otherwise_have_no_mean_and_the_table_says_how_each_was():
    tasks = {"arc_easy": task(0.5), "piqa": task(0.7, dtype="bfloat16", kernels="cuda")}
    found = results(tasks=tasks)
    assert found["mean"] is None
    lines = shown(found)
    assert lines[0].split()[-2:] == ["dtype", "kernels"]
    assert [line.split()[-2:] for line in lines[1:3]] == [["float32", "torch"], ["bfloat16", "cuda"]]
    assert lines[3] == "mean of 2  none: settings differ (dtype, kernels); score all tasks with one command"
    assert lines[4] == "measured with  device cpu  data hub  limit none  lm_eval 0.4.9"
    for other in ({"limit": 5}, {"data": "/rows"}, {"device": "cuda"}, {"lm_eval": "0.4.8"}):
        assert means({"arc_easy": task(0.5), "piqa": task(0.7, **other)}, {}) == {"mean": None, "mean_acc": None}, other
    alike = means({"arc_easy": task(0.5), "piqa": task(0.7, torch="2.11")}, {})
    assert alike == {"mean": pytest.approx(0.6), "mean_acc": pytest.approx(0.5)}


def test_earlier_scores_are_told_apart_from_new_ones():
    lines = table(results(failed={"arc_easy": "no rows"}), asked=["arc_easy"]).splitlines()
    assert "arc_easy  failed: no rows; the score above is from an earlier evaluation" in lines
    assert "from earlier evaluations of these weights  winogrande" in lines
    assert lines[3].startswith("mean of 2   0.3750")


def test_the_record_names_the_rows_of_each_score():
    found = results(tasks={"arc_easy": task(0.5), "piqa": task(0.7, limit=20)})
    assert scores(found).keys() == {
        "evaluation/arc_easy", "evaluation/limit_20/piqa", "evaluation/validation_loss",
        "evaluation/validation_perplexity",
    }  # fmt: skip
    assert scores(results())["evaluation/mean"] == 0.375
    assert scores(results())["evaluation/mean_acc"] == 0.325
    assert scores(results(tasks={"piqa": task(0.7, limit=20)}))["evaluation/limit_20/mean"] == 0.7


def test_the_record_and_the_table_keep_float8_apart():
    found = results(tasks={"piqa": task(0.7, dtype="float8")}, float8=True)
    assert {name.rpartition("/")[0] for name in scores(found)} == {"evaluation/float8"}
    assert record_table(found) == "evaluation/float8/table"
    assert "held-out tokens, in FP8" in table(found, ["piqa"])


def test_the_mean_of_fewer_tasks_is_theirs():
    found = only(results(failed={"piqa": "no rows"}), ["winogrande"])
    assert (list(found["tasks"]), found["failed"], found["mean"], found["mean_acc"]) == (["winogrande"], {}, 0.25, 0.25)
    assert only(results(), ["winogrande", "arc_easy", "piqa"]) == results()


def test_a_comparison_stands_side_by_side():
    torch = {
        "tasks": {"arc_easy": task(0.49)},
        "mean": None,
        "validation": {"loss": 2.1, "perplexity": 8.2, "tokens": 9},
    }
    lines = shown(results(torch=torch))
    assert lines[0].split()[:4] == ["task", "score", "torch", "difference"]
    assert lines[1].split()[:4] == ["arc_easy", "0.5000", "0.4900", "+0.0100"]
    assert lines[2].split()[:4] == ["winogrande", "0.2500", "-", "-"]
    assert [line[:28] for line in lines[6:]] == ["validation (kernels)  loss 2", "validation (torch)  loss 2.1"]
    torch["tasks"]["arc_easy"] = task(0.49, dtype="bfloat16")  # of another evaluation
    assert shown(results(torch=torch))[1].split()[:4] == ["arc_easy", "0.5000", "-", "-"]


def test_a_finished_part_is_found_only_for_the_same_things(tmp_path):
    finished = Finished(tmp_path, {"weights": "a", "limit": None})
    assert finished.find("piqa", "rows") is None
    finished.add("piqa", "rows", {"result": 1}, [{"doc": {"é": 1}}])
    assert finished.find("piqa", "rows") == {"result": 1}
    assert (tmp_path / "samples_piqa.jsonl").read_text() == '{"doc": {"é": 1}}\n'
    assert Finished(tmp_path, {"limit": None, "weights": "a"}).find("piqa", "rows") == {"result": 1}
    assert finished.find("piqa", "other rows") is None
    assert Finished(tmp_path, {"weights": "b", "limit": None}).find("piqa", "rows") is None
    (tmp_path / "tasks/piqa.json").write_text('{"decided_by": ')
    assert finished.find("piqa", "rows") is None


def test_a_part_stays_until_another_one_is_whole(tmp_path, monkeypatch):
    finished = Finished(tmp_path, {"weights": "a", "dtype": "float32"})
    finished.add("piqa", "rows", {"result": 1}, [{"doc": 1}])
    other = Finished(tmp_path, {"weights": "a", "dtype": "bfloat16"})
    with pytest.raises(ZeroDivisionError):
        other.add("piqa", "rows", {"result": 2}, ({"doc": 1 / i} for i in range(2)))
    assert kept(tmp_path, "a") == {"piqa": {"result": 1}}
    assert (tmp_path / "samples_piqa.jsonl").read_text() == '{"doc": 1}\n'


def test_parts_of_other_weights_go_with_their_samples(tmp_path):
    Finished(tmp_path, {"weights": "a"}).add("winogrande", "rows", {"result": 1}, [{"doc": 1}])
    Finished(tmp_path, {"weights": "b", "limit": 3}).add("piqa", "rows", {"result": 2}, [{"doc": 2}])
    assert (kept(tmp_path, "a"), kept(tmp_path, "b")) == ({"winogrande": {"result": 1}}, {"piqa": {"result": 2}})
    discard_others(tmp_path, "b")
    assert (kept(tmp_path, "a"), kept(tmp_path, "b")) == ({}, {"piqa": {"result": 2}})
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["piqa.json", "samples_piqa.jsonl", "tasks"]
