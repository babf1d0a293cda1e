"""`python -m sparsellm.sweep` as its users start, stop, kill and restart it; one test really trains."""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import sweep_with_stand_ins
from evaluation.small_rows import write_rows
from processes import PATIENCE, Forked, family, on_one_thread

from sparsellm.commands.sweep import main
from sparsellm.runs import report as run_report
from sparsellm.sweep import commands
from sparsellm.sweep.launch import Launcher
from sparsellm.sweep.plan import plan
from sparsellm.sweep.progress import last_step

STAND_INS = Path(sweep_with_stand_ins.__file__)
STEPS = 6
SMALL = ["experiment=smoke", f"training.steps={STEPS}", "optimizer.warmup_steps=2", "sweep.name=s"]
COEFFICIENTS = "sparsity.l1_coefficient=0,1e-3,3e-3"
NAMES = [point.name for point in plan([*SMALL[:3], COEFFICIENTS]).points]

pytestmark = pytest.mark.slow


@pytest.fixture
def sweep(tmp_path, monkeypatch, capfd):
    """sweep(*arguments): a sweep of stand-ins in this process, to its end: (exit code, output, errors)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(commands, "train", sweep_with_stand_ins.train)
    monkeypatch.setattr(commands, "evaluate", sweep_with_stand_ins.evaluate)

    def start(*arguments):
        capfd.readouterr()
        return main(list(arguments), "sweep"), *capfd.readouterr()

    return start


@pytest.fixture
def process(tmp_path):
    """process(script or "-m", *arguments, forked=True): a sweep in a process of its own, going on; its output in
    tmp_path/output. It and what it starts are forked, unless forked=False."""
    running, output = [], tmp_path / "output"

    def start(*arguments, forked=True):
        command = list(map(str, arguments))
        if forked:
            running.append(Forked(command, tmp_path, output, on_one_thread))
            return running[-1]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        with output.open("w") as said:
            command = [sys.executable, *command]
            running.append(subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=said, stderr=said))
        return running[-1]

    yield start
    for each in running:
        each.kill()  # its child processes end with it
        each.wait()


def test_a_finished_run_is_benchmarked_once(sweep, monkeypatch):
    write = (
        "import pathlib, sys; f = pathlib.Path(sys.argv[1]); f.mkdir(); (f / 'benchmark.json').write_text(sys.argv[2])"
    )
    costs = json.dumps({"checkpoints": [{"sides": {"PyTorch": {"forward": {"tokens_per_s": 7.0}}}}]})
    started = []

    def stand_in(point):
        started.append(point.name)
        return [sys.executable, "-c", write, str(point.checkpoint / "benchmark"), costs]

    monkeypatch.setattr(commands, "benchmark", stand_in)
    for _ in range(2):
        code, output, _ = sweep(*SMALL, COEFFICIENTS, "sweep.evaluate=false", "sweep.benchmark=true")
        assert code == 0
        assert "forward tokens/s" in output
    assert started == NAMES


def results(folder):
    return {name: (folder / "sweeps/s" / name).read_bytes() for name in ("sweep.csv", "sweep.md", "sweep.png")}


def rows(folder):
    with (folder / "sweeps/s/sweep.csv").open() as file:
        return list(csv.DictReader(file))


def starts(folder):
    return (folder / "starts").read_text().split()


def wait_until(condition, going, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert going.poll() is None, "the sweep ended too early"
        assert time.monotonic() < deadline
        time.sleep(0.02)


def wait_for_rows(run, going):
    metrics = run / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") >= 2, going)


def test_all_runs_are_trained_evaluated_and_compared_once(sweep, tmp_path):
    code, output, _ = sweep(*SMALL, COEFFICIENTS, "sweep.baseline=true", "evaluate.limit=7")
    assert code == 0
    assert starts(tmp_path)[:3] == NAMES
    assert len(starts(tmp_path)) == 4
    table = rows(tmp_path)
    assert [row["run"] for row in table] == starts(tmp_path)
    assert [row["activation"] for row in table] == ["relu"] * 3 + ["silu"]
    assert {row["status"] for row in table} == {"complete"}
    assert {row["step"] for row in table} == {str(STEPS)}
    assert {row["mean"] for row in table} == {"0.375"}
    assert f"[2/4] {NAMES[1]}  sparsity.l1_coefficient=0.001\ntraining {NAMES[1]}\nevaluating" in output
    assert "['limit=7']" in output
    # The screen has every cell of the table in the file, in as many columns as fit.
    header, _, *lines = (each for each in (tmp_path / "sweeps/s/sweep.md").read_text().splitlines() if each[:1] == "|")
    assert len(lines) == 4
    assert all(cell.strip() in output for line in (header, *lines) for cell in line.split("|"))
    assert f"training {NAMES[1]}\n" in (tmp_path / "sweeps/s/logs" / f"{NAMES[1]}.log").read_text()

    # Again: nothing is trained, and the files are the same.
    before = results(tmp_path)
    code, output, _ = sweep(*SMALL, COEFFICIENTS, "sweep.baseline=true", "evaluate.limit=7", "sweep.evaluate=false")
    assert code == 0
    assert "4 runs, 4 of them trained" in output
    assert "evaluating" not in output
    assert len(starts(tmp_path)) == 4
    assert results(tmp_path) == before


def test_a_finished_run_whose_training_was_killed_while_it_drew_is_drawn(sweep, monkeypatch):
    """The stand-in for training draws nothing, like a training that is killed after its last checkpoint."""
    drawn = []

    def draw(config, folder):
        drawn.append(folder.name)
        (folder / "plots").mkdir()
        (folder / "plots/loss.png").touch()

    monkeypatch.setattr(run_report, "finish", draw)
    for expected in ([], NAMES, NAMES):
        assert sweep(*SMALL, COEFFICIENTS, "sweep.evaluate=false")[0] == 0
        assert drawn == expected


def test_a_run_that_fails_is_reported_and_the_others_go_on(sweep, tmp_path):
    (tmp_path / "pace").write_text(json.dumps({"fail": [NAMES[1]]}))
    code, output, errors = sweep(*SMALL, COEFFICIENTS)
    assert code == 1
    log = f"sweeps/s/logs/{NAMES[1]}.log"
    assert errors.splitlines()[-1] == f"sparsellm: [2/3] {NAMES[1]}: its training ended with exit code 7; see {log}"
    assert "a stand-in that fails" in (tmp_path / log).read_text()
    assert "a stand-in that fails" in output
    assert [row["status"] for row in rows(tmp_path)] == ["complete", "not begun", "complete"]
    (tmp_path / "pace").unlink()
    assert sweep(*SMALL, COEFFICIENTS)[0] == 0
    assert starts(tmp_path) == [*NAMES, NAMES[1]]


@pytest.mark.parametrize(
    "damaged",
    [pytest.param((b"x{]\n", b"\0\0\n"), marks=pytest.mark.exhaustive), (b"\n", b"\xff\n", b'{"ce": 1}\n')],
)
def test_a_run_whose_rows_are_damaged_ends_nothing_but_its_own_numbers(sweep, tmp_path, damaged):
    assert sweep(*SMALL, COEFFICIENTS)[0] == 0
    whole, paths = rows(tmp_path), [tmp_path / "runs" / name / "metrics.jsonl" for name in NAMES]
    lines = [path.read_bytes().splitlines(keepends=True) for path in paths]
    for path, (first, second, *others), row in zip(paths, lines, damaged, strict=False):
        path.write_bytes(b"".join([first, second, row, *others]))
    code, _, errors = sweep(*SMALL, COEFFICIENTS)
    assert code == 0
    assert [f"{name}/metrics.jsonl is damaged: line 3: " in errors for name in NAMES] == [
        i < len(damaged) for i in range(3)
    ]
    assert rows(tmp_path) == whole  # the last rows are whole
    for path, (*others, _), row in zip(paths, lines, damaged, strict=False):
        path.write_bytes(b"".join([*others, row]))
    code, _, errors = sweep(*SMALL, COEFFICIENTS)
    assert code == 0
    for name, row, there in zip(NAMES, rows(tmp_path), [i >= len(damaged) for i in range(3)], strict=True):
        said = f"{name}/metrics.jsonl has no row for the last step: its numbers are left out"
        assert (row["ce"] != "", said in errors) == (there, not there)


def test_a_run_whose_last_checkpoint_is_damaged_is_not_taken_for_finished(sweep, tmp_path):
    assert sweep(*SMALL, COEFFICIENTS)[0] == 0
    (committed,) = (tmp_path / "runs" / NAMES[1]).glob("checkpoints/*/COMMITTED")
    for content in ("[]", "{}", "garbage", ""):
        committed.write_text(content)
        code, output, _ = sweep(*SMALL, COEFFICIENTS, "sweep.evaluate=false")
        assert "2 of them trained" in output
        assert code == 1  # the stand-in, which cannot resume, fails; the others are unchanged
        assert [row["ce"] != "" for row in rows(tmp_path)] == [True, False, True]


def test_a_task_of_an_array_does_one_point_and_the_last_one_leaves_the_whole_table(sweep, tmp_path):
    for point in (2, 0, 1):
        assert sweep(*SMALL, COEFFICIENTS, f"sweep.point={point}")[0] == 0
    assert starts(tmp_path) == [NAMES[2], NAMES[0], NAMES[1]]
    assert {row["status"] for row in rows(tmp_path)} == {"complete"}


def test_printing_and_scripts_train_nothing(sweep, tmp_path):
    code, output, _ = sweep(*SMALL, COEFFICIENTS, "sweep.mode=print")
    assert code == 0
    assert output.splitlines()[-1].startswith("# afterwards, for the table and the figure: ")
    assert list(tmp_path.iterdir()) == []
    code, output, _ = sweep(*SMALL, COEFFICIENTS, "sweep.mode=slurm", "sweep.nproc_per_node=1")
    assert (code, output.split()[0]) == (0, "sweeps/s/slurm.sh")
    assert [p.name for p in (tmp_path / "sweeps/s").iterdir()] == ["slurm.sh"]
    assert not (tmp_path / "runs").exists()


def test_a_refused_sweep_leaves_nothing_behind(sweep, tmp_path):
    code, _, errors = sweep(*SMALL, COEFFICIENTS, "run.name=x", "training.batch_size=0")
    assert code == 2
    assert "2 mistakes in the configuration" in errors
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "sweeps").write_text("")
    code, _, errors = sweep(*SMALL, COEFFICIENTS)
    assert code == 2
    assert "sweeps" in errors


def test_killed_and_started_again_it_gives_the_table_of_one_that_was_not(sweep, process, tmp_path):
    assert sweep(*SMALL, COEFFICIENTS)[0] == 0
    straight = results(tmp_path)
    for folder in ("runs", "sweeps"):
        shutil.rmtree(tmp_path / folder)
    (tmp_path / "starts").unlink()
    (tmp_path / "pace").write_text(json.dumps({"seconds": 0.2}))
    at_once = [*SMALL, COEFFICIENTS, "sweep.parallel=2"]
    killed = process(STAND_INS, *at_once)
    for name in NAMES[:2]:
        wait_for_rows(tmp_path / "runs" / name, killed)
    below = family(killed.pid)[1:]
    assert len(below) == 2
    killed.kill()
    assert killed.wait() == -signal.SIGKILL
    code, output, errors = sweep(*at_once)  # which waits until nothing of the killed one is left
    assert code == 0
    assert not any(child.is_running() for child in below)
    assert sorted(starts(tmp_path)) == sorted([*NAMES[:2], *NAMES])
    assert results(tmp_path) == straight
    assert "training" not in output.replace("training tokens", "")  # what runs say is in their logs
    assert f"[2/3] {NAMES[1]}  sparsity.l1_coefficient=0.001\n" in output
    assert "of the training tokens" in errors
    assert f"training {NAMES[2]}\n" in (tmp_path / "sweeps/s/logs" / f"{NAMES[2]}.log").read_text()
    metrics = tmp_path / "runs" / NAMES[0] / "metrics.jsonl"
    assert last_step(metrics) == STEPS
    metrics.write_text(metrics.read_text() + "damaged\n" + '{"step": 9')
    assert (last_step(metrics), last_step(tmp_path / "none")) == (STEPS, 0)


def test_a_signal_reaches_the_training_and_ends_the_sweep(process, tmp_path):
    (tmp_path / "pace").write_text(json.dumps({"seconds": 0.2}))
    stopped = process(STAND_INS, *SMALL, COEFFICIENTS, forked=False)
    wait_for_rows(tmp_path / "runs" / NAMES[0], stopped)
    stopped.terminate()
    assert stopped.wait(30) == 128 + signal.SIGTERM
    assert starts(tmp_path) == NAMES[:1]
    assert 2 <= int(rows(tmp_path)[0]["step"]) < STEPS
    assert [row["status"] for row in rows(tmp_path)] == ["unfinished", "not begun", "not begun"]
    assert "run the same command to continue" in (tmp_path / "output").read_text()


@pytest.mark.exhaustive
def test_a_real_sweep_of_runs_at_once_that_is_killed_gives_the_table_of_one_at_a_time(process, tmp_path, monkeypatch):
    small = [
        "model.hidden_size=64", "model.intermediate_size=128", "model.num_layers=2", "training.sequence_length=64",
        "training.steps=20", "optimizer.warmup_steps=2", "logging=disabled", "run.checkpoint_every=5",
        "runtime.device=cpu", "data.tokenizer_vocab_size=1000", "model.vocab_size=1000", f"data.path={tmp_path}/corpus",
        "sparsity.l1_coefficient=0,1e-2", "sweep.name=s", "sweep.evaluate=false",
    ]  # fmt: skip
    real = ["-m", "sparsellm.sweep", *small]
    assert process(*real).wait() == 0, (tmp_path / "output").read_text()
    straight = results(tmp_path)
    for folder in ("runs", "sweeps"):
        shutil.rmtree(tmp_path / folder)

    at_once = [*real, "sweep.parallel=2"]
    killed = process(*at_once)
    wait_until(lambda: list(tmp_path.glob("runs/*/checkpoints/step_00000005/COMMITTED")), killed)
    below = family(killed.pid)[1:]
    killed.kill()
    assert psutil.wait_procs(below, PATIENCE)[1] == []  # nothing is left running
    assert process(*at_once).wait() == 0, (tmp_path / "output").read_text()
    assert results(tmp_path) == straight
    assert [float(row["sparsity.l1_coefficient"]) for row in rows(tmp_path)] == [0, 1e-2]
    nonzeros = [float(row["nnz_mean"]) for row in rows(tmp_path)]
    assert nonzeros[1] < nonzeros[0]

    # With scores; and again, when no process is needed.
    write_rows(tmp_path / "rows", "piqa", "validation")
    scored = [*small[:-1], f"evaluate.data_dir={tmp_path}/rows", "evaluate.tasks=[piqa]", "evaluate.device=cpu"]
    assert process("-m", "sparsellm.sweep", *scored).wait() == 0, (tmp_path / "output").read_text()
    straight, parts = results(tmp_path), sorted(tmp_path.glob("runs/*/checkpoints/*/evaluation/tasks/piqa.json"))
    assert len(parts) == 2
    assert all(row["piqa"] for row in rows(tmp_path))
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(Launcher, "run", lambda _self, command, *_: pytest.fail(f"started {command}"))
        assert main(scored, "sweep") == 0
    assert results(tmp_path) == straight
    started, run = [], Launcher.run
    monkeypatch.setattr(Launcher, "run", lambda self, command, *of: started.append(command) or run(self, command, *of))
    parts[0].unlink()
    assert main(scored, "sweep") == 0
    assert [command[2] for command in started] == ["sparsellm.evaluate"]
    assert parts[0].is_relative_to(tmp_path / started[0][3].removeprefix("checkpoint="))
    assert results(tmp_path) == straight


def test_a_folder_that_cannot_be_made_is_named_with_the_key_that_moves_it(sweep, tmp_path):
    (tmp_path / "taken").write_text("a file")
    code, _, said = sweep(*SMALL, COEFFICIENTS, "sweep.root=taken")
    assert code == 2
    assert said.startswith("sparsellm: taken/s cannot be written: ")
    assert said.endswith("; choose another sweep.root\n")
