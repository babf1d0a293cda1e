"""Adds the scores of an evaluation to the Weights & Biases record of the run."""

import sys
from typing import Any

from sparsellm.config import ConfigError, load, lowered
from sparsellm.evaluation import results
from sparsellm.runs import folder as run_folder
from sparsellm.runs.layout import CONFIG
from sparsellm.runs.locate import locate
from sparsellm.runs.wandb_record import WandbRun, sync_command


def record(found: dict[str, Any]) -> None:
    """Add the scores in `found`, the contents of results.json, to the run's record, unless the run is active."""
    run = locate(found["checkpoint"]).run
    if run is None:
        return
    try:
        with run_folder.claim(run):
            config = load(run / CONFIG)
            config.logging.wandb = lowered(config.logging.wandb)
            wandb = WandbRun(config, run)
            wandb.evaluation(found["step"], results.scores(found), results.record_table(found), found["tasks"])
            wandb.close(0)
            if wandb.status != "disabled":
                upload = sync_command(run)
                print(f"Weights & Biases: {wandb.status}{f'; to upload: {upload}' if upload else ''}", file=sys.stderr)
    except (run_folder.RunFolderError, ConfigError, OSError) as error:
        print(f"Weights & Biases skipped: {error}", file=sys.stderr)
