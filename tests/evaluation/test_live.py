"""Evaluations during training: they equal the checkpoint's scores and do not affect the run."""

import itertools
import json
import os
import random
import shutil
import signal
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import whole_config
from logged_rows import differences, untimed_rows
from processes import PATIENCE, SERVER, family, kill, started, torchrun
from small_run import signal_after
from tqdm import tqdm

from sparsellm.commands import train
from sparsellm.config import EvaluateConfig, from_overrides
from sparsellm.distributed.groups import process_group
from sparsellm.evaluation import downstream, live
from sparsellm.evaluation.checkpoint import evaluate_checkpoint
from sparsellm.hf import conversion
from sparsellm.inference.accelerate import accelerate
from sparsellm.model import Decoder
from sparsellm.runs.folder import open_folder
from sparsellm.runs.metrics import METRICS, read
from sparsellm.runs.wandb_record import WandbRun
from sparsellm.training.loop import Trainer

NAMES = ["hellaswag", "piqa", "arc_challenge"]


@pytest.fixture
def asked(tiny, rows, tmp_path):
    """The run of `tiny` in a folder of the test, evaluated after steps 3 and 4."""
    return [
        *tiny, f"run.root={tmp_path}", "evaluation.every=3", f"evaluation.tasks=[{','.join(NAMES)}]",
        f"evaluation.data_dir={rows}", "evaluation.limit=5", "run.checkpoint_every=1", "run.keep_checkpoints=4",
    ]  # fmt: skip


def run(overrides, stop_at=None):
    """Train: (exit code, the run's state and that of every random generator at its end, folder)."""
    config = from_overrides(overrides)
    assert train.check(config) == []
    with process_group("cpu") as ranks:
        evaluation, opened = whole_config.live_evaluation(config, ranks), whole_config.open_data(config, ranks)
        with open_folder(config, ranks) as (config, folder):
            trainer = Trainer(config, ranks, opened, folder, evaluation)
            signal_after(trainer, stop_at)
            random.seed(0), np.random.seed(0)
            code = trainer.fit()
            state = {name: t.clone() for name, t in trainer._tensors(trainer.silent.reduced()).items()}
            state |= {"torch": torch.get_rng_state(), "numpy": torch.tensor(np.random.get_state()[1])}
            state |= {"python": torch.tensor(random.getstate()[1])}
            assert all(module.training for module in trainer.decoder.modules())
    return code, state, folder


def rows_without(folder, *keys):
    return [{k: v for k, v in row.items() if k not in keys} for row in untimed_rows(folder)]


def assert_equal_states(one, other):
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.slow
def test_training_does_not_notice_and_the_scores_are_the_checkpoints(asked, rows):
    _, without, plain = run([*asked, "run.name=plain", "evaluation.every=0", "logging.every=1"])
    _, evaluated, folder = run([*asked, "logging.every=1"])
    assert_equal_states(without, evaluated)
    assert differences(rows_without(folder, "evaluation"), rows_without(plain, "evaluation")) == []
    assert [row["evaluation"] for row in read(plain / METRICS)] == [None] * 4

    scores = [row["evaluation"] for row in read(folder / METRICS)]
    assert scores[:2] == [None, None]
    for step in (3, 4):
        checkpoint = str(folder / f"checkpoints/step_{step:08d}")
        found = evaluate_checkpoint(EvaluateConfig(checkpoint, tasks=NAMES, data_dir=str(rows), limit=5))
        expected = {name: found["tasks"][name]["score"] for name in NAMES} | {"mean": found["mean"]}
        assert scores[step - 1] == expected


def test_the_view_is_the_exported_model(asked, trained):
    """Bit for bit, with the current weights; gated or not. Kernels accept it like a loaded model."""
    tokens = torch.arange(24).view(2, 12)
    for gated in ("true", "false"):
        config = from_overrides([*asked, f"model.gated={gated}"])
        decoder = Decoder(config.model, config.sparsity.activation)
        tokenizer = trained / "checkpoints/step_00000004/hf"
        about = (config.model, config.sparsity.activation)
        view = conversion.view(decoder.state_dict(), *about, 0)
        with torch.no_grad():
            decoder.layers[0].mlp.up_proj.weight.mul_(-2)
            decoder.embed_tokens.weight.mul_(2)
        folder = trained.parent / f"exported-{gated}"
        conversion.export(decoder.state_dict(), *about, folder, tokenizer, 0)
        loaded = type(view).from_pretrained(folder)
        assert view.lm_head.weight.data_ptr() == decoder.embed_tokens.weight.data_ptr()
        assert sorted(view.state_dict()) == sorted(loaded.state_dict())
        with torch.no_grad():
            expected = loaded(tokens).logits
            assert torch.equal(view(tokens).logits, expected)
            torch.testing.assert_close(accelerate(view, "torch")(tokens).logits, expected)
        shutil.rmtree(folder)


def test_mixed_precision_is_the_runs(asked):
    """Logits no further from float32's than twice as far as the decoder's own are, under the same autocast."""
    config = from_overrides([*asked, "runtime.precision=bfloat16"])
    with process_group("cpu") as ranks:
        opened = whole_config.open_data(config, ranks)
        torch.manual_seed(0)
        decoder = Decoder(config.model, config.sparsity.activation)
        evaluation = whole_config.live_evaluation(config, ranks, [])
        lm = evaluation._lm(decoder.state_dict(), opened, decoder)
        tokens = opened.validation[:2, :-1]
        with torch.no_grad():
            exact = decoder.logits(tokens)
            with torch.autocast("cpu", torch.bfloat16):
                own = decoder.logits(tokens)
        theirs = lm._model_call(tokens)
    assert (theirs.dtype, lm.softmax_dtype) == (torch.bfloat16, torch.float32)
    assert 0 < (theirs - exact).norm() <= 2 * (own - exact).norm()


@pytest.mark.slow
def test_nothing_is_compiled_anew(asked, monkeypatch):
    """As many graphs are captured as without evaluations, whose sequences have many lengths."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))  # no C++ compiler, and quicker
    seen = []
    for every in (0, 1):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        run([*asked, "runtime.compile=true", f"run.name=every-{every}", f"evaluation.every={every}"])
        seen.append(dict(torch._dynamo.utils.counters["stats"]))
    torch._dynamo.reset()
    assert seen[0] == seen[1]
    assert seen[0]["unique_graphs"] > 0


@pytest.mark.slow
def test_a_resumed_run_evaluates_at_the_same_steps(asked):
    _, straight, folder = run([*asked, "run.name=straight"])
    overrides = [*asked, "run.name=stopped"]
    assert run(overrides, stop_at=0)[0] == 128 + signal.SIGTERM
    code, resumed, stopped = run(overrides)
    assert code == 0
    assert_equal_states(straight, resumed)
    assert differences(untimed_rows(stopped), untimed_rows(folder)) == []


@pytest.mark.slow
def test_an_evaluation_that_ends_the_process_costs_no_checkpoint_and_the_resume_does_it(asked, monkeypatch):
    _, _, folder = run([*asked, "run.name=straight"])
    overrides = [*asked, "run.name=ended"]
    with monkeypatch.context() as patch:
        patch.setattr(live.LiveEvaluation, "scores", lambda *_: {}["what ends a process"])
        with pytest.raises(KeyError):
            run(overrides)
    assert max((folder.parent / "ended/checkpoints").iterdir()).name == "step_00000003"
    code, _, ended = run(overrides)
    assert code == 0
    assert differences(untimed_rows(ended), untimed_rows(folder)) == []


@pytest.mark.slow
def test_a_failure_is_said_and_training_goes_on(asked, monkeypatch, capsys):
    score = downstream.score

    def fails(lm, loaded, limit):
        if loaded.name == "piqa":
            raise downstream.ScoringFailed("rank 1: OutOfMemoryError: too much")
        return score(lm, loaded, limit)

    monkeypatch.setattr(downstream, "score", fails)
    code, _, folder = run(asked)
    assert code == 0
    for row in read(folder / METRICS)[-2:]:
        assert (row["evaluation"]["piqa"], row["evaluation"]["mean"]) == (None, None)
        assert row["evaluation"]["hellaswag"] is not None
    monkeypatch.setattr(conversion, "view", lambda *_: 1 / 0)
    assert run([*asked, "run.name=no-model"])[0] == 0
    said = capsys.readouterr().err
    assert "sparsellm: step 3: evaluating piqa failed; training continues: ScoringFailed: rank 1: OutOfMemory" in said
    assert "step 4/4  accuracy  hellaswag " in said
    assert "sparsellm: step 4: evaluating the model failed; training continues: ZeroDivisionError: division by" in said


def test_a_split_that_stands_in_for_another_is_said(asked, capsys):
    with process_group("cpu") as ranks:
        whole_config.live_evaluation(from_overrides([*asked, "evaluation.tasks=[piqa,arc_easy]"]), ranks)
    said = capsys.readouterr().err
    assert "evaluation of arc_easy: no test rows in data_dir: scored validation instead" in said
    assert "evaluation of piqa" not in said


def test_mistakes_are_found_before_training(asked, rows, tmp_path, monkeypatch, capsys):
    wrong = [*asked, "evaluation.every=-1", "evaluation.limit=0", "evaluation.batch_size=0", "evaluation.data_dir=gone",
             "evaluation.tasks=[piqa,pica,piqa]"]  # fmt: skip
    assert [mistake.split(" ")[0] for mistake in train.check(from_overrides(wrong))] == [
        "evaluation.every", "evaluation.limit", "evaluation.batch_size", "evaluation.tasks", "evaluation.tasks",
        "evaluation.data_dir=gone",
    ]  # fmt: skip
    assert train.check(from_overrides([*asked, "evaluation.tasks=[pica]", "evaluation.every=0"])) == []
    (mistake,) = train.check(from_overrides([*asked, "evaluation.tasks=none"]))
    assert mistake.startswith("evaluation.tasks is none: evaluation.every=0")

    local = shutil.copytree(rows, tmp_path / "rows")
    shutil.rmtree(local / "piqa")
    config = from_overrides([*asked, f"evaluation.data_dir={local}"])
    (mistake,) = train.check(config)
    assert mistake.startswith(f"evaluation.tasks: piqa cannot be scored: no rows in {local}/piqa: it should have")

    # What only reading shows is the same kind of mistake, of all tasks at once, and leaves no folder.
    for name in ("piqa", "hellaswag"):
        (local / name).mkdir(exist_ok=True)
        (local / name / "validation.jsonl").write_text("not a row\n")
    assert train.check(config) == []
    assert train.main([*asked, f"evaluation.data_dir={local}", "run.name=refused"], "train") == 2
    said = capsys.readouterr().err
    for name in ("hellaswag", "piqa"):
        assert f"\n  - evaluation.tasks: {name} cannot be scored: the rows in {local / name}" in said
    assert not (tmp_path / "refused").exists()


def test_scores_stand_under_evaluation_in_the_record(tmp_path):
    logged = []

    class Record:
        def log(self, row, step):
            logged.append((step, row))

    wandb = WandbRun(from_overrides(["logging=disabled"]), tmp_path)
    wandb._run = Record()
    wandb.write({"step": 3, "evaluation": {"piqa": 0.5, "winogrande": None, "mean": None}})
    wandb.write({"step": 4, "evaluation": None})
    assert logged == [(3, {"step": 3, "evaluation/step": 3, "evaluation/piqa": 0.5}), (4, {"step": 4})]


@pytest.mark.slow
def test_two_ranks_share_the_rows(asked, rows, tmp_path):
    """Trains a sharded model by the command line; a single rank then gives the checkpoint the same scores."""
    done = torchrun(2, "-m", "sparsellm.train", *asked, "runtime.shard=full", folder=tmp_path)
    assert "accuracy  " in done.stdout
    found = evaluate_checkpoint(EvaluateConfig(str(tmp_path / "tiny"), tasks=NAMES, data_dir=str(rows), limit=5))
    expected = {name: found["tasks"][name]["score"] for name in NAMES} | {"mean": found["mean"]}
    assert read(tmp_path / "tiny" / METRICS)[-1]["evaluation"] == expected


@pytest.mark.slow
def test_what_fails_on_one_rank_fails_on_both_and_the_next_task_is_scored(asked, tmp_path):
    """Wherever it fails: no rank waits for the other, or mistakes one exchange's answer for another's."""
    done = torchrun(2, Path(__file__).with_name("failing_rank.py"), tmp_path, *asked)
    first, second = (json.loads((tmp_path / f"rank_{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    whole = first.pop("nowhere")
    assert None not in whole.values()
    assert first.pop("model") == dict.fromkeys(whole)
    assert first.keys() == {"requests", "tokens", "answers", "metrics"}
    for found in first.values():
        assert found == {**whole, NAMES[0]: None, "mean": None}
    said = [line for line in done.stderr.splitlines() if line.startswith("sparsellm: ")]
    assert [line.partition("evaluating ")[2] for line in said] == [
        f"{what} failed; training continues: {error}"
        for what, error in [
            ("the model", "MemoryError: no room for model"),
            (NAMES[0], "ScoringFailed: rank 1: MemoryError: no room for requests"),
            (NAMES[0], "ScoringFailed: rank 1: MemoryError: no room for tokens"),
            (NAMES[0], "ScoringFailed: rank 1: MemoryError: no room for answers"),
            (NAMES[0], "ScoringFailed: rank 1: MemoryError: no room for metrics"),
        ]
    ]


def fails_on_rank_1(_name):
    """Rank 1 has no memory for the weights of the first evaluation, and fails at the fifth weight of the second one."""
    if os.environ.get("RANK") != "1":
        return
    for owner, attribute, call in ((live.LiveEvaluation, "_take_memory", 1), (live, "whole", 5)):
        original, calls = getattr(owner, attribute), itertools.count(1)

        def failing(*arguments, original=original, calls=calls, call=call, attribute=attribute):
            if next(calls) == call:
                raise torch.OutOfMemoryError(f"no room in {attribute}")
            return original(*arguments)

        setattr(owner, attribute, failing)


def train_on_two_ranks(overrides, folder, prepare):
    """The exit code and the output."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command, said = [*launcher, "-m", "sparsellm.train", *overrides, "runtime.shard=full"], folder / "said"
    process = SERVER.Process(target=started, args=(command, folder, said, prepare))
    process.start()
    process.join(PATIENCE)
    if process.exitcode is None:
        kill(family(process.pid))
    text = said.read_text()
    said.unlink()
    return process.exitcode, text


@pytest.mark.slow
def test_a_rank_that_fails_while_a_model_in_shards_is_gathered_spoils_nothing(asked, tmp_path):
    """Before the first weight, training continues; between two, all ranks end, and the resume scores what was due."""
    asked = [*asked, "logging.every=1", "runtime.precision=float32"]  # bfloat16 rounds other shares differently
    plain = run([*asked, "run.name=plain", "evaluation.every=0"])[2]
    code, said = train_on_two_ranks([*asked, "run.name=r"], tmp_path, fails_on_rank_1)
    assert code not in (0, None), said
    assert "step 3: evaluating the model failed; training continues: OutOfMemoryError: no room in _take_memory" in said
    assert "rank 1: step 4: gathering the weights to evaluate them failed (OutOfMemoryError: no room in whole)" in said
    assert "evaluation/live.py" not in said  # no traceback of ours
    assert max((tmp_path / "r/checkpoints").iterdir()).name == "step_00000004"
    code, said = train_on_two_ranks([*asked, "run.name=r"], tmp_path, print)
    assert code == 0, said
    rows = read(tmp_path / "r" / METRICS)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row["ce"] for row in rows] == pytest.approx([row["ce"] for row in read(plain / METRICS)], rel=1e-4)
    assert rows[2]["evaluation"] == dict.fromkeys([*NAMES, "mean"])
    assert None not in rows[3]["evaluation"].values()


def test_what_an_evaluation_says_stays_off_the_line_of_the_bar(monkeypatch):
    written = []
    monkeypatch.setattr(tqdm, "write", lambda text, file: written.append(text))
    with process_group("cpu") as ranks:
        whole_config.live_evaluation(from_overrides([]), ranks, [])._attempt(3, "piqa", lambda: 1 / 0)
    assert written == [
        "sparsellm: step 3: evaluating piqa failed; training continues: ZeroDivisionError: division by zero"
    ]
