"""The rules of the commands that take a checkpoint: what must hold of their values, before anyone looks for it.

A broken rule is a sentence with its remedy, as in rules.py.
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

HUB_NAME = re.compile(r"(?!.*(--|\.\.|\.git$))\w([\w.-]*\w)?/\w([\w.-]*\w)?", re.ASCII)  # as the hub takes them
LAYER = re.compile(r"([1-9]\d{0,5})x([1-9]\d{0,5})", re.ASCII)  # K, the width, and N, the neurons
BRANCH = re.compile(r"(?!.*(\.\.|//|\.lock$))\w([\w./+-]*\w)?", re.ASCII)  # fewer than git allows
LICENCE = re.compile(r"[a-z0-9][a-z0-9.-]*")


def evaluate_mistakes(config: EvaluateConfig) -> list[str]:
    """Every value of `config` that breaks a rule, each with its remedy; sparsellm.evaluation looks at what it names."""
    found = [*_checkpoint_mistakes(config.checkpoint), *bound_mistakes(config)]
    found += device_mistakes("device", config.device)
    obstacles = ["device=cpu has no GPU"] if config.device == Device.cpu else []
    if config.dtype not in (Dtype.auto, Dtype.bfloat16):
        obstacles.append(f"dtype={config.dtype.name} is not bfloat16")
    if config.compare_kernels:
        if config.kernels == Kernels.torch:
            obstacles.append("kernels=torch takes none")
        found += unavailable_kernels("compare_kernels=true", "compare_kernels=false", config.kernels, obstacles)
    else:
        found += kernel_mistakes("kernels", config.kernels, obstacles)
    return found


def analyze_mistakes(config: AnalyzeConfig) -> list[str]:
    """Every value of `config` that breaks a rule, each with its remedy; what its paths hold is sparsellm.analysis's."""
    found = [*_checkpoint_mistakes(config.checkpoint), *bound_mistakes(config)]
    found += _one_process("an analysis is one process")
    return found + device_mistakes("device", config.device)


def generate_mistakes(config: GenerateConfig) -> list[str]:
    """Every value of `config` that breaks a rule, each with its remedy."""
    found = [*_checkpoint_mistakes(config.checkpoint), *bound_mistakes(config)]
    if config.prompt == "":
        found.append("prompt is empty: give it some text, or leave it out to have lines of the standard input read")
    found += _one_process("text is written by one process")
    obstacles = ["device=cpu has no GPU"] if config.device == Device.cpu else []
    if config.dtype not in (Dtype.auto, Dtype.bfloat16):
        obstacles.append(f"dtype={config.dtype.name} is not bfloat16")
    found += kernel_mistakes("kernels", config.kernels, obstacles)
    return found + device_mistakes("device", config.device)


def benchmark_mistakes(config: BenchmarkConfig) -> list[str]:
    """Every value of `config` that breaks a rule, each with its remedy; sparsellm.benchmark looks at what it names."""
    found = [*_checkpoint_mistakes(config.checkpoint), *bound_mistakes(config)]
    if config.baseline and len(config.baseline) != len(config.checkpoint):
        found.append(
            f"baseline has {len(config.baseline)} and checkpoint {len(config.checkpoint)}: the first is compared with"
            " the first, and so on, so give as many, or no baseline"
        )
    found += _one_process("a benchmark is one process")
    found += kernel_mistakes(
        "kernels", config.kernels, ["device=cpu has no GPU"] if config.device == Device.cpu else []
    )
    return found + device_mistakes("device", config.device)


def import_mistakes(config: ImportConfig) -> list[str]:
    """Every value of `config` that breaks a rule, each with its remedy."""
    found = _checkpoint_mistakes(config.checkpoint)
    if not config.output_dir:
        found.append("output_dir has no value: output_dir=FOLDER, of the stock model, which must not exist yet")
    elif Path(config.output_dir).expanduser().exists():
        found.append(f"output_dir={config.output_dir} exists: give another folder, or remove that one")
    found += _one_process("an import is one process")
    return found


def calibrate_mistakes(config: CalibrateConfig) -> list[str]:
    """Every value of `config` that breaks a rule, each with its remedy."""
    known = choices("model")
    remedy = f"one of {', '.join(known)}, or a layer's KxN, as 2048x5632"
    found = [] if config.model else [f"model has no value: model=NAME, {remedy}"]
    found += [
        f"model={name} is no model: {remedy}"
        for name in config.model
        if name not in known and not LAYER.fullmatch(name)
    ]
    found += _one_process("a calibration is one process, and others take what it measured")
    if config.kernels == Kernels.torch:
        found.append("kernels=torch has no engines to choose from: auto, cuda or triton")
    return found + kernel_mistakes("kernels", config.kernels, [])


def push_mistakes(config: PushConfig) -> list[str]:
    """Every value of `config` that breaks a rule, each with its remedy."""
    found = _checkpoint_mistakes(config.checkpoint)
    if config.repo is None:
        found.append("repo has no value: repo=OWNER/NAME, on the hub")
    elif not HUB_NAME.fullmatch(config.repo):
        found.append(
            f"repo={config.repo} is no name on the hub: OWNER/NAME, each of letters, digits, single dots and dashes"
        )
    if config.license is not None and not LICENCE.fullmatch(config.license):
        found.append(
            f"license={config.license} is not how the hub names a licence, as apache-2.0, mit or cc-by-4.0:"
            " https://huggingface.co/docs/hub/repositories-licenses lists them"
        )
    if config.license == "other":
        found.append(
            "license=other needs a name and a link: write license, license_name and license_link into the README.md of"
            " a copy of the hf/ folder, and push that one without license="
        )
    if not config.revision:
        found.append("revision is empty: give a branch, or leave it out for main")
    elif not BRANCH.fullmatch(config.revision):
        found.append(
            f"revision={config.revision} is no name of a branch: letters, digits, '.', '_', '+', '-' and '/', as v2"
        )
    found += _one_process("a push is one process")
    return found


def _checkpoint_mistakes(checkpoint: str | list[str] | None) -> list[str]:
    if not checkpoint:
        return ["checkpoint has no value: checkpoint=PATH, of a run, a checkpoint or an hf/ folder, or a hub name"]
    return []


def _one_process(said: str) -> list[str]:
    return [f"{said}: start it without torchrun"] if int(os.environ.get("WORLD_SIZE", "1")) > 1 else []
