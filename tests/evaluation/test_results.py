"""The table on screen, and the finished parts."""

from sparsellm.evaluation.results import Finished, mean, table


def task(score, metric="acc_norm", note=None):
    norm = score if metric == "acc_norm" else None
    return {
        "metric": metric, "score": score, "stderr": 0.01, "acc": score, "acc_stderr": 0.01, "acc_norm": norm,
        "acc_norm_stderr": norm and 0.01, "split": "test", "rows": 1234, "note": note,
    }  # fmt: skip


def results(**changed):
    tasks = {"arc_easy": task(0.5, note="x" * 300), "winogrande": task(0.25, "acc")}
    validation = {"loss": 2.0, "perplexity": 7.389, "tokens": 1000}
    return {"tasks": tasks, "failed": {}, "mean": mean(list(tasks), tasks), "validation": validation, **changed}


def test_a_line_per_task_never_cut():
    lines = table(results()).splitlines()
    assert lines[1].startswith("arc_easy    0.5000  acc_norm  0.5000  0.0100  0.5000    0.0100  1,234  test")
    assert lines[1].endswith("x" * 300)
    assert lines[2] == "winogrande  0.2500  acc       0.2500  0.0100  -         -       1,234  test"
    assert lines[3] == "mean of 2   0.3750"
    assert lines[4] == "validation  loss 2.0000  perplexity 7.389  1,000 tokens"
    assert len(lines) == 5


def test_without_a_task_there_is_no_mean_and_a_line_says_why():
    failed = results(failed={"piqa": "no rows\nin it", "validation": "no tokens"}, mean=None, validation=None)
    assert table(failed).splitlines()[3:] == [
        "piqa  failed: no rows in it", "validation  failed: no tokens", "mean of 3  none, for not all have a score",
    ]  # fmt: skip
    assert mean(["arc_easy", "piqa"], results()["tasks"]) is None


def test_a_comparison_stands_side_by_side():
    torch = {
        "tasks": {"arc_easy": task(0.49)},
        "mean": None,
        "validation": {"loss": 2.1, "perplexity": 8.2, "tokens": 9},
    }
    lines = table(results(torch=torch)).splitlines()
    assert lines[0].split()[:4] == ["task", "score", "torch", "difference"]
    assert lines[1].split()[:4] == ["arc_easy", "0.5000", "0.4900", "+0.0100"]
    assert lines[2].split()[:4] == ["winogrande", "0.2500", "-", "-"]
    assert [line[:28] for line in lines[4:]] == ["validation (kernels)  loss 2", "validation (torch)  loss 2.1"]


def test_a_finished_part_is_found_only_for_the_same_things(tmp_path):
    finished = Finished(tmp_path, {"weights": "a", "limit": None})
    assert finished.find("piqa", "rows") is None
    finished.add("piqa", "rows", {"result": 1}, [{"doc": {"é": 1}}])
    assert finished.find("piqa", "rows") == {"result": 1}
    assert (tmp_path / "samples_piqa.jsonl").read_text() == '{"doc": {"é": 1}}\n'
    assert Finished(tmp_path, {"limit": None, "weights": "a"}).find("piqa", "rows") == {"result": 1}
    assert finished.find("piqa", "other rows") is None
    assert Finished(tmp_path, {"weights": "b", "limit": None}).find("piqa", "rows") is None
    (tmp_path / "tasks/piqa.json").write_text('{"key": ')
    assert finished.find("piqa", "rows") is None
