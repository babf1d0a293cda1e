"""Validates the configurations of commands that take a checkpoint, before the checkpoint is located.

Each function returns error messages with remedies, as in rules.py. The packages evaluation, analysis and benchmark
check the paths named in a configuration.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sparsellm.config.groups import choices
from sparsellm.config.keys import bound_mistakes
from sparsellm.config.rules import device_mistakes, kernel_mistakes, unavailable_kernels
from sparsellm.config.schema import (
    AnalyzeConfig,
    BenchmarkConfig,
    CalibrateConfig,
    Device,
    Dtype,
    EvaluateConfig,
    GenerateConfig,
    ImportConfig,
    Kernels,
    PushConfig,
)

HUB_NAME = re.compile(r"(?!.*(--|\.\.|\.git$))\w([\w.-]*\w)?/\w([\w.-]*\w)?", re.ASCII)  # accepted by the hub
LAYER = re.compile(r"([1-9]\d{0,5})x([1-9]\d{0,5})", re.ASCII)  # K (width) x N (neurons)
BRANCH = re.compile(r"(?!.*(\.\.|//|\.lock$))\w([\w./+-]*\w)?", re.ASCII)  # stricter than git
LICENCE = re.compile(r"[a-z0-9][a-z0-9.-]*")


def evaluate_mistakes(config: EvaluateConfig) -> list[str]:
    if config.export is not None:
        found = _common_mistakes(replace(config, checkpoint="unused"), "an export")
        if unused := [key for key in ("checkpoint", "data_dir", "output_dir") if getattr(config, key) is not None]:
            found.append(
                f"export={config.export} writes the hub's rows and scores nothing: leave out {', '.join(unused)}"
            )
        return found
    found = _common_mistakes(config)
    found += _float8_mistakes(config, ["compare_kernels=true measures bfloat16"] * config.compare_kernels)
    if not config.compare_kernels:
        return found + kernel_mistakes("kernels", config.kernels, _obstacles(config))
    obstacles = _obstacles(config) + ["kernels=torch uses no kernels"] * (config.kernels == Kernels.torch)
    return found + unavailable_kernels("compare_kernels=true", "compare_kernels=false", config.kernels, obstacles)


def analyze_mistakes(config: AnalyzeConfig) -> list[str]:
    return _common_mistakes(config, "an analysis")


def generate_mistakes(config: GenerateConfig) -> list[str]:
    found = _common_mistakes(config, "generation")
    if config.prompt == "":
        found.append("prompt is empty: give a text, or leave it out to read prompts from standard input")
    found += _float8_mistakes(config, torchao=False)
    return found + kernel_mistakes("kernels", config.kernels, _obstacles(config))


def benchmark_mistakes(config: BenchmarkConfig) -> list[str]:
    found = _common_mistakes(config, "a benchmark")
    if config.baseline and len(config.baseline) != len(config.checkpoint):
        found.append(
            f"baseline has {len(config.baseline)} entries, but checkpoint has {len(config.checkpoint)}: give one"
            " baseline per checkpoint, in the same order, or none"
        )
    found += _float8_mistakes(config)
    return found + kernel_mistakes("kernels", config.kernels, _obstacles(config))


def import_mistakes(config: ImportConfig) -> list[str]:
    found = _common_mistakes(config, "an import")
    if not config.output_dir:
        found.append(
            "output_dir has no value: give output_dir=FOLDER, a folder for the stock model that does not exist yet"
        )
    elif Path(config.output_dir).expanduser().exists():
        found.append(f"output_dir={config.output_dir} exists: give another folder, or remove that one")
    return found


def calibrate_mistakes(config: CalibrateConfig) -> list[str]:
    found, known = _common_mistakes(config, "a calibration"), choices("model")
    remedy = f"it should be one of {', '.join(known)}, or a layer's KxN, such as 2048x5632"
    if not config.model:
        found.append(f"model has no value: {remedy}")
    found += [
        f"model={name} is unknown: {remedy}" for name in config.model if name not in known and not LAYER.fullmatch(name)
    ]
    if config.kernels == Kernels.torch:
        found.append("kernels=torch has no engines to choose from: it should be auto, cuda or triton")
    return found + kernel_mistakes("kernels", config.kernels, [])


def push_mistakes(config: PushConfig) -> list[str]:
    found = _common_mistakes(config, "a push")
    if config.repo is None:
        found.append("repo has no value: give repo=OWNER/NAME, a repository on the hub")
    elif not HUB_NAME.fullmatch(config.repo):
        found.append(
            f"repo={config.repo} is not a hub name: it should be OWNER/NAME, each of letters, digits, single dots and"
            f" dashes"
        )
    if config.license is not None and not LICENCE.fullmatch(config.license):
        found.append(
            f"license={config.license} is not a hub licence identifier, such as apache-2.0, mit or cc-by-4.0: see"
            " https://huggingface.co/docs/hub/repositories-licenses"
        )
    if config.license == "other":
        found.append(
            "license=other needs a name and a link: write license, license_name and license_link into the README.md of"
            " a copy of the hf/ folder, and push the copy without license="
        )
    if not config.revision:
        found.append("revision is empty: give a branch, or leave it out for main")
    elif not BRANCH.fullmatch(config.revision):
        found.append(
            f"revision={config.revision} is not a branch name: it should have letters, digits, '.', '_', '+', '-' and"
            f" '/', like v2"
        )
    return found


def _common_mistakes(config: Any, single: str | None = None) -> list[str]:
    """Error messages about keys that several commands have. `single`: the kind of work, if torchrun must not run it."""
    found = []
    if not getattr(config, "checkpoint", True):
        found.append("checkpoint has no value: give checkpoint=PATH, a run, a checkpoint, an hf/ folder or a hub name")
    found += bound_mistakes(config)
    if single is not None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        found.append(f"{single} runs as one process: start it without torchrun")
    return found + (device_mistakes("device", config.device) if hasattr(config, "device") else [])


def _float8_mistakes(
    config: EvaluateConfig | GenerateConfig | BenchmarkConfig, obstacles: Sequence[str] = (), torchao: bool = True
) -> list[str]:
    """Error messages if float8=true asks for FP8 that `config` rules out, or that this machine does not have.
    `obstacles`: more reasons in `config`. `torchao`: whether FP8 needs this package."""
    if not config.float8:
        return []
    from sparsellm.ops import float8

    ruled_out = [*_obstacles(config), *obstacles]
    if config.kernels in (Kernels.triton, Kernels.torch):
        ruled_out.append(f"kernels={config.kernels.name} has no FP8")
    found = unavailable_kernels("float8=true", "float8=false", Kernels.cuda, ruled_out)
    missing = float8.missing() if torchao else None
    return found + ([] if missing is None else [f"float8=true does not run here: {missing}"])


def _obstacles(config: EvaluateConfig | GenerateConfig | BenchmarkConfig) -> list[str]:
    """Reasons why `config` rules out the kernels on any machine; empty if there are none."""
    found = ["device=cpu has no GPU"] if config.device == Device.cpu else []
    dtype = Dtype.auto if isinstance(config, BenchmarkConfig) else config.dtype
    return found + ([] if dtype in (Dtype.auto, Dtype.bfloat16) else [f"dtype={dtype.name} is not bfloat16"])
