"""A run's folder: who may use it, which damage is reported, and what a kill leaves there."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from dataclasses import replace

import pytest
import whole_config
from small_run import small_config

from sparsellm.config import save
from sparsellm.distributed.groups import process_group
from sparsellm.runs import folder as run_folder

# Takes the lock, forks a process that lives on, as a loader's worker does for seconds, and says its pid.
HOLDER = """
import os, sys, time
from pathlib import Path
from sparsellm.runs.folder import claim
held = claim(Path(sys.argv[1]))
child = os.fork()
if child:
    print(child, flush=True)
time.sleep(60)
"""


@pytest.fixture
def config(tmp_path):
    return small_config(f"run.root={tmp_path}", "run.name=r")


@pytest.mark.slow
def test_the_lock_ends_with_the_process_that_took_it_though_a_forked_one_lives_on(tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, tmp_path], stdout=subprocess.PIPE, text=True)
    forked = int(holder.stdout.readline())
    try:
        with pytest.raises(run_folder.RunFolderError):
            run_folder.claim(tmp_path, patience=0)
        holder.kill()
        holder.wait()
        run_folder.claim(tmp_path, patience=1).close()
        os.kill(forked, 0)  # lives on
    finally:
        os.kill(forked, signal.SIGKILL)


def test_a_lock_that_is_held_is_waited_for_and_its_refusal_never_says_to_begin_anew(tmp_path, monkeypatch, capsys):
    held = run_folder.claim(tmp_path)
    begun = time.monotonic()
    with pytest.raises(run_folder.RunFolderError) as refused:
        run_folder.claim(tmp_path, patience=0.3)
    assert time.monotonic() - begun >= 0.3
    assert "restart" not in str(refused.value)
    assert f"{tmp_path} is in use by another process: waiting up to 0.3 s" in capsys.readouterr().err
    monkeypatch.setattr(run_folder.time, "sleep", lambda _: held.close())  # the other process ends meanwhile
    run_folder.claim(tmp_path, patience=1).close()


def test_what_a_kill_left_in_a_finished_run_is_removed_unless_the_run_is_in_use(config, tmp_path, capsys):
    checkpoints = tmp_path / "r" / "checkpoints"
    left = checkpoints / "step_00000006.deleting" / "state"
    left.mkdir(parents=True)
    (left / "file").write_bytes(b"0" * 20_000_000)
    (checkpoints / "step_00000012").mkdir()
    with run_folder.claim(tmp_path / "r"):
        run_folder.tidy(tmp_path / "r")
    assert left.exists()
    assert "cannot be removed" in capsys.readouterr().err
    run_folder.tidy(tmp_path / "r")
    assert [path.name for path in checkpoints.iterdir()] == ["step_00000012"]
    assert f"{left.parent}: removing leftovers of an interrupted deletion, 20.0 MB" in capsys.readouterr().err


def test_a_restart_that_torchrun_would_repeat_is_refused(config, monkeypatch):
    anew = replace(config, run=replace(config.run, restart=True))
    for restarts, refused in ((0, False), (3, True)):
        monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", str(restarts))
        assert run_folder.mistakes(config) == []
        found = run_folder.mistakes(anew)
        assert len(found) == refused
        assert all("run.restart=true with torchrun --max-restarts=3" in each for each in found)


def test_a_configuration_that_is_gone_is_said(config, tmp_path, capsys):
    (tmp_path / "r/checkpoints/step_00000006").mkdir(parents=True)
    with process_group("cpu") as ranks:
        for said in (True, False):
            with run_folder.open_folder(config, ranks):
                pass
            assert ("config.yaml was missing and has been rewritten" in capsys.readouterr().err) == said


def test_a_number_that_is_damaged_is_not_taken_for_the_one_that_the_run_was_begun_with(config, tmp_path):
    path = tmp_path / "r" / run_folder.CONFIG
    path.parent.mkdir()
    save(config, path)
    assert run_folder.mistakes(config) == []
    path.write_text(path.read_text().replace("steps: 12", "steps: 92"))
    (found,) = run_folder.mistakes(config)
    assert f"{path} is damaged" in found
    assert "was started with" not in found


@pytest.mark.parametrize("muon", [True, False])
def test_a_run_cannot_change_its_optimizer_when_it_resumes(muon, config, tmp_path):
    path = tmp_path / "r" / run_folder.CONFIG
    path.parent.mkdir()
    save(replace(config, optimizer=replace(config.optimizer, muon=not muon)), path)
    assert run_folder.mistakes(replace(config, optimizer=replace(config.optimizer, muon=muon))) == [
        f"optimizer.muon is {muon}, but run r was started with {not muon}: choose another run.name, or add"
        " run.restart=true"
    ]


def test_checkpoints_that_the_disk_has_no_room_for_are_refused_before_the_run(config, monkeypatch):
    parameters = 96 * 32 + 2 * (4 * 32 * 32 + 3 * 32 * 48 + 2 * 32) + 32
    needed = parameters * 16  # of the one checkpoint of 12 steps
    usage = namedtuple("usage", "total used free")
    for free in (needed, needed - 1):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: usage(free, 0, free))
        found = whole_config.room_mistakes(config)
        assert (found == []) == (free == needed)
    assert "run r needs space for 1 more checkpoint of" in found[0]
    assert "are free" in found[0]
    more = small_config(f"run.root={config.run.root}", "run.checkpoint_every=2", "run.keep_checkpoints=4")
    assert "space for 5 more checkpoints" in whole_config.room_mistakes(more)[0]
