"""Checks a configuration and trains it; errors are raised as exceptions.

The commands `train` and `prepare_data` and the functions of the same name in sparsellm/api.py call these functions.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from signal import Signals
from typing import Any

import torch

from sparsellm import data
from sparsellm.config import Config, ConfigError, RuntimeConfig, looked_at, memory_mistakes, mistakes, prepare_mistakes
from sparsellm.data.preparation import preparation_mistakes
from sparsellm.distributed import groups
from sparsellm.distributed.groups import agreed, leave, process_group, world_size_from_environment
from sparsellm.evaluation import live
from sparsellm.runs import folder as run_folder
from sparsellm.runs import layout, metrics, report
from sparsellm.system.console import is_main_rank, warn
from sparsellm.system.errors import SparsellmError
from sparsellm.system.host_memory import keep_freed_memory
from sparsellm.training import distillation, warm_start


@dataclass(frozen=True)
class Run:
    """The result of a run.

    Attributes:
        folder: The run's folder.
        step: The last step with a checkpoint.
        stopped: The signal that stopped the run; None if there was none.
        diverged: Whether the run ended because its loss diverged (training.stop_on_divergence=true).
        row: The last row of metrics.jsonl (keys: docs/TRAINING.md); None if there is none.
    """

    folder: Path
    step: int
    stopped: Signals | None
    diverged: bool
    row: dict[str, Any] | None

    @property
    def model(self) -> Path:
        """The exported model of the last checkpoint, for `Generator.load` and `transformers`."""
        return layout.checkpoint(self.folder, self.step) / layout.HF

    @classmethod
    def of(cls, folder: Path, exit_code: int = 0) -> "Run":
        """The result of the run in `folder`. `exit_code`: as returned by `Trainer.fit`."""
        rows, step = metrics.history(folder / metrics.METRICS).rows, max(run_folder.saved_steps(folder), default=0)
        stopped = Signals(exit_code - 128) if exit_code > 128 else None
        return cls(folder, step, stopped, exit_code == 1, rows[-1] if rows else None)


def device_type(runtime: RuntimeConfig) -> str:
    return groups.device_type(runtime.device.name)


def set_determinism(runtime: RuntimeConfig) -> None:
    """Make torch deterministic if `runtime` asks for it. Call this before the first CUDA call."""
    if runtime.deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        _only_deterministic_algorithms(True, runtime.compile)
        module: Any = torch.utils.deterministic  # torch adds this module's properties on import
        module.fill_uninitialized_memory = False  # slow, helps only debugging


def _only_deterministic_algorithms(on: bool, compiles: bool) -> None:
    if compiles:
        torch.use_deterministic_algorithms(on)  # also a setting of the compiler
    else:
        torch.set_deterministic_debug_mode("error" if on else "default")  # the same without importing the compiler: 1 s


@contextmanager
def determinism(runtime: RuntimeConfig) -> Iterator[None]:
    """Context manager that makes torch deterministic if `runtime` asks for it, and restores its settings on exit."""
    if not runtime.deterministic:
        yield
        return
    module: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), module.fill_uninitialized_memory
    set_determinism(runtime)
    try:
        yield
    finally:
        _only_deterministic_algorithms(before[0], runtime.compile)
        module.fill_uninitialized_memory = before[1]


def check(config: Config, typed: Sequence[str] = (), saves: bool = True) -> list[str]:
    """Error messages for everything that keeps `config` from being trained: its values, the run with the same name, the
    data, the tasks, the teacher and the init_from model, from which the architecture is set. Empty if there are none.
    Collective on several nodes, which also compare what they see in the run's folder.

    `typed`: the overrides from which `config` was composed. `saves`: whether checkpoints will be written, for which the
    disk needs space.
    """
    run, training, runtime = config.run, config.training, config.runtime

    def look() -> list[str]:
        if found := warm_start.adopt(config, typed):
            return found
        model, world_size = config.model, world_size_from_environment()
        found, finished = mistakes(config, world_size), run_folder.is_finished(run, training.steps)
        if not (found or finished):
            ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            found += memory_mistakes(model, training, runtime, ranks_here, world_size, config.optimizer.muon)
            if saves:
                found += run_folder.room_mistakes(
                    run, config.hf_dtype, model, training, config.optimizer, config.sparsity
                )
        found += run_folder.mistakes(config, typed)
        if finished:
            return found
        found += data.mistakes(data.Request.of(config), run, typed) + live.mistakes(config.evaluation)
        found += distillation.mistakes(config.distill, model, training.sequence_length)
        models = warm_start.read_at_start(run, config.init_from, config.distill.teacher)
        return found + warm_start.weight_mistakes(models)

    return agreed(looked_at(look), run_folder.view(run, training.steps))


def check_preparation(config: Config, typed: Sequence[str] = ()) -> list[str]:
    """Error messages for everything that keeps the data of `config` from being prepared; empty if there are none. Sets
    the architecture from init_from."""
    found = warm_start.adopt(config, typed) or prepare_mistakes(config)
    found = found or preparation_mistakes(data.Request.of(config))
    return found or warm_start.tokenizer_mistakes(config.data.tokenizer, config.init_from, config.distill.teacher)


def of_rank(error: Exception) -> str:
    """The message of `error`, prefixed with this rank if there are several."""
    return f"rank {os.environ['RANK']}: {error}" if world_size_from_environment() > 1 else str(error)


def run(config: Config) -> Run:
    """Train `config`, in which `check` found no errors, or resume its run. A finished run is only reported. Collective.

    Raises MainRankFailed on the other ranks if the main rank failed. ConfigError, DataError, RunFolderError and OSError
    may be raised on this rank only; every other SparsellmError is raised on all ranks. If one of several ranks runs out
    of memory, its process ends with a message, because the other ranks may wait for it in a collective.
    """
    if run_folder.is_finished(config.run, config.training.steps):
        leave()
        if is_main_rank():
            run_folder.tidy(config.run.folder)
            print(f"{config.run.name} is complete.\n" + report.finish(config, config.run.folder))
        return Run.of(config.run.folder)
    # Deferred: these imports take seconds, and a wrong command should fail at once.
    from sparsellm.training.loop import Trainer
    from sparsellm.training.micro_batch import OutOfMemory

    failed: Exception | None = None
    with determinism(config.runtime), process_group(device_type(config.runtime)) as ranks:
        if ranks.device.type == "cpu":
            keep_freed_memory()
        try:
            # All checks come before the run's folder is made, so that a refused run leaves nothing behind.
            evaluation = live.load(config.evaluation, config.model, config.sparsity.activation, config.runtime, ranks)
            opened = data.open_data(
                data.Request.of(config), config.run, config.logging.validation_samples, config.runtime.data_workers,
                ranks=ranks,
            )  # fmt: skip
            models = warm_start.read_at_start(config.run, config.init_from, config.distill.teacher)
            warm_start.require_one_tokenizer(models, config.data, opened, ranks)
            with run_folder.open_folder(config, ranks) as (config, folder):
                code = Trainer(config, ranks, opened, folder, evaluation).fit()
        except (OutOfMemory, live.GatherFailed) as error:
            if ranks.world_size > 1:
                warn(of_rank(error))
                leave(error)
                os._exit(1)  # leaving the group normally could wait for the other ranks
            failed = error
        except (ConfigError, data.DataError, run_folder.RunFolderError):
            raise  # perhaps only this rank raised the error
        except SparsellmError as error:  # all ranks have raised an error, so each leaves normally
            failed = error
    if failed is not None:
        raise failed
    return Run.of(folder, code)
