"""Pretrain a model, or resume a run.

Alone or under torchrun. Exit codes: 0 complete, 128 + signal when stopped, 2 for a refused configuration, 1 for a run
that cannot continue (damaged data or checkpoint, divergence).
"""

import os
from collections.abc import Sequence
from typing import Any

import torch

from sparsellm import data
from sparsellm.config import Config, ConfigError, RuntimeConfig, entry_point, looked_at, memory_mistakes, mistakes
from sparsellm.distributed import groups
from sparsellm.distributed.groups import MainRankFailed, agreed, leave, process_group, world_size_from_environment
from sparsellm.evaluation import live
from sparsellm.runs import folder as run_folder
from sparsellm.runs import report
from sparsellm.system.console import is_main_rank, warn
from sparsellm.system.errors import SparsellmError
from sparsellm.training import distillation, warm_start


def device_type(runtime: RuntimeConfig) -> str:
    return groups.device_type(runtime.device.name)


def set_determinism(deterministic: bool) -> None:
    """Make torch deterministic if asked. Call this before the first CUDA call."""
    if deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True)
        module: Any = torch.utils.deterministic  # torch adds this module's properties on import
        module.fill_uninitialized_memory = False  # slow, helps only debugging


def check(config: Config, typed: Sequence[str] = ()) -> list[str]:
    """All mistakes that keep `config` from being trained: in its values, the run of the same name, the data, the tasks,
    the teacher and the model of init_from, which also sets its architecture.

    `typed`: the overrides that `config` was composed from.
    """
    if found := warm_start.adopt(config, typed):
        return found
    run, model, training, runtime = config.run, config.model, config.training, config.runtime
    world_size = world_size_from_environment()
    found, finished = mistakes(config, world_size), run_folder.is_finished(run, training.steps)
    if not (found or finished):
        found += memory_mistakes(model, training, runtime, int(os.environ.get("LOCAL_WORLD_SIZE", "1")), world_size)
        found += run_folder.room_mistakes(run, config.hf_dtype, model, training, config.optimizer, config.sparsity)
    found += run_folder.mistakes(config, typed)
    if finished:
        return found
    found += data.mistakes(data.Request.of(config), run, typed) + live.mistakes(config.evaluation)
    found += distillation.mistakes(config.distill, model, training.sequence_length)
    return found + warm_start.weight_mistakes(warm_start.read_at_start(run, config.init_from, config.distill.teacher))


def _of_rank(error: Exception) -> str:
    """The message of `error`, which names this rank if there are several."""
    return f"rank {os.environ['RANK']}: {error}" if world_size_from_environment() > 1 else str(error)


@entry_point(
    "train",
    lambda config, typed: agreed(
        looked_at(lambda: check(config, typed)), run_folder.view(config.run, config.training.steps)
    ),
    warm_start.adopt,
)
def main(config: Config) -> int:
    if run_folder.is_finished(config.run, config.training.steps):
        leave()
        if is_main_rank():
            run_folder.tidy(config.run.folder)
            print(f"{config.run.name} is complete.\n" + report.finish(config, config.run.folder))
        return 0
    # Deferred: these imports take seconds, and a wrong command should fail at once.
    from sparsellm.training.loop import Trainer
    from sparsellm.training.micro_batch import OutOfMemory

    set_determinism(config.runtime.deterministic)
    try:
        with process_group(device_type(config.runtime)) as ranks:
            try:
                # All checks come before the run's folder is made, so that a refused command leaves nothing behind.
                evaluation = live.load(
                    config.evaluation, config.model, config.sparsity.activation, config.runtime, ranks
                )
                opened = data.open_data(
                    data.Request.of(config), config.run, config.logging.validation_samples,
                    config.runtime.data_workers, ranks=ranks,
                )  # fmt: skip
                models = warm_start.read_at_start(config.run, config.init_from, config.distill.teacher)
                warm_start.require_one_tokenizer(models, config.data, opened, ranks)
                with run_folder.open_folder(config, ranks) as (config, folder):
                    return Trainer(config, ranks, opened, folder, evaluation).fit()
            except MainRankFailed:
                return 1  # the main rank reports why
            except (OutOfMemory, live.GatherFailed) as error:
                warn(_of_rank(error))
                if ranks.world_size > 1:
                    leave(error)
                    os._exit(1)  # other ranks may wait in a collective, so leaving the group could wait for them
                return 1
            except (ConfigError, data.DataError, run_folder.RunFolderError):
                raise  # perhaps only this rank raised the error
            except SparsellmError as error:  # all ranks have raised the error, so each leaves normally
                if ranks.is_main:
                    warn(str(error))
                return 1
    except (data.DataError, run_folder.RunFolderError, OSError) as error:  # OSError: mostly a full disk
        warn(_of_rank(error))
        return 1
