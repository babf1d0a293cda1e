"""The token counts at which the engines change their algorithm are defined in C++ and in Python, and agree."""

import re
from pathlib import Path

from sparsellm.ops import borders

KERNELS = Path(__file__).parents[2] / "kernels"


def test_the_kernels_have_the_same_borders():
    text = (KERNELS / "engines.h").read_text()
    found = {name: int(value) for name, value in re.findall(r"constexpr int k(\w+Tokens) = (\d+);", text)}
    assert found == {"FewTokens": borders.FEW_TOKENS, "ManyTokens": borders.MANY_TOKENS}


def test_no_other_source_of_the_kernels_has_the_number():
    for path in (*KERNELS.rglob("*.h"), *KERNELS.rglob("*.cu*"), *KERNELS.rglob("*.cpp")):
        code = re.sub(r"//.*", "", path.read_text())
        assert (str(borders.MANY_TOKENS) in code) == (path.name == "engines.h"), path


def test_the_lists_have_room_for_all_or_for_so_many_of_each_token():
    assert borders.capacity(1024, 4096, 1) == 1024 * 4096
    assert borders.capacity(1024, 4104, 96) == 1024 * 96
    assert borders.capacity(100_000, 64, 96) == 100_000 * 64
