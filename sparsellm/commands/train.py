"""python -m sparsellm.train [experiment=...] [group=choice] [group.key=value] : pretrain a model.

Alone or under torchrun. Exit codes: 0 complete, 128 + signal when stopped, 2 for a refused configuration, 1 for a run
that cannot continue (damaged data or checkpoint, divergence).
"""

import os
from collections.abc import Sequence
from typing import Any

import torch

from sparsellm import data
from sparsellm.config import Config, RuntimeConfig, entry_point, looked_at, memory_mistakes, mistakes
from sparsellm.distributed import groups
from sparsellm.distributed.groups import (
    MainRankFailed,
    NotShared,
    agreed,
    leave,
    process_group,
    world_size_from_environment,
)
from sparsellm.evaluation import live
from sparsellm.ops.build import KernelsUnavailable
from sparsellm.runs import folder as run_folder
from sparsellm.runs import report
from sparsellm.runs.checkpoint import CheckpointError
from sparsellm.runs.metrics import MetricsError
from sparsellm.system.console import is_main_rank, warn
from sparsellm.training import distillation, warm_start


def device_type(runtime: RuntimeConfig) -> str:
    return groups.device_type(runtime.device.name)


def set_determinism(deterministic: bool) -> None:
    """Before the first CUDA call: deterministic algorithms everywhere, or torch's faster defaults."""
    if deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True)
        deterministic_module: Any = torch.utils.deterministic  # whose properties torch adds as it is imported
        deterministic_module.fill_uninitialized_memory = False  # a debugging aid, not needed for equal bits


def values(config: Config) -> list[str]:
    return mistakes(config, world_size_from_environment())


def check(config: Config, typed: Sequence[str] = ()) -> list[str]:
    """Everything that keeps `config` from being trained: the model of init_from, which it is given, its values, its
    data, its tasks, its teacher, the weights that it reads, the run of the same name.

    `typed`: the overrides that `config` was composed from.
    """
    if found := warm_start.adopt(config, typed):
        return found
    found, finished = values(config), run_folder.is_finished(config)
    if not (found or finished):
        found += memory_mistakes(config, int(os.environ.get("LOCAL_WORLD_SIZE", "1")), world_size_from_environment())
        found += run_folder.room_mistakes(config)
    found += run_folder.mistakes(config, typed)
    if finished:
        return found
    found += data.mistakes(config, typed) + live.mistakes(config)
    return found + distillation.mistakes(config) + warm_start.weight_mistakes(config)


def _of_rank(error: Exception) -> str:
    """What ends this process, and which of several ranks it is."""
    return f"rank {os.environ['RANK']}: {error}" if world_size_from_environment() > 1 else str(error)


def _agreed_mistakes(config: Config, typed: list[str]) -> list[str]:
    return agreed(looked_at(lambda: check(config, typed)), run_folder.view(config))


@entry_point(_agreed_mistakes, values, Config, warm_start.adopt)
def main(config: Config) -> int:
    if run_folder.is_finished(config):
        leave()
        if is_main_rank():
            run_folder.tidy(config.run.folder)
            print(f"{config.run.name} is complete.\n" + report.finish(config, config.run.folder))
        return 0
    # They take a second, that a refused run need not wait.
    from sparsellm.training.loop import Trainer, TrainingDiverged
    from sparsellm.training.micro_batch import MicroBatchError, OutOfMemory

    set_determinism(config.runtime.deterministic)
    alike = CheckpointError, TrainingDiverged, KernelsUnavailable, MetricsError, NotShared, MicroBatchError
    try:
        with process_group(device_type(config.runtime)) as ranks:
            try:
                evaluation = live.load(config, ranks)  # before the folder: what is refused leaves nothing behind
                opened = data.open_data(config, ranks)
                warm_start.require_one_tokenizer(config, opened, ranks)
                with run_folder.open_folder(config, ranks) as (config, folder):
                    return Trainer(config, ranks, opened, folder, evaluation).fit()
            except MainRankFailed:
                return 1  # the main rank says why
            except (OutOfMemory, live.GatherFailed) as error:
                warn(_of_rank(error))
                if ranks.world_size > 1:
                    leave(error)
                    os._exit(1)  # the others may wait inside a collective, and leaving the group might wait for them
                return 1
            except alike as error:  # on all ranks: each leaves in order
                if ranks.is_main:
                    warn(str(error))
                return 1
    except (data.DataError, run_folder.RunFolderError, OSError) as error:  # OSError: of a full disk, mostly
        warn(_of_rank(error))
        return 1
