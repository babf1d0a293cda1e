"""Checks, on a machine with a Hopper GPU, what a wheel built by `make wheel` computes, and which library it loads.

    python -m scripts.check_install dist/sparsellm-*.whl

Installs only the wheel into a temporary folder, and runs each step in a separate process: without nvcc and with an
empty cache, with SPARSELLM_KERNELS, and with edited sources. Needs torch, transformers and pip; the last steps need
nvcc and are skipped, with a message, without it. Prints a line per step; exits with code 1 at the first failure.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

LIBRARY = "sparsellm_kernels.so"

NO_NVCC = """
from sparsellm.ops import backend, build, compiler
def nothing():
    raise build.KernelsUnavailable("nvcc is hidden")
compiler.nvcc = nothing
"""

# Compares every engine, forward and backward, with the reference, and an accelerated model with the original model.
COMPUTE = f"""
import runpy, torch, sparsellm
from sparsellm.ops import build
build.load()
cases = runpy.run_path({str(Path(__file__).resolve().with_name("sanitize_kernels.py"))!r})
assert not cases["check"](cases["PARTS"], products=True)
from transformers import LlamaConfig, LlamaForCausalLM
sizes = dict(vocab_size=512, hidden_size=256, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(LlamaConfig(hidden_act="relu", **sizes)).cuda().bfloat16().eval()
ids = torch.randint(512, (2, 64), device="cuda")
with torch.no_grad():
    before = model(ids).logits.float()
    sparsellm.accelerate(model, kernels="cuda", engine="row")
    after = model(ids).logits.float()
error = ((after - before).norm() / before.norm()).item()
assert error < 2e-2, error
print("library", build.prebuilt())
print("computes")
"""

REFUSED = """
from sparsellm.ops import backend, build
try:
    backend.available()
except build.NamedKernelsUnusable as error:
    print("refused:", error)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path, help="the wheel that `make wheel` built")
    wheel = parser.parse_args().wheel.resolve()
    if not wheel.is_file():
        parser.error(f"{wheel} is not a file: build a wheel with `make wheel`")
    with tempfile.TemporaryDirectory() as folder:
        return check(wheel, Path(folder))


def check(wheel: Path, folder: Path) -> int:
    site, cache = folder / "site", folder / "cache"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", site, wheel]
    subprocess.run(install, check=True)
    packaged = site / "sparsellm" / "kernels" / LIBRARY
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    if not packaged.is_file():
        print(f"{wheel.name} contains no {LIBRARY}: build it with `make wheel`")
        return 1

    def step(what: str, code: str, expected: str, **environment: str) -> None:
        """Run `code` in an empty folder. Exit unless `code` succeeds and its output contains `expected`."""
        variables = {k: v for k, v in os.environ.items() if k not in ("SPARSELLM_KERNELS", "PYTHONPATH")}
        variables |= {"PYTHONPATH": str(site), "SPARSELLM_CACHE_DIR": str(cache), **environment}
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=elsewhere, env=variables, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        if done.returncode or expected not in done.stdout:
            print(f"FAILED  {what}: exit code {done.returncode}, expected {expected!r} in:\n{done.stdout}")
            sys.exit(1)
        print(f"ok      {what}", flush=True)

    step("without nvcc the packaged library is loaded", NO_NVCC + COMPUTE, f"library {packaged}\ncomputes")
    named = folder / "named"
    named.mkdir()
    shutil.copy(packaged, named)
    step(
        "SPARSELLM_KERNELS takes precedence", NO_NVCC + COMPUTE, f"library {named / LIBRARY}\ncomputes",
        SPARSELLM_KERNELS=str(named),
    )  # fmt: skip
    step(
        "an unusable SPARSELLM_KERNELS is refused", REFUSED, "neither a library nor a folder",
        SPARSELLM_KERNELS=str(folder / "nowhere"),
    )  # fmt: skip
    broken = folder / "broken.so"
    broken.write_bytes(packaged.read_bytes().replace(b"aoti_torch_get_current_cuda_stream", b"x" * 34))
    step("a library that does not load is refused", REFUSED, "do not load", SPARSELLM_KERNELS=str(broken))
    source = site / "sparsellm" / "kernels" / "engines.h"
    source.write_text(source.read_text() + "// edited\n")
    unbuilt = NO_NVCC + "print(backend.available())"
    step("a packaged library built from other sources is reported", unbuilt, "not built from the sources next to it")
    step("and nvcc is tried next", unbuilt, "nvcc is hidden")
    step(
        "SPARSELLM_KERNELS with a library of other sources is refused",
        REFUSED,
        "other sources",
        SPARSELLM_KERNELS=str(named),
    )
    packaged.unlink()
    seek = [sys.executable, "-c", "from sparsellm.ops import compiler; compiler.nvcc()"]
    if subprocess.run(seek, env=os.environ | {"PYTHONPATH": str(site)}, cwd=elsewhere, capture_output=True).returncode:
        print("skipped: there is no nvcc to build with")
        return 0
    step("nvcc builds into the cache", "from sparsellm.ops import build; print(build.library())", f"{cache}/kernels/")
    step("without nvcc the cache is loaded", NO_NVCC + COMPUTE, f"library {cache}/kernels/")
    return 0


if __name__ == "__main__":
    sys.exit(main())
