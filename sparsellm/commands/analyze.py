"""python -m sparsellm.analyze checkpoint=PATH [text=FILE] [key=value] : measure where a checkpoint is sparse.

recordings=FOLDER also writes which neurons are active, token by token: the input of scripts that take --activations
FOLDER. One process, on a CPU or a GPU. Exit codes: 0 complete, 1 if the checkpoint cannot be analyzed, 2 for a refused
configuration.
"""

from pathlib import Path

from sparsellm.analysis import AnalysisError, analyze_checkpoint, mistakes, recordings, report
from sparsellm.config import AnalyzeConfig, analyze_mistakes, entry_point
from sparsellm.system.console import warn


@entry_point(lambda config, _typed: mistakes(config), analyze_mistakes, AnalyzeConfig)
def main(config: AnalyzeConfig) -> int:
    try:
        results, folder = analyze_checkpoint(config)
    except AnalysisError as error:
        warn(str(error))
        return 1
    print(f"{report.table(results)}\n\n{folder / report.ANALYSIS_JSON}, beside it tables (.csv) and figures (.png)")
    if config.recordings is not None:
        print(f"{Path(config.recordings, recordings.FIRING)}, for the benchmarks: --activations {config.recordings}")
    return 0
