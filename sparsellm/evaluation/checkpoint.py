"""Evaluating a checkpoint: finding it, loading it, scoring it, and going on where an earlier evaluation was stopped.

A model in memory is scored by sparsellm.evaluation.downstream and .perplexity, which know nothing of files.
"""

import hashlib
import json
import math
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from sparsellm import data
from sparsellm.config import (
    Config,
    ConfigError,
    EvaluateConfig,
    Kernels,
    Precision,
    evaluate_mistakes,
    load,
    obstacles_to_kernels,
)
from sparsellm.distributed import Ranks, device_type, first_error, main_first, process_group
from sparsellm.evaluation import tasks
from sparsellm.evaluation.locate import Checkpoint, CheckpointNotFound, locate
from sparsellm.evaluation.perplexity import cross_entropy
from sparsellm.evaluation.results import RESULTS, VALIDATION, Finished, mean, write
from sparsellm.model import Decoder, huggingface
from sparsellm.model.accelerate import SparseFeedForward, accelerate, restore
from sparsellm.run_layout import CONFIG

PACKAGES = ("sparsellm", "lm_eval", "torch", "transformers", "datasets")
T = TypeVar("T")


class EvaluationError(RuntimeError):
    """The checkpoint cannot be evaluated as asked; the message says why."""


def mistakes(config: EvaluateConfig) -> list[str]:
    """Everything that keeps `config` from being evaluated, as far as it can be known before any work."""
    found = evaluate_mistakes(config)
    found += tasks.mistakes(config.tasks, config.data_dir)
    if config.checkpoint is not None:
        try:
            locate(config.checkpoint)
        except CheckpointNotFound as error:
            found.append(str(error))
    return found


def evaluate_checkpoint(config: EvaluateConfig) -> dict[str, Any]:
    """Evaluate and write results.json; return its contents, the same on all ranks. Alone or under torchrun.

    {"checkpoint", "step", "dtype", "kernels", "limit", "tasks": {TASK: {"metric", "score", "stderr", "acc",
    "acc_stderr", "acc_norm", "acc_norm_stderr", "split", "rows", "note"}}, "failed": {TASK: reason}, "mean",
    "validation": {"loss" in nats per token, "perplexity", "tokens"}, "data", "versions", "output_dir"}, and under
    "torch" the tasks, mean and validation once more with compare_kernels. Standard errors are null for a single row,
    "mean" if a task failed, "validation" without a run. A task that fails leaves the others alone.

    Raises ConfigError with every mistake, EvaluationError, MainRankFailed.
    """
    if found := mistakes(config):
        raise ConfigError(found)
    checkpoint = locate(config.checkpoint)
    local = checkpoint.folder is not None and config.data_dir is not None
    with tasks.offline(local), process_group(device_type(config.device.name)) as ranks:
        return Evaluation(config, checkpoint, ranks).run()


class Evaluation:
    """One evaluation on the ranks of a process group; all of them call every method together."""

    def __init__(self, config: EvaluateConfig, checkpoint: Checkpoint, ranks: Ranks) -> None:
        self.config, self.checkpoint, self.ranks = config, checkpoint, ranks
        self.output = checkpoint.default_output() if config.output_dir is None else Path(config.output_dir).expanduser()
        self.failed: dict[str, str] = {}
        self.lm = None  # loaded once something needs it; then also
        self.asked, self.kernels = Kernels.torch, "torch"  # what its blocks were switched to, and what came of it

    def run(self) -> dict[str, Any]:
        from transformers.utils import logging

        config = self.config
        if not (self.ranks.is_main and sys.stderr.isatty()):
            logging.disable_progress_bar()
        identity = self._on_main(self._open)
        decided_by = {
            "weights": identity, "dtype": config.dtype.name, "device": self.ranks.device.type, "limit": config.limit,
            "lm_eval": version("lm_eval"),
        }  # fmt: skip
        names = config.tasks or list(tasks.TASKS)
        loaded = {name: task for name in names if (task := self._load_task(name)) is not None}
        held_out = self._held_out()
        sides = {self.output: Kernels.cuda if config.compare_kernels else config.kernels}
        if config.compare_kernels:
            sides[self.output / "torch"] = Kernels.torch
        found = [
            self._side(folder, kernels, {**decided_by, "kernels": kernels.name}, loaded, held_out)
            for folder, kernels in sides.items()
        ]
        for side in found:
            side["tasks"] = {name: task for name, task in side["tasks"].items() if name not in self.failed}
        results = {
            "checkpoint": str(self.checkpoint),
            "step": self.checkpoint.step,
            "dtype": found[0].pop("dtype"),
            "kernels": found[0].pop("kernels"),
            "limit": config.limit,
            "tasks": found[0]["tasks"],
            "failed": self.failed,
            "mean": mean(names, found[0]["tasks"]),
            VALIDATION: found[0][VALIDATION],
            "data": config.data_dir or "hub",
            "versions": {package: version(package) for package in PACKAGES},
            "output_dir": str(self.output),
        }
        if config.compare_kernels:
            side = {key: found[1][key] for key in ("tasks", VALIDATION)}
            results["torch"] = {**side, "mean": mean(names, side["tasks"])}
        self._on_main(lambda: write(self.output / RESULTS, json.dumps(results, indent=1) + "\n"))
        return results

    def _open(self) -> str:
        """Make the output folder, and say what the checkpoint holds."""
        try:
            if self.config.output_dir is not None or self.checkpoint.folder not in self.output.parents:
                self.output.parent.mkdir(parents=True, exist_ok=True)
            self.output.mkdir(exist_ok=True)  # without parents: a checkpoint that its run has deleted stays deleted
        except OSError as error:
            raise EvaluationError(f"{self.output} cannot be written: {error}; choose another output_dir") from error
        try:
            return self.checkpoint.identity()
        except (OSError, ValueError) as error:
            here = "" if self.checkpoint.folder else "there is no such folder here, and as a name on the hub "
            raise EvaluationError(f"checkpoint={self.checkpoint}: {here}it cannot be read: {error}") from error

    def _side(
        self,
        folder: Path,
        kernels: Kernels,
        decided_by: dict[str, Any],
        loaded: dict[str, tasks.LoadedTask],
        held_out: torch.Tensor | None,
    ) -> dict[str, Any]:
        """Everything that is asked for, on `kernels` or in PyTorch, but for what `folder` has already."""
        finished = self._on_main(lambda: Finished(folder, decided_by))
        side = {"tasks": {}, VALIDATION: None, "dtype": self.config.dtype.name, "kernels": "torch"}
        for name, task in loaded.items():
            part = self._on_main(lambda name=name, task=task: finished.find(name, task.identity))
            if part is None:
                part, samples = self._score(task, kernels)
                if part is None:
                    continue
                add = (name, task.identity, part, samples)
                self._on_main(lambda add=add: finished.add(*add))
                self._say(f"{name}  {part['result']['score']:.4f}")
            else:
                self._say(f"{name}  {part['result']['score']:.4f}  (finished before)")
            side["tasks"][name] = part["result"]
            side |= {key: part[key] for key in ("dtype", "kernels")}
        if held_out is not None:
            rows = hashlib.sha256(held_out.numpy().tobytes()).hexdigest()
            side[VALIDATION] = self._on_main(lambda: finished.find(VALIDATION, rows))
            if side[VALIDATION] is None:
                side[VALIDATION] = self._validate(held_out, kernels)
                self._on_main(lambda: finished.add(VALIDATION, rows, side[VALIDATION]))
        return side

    # The downstream tasks.

    def _load_task(self, name: str) -> tasks.LoadedTask | None:
        """None, and a reason in `failed`, if some rank cannot."""
        try:
            return tasks.load_on_all(name, self.config.data_dir, self.ranks)
        except tasks.TaskUnavailable as error:
            self._fail(name, str(error))
            return None

    def _score(self, task: tasks.LoadedTask, kernels: Kernels) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
        from sparsellm.evaluation import downstream

        lm = self._model(kernels)
        error, result, samples = None, None, []
        try:
            result, samples = downstream.score(lm, task, self.config.limit)
        except Exception as exception:  # of a row that the task cannot read, or of the model; the others may go well
            error = f"{type(exception).__name__}: {exception}"
        if not self._agreed(task.name, error):
            return None, []
        dtype = str(lm.model.dtype).removeprefix("torch.")
        return {"result": result, "dtype": dtype, "kernels": self.kernels}, samples

    def _model(self, kernels: Kernels) -> Any:
        """The checkpoint as a SharedLM, loaded once, its feedforward blocks on `kernels`. Raises EvaluationError."""
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from sparsellm.evaluation.downstream import SharedLM

        if self.lm is None:
            choice = self.config.dtype.name
            try:
                model = AutoModelForCausalLM.from_pretrained(
                    self.checkpoint.model, dtype="auto" if choice == "auto" else getattr(torch, choice)
                )
                tokenizer = AutoTokenizer.from_pretrained(self.checkpoint.model)
            except (OSError, ValueError) as error:
                raise EvaluationError(f"checkpoint {self.checkpoint} cannot be loaded: {error}") from error
            self.lm = SharedLM(model.to(self.ranks.device), tokenizer, self.ranks, self.config.batch_size)
        if kernels != self.asked:
            restore(self.lm.model)
            self._accelerate(self.lm.model, kernels)
            self.asked = kernels
        return self.lm

    def _accelerate(self, model: torch.nn.Module, kernels: Kernels) -> None:
        """Switch to the kernels, where they can be; `self.kernels` says what came of it. Raises EvaluationError."""
        self.kernels, obstacle = "torch", None
        if kernels == Kernels.torch or (kernels == Kernels.auto and self.ranks.device.type == "cpu"):
            return
        if model.dtype != torch.bfloat16:
            obstacle = f"the weights are {model.dtype}: add dtype=bfloat16"
        else:
            try:
                accelerate(model, kernels.name)
                if any(isinstance(module, SparseFeedForward) for module in model.modules()):
                    self.kernels = "cuda"
            except ValueError as error:
                obstacle = str(error)
        if obstacle and kernels == Kernels.cuda:
            raise EvaluationError(f"the kernels do not compute {self.checkpoint}: {obstacle}")
        if obstacle:
            self._say(f"feedforward layers run in PyTorch, for {obstacle}")

    # The held-out split.

    def _held_out(self) -> torch.Tensor | None:
        """The run's held-out blocks, int64 [V, T + 1]; None without a run, or with the reason in `failed`."""
        if self.checkpoint.run is None:
            self._say(f"{self.checkpoint} is of no run: validation loss and Weights & Biases are skipped")
            return None
        if not self.config.validation:
            return None

        def read() -> tuple[torch.Tensor | None, str | None]:
            try:
                blocks = data.open_validation(self._run_config(), Path(self.checkpoint.model))
                return blocks[: self.config.limit], None
            except (data.DataError, ConfigError, OSError) as error:
                return None, f"{error}; validation=false goes without"

        blocks, error = self._on_main(read)
        return blocks if self._agreed(VALIDATION, error) else None

    def _run_config(self) -> Config:
        return load(self.checkpoint.run / CONFIG)

    def _validate(self, blocks: torch.Tensor, kernels: Kernels) -> dict[str, Any]:
        """As the run validates: float32 weights, and its own precision and micro-batch."""
        config, device = self._run_config(), self.ranks.device
        model_config, activation, weights = huggingface.load(self.checkpoint.model)
        with torch.device("meta"):
            decoder = Decoder(model_config, activation)
        decoder.load_state_dict(weights, assign=True)
        decoder.to(device).eval()
        if kernels != Kernels.torch and device.type == "cuda" and not obstacles_to_kernels(config):
            accelerate(decoder, kernels.name)
        bfloat16 = config.runtime.precision == Precision.bfloat16
        autocast = torch.autocast(device.type, torch.bfloat16, enabled=bfloat16)
        loss = cross_entropy(decoder, blocks, config.runtime.micro_batch_size, autocast, self.ranks)
        return {"loss": loss, "perplexity": math.exp(loss), "tokens": blocks.shape[0] * (blocks.shape[1] - 1)}

    # Ranks.

    def _on_main(self, work: Callable[[], T]) -> T:
        """The main rank's `work()`, on all ranks. Its exception is MainRankFailed on the others."""
        result: list[Any] = [None]
        with main_first(self.ranks):
            if self.ranks.is_main:
                result = [work()]
        dist.broadcast_object_list(result, src=0)
        return result[0]

    def _agreed(self, name: str, error: str | None) -> bool:
        """Whether no rank has an error; the first one is kept in `failed`, and said."""
        if (found := first_error(error)) is not None:
            self._fail(name, found)
        return found is None

    def _fail(self, name: str, reason: str) -> None:
        self.failed[name] = reason
        self._say(f"{name}  failed: {reason}")

    def _say(self, text: str) -> None:
        if self.ranks.is_main:
            print(text, file=sys.stderr, flush=True)
