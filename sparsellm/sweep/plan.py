"""Expands a sweep's command line into runs.

A point is an ordinary run, named after its swept values. If the same run was already trained, by hand or by another
sweep, the run keeps its name and is not trained again: names end with a hash of the settings that define a run.
"""

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path

import torch

from sparsellm import data
from sparsellm.config import (
    Composition,
    Config,
    ConfigError,
    Device,
    Dtype,
    EvaluateConfig,
    SweepConfig,
    SweepMode,
    SweepRequest,
    composition,
    fingerprint,
    from_overrides,
    mistakes,
    name_by,
    quoted,
    sweep_request,
    to_dict,
    typed_values,
)
from sparsellm.config.rules import name_mistakes
from sparsellm.config.values import flat
from sparsellm.evaluation import live
from sparsellm.evaluation.checkpoint import is_complete
from sparsellm.evaluation.checkpoint import mistakes as evaluation_mistakes
from sparsellm.evaluation.results import FLOAT8
from sparsellm.runs import folder as run_folder
from sparsellm.runs import layout
from sparsellm.runs.layout import BENCHMARK, BENCHMARK_JSON
from sparsellm.runs.locate import locate
from sparsellm.training import distillation, warm_start

COEFFICIENT = "sparsity.l1_coefficient"
# A baseline's overrides, which replace all `sparsity` overrides of the run that it is compared with. They include the
# coefficient because the table has a column for it.
DENSE = {"sparsity": ["sparsity=dense_silu"], COEFFICIENT: [f"{COEFFICIENT}=0"]}


@dataclass(frozen=True)
class Point:
    """One run of a sweep."""

    values: dict[str, str]  # swept key or group -> value; a baseline has only those that it sets
    overrides: list[str]
    config: Config
    experiment: str | None
    by_hand: str  # the run's name if `python -m sparsellm.train` is started with the same overrides
    baseline: bool = False

    @property
    def name(self) -> str:
        return self.config.run.folder.name

    @property
    def outside_sparsity(self) -> dict[str, str]:
        """The swept values outside `sparsity`, which are the same for a point, its baseline and its run without L1."""
        return {key: value for key, value in self.values.items() if key.partition(".")[0] != "sparsity"}

    @property
    def folder(self) -> Path:
        return self.config.run.folder

    @property
    def checkpoint(self) -> Path:
        """The final checkpoint, which every finished run has."""
        return layout.checkpoint(self.folder, self.config.training.steps)

    def describe(self) -> str:
        values = [f"{key}={value}" for key, value in self.values.items()]
        return " ".join([*values, *(["dense baseline"] if self.baseline else [])])

    def is_finished(self) -> bool:
        return run_folder.is_finished(self.config.run, self.config.training.steps)


@dataclass(frozen=True)
class Sweep:
    """A sweep. Points are in command-line order, with the last list varying fastest, followed by the baselines."""

    name: str
    keys: list[str]  # swept keys and groups
    points: list[Point]
    processes: int  # number of processes per run, on one node
    slots: list[dict[str, str]]  # environment variables for each concurrent run
    options: SweepConfig
    evaluate: list[str]

    @property
    def folder(self) -> Path:
        return Path(self.options.root, self.name).expanduser()

    def log(self, point: Point) -> Path:
        return self.folder / "logs" / f"{point.name}.log"

    @cached_property
    def evaluation(self) -> EvaluateConfig:
        """The options for all evaluations, without a checkpoint."""
        return from_overrides(self.evaluate, EvaluateConfig)

    def dtype(self, point: Point) -> str:
        """The name of the dtype in which a point is evaluated."""
        if self.evaluation.float8:
            return FLOAT8
        typed = self.evaluation.dtype
        return point.config.runtime.precision.name if typed == Dtype.auto else typed.name

    def evaluation_of(self, point: Point) -> list[str]:
        """The overrides of the command that evaluates a finished point."""
        return [f"checkpoint={quoted(str(point.checkpoint))}", *self.evaluate]

    def is_evaluated(self, point: Point) -> bool:
        """Whether the point is trained and its evaluation is complete."""
        return point.is_finished() and is_complete(from_overrides(self.evaluation_of(point), EvaluateConfig))

    def benchmark(self, point: Point) -> Path:
        """The path of the results of a finished point's benchmark."""
        return locate(str(point.checkpoint)).output(BENCHMARK) / BENCHMARK_JSON


def plan(arguments: list[str]) -> Sweep:
    """Parse a sweep's command line. Raises ConfigError with every error in the command line and in the runs."""
    request = sweep_request(arguments)
    points, found = _points(request)
    if not points:
        raise ConfigError(list(dict.fromkeys(found)))
    options, processes = request.sweep, request.sweep.nproc_per_node
    devices = [] if all(point.config.runtime.device == Device.cpu for point in points) else gpus()
    if processes is None:
        processes = max(1, len(devices) // max(1, options.parallel))
    name = options.name
    if name is None:
        names = sorted(point.by_hand for point in points if not point.baseline)
        name = f"{points[0].experiment or 'sweep'}-{hashlib.sha256(json.dumps(names).encode()).hexdigest()[:8]}"
    slots = _slots(options.parallel, processes, devices)
    sweep = Sweep(name, _swept(request), points, processes, slots, options, request.evaluate)
    if found := found + _mistakes(sweep, request, len(devices)):
        raise ConfigError(list(dict.fromkeys(found)))
    return sweep


def gpus() -> list[str]:
    """The GPUs that this process may use, as named in CUDA_VISIBLE_DEVICES."""
    count, visible = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[:count] if visible else list(map(str, range(count)))


def _slots(parallel: int, processes: int, devices: list[str]) -> list[dict[str, str]]:
    """Environment variables for each concurrent run, with `processes` of the GPUs `devices`, assigned round-robin."""
    if parallel <= 1:
        return [{}]
    if not devices:
        # By default, idle threads spin, and the threads of several runs outnumber the cores.
        return [{"OMP_WAIT_POLICY": "PASSIVE"}] * parallel
    shares = [[devices[(slot * processes + i) % len(devices)] for i in range(processes)] for slot in range(parallel)]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(dict.fromkeys(each))} for each in shares]


def _swept(request: SweepRequest) -> list[str]:
    return [key for key, texts in request.axes.items() if len(texts) > 1]


def _points(request: SweepRequest) -> tuple[list[Point], list[str]]:
    axes, points, found = request.axes, [], []
    swept = _swept(request)
    fixed = {"run.name": "a run's name follows from its configuration", "run.restart": "points resume existing runs"}
    typed = axes.keys() | typed_values(request.options.texts).keys()
    found += [f"{key} in a sweep: {reason}; leave it out" for key, reason in fixed.items() if key in typed]

    trained: dict[str, dict[str, str]] = {}  # run.root -> hash -> name of an existing run

    def named(composed: Composition[Config], keys: Iterable[str]) -> str:
        """A point's name, built from its values for `keys`; if the same run already exists, that run's name."""
        config = composed.config
        if "run.name" in typed:  # refused above
            return str(config.run.name)
        marked = fingerprint(config)
        by_sweep = name_by(list(keys), flat(to_dict(config)), marked, composed.choices)
        runs = trained.setdefault(config.run.root, run_folder.names_by_hash(Path(config.run.root)))
        there = [name for name in (by_sweep, config.run.name) if name in runs.values()]
        return [*there, runs.get(marked, by_sweep)][0]

    def add(axes: dict[str, list[str]], baseline: bool) -> None:
        for texts in product(*axes.values()):
            values = {key: text.partition("=")[2] for key, text in zip(axes, texts, strict=True) if key in swept}
            composed = composition([*request.options.texts, *texts])
            wrong = composed.mistakes or warm_start.adopt(composed.config, composed.overrides)
            found.extend(wrong)
            if not wrong:
                by_hand = str(composed.config.run.name)
                composed.config.run.name = named(composed, [*swept, "sparsity"] if baseline else swept)
                overrides = [*composed.overrides, f"run.name={quoted(composed.config.run.name)}"]
                points.append(Point(values, overrides, composed.config, composed.experiment, by_hand, baseline))

    add(axes, baseline=False)
    if request.sweep.baseline:
        others = {key: texts for key, texts in axes.items() if key.partition(".")[0] != "sparsity"}
        add(others | DENSE, baseline=True)
    return points, found


def _mistakes(sweep: Sweep, request: SweepRequest, devices: int) -> list[str]:
    options, found = sweep.options, []
    if options.parallel < 1:
        found.append(f"sweep.parallel is {options.parallel}: it should be at least 1")
    elif options.parallel > 1 and (options.mode == SweepMode.slurm or options.point is not None):
        found.append(f"sweep.parallel is {options.parallel}, and SLURM starts tasks in parallel: leave it out")
    elif (
        not options.share_gpus and options.parallel > 1 and 0 < devices < (needed := options.parallel * sweep.processes)
    ):
        found.append(
            f"sweep.parallel={options.parallel} needs {needed} GPUs, but this machine has {devices}: run fewer at"
            " once, or let them share GPUs with sweep.share_gpus=true"
        )
    if "RANK" in os.environ:
        found.append("a sweep starts torchrun itself for each of its runs: start the sweep without torchrun")
    found += name_mistakes("sweep.name", sweep.name)
    if sweep.processes < 1:
        found.append(f"sweep.nproc_per_node is {sweep.processes}: it should be at least 1")
    if options.mode == SweepMode.slurm and options.nproc_per_node is None:
        found.append("sweep.mode=slurm needs sweep.nproc_per_node: set it to the number of GPUs per node")
    if options.point is not None and not 0 <= options.point < len(sweep.points):
        found.append(
            f"sweep.point is {options.point}: it should be from 0 to {len(sweep.points) - 1}, the points of this sweep"
        )
    for key in ("checkpoint", "output_dir"):
        if any(override.startswith(f"{key}=") for override in request.evaluate):
            found.append(f"evaluate.{key} in a sweep: every run has its own value; leave it out")
    try:  # the table needs the list of tasks even without evaluation
        evaluation = from_overrides(request.evaluate, EvaluateConfig)
        wrong = evaluation_mistakes(evaluation) if options.evaluate else []
        if evaluation.export is not None:
            found.append("evaluate.export in a sweep: `sparsellm evaluate export=DIR` writes rows; leave it out")
    except ConfigError as error:
        wrong = error.mistakes
    found += [f"evaluate: {mistake}" for mistake in wrong if not mistake.startswith("checkpoint has no value")]

    same: dict[str, Point] = {}
    for point in sweep.points:
        before = same.setdefault(point.by_hand, point)
        if before is not point and "run.name" not in request.axes:
            one, other = " ".join(before.overrides), " ".join(point.overrides)
            found.append(
                f"{one} is in the sweep twice: give each value once"
                if one == other
                else f"{one} and {other} are the same run: the keys in which they differ do not define a run, so leave"
                " one of them out"
            )
        hint = " (in the dense baseline: sweep.baseline=false omits it)" if point.baseline else ""
        wrong = mistakes(point.config, max(1, sweep.processes)) + run_folder.mistakes(point.config)
        if not point.is_finished():
            config = point.config
            models = warm_start.read_at_start(config.run, config.init_from, config.distill.teacher)
            wrong += data.mistakes(data.Request.of(config), config.run, point.overrides)
            wrong += live.mistakes(config.evaluation) + warm_start.weight_mistakes(models)
            wrong += distillation.mistakes(config.distill, config.model, config.training.sequence_length)
        found += [mistake + hint for mistake in wrong]
    return found
