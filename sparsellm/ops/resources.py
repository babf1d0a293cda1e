"""The resources that ptxas reports for each kernel, from a build's log: registers, shared memory, stack, spills."""

import re
import shutil
import subprocess
from typing import Any, NamedTuple

from sparsellm.system.console import columns


class Resources(NamedTuple):
    """The resources of one function."""

    file: str
    function: str  # demangled, without its arguments
    registers: int | None  # None: the function is not a kernel, but called by one
    shared: int  # bytes known at compile time
    stack: int  # bytes
    spills: int  # bytes of registers stored to and loaded from memory


def resources(log: str) -> list[Resources]:
    """The resources of every function listed in a build log."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    file, function, kernel = "", "", ""
    for line in log.splitlines():
        if match := re.match(r"\[\d+/\d+\] (.+\.(?:cu|cpp))$", line):
            file = match[1]
        elif match := re.search(r"Compiling entry function '(\S+)'", line):
            kernel = match[1]
        elif match := re.search(r"Function properties for (\S+)", line):
            function = match[1]
            found[file, function] = {"registers": None, "shared": 0, "stack": 0, "spills": 0}
        elif match := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            found[file, function] |= {"stack": int(match[1]), "spills": int(match[2]) + int(match[3])}
        elif match := re.search(r"Used (\d+) registers", line):
            shared = re.search(r"(\d+) bytes smem", line)
            found[file, kernel] |= {"registers": int(match[1]), "shared": int(shared[1]) if shared else 0}
    names = _demangled([function for _, function in found])
    return [Resources(file, name, **values) for ((file, _), values), name in zip(found.items(), names, strict=True)]


def _demangled(symbols: list[str]) -> list[str]:
    program = shutil.which("cu++filt") or shutil.which("c++filt")
    if program is None or not symbols:
        return symbols
    done = subprocess.run([program, "-p"], input="\n".join(symbols), capture_output=True, text=True)
    names = done.stdout.splitlines()
    if done.returncode or len(names) != len(symbols):
        return symbols
    return [re.sub(r"\(anonymous namespace\)::|<unnamed>::|sparsellm::", "", name) for name in names]


def table(rows: list[Resources]) -> str:
    """`rows` as text: a heading and aligned columns."""
    heading = ("file", "kernel", "registers", "smem", "stack", "spills")
    return "\n".join(columns([heading, *([str("-" if value is None else value) for value in row] for row in rows)]))
