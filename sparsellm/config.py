"""The configuration: typed dataclasses, their defaults (the paper's recipe), and every rule that values must keep.

This is the only file that knows Hydra and OmegaConf. `configs/` holds defaults lists and the few values in which a
choice differs from the defaults below. An entry point is a function of one `Config`, or of one of `COMPOSITIONS`:

    @entry_point(check)
    def main(config: Config) -> int: ...

Hydra refuses unknown keys and wrong types; everything found after that is collected and reported in one list.
"""

import hashlib
import json
import math
import os
import re
import sys
import types
import typing
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import hydra
import torch
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ValueType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from sparsellm.ops import MAX_COLUMNS, MULTIPLE, build

PACKAGE = Path(__file__).resolve().parent
# In a checkout the configs stand beside the package; a wheel carries them inside it.
CONFIGS = PACKAGE / "configs" if (PACKAGE / "configs").is_dir() else PACKAGE.parent / "configs"

MAX_LOG_INTERVAL = 10  # steps: a request to stop travels with the logged reductions


class ConfigError(ValueError):
    """One or more mistakes in a configuration; `mistakes` lists them, each with its remedy."""

    def __init__(self, mistakes: list[str]) -> None:
        self.mistakes = mistakes
        count = "1 mistake" if len(mistakes) == 1 else f"{len(mistakes)} mistakes"
        super().__init__(f"{count} in the configuration:\n" + "\n".join(f"  - {m}" for m in mistakes))


class Activation(Enum):
    relu = "relu"
    silu = "silu"


class L1Normalization(Enum):
    """What the coefficient multiplies: per token, the `sum` over neurons and layers, or the `mean` over both."""

    sum = "sum"
    mean = "mean"


class L1Schedule(Enum):
    """The coefficient once `l1_start_tokens` are over: all of it at once, or `linear`, from 0 to all of it."""

    constant = "constant"
    linear = "linear"


class Source(Enum):
    """Where documents come from: the standard library's own documentation, a hub data set, or local files."""

    stdlib_docs = "stdlib_docs"
    hub = "hub"
    files = "files"


class Device(Enum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Precision(Enum):
    """Of matrix products and activations; weights, gradients and optimizer state are float32 in both."""

    bfloat16 = "bfloat16"
    float32 = "float32"


class Kernels(Enum):
    """Whether feedforward layers take the CUDA kernels: where they run, or else refuse (`cuda`), or never (`torch`)."""

    auto = "auto"
    cuda = "cuda"
    torch = "torch"


class Dtype(Enum):
    """Of an evaluated model's weights and activations: `auto` is the one that the checkpoint stores, as in lm_eval."""

    auto = "auto"
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


class WandbMode(Enum):
    online = "online"
    offline = "offline"
    disabled = "disabled"


class SweepMode(Enum):
    """What a sweep does: `run` its runs here, `print` their commands, or write a `slurm` array script."""

    run = "run"
    print = "print"
    slurm = "slurm"


@dataclass
class ModelConfig:
    """A Llama-style decoder (DESIGN §3). Defaults: the width that all of the paper's sizes share."""

    vocab_size: int = 49_152
    hidden_size: int = 2_048  # K
    intermediate_size: int = 5_632  # N; 8,448 gives a non-gated model the parameters of a gated one
    num_layers: int = 28  # L
    num_heads: int = 32
    context_length: int = 2_048  # the longest sequence, in tokens
    rope_theta: float = 100_000.0
    norm_eps: float = 1e-5
    init_std: float = 0.02
    gated: bool = True


@dataclass
class DataConfig:
    """A corpus and how it becomes tokens. `path` holds the prepared tokens, outside any run."""

    name: str = "stdlib_docs"
    source: Source = Source.stdlib_docs
    dataset: str | None = None  # hub name, for source=hub
    subset: str | None = None  # the hub data set's config name
    split: str = "train"
    files: list[str] = field(default_factory=list)  # parquet, jsonl or text; glob patterns, for source=files
    text_column: str = "text"
    tokenizer: str | None = None  # hub name or local folder; stdlib_docs trains its own
    tokenizer_vocab_size: int = 4_096  # of the tokenizer that stdlib_docs trains
    path: str | None = None  # default: data/<name>
    max_tokens: int | None = None  # training tokens to prepare; default: what the experiment needs
    validation_fraction: float = 0.005  # of the documents, held out by their content
    streaming: bool = False  # tokenize while training instead of preparing first
    seed: int = 0  # of the order of the blocks


@dataclass
class SparsityConfig:
    """The feedforward activation, the L1 loss on it (DESIGN §2), and two remedies for dead neurons, off by default.

    Tokens are those of the global batch: what they decide does not depend on the batch size.
    """

    activation: Activation = Activation.relu
    l1_coefficient: float = 2e-5
    l1_normalization: L1Normalization = L1Normalization.sum
    l1_schedule: L1Schedule = L1Schedule.constant
    l1_start_tokens: int = 0  # the coefficient is 0 for so many tokens
    l1_warmup_tokens: int = 0  # for l1_schedule=linear: tokens from 0 to the full coefficient, after the start
    dead_after_tokens: int = 10_000_000  # a neuron is dead once it has been silent for so many tokens
    # Draw the gate rows of neurons silent for so many tokens anew; null: never. None in as many tokens at the end.
    reinit_dead_after_tokens: int | None = None
    reinit_every: int = 100  # steps between such draws


@dataclass
class OptimizerConfig:
    """AdamW with decay on matrices only; linear warm-up, then cosine to a fraction of the peak."""

    learning_rate: float = 1e-3  # the peak
    final_lr_fraction: float = 0.1
    warmup_steps: int = 600
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    grad_clip: float = 1.0  # largest L2 norm of the gradient


@dataclass
class TrainingConfig:
    """How much is learned from: all that decides the mathematics beside model, data, sparsity and optimizer."""

    steps: int = 9_537
    batch_size: int = 512  # sequences per optimizer step, over all ranks
    sequence_length: int = 2_048  # T
    seed: int = 0  # of the initial weights


@dataclass
class RuntimeConfig:
    """How a step is computed; nothing here changes what is computed beyond rounding."""

    device: Device = Device.auto
    precision: Precision = Precision.bfloat16
    compile: bool = True
    # `auto` does without in deterministic, float32, SiLU and CPU runs.
    kernels: Kernels = Kernels.auto
    micro_batch_size: int = 16  # sequences per forward pass and rank; the last one of a step may be smaller
    recompute: bool = False  # recompute each layer in backward instead of keeping its activations
    deterministic: bool = False  # the same bits on every run of the same ranks and hardware; slower
    data_workers: int = 2  # processes per rank that read ahead (a stream has at most one); 0 reads between steps
    ddp_bucket_mb: int = 64  # gradients are reduced in buckets of this size while backward goes on
    max_skipped_steps: int = 10  # stop after so many non-finite steps in a row


@dataclass
class LoggingConfig:
    every: int = 10  # steps between rows of metrics.jsonl
    validation_every: int = 250  # steps; 0 for never
    validation_samples: int = 256  # held-out sequences per validation
    wandb: WandbMode = WandbMode.online  # without a key: offline, and said so
    wandb_project: str = "sparsellm"
    wandb_group: str | None = None  # shown together; a sweep gives its own name


@dataclass
class EvaluationConfig:
    """The downstream tasks while training; keys that `EvaluateConfig` has too mean the same."""

    every: int = 0  # steps between evaluations, the last step included; 0 for never
    tasks: list[str] = field(default_factory=list)  # of the seven; none named: all
    data_dir: str | None = None
    limit: int | None = None  # rows per task
    batch_size: int | str = "auto"


@dataclass
class RunConfig:
    """The run's folder: its name, its checkpoints, and what starting again does."""

    name: str | None = None  # default: <experiment>-<8 hex of what defines the run>
    root: str = "runs"
    restart: bool = False  # start again in a new folder instead of resuming
    checkpoint_every: int = 500  # steps
    keep_checkpoints: int = 2
    hf_dtype: Precision = Precision.float32  # of the exported hf/ weights
    skip_damaged: bool = False  # resume from the newest whole checkpoint if newer ones are damaged


@dataclass
class Config:
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    sparsity: SparsityConfig = field(default_factory=SparsityConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    run: RunConfig = field(default_factory=RunConfig)


@dataclass
class SweepConfig:
    """How a sweep goes about its runs, `sweep.*` on its command line; what they are is in their own `Config`s."""

    name: str | None = None  # default: <experiment>-<8 hex of the names of its runs>
    root: str = "sweeps"
    mode: SweepMode = SweepMode.run
    baseline: bool = False  # add the dense run, sparsity=dense_silu
    evaluate: bool = True  # every finished run, with the options evaluate.*
    nproc_per_node: int | None = None  # processes of a run; default: the GPUs of this machine, or 1
    point: int | None = None  # do only this run, counted from 0: what one task of a SLURM array does


@dataclass(frozen=True)
class SweepRequest:
    """A sweep's command line, sorted by what its overrides are for."""

    sweep: SweepConfig
    axes: dict[str, list[str]]  # each key or group of a run to its overrides, one per value, in the order given
    evaluate: list[str]  # overrides for the evaluation, without the prefix


@dataclass
class EvaluateConfig:
    """Which checkpoint is evaluated, on what, and how."""

    checkpoint: str | None = None  # a run's folder (its last checkpoint), a checkpoint, an hf/ folder, or a hub name
    tasks: list[str] = field(default_factory=list)  # of the seven; none named: all
    data_dir: str | None = None  # local rows, data_dir/TASK/SPLIT.jsonl or .parquet, and no network; default: the hub
    output_dir: str | None = None  # default: evaluation/ in the checkpoint, or evaluations/NAME where that is read-only
    limit: int | None = None  # rows per task, and held-out sequences; for quick looks
    batch_size: int | str = "auto"  # sequences per forward pass and rank
    dtype: Dtype = Dtype.auto
    device: Device = Device.auto
    kernels: Kernels = Kernels.auto  # `auto` does without for models, dtypes and machines that they do not take
    compare_kernels: bool = False  # score twice, on the kernels and in PyTorch, and report both
    validation: bool = True  # the loss on the run's own held-out split, computed as the run does


@dataclass
class AnalyzeConfig:
    """Which checkpoint's activations are counted, on what text, and how."""

    checkpoint: str | None = None  # a run's folder (its last checkpoint), a checkpoint, an hf/ folder, or a hub name
    text: str | None = None  # plain text, or parquet with a column `text`; default: the run's own held-out blocks
    sequences: int = 64  # read at most
    batch_size: int = 8  # sequences per forward pass
    min_count: int = 20  # occurrences that a token needs to be among the most and least active
    output_dir: str | None = None  # default: analysis/ in the checkpoint, or analyses/NAME where that is read-only
    dtype: Dtype = Dtype.auto
    device: Device = Device.auto
    speed: bool = True  # time each layer, where the CUDA kernels run; times differ a little from run to run


# What may differ between two starts of the same run. Data may move: other tokens are refused by their checksum.
FREE_GROUPS = ("runtime", "logging", "evaluation", "run")
FREE_KEYS = ("data.path",)

AnyConfig = TypeVar("AnyConfig", Config, EvaluateConfig, AnalyzeConfig)

COMPOSITIONS = {"evaluate": EvaluateConfig, "analyze": AnalyzeConfig}  # those without groups

ConfigStore.instance().store(name="schema", node=Config)
for _composition, _schema in COMPOSITIONS.items():
    ConfigStore.instance().store(name=f"{_composition}_schema", node=_schema)


def entry_point(
    check: Callable[[AnyConfig], list[str]], composition: str = "train"
) -> Callable[[Callable[[AnyConfig], int]], Callable[[], None]]:
    """Make `main(config)` a command line: composes `configs/COMPOSITION.yaml` with sys.argv, checks, calls, exits.

    `check` lists what is wrong with a configuration. Exit codes: what `main` returns; 2 for a refused configuration,
    with every mistake listed; 1 where Hydra itself refuses.
    """

    def decorate(main: Callable[[AnyConfig], int]) -> Callable[[], None]:
        def run(composed: DictConfig) -> None:
            try:
                if composition in COMPOSITIONS:
                    config, found = _typed(COMPOSITIONS[composition], composed)
                else:
                    config, found = from_composed(composed, HydraConfig.get().runtime.choices.get("experiment"))
                if found := found + check(config):
                    raise ConfigError(found)
                code = main(config)
            except ConfigError as error:
                code = refuse(error)
            sys.exit(code)

        def command() -> None:
            if {"-m", "--multirun"} & set(sys.argv[1:]):  # Hydra would leave a file before any of our code runs
                sys.exit(refuse(ConfigError(["--multirun runs all jobs in every rank: start a command for each"])))
            hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name=composition)(run)()

        return command

    def refuse(error: ConfigError) -> int:
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"sparsellm: {error}", file=sys.stderr)
        return 2

    return decorate


def from_overrides(overrides: list[str]) -> Config:
    """What a command line of these overrides gives, for scripts and tests. Raises ConfigError where Hydra refuses."""
    try:
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            composed = compose("train", overrides=overrides, return_hydra_config=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError([_one_line(error)]) from error
    config, found = from_composed(composed, composed.hydra.runtime.choices.get("experiment"))
    if found:
        raise ConfigError(found)
    return config


def evaluate_from_overrides(overrides: list[str]) -> EvaluateConfig:
    """`from_overrides` for `python -m sparsellm.evaluate`."""
    try:
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            composed = compose("evaluate", overrides=overrides)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError([_one_line(error)]) from error
    config, found = _typed(EvaluateConfig, composed)
    if found:
        raise ConfigError(found)
    return config


def sweep_request(overrides: list[str]) -> SweepRequest:
    """Sort a sweep's overrides, lists of values included, by Hydra's own grammar: `key=1,2`, `choice`, `range`.

    Raises ConfigError, with every mistake, for what the grammar or `SweepConfig` does not have.
    """
    options, axes, evaluate, found = OmegaConf.structured(SweepConfig), {}, [], []
    parser = OverridesParser.create()
    for text in overrides:
        try:
            (override,) = parser.parse_overrides([text])
        except HydraException as error:
            found.append(f"{text}: {_one_line(error)}")
            continue
        key, texts = override.key_or_group, [override.input_line]
        group, _, name = key.partition(".")
        if override.is_sweep_override():
            # A glob needs Hydra's search path, an interval has no list, and a shuffled list another order every time.
            listed = override.is_discrete_sweep() and override.value_type != ValueType.GLOB_CHOICE_SWEEP
            single = group in ("sweep", "evaluate")
            if not listed or getattr(override.value(), "shuffle", False) or single:
                wanted = "one value" if single else f"a list of values in order, as {key}=1,2"
                found.append(f"{text}: {key} takes {wanted}")
                continue
            texts = [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
        if group == "sweep" and name:
            try:
                OmegaConf.update(options, name, override.value())
            except OmegaConfBaseException as error:
                found.append(f"{text}: {_one_line(error)}; sweep has {', '.join(options)}")
        elif group == "evaluate" and name:
            evaluate.append(text.removeprefix("evaluate."))
        else:
            axes[key] = texts
    if found:
        raise ConfigError(found)
    return SweepRequest(_build(SweepConfig, OmegaConf.to_container(options, enum_to_str=True)), axes, evaluate)


def quoted(value: str) -> str:
    """`value` as an override spells it: in quotes where Hydra's grammar would read something else."""
    return value if re.fullmatch(r"[\w./-]+", value) else "'" + value.replace("'", "\\'") + "'"


def from_composed(composed: DictConfig, experiment: str | None) -> tuple[Config, list[str]]:
    """The typed configuration of a composed one, with `run.name` and `data.path` filled in; and as mistakes the keys
    that the schema does not have, which `+key=value` lets past Hydra, and those without a value.

    Raises ConfigError for an interpolation that leads nowhere.
    """
    config, found = _typed(Config, composed)
    if config.data.path is None:
        config.data.path = f"data/{config.data.name}"
    if config.run.name is None:
        config.run.name = f"{experiment or 'run'}-{fingerprint(config)}"
    return config, found


def _typed(schema: type[AnyConfig], composed: DictConfig) -> tuple[AnyConfig, list[str]]:
    composed = OmegaConf.masked_copy(composed, [key for key in composed if key != "hydra"])
    found = []
    try:
        for key in sorted(OmegaConf.missing_keys(composed)):
            found.append(f"{key} has no value: give it one with {key}=...")
            OmegaConf.update(composed, key, OmegaConf.select(OmegaConf.structured(schema), key))
        values = OmegaConf.to_container(composed, resolve=True, enum_to_str=True)
    except OmegaConfBaseException as error:
        raise ConfigError([*found, _one_line(error)]) from error
    return _build(schema, values), found + _unknown_keys(schema, values)


def from_dict(values: dict[str, Any]) -> Config:
    """The inverse of `to_dict`. Raises ConfigError for unknown keys."""
    if unknown := _unknown_keys(Config, values):
        raise ConfigError(unknown)
    return _build(Config, values)


def to_dict(config: Config) -> dict[str, Any]:
    """Nested plain values, enums as their names: what config.yaml and a checkpoint hold."""
    return asdict(config, dict_factory=lambda items: {k: v.name if isinstance(v, Enum) else v for k, v in items})


def save(config: Config, path: Path) -> None:
    """Write `config` as YAML to `path`, whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(OmegaConf.to_yaml(OmegaConf.create(to_dict(config))))
    partial.replace(path)


def load(path: Path) -> Config:
    """The configuration that `save` wrote. Raises ConfigError for unknown keys."""
    return from_dict(OmegaConf.to_container(OmegaConf.load(path)))


def definition(config: Config) -> dict[str, Any]:
    """Flat `group.key` to value of all that defines the run: two starts of one run agree on these."""
    nested = {group: values for group, values in to_dict(config).items() if group not in FREE_GROUPS}
    flat = {f"{group}.{key}": value for group, values in nested.items() for key, value in values.items()}
    return {key: value for key, value in flat.items() if key not in FREE_KEYS}


def fingerprint(config: Config) -> str:
    """8 hex digits of `definition`: of the resolved configuration without the free groups and keys."""
    return hashlib.sha256(json.dumps(definition(config), sort_keys=True).encode()).hexdigest()[:8]


def l1_coefficient_as(config: Config, normalization: L1Normalization) -> float:
    """The coefficient that gives the same loss under `normalization` (DESIGN §2: `mean` = `sum` x N x L)."""
    size = config.model.intermediate_size * config.model.num_layers
    coefficient = config.sparsity.l1_coefficient
    if config.sparsity.l1_normalization == normalization:
        return coefficient
    return coefficient * size if normalization == L1Normalization.mean else coefficient / size


def obstacles_to_kernels(config: Config) -> list[str]:
    """What in `config`, on whatever machine, keeps training and validation off the CUDA kernels."""
    runtime, activation = config.runtime, config.sparsity.activation
    return [
        obstacle
        for applies, obstacle in (
            (runtime.device == Device.cpu, "runtime.device=cpu has no GPU"),
            (runtime.precision != Precision.bfloat16, f"runtime.precision={runtime.precision.name} is not bfloat16"),
            (runtime.deterministic, "runtime.deterministic=true excludes engines that are chosen by timing"),
            (activation != Activation.relu, f"sparsity.activation={activation.name} never gives exact zeros"),
        )
        if applies
    ]


def mistakes(config: Config, world_size: int) -> list[str]:
    """Every rule that `config` breaks on `world_size` ranks, each with its remedy; empty when it may run.

    Looks at values and at the number of GPUs; what `data.path` and `data.files` hold is checked by sparsellm.data.
    """
    found: list[str] = []

    def require(holds: bool, problem: str) -> None:
        if not holds:
            found.append(problem)

    model, data, sparsity, optimizer = config.model, config.data, config.sparsity, config.optimizer
    training, runtime, log, run = config.training, config.runtime, config.logging, config.run

    for group, key, least in (
        ("model", "vocab_size", 2), ("model", "hidden_size", 8), ("model", "intermediate_size", 8),
        ("model", "num_layers", 1), ("model", "num_heads", 1), ("model", "context_length", 2),
        ("training", "steps", 1), ("training", "batch_size", 1), ("training", "sequence_length", 1),
        ("training", "seed", 0), ("data", "seed", 0), ("data", "tokenizer_vocab_size", 300),
        ("runtime", "micro_batch_size", 1), ("runtime", "data_workers", 0), ("runtime", "ddp_bucket_mb", 1),
        ("runtime", "max_skipped_steps", 1),
        ("optimizer", "warmup_steps", 0), ("sparsity", "l1_start_tokens", 0), ("sparsity", "l1_warmup_tokens", 0),
        ("sparsity", "dead_after_tokens", 1), ("sparsity", "reinit_every", 1),
        ("logging", "validation_every", 0), ("logging", "validation_samples", 1), ("evaluation", "every", 0),
        ("run", "checkpoint_every", 1), ("run", "keep_checkpoints", 1),
    ):  # fmt: skip
        value = getattr(getattr(config, group), key)
        require(value >= least, f"{group}.{key} is {value}: it must be at least {least}")
    for key, value in (
        ("model.rope_theta", model.rope_theta), ("model.norm_eps", model.norm_eps),
        ("model.init_std", model.init_std), ("optimizer.learning_rate", optimizer.learning_rate),
        ("optimizer.eps", optimizer.eps), ("optimizer.grad_clip", optimizer.grad_clip),
    ):  # fmt: skip
        require(0 < value < math.inf, f"{key} is {value}: it must be a positive number")
    for key, value in (
        ("sparsity.l1_coefficient", sparsity.l1_coefficient), ("optimizer.weight_decay", optimizer.weight_decay),
    ):  # fmt: skip
        require(0 <= value < math.inf, f"{key} is {value}: it must be zero or a positive number")
    for key, value in (("training.seed", training.seed), ("data.seed", data.seed)):
        require(value < 2**63, f"{key} is {value}: it must be below 2^63")
    for key, value in (("optimizer.beta1", optimizer.beta1), ("optimizer.beta2", optimizer.beta2)):
        require(0 <= value < 1, f"{key} is {value}: it must be at least 0 and below 1")
    require(
        0 <= optimizer.final_lr_fraction <= 1,
        f"optimizer.final_lr_fraction is {optimizer.final_lr_fraction}: it must be between 0 and 1",
    )
    require(
        0 < data.validation_fraction < 1,
        f"data.validation_fraction is {data.validation_fraction}: it must be above 0 and below 1",
    )

    for key, value in (("hidden_size", model.hidden_size), ("intermediate_size", model.intermediate_size)):
        require(value % MULTIPLE == 0, f"model.{key} is {value}: it must be a multiple of {MULTIPLE}")
        require(value <= MAX_COLUMNS, f"model.{key} is {value}: it must be at most {MAX_COLUMNS}")
    if model.num_heads >= 1:
        require(
            model.hidden_size % (2 * model.num_heads) == 0,
            f"model.hidden_size {model.hidden_size} does not divide into {model.num_heads} heads of even width:"
            " change model.num_heads",
        )
    require(
        training.sequence_length <= model.context_length,
        f"training.sequence_length {training.sequence_length} is longer than model.context_length"
        f" {model.context_length}: shorten the one or raise the other",
    )

    if sparsity.activation == Activation.silu:
        require(
            sparsity.l1_coefficient == 0,
            f"sparsity.l1_coefficient is {sparsity.l1_coefficient} with sparsity.activation=silu, which never gives"
            " exact zeros: add sparsity.l1_coefficient=0, or use relu",
        )
        require(model.gated, "sparsity.activation=silu with model.gated=false: non-gated models are relu only")
    step_tokens = training.batch_size * training.sequence_length
    run_tokens = training.steps * step_tokens
    require(
        (sparsity.l1_schedule == L1Schedule.linear) == (sparsity.l1_warmup_tokens != 0),
        f"sparsity.l1_warmup_tokens is {sparsity.l1_warmup_tokens} with"
        f" sparsity.l1_schedule={sparsity.l1_schedule.name}: a linear schedule needs its tokens, a constant one has 0",
    )
    require(
        run_tokens < 1 or sparsity.l1_start_tokens + max(1, sparsity.l1_warmup_tokens) <= run_tokens,
        f"sparsity.l1_start_tokens {sparsity.l1_start_tokens} and l1_warmup_tokens {sparsity.l1_warmup_tokens} exceed"
        f" the run's {run_tokens} tokens together: the coefficient would never be reached, so lower them",
    )
    if (silence := sparsity.reinit_dead_after_tokens) is not None:
        require(silence >= 1, f"sparsity.reinit_dead_after_tokens is {silence}: it must be at least 1, or null for off")
        require(
            sparsity.activation == Activation.relu,
            f"sparsity.reinit_dead_after_tokens is {silence} with sparsity.activation={sparsity.activation.name}, whose"
            " neurons are never silent: set it to null, or use relu",
        )
        if min(silence, sparsity.reinit_every, step_tokens) >= 1:
            silent_steps = -(-silence // step_tokens)
            first = -(-silent_steps // sparsity.reinit_every) * sparsity.reinit_every
            require(
                first + silent_steps <= training.steps,
                f"sparsity.reinit_dead_after_tokens {silence} with reinit_every {sparsity.reinit_every} never draws a"
                f" row in the run's {training.steps} steps: the first could be drawn at step {first}, and none is in"
                f" the last {silent_steps}; lower them, or train longer",
            )
    require(
        optimizer.warmup_steps <= training.steps,
        f"optimizer.warmup_steps {optimizer.warmup_steps} exceeds training.steps {training.steps}:"
        " shorten the warm-up, or train longer",
    )

    require(
        training.batch_size % world_size == 0,
        f"training.batch_size {training.batch_size} does not divide over {world_size} ranks:"
        " change it, or the number of processes",
    )
    found += _device_mistakes("runtime.device", runtime.device)
    if runtime.kernels == Kernels.cuda:
        found += _kernel_mistakes("runtime.kernels=cuda", "runtime.kernels=auto", obstacles_to_kernels(config))
    require(
        1 <= log.every <= MAX_LOG_INTERVAL,
        f"logging.every is {log.every}: it must be 1 to {MAX_LOG_INTERVAL}, for ranks agree to stop at logged steps",
    )
    require(
        run.name is not None and re.fullmatch(r"[a-z0-9._-]+", run.name) is not None and run.name not in (".", ".."),
        f"run.name is {run.name!r}: use only a-z, 0-9, '.', '_' and '-'",
    )

    if data.source == Source.hub:
        require(data.dataset is not None, "data.source=hub needs the data set's name: data.dataset=OWNER/NAME")
    if data.source == Source.files:
        require(bool(data.files), "data.source=files needs data.files=[PATTERN,...]")
    if data.source == Source.stdlib_docs:
        require(not data.streaming, "data.streaming=true with data.source=stdlib_docs: there is nothing to stream")
        require(
            data.tokenizer is None,
            f"data.tokenizer is {data.tokenizer!r} with data.source=stdlib_docs, which trains its own: set it to null",
        )
    else:
        require(data.tokenizer is not None, f"data.source={data.source.name} needs data.tokenizer=NAME or a folder")
    require(data.max_tokens is None or data.max_tokens >= 1, f"data.max_tokens is {data.max_tokens}: at least 1")
    return found + _amount_mistakes(config.evaluation, "evaluation.")


def evaluate_mistakes(config: EvaluateConfig) -> list[str]:
    """Every value of `config` that breaks a rule, each with its remedy; sparsellm.evaluation looks at what it names."""
    found: list[str] = []
    if config.checkpoint is None:
        found.append("checkpoint has no value: checkpoint=PATH, of a run, a checkpoint or an hf/ folder, or a hub name")
    found += _amount_mistakes(config) + _device_mistakes("device", config.device)
    obstacles = ["device=cpu has no GPU"] if config.device == Device.cpu else []
    if config.dtype not in (Dtype.auto, Dtype.bfloat16):
        obstacles.append(f"dtype={config.dtype.name} is not bfloat16")
    if config.compare_kernels:
        if config.kernels == Kernels.torch:
            obstacles.append("kernels=torch takes none")
        found += _kernel_mistakes("compare_kernels=true", "compare_kernels=false", obstacles)
    elif config.kernels == Kernels.cuda:
        found += _kernel_mistakes("kernels=cuda", "kernels=auto", obstacles)
    return found


def analyze_mistakes(config: AnalyzeConfig) -> list[str]:
    """Every value of `config` that breaks a rule, each with its remedy; what its paths hold is sparsellm.analysis's."""
    found: list[str] = []
    if config.checkpoint is None:
        found.append("checkpoint has no value: checkpoint=PATH, of a run, a checkpoint or an hf/ folder, or a hub name")
    for key in ("sequences", "batch_size", "min_count"):
        if (value := getattr(config, key)) < 1:
            found.append(f"{key} is {value}: it must be at least 1")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        found.append("an analysis is one process: start it without torchrun")
    return found + _device_mistakes("device", config.device)


def _amount_mistakes(config: EvaluateConfig | EvaluationConfig, prefix: str = "") -> list[str]:
    found, limit, size = [], config.limit, config.batch_size
    if limit is not None and limit < 1:
        found.append(f"{prefix}limit is {limit}: it must be at least 1, or null for all rows")
    if not (size == "auto" if isinstance(size, str) else size >= 1):
        found.append(f"{prefix}batch_size is {size}: it must be auto, or a number of at least 1")
    return found


def _device_mistakes(key: str, device: Device) -> list[str]:
    found = []
    if device == Device.cuda and not torch.cuda.is_available():
        found.append(f"{key}=cuda but torch sees no GPU: use {key}=auto or cpu")
    if device != Device.cpu and torch.cuda.is_available():
        ranks, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
        if ranks > gpus:
            found.append(f"{key}: {ranks} ranks on a node with {gpus} GPUs: lower --nproc_per_node")
    return found


def _kernel_mistakes(setting: str, remedy: str, obstacles: list[str]) -> list[str]:
    """Why the CUDA kernels, which `setting` demands, cannot run: `obstacles` in the configuration, or the machine."""
    if obstacles:
        return [f"{setting}, but {obstacle}: change it, or use {remedy}" for obstacle in obstacles]
    try:
        build.load()
    except build.KernelsUnavailable as error:
        return [f"{setting} does not run here ({remedy} goes without): {error}"]
    return []


def _one_line(error: BaseException) -> str:
    because = "" if error.__cause__ is None else f": {_one_line(error.__cause__)}"
    return " ".join(str(error).split()) + because


def _unknown_keys(schema: type, values: dict[str, Any], prefix: str = "") -> list[str]:
    known = {f.name: f.type for f in fields(schema)}
    found = []
    for key, value in values.items():
        if key not in known:
            found.append(f"{prefix}{key} is not a key: {prefix[:-1] or 'the top level'} has {', '.join(known)}")
        elif is_dataclass(known[key]):
            found += _unknown_keys(known[key], value, f"{prefix}{key}.")
    return found


def _build(schema: type, values: dict[str, Any]) -> Any:
    def convert(kind: Any, value: Any) -> Any:
        if is_dataclass(kind):
            return _build(kind, value)
        if isinstance(kind, type) and issubclass(kind, Enum):
            return kind[value]
        if value is not None and isinstance(kind, types.UnionType):
            return convert(next(k for k in typing.get_args(kind) if k is not type(None)), value)
        return float(value) if kind is float else value

    return schema(**{f.name: convert(f.type, values[f.name]) for f in fields(schema) if f.name in values})
