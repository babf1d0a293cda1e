"""Builds, caches and loads the CUDA kernels of kernels/.

    load()       makes torch.ops.sparsellm_cuda.* callable, building first if need be; raises KernelsUnavailable
    available()  whether load() works here, and if not why; says so once on rank 0, since PyTorch then computes instead
    loaded()     whether load() has succeeded in this process; never builds
    build()      the folder of the built library, from the cache or new: needs nvcc, not a GPU
    python -m sparsellm.ops.build  (make kernels) builds ahead of time and reports each kernel's resources

Every kernels/**/*.cu is compiled on its own for sm_90a, kernels/bindings.cpp against torch's stable ABI, and all are
linked with the static CUDA runtime. The library lies in ~/.cache/sparsellm/kernels/<key>/ (SPARSELLM_CACHE_DIR takes
the place of ~/.cache/sparsellm), the key a hash of all sources, flags and the versions of torch and nvcc. A build runs
in a folder of its own that takes its name only when complete, under a lock that the system releases when its holder
dies: of many ranks one builds while the others wait, and an interrupted build leaves nothing that a later one takes.
"""

import fcntl
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

PACKAGE = Path(__file__).resolve().parents[1]
# In a checkout the kernels stand beside the package; a wheel carries them inside it.
KERNELS = PACKAGE / "kernels" if (PACKAGE / "kernels").is_dir() else PACKAGE.parent / "kernels"
SOURCES = {".cu", ".cuh", ".h", ".cpp"}
LIBRARY, LOG = "sparsellm_kernels.so", "build.log"
TOOLKIT = Path("/usr/local/cuda")  # where nvcc is sought last

CAPABILITY = (9, 0)  # Hopper: the kernels use instructions (wgmma) that no other generation has
COMPILE = ["-std=c++17", "-O3", "-gencode=arch=compute_90a,code=sm_90a", "--expt-relaxed-constexpr", "-I."]
REPORT = ["-Xptxas", "-v", "-lineinfo"]
POSITION_INDEPENDENT = ["-Xcompiler", "-fPIC"]
# The stable ABI of torch 2.10, so that one set of headers suits every later torch.
BINDINGS = ["-std=c++17", "-O2", "-I.", "-DUSE_CUDA", "-DTORCH_TARGET_VERSION=0x020a000000000000"]
# Tensor maps come through cudaGetDriverEntryPoint: no -lcuda.
LINK = ["-shared", "-cudart", "static", "-Xlinker", "--no-undefined"]
LIBRARIES = ["-ltorch_cpu", "-ltorch_cuda"]

_lock = threading.Lock()
_failure: str | None = None
_loaded = False
_said = False


class KernelsUnavailable(RuntimeError):
    """The kernels cannot run here; the message is one sentence: what is missing, and what to do."""


def load() -> None:
    """Make torch.ops.sparsellm_cuda.* callable. Tries once per process; raises KernelsUnavailable."""
    global _failure, _loaded
    with _lock:
        if _loaded:
            return
        if _failure is not None:
            raise KernelsUnavailable(_failure)
        try:
            _check_device()
            library = build() / LIBRARY
            try:
                torch.ops.load_library(str(library))
            except OSError as error:
                raise KernelsUnavailable(
                    f"the built kernels do not load ({error}): remove {library.parent} to build them anew"
                ) from error
        except KernelsUnavailable as error:
            _failure = str(error)
            raise
        _loaded = True


def loaded() -> bool:
    """Whether the kernels are loaded in this process."""
    return _loaded


def available() -> tuple[bool, str]:
    """(True, "") if the kernels run here, else (False, why), which rank 0 also prints, once per process."""
    global _said
    try:
        load()
    except KernelsUnavailable as error:
        if not _said and os.environ.get("RANK", "0") == "0":
            _say(f"PyTorch computes the feedforward layers, for the CUDA kernels are unavailable: {error}")
        _said = True
        return False, str(error)
    return True, ""


def _check_device() -> None:
    if torch.version.cuda is None:
        raise KernelsUnavailable(f"torch {torch.__version__} is built without CUDA: install a CUDA build of torch")
    if not torch.cuda.is_available():
        raise KernelsUnavailable("no CUDA device is visible to torch: check nvidia-smi and CUDA_VISIBLE_DEVICES")
    capability = torch.cuda.get_device_capability()
    if capability != CAPABILITY:
        major, minor = capability
        raise KernelsUnavailable(
            f"the GPU is a {torch.cuda.get_device_name()} of compute capability {major}.{minor}: the kernels need a"
            " Hopper GPU (9.0), such as an H100 or H200"
        )


def build() -> Path:
    """The folder with LIBRARY and LOG, from the cache if it is there; raises KernelsUnavailable."""
    nvcc = _nvcc()
    key = _key(nvcc)
    folder = _cache() / key
    if (folder / LIBRARY).is_file():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _exclusive(folder) as waited:
            if not (folder / LIBRARY).is_file():
                _build_into(folder, nvcc, waited)
    except OSError as error:
        raise KernelsUnavailable(
            f"the kernels cannot be built in {folder.parent} ({error}): set SPARSELLM_CACHE_DIR to a folder that can"
            " be written and locked"
        ) from error
    return folder


def _build_into(folder: Path, nvcc: Path, waited: bool) -> None:
    """Build, holding the lock of `folder`. Having `waited` for a build that failed, fail as it did."""
    failed = folder.with_name(f"{folder.name}.failed.log")
    if waited and failed.is_file():
        raise _compile_error(failed)
    failed.unlink(missing_ok=True)
    for abandoned in folder.parent.glob(f"{folder.name}.build.*"):
        shutil.rmtree(abandoned)
    _say(f"building the CUDA kernels into {folder}: a minute or two, once")
    private = Path(tempfile.mkdtemp(prefix=f"{folder.name}.build.", dir=folder.parent))
    try:
        done, log = _ninja(private, nvcc, link=True)
        (private / LOG).write_text(log)
        if not done:
            (private / LOG).rename(failed)
            raise _compile_error(failed)
        for path in private.iterdir():
            if path.name not in (LIBRARY, LOG):
                path.unlink()
        private.rename(folder)
    finally:
        shutil.rmtree(private, ignore_errors=True)


@contextmanager
def _exclusive(folder: Path) -> Iterator[bool]:
    """One process at a time builds `folder`; yields whether this one had to wait for another."""
    with folder.with_name(f"{folder.name}.lock").open("w") as file:
        waited = False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waited = True
            _say(f"another process is building the CUDA kernels into {folder}; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield waited


def _compile_error(log: Path) -> KernelsUnavailable:
    last = "\n".join(log.read_text().strip().splitlines()[-12:])
    return KernelsUnavailable(f"the kernels do not compile (the whole log is {log}), the last lines being:\n{last}")


def _cache() -> Path:
    root = os.environ.get("SPARSELLM_CACHE_DIR")
    return (Path(root) if root else Path.home() / ".cache" / "sparsellm").absolute() / "kernels"


def _nvcc() -> Path:
    home = os.environ.get("CUDA_HOME")
    places = [Path(home) / "bin" / "nvcc"] if home else []
    places += [Path(found)] if (found := shutil.which("nvcc")) else []
    places.append(TOOLKIT / "bin" / "nvcc")
    for nvcc in places:
        if nvcc.is_file():
            return nvcc
    raise KernelsUnavailable(
        f"no nvcc in CUDA_HOME ({home or 'not set'}), PATH or {TOOLKIT}: install the CUDA toolkit (13.0 is the version"
        " tested), or set CUDA_HOME to where it is"
    )


def _ninja_program() -> str:
    beside = str(Path(sys.executable).parent)  # not on PATH unless the environment is activated
    program = shutil.which("ninja", path=beside) or shutil.which("ninja")
    if program is None:
        raise KernelsUnavailable("no ninja to build the kernels with: `pip install ninja`")
    return program


def _sources() -> list[Path]:
    """Every source, relative to KERNELS."""
    sources = sorted(p.relative_to(KERNELS) for p in KERNELS.rglob("*") if p.suffix in SOURCES)
    if not any(p.suffix == ".cu" for p in sources):
        raise KernelsUnavailable(f"{KERNELS} holds no .cu file: the installation is incomplete, install sparsellm anew")
    return sources


def _key(nvcc: Path) -> str:
    digest = hashlib.sha256()
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    for part in (COMPILE, REPORT, POSITION_INDEPENDENT, BINDINGS, LINK, LIBRARIES, torch.__version__, version):
        digest.update(repr(part).encode())
    for source in _sources():
        content = (KERNELS / source).read_bytes()
        digest.update(f"{source.as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]


def _ninja(folder: Path, nvcc: Path, link: bool) -> tuple[bool, str]:
    """Compile every source into `folder`, and link there if asked: (whether all went well, the log)."""
    torch_folder = Path(torch.__file__).parent
    includes = ["-isystem", str(torch_folder / "include")]
    rules = {
        "cuda": [*COMPILE, *REPORT, *POSITION_INDEPENDENT, "-c"],
        "bindings": [*BINDINGS, *POSITION_INDEPENDENT, *includes, "-c"],
        "link": [*LINK, "-L", str(torch_folder / "lib")],
    }
    lines = [f"builddir = {_escaped(folder)}"]
    for name, flags in rules.items():
        command = shlex.join([str(nvcc), *flags]).replace("$", "$$") + " $in -o $out"
        if name == "link":
            command += " " + " ".join(LIBRARIES)  # after the objects that need them
        # The log names the file that each compilation's messages belong to by its description.
        description = "link" if name == "link" else "$in"
        lines += [f"rule {name}", f"  command = {command}", f"  description = {description}"]
    objects = []
    for source in _sources():
        if source.suffix in (".cu", ".cpp"):
            objects.append(_escaped(folder / ("__".join(source.parts) + ".o")))
            rule = "cuda" if source.suffix == ".cu" else "bindings"
            lines.append(f"build {objects[-1]}: {rule} {_escaped(source)}")
    if link:
        lines.append(f"build {_escaped(folder / LIBRARY)}: link {' '.join(objects)}")
    script = folder / "build.ninja"
    script.write_text("\n".join(lines) + "\n")
    # Not ninja's own terminal mode: lines that overwrite each other have no place in a log.
    environment = {name: value for name, value in os.environ.items() if name != "NINJA_STATUS"}
    finished = subprocess.run(
        [_ninja_program(), "-f", script], cwd=KERNELS, env=environment, text=True, errors="replace",
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    return finished.returncode == 0, finished.stdout


def _escaped(path: Path) -> str:
    return re.sub(r"([$ :])", r"$\1", str(path))


class Resources(NamedTuple):
    """What ptxas says of one function."""

    file: str
    function: str  # demangled, without its arguments
    registers: int | None  # None: not a kernel, but a function that one calls
    shared: int  # bytes known at compile time
    stack: int  # bytes
    spills: int  # bytes stored and loaded


def resources(log: str) -> list[Resources]:
    """The resources of every function in the log of a build."""
    found: dict[tuple[str, str], dict[str, int | None]] = {}
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
    """The rows as aligned text under a heading."""
    heading = ("file", "kernel", "registers", "smem", "stack", "spills")
    cells = [heading, *([str("-" if value is None else value) for value in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(heading))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in cells)


def main() -> int:
    """Build, or without a CUDA build of torch compile only; 0 if all compiles and no kernel spills registers."""
    try:
        if torch.version.cuda is None:
            with tempfile.TemporaryDirectory() as folder:
                done, log = _ninja(Path(folder), _nvcc(), link=False)
            if not done:
                _say(f"the kernels do not compile:\n{log.strip()}")
                return 1
            end = "compiled but not linked, for this torch is built without CUDA"
        else:
            folder = build()
            log = (folder / LOG).read_text()
            end = f"built in {folder}"
    except KernelsUnavailable as error:
        _say(str(error))
        return 1
    rows = resources(log)
    print(table(rows))
    for line in log.splitlines():
        if "warning" in line or "Performance Loss" in line:
            print(line)
    print(f"The kernels are {end}.")
    spilling = [row.function for row in rows if row.spills]
    if spilling:
        _say(f"registers spill to memory in {', '.join(spilling)}: no kernel should")
    return 1 if spilling else 0


def _say(message: str) -> None:
    print(f"sparsellm: {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
