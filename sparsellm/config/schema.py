"""The configuration's keys: typed dataclasses, their units, and their defaults, which are the paper's recipe."""

from dataclasses import dataclass, field
from enum import Enum


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
    tokenizer: str | None = None  # hub name or local folder; null: trained on the text, for stdlib_docs and files
    tokenizer_vocab_size: int = 4_096  # of the tokenizer that is trained on the text
    path: str | None = None  # default: data/<name>
    max_tokens: int | None = None  # training tokens to prepare; default: what the experiment needs
    validation_fraction: float = 0.005  # of the documents, by their content; of the end of a text of few documents
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


def l1_coefficient_as(config: Config, normalization: L1Normalization) -> float:
    """The coefficient that gives the same loss under `normalization` (DESIGN §2: `mean` = `sum` x N x L)."""
    size = config.model.intermediate_size * config.model.num_layers
    coefficient = config.sparsity.l1_coefficient
    if config.sparsity.l1_normalization == normalization:
        return coefficient
    return coefficient * size if normalization == L1Normalization.mean else coefficient / size
