"""How ranks agree: what one of two receives from the other."""

import ast
import os
import signal
import socket
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from processes import PATIENCE, SERVER, torchrun

from sparsellm.distributed import groups, lifeline
from sparsellm.system.console import warn
from sparsellm.system.errors import SparsellmError

SCRIPT = Path(__file__).with_name("agreeing_ranks.py")


@pytest.mark.slow
def test_two_ranks_hear_of_each_other():
    lines = [line.partition(": ") for line in torchrun(2, SCRIPT).stdout.splitlines() if line]
    heard = {rank: ast.literal_eval(said) for rank, _, said in lines}
    same = [["rank 0", "rank 1"], None, "rank 0 failed", "rank 0", "rank 1 failed"]
    assert heard == {
        "rank 0": [*same, "ValueError: no room"],
        "rank 1": [*same, "MainRankFailed: rank 0 failed: ValueError: no room"],
    }


def meeting(said: Path, rank: int, port: int, dies: str | None) -> None:
    """A rank that was started by hand, as under srun, and may be killed before the ranks have connected."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 2)
    lifeline.ARRIVAL = groups.ARRIVAL = 5

    def die(*_, **__):
        os.kill(os.getpid(), signal.SIGKILL)

    if dies == "at its start":
        die()
    elif dies == "after its store":
        groups.Lifeline = die
    elif dies == "after its port":
        socket.socket.accept = die
    elif dies == "after its lifeline":
        dist.init_process_group = die
    try:
        with groups.process_group("cpu"):
            pass
    except SparsellmError as error:  # as the commands report it
        warn(str(error))
        sys.exit(1)


@pytest.mark.slow
@pytest.mark.parametrize("dies", ["at its start", "after its store", "after its port", "after its lifeline"])
def test_a_rank_ends_with_a_sentence_where_rank_0_is_killed_before_they_have_met(dies, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    arguments = [(tmp_path / str(rank), rank, port, dies if rank == 0 else None) for rank in (0, 1)]
    ranks = [SERVER.Process(target=meeting, args=each) for each in arguments]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(PATIENCE)
    said = (tmp_path / "1").read_text()
    assert [rank.exitcode for rank in ranks] == [-signal.SIGKILL, 1], said
    lines = [line for line in said.splitlines() if line.startswith("sparsellm: ")]
    assert len(lines) == 1
    assert "rank 1" in lines[0]
    assert "Traceback" not in said
