"""Validates the values of the commands that take a checkpoint, before the checkpoint is located.

Mistakes are messages with a remedy, as in rules.py.
"""

import os
import re
from pathlib import Path

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
    """Invalid values of `config`, each with its remedy. sparsellm.evaluation checks the paths that it names."""
    found = [*_checkpoint_mistakes(config.checkpoint), *bound_mistakes(config)]
    found += device_mistakes("device", config.device)
    obstacles = ["device=cpu has no GPU"] if config.device == Device.cpu else []
    if config.dtype not in (Dtype.auto, Dtype.bfloat16):
        obstacles.append(f"dtype={config.dtype.name} is not bfloat16")
    if config.compare_kernels:
        if config.kernels == Kernels.torch:
            obstacles.append("kernels=torch uses no kernels")
        found += unavailable_kernels("compare_kernels=true", "compare_kernels=false", config.kernels, obstacles)
    else:
        found += kernel_mistakes("kernels", config.kernels, obstacles)
    return found


def analyze_mistakes(config: AnalyzeConfig) -> list[str]:
    """Invalid values of `config`, each with its remedy. sparsellm.analysis checks the paths that it names."""
    found = [*_checkpoint_mistakes(config.checkpoint), *bound_mistakes(config)]
    found += _one_process("an analysis runs as one process")
    return found + device_mistakes("device", config.device)


def generate_mistakes(config: GenerateConfig) -> list[str]:
    """Every value of `config` that breaks a rule, each with its remedy."""
    found = [*_checkpoint_mistakes(config.checkpoint), *bound_mistakes(config)]
    if config.prompt == "":
        found.append("prompt is empty: give a text, or leave it out to read prompts from standard input")
    found += _one_process("generation runs as one process")
    obstacles = ["device=cpu has no GPU"] if config.device == Device.cpu else []
    if config.dtype not in (Dtype.auto, Dtype.bfloat16):
        obstacles.append(f"dtype={config.dtype.name} is not bfloat16")
    found += kernel_mistakes("kernels", config.kernels, obstacles)
    return found + device_mistakes("device", config.device)


def benchmark_mistakes(config: BenchmarkConfig) -> list[str]:
    """Invalid values of `config`, each with its remedy. sparsellm.benchmark checks the paths that it names."""
    found = [*_checkpoint_mistakes(config.checkpoint), *bound_mistakes(config)]
    if config.baseline and len(config.baseline) != len(config.checkpoint):
        found.append(
            f"baseline has {len(config.baseline)} entries, but checkpoint has {len(config.checkpoint)}: give one"
            " baseline per checkpoint, in the same order, or none"
        )
    found += _one_process("a benchmark runs as one process")
    found += kernel_mistakes(
        "kernels", config.kernels, ["device=cpu has no GPU"] if config.device == Device.cpu else []
    )
    return found + device_mistakes("device", config.device)


def import_mistakes(config: ImportConfig) -> list[str]:
    """Every value of `config` that breaks a rule, each with its remedy."""
    found = _checkpoint_mistakes(config.checkpoint)
    if not config.output_dir:
        found.append(
            "output_dir has no value: give output_dir=FOLDER, a folder for the stock model that does not exist yet"
        )
    elif Path(config.output_dir).expanduser().exists():
        found.append(f"output_dir={config.output_dir} exists: give another folder, or remove that one")
    found += _one_process("an import runs as one process")
    return found


def calibrate_mistakes(config: CalibrateConfig) -> list[str]:
    """Every value of `config` that breaks a rule, each with its remedy."""
    known = choices("model")
    remedy = f"it should be one of {', '.join(known)}, or a layer's KxN, such as 2048x5632"
    found = [] if config.model else [f"model has no value: {remedy}"]
    found += [
        f"model={name} is unknown: {remedy}" for name in config.model if name not in known and not LAYER.fullmatch(name)
    ]
    found += _one_process("a calibration runs as one process, whose results all processes use")
    if config.kernels == Kernels.torch:
        found.append("kernels=torch has no engines to choose from: it should be auto, cuda or triton")
    return found + kernel_mistakes("kernels", config.kernels, [])


def push_mistakes(config: PushConfig) -> list[str]:
    """Every value of `config` that breaks a rule, each with its remedy."""
    found = _checkpoint_mistakes(config.checkpoint)
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
    found += _one_process("a push runs as one process")
    return found


def _checkpoint_mistakes(checkpoint: str | list[str] | None) -> list[str]:
    if not checkpoint:
        return ["checkpoint has no value: give checkpoint=PATH, a run, a checkpoint, an hf/ folder or a hub name"]
    return []


def _one_process(said: str) -> list[str]:
    return [f"{said}: start it without torchrun"] if int(os.environ.get("WORLD_SIZE", "1")) > 1 else []
