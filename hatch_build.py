"""The wheel's compiled kernels: with SPARSELLM_KERNELS=PATH in the environment the wheel carries that library.

The library does not depend on the Python version, but on Linux with the C library (glibc) that its symbols require,
which the wheel's tag states. Without SPARSELLM_KERNELS, the wheel contains only sources, and fits any machine.
"""

import os
import platform
import re
from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

LIBRARY = "sparsellm_kernels.so"


class KernelsHook(BuildHookInterface):
    def initialize(self, version: str, build_data: dict) -> None:
        named = os.environ.get("SPARSELLM_KERNELS")
        if version == "editable" or not named:
            return
        path = Path(self.root, named)
        library = path / LIBRARY if path.is_dir() else path
        if not library.is_file():
            raise FileNotFoundError(f"SPARSELLM_KERNELS={named} has no {LIBRARY}: build it with `make kernels`")
        glibc = max(int(minor) for minor in re.findall(rb"\bGLIBC_2\.(\d+)", library.read_bytes()))
        build_data["force_include"][str(library)] = f"sparsellm/kernels/{LIBRARY}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-manylinux_2_{glibc}_{platform.machine()}"
