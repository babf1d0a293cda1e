"""How ranks agree: what one of two hears of the other."""

import ast
from pathlib import Path

from processes import torchrun

SCRIPT = Path(__file__).with_name("agreeing_ranks.py")


def test_two_ranks_hear_of_each_other():
    lines = [line.partition(": ") for line in torchrun(2, SCRIPT).stdout.splitlines() if line]
    heard = {rank: ast.literal_eval(said) for rank, _, said in lines}
    same = [["rank 0", "rank 1"], None, "rank 0 failed", "rank 0", "rank 1 failed"]
    assert heard == {
        "rank 0": [*same, "ValueError: no room"],
        "rank 1": [*same, "MainRankFailed: rank 0 failed: ValueError: no room"],
    }
