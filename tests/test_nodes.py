"""Several machines: two agents of torchrun on this host, with two ranks each, over gloo."""

import json
import os
import re
import signal
import socket
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
import whole_config
from evaluation.small_rows import write_rows
from logged_rows import differences, untimed_rows
from processes import PATIENCE, SERVER, family, kill, started

from sparsellm.config import from_overrides
from sparsellm.runs import folder as run_folder
from sparsellm.training import loop

pytestmark = pytest.mark.slow
MARK = "happened"  # a file of the folder in which something is to happen once


@dataclass(frozen=True)
class Event:
    """What happens on one rank as it begins a step, once, and whether its node's end finds the others at work."""

    rank: int
    step: int
    signal: signal.Signals
    asleep: bool = False  # the other ranks wait for nothing that breaks, as over NCCL

    def prepare(self, mark: Path, name: str) -> None:
        """In the process of every rank."""
        if "RANK" not in os.environ:
            return
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # which the server of forks has read before
        run_folder.SEEN_WITHIN = 1
        advance = loop.Trainer.advance

        def eventful(trainer, batches):
            if trainer.step + 1 == self.step and not mark.exists():
                if trainer.ranks.rank == self.rank:
                    trainer.checkpoints.settle()
                    mark.touch()
                    os.kill(os.getpid(), self.signal)
                elif self.asleep:
                    time.sleep(10 * PATIENCE)
            return advance(trainer, batches)

        loop.Trainer.advance = eventful


NOTHING = Event(rank=-1, step=-1, signal=signal.SIGTERM)


@dataclass(frozen=True)
class Ended:
    codes: list[int]  # of each agent, or of the only process
    said: list[str]
    seconds: float


def nodes(command: list[str], folders: list[Path], *options: str, event: Event = NOTHING, ranks: int = 2) -> Ended:
    """What comes of `command` on as many nodes as `folders`, each started in its own, or of one process alone."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    begin, processes, outputs = time.monotonic(), [], []
    for node, folder in enumerate(folders):
        folder.mkdir(parents=True, exist_ok=True)
        outputs.append(folder / f"said_{time.monotonic_ns()}")
        if "--rdzv-backend=c10d" in options:
            options = (*options, f"--rdzv-endpoint=127.0.0.1:{port}")
        torchrun = [
            "-m", "torch.distributed.run", f"--nnodes={len(folders)}", f"--nproc-per-node={ranks}",
            f"--node-rank={node}", "--master-addr=127.0.0.1", f"--master-port={port}", *options,
        ]  # fmt: skip
        whole = [*torchrun, *command] if len(folders) > 1 else command
        prepare = partial(event.prepare, folders[0] / MARK)
        processes.append(SERVER.Process(target=started, args=(whole, folder, outputs[-1], prepare)))
        processes[-1].start()
    for process in processes:
        process.join(PATIENCE)
    hanging = [process for process in processes if process.exitcode is None]
    for process in hanging:
        kill(family(process.pid))
    said = [output.read_text() for output in outputs]
    print(*said, sep="\n----\n")
    assert not hanging, f"not ended in {PATIENCE} s"
    return Ended([process.exitcode for process in processes], said, time.monotonic() - begin)


@pytest.fixture(scope="module")
def overrides(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("prepared")
    (folder / "text.txt").write_text("\n".join(f"{i}: the quick brown fox jumps over dog {i % 13}" for i in range(900)))
    chosen = [
        "experiment=smoke", "data=files", f"data.files=[{folder}/text.txt]", "data.tokenizer_vocab_size=400",
        f"data.path={folder}/tokens", "model.vocab_size=400", "model.hidden_size=32", "model.intermediate_size=48",
        "model.num_layers=2", "model.num_heads=2", "model.context_length=192", "training.steps=12",
        "training.batch_size=4", "training.sequence_length=32", "optimizer.warmup_steps=1", "logging=disabled",
        "logging.every=2", "logging.validation_every=6", "run.checkpoint_every=4", "runtime.device=cpu",
    ]  # fmt: skip
    whole_config.prepare(from_overrides(chosen))
    return chosen


C10D = "--rdzv-backend=c10d"  # else static
HOST = re.escape(socket.gethostname())


@dataclass(frozen=True)
class Straight:
    """A run that nobody disturbed, on two nodes."""

    folder: Path
    ended: Ended


@pytest.fixture(scope="module")
def straight(overrides, tmp_path_factory) -> Straight:
    folder = tmp_path_factory.mktemp("straight") / "shared"
    return Straight(folder, nodes(["-m", "sparsellm.train", *overrides, "run.name=r"], [folder, folder], C10D))


def weights(folder: Path) -> bytes:
    return (folder / "runs/r/checkpoints/step_00000012/hf/model.safetensors").read_bytes()


def rows(folder: Path) -> list[dict]:
    return untimed_rows(folder / "runs/r")


def ended_for(gone: int, ended: Ended) -> set[int]:
    """The ranks that say that they end for that one."""
    sentence = rf"sparsellm: rank (\d) exits: rank {gone} \(host {HOST}, process \d+\) died: it was killed"
    return {int(rank) for rank in re.findall(sentence, "".join(ended.said))}


def test_two_nodes_train_and_evaluate(straight, tmp_path):
    assert straight.ended.codes == [0, 0]
    assert "4 x CPU" in "".join(straight.ended.said)
    assert [row["step"] for row in rows(straight.folder)] == [1, 2, 4, 6, 8, 10, 12]
    write_rows(tmp_path, "piqa", "validation")
    command = ["-m", "sparsellm.evaluate", "checkpoint=runs/r", f"data_dir={tmp_path}", "tasks=[piqa]", "device=cpu"]
    evaluated = nodes(command, [straight.folder, straight.folder])
    assert evaluated.codes == [0, 0]
    assert "piqa" in evaluated.said[0]
    results = json.loads((straight.folder / "runs/r/checkpoints/step_00000012/evaluation/results.json").read_text())
    assert results["tasks"].keys() == {"piqa"}
    assert results["validation"]["loss"] == pytest.approx(rows(straight.folder)[-1]["val_ce"])


def test_torchrun_starts_all_ranks_again_and_they_end_alike(straight, overrides, tmp_path):
    command = ["-m", "sparsellm.train", *overrides, "run.name=r"]
    killed = nodes(command, [tmp_path, tmp_path], C10D, "--max-restarts=1", event=Event(0, 10, signal.SIGKILL))
    assert (tmp_path / MARK).exists()
    assert killed.codes == [0, 0]
    # Rank 1 shares a torchrun with the killed rank, which on a busy machine ends it before it has said so.
    assert {2, 3} <= ended_for(0, killed) <= {1, 2, 3}
    assert "r: resuming after step 8" in "".join(killed.said)
    assert weights(tmp_path) == weights(straight.folder)
    assert differences(rows(tmp_path), rows(straight.folder)) == []


def test_all_end_with_a_killed_rank_and_others_go_on(straight, overrides, tmp_path):
    """Stopped by a signal in between, and with another number of ranks at the end."""
    command = ["-m", "sparsellm.train", *overrides, "run.name=r"]
    killed = nodes(command, [tmp_path, tmp_path], C10D, event=Event(3, 6, signal.SIGKILL, asleep=True))
    assert 0 not in killed.codes
    assert ended_for(3, killed) == {0, 1, 2}
    (tmp_path / MARK).unlink()
    stopped = nodes(command, [tmp_path, tmp_path], event=Event(1, 8, signal.SIGTERM))
    assert 0 not in stopped.codes
    assert "r: resuming after step 4" in stopped.said[0]
    assert re.search("r: stopped after step (8|9|10);", stopped.said[0])
    alone = nodes(command, [tmp_path])
    assert alone.codes == [0]
    assert [row["loss"] for row in rows(tmp_path)] == pytest.approx([row["loss"] for row in rows(straight.folder)])


def test_what_nodes_do_not_share_is_named_on_all_of_them(overrides, tmp_path):
    folders = [tmp_path / "one", tmp_path / "other"]
    command = ["-m", "sparsellm.train", *overrides, "run.name=r"]
    refused = nodes(command, folders)
    assert refused.codes == [1, 1]
    only = rf"rank 2 \(host {HOST}\), rank 3 \(host {HOST}\)"
    assert re.search(rf"sparsellm: run.root=runs on {only} differs from rank 0", refused.said[0])

    (folders[0] / "tokens").symlink_to(Path(next(o for o in overrides if o.startswith("data.path=")).partition("=")[2]))
    refused = nodes([*command, "data.path=tokens"], folders)
    assert refused.codes == [1, 1]
    assert re.search(rf"only on {only}: data.path=tokens .* there are no prepared tokens", refused.said[0])
    differs = "the main rank sees an unfinished run in runs/r, but these ranks see no run in runs/r"
    assert f"only on {only}: {differs}".replace("\\", "") in refused.said[0]
