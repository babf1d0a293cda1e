"""Weights & Biases: where a run's record is, that there is only one, and its content."""

import errno
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import wandb
import wandb_server
from PIL import Image
from small_run import small_config, small_trainer

from sparsellm.config import from_overrides
from sparsellm.runs import wandb_record
from sparsellm.runs.wandb_record import WandbRun, record_id, sync_command


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


def test_a_record_has_what_the_keys_of_wandb_say(tmp_path, started):
    WandbRun(small_config("logging=offline"), tmp_path)
    keys = ["entity=lab", "project=p", "group=smoke-1a2b3c4d", "tags=[a,b]", "notes=a first try"]
    WandbRun(small_config("logging=offline", *(f"logging.wandb_{key}" for key in keys)), tmp_path)
    names = ("entity", "project", "group", "tags", "notes")
    assert [tuple(values[name] for name in names) for values in started] == [
        (None, "sparsellm", None, None, None),
        ("lab", "p", "smoke-1a2b3c4d", ["a", "b"], "a first try"),
    ]


@pytest.fixture
def real(tmp_path, monkeypatch):
    """wandb itself, with a key and short waits: the folder of a run. Its process ends with the test."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    wandb.teardown()
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setenv("WANDB_X_DISABLE_STATS", "true")
    # As the module sets them, and so gone after the test.
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setattr(wandb_record, "SETTINGS", wandb_record.SETTINGS | {"init_timeout": 2, "finish_timeout": 2})
    monkeypatch.setattr(wandb_record.shutil, "which", lambda _: "bin/wandb")
    yield tmp_path
    wandb.teardown()
    wandb.run = None  # it stays a run whose process has died
    monkeypatch.delenv("WANDB_SERVICE", raising=False)


def log(run, *steps):
    for step in steps:
        run.write({"step": step, "loss": 1000.5 + step})


def kept(folder, *steps):
    """Whether the one record in the run's folder has the rows of `steps`."""
    (file,) = (folder / "wandb").glob("*run-*/*.wandb")
    content = file.read_bytes()
    return all(str(1000.5 + step).encode() in content for step in steps)


@pytest.mark.parametrize("kind", ["dead", wandb_server.SILENT, 403, wandb_server.RUBBISH])
@pytest.mark.slow
def test_a_server_that_does_not_take_a_record_means_an_offline_one_with_every_row(real, monkeypatch, kind):
    with wandb_server.serving(wandb_server.OK if kind == "dead" else kind) as server:
        monkeypatch.setenv("WANDB_BASE_URL", wandb_server.dead_url() if kind == "dead" else server.url)
        began = time.monotonic()
        run = WandbRun(small_config("logging.wandb=online"), real)
        assert run.status.startswith("offline: online failed: CommError: ")
        assert {"dead": "connection refused", 403: "403"}.get(kind, "") in run.status
        log(run, 1, 2, 3)
        run.close(0)
        assert time.monotonic() - began < 40  # seconds, on a busy machine; wandb's own are 95 and then an exception
    assert kept(real, 1, 2, 3)
    assert [path.name.split("-")[0] for path in (real / "wandb").glob("*run-*-*")] == ["offline"]
    assert sync_command(real) == f"wandb sync {real}/wandb"


@pytest.mark.parametrize("kind", [wandb_server.SILENT, 403])
@pytest.mark.slow
def test_a_server_that_fails_while_a_run_goes_on_costs_no_row_and_no_time(real, monkeypatch, capsys, kind):
    with wandb_server.serving() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        run = WandbRun(small_config("logging.wandb=online"), real)
        assert run.status.startswith(server.url)
        log(run, 1)
        server.answer = kind
        log(run, 2, 3)
        began = time.monotonic()
        run.close(0)
        assert time.monotonic() - began < 20
    assert kept(real, 1, 2, 3)
    (file,) = (real / "wandb").glob("run-*/*.wandb")
    said = capsys.readouterr().err
    assert f"To upload {file}: wandb sync --include-online {file.parent}" in said
    assert "is missing rows" not in said


def test_a_server_that_takes_a_record_has_it_all_and_nothing_is_said(real, monkeypatch, capsys):
    with wandb_server.serving() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        run = WandbRun(small_config("logging.wandb=online"), real)
        log(run, 1, 2)
        run.close(0)
        assert any(path.endswith("/file_stream") for path in server.requests)
    assert capsys.readouterr().err == ""


def test_a_process_of_wandb_that_dies_ends_nothing(real, capsys):
    run = WandbRun(small_config("logging=offline"), real)
    log(run, 1)
    # The lock of its port is not known here; the process is the only child that is called wandb-core.
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    (core,) = (int(each) for each in children if "wandb-core" in Path(f"/proc/{each}/cmdline").read_text())
    os.kill(core, signal.SIGKILL)
    os.waitid(os.P_PID, core, os.WEXITED | os.WNOWAIT)
    log(run, *range(2, 50))
    run.close(0)
    assert capsys.readouterr().err.count("is missing rows: wandb failed") == 1


@pytest.mark.parametrize(
    ("variable", "value"), [("WANDB_BASE_URL", "nonsense"), ("WANDB_CONSOLE", "foo"), ("WANDB_SERVICE", "xx")]
)
def test_a_variable_that_wandb_refuses_leaves_an_offline_record(real, monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    run = WandbRun(small_config("logging.wandb=online"), real)
    assert run.status.startswith("offline: online failed: ")
    assert value in run.status
    log(run, 1)
    run.close(0)
    assert kept(real, 1)


def test_a_user_without_an_entry_in_the_passwd_file_has_a_record(real, monkeypatch):
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    with pytest.raises(RuntimeError):
        Path.home()
    run = WandbRun(small_config("logging=offline"), real)
    assert run.status == "offline"
    log(run, 1)
    run.close(0)
    assert kept(real, 1)


def test_without_wandb_a_run_has_no_record_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setitem(sys.modules, "wandb", None)
    run = WandbRun(small_config("logging.wandb=online"), tmp_path)
    assert run.status == (
        "not recorded: the record needs the package wandb, which is not installed: install it with `pip install wandb`"
    )
    log(run, 1)
    run.close(0)


@pytest.mark.parametrize(
    ("typed", "environment", "status"),
    [
        ([], {"WANDB_MODE": "disabled"}, "disabled; WANDB_MODE=disabled in the environment"),
        ([], {"WANDB_MODE": "foo"}, "offline; WANDB_MODE=foo is ignored: it should be online, offline or disabled"),
        (
            ["logging=disabled"],
            {"WANDB_MODE": "online", "WANDB_TAGS": "a,b", "WANDB_DISABLED": "false"},
            "disabled; WANDB_TAGS=a,b in the environment; logging.wandb=disabled wins over WANDB_MODE=online in the"
            " environment",
        ),
        (
            ["logging.wandb_entity=null", "logging.wandb_project=mine"],
            {"WANDB_ENTITY": "lab", "WANDB_PROJECT": "mine", "WANDB_NOTES": "x" * 99},
            "offline; WANDB_PROJECT=mine, WANDB_NOTES=... in the environment; logging.wandb_entity=null wins over"
            " WANDB_ENTITY=lab in the environment",
        ),
    ],
)
def test_the_line_at_the_start_says_which_of_environment_and_keys_won(
    tmp_path, monkeypatch, started, typed, environment, status
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert WandbRun(from_overrides(["experiment=smoke", *typed]), tmp_path).status == status


def test_wandb_sees_no_variable_that_a_typed_key_overrides_and_an_unknown_mode_is_not_wandbs(real, monkeypatch):
    with wandb_server.serving() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        monkeypatch.setenv("WANDB_MODE", "online")
        monkeypatch.setenv("WANDB_ENTITY", "lab")
        run = WandbRun(small_config("logging.wandb=offline", "logging.wandb_entity=null"), real)
        log(run, 1)
        assert run._run.entity != "lab"
        run.close(0)
        assert server.requests == []
    assert run.status.startswith("offline; logging.wandb=offline wins over WANDB_MODE=online")
    assert os.environ["WANDB_MODE"] == "online"
    monkeypatch.setenv("WANDB_MODE", "foo")
    run = WandbRun(small_config("logging.wandb=offline", "logging.wandb_entity=null"), real)
    run.close(0)
    assert run.status.startswith("offline; WANDB_MODE=foo is ignored")


def test_an_alert_is_part_of_the_record_and_no_call_is_deprecated(real, capsys):
    Image.new("RGB", (4, 3)).save(real / "loss.png")
    run = WandbRun(small_config("logging=offline", "logging.wandb_tags=[tagged]"), real)
    log(run, 1)
    run.alert("The loss diverges", "the cross entropy is 382")
    run.figures(1, [real / "loss.png"])
    scores = {"score": 0.5, "stderr": 0.1, "metric": "acc", "rows": 4}
    run.evaluation(1, {"evaluation/piqa": 0.5}, "evaluation/table", {"piqa": scores})
    assert run._run._telemetry_obj.deprecated.ListFields() == []
    run.close(0)
    (file,) = (real / "wandb").glob("*run-*/*.wandb")
    content = file.read_bytes()
    assert b"the cross entropy is 382" in content
    assert b"tagged" in content
    assert capsys.readouterr().err == ""


def test_a_record_names_no_host_no_command_line_and_no_folders(real, monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "secret-host")
    monkeypatch.setattr(sys, "argv", ["/secret/program", "data.files=[secret-argument]"])
    run = WandbRun(small_config("logging=offline", "distill.teacher=/home/secret-user/base"), real)
    log(run, 1)
    run.close(0)
    wandb.teardown()
    (file,) = (real / "wandb").glob("*run-*/*.wandb")
    content = file.read_bytes()
    assert b"FOLDER/base" in content
    assert kept(real, 1)
    for secret in ("secret", str(real), sys.executable):
        assert secret.encode() not in content, secret


@pytest.mark.slow
def test_a_record_is_in_the_runs_folder_wherever_the_process_works_that_writes_it(tmp_path):
    """wandb's own process is that of a parent, which may work in another folder."""
    code = (
        "import os, wandb; from pathlib import Path; from small_run import small_config;"
        "from sparsellm.runs.wandb_record import WandbRun;"
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
    assert WandbRun(small_config("logging.wandb=online"), tmp_path).status == "https://wandb.example/sparsellm/runs/1"
    monkeypatch.setattr(Record, "url", None)
    assert WandbRun(small_config("logging.wandb=offline"), tmp_path).status == "offline"
    assert WandbRun(small_config("logging.wandb=disabled"), tmp_path).status == "disabled"
    monkeypatch.setattr(wandb, "login", lambda **_options: False)
    assert "set WANDB_API_KEY" in WandbRun(small_config("logging.wandb=online"), tmp_path).status


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
    """According to wandb itself, which reads the folders without a network."""
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
    """Like wandb on a full disk, where only some calls raise."""

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
    assert "run/wandb is missing rows: it cannot be written ([Errno 28] No space left on device; " in said
    assert "run/metrics.jsonl has them all" in said
    assert "12 steps" in shown.out


def test_a_record_that_cannot_begin_leaves_the_run_without_one(tmp_path, monkeypatch, capsys):
    def init(**_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(wandb, "init", init)
    run = WandbRun(small_config("logging=offline"), tmp_path)
    run.write(ROW)
    run.close(0)
    assert run.status.startswith("not recorded")
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
    assert said.count("is missing rows") == (not grows)
    assert ("its file has not grown for 75 s" in said) == (not grows)
    run = WandbRun(small_config("logging=offline"), tmp_path)
    if grows:
        monkeypatch.setattr(Record, "finish", lambda *_, **__: part.write_bytes(part.read_bytes() + b"0"))
    run.close(0)
    assert ("its file did not grow at the end" in capsys.readouterr().err) == (not grows)
