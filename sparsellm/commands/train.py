"""Pretrain a model, or resume a run.

Alone or under torchrun. Exit codes: 0 complete, 128 + signal when stopped, 2 for a refused configuration, 1 for a run
that cannot continue (damaged data or checkpoint, divergence).
"""

from collections.abc import Callable

from sparsellm.config import ConfigError, entry_point
from sparsellm.data import DataError
from sparsellm.distributed.groups import MainRankFailed, RanksMissing
from sparsellm.runs.folder import RunFolderError
from sparsellm.system.console import warn, warn_on_main
from sparsellm.system.errors import SparsellmError
from sparsellm.training import warm_start
from sparsellm.training.run import Run, check, of_rank, run


def exit_code(work: Callable[[], Run]) -> int:
    """Call `work`, which trains a run, and return the command's exit code. Reports the run's errors; a refused
    configuration is raised."""
    try:
        done = work()
    except MainRankFailed:
        return 1  # the main rank reports why
    except (DataError, RunFolderError, OSError) as error:  # OSError: mostly a full disk
        warn(of_rank(error))
        return 1
    except (ConfigError, RanksMissing):
        raise
    except SparsellmError as error:  # raised on all ranks
        warn_on_main(str(error))
        return 1
    return int(done.diverged) if done.stopped is None else 128 + done.stopped


main = entry_point("train", check, warm_start.adopt)(lambda config: exit_code(lambda: run(config)))
