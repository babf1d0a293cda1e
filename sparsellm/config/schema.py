"""The configuration's keys: typed dataclasses, their units, and their defaults, which are the paper's recipe. Those of
the model are in architecture.py."""

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from sparsellm.config.architecture import ModelConfig
from sparsellm.config.keys import key

MIX_PERIOD = 10_000  # samples of data.mix, of which each source has its share


class Activation(Enum):
    relu = "relu"
    silu = "silu"


class L1Normalization(Enum):
    """What the coefficient multiplies: per token, the `sum` over neurons and layers, the `mean` over both, or
    `layer_mean`, the sum over neurons and the mean over layers."""

    sum = "sum"
    mean = "mean"
    layer_mean = "layer_mean"


class L1Schedule(Enum):
    """The coefficient once `l1_start_tokens` are over: all of it at once, or from 0 to all of it, in a straight line or
    by half a `cosine`, slow at both ends."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"


class Schedule(Enum):
    """The learning rate after the warm-up: a `cosine` over all steps, or constant, then a linear decay at the end."""

    cosine = "cosine"
    wsd = "wsd"  # warm-up, stable, decay


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
    """Which kernels feedforward layers take: those of the GPU, where there are any (`auto`); the CUDA ones or those in
    Triton, or else refuse (`cuda`, `triton`); none (`torch`)."""

    auto = "auto"
    cuda = "cuda"
    triton = "triton"
    torch = "torch"

    @property
    def demanded(self) -> bool:
        """Whether a machine on which they do not run is refused."""
        return self in (Kernels.cuda, Kernels.triton)


class DdpCompress(Enum):
    """Of the gradients that ranks send each other: as they are, in float32, or rounded to bfloat16, half the bytes."""

    none = "none"
    bf16 = "bf16"


class Dtype(Enum):
    """Of an evaluated model's weights and activations: `auto` is the one that the checkpoint stores, as in lm_eval."""

    auto = "auto"
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


class Shard(Enum):
    """What the ranks of a node divide between them, instead of holding all of it each: nothing; gradients and moments;
    or these and the weights."""

    none = "none"
    optimizer = "optimizer"
    full = "full"


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
class DataConfig:
    """The corpus, and how it becomes tokens."""

    name: str = key("stdlib_docs", "what the corpus is called, in `path` and in logs")
    source: Source = key(Source.stdlib_docs, "Python's own documentation, a hub data set, or local files")
    dataset: str | None = key(None, "hub name OWNER/NAME, for source=hub")
    subset: str | None = key(None, "the hub data set's config name")
    split: str = key("train", "the hub data set's split")
    files: list[str] = key([], "parquet, jsonl or text files; glob patterns, for source=files")
    text_column: str = key("text", "of parquet and jsonl")
    tokenizer: str | None = key(None, "hub name, or a local folder; null: trained on the text (not for hub data)")
    tokenizer_vocab_size: int = key(4_096, "ids of the tokenizer that is trained on the text")
    path: str | None = key(None, "folder of the prepared tokens; null: data/NAME")
    max_tokens: int | None = key(None, "training tokens to prepare; null: what the experiment reads")
    validation_fraction: float = key(
        0.005, "of the documents held out, by their content; of the text where these are too few"
    )
    mix: list[dict[str, Any]] = key(
        [], "[{data: NAME, weight: W}, ...]: tokens prepared before, data/NAME or their folder, in place of the above"
    )
    streaming: bool = key(False, "tokenize while training instead of preparing first")
    seed: int = key(0, "of the order of the blocks")

    @property
    def folder(self) -> Path:
        """`path`, which composition has filled in."""
        assert self.path is not None
        return Path(self.path)

    @property
    def mix_names(self) -> list[str]:
        """What the sources of `mix` are called: the last parts of their folders."""
        return [Path(source["data"]).name for source in self.mix]


@dataclass
class SparsityConfig:
    """The feedforward activation, the L1 loss on it (DESIGN §2), and two remedies for dead neurons, off by default.

    Tokens are those of the global batch: what they decide does not depend on the batch size.
    """

    activation: Activation = key(Activation.relu, "of the gate; without one, of the up projection")
    relu_tokens: int = key(0, "tokens in which the gate of a SiLU model (init_from) becomes a ReLU; 0: at once")
    l1_coefficient: float = key(2e-5, "of the L1 loss on the feedforward activations; 0: none")
    l1_normalization: L1Normalization = key(
        L1Normalization.sum, "what the coefficient multiplies, per token: |h| over neurons and layers"
    )
    l1_schedule: L1Schedule = key(L1Schedule.constant, "after l1_start_tokens all of it at once, or rising from 0")
    l1_start_tokens: int = key(0, "tokens for which the coefficient is 0")
    l1_warmup_tokens: int = key(0, "tokens from 0 to the full coefficient, for l1_schedule=linear or cosine")
    dead_after_tokens: int = key(10_000_000, "tokens of silence after which a neuron counts as dead")
    reinit_dead_after_tokens: int | None = key(
        None, "tokens of silence after which a neuron's gate row is drawn anew, none in as many at the end; null: never"
    )
    reinit_every: int = key(100, "steps between such draws")
    reinit_blend: float = key(
        1.0, "share of the new row in what a drawn one becomes; below 1 it is drawn at every draw until it fires"
    )


@dataclass
class DistillConfig:
    """A dense teacher: beside the tokens themselves, the run learns what the teacher expects of each."""

    teacher: str | None = key(None, "a run, a checkpoint, an hf/ folder or a hub name, of the same tokenizer")
    weight: float = key(1.0, "of temperature^2 x KL(teacher || student), which is added to the cross entropy")
    temperature: float = key(1.0, "by which both models' logits are divided in the KL")


@dataclass
class OptimizerConfig:
    """AdamW with decay on matrices only; linear warm-up, then a schedule that ends at a fraction of the peak."""

    learning_rate: float = key(1e-3, "the peak")
    schedule: Schedule = key(
        Schedule.cosine, "after the warm-up; wsd: the peak until decay_fraction of the steps is left, then linear down"
    )
    decay_fraction: float = key(0.2, "of training.steps, at their end, in which wsd decays")
    final_lr_fraction: float = key(0.1, "of the peak, at the last step")
    warmup_steps: int = key(600, "steps from 0 to the peak; unless typed, at most a tenth of training.steps")
    beta1: float = key(0.9, "decay of the first moment")
    beta2: float = key(0.95, "decay of the second moment")
    eps: float = key(1e-8, "epsilon of AdamW")
    weight_decay: float = key(0.1, "on every 2-D weight, the embedding included")
    grad_clip: float = key(1.0, "largest L2 norm of the gradient")


@dataclass
class TrainingConfig:
    """How much is learned from: all that decides the mathematics beside model, data, sparsity and optimizer."""

    steps: int = key(9_537, "optimizer steps")
    batch_size: int = key(512, "sequences per optimizer step, over all ranks")
    sequence_length: int = key(2_048, "T, tokens of a sequence")
    seed: int = key(0, "of the initial weights")

    @property
    def tokens_per_step(self) -> int:
        """Tokens of an optimizer step, over all ranks."""
        return self.batch_size * self.sequence_length


@dataclass
class RuntimeConfig:
    """How a step is computed; nothing here changes what is computed beyond rounding."""

    device: Device = key(Device.auto, "auto: a GPU where there is one")
    precision: Precision = key(Precision.bfloat16, "of matrix products; weights, gradients and moments are float32")
    compile: bool = key(True, "torch.compile of the layers")
    kernels: Kernels = key(
        Kernels.auto,
        "those of the GPU (not in deterministic, float32, SiLU runs); CUDA or Triton, or else refuse; or none",
    )
    calibrate: bool = key(
        True,
        "measure what the kernels' engines cost on this GPU model, where nobody did; false: by an H200's constants",
    )
    micro_batch_size: int | str = key(
        "auto", "sequences per forward pass and rank; auto: as many as fit the GPU (16 on a CPU), more once sparse"
    )
    memory_limit_gib: float | None = key(None, "GiB of each GPU that a rank may take, everything included; null: all")
    recompute: bool = key(False, "recompute each layer in backward instead of keeping its activations")
    shard: Shard = key(
        Shard.none, "what the ranks of a node divide: nothing; gradients and moments; these and the weights"
    )
    deterministic: bool = key(False, "the same bits on every run of the same ranks and hardware; slower")
    data_workers: int = key(2, "processes per rank that read ahead (a stream: at most one); 0 reads between steps")
    ddp_bucket_mb: int = key(64, "MB of gradients that are reduced at once while backward goes on, with shard=none")
    ddp_compress: DdpCompress = key(DdpCompress.none, "bf16: ranks send gradients in bfloat16, half the bytes")
    max_skipped_steps: int = key(10, "non-finite steps in a row after which the run stops")
    profile_steps: list[int] = key([], "[FIRST,LAST], of which a trace is written to profile/ in the run's folder")


@dataclass
class LoggingConfig:
    """Rows, validation, Weights & Biases."""

    every: int = key(10, "steps between rows of metrics.jsonl, at most 10")
    validation_every: int = key(250, "steps between validations; 0: never")
    validation_samples: int = key(256, "held-out sequences per validation, evenly spaced; of a stream the first")
    wandb: WandbMode = key(WandbMode.online, "Weights & Biases; online without a key is offline, and says so")
    wandb_project: str = key("sparsellm", "the record's project")
    wandb_group: str | None = key(None, "records shown together; a sweep gives its own name")


@dataclass
class EvaluationConfig:
    """The downstream tasks while training; keys that `evaluate` has too mean the same."""

    every: int = key(0, "steps between evaluations, the last step included; 0: never")
    tasks: list[str] = key([], "of the seven; none named: all")
    data_dir: str | None = key(None, "local rows, DIR/TASK/SPLIT.jsonl or .parquet; null: the hub")
    limit: int | None = key(None, "rows per task; null: all")
    batch_size: int | str = key("auto", "sequences per forward pass and rank")


@dataclass
class RunConfig:
    """The run's folder: its name, its checkpoints, and what starting again does."""

    name: str | None = key(None, "null: EXPERIMENT, what differs from it, and 8 hex digits of what defines the run")
    root: str = key("runs", "the folder of the runs")
    restart: bool = key(False, "start again in a new folder instead of resuming")
    checkpoint_every: int = key(500, "steps between checkpoints")
    keep_checkpoints: int = key(2, "how many of the newest are kept")
    keep_every: int = key(0, "steps between checkpoints that are kept for good; 0: none is")
    hf_dtype: Precision = key(Precision.float32, "of the exported hf/ weights")
    skip_damaged: bool = key(False, "go on without what is damaged: newer checkpoints, rows of metrics.jsonl")

    @property
    def folder(self) -> Path:
        """The run's folder, once composition has filled in its `name`."""
        assert self.name is not None
        return Path(self.root, self.name)


@dataclass
class Config:
    """Beside the groups of keys:"""

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
        None,
        "a model to start from: a run, a checkpoint, an hf/ folder, a hub name; gives model.*; null: random weights",
    )


@dataclass
class SweepConfig:
    """How a sweep goes about its runs; what they are is in their own keys."""

    name: str | None = key(None, "null: EXPERIMENT and 8 hex digits of the names of its runs")
    root: str = key("sweeps", "the folder of the sweeps")
    mode: SweepMode = key(SweepMode.run, "run the runs here, print their commands, or write a SLURM array script")
    baseline: bool = key(False, "add the dense run, sparsity=dense_silu")
    evaluate: bool = key(True, "evaluate every finished run, with the options evaluate.*")
    benchmark: bool = key(False, "measure every finished run's speed, memory and energy, as `benchmark` does")
    nproc_per_node: int | None = key(None, "processes of a run; null: the GPUs of this machine, or 1")
    point: int | None = key(None, "do only this run, counted from 0: what one task of a SLURM array does")


@dataclass
class EvaluateConfig:
    """Which checkpoint is evaluated, on what, and how."""

    checkpoint: str | None = key(
        None, "a run's folder (its last checkpoint), a checkpoint, an hf/ folder, or a hub name; must be given"
    )
    tasks: list[str] = key([], "of the seven; none named: all")
    data_dir: str | None = key(None, "local rows, DIR/TASK/SPLIT.jsonl or .parquet, and no network; null: the hub")
    output_dir: str | None = key(None, "null: evaluation/ in the checkpoint, evaluations/NAME where that is read-only")
    limit: int | None = key(None, "rows per task, for quick looks; the held-out text is not cut; null: all")
    batch_size: int | str = key("auto", "sequences per forward pass and rank")
    dtype: Dtype = key(Dtype.auto, "of weights and activations; auto: the stored one")
    device: Device = key(Device.auto, "auto: a GPU where there is one")
    kernels: Kernels = key(Kernels.auto, "those of the GPU; CUDA or Triton, or else refuse; or none")
    compare_kernels: bool = key(False, "score twice, on the kernels and in PyTorch, and report both")
    validation: bool = key(True, "the loss on the run's own held-out split, computed as the run does")


@dataclass
class AnalyzeConfig:
    """Which checkpoint's activations are counted, on what text, and how."""

    checkpoint: str | None = key(
        None, "a run's folder (its last checkpoint), a checkpoint, an hf/ folder, or a hub name; must be given"
    )
    text: str | None = key(
        None, "plain text, or parquet or jsonl with a column `text`; null: the run's own held-out blocks"
    )
    sequences: int = key(64, "read at most")
    batch_size: int = key(8, "sequences per forward pass")
    min_count: int = key(20, "occurrences that a token needs to be among the most and least active")
    output_dir: str | None = key(None, "null: analysis/ in the checkpoint, analyses/NAME where that is read-only")
    recordings: str | None = key(None, "folder for what fires, token by token, as scripts/ take it; large; null: none")
    dtype: Dtype = key(Dtype.auto, "of weights and activations; auto: the stored one")
    device: Device = key(Device.auto, "auto: a GPU where there is one")
    speed: bool = key(True, "time each layer, where kernels run; times differ a little from run to run")


class Verbatim(str):
    """Text that is taken as it was typed, commas, quotes and braces included."""


@dataclass
class GenerateConfig:
    """Which checkpoint writes, how it goes on from what, and for how long."""

    checkpoint: str | None = key(
        None, "a run's folder (its last checkpoint), a checkpoint, an hf/ folder, or a hub name; must be given"
    )
    prompt: Verbatim | None = key(None, "the text to go on from; null: each line of the standard input is one")
    tokens: int = key(128, "new ones at most; a sequence may end before")
    temperature: float = key(0.8, "the logits are divided by it; 0: always the likeliest token")
    top_p: float = key(0.95, "draw from the likeliest tokens whose probabilities add up to this; 1: from all")
    seed: int = key(0, "of the draws")
    dtype: Dtype = key(Dtype.auto, "of weights and products; auto: bfloat16 on a GPU, float32 on a CPU")
    device: Device = key(Device.auto, "auto: a GPU where there is one")
    kernels: Kernels = key(Kernels.auto, "those of the GPU; CUDA or Triton, or else refuse; or none")


@dataclass
class BenchmarkConfig:
    """Which checkpoints are timed, beside what, on what text, and for how long."""

    checkpoint: list[str] = key(
        [],
        "a run's folder (its last checkpoint), a checkpoint, an hf/ folder, a hub name, or several, [A,B]; not empty",
    )
    baseline: list[str] = key(
        [], "what to compare with, as a run of sparsity=dense_silu: one for each checkpoint, or none"
    )
    text: str | None = key(
        None, "plain text, or parquet or jsonl with a column `text`; null: each run's own held-out blocks"
    )
    sequences: int = key(64, "of a forward pass and of a training step, at most")
    micro_batch_size: int = key(8, "sequences that a training step computes at a time")
    prompts: int = key(16, "sequences that are generated at once, at most")
    prompt_tokens: int = key(512, "of each prompt; at most half a sequence of the text")
    new_tokens: int = key(128, "generated for each prompt, as far as the model's context has room")
    seconds: float = key(3.0, "measured for each number, about")
    output_dir: str | None = key(
        None, "null: benchmark/ in the first checkpoint, benchmarks/NAME where that is read-only"
    )
    device: Device = key(Device.auto, "auto: a GPU where there is one")
    kernels: Kernels = key(
        Kernels.auto, "beside PyTorch: those of the GPU; CUDA or Triton, or else refuse; or PyTorch alone"
    )


@dataclass
class ImportConfig:
    """Which checkpoint is written as a stock Hugging Face model, and where."""

    checkpoint: str | None = key(
        None, "a folder or hub name, as of a published sparse checkpoint (llama_sparse_relu); must be given"
    )
    output_dir: str | None = key(None, "the folder to write, which must not exist yet; must be given")
    dtype: Dtype = key(Dtype.auto, "of the weights; auto: the stored one")


@dataclass
class CalibrateConfig:
    """Of which layers the engines are timed on this GPU, on which kernels."""

    model: list[str] = key(
        [],
        "whose layers: a choice of `train`'s group `model`, a layer's KxN, as 2048x5632, or several, [A,B]; not empty",
    )
    kernels: Kernels = key(Kernels.auto, "those of the GPU; or CUDA or Triton")


@dataclass
class PushConfig:
    """Which checkpoint goes to the hub, and where."""

    checkpoint: str | None = key(None, "a run (its newest checkpoint), a checkpoint or an hf/ folder; must be given")
    repo: str | None = key(None, "OWNER/NAME on the hub, made if it is not there; must be given")
    license: str | None = key(
        None, "of the weights, as the hub names it (apache-2.0), for a model card that has none; goes into what is sent"
    )
    private: bool = key(True, "whether only its owner sees the repository; of one that exists, what it must be")
    revision: str = key("main", "the branch, made if it is not there")
    overwrite: bool = key(
        False, "replace what the branch holds by what is sent; its history keeps the old files. Else that is refused"
    )
    dry_run: bool = key(False, "check and list what would be sent, and send nothing: needs no network and no account")


def decay_start(optimizer: OptimizerConfig, steps: int) -> int:
    """The last step of a wsd schedule over so many `steps` that has the peak rate: its decay takes the others."""
    return steps - max(1, round(optimizer.decay_fraction * steps))


def l1_denominator(normalization: L1Normalization, model: ModelConfig) -> int:
    """What a token's sum of |h| over neurons and layers is divided by before the coefficient multiplies it."""
    layers, neurons = model.num_layers, model.intermediate_size
    return {
        L1Normalization.sum: 1,
        L1Normalization.mean: neurons * layers,
        L1Normalization.layer_mean: layers,
    }[normalization]


def l1_coefficient_as(config: Config, normalization: L1Normalization) -> float:
    """The coefficient that gives the same loss under `normalization` (DESIGN §2)."""
    own = l1_denominator(config.sparsity.l1_normalization, config.model)
    return config.sparsity.l1_coefficient * (l1_denominator(normalization, config.model) / own)
