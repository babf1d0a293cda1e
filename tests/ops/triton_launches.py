"""The launches of the Triton driver, recorded without a GPU, and compiled ahead of time for any GPU."""

import contextlib
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sparsellm.inference.kernels import decoding, pointwise, prompts
from sparsellm.ops import Plan, borders
from sparsellm.ops.float8_gate import Float8Rows
from sparsellm.ops.triton import clusters, dense, engines, nonzeros, plan, products, transpose, tuning

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
MODULES = (plan, clusters, products, nonzeros, dense, transpose, pointwise, decoding, prompts)
TYPES = {
    torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64", torch.uint8: "*u8",
    torch.bool: "*i1", torch.int8: "*i8", torch.float16: "*fp16", torch.float8_e4m3fn: "*fp8e4nv",
}  # fmt: skip
OPTIONS = ("num_warps", "num_stages")


class Launch(NamedTuple):
    """One launch: a kernel and everything that its compilation depends on."""

    kernel: str
    arguments: dict[str, Any]  # by name: the type of a pointer or number, or a constant's value
    divisible: tuple[str, ...]  # arguments that are multiples of 16
    options: dict[str, int]

    def key(self) -> str:
        return f"{self.kernel} {sorted(self.arguments.items())} {self.divisible} {self.options}"


class Resources(NamedTuple):
    shared: int  # bytes
    registers: int
    spills: int  # bytes on NVIDIA GPUs, registers on AMD ones
    assembly: str


class Recorder:
    """Replaces a kernel, and records its launches."""

    def __init__(self, kernel: Any, found: dict[str, Launch]) -> None:
        self.kernel, self.found = kernel, found

    def __getitem__(self, _grid: Any) -> Any:
        def launch(*given: Any, **named: Any) -> None:
            options = {name: named.pop(name) for name in OPTIONS if name in named}
            arguments, divisible = {}, []
            for parameter, value in zip(self.kernel.params, given, strict=False):
                named[parameter.name] = value
            for parameter in self.kernel.params:
                value = named.pop(parameter.name)
                arguments[parameter.name] = value
                if isinstance(value, torch.Tensor):
                    assert not value.data_ptr() % 16, f"{parameter.name} of {self.kernel.__name__} is misaligned"
                    arguments[parameter.name] = TYPES[value.dtype]
                    divisible.append(parameter.name)
                elif value is not None and not parameter.is_constexpr:
                    arguments[parameter.name] = "fp32" if isinstance(value, float) else "i32"
                    if not value % 16 and not parameter.do_not_specialize:
                        divisible.append(parameter.name)
            assert not named, f"{self.kernel.__name__} has no {', '.join(named)}"
            record = Launch(self.kernel.__name__, arguments, tuple(divisible), options)
            self.found[record.key()] = record

        return launch


class WithoutProducts(TorchDispatchMode):
    """torch's own products are left out: of matrices this large, they would take a CPU most of the time."""

    def __torch_dispatch__(self, function: Any, _types: Any, given: Any, named: Any) -> Any:
        if function is torch.ops.aten.mm.default:
            a, b = given
            return a.new_zeros((a.shape[0], b.shape[1]))
        if function is torch.ops.aten.mm.out:
            return named["out"]
        if function is torch.ops.aten.addmm_.default:
            return given[0]
        return function(*given, **named)


@contextlib.contextmanager
def recording(sizes: tuning.Tuning) -> Iterator[dict[str, Launch]]:
    """Record all kernels while the driver runs on the CPU, with the block sizes `sizes`."""
    found: dict[str, Launch] = {}
    with contextlib.ExitStack() as stack:
        for module in MODULES:
            for name, kernel in vars(module).items():
                if isinstance(kernel, triton.runtime.JITFunction) and kernel.fn.__module__ == module.__name__:
                    stack.enter_context(patch.object(module, name, Recorder(kernel, found)))
        stack.enter_context(patch.object(tuning, "of", lambda _: (sizes, 3)))
        stack.enter_context(WithoutProducts())
        yield found


def of_layers(
    sizes: tuning.Tuning, k: int, n: int, m: int = 130, gated: tuple[bool, ...] = (True, False), ordered: bool = True
) -> list[Launch]:
    """Every launch of the engines on a layer, forward and backward. ordered: the tile engine orders the tokens."""
    with recording(sizes) as found, patch.object(borders, "MIN_ORDERED_TOKENS", 1 if ordered else m + 1):
        x = torch.zeros((m, k), dtype=torch.bfloat16)
        first, down = torch.zeros((n, k), dtype=torch.bfloat16), torch.zeros((k, n), dtype=torch.bfloat16)
        for gate in (first if each else None for each in gated):
            for engine in ("dense", "tile", "row"):
                saving = engine != "row"
                *_, saved = engines.forward(x, gate, first, down, Plan.of(engine), None, saving)
                if saving:
                    engines.forward(x, gate, first, down, Plan.of(engine), None, False)
                    engines.backward(x, gate, first, down.float(), x, torch.zeros(()), saved)
    return list(found.values())


def of_decoding(
    k: int,
    heads: int,
    kv_heads: int,
    width: int,
    dtype: torch.dtype,
    batch: int = 1,
    positions: int = 192,
    largest: bool = False,
) -> list[Launch]:
    """Every launch of sparsellm.inference.kernels.decoding for one token of each sequence. largest: without kernels
    that are others with a part left out."""
    with recording(tuning.SMALL) as found:
        projected = torch.zeros((batch, heads + 2 * kv_heads, width), dtype=dtype)
        cache, table = projected.new_zeros((batch, positions, kv_heads, width)), torch.zeros((positions, width))
        norm = torch.zeros(width)
        for norms in ((norm, norm, 1e-6),) if largest else (None, (norm, norm, 1e-6)):
            lengths = torch.zeros(batch, dtype=torch.int64)
            decoding.attend_to_the_past(projected, norms, table, table, lengths, cache, cache)
        x, weight = torch.zeros((1, k)), torch.zeros((projected[0].numel(), k), dtype=dtype)
        decoding.multiply(weight, x, x.to(dtype), x[0], 1e-6, weight[:, 0].contiguous())
        decoding.multiply(weight, x, x.to(dtype), x[0], 1e-6, activation="silu", up=weight)
        if not largest:
            decoding.multiply(weight, x, x.to(dtype), x[0], 1e-6)
            decoding.multiply(weight, x, x.to(dtype), x[0], 1e-6, activation="silu")
            decoding.multiply(weight, x.to(dtype))
    return list(found.values())


def of_float8_decoding(k: int, n: int) -> list[Launch]:
    """Every launch of products with e4m3 matrices [n, k]."""
    with recording(tuning.SMALL) as found:
        matrix = Float8Rows(torch.zeros((n, k), dtype=torch.float8_e4m3fn), torch.zeros(n))
        x = torch.zeros((64, k), dtype=torch.bfloat16)
        decoding.multiply(matrix, x[:1].float(), x[:1], torch.zeros(k), 1e-6)
        decoding.multiply(matrix, x[:1].float(), x[:1], torch.zeros(k), 1e-6, activation="relu", up=matrix)
        decoding.multiply(matrix, x[:1])
        for tokens in (2, 17, 64):
            decoding.multiply_few(matrix, x[:tokens])
    return list(found.values())


def of_prompts(
    k: int, heads: int, kv_heads: int, width: int, dtype: torch.dtype, largest: bool = False
) -> list[Launch]:
    """Every launch for two prompts of up to three tokens, except products, attention and the operator. largest: as in
    `of_decoding`."""
    with recording(tuning.SMALL) as found:
        projected, norm = torch.zeros((5, heads + 2 * kv_heads, width), dtype=dtype), torch.zeros(width)
        cache, table = projected.new_zeros((2, 64, kv_heads, width)), torch.zeros((64, width))
        lengths = torch.tensor([3, 2])
        for norms in ((norm, norm, 1e-6),) if largest else (None, (norm, norm, 1e-6)):
            prompts.place(projected, norms, table, table, lengths.cumsum(0), lengths, 3, cache, cache)
        x = torch.zeros((5, k))
        normed = pointwise.sum_norm(x, x.to(dtype), x[0], 1e-6, dtype)[1]
        for up in (normed,) if largest else (None, normed):
            pointwise.activate(normed, up, "silu")
    return list(found.values())


def compiled(launch: Launch, backend: str, architecture: int | str) -> Resources:
    """The resources of a launch's kernel on an NVIDIA GPU ("cuda", 90) or an AMD GPU ("hip", "gfx942"). Kernels that
    can start before the previous one has ended do so from compute capability 9.0 on."""
    starts_early = backend == "cuda" and int(architecture) >= 90
    kernel = next(getattr(module, launch.kernel) for module in MODULES if hasattr(module, launch.kernel))
    names = [parameter.name for parameter in kernel.params]
    constants = {p.name for p in kernel.params if p.is_constexpr or launch.arguments[p.name] is None}
    source = ASTSource(
        kernel,
        {name: "constexpr" if name in constants else launch.arguments[name] for name in names},
        {(names.index(name),): starts_early if name == "EARLY" else launch.arguments[name] for name in constants},
        {(names.index(name),): [["tt.divisibility", 16]] for name in launch.divisible},
    )
    target = GPUTarget(backend, architecture, 64 if backend == "hip" else 32)
    made = triton.compile(source, target=target, options=launch.options)
    if backend == "hip":
        text = made.asm["amdgcn"]
        registers, spills = (int(re.search(rf"\.vgpr_{what}:\s+(\d+)", text)[1]) for what in ("count", "spill_count"))
        return Resources(made.metadata.shared, registers, spills, text)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage = subprocess.run([CUOBJDUMP, "--dump-resource-usage", file.name], capture_output=True, text=True)
    registers, stack = (int(re.search(rf"{what}:(\d+)", usage.stdout)[1]) for what in ("REG", "STACK"))
    return Resources(made.metadata.shared, registers, stack, made.asm["ptx"])


def bytes_read(launch: Launch, assembly: str) -> Counter[str]:
    """Argument name -> bytes of the argument that a thread loads in this first part of a kernel's PTX."""
    names = [name for name, value in launch.arguments.items() if is_passed(value)]
    of_register: dict[str, set[str]] = {}
    found: Counter[str] = Counter()
    for line in assembly.splitlines():
        registers = re.findall(r"%(?:r|rd|p|rs|f)\d+", line)
        if (parameter := re.search(r"ld\.param\S*\s+(%\w+), \[\w+_param_(\d+)\]", line)) is not None:
            place = int(parameter[2])
            of_register[parameter[1]] = {names[place]} if place < len(names) else set()
        elif (load := re.search(r"ld\.global\S*?(?:\.v(\d))?\.b(\d+) .*\[ *(%\w+)", line)) is not None:
            (pointer,) = (n for n in of_register[load[3]] if str(launch.arguments[n]).startswith("*"))
            found[pointer] += int(load[1] or 1) * int(load[2]) // 8
        elif len(registers) > 1:
            of_register[registers[0]] = set().union(*(of_register.get(register, ()) for register in registers[1:]))
    return found


def is_passed(value: Any) -> bool:
    """Whether this is an argument of the compiled kernel rather than a constant in it."""
    return isinstance(value, str) and value in {*TYPES.values(), "i32", "fp32"}
