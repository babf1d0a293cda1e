"""The scaling benchmark: with a stand-in for its commands, and once with two ranks on the CPU."""

import argparse
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.autograd import DeviceType

from scripts.benchmarks import bench_run, bench_scaling, harness
from scripts.benchmarks.bench_scaling import Evaluation, Run, Training
from scripts.benchmarks.bench_train import communication_share
from sparsellm.config import Shard, from_overrides
from sparsellm.config.rules import mistakes

SMALL = ["--parts", "train", "shard", "--experiments", "1p5b", "2b", "--gpus", "1", "2", "--minutes", "60"]
ALL = {"warmup": 3, "steps": 3, "minutes": 9, "gpus": [1, 2, 4, 8], "overrides": [], "locality": 0, "firing": 36}
TINY = [
    "data=files", "data.tokenizer_vocab_size=300", "model.vocab_size=300", "model.hidden_size=32",
    "model.intermediate_size=64", "model.num_layers=2", "model.num_heads=2", "model.context_length=32",
    "training.batch_size=4", "training.sequence_length=32", "training.steps=240", "runtime.device=cpu",
    "runtime.precision=float32", "runtime.compile=false", "runtime.data_workers=0", "logging.validation_every=0",
]  # fmt: skip


def options(**changed) -> argparse.Namespace:
    return argparse.Namespace(
        **ALL | {"experiments": ["1p5b"], "activations": None, "data_dir": "EVAL", "checkpoint": None} | changed
    )


@pytest.fixture
def started(monkeypatch):
    """The commands that were started; each writes tokens/s in proportion to its GPUs, but the ones of 2b fail."""
    commands = []

    def run(command, log, _seconds):
        commands.append(command)
        log.touch()
        if "experiment=2b" in command or "--json" not in command:
            return 3 if "--json" in command else 0
        gpus = int(next(word for word in command if word.startswith("--nproc")).partition("=")[2])
        runs = [
            {
                "variant": f"runtime.kernels={kernels}", "micro_batch": "auto", "micro_batches": [8, 16],
                "tokens_per_s": speed * gpus, "ratio": speed / 10,
            }
            for kernels, speed in (("torch", 10), ("auto", 15))
        ]  # fmt: skip
        Path(command[-1]).write_text(json.dumps({"runs": runs, "machine": "a machine"}))
        return 0

    monkeypatch.setattr(harness, "run", run)
    return commands


def test_results_are_kept_failures_come_last_and_speedups_are_over_one_gpu(started, tmp_path, capsys):
    assert bench_scaling.main([str(tmp_path), *SMALL]) == 1
    said = capsys.readouterr().out
    cells = [line.split() for line in said.splitlines()]
    assert ["1p5b-2-none-36", "auto", "auto:", "16", "30", "1.50", "-", "2.00", "-", "-"] in cells
    assert "2b-1-none-dense failed with exit code 3" in said
    preparing, measuring = started[:2], started[2:]
    assert [command[1] for command in preparing] == ["-c", "-m"]  # the kernels, the data
    assert len(measuring) == 2 * 4 + 4  # each size dense and sparse on 1 and 2; 2b in two kinds of shards
    started.clear()
    failed_before = tmp_path / "1p5b-2-none-dense.json"
    failed_before.unlink()
    (tmp_path / "1p5b-1-none-36.json").unlink()
    (tmp_path / "1p5b-1-none-36.log").unlink()
    assert bench_scaling.main([str(tmp_path), "--parts", "train", "--gpus", "1", "2", "--experiments", "1p5b"]) == 0
    first, second = started[2:]
    assert (first[-1], second[-1]) == (str(tmp_path / "1p5b-1-none-36.json"), str(failed_before))


def test_nothing_starts_that_would_not_end_in_time(started, tmp_path, capsys):
    assert bench_scaling.main([str(tmp_path), *SMALL, "--minutes", "1"]) == 0
    assert not started
    said = capsys.readouterr().out
    assert "12 measurements are missing (run the same command again): 1p5b-2-none-36 (" in said
    assert "none was started: the shortest needs --minutes " in said


def test_a_measurement_that_was_ended_is_named_and_the_others_are_shown(started, tmp_path, monkeypatch, capsys):
    run = harness.run
    monkeypatch.setattr(harness, "run", lambda c, log, left: None if "2-none-36" in log.name else run(c, log, left))
    asked = ["--parts", "train", "--experiments", "1p5b", "--gpus", "2"]
    assert bench_scaling.main([str(tmp_path), *asked]) == 1
    said = capsys.readouterr().out
    assert "1p5b-2-none-36 was ended when the time was over: see" in said
    assert "1p5b-2-none-dense     auto  auto: 16" in said
    assert "1 measurements are missing (run the same command again): 1p5b-2-none-36" in said


def test_each_part_has_its_measurements(tmp_path, capsys):
    """Also those of a run and of an evaluation on as many GPUs."""
    parts = ["--parts", "run", "evaluate", "--data-dir", "EVAL", "--gpus", "1", "2"]
    assert bench_scaling.main([str(tmp_path), *parts, "--minutes", "0"]) == 0
    said = capsys.readouterr().out
    assert [word for word in said.split() if "-" in word] == ["run-2", "evaluate-2", "evaluate-1"]


def test_evaluation_is_refused_without_rows(tmp_path, capsys):
    with pytest.raises(SystemExit):
        bench_scaling.main([str(tmp_path), "--parts", "evaluate"])
    assert "the part `evaluate` needs --data-dir" in capsys.readouterr().err


@pytest.mark.parametrize("experiment", bench_scaling.EXPERIMENTS)
def test_every_training_is_a_configuration_that_the_trainer_accepts(experiment, tmp_path):
    args = options(experiments=[experiment], parts=["train", "shard"])
    found = list(bench_scaling.measurements(args))
    only_sharded = experiment in ("7b", "2b_wide")
    assert {each.gpus for each in found} == ({8} if only_sharded else {8, 4, 2, 1})
    assert {each.shard for each in found if each.gpus == 8} == {
        *bench_scaling.SHARDED.get(experiment, ()), *([] if only_sharded else [Shard.none])
    }  # fmt: skip
    for each in found:
        command = each.command(tmp_path / "x.json", args, 540)
        overrides = command[command.index("scripts.benchmarks.bench_train") + 1 : command.index("--variant")]
        for size in each.micro_batches:
            config = from_overrides([*overrides, "runtime.kernels=auto", f"runtime.micro_batch_size={size}"])
            assert mistakes(config, each.gpus) == []


@pytest.mark.parametrize("gpus", [[1], [1, 2, 4], [1, 2, 4, 8]])
def test_each_training_and_the_run_fit_in_a_command(gpus):
    args = options(experiments=bench_scaling.EXPERIMENTS[:5], parts=["train", "shard", "run"], gpus=gpus)
    found = {each.name: each.seconds(args) for each in bench_scaling.measurements(args)}
    assert f"run-{gpus[-1]}" in found
    assert {name: seconds for name, seconds in found.items() if seconds > 60 * args.minutes - 30} == {}


def test_estimates_are_those_of_h100s_and_a_run_fills_its_minutes(tmp_path):
    """1.5B at 50% MFU: RESULTS measured 51,031 tokens/s in PyTorch on one H100."""
    speed, tokens = bench_scaling.tokens_per_s(["experiment=1p5b"], 1)
    assert speed == pytest.approx(51_031, rel=0.05)
    assert tokens == 512 * 2_048
    args = options()
    command = Run(8).command(tmp_path / "run-8.json", args, 500)
    assert command[command.index("scripts.benchmarks.bench_run") + 1] == str(tmp_path / "run-8")
    steps = int(next(word for word in command if word.startswith("training.steps=")).partition("=")[2])
    assert steps * tokens / (8 * speed) == pytest.approx(9 * 60 - bench_scaling.RUN, rel=0.02)
    later = Run(8).command(tmp_path / "run-8.json", args, 480)  # the same run, so that it continues
    assert set(later) - set(command) == {"8.00"}
    evaluation = Evaluation(4).command(tmp_path / "evaluate-4.json", args, 500)
    assert evaluation[evaluation.index("--checkpoint") + 1] == str(tmp_path / "run-8/run")


def test_scoring_is_compared_with_one_gpus(capsys):
    def result(scoring):
        return {"seconds": {"sparsellm": [99.0, scoring + 20]}, "scoring": [80.0, scoring], "machine": "a machine"}

    bench_scaling.show({Evaluation(8): result(10.0), Evaluation(1): result(66.0)})
    cells = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["evaluate-8", "30.0", "10.0", "6.60"] in cells
    assert ["evaluate-1", "86.0", "66.0", "1.00"] in cells


@pytest.mark.exhaustive
@pytest.mark.slow
def test_two_ranks_train_and_survive_a_kill_on_a_cpu(tmp_path, monkeypatch, capsys):
    """One command makes both parts. The run's time is over at its first start, and its second one goes on with it."""
    monkeypatch.setattr(bench_scaling, "BOTH_FIT", {"1p5b": 2})
    dense = Training("1p5b", 2, Shard.none, None, ("auto",))
    monkeypatch.setattr(bench_scaling, "training", lambda *_: [dense])
    monkeypatch.setattr(Run, "seconds", lambda *_: 60)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "text.txt").write_text("\n\n".join(f"The number {n} comes after {n - 1}." * 9 for n in range(500)))
    tiny = [*TINY, f"data.files=[{tmp_path}/text.txt]", f"data.path={tmp_path}/data"]
    assert bench_run.main([str(tmp_path / "run-2"), *tiny, "--ranks", "2", "--minutes", "0.02"]) == 1
    assert "the time is over" in capsys.readouterr().out
    asked = ["--parts", "train", "run", "--gpus", "2", "--warmup", "1", "--steps", "1"]
    code = bench_scaling.main([str(tmp_path), *tiny, *asked, "--json", str(tmp_path / "all.json")])
    logs = "".join(path.read_text()[-2000:] for path in tmp_path.rglob("*.log"))
    said = capsys.readouterr().out
    assert code == 0, said + logs
    found = json.loads((tmp_path / "all.json").read_text())
    assert {"command", "machine", "date", "commit", "versions"} < found.keys()
    trained, ran = found[dense.name], found["run-2"]
    assert [run["variant"] for run in trained["runs"]] == ["runtime.kernels=torch", "runtime.kernels=auto"]
    assert all(run["tokens_per_s"] > 0 for run in trained["runs"])
    assert (ran["exit_code"], ran["steps"], ran["killed"]["rank"], ran["killed"]["checkpoint"]) == (0, 240, 1, 60)
    assert [row["step"] for row in ran["rows"]] == list(range(1, 241))
    assert "run: resuming after step" in (tmp_path / "run-2/train.log").read_text()
    assert (tmp_path / "run-2/run/plots/loss.png").exists()
    assert "exit code 0, 240 steps, 240 rows" in (tmp_path / "run-2.log").read_text()


def test_communication_counts_only_where_nothing_else_runs():
    def event(name, start, end, device=DeviceType.CUDA):
        times = SimpleNamespace(start=start, end=end)
        annotation = name.startswith("nccl:")
        return SimpleNamespace(name=name, device_type=device, time_range=times, is_user_annotation=annotation)

    kernels = [
        event("gemm", 0, 4), event("ncclDevKernel_AllReduce", 2, 7), event("gemm", 6, 8), event("ncclAllGather", 9, 10),
        event("nccl:all_reduce", 0, 10),
        event("cudaLaunchKernel", 4, 6, DeviceType.CPU),
    ]  # fmt: skip
    assert communication_share(SimpleNamespace(events=lambda: kernels)) == 0.3  # 4 to 6 and 9 to 10, of 10
    assert communication_share(SimpleNamespace(events=lambda: kernels[-1:])) is None
