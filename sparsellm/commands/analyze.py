"""Measure where a checkpoint is sparse.

recordings=FOLDER also writes which neurons are active, token by token: the input of scripts that take --activations
FOLDER. Runs as one process, on a CPU or a GPU. Exit codes: 0 complete, 1 if the checkpoint cannot be analyzed, 2 for a
refused configuration.
"""

from pathlib import Path

from sparsellm.analysis import analyze_checkpoint, mistakes, recordings, report
from sparsellm.config import AnalyzeConfig, entry_point


@entry_point("analyze", lambda config, _typed: mistakes(config))
def main(config: AnalyzeConfig) -> int:
    results, folder = analyze_checkpoint(config)
    print(f"{report.table(results)}\n\n{folder / report.ANALYSIS_JSON}; with tables (.csv) and figures (.png):")
    for name, title in report.FIGURES.items():
        if (folder / name).exists():
            print(f"  {title}: {name}")
    if config.recordings is not None:
        print(f"{Path(config.recordings, recordings.FIRING)} (for benchmarks: --activations {config.recordings})")
    return 0
