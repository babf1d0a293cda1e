"""A run's small files with one bit of a byte flipped, or cut there: each damage is named, or changes nothing.

`make attack` takes every byte, `make test` some 200 of a file (of a checkpoint's state, both take a part).
Each test prints how many attacks were tried, held and failed. An attack holds if the answer is a sentence that names
the file, or if all that is read from the file is what was written.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path

import pytest
from attack.seed import SEED, one, positions
from small_run import small_config, small_trainer

from sparsellm.config import definition, load, save
from sparsellm.runs import committed as commits
from sparsellm.runs import folder as run_folder
from sparsellm.runs import report
from sparsellm.runs.checkpoint import CheckpointError
from sparsellm.runs.layout import COMMITTED, STATE, VALUES
from sparsellm.runs.metrics import IN_EVERY_ROW, METRICS, MetricsError, MetricsFile, Saved, history, read
from sparsellm.runs.wandb_record import WandbRun, record_id

STEPS = 12
INTERRUPTS = 5  # instants of a start


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(configuration, folder) of a finished run."""
    root = tmp_path_factory.mktemp("runs")
    config = small_config(f"run.root={root}", "run.name=r", "run.checkpoint_every=6")
    with redirect_stdout(StringIO()), small_trainer(root / "r", "run.root=" + str(root), "run.checkpoint_every=6") as t:
        assert t.fit() == 0
    save(config, root / "r" / run_folder.CONFIG)
    return config, root / "r"


def flipped(path, stride=1):
    """(position, content) of `path` with one bit of a byte flipped: another bit at the next position.

    SEED decides which.
    """
    whole = path.read_bytes()
    for position in positions(len(whole), stride):
        content = bytearray(whole)
        content[position] ^= 1 << (position + SEED) % 8
        yield position, bytes(content)


def cut(path):
    """(position, content) for shorter `path`s."""
    whole = path.read_bytes()
    return ((position, whole[:position]) for position in positions(len(whole)))


def attack(path, holds, damaged=flipped, kind="flipped"):
    """Damage `path`; `holds(position)` returns whether the answer is right. Nothing may be raised."""
    whole, failed, tried = path.read_bytes(), [], 0
    try:
        for position, content in damaged(path):
            tried += 1
            path.write_bytes(content)
            try:
                right = holds(position)
            except Exception as error:
                right = None
                failed.append(f"byte {position}: {type(error).__name__}: {error}")
            if right is False:
                failed.append(f"byte {position}: {content[max(0, position - 20) : position + 20]}")
    finally:
        path.write_bytes(whole)
    print(f"{path.name} of a run, {kind}: tried {tried}, held {tried - len(failed)}, failed {len(failed)}")
    assert tried > 0
    assert failed == []


def test_every_byte_of_the_configuration(run):
    config, folder = run
    path, before = folder / run_folder.CONFIG, definition(config)

    def holds(_position):
        found = run_folder.mistakes(config)
        return all(str(path) in each for each in found) if found else definition(load(path)) == before

    assert run_folder.mistakes(config) == []
    attack(path, holds)
    attack(path, holds, cut, "cut")


@pytest.mark.slow
def test_every_byte_of_the_rows(run):
    config, folder = run
    path = folder / METRICS
    saved = Saved(**json.loads((run_folder.checkpoint(folder, STEPS) / STATE / VALUES).read_text())["metrics"])
    assert history(path, saved, IN_EVERY_ROW, 2).problems == []

    def holds(position):
        found = history(path, saved, IN_EVERY_ROW, config.model.num_layers)
        if not found.problems or str(path) not in found.report(path):
            return False
        if found.rows:
            report.summary(config.model, config.sparsity, config.data.mix_names, found.rows, folder)
        if position % 997 == 0:  # finishing a run takes long
            with redirect_stderr(StringIO()):
                assert "is damaged" in report.finish(config, folder)
        try:
            MetricsFile(path, STEPS, saved)
        except MetricsError as error:
            return str(path) in str(error) and "run.skip_damaged=true" in str(error)
        return False

    attack(path, holds)
    attack(path, holds, cut, "cut")


@pytest.fixture
def one_hash_thread(monkeypatch):
    """Of thousands of searches for an intact checkpoint of small files, most time would go into starting threads."""
    monkeypatch.setattr(commits, "HASH_THREADS", 1)


@pytest.mark.slow
def test_every_byte_of_the_commit(run, one_hash_thread):
    config, folder = run
    committed = run_folder.checkpoint(folder, STEPS) / COMMITTED

    with small_trainer(folder) as trainer:

        def holds(_position):
            run_folder.is_finished(config.run, config.training.steps)
            try:
                trainer.checkpoints.find(skip_damaged=False)
            except CheckpointError as error:
                return str(committed.parent) in str(error)
            return False

        assert trainer.checkpoints.find(skip_damaged=False) == STEPS
        attack(committed, holds)
        attack(committed, holds, cut, "cut")


@pytest.mark.parametrize("name", ["values.json", "rank_00000.json", ".metadata"])
@pytest.mark.slow
def test_every_byte_of_the_small_files_of_a_checkpoint(run, one_hash_thread, name):
    _, folder = run
    path = run_folder.checkpoint(folder, STEPS) / STATE / name
    part = partial(flipped, stride=path.stat().st_size // 300 + 1)
    with small_trainer(folder) as trainer:

        def holds(_position):
            try:
                trainer.checkpoints.find(skip_damaged=False)
            except CheckpointError as error:
                return f"{path.parent.parent} is damaged: {STATE}/{name} has checksum" in str(error)
            return False

        attack(path, holds, part)


@pytest.mark.parametrize("content", ["", "[]", "{}", "null", "3", '"x"', "\0" * 20, "[" * 100_000, '{"step": 12}'])
def test_a_commit_that_is_none(run, content):
    config, folder = run
    committed = run_folder.checkpoint(folder, STEPS) / COMMITTED
    whole = committed.read_text()
    committed.write_text(content)
    try:
        assert not run_folder.is_finished(config.run, config.training.steps)
        with small_trainer(folder) as trainer, pytest.raises(CheckpointError, match=f"{committed.parent} is damaged"):
            trainer.checkpoints.find(skip_damaged=False)
    finally:
        committed.write_text(whole)


def test_every_byte_of_the_records_name(run):
    _, folder = run
    path = folder / "wandb" / "id"
    name = record_id(folder)

    def holds(_position):
        said = StringIO()
        with redirect_stderr(said):
            found = record_id(folder)
        return found == name or (str(path) in said.getvalue() and found in said.getvalue())

    attack(path, holds)
    attack(path, holds, cut, "cut")


@pytest.mark.parametrize(
    "content",
    [b"", b"\0" * 300, b"\xff\xfe", b"- a\n- b\n", b"3", b"null", b"{", b"model: 3\n", b"model: [1]\n", b"a: b: c\n",
     b"runtime:\n  precision: float7\n", b"training: null\n", b"1: 2\n",
     b"&a [*a]"],
)  # fmt: skip
def test_a_configuration_that_is_none(run, content):
    config, folder = run
    path = folder / run_folder.CONFIG
    whole = path.read_bytes()
    path.write_bytes(content)
    try:
        (found,) = run_folder.mistakes(config)
        assert str(path) in found
        assert "was started with" not in found
    finally:
        path.write_bytes(whole)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 2 MB; a checkpoint of the run below takes 0.3 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    try:
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], capture_output=True)
    except OSError:
        pytest.skip("there is no mount here")
    if done.returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def fill(disk, leave):
    with (disk / "filler").open("wb", buffering=0) as file:
        while os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize > leave:
            file.write(b"0" * 4096)


@pytest.mark.parametrize("leave", [0, 8192, 40_000, 100_000, 275_000, random.Random(SEED).randrange(280_000)])
@one("full disks")
@pytest.mark.slow
def test_a_disk_that_becomes_full_loses_nothing(small_disk, capsys, leave):
    """After step 2's checkpoint, `free` bytes are left. Freed space lets the run finish."""
    folder, options = small_disk / "run", ["run.checkpoint_every=2", "logging.every=1"]
    with small_trainer(folder, *options) as trainer:
        advance = trainer.advance

        def filling(batches):
            if trainer.step == 3:
                trainer.checkpoints.settle()
                fill(small_disk, leave)
            return advance(batches)

        trainer.advance = filling
        with pytest.raises((CheckpointError, MetricsError)) as ended:
            trainer.fit()
        assert "the disk is full" in str(ended.value) or "cannot be written" in str(ended.value)
        assert trainer.step > 3
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step_00000002"]
    steps = [row["step"] for row in read(folder / METRICS)]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= 2
    (small_disk / "filler").unlink()
    with small_trainer(folder, *options) as trainer:
        assert trainer.fit() == 0
    assert [row["step"] for row in read(folder / METRICS)] == list(range(1, STEPS + 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    "leave", [None, 10_000, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (0, 100_000))]
)
def test_weights_and_biases_on_a_full_disk_is_one_sentence(small_disk, capfd, leave):
    """After some rows, `free` bytes are left; None: none at the start."""
    folder = small_disk / "run"
    folder.mkdir()
    if leave is None:
        fill(small_disk, 0)
    record = WandbRun(small_config("logging=offline"), folder)
    for step in range(1, 601):
        record.write({"step": step, "loss": 1.5, "plan_per_layer": ["dense"], "nnz_per_layer": [1.5 * step] * 30})
        if step == 100 and leave is not None:
            fill(small_disk, leave)
    record.close(0)
    said = capfd.readouterr().err
    assert said.count("is missing rows: it cannot be written") == 1
    assert "Traceback" not in said
    assert "Logging error" not in said


def heed_interrupts():
    """What a shell starts in the background ignores SIGINT, and so do its children: the tests themselves, maybe."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def said_until_its_end(process):
    """What the process writes to stderr until it ends. If it has not ended after a minute it is killed, and the second
    result says which signals it had pending, blocked, ignored and caught."""
    try:
        return process.communicate(timeout=60)[1], []
    except subprocess.TimeoutExpired:
        status = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        process.kill()
        return process.communicate()[1], [line for line in status if line.startswith(("Sig", "Shd"))]


@pytest.mark.slow
def test_an_interrupt_at_any_instant_of_a_start(tmp_path):
    command = [sys.executable, "-m", "sparsellm.train", "experiment=smoke", "runtime.device=cpu", "logging=disabled"]
    chance, failed = random.Random(SEED), []
    for _ in range(INTERRUPTS):
        process = subprocess.Popen(
            command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            preexec_fn=heed_interrupts,
        )  # fmt: skip
        process.stderr.readline()  # it is starting
        time.sleep(delay := chance.uniform(0, 3))
        process.send_signal(signal.SIGINT)
        errors, signals = said_until_its_end(process)
        if process.returncode != 130 or "Traceback" in errors or "interrupted" not in errors:
            failed.append((delay, process.returncode, signals, errors[:1500], errors[-500:]))
    print(f"interrupts: tried {INTERRUPTS}, held {INTERRUPTS - len(failed)}, failed {len(failed)}")
    assert failed == []
