"""Configuration keys as typed dataclasses; defaults are the paper's recipe. architecture.py has the group `model`."""

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from sparsellm.config.architecture import ModelConfig
from sparsellm.config.keys import key

# Help texts for keys that several commands have.
DEVICE = "Device. auto: a GPU if there is one."
KERNELS = "Sparse kernels. auto: those that this GPU can run, otherwise PyTorch; cuda, triton: required; torch: none."

MIX_PERIOD = 10_000  # Each data.mix source gets its exact share of every MIX_PERIOD samples.
SHORTEST_SEQUENCE = 1  # Minimum of training.sequence_length, in tokens.
LONGEST_TAG = 64  # Maximum number of characters in a Weights & Biases tag.


class Activation(Enum):
    relu = "relu"
    silu = "silu"


class L1Normalization(Enum):
    """How each token's |h| is reduced over neurons and layers. layer_mean: sum over neurons, mean over layers."""

    sum = "sum"
    mean = "mean"
    layer_mean = "layer_mean"


class L1Schedule(Enum):
    """The L1 coefficient after `l1_start_tokens`: constant, or rising from 0 linearly or along half a cosine period."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"


class Schedule(Enum):
    """Learning rate after the warm-up: a cosine over all steps, or constant with a linear decay at the end."""

    cosine = "cosine"
    wsd = "wsd"  # warm-up, stable, decay


class Source(Enum):
    stdlib_docs = "stdlib_docs"  # documentation contained in Python's standard library
    hub = "hub"
    files = "files"


class Device(Enum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Precision(Enum):
    """Dtype of matmuls and activations; weights, gradients and optimizer state are always float32."""

    bfloat16 = "bfloat16"
    float32 = "float32"


class Kernels(Enum):
    """Kernels for the feedforward layers. With cuda and triton, a machine that cannot run them is an error."""

    auto = "auto"  # the kernels that this GPU supports, otherwise PyTorch
    cuda = "cuda"
    triton = "triton"
    torch = "torch"  # PyTorch alone

    @property
    def demanded(self) -> bool:
        return self in (Kernels.cuda, Kernels.triton)


class Float8(Enum):
    """Linear layers that train in FP8."""

    attention = "attention"  # attention's projections
    all = "all"  # feedforward layers too; on the sparse kernels, their gate product


class Float8Recipe(Enum):
    """What shares a scale in FP8 training: a whole tensor, or one row of it."""

    tensorwise = "tensorwise"
    rowwise = "rowwise"


class DdpCompress(Enum):
    none = "none"  # gradients are all-reduced in float32
    bf16 = "bf16"  # gradients are rounded to bfloat16, which halves the bytes


class Dtype(Enum):
    auto = "auto"  # Each command's help text for `dtype` says which dtype this is.
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


class Shard(Enum):
    """What is sharded across the ranks of a node."""

    none = "none"
    optimizer = "optimizer"  # gradients and optimizer state
    full = "full"  # weights, gradients and optimizer state


class WandbMode(Enum):
    online = "online"
    offline = "offline"
    disabled = "disabled"


class SweepMode(Enum):
    run = "run"  # on this machine
    print = "print"  # only print the commands
    slurm = "slurm"  # only write a script for a SLURM job array


@dataclass
class DataConfig:
    """The corpus, and how it becomes tokens."""

    name: str = key("stdlib_docs", "Corpus name, used in `path` and in logs.")
    source: Source = key(Source.stdlib_docs, "Documents: Python's own documentation, a hub dataset or local files.")
    dataset: str | None = key(None, "Hub dataset, OWNER/NAME (source=hub).")
    subset: str | None = key(None, "Configuration name of the hub dataset.")
    revision: str | None = key(None, "Branch, tag or commit of the hub dataset. null: the latest commit.")
    split: str = key("train", "Split of the hub dataset.")
    files: list[str] = key([], "Local files or glob patterns: parquet, jsonl or plain text (source=files).")
    text_column: str = key("text", "Column or field that holds the text (parquet, jsonl).")
    skip_bad_records: bool = key(False, "Skip and count records that cannot be read, instead of stopping at them.")
    tokenizer: str | None = key(
        None, "Tokenizer: hub name or local folder. null: train one on the text (local sources only)."
    )
    tokenizer_vocab_size: int = key(4_096, "Vocabulary size of a tokenizer trained on the text.", minimum=300)
    path: str | None = key(None, "Folder of the prepared tokens. null: data/NAME.")
    max_tokens: int | None = key(None, "Number of training tokens to prepare. null: as many as the experiment reads.")
    validation_fraction: float = key(
        0.005,
        "Fraction of the text that is held out, chosen by a hash: of a single file and a corpus read to its end, at"
        " least 50 blocks, or 5% of a short text. 0: none.",
        minimum=0,
        below=1,
    )
    mix: list[dict[str, Any]] = key(
        [], "Prepared corpora to mix, [{data: NAME, weight: W}, ...]: data/NAME or folders. Replaces the keys above."
    )
    verify: bool = key(False, "Verify all prepared tokens at the start, even if the files look unchanged.")
    streaming: bool = key(False, "Tokenize while training instead of preparing first.")
    seed: int = key(0, "Seed for choosing text within files and for shuffling training blocks.", minimum=0)

    @property
    def folder(self) -> Path:
        """`path` as a Path. Call this only after composition has filled in `path`."""
        assert self.path is not None
        return Path(self.path)

    @property
    def mix_names(self) -> list[str]:
        """The name of each source in `mix`: the last part of its folder's path."""
        return [Path(source["data"]).name for source in self.mix]


@dataclass
class SparsityConfig:
    """The feedforward activation, its L1 loss (DESIGN §2), and remedies for dead neurons, which are off by default.

    Schedules are in tokens of the global batch, so they do not depend on the batch size.
    """

    activation: Activation = key(
        Activation.relu, "Activation function of the gate, or of the up projection if model.gated=false."
    )
    relu_tokens: int = key(
        0, "Tokens over which SiLU is annealed to ReLU (init_from a SiLU model). 0: ReLU from the start.", minimum=0
    )
    l1_coefficient: float = key(
        2e-5, "Coefficient of the L1 loss on the feedforward activations. 0: no L1 loss.", minimum=0
    )
    l1_normalization: L1Normalization = key(
        L1Normalization.sum, "Per-token reduction of |h| that the coefficient multiplies."
    )
    l1_schedule: L1Schedule = key(
        L1Schedule.constant, "Coefficient after l1_start_tokens: constant, or rising from 0 over l1_warmup_tokens."
    )
    l1_start_tokens: int = key(0, "Number of tokens before the L1 loss starts.", minimum=0)
    l1_warmup_tokens: int = key(
        0, "Number of tokens over which the coefficient rises from 0 (l1_schedule=linear or cosine).", minimum=0
    )
    dead_after_tokens: int = key(
        10_000_000, "Number of tokens without firing after which a neuron counts as dead.", minimum=1
    )
    reinit_dead_after_tokens: int | None = key(
        None, "Tokens without firing after which a gate row is redrawn, unless fewer remain. null: never.", minimum=1
    )
    reinit_every: int = key(100, "Steps between reinitializations.", minimum=1)
    reinit_blend: float = key(
        1.0, "Weight of the new row. Below 1, a gate row is blended again until its neuron fires.", above=0, maximum=1
    )


@dataclass
class DistillConfig:
    """Distillation: the KL divergence from a dense teacher is added to the loss."""

    teacher: str | None = key(
        None, "Teacher with the same tokenizer: a run, checkpoint, hf/ folder or hub name. null: no distillation."
    )
    weight: float = key(
        1.0, "Weight of temperature^2 x KL(teacher || student), which is added to the cross entropy.", above=0
    )
    temperature: float = key(1.0, "Temperature that divides both models' logits in the KL.", above=0)


@dataclass
class OptimizerConfig:
    """AdamW, weight decay on matrices only; linear warm-up, then a schedule that decays to a fraction of the peak."""

    muon: bool = key(False, "Update the matrices of the layers by Muon instead of AdamW.")
    learning_rate: float = key(1e-3, "Peak learning rate.", above=0)
    schedule: Schedule = key(
        Schedule.cosine, "Learning rate after the warm-up. wsd: constant, then a linear decay (decay_fraction)."
    )
    decay_fraction: float = key(
        0.2, "Fraction of training.steps, at their end, over which wsd decays.", above=0, maximum=1
    )
    final_lr_fraction: float = key(
        0.1, "Learning rate at the last step, as a fraction of the peak.", minimum=0, maximum=1
    )
    warmup_steps: int = key(600, "Linear warm-up steps; unless typed, at most a tenth of training.steps.", minimum=0)
    beta1: float = key(0.9, "Decay rate of AdamW's first moment.", minimum=0, below=1)
    beta2: float = key(0.95, "Decay rate of AdamW's second moment.", minimum=0, below=1)
    eps: float = key(1e-8, "Epsilon of AdamW.", above=0)
    weight_decay: float = key(0.1, "Weight decay of every 2-D weight, the embedding included.", minimum=0)
    grad_clip: float = key(1.0, "Maximum L2 norm of the gradient.", above=0)


@dataclass
class TrainingConfig:
    """The amount of training, and the seed of the initial weights."""

    steps: int = key(9_537, "Optimizer steps.", minimum=1)
    batch_size: int = key(512, "Sequences per optimizer step, over all ranks.", minimum=1)
    sequence_length: int = key(2_048, "Sequence length in tokens.", minimum=SHORTEST_SEQUENCE)
    seed: int = key(0, "Seed for the initial weights.", minimum=0)
    stop_on_divergence: bool = key(False, "End the run, with a checkpoint, when its loss diverges.")

    @property
    def tokens_per_step(self) -> int:
        """Number of tokens per optimizer step, over all ranks."""
        return self.batch_size * self.sequence_length


@dataclass
class RuntimeConfig:
    """How a step is computed. These keys change results at most by rounding."""

    device: Device = key(Device.auto, DEVICE)
    precision: Precision = key(
        Precision.bfloat16, "Dtype of matmuls; weights, gradients and optimizer state are float32."
    )
    compile: bool = key(True, "Compile the layers with torch.compile.")
    kernels: Kernels = key(
        Kernels.auto,
        "Sparse kernels. auto: those that this GPU can run, otherwise PyTorch (also in deterministic, float32 and SiLU "
        "runs); cuda, triton: required; torch: none.",
    )
    float8: Float8 | None = key(
        None,
        "What trains in FP8. attention: its projections, by torchao. all: feedforward layers too; of sparse layers on"
        " the CUDA kernels, the gate product. null: nothing.",
    )
    float8_recipe: Float8Recipe = key(
        Float8Recipe.tensorwise, "FP8 scales by torchao. tensorwise: fastest; rowwise: smaller rounding errors."
    )
    calibrate: bool = key(
        True, "Measure each engine's cost once per GPU model and layer shape. false: use cached costs or an H200's."
    )
    micro_batch_size: int | str = key(
        "auto", "Sequences per forward pass and rank. auto: as many as fit the GPU's memory; 16 on a CPU.", minimum=1
    )
    memory_limit_gib: float | None = key(
        None, "GPU memory limit per rank in GiB, everything included. null: all of it.", above=0
    )
    recompute: bool | str = key(
        "auto",
        "Recompute each layer in the backward pass instead of keeping its activations. auto: while that is faster by "
        "estimate, because micro_batch_size=auto can then be larger.",
    )
    shard: Shard = key(
        Shard.none, "State sharded across a node's ranks. optimizer: gradients and optimizer state; full: weights too."
    )
    deterministic: bool = key(False, "Bitwise reproducible runs on the same ranks and hardware; slower.")
    data_workers: int = key(
        2, "Data loading processes per rank (a stream: at most one). 0: load between steps.", minimum=0, maximum=256
    )
    ddp_bucket_mb: int = key(64, "DDP gradient bucket size in MB (shard=none).", minimum=1)
    ddp_compress: DdpCompress = key(DdpCompress.none, "Dtype of the gradient all-reduce. bf16: half the bytes.")
    max_skipped_steps: int = key(10, "Consecutive steps with non-finite gradients that stop the run.", minimum=1)
    profile_steps: list[int] = key([], "First and last step, [FIRST,LAST], of a profiler trace in RUN/profile/.")


@dataclass
class LoggingConfig:
    """Metrics, validation, Weights & Biases, TensorBoard. Unless typed or in the file of --config, wandb* keys
    have the values of WANDB_MODE (or WANDB_DISABLED), WANDB_PROJECT, WANDB_ENTITY, WANDB_RUN_GROUP, WANDB_TAGS and
    WANDB_NOTES, if these are set."""

    every: int = key(10, "Steps between rows of metrics.jsonl, at most 10.", minimum=1, maximum=10)
    validation_every: int = key(250, "Steps between validations. 0: never.", minimum=0)
    validation_samples: int = key(256, "Held-out sequences per validation, evenly spaced over all files.", minimum=1)
    wandb: WandbMode = key(WandbMode.online, "Weights & Biases mode. online falls back to offline without a key.")
    wandb_project: str = key("sparsellm", "Weights & Biases project.")
    wandb_entity: str | None = key(
        None, "Weights & Biases user or team that owns the project. null: the account's default."
    )
    wandb_group: str | None = key(None, "Weights & Biases group. null: none; a sweep sets its own name.")
    wandb_tags: list[str] = key([], "Weights & Biases tags of the run, such as [baseline,0p5b].")
    wandb_notes: str | None = key(None, "Weights & Biases notes: a description of the run. null: none.")
    tensorboard: bool = key(False, "Write rows also as TensorBoard event files, to RUN/tensorboard/.")


@dataclass
class EvaluationConfig:
    """Downstream tasks during training; keys shared with `evaluate` have the same meaning."""

    every: int = key(0, "Steps between evaluations; the last step is evaluated too. 0: never.", minimum=0)
    tasks: list[str] = key([], "Tasks to score, among the seven. Empty: all.")
    data_dir: str | None = key(None, "Folder of task rows, DIR/TASK/SPLIT.jsonl or .parquet. null: the hub's rows.")
    limit: int | None = key(None, "Maximum rows per task. null: all.", minimum=1)
    batch_size: int | str = key("auto", "Sequences per forward pass and rank.", minimum=1)


@dataclass
class RunConfig:
    """The run's folder and checkpoints, and how the same run starts again."""

    name: str | None = key(
        None, "Run name. null: EXPERIMENT, the typed differences, and an 8-digit hash of all that defines the run."
    )
    root: str = key("runs", "Folder that holds all runs.")
    restart: bool = key(False, "Start from scratch in a new folder instead of resuming.")
    checkpoint_every: int = key(500, "Steps between checkpoints.", minimum=1)
    keep_checkpoints: int = key(2, "Number of most recent checkpoints to keep.", minimum=1)
    keep_every: int = key(0, "Steps between checkpoints that are never deleted. 0: none.", minimum=0)
    hf_dtype: Precision | None = key(None, "Dtype of the exported hf/ weights. null: runtime.precision.")
    skip_damaged: bool = key(False, "Resume without damaged checkpoints and damaged rows of metrics.jsonl.")

    @property
    def folder(self) -> Path:
        """The run's folder. Call this only after composition has filled in `name`."""
        assert self.name is not None
        return Path(self.root, self.name)


@dataclass
class Config:
    """The configuration of a run. Keys that belong to no group:"""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    sparsity: SparsityConfig = field(default_factory=SparsityConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    run: RunConfig = field(default_factory=RunConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    init_from: str | None = key(
        None, "Model to start from: a run, checkpoint, hf/ folder or hub name; sets model.*. null: random weights."
    )

    @property
    def hf_dtype(self) -> Precision:
        """Dtype of the weights exported to hf/: run.hf_dtype, or runtime.precision if that is null."""
        return self.runtime.precision if self.run.hf_dtype is None else self.run.hf_dtype


@dataclass
class SweepConfig:
    """How a sweep runs; the swept values are given with the keys of `train`."""

    name: str | None = key(None, "Sweep name. null: EXPERIMENT and an 8-digit hash of its runs.")
    root: str = key("sweeps", "Folder that holds all sweeps.")
    mode: SweepMode = key(SweepMode.run, "Run the sweep here, print its commands, or write a SLURM array script.")
    baseline: bool = key(False, "Add the dense baseline, sparsity=dense_silu.")
    evaluate: bool = key(True, "Evaluate every finished run with the options evaluate.*.")
    benchmark: bool = key(False, "Benchmark speed, memory and energy of every finished run.")
    parallel: int = key(1, "Number of concurrent runs, each on its own GPUs; their output goes only to their logs.")
    share_gpus: bool = key(False, "Let concurrent runs share GPUs if there are too few for each to have its own.")
    nproc_per_node: int | None = key(None, "Processes per run. null: one per GPU, divided by sweep.parallel, or 1.")
    point: int | None = key(None, "Index of the one run to start, from 0; for the tasks of a SLURM array. null: all.")


@dataclass
class EvaluateConfig:
    """Which checkpoint is evaluated, on what, and how."""

    checkpoint: str | None = key(
        None, "Model to evaluate (required): a run (its last checkpoint), a checkpoint, an hf/ folder or a hub name."
    )
    tasks: list[str] = key([], "Tasks to score, among the seven. Empty: all. none: only the held-out text.")
    data_dir: str | None = key(None, "Folder of task rows, DIR/TASK/SPLIT.jsonl or .parquet. null: the hub's rows.")
    export: str | None = key(None, "Folder to write the hub's rows to, for a data_dir elsewhere; scores nothing.")
    output_dir: str | None = key(
        None, "Output folder. null: evaluation/ in the checkpoint, or evaluations/NAME if that is read-only."
    )
    limit: int | None = key(None, "Maximum rows per task; the held-out loss ignores it. null: all.", minimum=1)
    batch_size: int | str = key("auto", "Sequences per forward pass and rank.", minimum=1)
    dtype: Dtype = key(Dtype.auto, "Dtype of weights and activations. auto: the run's; without a run, as stored.")
    device: Device = key(Device.auto, DEVICE)
    kernels: Kernels = key(Kernels.auto, KERNELS)
    compare_kernels: bool = key(False, "Score twice, with the kernels and in PyTorch, and report both.")
    float8: bool = key(
        False, "Compute attention and the gate product in FP8 on the kernels; results go to a folder float8/."
    )
    validation: bool = key(True, "Compute the held-out loss of the run's own validation split, as the run does.")


@dataclass
class AnalyzeConfig:
    """Which checkpoint's activations are analyzed, on what text, and how."""

    checkpoint: str | None = key(
        None, "Model to analyze (required): a run (its last checkpoint), a checkpoint, an hf/ folder or a hub name."
    )
    text: str | None = key(
        None, "File to read: plain text, jsonl or parquet with a column `text`. null: the run's own held-out blocks."
    )
    sequences: int = key(64, "Maximum number of sequences to read.", minimum=1)
    batch_size: int = key(8, "Sequences per forward pass.", minimum=1)
    min_count: int = key(20, "Occurrences a token needs to be ranked among the most and least active.", minimum=1)
    output_dir: str | None = key(
        None, "Output folder. null: analysis/ in the checkpoint, or analyses/NAME if that is read-only."
    )
    recordings: str | None = key(
        None, "Folder for records of each token's active neurons, large; read by benchmark scripts. null: none."
    )
    dtype: Dtype = key(Dtype.auto, "Dtype of weights and activations. auto: the run's; without a run, as stored.")
    device: Device = key(Device.auto, DEVICE)
    speed: bool = key(True, "Time each layer if kernels are available; times vary slightly between runs.")


class Verbatim(str):
    """Text taken exactly as typed, including commas, quotes and braces."""


@dataclass
class GenerateConfig:
    """Which checkpoint generates text, from which prompt, and how much."""

    checkpoint: str | None = key(
        None, "Model that generates (required): a run (its last checkpoint), a checkpoint, an hf/ folder or a hub name."
    )
    prompt: Verbatim | None = key(None, "Prompt. null: read one prompt per line from standard input.")
    tokens: int = key(128, "Maximum number of new tokens; generation stops at an end-of-text token.", minimum=1)
    temperature: float = key(0.8, "Sampling temperature. 0: greedy.", minimum=0)
    top_p: float = key(0.95, "Nucleus sampling threshold. 1: sample from all tokens.", above=0, maximum=1)
    seed: int = key(0, "Seed for sampling.")
    dtype: Dtype = key(Dtype.auto, "Dtype of weights and activations. auto: bfloat16 on a GPU, float32 on a CPU.")
    device: Device = key(Device.auto, DEVICE)
    kernels: Kernels = key(Kernels.auto, KERNELS)
    float8: bool = key(
        False, "Weights in FP8: half the memory; faster only for few sequences and long texts; see docs/INFERENCE.md."
    )


@dataclass
class BenchmarkConfig:
    """Which checkpoints are timed, against what, on what text, and for how long."""

    checkpoint: list[str] = key(
        [], "Models to time (required), one or a list [A,B]: runs, checkpoints, hf/ folders or hub names."
    )
    baseline: list[str] = key([], "Models to compare with, such as dense runs: one per checkpoint, or none.")
    text: str | None = key(
        None, "File to read: plain text, jsonl or parquet with a column `text`. null: each run's own held-out blocks."
    )
    sequences: int = key(64, "Maximum number of sequences per forward pass and training step.", minimum=1)
    micro_batch_size: int = key(8, "Sequences per micro-batch of a training step.", minimum=1)
    prompts: int = key(16, "Maximum number of sequences generated at once.", minimum=1)
    prompt_tokens: int = key(512, "Prompt length in tokens, at most half a sequence of the text.", minimum=1)
    new_tokens: int = key(128, "New tokens per prompt, at most what the model's context has room for.", minimum=3)
    seconds: float = key(3.0, "Approximate measuring time per number, in seconds.", above=0)
    output_dir: str | None = key(
        None, "Output folder. null: benchmark/ in the first checkpoint, or benchmarks/NAME if that is read-only."
    )
    device: Device = key(Device.auto, DEVICE)
    kernels: Kernels = key(
        Kernels.auto, "Kernels to compare with PyTorch. auto: those that this GPU can run; torch: PyTorch alone."
    )
    float8: bool = key(False, "Also measure each checkpoint on the kernels with FP8 attention and FP8 gate product.")


@dataclass
class ImportConfig:
    """Which checkpoint is written as a stock Hugging Face model, and where."""

    checkpoint: str | None = key(
        None, "Model to convert (required): a published sparse checkpoint, any other checkpoint, or a hub name."
    )
    output_dir: str | None = key(None, "Folder to write (required); must not exist yet.")
    dtype: Dtype = key(Dtype.auto, "Dtype of the written weights. auto: as stored.")


@dataclass
class CalibrateConfig:
    """Which layers are timed on this GPU, with which kernels."""

    model: list[str] = key(
        [], "Layers to time (required), one or a list [A,B]: a choice of the group `model`, or KxN like 2048x5632."
    )
    kernels: Kernels = key(Kernels.auto, "Sparse kernels: auto (those that this GPU supports), cuda or triton.")


@dataclass
class PushConfig:
    """Which checkpoint is uploaded to the Hugging Face hub, and where."""

    checkpoint: str | None = key(
        None, "Checkpoint to upload (required): a run (its last checkpoint), a checkpoint or an hf/ folder."
    )
    repo: str | None = key(None, "Hub repository, OWNER/NAME (required); created if it does not exist.")
    license: str | None = key(None, "License of the weights (hub identifier), added to a model card that names none.")
    private: bool = key(True, "Create the repository as private. An existing repository must have this visibility.")
    revision: str = key("main", "Branch to upload to; created if it does not exist.")
    overwrite: bool = key(False, "Replace the files of a branch that is not empty; its history keeps the old files.")
    dry_run: bool = key(False, "Check and list what would be uploaded, without uploading; needs no network.")


def decay_start(optimizer: OptimizerConfig, steps: int) -> int:
    """The last step with the peak learning rate in a wsd schedule over `steps` steps; decay follows."""
    return steps - max(1, round(optimizer.decay_fraction * steps))


def l1_denominator(normalization: L1Normalization, model: ModelConfig) -> int:
    """Divisor of a token's sum of |h| over neurons and layers, applied before the coefficient."""
    if normalization == L1Normalization.sum:
        return 1
    return model.num_layers * (model.intermediate_size if normalization == L1Normalization.mean else 1)


def l1_coefficient_as(sparsity: SparsityConfig, model: ModelConfig, normalization: L1Normalization) -> float:
    """The coefficient with which `normalization` gives the same L1 loss as `sparsity` (DESIGN §2)."""
    own = l1_denominator(sparsity.l1_normalization, model)
    return sparsity.l1_coefficient * (l1_denominator(normalization, model) / own)


def relu_share(tokens: int, config: SparsityConfig) -> float:
    """ReLU's share a in the gate (DESIGN §2) at the step that ends after `tokens` tokens over all ranks."""
    return 1.0 if tokens >= config.relu_tokens else tokens / config.relu_tokens
