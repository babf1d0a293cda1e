"""An evaluation request: the settings that determine the scores, the folder for the scores, and how results.json is
assembled from the stored results.

Scores in several dtypes are never in one folder. If OUTPUT has scores of these weights in another dtype than the dtype
of this evaluation, this evaluation writes to OUTPUT/DTYPE. With float8=true it always writes to OUTPUT/float8, because
other commands take the scores in OUTPUT for those of the model as it is.
"""

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from sparsellm import data
from sparsellm.config import Config, EvaluateConfig, Kernels, evaluate_mistakes, load
from sparsellm.distributed.groups import device_type
from sparsellm.evaluation import tasks
from sparsellm.evaluation.results import FLOAT8, MEANS, VALIDATION, Finished, Parts, dtypes, kept, means
from sparsellm.ops import backend
from sparsellm.runs.layout import CONFIG, EVALUATION
from sparsellm.runs.locate import Checkpoint, locate, not_found
from sparsellm.runs.precision import computed_in, dtype_name
from sparsellm.system.console import warn
from sparsellm.system.provenance import installed

TORCH = "torch"  # folder with the PyTorch side's results, if compare_kernels=true
PACKAGES = ("sparsellm", "lm_eval", "torch", "transformers", "datasets")


@dataclass(frozen=True)
class Request:
    config: EvaluateConfig
    checkpoint: Checkpoint
    output: Path
    dtype: torch.dtype | None = None  # dtype of weights and activations; None until `opened`
    why: str = ""  # the reason for `dtype`

    @classmethod
    def of(cls, config: EvaluateConfig) -> "Request":
        """The request made by `config`. Raises CheckpointNotFound if its checkpoint does not exist."""
        assert config.checkpoint is not None
        checkpoint = locate(config.checkpoint)
        output = checkpoint.output(EVALUATION, config.output_dir, config.limit)
        return cls(config, checkpoint, output / FLOAT8 if config.float8 else output)

    def opened(self, identity: str) -> "Request":
        """This request with its dtype, and the output folder for that dtype. `identity`: the checkpoint's.

        Raises BrokenModel if the model cannot be used, and OSError if the hub cannot be read.
        """
        dtype, why = computed_in(self.config.dtype, self.checkpoint)
        mixed = not self.config.float8 and dtypes(self.output, identity) - {dtype_name(dtype)}
        return replace(self, dtype=dtype, why=why, output=self.output / dtype_name(dtype) if mixed else self.output)

    @property
    def dtype_name(self) -> str:
        """The dtype of the scores: FLOAT8 for a bfloat16 model that computes partly in FP8."""
        assert self.dtype is not None  # set by `opened`
        return FLOAT8 if self.config.float8 else dtype_name(self.dtype)

    @property
    def tasks(self) -> list[str]:
        return tasks.chosen(self.config.tasks)

    @cached_property
    def sides(self) -> dict[Path, Kernels]:
        """The kernels to evaluate with, by output folder. With compare_kernels two: the kernels that are asked for, or
        with kernels=auto those of this machine, which must then run; and PyTorch."""
        kernels = self.config.kernels
        if not self.config.compare_kernels:
            return {self.output: kernels}
        compared = Kernels[backend.of_this_machine()] if kernels == Kernels.auto else kernels
        return {self.output: compared, self.output / TORCH: Kernels.torch}

    @property
    def on_hub(self) -> str | None:
        """The items to fetch from the hub, as text; None if everything is local."""
        wanted = [self.checkpoint.wanted] * (self.checkpoint.folder is None)
        wanted += [f"the rows of {', '.join(self.tasks)}"] * (self.config.data_dir is None and self.tasks != [])
        return " and ".join(wanted) or None

    def finished(self, folder: Path, identity: str) -> Finished:
        """The stored results in `folder`, for the checkpoint `identity`. Raises OSError if `folder` is not writable."""
        decided_by = {
            "weights": identity, "dtype": self.dtype_name, "device": device_type(self.config.device.name),
            "limit": self.config.limit, "lm_eval": installed("lm_eval"), "kernels": self.sides[folder].name,
        }  # fmt: skip
        return Finished(folder, decided_by)

    def run_config(self) -> Config:
        assert self.checkpoint.run is not None
        return load(self.checkpoint.run / CONFIG)

    def held_out(self) -> torch.Tensor | None:
        """The run's held-out blocks, int64 [V, T + 1]; None if there is no run, validation is off, or the run's data
        has no held-out split.

        Raises DataError, ConfigError or OSError if the run's data or configuration cannot be read.
        """
        if self.checkpoint.run is None or not self.config.validation:
            return None
        run = self.run_config()
        request, samples = data.Request.of(run), run.logging.validation_samples
        if request.holds_nothing_out:
            warn(f"{self.checkpoint}: data.validation_fraction=0 held nothing out, so validation loss is skipped")
            return None
        return data.open_validation(request, samples, Path(self.checkpoint.model), self.checkpoint.run)

    @cached_property
    def source(self) -> str:
        """The source of the tasks' rows, for messages."""
        return "hub" if self.config.data_dir is None else str(Path(self.config.data_dir).expanduser().resolve())

    def measured(self, kernels: str) -> dict[str, Any]:
        """The settings under which a task is scored by a model on `kernels`."""
        return {
            "dtype": self.dtype_name, "kernels": kernels, "device": device_type(self.config.device.name),
            "data": self.source, "limit": self.config.limit, **{package: installed(package) for package in PACKAGES},
        }  # fmt: skip

    def results(self, weights: str, failed: dict[str, str]) -> dict[str, Any]:
        """The contents of results.json: all stored results of these weights, and why requested tasks failed.

        `weights`: the checkpoint's identity.
        """
        kernels, torch = (_side(kept(folder, weights), failed) for folder in (self.output, self.output / TORCH))
        return {
            "checkpoint": str(self.checkpoint),
            "identity": weights,
            "step": self.checkpoint.step,
            "dtype": next(iter(dtypes(self.output, weights)), None),
            **({FLOAT8: True} if self.config.float8 else {}),
            "tasks": kernels["tasks"],
            "failed": failed,
            **{name: kernels[name] for name in MEANS},
            VALIDATION: kernels[VALIDATION],
            "output_dir": str(self.output),
            **({"torch": torch} if torch["tasks"] else {}),
        }


def mistakes(config: EvaluateConfig) -> list[str]:
    """Error messages for `config`, as far as they can be known before any work; empty if there are none."""
    found = evaluate_mistakes(config)
    if config.tasks == tasks.NONE and config.export is not None:
        found.append("nothing to export: tasks is none; leave it out to export the rows of all tasks")
    elif config.tasks == tasks.NONE and not config.validation:
        found.append("nothing to evaluate: tasks is none and validation is false; leave out one of them")
    return found + tasks.mistakes(config.tasks, config.data_dir) + not_found(config.checkpoint)


def _side(parts: Parts, failed: dict[str, str]) -> dict[str, Any]:
    """The entries of results.json for the results of one side."""
    tasks = {n: {**part["result"], "measured": part["measured"]} for n, part in parts.items() if n != VALIDATION}
    return {"tasks": tasks, VALIDATION: parts.get(VALIDATION), **means(tasks, failed)}


def rows_of(held_out: torch.Tensor) -> str:
    """Identifies the rows of the held-out split, like `LoadedTask.identity` for a task."""
    return hashlib.sha256(held_out.numpy().tobytes()).hexdigest()
