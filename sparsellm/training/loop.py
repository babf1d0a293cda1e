"""The training loop.

One optimizer step over the M tokens of the global batch minimises (DESIGN §2)

    loss = (1/M) sum over tokens of CE  +  (lambda/M) sum over tokens and layers of |h|_1

and with a teacher a KL term (training/distillation.py). Each micro-batch contributes its sums divided by M, so
gradients add up to those of one big batch, whatever the micro-batch size. Every loss is multiplied by the number
of ranks, because gradients are averaged over the ranks. DDP reduces gradients once per step during backward, in
buckets; a sharded model reduces them layer by layer (training/sharding.py).

A step does not synchronize with the device. The host waits only when it reads values of an earlier step (`_read`, and
`Plans` for the step before last), at validation and evaluation, while a checkpoint is copied to the host, and once
after the first steps, to estimate the remaining time (`Progress.step`).
"""

import json
import math
import shlex
import signal
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sparsellm.config import Config, Float8, Precision, l1_denominator, takes_kernels
from sparsellm.data import Data, DataError
from sparsellm.distributed.groups import Ranks, first_error, on_main, report_progress
from sparsellm.evaluation.live import LiveEvaluation
from sparsellm.evaluation.perplexity import cross_entropy
from sparsellm.hf import card, conversion
from sparsellm.inference.accelerate import accelerate
from sparsellm.model.dtypes import DTYPES
from sparsellm.ops import backend
from sparsellm.ops.accumulation import accumulating
from sparsellm.runs import layout, metrics, report
from sparsellm.runs.checkpoint import CheckpointError, Checkpoints
from sparsellm.runs.divergence import LossRange
from sparsellm.runs.layout import CHECKPOINTS, PLOTS, STATE, VALUES, WAITING_ROW
from sparsellm.runs.metrics import MetricsError
from sparsellm.runs.retention import Retention, last_common_step
from sparsellm.runs.step_metrics import HeldOut, Rows, StepClock, StepReport, StepSums, StepValues, reduce_step
from sparsellm.runs.tensorboard_record import TensorboardRun
from sparsellm.runs.wandb_record import WandbRun
from sparsellm.system.console import warn
from sparsellm.system.energy import EnergyMeter
from sparsellm.system.errors import SparsellmError, one_line
from sparsellm.training import float8, sharding, warm_start
from sparsellm.training.distillation import Teacher
from sparsellm.training.memory import Gpu, StepMemory
from sparsellm.training.micro_batch import MicroBatch
from sparsellm.training.optimizer import Optimizer, learning_rate
from sparsellm.training.plans import Plans
from sparsellm.training.profile import Profile
from sparsellm.training.progress import Progress
from sparsellm.training.relu_annealing import ReluAnnealing
from sparsellm.training.run_log import RunLog
from sparsellm.training.sparsity import Reinitialization, SilentNeurons, l1_coefficient
from sparsellm.training.stop import StopRequest

SAMPLE_PROMPT = "The"


class TrainingDiverged(SparsellmError, RuntimeError):
    """Too many consecutive steps had a non-finite gradient, or training.stop_on_divergence ended the run earlier."""


def not_finite(values: StepValues) -> tuple[str, str]:
    """Returns (term that made the step's gradient non-finite, advice for the user)."""
    if not math.isfinite(values.ce):
        return "the cross entropy", "lower optimizer.learning_rate (or model.init_std, if these are the first steps)"
    if not math.isfinite(values.kl):
        return "the KL from the teacher", "raise distill.temperature, or give another distill.teacher"
    if values.l1 is not None and not math.isfinite(values.known["l1_coefficient"] * sum(values.l1)):
        return "the L1 loss", "lower sparsity.l1_coefficient"
    return "the gradient of a finite loss", "lower optimizer.learning_rate or sparsity.l1_coefficient"


def _agree_on_kernels(rank: int) -> None:
    """Raise KernelsUnavailable on all ranks if only some have the kernels: only they would run `Plans`' collectives."""
    lacking = first_error(None if backend.loaded() else f"rank {rank}: {backend.available()[1]}")
    having = first_error(f"rank {rank}" if backend.loaded() else None)
    if lacking and having:
        raise backend.KernelsUnavailable(
            f"{lacking}; {having} has the kernels: make them available on all ranks, or use runtime.kernels=torch"
        )


class Trainer:
    """Trains a run in `folder` on all ranks of a process group. Holds model, optimizer, data position and metrics."""

    def __init__(
        self, config: Config, ranks: Ranks, data: Data, folder: Path, evaluation: LiveEvaluation | None = None
    ) -> None:
        self.config, self.ranks, self.data, self.folder, self.evaluation = config, ranks, data, folder, evaluation
        model, training, sparsity, runtime = config.model, config.training, config.sparsity, config.runtime
        device, activation = ranks.device, config.sparsity.activation
        self.plans: Plans | None = None  # None: PyTorch traces the feedforward layers
        self.step = 0
        memory = StepMemory(
            model, activation, runtime, training.batch_size // ranks.world_size, training.sequence_length,
            ranks.world_size, sharding.sharing(model, runtime.shard, ranks), taught=config.distill.teacher is not None,
            muon=config.optimizer.muon,
        )  # fmt: skip
        # Gpu sets the process's memory limit, so it comes before the first tensor.
        gpu = Gpu(device, runtime.memory_limit_gib) if device.type == "cuda" else None
        torch.manual_seed(training.seed)
        self.decoder = sharding.decoder(model, activation, runtime, ranks)
        if takes_kernels(runtime, activation, device.type):
            # `Plans.begin` calibrates on rank 0. In FP8, nothing may replace the CUDA kernels.
            kernels = "cuda" if runtime.float8 == Float8.all else runtime.kernels.name
            accelerate(self.decoder, kernels, calibrate=False)
            _agree_on_kernels(ranks.rank)
            if backend.loaded():
                self.plans = Plans(model, training, runtime, self.decoder, ranks)
        if runtime.float8 is not None:
            in_torchao = runtime.float8 == Float8.all and self.plans is None
            float8.convert(self.decoder, in_torchao, runtime.float8_recipe)
        if runtime.compile:
            self.decoder.compile_parts()
        self.model = sharding.distributed(self.decoder, runtime, model.init_std, ranks)
        annealed = sparsity.relu_tokens > 0
        self.annealing = ReluAnnealing(sparsity, self.decoder, self.plans, device) if annealed else None
        self.teacher: Teacher | None = None  # loaded in `fit`
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=runtime.precision == Precision.bfloat16)
        self.optimizer = Optimizer(self.decoder, config.optimizer)
        self.micro_batch = MicroBatch(
            memory, ranks, folder, gpu, self.plans, self.decoder, partial(self.accumulate, reduce=False),
            self.optimizer.drop_gradients,
        )  # fmt: skip
        self.silent = SilentNeurons(model, device)
        self.reinitialization = None
        if sparsity.reinit_dead_after_tokens is not None:
            self.reinitialization = Reinitialization(sparsity, training, model, self.decoder, self.optimizer)
        self.data_state: dict[str, Any] | None = None  # position in the data
        self.other_ends: list[int] = []  # end-of-text tokens of the init_from model other than the data's
        self.card_rows: list[dict[str, Any]] = []  # rows for the model card of the checkpoint being written
        self.resumed: dict[str, Any] = {}  # values of the checkpoint from which the run resumes
        self.log: RunLog | None = None  # on the main rank, after `_open_log`
        self.energy = EnergyMeter(device)
        self.loss_range = LossRange()
        self.diverged = False  # whether training.stop_on_divergence ends the run
        self.reported: StepReport | None = None  # the last logged step, until `_read` reads its values
        # The metrics row of a step that is not scored yet: on the main rank, and after a resume on all ranks.
        self.row: dict[str, Any] | None = None
        self.retention = Retention(config.run, training.steps, last_common_step(training, config.optimizer, sparsity))
        self.checkpoints = Checkpoints(
            folder / CHECKPOINTS, ranks, config.run.keep_checkpoints, self._export_with_card,
            self.retention.for_good,
        )  # fmt: skip

    @property
    def tokens(self) -> int:
        """Number of training tokens so far, over all ranks."""
        return self.step * self.config.training.tokens_per_step

    def fit(self) -> int:
        """Train from the newest checkpoint to the end, or until asked to stop. Returns 0, 128 + signal, or 1 if
        training.stop_on_divergence ended the run.

        Raises TrainingDiverged, CheckpointError, MetricsError, MicroBatchError, and ConfigError if the initial model or
        the teacher cannot be read or has changed.
        """
        self._resume()
        if self.step >= self.config.training.steps and self.row is None:
            self.ranks.say(
                f"sparsellm: {self.folder.name} has a checkpoint at step {self.step:,}, its last step: nothing is left"
                " to train"
            )
            return 0
        if self.config.distill.teacher is not None:
            config = self.config
            self.teacher = Teacher(
                config.distill, config.runtime, config.run.name, self.ranks, self.autocast, self.resumed.get("teacher")
            )
            self.micro_batch.teacher_bytes = self.teacher.bytes
        self.micro_batch.choose()
        self.loss_range = on_main(self.ranks, self._open_log)
        first = self.step
        with StopRequest() as stop:
            try:
                self._train(stop)
            except DataError:
                # Save the completed steps. With several ranks this is impossible, because a save needs all ranks and
                # the others are already in the next step.
                if self.ranks.world_size == 1 and self.step > first and not self.optimizer.skipped_in_row.item():
                    self._read()
                    self._save()
                raise
            finally:
                if self.log is not None:
                    self.log.progress.close()
                self.checkpoints.wait()  # finish the save in progress, whatever ends the run
            # If the run stopped early but this rank received no signal, another rank did: report SIGTERM.
            signalled = 128 + (stop.signal or signal.SIGTERM)
            exit_code = 0 if self.step >= self.config.training.steps else 1 if self.diverged else signalled
            if self.log is not None:
                self._finish(self.log, exit_code)
            dist.barrier()  # torchrun ends all ranks once one has left, and the main rank may still draw figures
        return exit_code

    def _train(self, stop: StopRequest) -> None:
        """Run training steps, validations, evaluations and saves until the last step or a stop request on any rank.

        A step that is both saved and scored is saved first, so that a failed validation or evaluation costs no
        checkpoint. The checkpoint holds the step's row without scores; a resumed run computes them before training on.
        """
        config, stopping, save_due = self.config, False, False
        profile = Profile(config.runtime.profile_steps, self.folder, self.ranks)
        if self.row is not None:
            self._score()
        with closing(self.data.batches(self.data_state)) as batches:
            while self.step < config.training.steps and (save_due or not stopping):
                with profile.step(self.step + 1):
                    sums, norm, clock = self.advance(batches)
                stopping |= self._read()  # values of an earlier step, already available
                scoring = self._validation_due or self._evaluation() is not None
                if scoring or self.step == 1 or self._due(config.logging.every):
                    self.reported = self._reduce(sums, norm, clock, stop.signal is not None)
                if scoring:
                    stopping |= self._read(whole=False)
                save_due |= stopping or self.retention.is_due(self.step)
                # Checkpoints made during non-finite steps would displace good ones, so a save waits for a finite step.
                if save_due and (self.step == config.training.steps or not self.optimizer.skipped_in_row.item()):
                    stopping |= self._read()  # rows must be written before the checkpoint
                    self._save()
                    save_due = False
                if scoring:
                    self._score()
                if self.log is not None:
                    self.log.progress.step(self.step, clock)
        profile.write()

    def advance(self, batches: Iterator[tuple[Tensor, dict]]) -> tuple[StepSums, Tensor, StepClock]:
        """Train on the next batch. Returns (sums, gradient norm, clock)."""
        clock = StepClock(self.ranks.device)
        tokens, self.data_state = next(batches)
        clock.data_is_here()
        self.step += 1
        report_progress(self.step)
        sums, norm = self.train_step(tokens)
        clock.stop()
        return sums, norm, clock

    def train_step(self, tokens: Tensor) -> tuple[StepSums, Tensor]:
        """One optimizer step on this rank's sequences, tokens [B, T + 1] int64. Returns (sums, gradient norm)."""
        if self.plans is not None and self.plans.before(self.step):
            self.micro_batch.decided(self.step, tokens)
        sums = self.micro_batch.run(self.step, lambda size: self.accumulate(tokens, size))
        norm = self.optimizer.step(learning_rate(self.step, self.config.training.steps, self.config.optimizer))
        # Only the device knows whether the step was skipped. If so, the step's counts are dropped, because NaN "fires".
        finite = norm.isfinite()
        if self.plans is not None:
            self.plans.after(self.step, sums, finite)
        if sums.fired is not None:
            self.silent.update(sums.fired, self.config.training.tokens_per_step, finite)
        if self.reinitialization is not None and self.reinitialization.due(self.step):
            self.reinitialization.apply(self.step, self.silent.reduced())
        return sums, norm

    def accumulate(self, tokens: Tensor, size: int, reduce: bool = True) -> StepSums:
        """Forward and backward over this rank's sequences, tokens [B, T + 1] int64, `size` at a time. The last
        micro-batch reduces the accumulated gradients over the ranks, unless reduce=False."""
        if self.annealing is not None:
            self.annealing.at(self.tokens)
        sums = StepSums()
        sparsity, model = self.config.sparsity, self.config.model
        l1_weight = l1_coefficient(self.tokens, sparsity) / l1_denominator(sparsity.l1_normalization, model)
        scale = self.ranks.world_size / self.config.training.tokens_per_step
        micro_batches = tokens.to(self.ranks.device, non_blocking=True).split(size)
        accumulates = len(micro_batches) > 1 and not sharding.is_sharded(self.model)
        weights = self.plans.weights() if self.plans is not None and accumulates else []
        with accumulating(weights, self.micro_batch.shares_casts) as accumulated:
            for i, micro_batch in enumerate(micro_batches):
                accumulated.next_micro_batch()
                last = reduce and i == len(micro_batches) - 1
                with sharding.micro_batch(self.model, self.config.runtime, last):
                    teacher_output = () if self.teacher is None else (self.teacher.output(micro_batch[:, :-1]),)
                    with self.autocast:
                        out = self.model(micro_batch[:, :-1], micro_batch[:, 1:], *teacher_output)
                    loss = out.ce if out.loss is None else out.loss
                    if out.l1 is not None:
                        loss = loss + l1_weight * out.l1.sum()
                    (loss * scale).backward()
                sums.add(out, micro_batch[:, 1:].numel())
        return sums

    def _due(self, every: int) -> bool:
        return every > 0 and (self.step % every == 0 or self.step == self.config.training.steps)

    def _reduce(self, sums: StepSums, norm: Tensor, clock: StepClock, stop: bool) -> StepReport:
        known = {
            "step": self.step,
            "tokens": self.tokens,
            "lr": learning_rate(self.step, self.config.training.steps, self.config.optimizer),
            "l1_coefficient": l1_coefficient(self.tokens, self.config.sparsity),
            "relu_share": None if self.annealing is None else self.annealing.share,
            "plan_per_layer": ["torch"] * len(self.decoder.layers) if self.plans is None else self.plans.engines,
            "micro_batch_size": self.micro_batch.size,
            "ffn_saved_bytes": self.micro_batch.ffn_saved_bytes(),
        }
        dead_after = self.config.sparsity.dead_after_tokens
        same = {
            "grad_norm": norm,
            "skipped": self.optimizer.skipped,
            "skipped_in_row": self.optimizer.skipped_in_row,
            "dead": None if sums.fired is None else (self.silent.reduced() >= dead_after).sum(1),
            "reinitialized": None if self.reinitialization is None else self.reinitialization.count,
        }
        return reduce_step(sums, same, stop, self.energy.mj_per_token(self.tokens), known, clock)

    def _evaluation(self) -> LiveEvaluation | None:
        """The evaluation, if one is due at this step."""
        return self.evaluation if self._due(self.config.evaluation.every) else None

    def _read(self, whole: bool = True) -> bool:
        """Wait for the last logged step's values, unless already read, and write its row. Returns whether the run
        should stop. With whole=False, the row is kept until `_score` adds the scores."""
        if self.reported is None:
            return False
        values, self.reported = self.reported.read(), None
        lost = values.skipped_in_row >= self.config.runtime.max_skipped_steps
        if self.log is not None:
            self.row = self.log.rows.row(values)
            if whole or lost:
                self._put_row(self.log)
        if lost:
            what, remedy = not_finite(values)
            raise TrainingDiverged(
                f"{values.skipped_in_row} consecutive steps, up to step {values.known['step']}, were skipped because"
                f" {what} is not finite: {remedy}, and choose another run.name. The checkpoints in"
                f" {self.folder / CHECKPOINTS} are older and intact"
            )
        return self._judge(values) or values.stop

    def _judge(self, values: StepValues) -> bool:
        """Whether the run must end because its loss has left the expected range. `values` are the same on all ranks."""
        known, ce = values.known, values.ce / self.config.training.tokens_per_step
        if self.loss_range.add(known["step"], ce if math.isfinite(ce) else None, known["relu_share"]):
            self.diverged |= self.config.training.stop_on_divergence
            if self.log is not None:
                self.log.diverges(self.loss_range, self.diverged)
        return self.diverged

    def _score(self) -> None:
        """Run the validation and evaluation due at this step, and write the row with their results. Collective.

        Saves the last step again, so that the model card in its checkpoint includes the scores.
        """
        held_out = self._validate() if self._validation_due else None
        evaluation = self._evaluation()
        scores = None if evaluation is None else evaluation.scores(self.step, self.decoder, self.data)
        if self.log is not None and self.row is not None:
            self.row = self.log.rows.scored(self.row, held_out, scores)
            self._put_row(self.log)
        self.row = None
        if self.step == self.config.training.steps:
            self._save()

    @property
    def _validation_due(self) -> bool:
        """Whether a validation is due at this step; never with data.validation_fraction=0, which holds out nothing."""
        return len(self.data.validation) > 0 and self._due(self.config.logging.validation_every)

    def _put_row(self, log: RunLog) -> None:
        """Write the row in `self.row` to all outputs of `log`."""
        row, self.row = self.row, None
        assert row is not None
        log.failed_save(self.checkpoints.failure())
        log.write(row, self.checkpoints.settle)

    def _validate(self) -> HeldOut:
        blocks, each = self.data.validation, self.data.named_validation
        arguments = self.micro_batch.first.size, self.autocast, self.ranks
        named = {name: cross_entropy(self.decoder, each[name], *arguments) for name in each}
        return HeldOut(cross_entropy(self.decoder, blocks, *arguments), blocks[:, 1:].numel(), named)

    def _tensors(self, silent_tokens: Tensor) -> dict[str, Tensor]:
        sparsity = {"silent_tokens": silent_tokens}
        if self.reinitialization is not None:
            sparsity |= self.reinitialization.state()
        tensors = {f"model.{name}": parameter.detach() for name, parameter in self.optimizer.parameters.items()}
        tensors |= {f"optimizer.{name}": tensor for name, tensor in self.optimizer.state().items()}
        return tensors | {f"sparsity.{name}": tensor for name, tensor in sparsity.items()}

    def _save(self) -> None:
        try:
            self.checkpoints.wait()
        except CheckpointError as error:  # an earlier save failed, on all ranks; this step can still be saved
            if self.log is not None:
                self.log.failed_save(str(error))
        # Resuming from this checkpoint needs the metrics rows up to this step, so they must be on disk before it is.
        unwritten = first_error(None if self.log is None else self.log.unwritten(self.step))
        if unwritten is not None:
            raise MetricsError(unwritten)
        gone = first_error(None if self.log is None else self.log.gone(self.step))
        rng = {"cpu": torch.get_rng_state()}
        if self.ranks.device.type == "cuda":
            rng["cuda"] = torch.cuda.get_rng_state(self.ranks.device)
        values = {
            "step": self.step,
            "plans": None if self.plans is None else self.plans.state(),
            "micro_batch": self.micro_batch.state(),
            "teacher": None if self.teacher is None else self.teacher.digest,
            "other_ends": self.other_ends,
            "metrics": None if self.log is None else self.log.metrics.saved()._asdict(),
            WAITING_ROW: self.row,
        }
        if self.log is not None:
            self.card_rows = metrics.telling([*self.log.metrics.telling, *([] if self.row is None else [self.row])])
        self.checkpoints.save(self.step, self._tensors(self.silent.reduced()), values, rng, {"data": self.data_state})
        if gone is not None:
            raise MetricsError(gone)  # `fit` waits until the save is complete

    def _resume(self) -> None:
        step = self.checkpoints.find(self.config.run.skip_damaged)
        if step is None:
            if self.config.init_from is not None:
                self.other_ends = warm_start.write_weights(
                    self.decoder, self.config.init_from, self.config.model, self.config.run.name, self.data, self.ranks
                )
            if self.plans is not None:
                self.plans.begin()
            return
        self.resumed, rank_values, rng = self.checkpoints.load(step, self._tensors(self.silent.tokens))
        values = self.resumed
        self.step, self.data_state = values["step"], rank_values["data"]
        if lacking := {"plans", "micro_batch", "teacher", "other_ends", "metrics"} - values.keys():
            raise CheckpointError(
                f"the checkpoint of step {step:,} lacks {', '.join(sorted(lacking))}: a version older than 0.1.0 saved"
                " it, and it cannot be resumed; start over with run.restart=true"
            )
        self.row = values.get(WAITING_ROW)  # absent before version 0.1.0, which scored rows before saving
        if self.plans is not None and values["plans"] is not None:  # None if PyTorch traced the layers so far
            self.plans.restore(values["plans"])
        if self.annealing is not None:
            self.annealing.at(self.tokens)  # the micro-batch size depends on whether layers are annealed
        self.micro_batch.restore(values["micro_batch"])
        self.other_ends = values["other_ends"]
        torch.set_rng_state(rng["cpu"])
        if self.ranks.device.type == "cuda" and "cuda" in rng:
            torch.cuda.set_rng_state(rng["cuda"], self.ranks.device)
        if self.ranks.is_main and (self.step < self.config.training.steps or self.row is not None):
            print(f"{self.config.run.name}: resuming after step {self.step:,}", flush=True)

    def _export(self, weights: dict[str, Tensor], folder: Path) -> None:
        conversion.export(
            weights, self.config.model, self.config.sparsity.activation, folder, self.data.tokenizer_folder,
            self.data.end_of_text_id, DTYPES[self.config.hf_dtype], self.data.begin_of_text_id,
            self.other_ends,
        )  # fmt: skip

    def _export_with_card(self, weights: dict[str, Tensor], folder: Path) -> None:
        """Export the model and its model card. The thread that writes checkpoints calls this during training."""
        self._export(weights, folder)
        step = json.loads((folder.parent / STATE / VALUES).read_text())["step"]
        text = card.text(self.config, step, self.card_rows, self.data.training_tokens)
        (folder / "README.md").write_text(text, encoding="utf-8")

    def _open_log(self) -> LossRange:
        """Open the logs and print an overview, on the main rank. Returns the range of the loss so far.

        Raises MetricsError if rows are damaged, and TrainingDiverged if training.stop_on_divergence ended the run.
        """
        config, parameters = self.config, sum(p.numel() for p in self.decoder.parameters())
        rows = Rows(
            config.model, config.training, config.sparsity, config.distill, config.data.mix_names,
            self.ranks.world_size, self.ranks.device,
        )  # fmt: skip
        saved = metrics.Saved(**self.resumed["metrics"]) if self.resumed else None
        written = self.step if self.row is None else self.step - 1
        file = metrics.MetricsFile(self.folder / metrics.METRICS, written, saved, config.run.skip_damaged)
        if self.row is not None:
            file.loss_range.add(self.row["step"], self.row["ce"], self.row.get("relu_share"))
        if config.training.stop_on_divergence and file.loss_range.outside:
            raise TrainingDiverged(
                f"{config.run.name} diverged at step {file.loss_range.exits[-1]:,}: {file.loss_range}. To continue from"
                f" step {self.step:,} anyway, use training.stop_on_divergence=false; otherwise choose another run.name"
                " and a lower optimizer.learning_rate"
            )
        wandb = WandbRun(config, self.folder)
        tensorboard = TensorboardRun(self.folder, written) if config.logging.tensorboard else None
        engine = "in PyTorch" if self.plans is None else f"on {backend.NAMES[backend.loaded() or 'cuda']}"
        if self.plans is not None and config.sparsity.relu_tokens:
            engine += f", in PyTorch up to token {config.sparsity.relu_tokens:,}"
        print(report.opening(config, self.ranks, parameters, engine, self.data.training_tokens, self.folder))
        print(report.aligned("micro-batch", str(self.micro_batch)))
        if self.plans is not None and (chosen_by := self.plans.chosen_by()) is not None:
            print(report.aligned("engines", chosen_by))
        if tensorboard is not None:
            print(report.aligned("TensorBoard", f"tensorboard --logdir {shlex.quote(str(tensorboard.folder))}"))
        print(report.aligned("Weights & Biases", wandb.status), flush=True)
        progress = Progress(self.folder.name, self.step, config.training.steps, config.training.tokens_per_step)
        self.log = RunLog(rows, file, wandb, tensorboard, progress)
        return file.loss_range

    def _finish(self, log: RunLog, exit_code: int) -> None:
        log.metrics.close()
        if log.tensorboard is not None:
            log.tensorboard.close()
        name, summary = self.config.run.name, report.finish(self.config, self.folder)
        if exit_code:
            log.wandb.close(exit_code)
            change = f" with run.name={name} and without run.restart" if self.config.run.restart else ""
            stopped = f"{name}: stopped after step {self.step:,}; to resume, run the same command{change}"
            if self.diverged:
                stopped = f"{name}: ended after step {self.step:,}, because its loss diverges"
            print("\n".join([stopped, *report.to_upload(self.folder)]))
            return
        print(f"\n{summary}", flush=True)
        log.wandb.figures(self.step, sorted((self.folder / PLOTS).glob("*.png")))
        log.wandb.close(exit_code)
        checkpoint = layout.checkpoint(self.folder, self.step) / layout.HF
        try:
            print(report.aligned("sample", repr(report.sample(checkpoint, SAMPLE_PROMPT, 48))))
        except Exception as error:  # mostly raised by transformers; the run is complete without a sample
            warn(f"no text sample from {checkpoint}: {one_line(error)}")
