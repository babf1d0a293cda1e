"""Stored results of `evaluate`: an evaluation that goes on, results of other weights, dtypes and rows; on the CPU."""

import json
import shutil
from functools import partial

import pytest
from evaluation.conftest import LAST
from evaluation.small_rows import write_rows
from transformers import AutoModelForCausalLM

from sparsellm import api
from sparsellm.commands import evaluate
from sparsellm.config import Dtype, EvaluateConfig, Kernels
from sparsellm.evaluation import checkpoint, downstream, request, results
from sparsellm.evaluation.checkpoint import evaluate_checkpoint
from sparsellm.inference import accelerate


def test_an_interrupted_evaluation_goes_on(bare, rows, monkeypatch):
    scored, score = [], downstream.score

    def interrupted(lm, loaded, limit):
        if len(scored) == 2:
            raise KeyboardInterrupt
        scored.append(loaded.name)
        return score(lm, loaded, limit)

    config = EvaluateConfig(checkpoint=str(bare), data_dir=str(rows), tasks=["piqa", "arc_easy", "winogrande"])
    monkeypatch.setattr(downstream, "score", interrupted)
    with pytest.raises(KeyboardInterrupt):
        evaluate_checkpoint(config)
    assert not (bare / "evaluation/results.json").exists()

    def counted(lm, loaded, limit):
        scored.append(loaded.name)
        return score(lm, loaded, limit)

    monkeypatch.setattr(downstream, "score", counted)
    found = evaluate_checkpoint(config)
    assert scored == ["piqa", "arc_easy", "winogrande"]
    assert found["mean"] is not None
    straight = evaluate_checkpoint(EvaluateConfig(**{**vars(config), "output_dir": str(bare.parent / "straight")}))
    assert straight["tasks"] == found["tasks"]

    # Everything is finished, so the model is not loaded; another dtype or other rows are a new evaluation.
    scored.clear()
    monkeypatch.setattr(checkpoint.Evaluation, "_model", lambda *_: pytest.fail("loaded the model"))
    again = evaluate_checkpoint(config)
    assert again == found
    monkeypatch.undo()
    monkeypatch.setattr(downstream, "score", counted)
    other = evaluate_checkpoint(EvaluateConfig(**{**vars(config), "dtype": Dtype.float32}))
    assert {task["measured"]["dtype"] for task in other["tasks"].values()} == {"float32"}
    assert len(scored) == 3
    write_rows(bare.parent / "rows", "piqa", "validation", count=4, seed=9)
    other = EvaluateConfig(checkpoint=str(bare), data_dir=str(bare.parent / "rows"), tasks=["piqa"])
    assert evaluate_checkpoint(other)["tasks"]["piqa"]["rows"] == 4


@pytest.mark.slow
def test_it_is_complete_only_where_another_start_would_change_nothing(run, rows, tmp_path):
    local = shutil.copytree(rows, tmp_path / "rows")
    asked = {"checkpoint": str(run), "data_dir": str(local), "tasks": ["piqa", "winogrande"]}
    output = run / LAST / "evaluation"

    def complete(**changed):
        return checkpoint.is_complete(EvaluateConfig(**{**asked, **changed}))

    assert not complete()
    evaluate_checkpoint(EvaluateConfig(**asked))
    assert complete()
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in output.rglob("*") if path.is_file()}
    for same in ({"batch_size": 3}, {"tasks": ["winogrande", "piqa"]}, {"tasks": ["piqa"]}, {"validation": False},
                 {"dtype": Dtype.bfloat16}):  # fmt: skip
        assert complete(**same), same
    for other in (
        {"limit": 3}, {"dtype": Dtype.float32}, {"kernels": Kernels.torch}, {"tasks": []},
        {"data_dir": str(rows)}, {"output_dir": str(tmp_path / "out")}, {"limit": 0}, {"checkpoint": str(run / "gone")},
        {"checkpoint": str(run / "checkpoints/step_00000002")},
    ):  # fmt: skip
        assert not complete(**other), other
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in before} == before
    evaluate_checkpoint(EvaluateConfig(**asked))
    assert {path: path.read_bytes() for path in before} == {path: content for path, (content, _) in before.items()}

    # Its inputs are missing, different or damaged.
    for path in (
        output / "results.json", output / "tasks/piqa.json", output / "tasks/validation.json", run / LAST / "COMMITTED",
        run / LAST / "hf/model.safetensors", local / "winogrande/validation.jsonl",
    ):  # fmt: skip
        content = path.read_bytes()
        path.unlink()
        assert not complete(), path
        for damaged in (b"", content[:-2]):
            path.write_bytes(damaged)
            assert not complete(), path
        path.write_bytes(content)
        assert complete()
    for path, old, new in (
        (run / "config.yaml", "/tokens\n", "/gone\n"), (run / "config.yaml", "_samples: 6\n", "_samples: 5\n"),
        (output / "tasks/piqa.json", '"rows": 6', '"rows": 5'), (output / "results.json", '"step": 4', '"step": 5'),
    ):  # fmt: skip
        text = path.read_text()
        assert text.count(old) == 1
        path.write_text(text.replace(old, new))
        assert not complete(), (path, new)
        path.write_text(text)
        assert complete()

    # A later evaluation in which a task failed kept its score, and says so.
    shutil.rmtree(local / "winogrande")
    found = evaluate_checkpoint(EvaluateConfig(**asked))
    assert list(found["failed"]) == ["winogrande"]
    assert found["tasks"].keys() == {"piqa", "winogrande"}
    assert not complete()


def test_results_are_written_and_shown_before_they_are_recorded_and_not_complete_of_other_weights(bare, rows):
    config = EvaluateConfig(checkpoint=str(bare), data_dir=str(rows), tasks=["piqa"])
    shown = []

    def fails(_):
        raise RuntimeError("no record")

    assert not checkpoint.is_complete(config)
    with pytest.raises(RuntimeError, match="no record"):
        evaluate_checkpoint(config, fails, shown.append)
    assert [json.loads((bare / "evaluation/results.json").read_text())] == shown
    recorded = []
    found = evaluate_checkpoint(config, recorded.append)
    assert recorded == [found]
    assert checkpoint.is_complete(config)

    weights = bare / "model.safetensors"  # whole, but others
    weights.write_bytes(weights.read_bytes()[:-1] + b"\xff")
    assert not checkpoint.is_complete(config)


def test_a_comparison_is_complete_with_both_sides(run, rows, monkeypatch):
    monkeypatch.setattr(request, "evaluate_mistakes", lambda _: [])
    monkeypatch.setattr(checkpoint, "accelerate", lambda model, _: accelerate.accelerate(model, "torch"))
    config = EvaluateConfig(
        checkpoint=str(run), data_dir=str(rows), tasks=["piqa"], dtype=Dtype.bfloat16, compare_kernels=True
    )
    evaluate_checkpoint(config)
    assert checkpoint.is_complete(config)
    assert not checkpoint.is_complete(EvaluateConfig(**{**vars(config), "compare_kernels": False}))
    (run / LAST / "evaluation/torch/tasks/piqa.json").unlink()
    assert not checkpoint.is_complete(config)


def test_a_quick_look_leaves_the_scores_of_all_rows_alone(run, rows):
    whole, quick = ({"checkpoint": str(run), "data_dir": str(rows), "tasks": ["piqa"], "limit": n} for n in (None, 2))
    of_all = evaluate_checkpoint(EvaluateConfig(**whole))
    before = {path: path.read_bytes() for path in (run / LAST / "evaluation").rglob("*") if path.is_file()}
    of_two = evaluate_checkpoint(EvaluateConfig(**quick))
    assert of_two["output_dir"] == f"{of_all['output_dir']}/limit_2"
    assert api.evaluate(run, data_dir=rows, tasks="piqa", limit=2) == of_two
    assert of_two["tasks"]["piqa"]["rows"] == 2 < of_all["tasks"]["piqa"]["rows"]
    assert {path: path.read_bytes() for path in before} == before
    assert results.scores(of_two).keys() == {
        "evaluation/limit_2/piqa", "evaluation/limit_2/mean", "evaluation/limit_2/mean_acc",
        "evaluation/validation_loss", "evaluation/validation_perplexity",
    }  # fmt: skip


def test_results_are_merged_by_task(run, rows):
    """Evaluating one task keeps the others' scores; scores with other settings are marked, and there is no common
    mean."""

    def evaluated(*tasks, **changed):
        options = {"checkpoint": str(run), "data_dir": str(rows), "tasks": list(tasks), "validation": False, **changed}
        found = evaluate_checkpoint(EvaluateConfig(**options))
        assert found == json.loads((run / LAST / "evaluation/results.json").read_text())
        return found

    both = evaluated("winogrande", "arc_easy", validation=True)
    alone = evaluated("piqa")
    assert list(alone["tasks"]) == ["arc_easy", "piqa", "winogrande"]  # in the order of the seven
    assert alone["tasks"] == {**both["tasks"], "piqa": alone["tasks"]["piqa"]}
    assert alone["validation"] == both["validation"]
    assert alone["mean"] == pytest.approx(sum(task["score"] for task in alone["tasks"].values()) / 3)

    old = {"lm_eval": "0.4.0"}  # of a part that an earlier evaluation left
    path = run / LAST / "evaluation/tasks/piqa.json"
    part = json.loads(path.read_text())
    path.write_text(
        json.dumps({**part, "finished": {**part["finished"], "measured": part["finished"]["measured"] | old}})
    )
    mixed = evaluated("arc_easy")
    assert mixed["mean"] is None
    assert "mean of 3  none: settings differ (lm_eval" in results.table(mixed, ["piqa"])
    path.write_text(json.dumps(part))
    assert evaluated("piqa")["mean"] == alone["mean"]


def test_scores_in_another_dtype_go_to_a_folder_of_their_own(run, rows, monkeypatch, capsys):
    def evaluated(dtype, *tasks):
        return evaluate_checkpoint(EvaluateConfig(str(run), list(tasks), str(rows), dtype=dtype, validation=False))

    base = run / LAST / "evaluation"
    evaluated(Dtype.float32, "piqa")
    path = base / "tasks/piqa.json"
    path.write_text(path.read_text().replace('"dtype": "float32"', '"dtype": "auto"', 1))
    assert path.read_text().count('"auto"') == 2  # its kernels, and the stored dtype as written before 0.1.0
    before = {path: path.read_bytes() for path in base.rglob("*") if path.is_file()}
    capsys.readouterr()
    found = evaluated(Dtype.auto, "winogrande")
    said = capsys.readouterr().err
    assert f"sparsellm: {base} has scores in float32: scores in bfloat16 are written to {base}/bfloat16\n" in said
    assert "sparsellm: dtype bfloat16 (as the run trained), kernels none (they need a CUDA GPU)\n" in said
    assert list(found["tasks"]) == ["winogrande"]
    assert found == json.loads((base / "bfloat16/results.json").read_text())
    assert {path: path.read_bytes() for path in before} == before
    assert results.of_dtype(base, "bfloat16") == base / "bfloat16"
    assert results.of_dtype(base, "float32") == base
    # An evaluation that has results in one dtype continues in that dtype.
    monkeypatch.setattr(downstream, "score", lambda *_: pytest.fail("scored"))
    assert list(evaluated(Dtype.float32, "piqa")["tasks"]) == ["piqa"]
    assert list(evaluated(Dtype.bfloat16, "winogrande")["tasks"]) == ["winogrande"]
    assert checkpoint.is_complete(EvaluateConfig(str(run), ["winogrande"], str(rows), validation=False))


def test_the_same_rows_in_another_folder_are_not_scored_again_and_have_a_mean_with_it(bare, rows, tmp_path):
    first = evaluate_checkpoint(EvaluateConfig(checkpoint=str(bare), data_dir=str(rows), tasks=["piqa"]))
    moved = shutil.copytree(rows, tmp_path / "moved")
    both = {"checkpoint": str(bare), "data_dir": str(moved), "tasks": ["piqa", "winogrande"]}
    assert not checkpoint.is_complete(EvaluateConfig(**{**both, "tasks": ["piqa"]}))
    found = evaluate_checkpoint(EvaluateConfig(**both))
    assert found["tasks"]["piqa"]["score"] == first["tasks"]["piqa"]["score"]
    assert {task["measured"]["data"] for task in found["tasks"].values()} == {str(moved)}
    assert found["mean"] is not None
    assert checkpoint.is_complete(EvaluateConfig(**both))


def test_an_attempt_that_fails_removes_nothing(bare, rows, tmp_path, monkeypatch, capsys):
    config = EvaluateConfig(checkpoint=str(bare), data_dir=str(rows), tasks=["piqa", "winogrande"])
    before = evaluate_checkpoint(config)
    kept = {path.name: path.read_bytes() for path in (bare / "evaluation").rglob("*") if path.name != "results.json"
            and path.is_file()}  # fmt: skip
    (tmp_path / "no rows").mkdir()
    failed = evaluate_checkpoint(EvaluateConfig(**{**vars(config), "data_dir": str(tmp_path / "no rows")}))
    assert failed["failed"].keys() == {"piqa", "winogrande"}
    assert (failed["tasks"], failed["mean"]) == (before["tasks"], before["mean"])

    def out_of_memory(*_):
        raise MemoryError("no room")

    monkeypatch.setattr(downstream, "score", out_of_memory)
    failed = evaluate_checkpoint(EvaluateConfig(**{**vars(config), "kernels": Kernels.torch}))
    assert (failed["tasks"], list(failed["failed"])) == (before["tasks"], ["piqa", "winogrande"])
    after = {path.name: path.read_bytes() for path in (bare / "evaluation").rglob("*") if path.name in kept}
    assert after == kept

    recorded, fresh = [], tmp_path / "fresh"
    nothing = EvaluateConfig(**{**vars(config), "output_dir": str(fresh)})
    assert evaluate_checkpoint(nothing, recorded.append, partial(evaluate.show, config.tasks))["tasks"] == {}
    assert not (fresh / "results.json").exists()
    assert recorded == []
    assert f"there are no scores, so {fresh}/results.json" in capsys.readouterr().out


def test_scores_of_other_weights_never_stay(bare, rows, tmp_path):
    def evaluated(task, data_dir=rows):
        return evaluate_checkpoint(EvaluateConfig(checkpoint=str(bare), data_dir=str(data_dir), tasks=[task]))

    before = evaluated("piqa")
    model = AutoModelForCausalLM.from_pretrained(bare)
    model.model.norm.weight.data *= 2
    model.save_pretrained(bare)
    after = evaluated("winogrande")
    assert list(after["tasks"]) == ["winogrande"]
    assert after["identity"] != before["identity"]
    assert not (bare / "evaluation/samples_piqa.jsonl").exists()
    model.model.norm.weight.data *= 2
    model.save_pretrained(bare)
    (tmp_path / "no rows").mkdir()
    assert evaluated("winogrande", tmp_path / "no rows")["tasks"] == {}
    assert not (bare / "evaluation/results.json").exists()
