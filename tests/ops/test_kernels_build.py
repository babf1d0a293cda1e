"""The build of the kernels: each compiles without spills, and the cache survives many ranks and kills.

Tests of the cache use a shell script as compiler, so that they are quick and need no CUDA.
"""

import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from kernel_stand_ins import LIMITS

from sparsellm.ops import backend, build, compiler
from sparsellm.ops.build import NAMED, KernelsUnavailable, NamedKernelsUnusable
from sparsellm.ops.compiler import KERNELS, LIBRARY
from sparsellm.ops.resources import resources

ROOT = Path(__file__).parents[2]
SOURCES = sorted(p.relative_to(KERNELS).as_posix() for p in KERNELS.rglob("*.cu"))
HOST_SOURCES = sorted(p.relative_to(KERNELS).as_posix() for p in KERNELS.rglob("*.cpp"))


@pytest.fixture
def nvcc():
    try:
        return compiler.nvcc()
    except KernelsUnavailable as reason:
        if os.environ.get("SPARSELLM_NVCC") == "required":  # as in .ci/run
            raise
        pytest.skip(str(reason))


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES)
def test_every_kernel_compiles_for_hopper_without_spills(source, nvcc, tmp_path):
    """With -cubin, nvcc checks a source's host code, too, but makes no machine code of it, which halves the time."""
    command = [nvcc, "-cubin", *compiler.COMPILE, "-Xptxas", "-v", "--keep", "--keep-dir", tmp_path, source]
    done = subprocess.run(
        [*command, "-o", tmp_path / "kernel.cubin"],
        cwd=KERNELS,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    found = resources(done.stdout)
    assert found, done.stdout
    assert [row for row in found if row.spills] == []
    assert "Performance Loss" not in done.stdout  # ptxas would warn that it serializes a chain of wgmma
    (ptx,) = tmp_path.glob("*.ptx")
    assert split_stores(ptx.read_text()) == []  # ptx::st_global_v4 stores 16 bytes at once


PORTABLE = [
    pytest.param(source, marks=pytest.mark.slow if source == "portable/tile/operands.cu" else pytest.mark.exhaustive)
    for source in SOURCES
    if source.startswith("portable/")
]


@pytest.mark.parametrize("source", PORTABLE)
def test_a_portable_kernel_compiles_for_blackwell_without_a_header_of_hopper(source, nvcc, tmp_path):
    flags = [flag for flag in compiler.COMPILE if flag != "-Ism90" and "gencode" not in flag]
    targets = [f"-gencode=arch=compute_{name},code=sm_{name}" for name in ("100a", "120a")]
    done = subprocess.run(
        [nvcc, "-fatbin", *flags, *targets, source, "-o", tmp_path / "kernel.fatbin"],
        cwd=KERNELS, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


def split_stores(ptx: str) -> list[str]:
    """Four adjacent words stored one by one: what nvcc makes of 16 bytes whose alignment it does not see."""
    stores = re.findall(r"st\.global\.[ubf]32\s+\[(%rd\d+)(?:\+(-?\d+))?\], (%\w+);", ptx)
    runs = zip(*(stores[i:] for i in range(4)), strict=False)
    return [
        f"{run[0][0]}+{run[0][1] or 0}"
        for run in runs
        if len({base for base, _, _ in run}) == 1
        and [int(at or 0) - int(run[0][1] or 0) for _, at, _ in run] == [0, 4, 8, 12]
        and len({value for _, _, value in run}) > 1  # one word stored four times may be a clear
    ]


def test_split_stores_are_found():
    words = [f"st.global.u32 [%rd8+{at}], %r{value};" for at, value in ((-8, 1), (-4, 2), (0, 3), (4, 4))]
    assert split_stores("\n".join(words).replace("+0]", "]")) == ["%rd8+-8"]
    assert split_stores("\n".join(words[:3])) == []
    assert split_stores("st.global.v4.b32 [%rd8], {%r1, %r2, %r3, %r4};") == []


@pytest.mark.slow
@pytest.mark.parametrize("source", HOST_SOURCES)
def test_host_code_compiles(source, nvcc, tmp_path):
    command = [nvcc, "-c", *compiler.BINDINGS, "-isystem", Path(torch.__file__).parent / "include"]
    done = subprocess.run(
        [*command, "-Xcompiler", "-fsyntax-only", source, "-o", tmp_path / "host.o"],
        cwd=KERNELS, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


def test_there_are_sources_to_compile():
    assert SOURCES
    assert "bindings.cpp" in HOST_SOURCES


FAKE_NVCC = """#!/bin/sh
if [ "$1" = --version ]; then echo "fake nvcc 1"; exit; fi
for argument; do
    case "$argument" in
        *.cu | *.cpp) source=$argument; if grep error "$source"; then exit 1; fi;;
    esac
    if [ "$previous" = -o ]; then out=$argument; fi
    previous=$argument
done
if [ "${source##*/}" = torch_cuda.cpp ]; then echo stand-in > "$out"; exit; fi
echo "${source:-link}" >> "$FAKE_FOLDER/calls"
if [ -z "$source" ]; then
    touch "$FAKE_FOLDER/linking"
    while [ -e "$FAKE_FOLDER/hold" ]; do sleep 0.05; done
fi
echo made > "$out"
"""


class Workshop:
    """A small compiler, two sources and a cache, made for the tests."""

    def __init__(self, folder: Path):
        self.folder, self.kernels, self.cache = folder, folder / "kernels", folder / "cache" / "kernels"
        self.nvcc = folder / "cuda" / "bin" / "nvcc"
        self.nvcc.parent.mkdir(parents=True)
        self.nvcc.write_text(FAKE_NVCC)
        self.nvcc.chmod(self.nvcc.stat().st_mode | stat.S_IXUSR)
        (self.kernels / "row").mkdir(parents=True)
        (self.kernels / "row" / "a b.cu").write_text("kernel")
        (self.kernels / "bindings.cpp").write_text("bindings")
        self.environment = {
            "CUDA_HOME": str(folder / "cuda"), "SPARSELLM_CACHE_DIR": str(folder / "cache"), "FAKE_FOLDER": str(folder),
        }  # fmt: skip

    def calls(self) -> list[str]:
        calls = self.folder / "calls"
        return sorted(calls.read_text().splitlines()) if calls.exists() else []

    def process(self) -> subprocess.Popen:
        """Another process that builds, in a session of its own."""
        code = (
            "from pathlib import Path\nfrom sparsellm.ops import build\n"
            f"build.compiler.KERNELS = Path({str(self.kernels)!r})\n"
            "try:\n    print('built', build.build())\nexcept build.KernelsUnavailable as error:\n    print(error)\n"
        )
        return subprocess.Popen(
            [sys.executable, "-uc", code], env=os.environ | self.environment, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def hold(self) -> Path:
        """While the file exists, linking does not end."""
        hold = self.folder / "hold"
        hold.touch()
        return hold

    def wait_until_linking(self) -> None:
        for _ in range(600):
            if (self.folder / "linking").exists():
                return
            time.sleep(0.05)
        pytest.fail("nothing was linked in 30 s")


@pytest.fixture
def workshop(tmp_path, monkeypatch):
    if not (shutil.which("ninja") or shutil.which("ninja", path=str(Path(sys.executable).parent))):
        pytest.skip("no ninja")
    workshop = Workshop(tmp_path)
    monkeypatch.setattr(compiler, "KERNELS", workshop.kernels)
    monkeypatch.delenv(NAMED, raising=False)
    for name, value in workshop.environment.items():
        monkeypatch.setenv(name, value)
    return workshop


ALL = ["bindings.cpp", "link", "row/a b.cu"]


def test_builds_once_and_then_takes_the_cache(workshop, capsys):
    library = build.build()
    assert library.parents[1] == workshop.cache
    assert sorted(p.name for p in library.parent.iterdir()) == ["build.log", "sparsellm_kernels.so"]
    assert workshop.calls() == ALL
    assert "building the CUDA kernels" in capsys.readouterr().err
    assert build.build() == library
    assert workshop.calls() == ALL
    assert capsys.readouterr().err == ""


def test_another_source_or_flag_is_another_build(workshop, monkeypatch):
    seen = [compiler.build_id()]
    assert compiler.build_id() == seen[0]
    (workshop.kernels / "row" / "a b.cu").write_text("another kernel")
    seen.append(compiler.build_id())
    (workshop.kernels / "row" / "tile.cuh").write_text("header")
    seen.append(compiler.build_id())
    monkeypatch.setattr(compiler, "COMPILE", [*compiler.COMPILE, "-G"])
    seen.append(compiler.build_id())
    assert len(set(seen)) == 4
    (workshop.kernels / "README.md").write_text("text")
    assert compiler.build_id() == seen[-1]


def test_another_torch_takes_the_same_build(workshop, monkeypatch):
    library = build.build()
    monkeypatch.setattr(torch, "__version__", "9.9")
    assert build.library() == library
    assert workshop.calls() == ALL


def test_without_nvcc_the_cache_serves(workshop, monkeypatch):
    library = build.build()
    without_nvcc(monkeypatch)
    assert build.library() == library


def without_nvcc(monkeypatch, *pip: Path):
    """No compiler except one in the site-packages of `pip`."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(compiler, "TOOLKIT", Path("/nowhere"))
    namespace = SimpleNamespace(submodule_search_locations=[str(place / "nvidia") for place in pip])
    monkeypatch.setattr(compiler.importlib.util, "find_spec", lambda name: namespace if pip else None)


@pytest.mark.slow
def test_of_two_processes_one_builds_and_the_other_waits(workshop):
    hold = workshop.hold()
    first = workshop.process()
    workshop.wait_until_linking()
    second = workshop.process()
    assert "another process is building the CUDA kernels" in second.stderr.readline()
    hold.unlink()
    outputs = [process.communicate(timeout=60)[0] for process in (first, second)]
    assert outputs[0] == outputs[1]
    assert outputs[0].startswith("built ")
    assert workshop.calls() == ALL


def test_who_waited_for_a_build_that_failed_fails_as_it_did(workshop, tmp_path):
    folder = workshop.cache / "key"
    workshop.cache.mkdir(parents=True)
    failed = workshop.cache / "key.failed.log"
    failed.write_text("row/a.cu(3): error: expected a ;")
    with pytest.raises(KernelsUnavailable, match="expected a ;"):
        build._build_into(folder, workshop.nvcc, waited=True)
    assert workshop.calls() == []
    build._build_into(folder, workshop.nvcc, waited=False)
    assert workshop.calls() == ALL
    assert not failed.exists()


@pytest.mark.slow
def test_a_killed_build_leaves_nothing_that_a_later_one_takes(workshop):
    hold = workshop.hold()
    process = workshop.process()
    workshop.wait_until_linking()
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    assert not list(workshop.cache.glob("*/" + LIBRARY))
    assert len(list(workshop.cache.glob("*.build.*"))) == 1
    hold.unlink()
    assert build.build().read_text() == "made\n"
    assert not list(workshop.cache.glob("*.build.*"))


def test_a_compile_error_names_its_log_and_shows_the_end_of_it(workshop):
    (workshop.kernels / "row" / "a b.cu").write_text("line 7: error: no such thing")
    with pytest.raises(KernelsUnavailable, match="do not compile") as raised:
        build.build()
    assert "line 7: error: no such thing" in str(raised.value)
    (log,) = workshop.cache.glob("*.failed.log")
    assert str(log) in str(raised.value)
    assert "FAILED" in log.read_text()
    assert not list(workshop.cache.glob("*.build.*"))
    (workshop.kernels / "row" / "a b.cu").write_text("kernel")
    build.build()


def test_a_cache_that_cannot_be_written_is_named(workshop, monkeypatch):
    (workshop.folder / "file").touch()
    monkeypatch.setenv("SPARSELLM_CACHE_DIR", str(workshop.folder / "file"))
    with pytest.raises(KernelsUnavailable, match=r"cannot be built in .*file/kernels.*set SPARSELLM_CACHE_DIR"):
        build.build()


def test_a_missing_compiler_is_named_with_every_place_it_was_sought(workshop, monkeypatch):
    without_nvcc(monkeypatch)
    with pytest.raises(
        KernelsUnavailable, match=r"no nvcc in CUDA_HOME \(not set\), PATH, /nowhere or pip's .*make wheel"
    ):
        build.library()
    monkeypatch.setenv("CUDA_HOME", "/opt/cuda")
    with pytest.raises(KernelsUnavailable, match=r"CUDA_HOME \(/opt/cuda\)"):
        build.library()


def test_pips_nvcc_is_found_and_its_missing_headers_are_named(workshop, monkeypatch):
    root = workshop.folder / "site-packages" / "nvidia" / "cu13"
    shutil.copytree(workshop.nvcc.parent, root / "bin")
    without_nvcc(monkeypatch, root.parents[1])
    with pytest.raises(KernelsUnavailable, match=r"lacks the header nv/target.*pip install nvidia-cuda-cccl"):
        build.build()
    (root / "include" / "nv").mkdir(parents=True)
    (root / "include" / "nv" / "target").touch()
    assert compiler.nvcc() == root / "bin" / "nvcc"


def test_missing_sources_are_named(workshop):
    (workshop.kernels / "row" / "a b.cu").unlink()
    with pytest.raises(KernelsUnavailable, match=r"contains no \.cu file"):
        build.build()


@pytest.fixture
def fresh(monkeypatch):
    monkeypatch.setattr(build, "_failure", None)
    monkeypatch.setattr(build, "_loaded", False)
    monkeypatch.setattr(backend, "_said", set())


@pytest.mark.usefixtures("fresh")
class TestLoading:
    def machine(self, monkeypatch, cuda="13.0", present=True, capability=(9, 0)):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: present)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")

    @pytest.mark.parametrize(
        ("machine", "message"),
        [
            ({"cuda": None}, r"torch .* is built without CUDA: install"),
            ({"present": False}, "no CUDA device is visible to torch: check"),
            ({"capability": (8, 0)}, r"the GPU is a NVIDIA A100 of compute capability 8\.0: .* Hopper GPU \(9\.0\)"),
        ],
    )
    def test_another_machine_is_refused_in_one_sentence(self, monkeypatch, machine, message):
        self.machine(monkeypatch, **machine)
        for _ in range(2):
            with pytest.raises(KernelsUnavailable, match=message):
                build.load()
        assert not build.loaded()

    def test_checking_compiles_and_loads_nothing(self, monkeypatch, workshop):
        self.machine(monkeypatch)
        build.check()
        without_nvcc(monkeypatch)
        with pytest.raises(KernelsUnavailable, match="no nvcc in CUDA_HOME"):
            build.check()
        assert workshop.calls() == []
        assert not build.loaded()

    @pytest.mark.usefixtures("workshop")
    def test_checking_finds_what_the_machine_lacks(self, monkeypatch):
        self.machine(monkeypatch, capability=(8, 0))
        with pytest.raises(KernelsUnavailable, match="need a Hopper GPU"):
            build.check()

    def test_loads_once(self, monkeypatch, workshop):
        self.machine(monkeypatch)
        libraries = []
        monkeypatch.setattr(torch.ops, "load_library", libraries.append)
        monkeypatch.setattr(torch.ops, "sparsellm_cuda", SimpleNamespace(limit=LIMITS.get), raising=False)
        build.load()
        assert backend.available() == (True, "")
        assert build.loaded()
        assert libraries == [str(build.build())]

    def test_a_library_whose_borders_are_others_is_refused(self, monkeypatch, workshop):
        self.machine(monkeypatch)
        monkeypatch.setattr(torch.ops, "load_library", lambda _: None)
        limits = {**LIMITS, "many tokens": 2048}
        monkeypatch.setattr(torch.ops, "sparsellm_cuda", SimpleNamespace(limit=limits.get), raising=False)
        with pytest.raises(KernelsUnavailable, match="limit for many tokens is 2,048: it should be 1,536"):
            build.load()
        assert not build.loaded()

    def test_a_driver_older_than_the_kernels_runtime_is_named_and_pytorch_computes(self, monkeypatch, workshop, capsys):
        self.machine(monkeypatch)
        monkeypatch.setattr(torch.ops, "load_library", lambda _: None)
        limits = {**LIMITS, "driver version": 12080}
        monkeypatch.setattr(torch.ops, "sparsellm_cuda", SimpleNamespace(limit=limits.get), raising=False)
        there, reason = backend.available()
        assert not there
        assert reason.startswith("the NVIDIA driver supports CUDA 12.8: it should support CUDA 13")
        assert "PyTorch computes the feedforward layers" in capsys.readouterr().err
        assert not build.loaded()

    def test_a_failure_is_not_tried_again(self, monkeypatch, workshop):
        self.machine(monkeypatch)
        (workshop.kernels / "bindings.cpp").write_text("error")
        with pytest.raises(KernelsUnavailable, match="do not compile"):
            build.load()
        (workshop.kernels / "bindings.cpp").write_text("bindings")
        with pytest.raises(KernelsUnavailable, match="do not compile"):
            build.load()

    def test_a_library_that_does_not_load_is_named(self, monkeypatch, workshop):
        self.machine(monkeypatch)
        with pytest.raises(KernelsUnavailable, match=r"do not load .*remove .*cache/kernels"):
            build.load()  # because it is a text file

    @pytest.mark.parametrize("rank", [None, "0", "3"])
    def test_unavailable_kernels_are_announced_once_by_rank_0(self, monkeypatch, capsys, rank):
        self.machine(monkeypatch, present=False)
        monkeypatch.setattr(backend, "DRIVER", Path("/not/there"))
        monkeypatch.delenv("RANK", raising=False)
        if rank is not None:
            monkeypatch.setenv("RANK", rank)
        for _ in range(2):
            there, reason = backend.available()
            assert not there
            assert reason == "this machine has no NVIDIA GPU"
        said = capsys.readouterr().err
        assert said.count("PyTorch computes the feedforward layers") == (0 if rank == "3" else 1)


def made(library: Path) -> Path:
    """A library of the current sources, as the linker marks it."""
    library.parent.mkdir(parents=True, exist_ok=True)
    library.write_bytes(b"\x7fELF note GNU\0" + bytes.fromhex(compiler.build_id()) + b" code")
    return library


class TestWhichLibrary:
    """SPARSELLM_KERNELS, the package, the cache, nvcc: the first of these wins."""

    def test_the_order(self, workshop, monkeypatch):
        cached = build.library()
        assert cached.parents[1] == workshop.cache
        packaged = made(workshop.kernels / LIBRARY)
        assert build.library() == packaged
        named = made(workshop.folder / "elsewhere" / LIBRARY)
        for name in (named, named.parent):
            monkeypatch.setenv(NAMED, str(name))
            assert build.library() == named
        monkeypatch.delenv(NAMED)
        packaged.unlink()
        assert build.library() == cached
        assert workshop.calls() == ALL

    def test_a_packaged_library_of_other_sources_is_said_and_passed_over(self, workshop, capsys):
        packaged = made(workshop.kernels / LIBRARY)
        (workshop.kernels / "row" / "a b.cu").write_text("edited since")
        assert build.library().parents[1] == workshop.cache
        assert f"{packaged} is not used, because it was not built from the sources" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("nowhere", "nowhere is neither a library nor a folder: name the library or its folder, or unset"),
            ("empty", f"empty is a folder without {LIBRARY}: name the library"),
            ("other.so", "other.so was not built from the sources and flags of the installed sparsellm"),
        ],
    )
    def test_a_named_library_that_is_unusable_is_refused_though_others_fit(self, workshop, monkeypatch, name, message):
        made(workshop.kernels / LIBRARY)
        (workshop.folder / "empty").mkdir()
        (workshop.folder / "other.so").write_bytes(b"GNU\0" + b"1" * 20)
        monkeypatch.setenv(NAMED, str(workshop.folder / name))
        with pytest.raises(NamedKernelsUnusable, match=message):
            build.library()
        assert workshop.calls() == []

    @pytest.mark.usefixtures("fresh")
    def test_a_named_library_that_does_not_load_is_not_replaced_by_pytorch(self, workshop, monkeypatch):
        monkeypatch.setattr(build, "_check_device", lambda: None)
        monkeypatch.setenv(NAMED, str(made(workshop.folder / LIBRARY)))
        for _ in range(2):
            with pytest.raises(NamedKernelsUnusable, match=f"that {NAMED} names do not load.*or unset {NAMED}"):
                backend.available()


PTXAS = """[1/2] row/row.cu
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN9sparsellm3rowILi8EEEvPf' for 'sm_90a'
ptxas info    : Function properties for _ZN9sparsellm3rowILi8EEEvPf
    16 bytes stack frame, {spills} bytes spill stores, {spills} bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 16 bytes cumulative stack size, 1024 bytes smem
[2/2] tile/up.cu
ptxas info    : Compiling entry function 'up' for 'sm_90a'
ptxas info    : Function properties for up
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 0 barriers
"""


def test_resources_are_read_from_the_log():
    row, up = resources(PTXAS.format(spills=4))
    assert (row.file, row.registers, row.shared, row.stack, row.spills) == ("row/row.cu", 168, 1024, 16, 8)
    assert row.function in ("row<8>", "_ZN9sparsellm3rowILi8EEEvPf")
    assert up == ("tile/up.cu", "up", 40, 0, 0, 0)


@pytest.mark.parametrize(("spills", "status"), [(0, 0), (4, 1)])
def test_make_kernels_reports_and_refuses_spills(monkeypatch, capsys, workshop, spills, status):
    build.build().with_name(build.LOG).write_text(PTXAS.format(spills=spills))
    assert build.main([str(workshop.folder / "out")]) == status
    out, err = capsys.readouterr()
    assert "row/row.cu" in out
    assert f"The kernels are built: {workshop.folder / 'out' / LIBRARY}" in out
    assert (workshop.folder / "out" / LIBRARY).read_text() == "made\n"
    assert ("registers spill" in err) == bool(spills)


def test_make_kernels_shows_a_compile_error(monkeypatch, capsys, workshop):
    (workshop.kernels / "bindings.cpp").write_text("an error here")
    assert build.main([]) == 1
    assert "an error here" in capsys.readouterr().err


@pytest.mark.slow
def test_a_library_is_linked_without_a_cuda_build_of_torch_and_asks_for_it(nvcc, tmp_path, monkeypatch):
    """Linking passes --no-undefined: everything the kernels need is in torch_cpu, the C library or the stub."""
    folder, sources = tmp_path / "built", tmp_path / "kernels"
    folder.mkdir()
    sources.mkdir()
    (sources / "one.cu").write_text("__global__ void one() {}\n")
    (sources / "bindings.cpp").write_text(
        "#include <torch/csrc/inductor/aoti_torch/c/shim.h>\n"
        'extern "C" int stream(void** s) { return aoti_torch_get_current_cuda_stream(0, s); }\n'
    )
    monkeypatch.setattr(compiler, "KERNELS", sources)
    done, log = compiler.compile_into(folder, nvcc)
    assert done, log
    library = folder / LIBRARY
    assert compiler.fits(library)
    assert b"\0libtorch_cuda.so\0" in library.read_bytes()
    (sources / "one.cu").write_text("__global__ void another() {}\n")
    assert not compiler.fits(library)
    (sources / "one.cu").write_text("void missing();\nvoid launch() { missing(); }\n")
    done, log = compiler.compile_into(folder, nvcc)
    assert not done
    assert "missing" in log
