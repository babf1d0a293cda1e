"""The scaling benchmark with a stand-in for its commands: what was measured is kept, and each command is accepted."""

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.autograd import DeviceType

from scripts.benchmarks import bench_scaling
from scripts.benchmarks.bench_train import communication_share
from sparsellm.config import Shard, from_overrides
from sparsellm.config.rules import mistakes

SMALL = ["--experiments", "1p5b", "2b", "--gpus", "2"]


@pytest.fixture
def started(monkeypatch):
    """The commands that were started; each writes tokens/s in proportion to its GPUs, but the ones of 2b fail."""
    commands = []

    def run(command, **_):
        commands.append(command)
        if "experiment=2b" in command:
            return SimpleNamespace(wait=lambda _: 3)
        gpus = int(next(word for word in command if word.startswith("--nproc")).partition("=")[2])
        runs = [
            {
                "variant": f"runtime.kernels={kernels}",
                "micro_batch": 8,
                "tokens_per_s": speed * gpus,
                "ratio": speed / 10,
            }
            for kernels, speed in (("torch", 10), ("auto", 15))
        ]
        Path(command[-1]).write_text(json.dumps({"runs": runs}))
        return SimpleNamespace(wait=lambda _: 0)

    monkeypatch.setattr(subprocess, "Popen", run)
    return commands


def test_results_are_kept_and_speedups_are_over_one_gpu(started, tmp_path, capsys):
    assert bench_scaling.main([str(tmp_path), *SMALL]) == 1
    said = capsys.readouterr().out
    cells = [line.split() for line in said.splitlines()]
    assert ["1p5b-2-none-36", "auto", "8", "30", "1.50", "-", "2.00", "-", "-"] in cells
    assert "2b-1-none-dense failed with exit code 3" in said
    assert len(started) == 4 + 8
    assert bench_scaling.main([str(tmp_path), "--experiments", "1p5b", "--gpus", "2"]) == 0
    assert len(started) == 12


def test_nothing_starts_after_the_time_is_over(started, tmp_path, capsys):
    assert bench_scaling.main([str(tmp_path), *SMALL, "--minutes", "0"]) == 0
    assert not started
    assert "12 measurements are missing (run the same command again): 1p5b-2-none-dense" in capsys.readouterr().out


@pytest.mark.parametrize("experiment", bench_scaling.BOTH_FIT)
def test_every_measurement_is_a_configuration_that_the_trainer_accepts(experiment, tmp_path):
    found = list(bench_scaling.measurements([experiment], 8, 36))
    only_sharded = experiment in ("7b", "2b_wide")
    assert {each.gpus for each in found} == ({8} if only_sharded else {8, 4, 2, 1})
    assert {each.shard for each in found if each.gpus == 8} == {
        *bench_scaling.SHARDED.get(experiment, ()), *([] if only_sharded else [Shard.none])
    }  # fmt: skip
    for each in found:
        command = each.command(tmp_path / "x.json", [], [])
        overrides = command[command.index("scripts.benchmarks.bench_train") + 1 : command.index("--variant")]
        for size in (bench_scaling.BOTH_FIT[experiment], "auto"):
            config = from_overrides([*overrides, "runtime.kernels=auto", f"runtime.micro_batch_size={size}"])
            assert mistakes(config, each.gpus) == []


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
