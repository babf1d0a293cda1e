"""Which kernels compute in this process: the CUDA kernels, for Hopper, or those in Triton, for any CUDA GPU.

    load(kernels)   "cuda" or "triton", or "auto": those of this GPU; raises KernelsUnavailable where they do not run
    available()     whether load("auto") works here, and if not why; says so once on rank 0
    loaded()        "cuda" or "triton" once `load` has succeeded in this process, else None
    driver()        the module whose forward and backward run the kernels; None while none are loaded
    check(kernels)  raises KernelsUnavailable where load(kernels) would, as far as that shows beforehand

    measured        by (K, N) of a layer: what its engines cost on this GPU, where that was measured; the policy goes by
                    it, in place of the constants that the package has

One process computes on one kind of kernels: what is saved for backward, and the policy, are of that kind.
"""

from types import ModuleType

import torch

from sparsellm.ops import build, cuda, dispatch
from sparsellm.ops.compiler import KernelsUnavailable
from sparsellm.ops.costs import Costs
from sparsellm.ops.plan import Engine, Plan

NAMES = {"cuda": "the CUDA kernels", "triton": "the Triton kernels"}
measured: dict[tuple[int, int], Costs] = {}
_triton = False
_said: set[str] = set()


def of_this_machine() -> str:
    """What `auto` loads: triton on a CUDA GPU that is not a Hopper one, else cuda, which says what is missing."""
    if torch.version.cuda is None or not torch.cuda.is_available():
        return "cuda"
    return "cuda" if torch.cuda.get_device_capability() == build.CAPABILITY else "triton"


def load(kernels: str = "auto") -> None:
    """Raises KernelsUnavailable where the kernels do not run, and ValueError where this process has loaded others."""
    global _triton
    if kernels == "auto":
        kernels = loaded() or of_this_machine()
    if loaded() not in (None, kernels):
        raise ValueError(
            f"kernels is {kernels!r}: it should be {loaded()!r}, which this process computes on already; one process"
            " takes one kind of kernels"
        )
    if kernels == "cuda":
        build.load()
    else:
        check("triton")
        _triton = True


def available() -> tuple[bool, str]:
    """(True, "") if `load("auto")` works here, else (False, why); rank 0 also prints why, once per process."""
    if loaded() is None and of_this_machine() == "cuda":
        return build.available()
    try:
        load()
    except KernelsUnavailable as error:
        if str(error) not in _said and build.is_main_rank():
            build.warn(f"PyTorch computes the feedforward layers, for the Triton kernels are unavailable: {error}")
        _said.add(str(error))
        return False, str(error)
    return True, ""


def loaded() -> str | None:
    if _triton:
        return "triton"
    return "cuda" if build.loaded() else None


def check(kernels: str) -> None:
    if kernels == "cuda" or (kernels == "auto" and of_this_machine() == "cuda"):
        build.check()
        return
    from sparsellm.ops.triton import device

    device.check()


def driver() -> ModuleType | None:
    if _triton:
        from sparsellm.ops.triton import engines

        return engines
    return cuda if build.loaded() else None


def tile_saved_bytes(tokens: int, neurons: int, room: int, gated: bool) -> int:
    """The length of what the tile engine saves for its backward, in bfloat16."""
    if _triton:
        from sparsellm.ops.triton import engines

        return engines.saved_bytes(tokens, neurons, room, gated)
    return cuda.tile_saved_bytes(tokens, neurons, room, gated)


def choose_engine(
    tokens: int, width: int, neurons: int, nnz: float, union: float, current: Engine | None = None
) -> Engine:
    """As sparsellm.ops.dispatch.choose_engine, by the policy of the kernels that are loaded."""
    if (costs := measured.get((width, neurons))) is not None:
        return costs.choose_engine(tokens, nnz, union, current)
    return _policy().choose_engine(tokens, width, neurons, nnz, union, current)


def choose_training_engine(
    tokens: int, width: int, neurons: int, nnz: float, union: float, current: Engine | None = None
) -> Engine:
    """As sparsellm.ops.dispatch.choose_training_engine, by the policy of the kernels that are loaded."""
    if (costs := measured.get((width, neurons))) is not None:
        return costs.choose_training_engine(tokens, nnz, union, current)
    return _policy().choose_training_engine(tokens, width, neurons, nnz, union, current)


def row_density(tokens: int, width: int, neurons: int) -> float:
    """As sparsellm.ops.dispatch.row_density, by the policy of the kernels that are loaded."""
    if (costs := measured.get((width, neurons))) is not None:
        return costs.row_density(tokens)
    return _policy().row_density(tokens, width, neurons)


def first_plan_of_few() -> Plan:
    """The plan of calls of few tokens until something has been counted: they are assumed to be sparse."""
    return Plan(Engine.dense if _triton else Engine.row)


def _policy() -> ModuleType:
    if _triton:
        from sparsellm.ops.triton import policy

        return policy
    return dispatch
