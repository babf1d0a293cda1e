"""Evaluates a checkpoint: locate it, load it, score it, and resume an earlier, interrupted evaluation.

downstream.py and perplexity.py score models in memory. lm-eval is imported only when tasks are evaluated, because
training imports this package too.
"""

import json
import math
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from sparsellm.config import ConfigError, EvaluateConfig, Kernels, Precision, takes_kernels
from sparsellm.data import DataError
from sparsellm.distributed.groups import Ranks, device_type, first_error, on_main, process_group
from sparsellm.evaluation import tasks
from sparsellm.evaluation.perplexity import SEQUENCES, cross_entropy, perplexity, round_linears
from sparsellm.evaluation.request import TORCH, Request, mistakes, rows_of
from sparsellm.evaluation.results import (
    FLOAT8,
    RESULTS,
    VALIDATION,
    Finished,
    as_json,
    discard_others,
    dtypes,
    has_scores,
    kept,
)
from sparsellm.hf import hub, pretrained
from sparsellm.inference.accelerate import accelerate, is_accelerated, restore
from sparsellm.model import Decoder
from sparsellm.ops import backend
from sparsellm.ops.compiler import KernelsUnavailable
from sparsellm.runs.locate import unreadable
from sparsellm.runs.precision import computation, load_float32, obstacle
from sparsellm.system import regular
from sparsellm.system.console import warn
from sparsellm.system.errors import SparsellmError
from sparsellm.system.files import write_whole

T = TypeVar("T")


class EvaluationError(SparsellmError, RuntimeError):
    """The checkpoint cannot be evaluated as requested; the message says why."""


def evaluate_checkpoint(
    config: EvaluateConfig,
    record: Callable[[dict[str, Any]], object] = lambda _: None,
    show: Callable[[dict[str, Any]], object] = lambda _: None,
) -> dict[str, Any]:
    """Evaluate, write results.json, and return its contents, the same on all ranks. Works with and without torchrun.

    results.json has all scores of these weights: from this evaluation, and, for other tasks and for tasks that failed
    this time, from earlier evaluations. Scores of other weights are removed. Without any score no file is written.

    The main rank calls `show` and then `record` with the contents after writing them and before any rank returns,
    because torchrun ends the other ranks once one has failed.

    {"checkpoint", "identity" of its weights, "step", "dtype" of all scores ("float8": bfloat16 with FP8 attention and
    gate; null without any), "float8": true if asked for (otherwise left out), "tasks": {TASK:
    {"metric", "score", "stderr", "acc", "acc_stderr", "acc_norm", "acc_norm_stderr", "split", "rows", "note",
    "measured": {"dtype", "kernels", "device", "data", "limit", and the version of each package}}}, "failed": {TASK:
    reason}, "mean" of the scores, "mean_acc" of `acc`, "validation": {"loss" in nats per token, "perplexity", "tokens",
    "precision", "device"}, "output_dir"}, and under "torch" the tasks, means and validation in PyTorch if kernels were
    compared. Null values: standard errors for a single row; means if a failed task has no earlier score or tasks were
    measured with different settings; "validation" without a run; versions of packages that are not installed. A failing
    task does not affect others.

    Raises ConfigError with all messages of `mistakes`, EvaluationError if the checkpoint cannot be evaluated, and
    MainRankFailed on the other ranks if the main rank failed.
    """
    if found := mistakes(config):
        raise ConfigError(found)
    request = Request.of(config)
    # connect=False: objects are exchanged between CPUs, so NCCL connects only if the held-out loss is summed on GPUs.
    with process_group(device_type(config.device.name), connect=False) as ranks:
        wanted = request.on_hub
        reached = wanted is not None and on_main(ranks, lambda: hub.answers(wanted))
        with hub.offline(not reached):
            return Evaluation(request, ranks).run(record, show)


def is_complete(config: EvaluateConfig) -> bool:
    """Whether results.json equals what `evaluate_checkpoint(config)` would write, so that nothing needs scoring.

    For one process. Loads the rows, not the model. False if anything cannot be read; the evaluation then reports why.
    """
    if config.checkpoint is None or mistakes(config):
        return False
    request = Request.of(config)
    try:
        if not (request.output / RESULTS).exists():
            return False  # known without the weights
        with hub.offline(request.on_hub is None or not hub.answers(request.on_hub)):
            identity = request.checkpoint.identity()
            request = request.opened(identity)
            written = regular.content(request.output / RESULTS).decode()
            if not set(request.tasks) <= json.loads(written)["tasks"].keys():
                return False  # decided without reading rows
            rows = {name: tasks.load(name, config.data_dir).identity for name in request.tasks}
            if (held_out := request.held_out()) is not None:
                rows[VALIDATION] = rows_of(held_out)
        for folder in request.sides:
            finished = request.finished(folder, identity)
            for name, of in rows.items():
                part = finished.find(name, of)
                if part is None or (name != VALIDATION and part["measured"]["data"] != request.source):
                    return False
        return written == as_json(request.results(identity, failed={}))
    except (OSError, ValueError, KeyError, TypeError):
        return False


class Evaluation:
    """One evaluation. All ranks of the process group call every method together."""

    def __init__(self, request: Request, ranks: Ranks) -> None:
        self.request, self.ranks = request, ranks
        self.config, self.checkpoint = request.config, request.checkpoint
        self.failed: dict[str, str] = {}
        self.loading: Future[Any] | None = None  # loads the model; started when it is first needed
        self.asked, self.kernels = Kernels.torch, "torch"  # the requested and the actual kernels of the model's blocks
        self.obstacle = obstacle(self.asked, ranks.device.type)  # why the blocks run in PyTorch

    def run(
        self, record: Callable[[dict[str, Any]], object], show: Callable[[dict[str, Any]], object]
    ) -> dict[str, Any]:
        from transformers.utils import logging

        if not (self.ranks.is_main and sys.stderr.isatty()):
            logging.disable_progress_bar()
        if not self.ranks.is_main:
            # The main rank takes seconds to import these for opening the checkpoint; the others import them meanwhile.
            from transformers import AutoTokenizer, LlamaConfig  # noqa: F401
        identity, self.request = on_main(self.ranks, self._open)
        begun = on_main(self.ranks, lambda: any(kept(folder, identity) for folder in self.request.sides))
        begun |= not self.request.tasks  # the held-out loss loads its own copy of the weights
        if not begun:
            self._begin_loading()
            if self.config.data_dir is None:
                self._model(Kernels.torch)  # refuse a broken model before downloading rows
        loaded = {}
        for name in self.request.tasks:
            try:
                loaded[name] = tasks.load_on_all(name, self.config.data_dir, self.ranks)
            except tasks.TaskUnavailable as error:
                self._fail(name, str(error))
        if self.failed and self.config.data_dir is None and self.checkpoint.run is not None:
            self.ranks.say("tasks=none evaluates the held-out text alone, without rows from the hub")
        if not begun:
            self._model(Kernels.torch)  # refuse a broken model even if all rows are finished
        held_out = self._held_out()
        if held_out is None and not self.request.tasks and not self.failed:
            self._fail(VALIDATION, "the checkpoint has no held-out text, and tasks=none scores nothing else")
        for folder in self.request.sides:
            self._side(folder, identity, loaded, held_out)
        results = on_main(self.ranks, lambda: self.request.results(identity, self.failed))
        unwritten = on_main(self.ranks, lambda: self._write(results))
        on_main(self.ranks, lambda: show(results))
        if unwritten is not None:
            raise EvaluationError(unwritten)
        if has_scores(results):
            on_main(self.ranks, lambda: record(results))
        return results

    def _open(self) -> tuple[str, Request]:
        """(identity of the checkpoint, opened request). Creates the output folder once the model's files are read."""
        try:
            if self.checkpoint.unchecked:
                self.ranks.say(self.checkpoint.unchecked)
            identity = self.checkpoint.identity()
            vocab_size = pretrained.read_config(self.checkpoint.model).get_text_config().vocab_size
            tokenizer = pretrained.read_tokenizer(self.checkpoint.model, vocab_size)
            if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
                raise pretrained.BrokenModel(
                    f"the tokenizer of {self.checkpoint.model} has neither a bos_token nor an eos_token, and lm-eval"
                    " scores only models that have one: name a token of tokenizer.json in tokenizer_config.json"
                    ' ("eos_token": "TOKEN")'
                )
            opened = self.request.opened(identity)
        except (OSError, ValueError) as error:
            raise EvaluationError(unreadable(self.checkpoint, error)) from error
        if self.config.float8 and opened.dtype != torch.bfloat16:
            raise EvaluationError(
                f"{self.checkpoint} is evaluated in {opened.dtype} ({opened.why}), and float8=true computes bfloat16"
                " models: add dtype=bfloat16"
            )
        if opened.output != self.request.output:
            others = " and ".join(sorted(dtypes(self.request.output, identity)))
            warn(
                f"{self.request.output} has scores in {others}: scores in {opened.output.name} are written to"
                f" {opened.output}"
            )
        self._make(opened.output)
        return identity, opened

    def _make(self, output: Path) -> None:
        """Create the folder `output`, but never the checkpoint's own folder, because the run may be deleting the
        checkpoint. Raises EvaluationError if the folder cannot be created."""
        try:
            inside = self.config.output_dir is None and self.checkpoint.folder in output.parents
            if not inside:
                output.parent.mkdir(parents=True, exist_ok=True)
            else:
                for parent in reversed(output.parents):
                    if self.checkpoint.folder in parent.parents:
                        parent.mkdir(exist_ok=True)
            output.mkdir(exist_ok=True)
        except OSError as error:
            raise EvaluationError(f"{output} cannot be written: {error}; choose another output_dir") from error

    def _side(
        self, folder: Path, identity: str, loaded: dict[str, tasks.LoadedTask], held_out: torch.Tensor | None
    ) -> None:
        """Score the tasks and the held-out split that have no result yet, for the side in `folder`."""
        kernels = self.request.sides[folder]
        finished = on_main(self.ranks, lambda: self.request.finished(folder, identity))
        parts = {name: on_main(self.ranks, partial(self._found, finished, task)) for name, task in loaded.items()}
        if missing := [task for name, task in loaded.items() if parts[name] is None]:
            self._model(kernels).builder.announce(missing, self.config.limit)
            if self.ranks.is_main:
                assert self.request.dtype is not None  # set by `Request.opened`
                warn(computation(self.request.dtype, self.request.why, self.obstacle, self.kernels))
        for name, task in loaded.items():
            part = parts[name]
            samples: list[dict[str, Any]] | None = None
            if part is None:
                part, samples = self._score(task, kernels)
                if part is None:
                    continue
            # Print the score before writing it, because the disk may be full.
            before = "  (finished before)" if samples is None else ""
            self.ranks.say(f"{name}  {part['result']['score']:.4f}{before}")
            if samples is not None:
                on_main(self.ranks, partial(finished.add, name, task.identity, part, samples))
        if held_out is not None:
            rows = rows_of(held_out)
            if on_main(self.ranks, lambda: finished.find(VALIDATION, rows)) is None:
                part = self._validate(held_out, kernels)
                if math.isfinite(part["loss"]):
                    on_main(self.ranks, lambda: finished.add(VALIDATION, rows, part))
                else:  # the loss is the same on all ranks
                    self._fail(VALIDATION, f"the loss is {part['loss']}: these weights give logits that are not finite")

    def _found(self, finished: Finished, task: tasks.LoadedTask) -> dict[str, Any] | None:
        """The task's stored result, if any. A result that was scored on the same rows in another folder is updated to
        name this folder."""
        part = finished.find(task.name, task.identity)
        if part is not None and part["measured"]["data"] != self.request.source:
            part["measured"]["data"] = self.request.source
            finished.add(task.name, task.identity, part)
        return part

    def _write(self, results: dict[str, Any]) -> str | None:
        """Write the results and remove those of other weights. Returns why they cannot be written, or None."""
        output, weights = self.request.output, results["identity"]
        path = output / RESULTS
        try:
            if has_scores(results):
                write_whole(path, as_json(results))
            elif _identity_in(path) not in (None, weights):
                path.unlink()
            for folder in (output, output / TORCH):
                discard_others(folder, weights)
        except OSError as error:
            return f"{path} cannot be written: {error}; free some space, or choose another output_dir"
        return None

    def _score(
        self, task: tasks.LoadedTask, kernels: Kernels
    ) -> tuple[dict[str, Any], list[dict[str, Any]]] | tuple[None, None]:
        """The task's result and samples; None, with the reason in `failed`, if some rank fails."""
        from sparsellm.evaluation import downstream

        lm = self._model(kernels)
        error, result = None, None
        samples: list[dict[str, Any]] = []
        try:
            result, samples = downstream.score(lm, task, self.config.limit)
        except Exception as exception:  # from an unreadable row or the model; other tasks may succeed
            error = f"{type(exception).__name__}: {exception}"
        if (error := first_error(error)) is not None:
            self._fail(task.name, error)
            return None, None
        return {"result": result, "measured": self.request.measured(self.kernels)}, samples

    def _model(self, kernels: Kernels) -> Any:
        """The checkpoint as a SharedLM, loaded once, with blocks on `kernels`. Raises EvaluationError on failure."""
        lm = self._begin_loading().result()
        if kernels != self.asked:
            restore(lm.model)
            self._accelerate(lm.model, kernels)
            self.asked = kernels
        return lm

    def _begin_loading(self) -> Future[Any]:
        """Start loading the checkpoint as a SharedLM in a thread, if not started yet; rows are read meanwhile."""
        # Imported here and not in the thread, because two threads must not import transformers at once.
        from sparsellm.evaluation.downstream import SharedLM

        def load() -> SharedLM:
            if self.ranks.device.type == "cuda":
                torch.cuda.set_device(self.ranks.device)  # the current device is per thread
            try:
                assert self.request.dtype is not None  # set by `Request.opened`
                model = pretrained.read_model(self.checkpoint.model, self.request.dtype)
                vocab_size = model.config.get_text_config().vocab_size
                tokenizer = pretrained.read_tokenizer(self.checkpoint.model, vocab_size)
            except (OSError, ValueError) as error:
                raise EvaluationError(unreadable(self.checkpoint, error)) from error
            return SharedLM(model.to(self.ranks.device), tokenizer, self.ranks, self.config.batch_size)

        if self.loading is None:
            self.loading = ThreadPoolExecutor(1, "model").submit(load)
        return self.loading

    def _accelerate(self, model: torch.nn.Module, kernels: Kernels) -> None:
        """Switch to `kernels` if they can run, and set `self.kernels` and `self.obstacle`, or raise EvaluationError."""
        if self.config.float8:
            self._accelerate_in_float8(model, kernels)
            self.kernels, self.obstacle = "cuda", None
            return
        self.kernels, self.obstacle = "torch", obstacle(kernels, self.ranks.device.type)
        if self.obstacle:
            return
        if model.dtype != torch.bfloat16:
            self.obstacle = f"the weights are {model.dtype}: add dtype=bfloat16"
        else:
            try:
                accelerate(model, kernels.name)
                if is_accelerated(model):
                    self.kernels = backend.loaded() or "torch"
                else:
                    self.obstacle = backend.available()[1]
            except ValueError as error:
                self.obstacle = str(error)
        if self.obstacle and kernels.demanded:
            raise EvaluationError(f"the kernels do not compute {self.checkpoint}: {self.obstacle}")

    def _accelerate_in_float8(self, model: torch.nn.Module, kernels: Kernels) -> None:
        """Accelerate with FP8, or raise EvaluationError. One engine computes every call, so that scores depend neither
        on earlier calls nor on timings."""
        try:
            accelerate(model, kernels.name, "tile", float8=True)
        except (KernelsUnavailable, ValueError) as error:
            raise EvaluationError(f"FP8 does not compute {self.checkpoint}: {error}") from error

    def _held_out(self) -> torch.Tensor | None:
        """`Request.held_out` on all ranks; None, with the reason in `failed`, if it fails."""
        if self.checkpoint.run is None:
            self.ranks.say(f"{self.checkpoint} belongs to no run: validation loss and Weights & Biases are skipped")

        def read() -> tuple[torch.Tensor | None, str | None]:
            try:
                return self.request.held_out(), None
            except (DataError, ConfigError, OSError) as error:
                return None, f"{error}; validation=false skips it"

        blocks, error = on_main(self.ranks, read)
        if error is not None:
            self._fail(VALIDATION, error)
        if blocks is None:
            return None
        config = self.request.run_config()
        if (self.checkpoint.step or 0) * config.training.tokens_per_step < config.sparsity.relu_tokens:
            self.ranks.say(
                f"{self.checkpoint}: its run validated with a gate activation between SiLU and ReLU, but the held-out"
                " loss here uses the final gate, ReLU"
            )
        return blocks

    def _validate(self, blocks: torch.Tensor, kernels: Kernels) -> dict[str, Any]:
        """The held-out loss, computed as in training: with the run's float32 weights, precision and micro-batch. FP8
        rounds these weights to bfloat16 first, as autocast does in training."""
        config, device = self.request.run_config(), self.ranks.device
        try:
            model_config, activation, weights = load_float32(self.checkpoint)
        except (OSError, ValueError) as error:
            raise EvaluationError(unreadable(self.checkpoint, error)) from error
        with torch.device("meta"):
            decoder = Decoder(model_config, activation)
        decoder.load_state_dict(weights, assign=True)
        decoder.to(device).eval()
        if self.config.float8:
            round_linears(decoder)
            self._accelerate_in_float8(decoder, kernels)
        elif takes_kernels(replace(config.runtime, kernels=kernels), activation, device.type):
            accelerate(decoder, kernels.name)
        bfloat16 = self.config.float8 or config.runtime.precision == Precision.bfloat16
        autocast = torch.autocast(device.type, torch.bfloat16, enabled=bfloat16)
        given = config.runtime.micro_batch_size
        sequences = min(len(blocks), SEQUENCES if isinstance(given, str) else given)
        loss = cross_entropy(decoder, blocks, sequences, autocast, self.ranks)
        return {
            "loss": loss, "perplexity": perplexity(loss), "tokens": blocks.shape[0] * (blocks.shape[1] - 1),
            "precision": FLOAT8 if self.config.float8 else config.runtime.precision.name, "device": device.type,
        }  # fmt: skip

    def _fail(self, name: str, reason: str) -> None:
        self.failed[name] = reason
        self.ranks.say(f"{name}  failed")  # the final table says why


def _identity_in(path: Path) -> str | None:
    """The identity of the weights in a results.json; None if there is no file or no identity in it."""
    try:
        return json.loads(regular.content(path)).get("identity")
    except (OSError, ValueError):
        return None
