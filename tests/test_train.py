"""`python -m sparsellm.train` as its users start, kill and restart it, alone and under torchrun."""

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
import whole_config
import yaml
from logged_rows import differences, untimed_rows
from processes import PATIENCE, Forked, family, kill, on_one_thread

from sparsellm.config import from_overrides
from sparsellm.runs.metrics import METRICS, read

# The smoke experiment, smaller; every run of this module shares one prepared corpus.
SMALL = [
    "model.hidden_size=64", "model.intermediate_size=128", "model.num_layers=2", "training.sequence_length=64",
    "training.steps=40", "training.batch_size=4", "logging=disabled", "logging.validation_every=20",
    "run.checkpoint_every=10", "runtime.device=cpu", "data.tokenizer_vocab_size=1000", "model.vocab_size=1000",
]  # fmt: skip

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """The overrides of a prepared corpus: the paragraphs of this repository's documents."""
    folder, root = tmp_path_factory.mktemp("corpus"), Path(__file__).parents[1]
    texts = [path.read_text() for path in (root / "README.md", *sorted((root / "docs").glob("*.md")))]
    paragraphs = "\n\n".join(texts).split("\n\n")
    (folder / "documents.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in paragraphs))
    data = [
        "data=files", f"data.files=[{folder}/documents.jsonl]", "data.validation_fraction=0.1",
        f"data.path={folder}/tokens",
    ]  # fmt: skip
    whole_config.prepare(from_overrides([*SMALL, *data, "training.steps=2000"]))
    return data


@pytest.fixture
def train(corpus, tmp_path):
    """train(*overrides, ranks=1, restarts=0, wait=True, forked=True, data=corpus): a finished process with its output,
    or with wait=False a running one. It is forked from a server that has imported everything, unless forked=False; the
    stdout and stderr of a forked one are one file."""
    running = []

    def start(*overrides, ranks=1, restarts=0, wait=True, forked=True, data=corpus):
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--max-restarts={restarts}"]
        launcher = [*torchrun, f"--nproc_per_node={ranks}"] if ranks > 1 else []
        command = [*launcher, "-m", "sparsellm.train", *SMALL, *data, *overrides]
        if forked:
            output = tmp_path.with_name(f"{tmp_path.name}-{len(running)}.said")
            running.append(Forked(command, tmp_path, output, on_one_thread))
            if not wait:
                return running[-1]
            code = running[-1].wait(300)
            return subprocess.CompletedProcess(command, code, said := output.read_text(), said)
        command, environment = [sys.executable, *command], os.environ | {"OMP_NUM_THREADS": "1"}
        if wait:
            return subprocess.run(
                command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
            )
        running.append(subprocess.Popen(command, cwd=tmp_path, env=environment))
        return running[-1]

    yield start
    for process in running:
        kill(family(process.pid))
        process.wait(PATIENCE)


def wait_for(path: Path, process: subprocess.Popen, seconds=120):
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert process.poll() is None, f"the run ended before {path} appeared"
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.02)


def test_killed_at_any_instant_a_run_ends_like_one_that_was_not(train, tmp_path):
    straight = train("run.name=straight")
    assert straight.returncode == 0, straight.stderr
    for after in ("checkpoints/step_00000010", "checkpoints/step_00000020.partial"):
        process = train("run.name=killed", wait=False)
        wait_for(tmp_path / "runs/killed" / after, process)
        kill(family(process.pid))
    resumed = train("run.name=killed")
    assert resumed.returncode == 0, resumed.stderr
    assert "resuming after step" in resumed.stdout
    assert differences(untimed_rows(tmp_path / "runs/killed"), untimed_rows(tmp_path / "runs/straight")) == []
    weights = "checkpoints/step_00000040/hf/model.safetensors"
    assert (tmp_path / "runs/killed" / weights).read_bytes() == (tmp_path / "runs/straight" / weights).read_bytes()

    # A finished run reports and leaves everything as it is.
    before = sorted((p, p.stat().st_mtime_ns) for p in (tmp_path / "runs/killed/checkpoints").rglob("*"))
    shutil.rmtree(tmp_path / "runs/killed/plots")
    again = train("run.name=killed", "data.path=gone")
    assert again.returncode == 0
    assert "killed is complete." in again.stdout
    assert "nonzeros per token" in again.stdout
    assert (tmp_path / "runs/killed/plots/loss.png").exists()
    assert sorted((p, p.stat().st_mtime_ns) for p in (tmp_path / "runs/killed/checkpoints").rglob("*")) == before

    # Different mathematics under the same name is refused by key; run.restart=true starts a new folder.
    other = train("run.name=killed", "optimizer.learning_rate=1e-4", "training.seed=3")
    assert other.returncode == 2
    assert "optimizer.learning_rate is 0.0001, but run killed was started with 0.003" in other.stderr
    assert "training.seed is 3" in other.stderr
    anew = train("run.name=killed", "training.seed=3", "run.restart=true", "training.steps=40")
    assert anew.returncode == 0, anew.stderr
    assert yaml.safe_load((tmp_path / "runs/killed-2/config.yaml").read_text())["training"]["seed"] == 3


def test_a_trainer_killed_alone_is_started_again_at_once(train, tmp_path):
    """Its loader's processes, which were forked from it, hold nothing of the run's."""
    options = ["run.name=alone", "training.steps=41", "runtime.data_workers=2"]
    process = train(*options, wait=False, forked=False)
    wait_for(tmp_path / "runs/alone/checkpoints/step_00000010", process)
    process.kill()
    process.wait()
    again = train(*options, forked=False)
    assert again.returncode == 0, again.stderr
    assert "resuming after step" in again.stdout
    assert "is in use" not in again.stderr


def test_ranks_whose_torchrun_is_killed_save_and_end(train, tmp_path):
    process = train("run.name=orphans", "training.steps=2000", ranks=2, wait=False, forked=False)
    wait_for(tmp_path / "runs/orphans/checkpoints/step_00000010", process)
    ranks = psutil.Process(process.pid).children()
    assert len(ranks) == 2
    process.kill()
    process.wait()
    psutil.wait_procs(ranks, timeout=60)
    assert not any(rank.is_running() for rank in ranks)
    last = max((tmp_path / "runs/orphans/checkpoints").iterdir())
    assert (last / "COMMITTED").exists()
    assert (tmp_path / "runs/orphans/plots/loss.png").exists()  # the end of an orderly stop
    logged = [row["step"] for row in read(tmp_path / "runs/orphans" / METRICS)]
    assert logged[-1] <= int(last.name.removeprefix("step_")) <= logged[-1] + 2


def test_torchrun_starts_a_run_again_by_itself_when_a_rank_is_killed(train, tmp_path):
    process = train("run.name=again", "training.steps=60", ranks=2, restarts=1, wait=False)
    wait_for(tmp_path / "runs/again/checkpoints/step_00000010", process)
    main_rank, _ = sorted(psutil.Process(process.pid).children(), key=lambda rank: rank.pid)  # started in their order
    main_rank.kill()
    assert process.wait(120) == 0
    assert (tmp_path / "runs/again/checkpoints/step_00000060/COMMITTED").exists()


def test_a_run_leaves_curves_a_summary_and_a_checkpoint(train, tmp_path):
    done = train(forked=False)
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("smoke-")
    assert sorted(p.name for p in (folder / "plots").iterdir()) == ["loss.png", "nonzeros.png", "training.png"]
    assert all((folder / "plots" / p).read_bytes().startswith(b"\x89PNG") for p in ("loss.png", "nonzeros.png"))
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["step_00000030", "step_00000040"]
    for words in ("loss", "nonzeros per token", "tokens/s", "under `sum`, the same as", "sample"):
        assert words in done.stdout
    rows = read(folder / METRICS)
    assert rows[0]["step"] == 1
    assert rows[-1]["step"] == 40
    assert rows[-1]["ce"] < rows[0]["ce"] - 0.5
    assert rows[-1]["nnz_mean"] < rows[0]["nnz_mean"]


def test_sigterm_saves_and_the_same_command_goes_on(train, tmp_path):
    """Sent to the whole group, as a scheduler or a terminal does: the loader's processes must not die of it."""
    process = train("run.name=stopped", "training.steps=2000", "runtime.data_workers=2", wait=False, forked=False)
    wait_for(tmp_path / "runs/stopped/checkpoints/step_00000010", process)
    members = family(process.pid)
    assert len(members) >= 3
    for member in members:
        member.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
    checkpoint = max((tmp_path / "runs/stopped/checkpoints").iterdir())
    step = int(checkpoint.name.removeprefix("step_"))
    again = train("run.name=stopped", "training.steps=2000", wait=False)
    logged = step // 10 * 10 + 10
    # A step's row may follow its checkpoint, after a validation, but is there before the next checkpoint.
    wait_for(tmp_path / f"runs/stopped/checkpoints/step_{logged + 10:08d}", again)
    assert {row["step"] for row in read(tmp_path / "runs/stopped" / METRICS)} >= {1, logged}


def test_two_ranks_train_like_one_and_resume_on_one(train, tmp_path):
    one = train("run.name=one")
    two = train("run.name=two", "runtime.micro_batch_size=2", ranks=2)
    assert one.returncode == two.returncode == 0, two.stderr
    rows = [read(tmp_path / "runs" / name / METRICS) for name in ("one", "two")]
    assert [row["step"] for row in rows[0]] == [row["step"] for row in rows[1]]
    for a, b in zip(*rows, strict=True):
        for key in ("loss", "ce", "l1", "grad_norm"):
            assert a[key] == pytest.approx(b[key], rel=2e-2), (a["step"], key)
    for key in ("ce", "nnz_per_layer"):  # before rounding has grown
        assert rows[0][0][key] == pytest.approx(rows[1][0][key], rel=1e-5)

    process = train("run.name=moved", "training.steps=41", "runtime.shard=full", ranks=2, wait=False)
    wait_for(tmp_path / "runs/moved/checkpoints/step_00000010", process)
    kill(family(process.pid))
    moved = train("run.name=moved", "training.steps=41")  # on one rank, and so not in shards
    assert moved.returncode == 0, moved.stderr
    assert "resuming after step" in moved.stdout


@pytest.mark.parametrize("shard", ["none", "full"])
def test_a_signal_to_one_rank_stops_all_at_the_same_step(train, tmp_path, shard):
    process = train("run.name=stopped", "training.steps=2000", f"runtime.shard={shard}", ranks=2, wait=False)
    wait_for(tmp_path / "runs/stopped/checkpoints/step_00000010", process)
    ranks = psutil.Process(process.pid).children()
    assert len(ranks) == 2
    ranks[1].send_signal(signal.SIGTERM)
    assert process.wait(60) != 0
    assert (max((tmp_path / "runs/stopped/checkpoints").iterdir()) / "COMMITTED").exists()
    assert (tmp_path / "runs/stopped/plots/loss.png").exists()


def test_two_ranks_repeat_bit_for_bit(train, tmp_path):
    for name in ("a", "b"):
        done = train(f"run.name={name}", ranks=2)
        assert done.returncode == 0, done.stderr
    assert differences(untimed_rows(tmp_path / "runs/a"), untimed_rows(tmp_path / "runs/b")) == []


def test_every_mistake_at_once_and_nothing_left_behind(train, tmp_path):
    refused = train("training.batch_size=3", "sparsity.l1_coefficient=-1", "run.name=A/B", "+logging.evry=0")
    assert refused.returncode == 2
    assert "Traceback" not in refused.stderr
    assert "3 mistakes in the configuration" in refused.stderr  # a batch of 3 divides over one rank
    refused = train("+sparsity.l1_coeficient=3", "traning.steps=3", "training.steps=many", "model=giant")
    assert refused.returncode == 2
    assert "4 mistakes in the configuration" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_run_in_use_is_refused_and_not_disturbed(train, tmp_path):
    first = train("run.name=one", "training.steps=2000", wait=False)
    wait_for(tmp_path / "runs/one/checkpoints/step_00000010", first)
    second = train("run.name=one", "training.steps=2000")
    assert second.returncode == 1
    assert "runs/one is in use" in second.stderr
    assert "Traceback" not in second.stderr
    first.send_signal(signal.SIGTERM)
    assert first.wait(60) == 128 + signal.SIGTERM
    logged = [row["step"] for row in read(tmp_path / "runs/one" / METRICS)]
    assert logged[:2] == [1, 10]
    assert logged == sorted(set(logged))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.num_layers=???"], "model.num_layers has no value"),
        (["run.name=${nope}"], "nope"),
        (["training.sequence_length=0", "training.steps=-3"], "training.steps is -3"),
        (["training.seed=99999999999999999999"], "training.seed is"),
        (["--multirun", "training.seed=1,2"], "start one command per job"),
    ],
)
def test_odd_values_are_refused_in_a_sentence(train, tmp_path, overrides, words):
    refused = train(*overrides)
    assert refused.returncode in (1, 2)
    assert words in refused.stderr
    assert "Traceback" not in refused.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_root_that_cannot_be_written_is_refused_in_a_sentence(train, tmp_path):
    (tmp_path / "file").write_text("")
    refused = train("run.root=file")
    assert refused.returncode == 1
    assert "cannot be written" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_missing_data_is_refused_with_the_command_to_run(train, tmp_path):
    refused = train(f"data.path={tmp_path}/missing", "model.vocab_size=49152", data=["data=fineweb_edu"])
    assert refused.returncode == 2
    assert "python -m sparsellm.prepare_data" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert list(tmp_path.iterdir()) == []


def test_corrupt_data_is_refused_by_name(train, corpus, tmp_path):
    damaged = tmp_path / "damaged"
    shutil.copytree(corpus[-1].removeprefix("data.path="), damaged)
    tokens = bytearray((damaged / "train.tokens").read_bytes())
    tokens[len(tokens) // 2] ^= 1
    (damaged / "train.tokens").write_bytes(tokens)
    refused = train("run.name=x", f"data.path={damaged}")
    assert refused.returncode == 1
    assert "train.tokens" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_wandb_offline_gets_the_rows(train, tmp_path):
    done = train("run.name=watched", "logging.wandb=online", "training.steps=41", forked=False)
    assert done.returncode == 0, done.stderr
    assert "  Weights & Biases    offline: there is no key" in done.stdout
    (record,) = (tmp_path / "runs/watched/wandb").glob("offline-run-*")
    assert list(record.glob("*.wandb"))
    pictures = {path.name.partition("_")[0] for path in record.glob("files/media/images/plots/*.png")}
    assert pictures == {"loss", "nonzeros", "training"}
    upload = "  Weights & Biases    to upload: "
    assert [line.rpartition(" ")[2] for line in done.stdout.splitlines() if line.startswith(upload)] == [
        "runs/watched/wandb"
    ]
    again = train("run.name=watched", "logging.wandb=online", "training.steps=41")
    assert upload in again.stdout  # of a finished run too
