"""Compiles the sources in kernels/ to one library: finds nvcc, sets the flags, and marks the library with a build ID.

Every kernels/**/*.cu is compiled on its own for sm_90a, and the .cpp files against torch's stable ABI; all are linked
with the static CUDA runtime. Compiling needs nvcc, but no GPU and no CUDA build of torch.

The version of torch is not part of the build ID, because the stable ABI lets one library serve torch 2.10 and later.
The version of nvcc is not part of it either, so that machines without nvcc find what others built into a shared cache.
"""

import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from sparsellm.system.errors import SparsellmError

PACKAGE = Path(__file__).resolve().parents[1]
# In a checkout, kernels/ is next to the package; in a wheel, it is inside the package.
KERNELS = PACKAGE / "kernels" if (PACKAGE / "kernels").is_dir() else PACKAGE.parent / "kernels"
SOURCES = {".cu", ".cuh", ".h", ".cpp"}
LIBRARY = "sparsellm_kernels.so"
TOOLKIT = Path("/usr/local/cuda")

INCLUDES = ["-I.", "-Iportable", "-Ism90"]
COMPILE = ["-std=c++17", "-O3", "-gencode=arch=compute_90a,code=sm_90a", "--expt-relaxed-constexpr", *INCLUDES]
REPORT = ["-Xptxas", "-v", "-lineinfo"]
POSITION_INDEPENDENT = ["-Xcompiler", "-fPIC"]
# Restricts calls to the stable ABI of torch 2.10, so that one library serves every later torch.
BINDINGS = ["-std=c++17", "-O2", "-I.", "-DUSE_CUDA", "-DTORCH_TARGET_VERSION=0x020a000000000000"]
# No -lcuda: the one driver function that is called is looked up at run time (cudaGetDriverEntryPointByVersion).
LINK = ["-shared", "-cudart", "static", "-Xlinker", "--no-undefined"]
LIBRARIES = ["-ltorch_cpu", "-ltorch_cuda"]

# A CPU build of torch has no libtorch_cuda.so to link with. So every build links with a stub that defines the functions
# of libtorch_cuda.so that the bindings call. When the kernels are loaded, torch's own library provides these functions.
TORCH_CUDA = "libtorch_cuda.so"
CALLED = ("aoti_torch_get_current_cuda_stream", "aoti_torch_cuda_mm_out", "aoti_torch_cuda_addmm_out")
STAND_IN = "".join(f'extern "C" int {name}() {{ return 1; }}\n' for name in CALLED)
LINK_STAND_IN = ["-shared", "-cudart", "none", "-Xlinker", f"-soname={TORCH_CUDA}"]


class KernelsUnavailable(SparsellmError, RuntimeError):
    """The kernels cannot run here. The message is one sentence: what is missing and what to do."""


def require_gpu() -> None:
    """Raise KernelsUnavailable unless torch can use a CUDA GPU."""
    if torch.version.cuda is None:
        raise KernelsUnavailable(f"torch {torch.__version__} is built without CUDA: install a CUDA build of torch")
    if not torch.cuda.is_available():
        raise KernelsUnavailable("no CUDA device is visible to torch: check nvidia-smi and CUDA_VISIBLE_DEVICES")


def nvcc() -> Path:
    """The path of the CUDA compiler. If there is none, raises KernelsUnavailable, which lists the paths searched."""
    home = os.environ.get("CUDA_HOME")
    for path in (home and f"{home}/bin/nvcc", shutil.which("nvcc"), TOOLKIT / "bin" / "nvcc"):
        if path and Path(path).is_file():
            return Path(path)
    if from_pip := _nvcc_from_pip():
        return from_pip
    raise KernelsUnavailable(
        f"no nvcc in CUDA_HOME ({home or 'not set'}), PATH, {TOOLKIT} or pip's packages: install the CUDA toolkit (13.0"
        " is the version tested) or `pip install nvidia-cuda-nvcc nvidia-cuda-cccl`, or install a wheel of sparsellm"
        " that holds the compiled kernels (`make wheel`, where there is an nvcc)"
    )


def _nvcc_from_pip() -> Path | None:
    """The nvcc of the pip package nvidia-cuda-nvcc, in site-packages/nvidia/cu13/bin; None if it is not installed.

    Raises KernelsUnavailable if a header that nvcc needs from another package is missing.
    """
    namespace = importlib.util.find_spec("nvidia")
    folders = [] if namespace is None else [Path(folder) for folder in namespace.submodule_search_locations or ()]
    found = sorted(place for folder in folders for place in folder.glob("cu*/bin/nvcc"))
    if not found:
        return None
    root = found[-1].parents[1]
    if not any((root / "include" / folder / "nv" / "target").is_file() for folder in ("", "cccl")):
        raise KernelsUnavailable(
            f"{found[-1]} lacks the header nv/target, which cuda_fp16.h includes: `pip install nvidia-cuda-cccl`"
        )
    return found[-1]


def build_id() -> str:
    """The hash of all sources and flags, 40 hexadecimal digits, which the linker writes into the library as its ELF
    build ID."""
    digest = hashlib.sha256()
    for part in (COMPILE, REPORT, POSITION_INDEPENDENT, BINDINGS, LINK, LIBRARIES, STAND_IN, LINK_STAND_IN):
        digest.update(repr(part).encode())
    for source in _sources():
        content = (KERNELS / source).read_bytes()
        digest.update(f"{source.as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:40]


def fits(library: Path) -> bool:
    """Whether `library` was made from these sources with these flags, so that this Python code may call it."""
    return b"GNU\0" + bytes.fromhex(build_id()) in library.read_bytes()


def _sources() -> list[Path]:
    """The path of every source, relative to KERNELS."""
    sources = sorted(p.relative_to(KERNELS) for p in KERNELS.rglob("*") if p.suffix in SOURCES)
    if not any(p.suffix == ".cu" for p in sources):
        raise KernelsUnavailable(
            f"{KERNELS} contains no .cu file, so the installation is incomplete: reinstall sparsellm"
        )
    return sources


def compile_into(folder: Path, nvcc: Path) -> tuple[bool, str]:
    """Compile every source into `folder`, and link LIBRARY there. Returns (whether it succeeded, the log)."""
    torch_folder = Path(torch.__file__).parent
    includes = ["-isystem", str(torch_folder / "include")]
    # The linker's search path, in order. The stub in `folder` comes before torch's own libtorch_cuda.so. The second
    # folder is for pip's nvcc, which does not search its own lib folder.
    folders = [folder, nvcc.parents[1] / "lib", torch_folder / "lib"]
    rules = {
        "cuda": [*COMPILE, *REPORT, *POSITION_INDEPENDENT, "-c"],
        "bindings": [*BINDINGS, *POSITION_INDEPENDENT, *includes, "-c"],
        "stand_in": [*POSITION_INDEPENDENT, *LINK_STAND_IN],
        "link": [*LINK, "-Xlinker", f"--build-id=0x{build_id()}", *(f"-L{place}" for place in folders)],
    }
    lines = [f"builddir = {_escaped(folder)}"]
    for name, flags in rules.items():
        command = shlex.join([str(nvcc), *flags]).replace("$", "$$") + " $in -o $out"
        if name == "link":
            command += " " + " ".join(LIBRARIES)  # the linker needs libraries after the objects that use them
        # Ninja logs each command's description before the command's messages.
        description = "link" if name == "link" else "$in"
        lines += [f"rule {name}", f"  command = {command}", f"  description = {description}"]
    objects = []
    for source in _sources():
        if source.suffix in (".cu", ".cpp"):
            objects.append(_escaped(folder / ("__".join(source.parts) + ".o")))
            rule = "cuda" if source.suffix == ".cu" else "bindings"
            lines.append(f"build {objects[-1]}: {rule} {_escaped(source)}")
    stand_in = folder / "torch_cuda.cpp"
    stand_in.write_text(STAND_IN)
    lines.append(f"build {_escaped(folder / TORCH_CUDA)}: stand_in {_escaped(stand_in)}")
    inputs = f"{' '.join(objects)} | {_escaped(folder / TORCH_CUDA)}"
    lines.append(f"build {_escaped(folder / LIBRARY)}: link {inputs}")
    script = folder / "build.ninja"
    script.write_text("\n".join(lines) + "\n")
    # NINJA_STATUS would change the prefix of the descriptions, from which sparsellm.ops.resources reads file names.
    environment = {name: value for name, value in os.environ.items() if name != "NINJA_STATUS"}
    finished = subprocess.run(
        [_ninja_program(), "-f", script], cwd=KERNELS, env=environment, text=True, errors="replace",
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    return finished.returncode == 0, finished.stdout


def _ninja_program() -> str:
    folder = str(Path(sys.executable).parent)  # the programs of a virtual environment that is not active are only here
    program = shutil.which("ninja", path=folder) or shutil.which("ninja")
    if program is None:
        raise KernelsUnavailable("no ninja to build the kernels with: `pip install ninja`")
    return program


def _escaped(path: Path) -> str:
    return re.sub(r"([$ :])", r"$\1", str(path))
