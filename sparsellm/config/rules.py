"""Validates a run's configuration; other commands share some rules. Functions return error messages with remedies.

torch takes seconds to import, so only functions that check for a GPU, kernels or memory import it.
"""

import math
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from sparsellm.config.architecture import FLOAT32, ModelConfig, architecture_mistakes, moments, parameters
from sparsellm.config.keys import bound_mistakes
from sparsellm.config.schema import (
    LONGEST_TAG,
    MIX_PERIOD,
    Activation,
    Config,
    DataConfig,
    DdpCompress,
    Device,
    DistillConfig,
    Float8,
    Float8Recipe,
    Kernels,
    L1Schedule,
    LoggingConfig,
    OptimizerConfig,
    Precision,
    RuntimeConfig,
    Schedule,
    Shard,
    Source,
    SparsityConfig,
    TrainingConfig,
    decay_start,
)
from sparsellm.system.console import quantity

MAX_NAME = 200  # maximum characters in a run's name: file systems allow 255 bytes, and file names append suffixes


def obstacles_to_kernels(runtime: RuntimeConfig, activation: Activation) -> list[str]:
    """Reasons why a configuration rules out the kernels for training and validation on any machine; empty if none."""
    found = {
        "runtime.device=cpu has no GPU": runtime.device == Device.cpu,
        f"runtime.precision={runtime.precision.name} is not bfloat16": runtime.precision != Precision.bfloat16,
        "runtime.deterministic=true excludes engines that are chosen by timing": runtime.deterministic,
        f"sparsity.activation={activation.name} never gives exact zeros": activation != Activation.relu,
    }
    return [obstacle for obstacle, applies in found.items() if applies]


def takes_kernels(runtime: RuntimeConfig, activation: Activation, device_type: str) -> bool:
    """Whether a run tries to use the kernels on a device of type `device_type`."""
    return device_type == "cuda" and runtime.kernels != Kernels.torch and not obstacles_to_kernels(runtime, activation)


def float8_gates(runtime: RuntimeConfig, activation: Activation) -> bool:
    """Whether runtime.float8=all asks for sparse layers on the CUDA kernels, whose gate product is in FP8. If not, it
    asks for feedforward layers in FP8 by torchao."""
    return runtime.float8 == Float8.all and activation == Activation.relu and runtime.kernels != Kernels.torch


def mistakes(config: Config, world_size: int | None = None) -> list[str]:
    """Error messages about the values in `config`, for `world_size` ranks (None: WORLD_SIZE); empty if there are none.
    Paths are checked by sparsellm.data."""
    ranks = int(os.environ.get("WORLD_SIZE", "1")) if world_size is None else world_size
    model, training, sparsity, runtime = config.model, config.training, config.sparsity, config.runtime
    return [
        *bound_mistakes(config),
        *architecture_mistakes(model),
        *_training_mistakes(training, model.context_length, ranks),
        *_logging_mistakes(config.logging),
        *_optimizer_mistakes(config.optimizer, training.steps),
        *_sparsity_mistakes(sparsity, model.gated, training),
        *_distill_mistakes(config.distill),
        *_runtime_mistakes(runtime, training.steps, ranks),
        *_float8_mistakes(model, sparsity, runtime),
        *kernel_mistakes("runtime.kernels", runtime.kernels, obstacles_to_kernels(runtime, sparsity.activation)),
        *name_mistakes("run.name", config.run.name),
        *_data_mistakes(config.data, training.sequence_length),
        *mix_mistakes(config.data),
    ]


def _training_mistakes(training: TrainingConfig, context_length: int, world_size: int) -> Iterator[str]:
    steps, batch, length = training.steps, training.batch_size, training.sequence_length
    if length > context_length:
        yield f"training.sequence_length {length} is longer than model.context_length {context_length}: change either"
    if (tokens := steps * training.tokens_per_step) >= 2**63:
        yield (
            f"training.steps {steps} x batch_size {batch} x sequence_length {length} are {tokens} tokens: they should"
            " be below 2^63, so lower one of them"
        )
    if batch % world_size:
        yield f"training.batch_size {batch} is not divisible by the number of ranks, {world_size}: change either"


def _logging_mistakes(logging: LoggingConfig) -> Iterator[str]:
    for tag in logging.wandb_tags:
        if not 1 <= len(tag) <= LONGEST_TAG:
            yield f"logging.wandb_tags has {tag!r}: a tag should have at least 1 and at most {LONGEST_TAG} characters"
    if logging.tensorboard and find_spec("tensorboard") is None:
        yield (
            "logging.tensorboard is true, but the package tensorboard is not installed: install it with"
            " `pip install tensorboard`, or leave the key out"
        )


def _optimizer_mistakes(optimizer: OptimizerConfig, steps: int) -> Iterator[str]:
    warmup, fraction = optimizer.warmup_steps, optimizer.decay_fraction
    if steps >= 1 and warmup > steps:
        yield f"optimizer.warmup_steps {warmup} exceeds training.steps {steps}: shorten the warm-up, or train longer"
    elif optimizer.schedule != Schedule.wsd:
        if fraction != OptimizerConfig().decay_fraction:
            yield (
                f"optimizer.decay_fraction is {fraction} with optimizer.schedule={optimizer.schedule.name}, which"
                " always decays: add optimizer.schedule=wsd, or leave it out"
            )
    elif steps >= 1 and 0 < fraction <= 1 and warmup > (start := decay_start(optimizer, steps)):
        yield (
            f"optimizer.warmup_steps {warmup} overlaps the decay of optimizer.schedule=wsd, which starts after step"
            f" {start} of {steps}: shorten the warm-up or optimizer.decay_fraction {fraction}, or train longer"
        )


def _sparsity_mistakes(sparsity: SparsityConfig, gated: bool, training: TrainingConfig) -> Iterator[str]:
    activation, run_tokens = sparsity.activation, training.steps * training.tokens_per_step
    relu_tokens, start, warmup = sparsity.relu_tokens, sparsity.l1_start_tokens, sparsity.l1_warmup_tokens
    if activation == Activation.silu and sparsity.l1_coefficient != 0:
        yield (
            f"sparsity.l1_coefficient is {sparsity.l1_coefficient} with sparsity.activation=silu, which never gives"
            " exact zeros: add sparsity.l1_coefficient=0, or use relu"
        )
    if activation == Activation.silu and not gated:
        yield (
            "sparsity.activation is silu with model.gated=false: it should be relu, the only activation of models"
            " without a gate"
        )
    if (sparsity.l1_schedule == L1Schedule.constant) == (warmup != 0):
        yield (
            f"sparsity.l1_warmup_tokens is {warmup} with sparsity.l1_schedule={sparsity.l1_schedule.name}: a linear or"
            " cosine schedule needs a positive number, a constant one 0"
        )
    if relu_tokens and not (activation == Activation.relu and gated):
        yield (
            f"sparsity.relu_tokens is {relu_tokens}, which anneals a gate from SiLU to ReLU, with"
            f" sparsity.activation={activation.name} and model.gated={str(gated).lower()}: set it to 0"
        )
    if 1 <= run_tokens < relu_tokens:
        yield (
            f"sparsity.relu_tokens {relu_tokens} exceeds the run's {run_tokens} tokens: the gate would never become a"
            " ReLU; lower it"
        )
    if 1 <= run_tokens < start + max(1, warmup):
        yield (
            f"sparsity.l1_start_tokens {start} and l1_warmup_tokens {warmup} together exceed the run's {run_tokens}"
            " tokens: the coefficient would never be reached; lower them"
        )
    yield from _reinitialization_mistakes(sparsity, training)


def _reinitialization_mistakes(sparsity: SparsityConfig, training: TrainingConfig) -> Iterator[str]:
    silence, every, step_tokens = sparsity.reinit_dead_after_tokens, sparsity.reinit_every, training.tokens_per_step
    if silence is None:
        if sparsity.reinit_blend != 1:
            yield (
                f"sparsity.reinit_blend is {sparsity.reinit_blend} with sparsity.reinit_dead_after_tokens=null, which"
                " disables it: set reinit_dead_after_tokens, or leave it out"
            )
        return
    if sparsity.activation != Activation.relu:
        yield (
            f"sparsity.reinit_dead_after_tokens is {silence} with sparsity.activation={sparsity.activation.name}, whose"
            " neurons are never dead: set it to null, or use relu"
        )
    if min(silence, every, step_tokens) >= 1:
        silent_steps = -(-silence // step_tokens)
        earliest = max(silent_steps, -(-sparsity.relu_tokens // step_tokens))
        first = -(-earliest // every) * every
        after = f" after relu_tokens {sparsity.relu_tokens}" if sparsity.relu_tokens else ""
        if first + silent_steps > training.steps:
            yield (
                f"sparsity.reinit_dead_after_tokens {silence} with reinit_every {every}{after} never takes effect in"
                f" {training.steps} steps: the first reinitialization could be at step {first}, and there is none in"
                f" the last {silent_steps} steps; lower them, or train longer"
            )


def _distill_mistakes(distill: DistillConfig) -> Iterator[str]:
    for key, value in (("weight", distill.weight), ("temperature", distill.temperature)):
        if distill.teacher is None and value != 1:
            yield f"distill.{key} is {value} without a teacher: add distill.teacher=NAME, or leave it out"


def _runtime_mistakes(runtime: RuntimeConfig, steps: int, world_size: int) -> list[str]:
    found, traced = device_mistakes("runtime.device", runtime.device), runtime.profile_steps
    if isinstance(runtime.recompute, str) and runtime.recompute != "auto":
        found.append(f"runtime.recompute is {runtime.recompute}: it should be auto, true or false")
    if runtime.ddp_compress != DdpCompress.none:
        found += _compression_mistakes(runtime, world_size)
    if traced and not (len(traced) == 2 and 1 <= traced[0] <= traced[1] <= steps):
        found.append(
            f"runtime.profile_steps is {traced}: it should be the first and the last step to trace, such as [20,22], of"
            f" training.steps={steps}, or [] for no trace"
        )
    return found + _compiler_mistakes(runtime)


def _compiler_mistakes(runtime: RuntimeConfig) -> list[str]:
    """An error message if torch has to compile layers on a CPU but finds no C++ compiler; empty if not."""
    compiler = os.environ.get("CXX", "g++")  # torch._inductor.config.cpp.cxx finds its compiler the same way
    if not runtime.compile or shutil.which(compiler) is not None:
        return []
    import torch

    if runtime.device != Device.cpu and torch.cuda.is_available():
        return []
    return [
        f"runtime.compile is true on a CPU, which needs a C++ compiler, but {compiler} is missing: install it"
        " (g++), set CXX=PATH in the environment, or set runtime.compile=false"
    ]


def _data_mistakes(data: DataConfig, sequence_length: int) -> Iterator[str]:
    source = data.source
    if not data.name or ".." in Path(data.name).parts or Path(data.name).is_absolute():
        yield f"data.name is {data.name!r}: it should be a folder name in data/; for a folder elsewhere use data.path"
    if source == Source.hub and data.dataset is None:
        yield "data.source=hub needs the data set's name: data.dataset=OWNER/NAME"
    if source != Source.hub and data.revision is not None:
        yield f"data.revision is given with data.source={source.name}: leave it out, or add data.source=hub"
    if source != Source.files and data.files:
        yield f"data.files is given with data.source={source.name}, which reads no files: add data=files"
    if source == Source.files and not data.files:
        yield "data.source=files needs data.files=[PATTERN,...], for example data.files=[corpus/*.parquet]"
    if source == Source.stdlib_docs:
        if data.streaming:
            yield (
                "data.streaming=true with data.source=stdlib_docs: this corpus cannot be streamed; leave it out, or"
                " use data=fineweb_edu_stream"
            )
        if data.tokenizer is not None:
            yield (
                f"data.tokenizer is {data.tokenizer!r} with data.source=stdlib_docs, which trains its own: set it to"
                " null"
            )
    elif data.tokenizer is None and (source == Source.hub or data.streaming):
        # For local files, preparation trains a tokenizer, so data.tokenizer may be missing.
        because = "data.streaming=true" if data.streaming else f"data.source={source.name}"
        yield f"{because} needs data.tokenizer=NAME or a folder"
    if data.max_tokens is not None and data.max_tokens <= sequence_length:
        yield (
            f"data.max_tokens is {data.max_tokens}: it should be at least {sequence_length + 1}, the tokens of a block"
            " of training.sequence_length"
        )


def mix_mistakes(data: DataConfig) -> list[str]:
    """Error messages about data.mix; empty if there are none."""
    if not data.mix:
        return []
    for source in data.mix:
        name, weight = source.get("data"), source.get("weight")
        number = isinstance(weight, int | float) and not isinstance(weight, bool) and 0 < weight < math.inf
        if source.keys() != {"data", "weight"} or not isinstance(name, str) or not Path(name).name or not number:
            return [
                f"data.mix has {source}: each of its sources should be {{data: NAME, weight: W}}, the name or folder of"
                " prepared tokens and a positive number"
            ]
    found, total = [], sum(source["weight"] for source in data.mix)
    for name, count in Counter(data.mix_names).items():
        if count > 1:
            found.append(f"data.mix has {count} sources called {name}: give folders with different names")
    for source in data.mix:
        if source["weight"] / total < (least := 1 / MIX_PERIOD):
            found.append(f"data.mix gives {source['data']} less than {least} of all samples: raise its weight")
    for key, value, idle in (("streaming", data.streaming, False), ("max_tokens", data.max_tokens, None)):
        if value != idle:
            found.append(f"data.{key} is {value} with data.mix, whose sources are prepared separately: leave it out")
    return found


def ranks_that_share(world_size: int, ranks_here: int) -> int:
    """S, the number of ranks that shard one model: the ranks of a node, or all ranks if each node has one."""
    return ranks_here if ranks_here > 1 else world_size


def state_bytes(model: ModelConfig, shard: Shard, sharing: int, muon: bool = False) -> float:
    """Bytes of weights, gradients and moments on each rank during a step, if `sharing` ranks shard the model."""
    weights = FLOAT32 * parameters(model)
    state = 2 * weights + FLOAT32 * moments(model, muon)  # weights, gradients, moments
    if shard == Shard.none or sharing == 1:
        return state
    return state / sharing + (weights if shard == Shard.optimizer else 0)  # a step gathers all weights


def memory_mistakes(
    model: ModelConfig,
    training: TrainingConfig,
    runtime: RuntimeConfig,
    ranks_here: int,
    world_size: int,
    muon: bool = False,
) -> list[str]:
    """Error messages if the model's state exceeds the memory of a GPU, or of this machine for `ranks_here` ranks on the
    CPU, or if a step's tokens exceed this machine's memory. Activations do not count."""
    import torch

    on_gpu = runtime.device != Device.cpu and torch.cuda.is_available()
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    count, limit = parameters(model), runtime.memory_limit_gib
    sharing = ranks_that_share(world_size, ranks_here)
    state, tokens = (
        state_bytes(model, runtime.shard, sharing, muon),
        8 * training.batch_size * (training.sequence_length + 1),
    )
    found, holder, memory, copies = [], "machine", host, ranks_here
    if on_gpu:
        holder, memory, copies = "GPU", torch.cuda.get_device_properties(0).total_memory, 1
    if limit is not None and not on_gpu:
        found.append(f"runtime.memory_limit_gib is {limit:g}, but this run uses no GPU: set it to null")
    elif limit is not None and limit * 2**30 > memory:
        found.append(
            f"runtime.memory_limit_gib is {limit:g}, but this GPU has {_gib(memory)}: lower it, or set it to null"
        )
    elif limit is not None:
        holder, memory = "run, by runtime.memory_limit_gib,", int(limit * 2**30)
    if copies * state > memory:
        ranks = f" on each of {copies} ranks" if copies > 1 else ""
        if runtime.shard != Shard.none:
            ranks += f" with runtime.shard={runtime.shard.name} between {sharing}"
        found.append(
            f"model has {count:,} parameters: their weights, gradients and moments take {_gib(state)}{ranks}, but this"
            f" {holder} has {_gib(memory)}: choose a smaller model (model=NAME, model.num_layers, model.hidden_size,"
            " model.intermediate_size, model.vocab_size), or shard it over more GPUs (runtime.shard=full)"
        )
    if tokens > host:
        found.append(
            f"training.batch_size {training.batch_size} x sequence_length {training.sequence_length}: the tokens of a"
            f" step take {_gib(tokens)}, but this machine has {_gib(host)}: lower one of them"
        )
    return found


def _gib(size: float) -> str:
    return f"{size / 2**30:,.1f} GiB"


def prepare_mistakes(config: Config) -> list[str]:
    """Error messages about the values in `config` that decide which tokens are prepared; empty if there are none."""
    data, training = config.data, config.training
    return [
        *bound_mistakes(training, "training.", ("steps", "batch_size", "sequence_length")),
        *bound_mistakes(data, "data."),
        *_data_mistakes(data, training.sequence_length),
        *mix_mistakes(data),
    ]


def device_mistakes(key: str, device: Device) -> list[str]:
    """Error messages if this machine lacks a GPU for each of its ranks. `key`: the key whose value is `device`."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if device == Device.cpu or (device == Device.auto and ranks == 1):
        return []
    import torch

    if not torch.cuda.is_available():
        needs_one = device == Device.cuda
        return [f"{key}=cuda but torch sees no GPU: use {key}=auto or cpu"] if needs_one else []
    if ranks > (gpus := torch.cuda.device_count()):
        return [f"{key}: {ranks} ranks on a node with {quantity(gpus, 'GPU')}: lower --nproc_per_node"]
    return []


def _compression_mistakes(runtime: RuntimeConfig, world_size: int) -> list[str]:
    """An error message if gradients cannot be compressed as `runtime` requests; empty if they can."""
    import torch

    if world_size == 1:
        obstacle = "a single process communicates no gradients"
    elif runtime.shard != Shard.none:
        obstacle = f"runtime.shard={runtime.shard.name} always reduces gradients in float32"
    elif runtime.precision == Precision.float32:
        obstacle = "runtime.precision=float32 does not round to bfloat16"
    elif runtime.device == Device.cpu or not torch.cuda.is_available():
        obstacle = "torch compresses only communication between GPUs"
    else:
        return []
    return [f"runtime.ddp_compress={runtime.ddp_compress.name}, but {obstacle}: use runtime.ddp_compress=none"]


def sizes_in_float8(model: ModelConfig, feedforward: bool = True) -> dict[str, int]:
    """The dimensions of the weights of attention and, if `feedforward`, of the feedforward layers, by name."""
    return {
        "model.hidden_size": model.hidden_size,
        "the width of all query heads": model.num_heads * model.head_width,
        "the width of all key/value heads": model.kv_heads * model.head_width,
    } | ({"model.intermediate_size": model.intermediate_size} if feedforward else {})


def _float8_mistakes(model: ModelConfig, sparsity: SparsityConfig, runtime: RuntimeConfig) -> Iterator[str]:
    if runtime.float8 is None:
        if runtime.float8_recipe != Float8Recipe.tensorwise:
            yield (
                f"runtime.float8_recipe is {runtime.float8_recipe.name} without FP8: add runtime.float8=attention, or"
                " leave it out"
            )
        return
    from sparsellm.ops import float8

    setting, gates = f"runtime.float8={runtime.float8.name}", float8_gates(runtime, sparsity.activation)
    feedforward = runtime.float8 == Float8.all and not gates
    if runtime.precision != Precision.bfloat16:
        yield f"{setting} with runtime.precision={runtime.precision.name}: use runtime.precision=bfloat16"
    for name, size in sizes_in_float8(model, feedforward).items():
        if size % float8.MULTIPLE:
            yield f"{name} is {size} with {setting}: it should be a multiple of {float8.MULTIPLE}"
    if feedforward and sparsity.relu_tokens:
        yield f"{setting} with sparsity.relu_tokens: use runtime.float8=attention, or sparsity.relu_tokens=0"
    obstacle = "runtime.device=cpu has no FP8" if runtime.device == Device.cpu else float8.obstacle()
    if obstacle is not None:
        yield f"{setting} does not run here: {obstacle}"
    elif gates and runtime.precision == Precision.bfloat16:
        obstacles = obstacles_to_kernels(runtime, sparsity.activation)
        if runtime.kernels == Kernels.triton:
            obstacles.append("runtime.kernels=triton has no FP8")
        yield from unavailable_kernels(f"{setting} of sparse layers", "runtime.kernels=torch", Kernels.cuda, obstacles)


def name_mistakes(key: str, name: str | None) -> list[str]:
    """An error message if `name`, the value of `key`, is not a valid name for a run or a sweep; empty if it is."""
    fits = name is not None and re.fullmatch(r"[A-Za-z0-9._-]+", name) and len(name) <= MAX_NAME
    if fits and name not in (".", ".."):
        return []
    return [f"{key} is {name!r}: use only letters, digits, '.', '_' and '-', at most {MAX_NAME} of them"]


def kernel_mistakes(key: str, kernels: Kernels, obstacles: list[str]) -> list[str]:
    """Error messages if `kernels`, the value of `key`, requires kernels that cannot run (`unavailable_kernels`)."""
    demanded = kernels.demanded
    return unavailable_kernels(f"{key}={kernels.name}", f"{key}=auto", kernels, obstacles) if demanded else []


def unavailable_kernels(setting: str, remedy: str, kernels: Kernels, obstacles: list[str]) -> list[str]:
    """Error messages if the kernels required by `setting` cannot run, because of `obstacles` in the configuration or
    because of this machine. `remedy`: a setting that does not require kernels."""
    if obstacles:
        return [f"{setting}, but {obstacle}: change it, or use {remedy}" for obstacle in obstacles]
    from sparsellm.ops import backend

    try:
        backend.check(kernels.name)
    except backend.KernelsUnavailable as error:
        return [f"{setting} does not run here ({remedy} does not need it): {error}"]
    return []
