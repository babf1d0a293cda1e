"""Weights & Biases: where a run's record is, that there is one of them, and what it holds."""

import errno
import os
import re
import subprocess
import sys

import pytest
import wandb
from PIL import Image
from small_run import small_config, small_trainer

from sparsellm.training import wandb_record
from sparsellm.training.wandb_record import WandbRun, record_id, sync_command


class Record:
    """What wandb.init returns."""

    url, step = None, 0

    def __init__(self):
        self.logged = []

    def log(self, values, step):
        self.logged.append((step, values))

    def finish(self, exit_code):
        self.exit_code = exit_code


@pytest.fixture
def started(monkeypatch):
    """The settings of every wandb.init, which gives a Record."""
    settings = []
    monkeypatch.setattr(wandb, "init", lambda **values: settings.append(values) or Record())
    return settings


def test_runs_of_a_sweep_are_a_group(tmp_path, started):
    for group in ("null", "smoke-1a2b3c4d"):
        WandbRun(small_config("logging=offline", f"logging.wandb_group={group}"), tmp_path)
    assert [values["group"] for values in started] == [None, "smoke-1a2b3c4d"]


def test_an_unreachable_server_means_offline_and_says_so(tmp_path, monkeypatch):
    started = []

    def init(**settings):
        started.append(settings)
        if settings["mode"] == "online":
            raise wandb.errors.CommError("no route to host")
        return Record()

    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    config = small_config("logging.wandb=online", "run.name=x")
    for _ in range(2):  # a start and a resume
        run = WandbRun(config, tmp_path)
        run.write(
            {"step": 7, "loss": 1.5, "mfu": None, "nnz_per_layer": [2.0, 3.0], "plan_per_layer": ["dense", "tile"]}
        )
        run.close(0)
    assert run.place == "offline, for online failed: no route to host"
    assert [settings["mode"] for settings in started] == ["online", "offline"] * 2
    assert len({settings["id"] for settings in started}) == 1
    assert run._run.logged == [
        (7, {"step": 7, "loss": 1.5, "nnz_per_layer/00": 2.0, "nnz_per_layer/01": 3.0, "tile_layers": 1})
    ]


def test_a_record_is_in_the_runs_folder_wherever_the_process_works_that_writes_it(tmp_path):
    """wandb's own process is that of a parent, which may work in another folder."""
    code = (
        "import os, wandb; from pathlib import Path; from small_run import small_config;"
        "from sparsellm.training.wandb_record import WandbRun;"
        "wandb.setup(); assert 'WANDB_SERVICE' in os.environ; os.chdir('elsewhere');"
        "run = WandbRun(small_config('logging=offline', 'run.name=r'), Path('run'));"
        "run.write({'step': 1, 'loss': 1.5}); run.close(0)"
    )
    (tmp_path / "elsewhere/run").mkdir(parents=True)
    environment = {key: value for key, value in os.environ.items() if key != "WANDB_SERVICE"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True, timeout=120)
    (record,) = (tmp_path / "elsewhere/run/wandb").glob("offline-run-*/*.wandb")
    assert record.stat().st_size > wandb_record.HEADER_BYTES
    assert not (tmp_path / "run").exists()


def test_the_place_is_the_link_online_and_the_reason_otherwise(tmp_path, monkeypatch, started):
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setattr(Record, "url", "https://wandb.example/sparsellm/runs/1")
    assert WandbRun(small_config("logging.wandb=online"), tmp_path).place == "https://wandb.example/sparsellm/runs/1"
    monkeypatch.setattr(Record, "url", None)
    assert WandbRun(small_config("logging.wandb=offline"), tmp_path).place == "offline"
    assert WandbRun(small_config("logging.wandb=disabled"), tmp_path).place == "disabled"
    monkeypatch.setattr(wandb, "api", type("NoKey", (), {"api_key": None}))
    assert "set WANDB_API_KEY" in WandbRun(small_config("logging.wandb=online"), tmp_path).place


@pytest.mark.parametrize("left", [None, b"", b"\n"])
def test_an_id_that_a_kill_left_empty_is_written_anew_and_then_kept(tmp_path, left):
    if left is not None:
        (tmp_path / "wandb").mkdir()
        (tmp_path / "wandb/id").write_bytes(left)
    found = record_id(tmp_path)
    assert re.fullmatch("[0-9a-f]{16}", found)
    assert record_id(tmp_path) == found
    assert [path.name for path in (tmp_path / "wandb").iterdir()] == ["id"]


def test_pictures_are_added_to_the_record(tmp_path, started):
    Image.new("RGB", (4, 3)).save(tmp_path / "loss.png")
    run = WandbRun(small_config("logging=offline"), tmp_path)
    run.figures(40, [tmp_path / "loss.png"])
    ((step, values),) = run._run.logged
    assert step == 40
    assert isinstance(values["plots/loss"], wandb.Image)


def test_the_command_names_the_record_of_the_run_until_it_is_uploaded(tmp_path, monkeypatch):
    monkeypatch.setattr(wandb_record.shutil, "which", lambda _: "bin/wandb")
    run = tmp_path / "my run"
    assert sync_command(run) is None
    parts = [run / f"wandb/offline-run-2026112{day}_090000-ab" for day in (3, 4)]
    for part in parts:
        part.mkdir(parents=True)
        (part / "run-ab.wandb").touch()
    (run / "wandb/run-20261122_090000-ab").mkdir()
    (run / "wandb/run-20261122_090000-ab/run-ab.wandb").touch()  # online
    assert sync_command(run) == f"wandb sync '{run}/wandb'"
    (parts[0] / "run-ab.wandb.synced").touch()
    assert sync_command(run) == f"wandb sync '{run}/wandb'"
    (parts[1] / "run-ab.wandb.synced").touch()
    assert sync_command(run) is None
    monkeypatch.setattr(wandb_record.shutil, "which", lambda _: None)
    (parts[1] / "run-ab.wandb.synced").unlink()
    assert sync_command(run) == f"{sys.executable} -m wandb sync '{run}/wandb'"


def test_a_part_that_a_kill_left_without_a_row_is_removed_for_it_would_keep_the_others_from_being_uploaded(
    tmp_path, started
):
    parts = [tmp_path / f"wandb/offline-run-2026112{day}_090000-ab/run-ab.wandb" for day in (3, 4)]
    for part, content in zip(parts, (b":W&B\xf8\x4e\x00", b":W&B\xf8\x4e\x00 and a row"), strict=True):
        part.parent.mkdir(parents=True)
        part.write_bytes(content)
    WandbRun(small_config("logging=offline"), tmp_path)
    assert wandb_record.offline_parts(tmp_path) == parts[1:]
    assert not parts[0].parent.exists()


@pytest.mark.slow
def test_every_start_of_a_run_is_a_part_of_one_record_and_the_command_finds_them_all(tmp_path, monkeypatch):
    """As wandb itself says, which reads the folders without a network."""
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setattr(wandb_record.shutil, "which", lambda _: None)
    folder, options = tmp_path / "run", ["runtime.compile=false", "logging=offline", "run.name=run"]
    for steps in (6, 12):
        with small_trainer(folder, *options, f"training.steps={steps}") as trainer:
            assert trainer.fit() == 0
    command = sync_command(folder)
    assert command is not None
    parts = sorted((folder / "wandb").glob("offline-run-*/*.wandb"))
    assert {part.name for part in parts} == {f"run-{record_id(folder)}.wandb"}
    assert len(parts) == 2
    listed = subprocess.run(
        [*command.split(" "), "--dry-run"], capture_output=True, text=True, cwd=tmp_path, timeout=120, check=True
    )
    assert "Would sync 2 run(s)" in listed.stdout + listed.stderr


ROW = {"step": 1, "loss": 1.5, "plan_per_layer": ["dense"]}


class FullDisk(Record):
    """As wandb on a full disk, of which some calls hear."""

    def log(self, values, step):
        super().log(values, step)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def finish(self, exit_code):
        self.log({}, None)


def test_a_run_trains_to_its_end_while_its_record_finds_the_disk_full(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(wandb, "init", lambda **_: FullDisk())
    with small_trainer(tmp_path / "run", "logging=offline") as trainer:
        assert trainer.fit() == 0
    shown = capsys.readouterr()
    (said,) = (line for line in shown.err.splitlines() if "Weights & Biases" in line)
    assert "run/wandb lacks rows, for it cannot be written ([Errno 28] No space left on device; " in said
    assert "run/metrics.jsonl has them all" in said
    assert "12 steps" in shown.out


def test_a_record_that_cannot_begin_leaves_the_run_without_one(tmp_path, monkeypatch, capsys):
    def init(**_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(wandb, "init", init)
    run = WandbRun(small_config("logging=offline"), tmp_path)
    run.write(ROW)
    run.close(0)
    assert run.place.startswith("not recorded")
    assert "No space left on device" in capsys.readouterr().err


@pytest.mark.parametrize("grows", [True, False])
def test_a_record_that_grows_no_more_is_named_once(tmp_path, monkeypatch, capsys, started, grows):
    part = tmp_path / "wandb" / "offline-run-1-a" / "a.wandb"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"0" * 100)
    run = WandbRun(small_config("logging=offline"), tmp_path)
    clock = iter(range(0, 1000, 25))  # seconds
    monkeypatch.setattr(wandb_record.time, "monotonic", lambda: next(clock))
    for _ in range(8):
        run.write(ROW)
        if grows:
            part.write_bytes(part.read_bytes() + b"0")
    said = capsys.readouterr().err
    assert said.count("lacks rows") == (not grows)
    assert ("its file has not grown for 75 s" in said) == (not grows)
    run = WandbRun(small_config("logging=offline"), tmp_path)
    if grows:
        monkeypatch.setattr(Record, "finish", lambda *_, **__: part.write_bytes(part.read_bytes() + b"0"))
    run.close(0)
    assert ("its file has not grown at its end" in capsys.readouterr().err) == (not grows)
