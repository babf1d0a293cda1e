"""Benchmarks checkpoints: open them, measure each phase, and write the results."""

from pathlib import Path
from typing import Any

import torch

from sparsellm.benchmark import phases, report
from sparsellm.benchmark.phases import Side, Sides
from sparsellm.benchmark.subject import BenchmarkError, Subject, dtype_on
from sparsellm.benchmark.timing import energy_mj
from sparsellm.config import (
    Activation,
    BenchmarkConfig,
    ConfigError,
    Kernels,
    ModelConfig,
    benchmark_mistakes,
    sizes_in_float8,
)
from sparsellm.distributed.groups import Ranks, device_type, process_group
from sparsellm.ops import backend, float8
from sparsellm.runs.layout import BENCHMARK
from sparsellm.runs.locate import locate, text_mistakes
from sparsellm.runs.precision import computation, default_on, dtype_name
from sparsellm.system.console import say, warn
from sparsellm.system.files import write_whole
from sparsellm.system.packages import needed_by
from sparsellm.system.provenance import provenance
from sparsellm.training.memory import give_back

COUNTED_AT_ONCE = 8  # batch size for counting firing neurons


def mistakes(config: BenchmarkConfig) -> list[str]:
    """Error messages for `config`, as far as they can be known before any work; empty if there are none."""
    models = [("checkpoint", name) for name in config.checkpoint] + [("baseline", name) for name in config.baseline]
    return benchmark_mistakes(config) + text_mistakes(config.text, models)


def benchmark(config: BenchmarkConfig) -> tuple[dict[str, Any], Path]:
    """Measure, and write benchmark.json, .md and .png. Returns the contents of benchmark.json and the folder.

    Raises ConfigError with all messages of `mistakes`, and BenchmarkError if a checkpoint cannot be measured.
    """
    if found := mistakes(config):
        raise ConfigError(found)
    folder = locate(config.checkpoint[0]).output(BENCHMARK, config.output_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BenchmarkError(f"{folder} cannot be written: {error}; choose another folder for output_dir") from error
    with process_group(device_type(config.device.name), connect=False) as ranks:
        missing, dtype = _without_kernels(config, ranks.device), dtype_on(ranks.device)
        obstacle = missing[0].removeprefix("no kernels: ") if missing else None
        warn(computation(dtype, default_on(ranks.device.type), obstacle))
        on_gpu = ranks.device.type == "cuda"
        no_float8, without_float8 = float8.obstacle(), list[str]()
        measured = []
        for i, name in enumerate(config.checkpoint):
            subject = Subject.open(locate(name), config)
            baseline = None
            if config.baseline:
                baseline = Subject.open(locate(config.baseline[i]), config, subject.blocks.shape[1]).limited_to(subject)
                subject = subject.limited_to(baseline)
            reason = no_float8 or _odd_sizes((baseline or subject).config)
            if on_gpu and reason is not None:
                without_float8.append(f"no dense FP8 of {(baseline or subject).name}: {reason}")
            sparse = config.float8 and not missing
            silu = None if subject.activation == Activation.relu else "the kernels compute ReLU gates"
            if sparse and (wrong := silu or _odd_sizes(subject.config, feedforward=False)):
                without_float8.append(f"no sparse FP8 of {subject.name}: {wrong}")
                sparse = False
            in_float8 = [report.SPARSE_FP8] * sparse + [report.DENSE_FP8] * (on_gpu and reason is None)
            measured.append(_measure(subject, baseline, not missing, in_float8, config, ranks))
        missing += without_float8
        if energy_mj(ranks.device) is None:
            missing.append(
                "no energy: " + ("not measured on a CPU" if ranks.device.type == "cpu" else "NVML has no counter")
            )
        results = provenance() | {
            "device": torch.cuda.get_device_name(ranks.device) if on_gpu else "CPU",
            "torch": torch.__version__,
            "dtype": dtype_name(dtype),
            "compiled": on_gpu,
            "kernels": (loaded := backend.loaded()) and backend.NAMES[loaded],
            "text": config.text or "held-out",
            "micro_batch_size": config.micro_batch_size,
            "seconds": config.seconds,
            "missing": missing,
            "checkpoints": measured,
        }
    try:
        report.write_all(folder, results)
    except OSError as error:
        print(report.text(results), flush=True)  # the results took minutes to compute, so print them
        raise BenchmarkError(f"{folder} cannot be written: {error}; choose another output_dir") from error
    _draw(folder / report.BENCHMARK_PNG, results)
    return results, folder


def _draw(path: Path, results: dict[str, Any]) -> None:
    """Write the figure; if it cannot be written, a line says so."""
    try:
        path.unlink(missing_ok=True)  # left by an earlier benchmark
        # deferred: importing matplotlib takes half a second, and a wrong command should fail at once
        with needed_by("drawing"):
            from sparsellm.benchmark import figure
            from sparsellm.figures import drawn

        for content in drawn({path.name: lambda: figure.draw(results)}).values():
            write_whole(path, content)
    except (ImportError, OSError) as error:
        warn(f"{path} cannot be written: {error}")


def _without_kernels(config: BenchmarkConfig, device: torch.device) -> list[str]:
    """Why nothing is measured on the kernels; empty if they run."""
    if config.kernels == Kernels.torch:
        return ["no kernels: kernels=torch"]
    if device.type == "cpu":
        return ["no kernels: the kernels need a CUDA GPU"]
    try:
        backend.load(config.kernels.name)
    except backend.KernelsUnavailable as error:
        if config.kernels.demanded:
            raise BenchmarkError(str(error)) from error
        return [f"no kernels: {error}"]
    return []


def _odd_sizes(model: ModelConfig, feedforward: bool = True) -> str | None:
    """Why torchao would leave layers of `model` in bfloat16; None if it would not. `feedforward`: check feedforward
    layers too."""
    sizes = sizes_in_float8(model, feedforward)
    odd = (f"{name} is {size}" for name, size in sizes.items() if size % float8.MULTIPLE)
    wrong = next(odd, None)
    return wrong and f"{wrong}, and FP8 needs multiples of {float8.MULTIPLE}"


def _measure(
    subject: Subject,
    baseline: Subject | None,
    kernels: bool,
    in_float8: list[str],
    config: BenchmarkConfig,
    ranks: Ranks,
) -> dict[str, Any]:
    """All measurements of one checkpoint, for JSON. `in_float8`: the sides in FP8. Raises BenchmarkError if it cannot
    be measured."""
    from sparsellm.analysis import activity, numbers, speed

    sparse = subject.activation == Activation.relu
    sides: Sides = {"kernels": Side(subject, True)} if kernels and sparse else {}
    if report.SPARSE_FP8 in in_float8:
        sides[report.SPARSE_FP8] = Side(subject, True, float8=True)
    if report.DENSE_FP8 in in_float8:
        sides[report.DENSE_FP8] = Side(baseline or subject, False, float8=True)
    sides["PyTorch"] = Side(subject, False)
    if baseline is not None:
        sides["baseline"] = Side(baseline, False)
    most = max(side.subject.config.num_layers for side in sides.values())
    # The layers of all sides compile the same functions, which share one recompile limit.
    torch._dynamo.config.recompile_limit = max(64, 8 * most)
    try:
        say(f"sparsellm: {subject.name}: training steps")
        rates = {"training": phases.training(sides, config, ranks)}
        say(f"sparsellm: {subject.name}: forward passes")
        stock = {s.identity: phases.stock_model(s, ranks.device) for s in (subject, baseline) if s is not None}
        nonzeros, layers = None, None
        if sparse:
            counted = activity.count(stock[subject.identity], subject.blocks, COUNTED_AT_ONCE)
            nonzeros = (counted.fired.sum(1) / counted.tokens).tolist()
            layers = speed.layer_speeds(stock[subject.identity], subject.blocks) if kernels else None
        rates["forward"] = phases.forward(sides, stock, config, ranks.device)
        del stock
        give_back()
        say(f"sparsellm: {subject.name}: generation")
        generating = {name: side for name, side in sides.items() if not side.float8}
        rates |= phases.generation(generating, config, ranks.device)
    except torch.OutOfMemoryError as error:
        raise BenchmarkError(
            f"{subject.name}: out of memory: lower sequences={config.sequences} or prompts={config.prompts}"
            f" ({str(error).split('. ')[0]})"
        ) from error
    finally:
        torch._dynamo.reset()
        give_back()
    return {
        **subject.described(),
        "sequences": subject.blocks.shape[0],
        "sequence_length": subject.blocks.shape[1],
        "nonzeros": nonzeros,
        "baseline": None if baseline is None else baseline.described(),
        "sides": {
            name: {phase: rates[phase][name] for phase in report.PHASES if name in rates[phase]} for name in sides
        },
        "layer_speeds": layers,
        "correlation_with_nonzeros": layers and numbers.correlation(layers),
    }
