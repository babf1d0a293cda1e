import json
import subprocess
from datetime import datetime
from pathlib import Path

import pynvml
import pytest

from scripts.benchmarks import harness
from sparsellm.system import provenance

KEYS = ["command", "machine", "date", "commit", "versions"]


@pytest.mark.parametrize(
    ("argv", "ranks", "command"),
    [
        (["/venv/bin/python", "-m", "scripts.benchmarks.bench_ffn", "--m", "65"], 1,
         "python -m scripts.benchmarks.bench_ffn --m 65"),
        (["/venv/bin/python", "-u", "-m", "scripts.benchmarks.bench_train", "data.files=[a b]"], 2,
         "torchrun --standalone --nproc_per_node 2 -m scripts.benchmarks.bench_train 'data.files=[a b]'"),
        (["/venv/bin/python", "/venv/bin/sparsellm", "benchmark", "checkpoint=runs/a"], 1,
         "sparsellm benchmark checkpoint=runs/a"),
        (["/venv/bin/python"], 1, "/venv/bin/python"),
    ],
)  # fmt: skip
def test_the_command_is_what_a_person_would_type(argv, ranks, command):
    assert provenance._command(argv, ranks) == command


def test_the_machine_names_its_gpus_and_cores(monkeypatch):
    monkeypatch.setattr(provenance.os, "sched_getaffinity", lambda _: range(16))
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 2)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", lambda _: "NVIDIA H100")
    monkeypatch.setattr(pynvml, "nvmlSystemGetDriverVersion", lambda: "580.1")
    assert provenance._machine() == "2 x NVIDIA H100, 16 CPU cores, driver 580.1"

    def fails():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", fails)
    assert provenance._machine() == "16 CPU cores"


def test_the_commit_says_if_files_differ_from_it(tmp_path, monkeypatch):
    assert provenance._commit(tmp_path) is None

    def git(*arguments):
        author = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(["git", "-C", str(tmp_path), *author, *arguments], check=True, capture_output=True).stdout

    git("init")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-m", "a")
    head = git("rev-parse", "HEAD").decode().strip()
    assert provenance._commit(tmp_path) == head
    (tmp_path / "new").write_text("of a benchmark")
    assert provenance._commit(tmp_path) == head
    (tmp_path / "a").write_text("2")
    assert provenance._commit(tmp_path) == f"{head}+"
    monkeypatch.setenv("PATH", "")
    assert provenance._commit(tmp_path) is None


@pytest.mark.parametrize(("found", "results"), [([1, 2], {"results": [1, 2]}), ({"rows": 3}, {"rows": 3})])
def test_a_benchmark_writes_how_its_results_were_made(found, results, tmp_path):
    harness.write(tmp_path / "out.json", found)
    written = json.loads((tmp_path / "out.json").read_text())
    assert list(written) == [*KEYS, *results]
    assert {key: written[key] for key in results} == results
    assert datetime.fromisoformat(written["date"]).tzinfo is not None
    assert {"python", "torch", "sparsellm"} <= written["versions"].keys()
    assert written["versions"]["torch"]
    harness.write(None, found)
    assert [path.name for path in Path(tmp_path).iterdir()] == ["out.json"]
