"""The rules that the values of a run must keep, and those that all commands share; a broken one is a sentence, with its
remedy.

torch takes seconds to import, so only what has to ask it does: a GPU that is demanded, the kernels, their shapes, the
memory of a run whose values hold.
"""

import math
import os
import re
import shutil
from collections import Counter
from pathlib import Path

from sparsellm.config.architecture import FLOAT32, MOMENTS, ModelConfig, parameters
from sparsellm.config.model_rules import architecture_mistakes
from sparsellm.config.schema import (
    MIX_PERIOD,
    Activation,
    Config,
    DataConfig,
    DdpCompress,
    Device,
    EvaluateConfig,
    EvaluationConfig,
    Kernels,
    L1Schedule,
    OptimizerConfig,
    Precision,
    RuntimeConfig,
    Schedule,
    Shard,
    Source,
    decay_start,
)
from sparsellm.config.values import flat, to_dict

MAX_NAME = 200  # characters: file systems take 255 bytes, of which some are for what is put behind a name
MAX_WORKERS = 256
MAX_LOG_INTERVAL = 10  # steps: a request to stop travels with the logged reductions


def obstacles_to_kernels(config: Config) -> list[str]:
    """What in `config`, on whatever machine, keeps training and validation off the kernels."""
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


def takes_kernels(config: Config, kernels: Kernels, device_type: str) -> bool:
    """Whether a run of `config`, with this choice of `kernels`, tries the kernels on a device of this type."""
    return device_type == "cuda" and kernels != Kernels.torch and not obstacles_to_kernels(config)


def mistakes(config: Config, world_size: int) -> list[str]:
    """Every rule that `config` breaks on `world_size` ranks, each with its remedy; empty when it may run.

    Looks at values and at the number of GPUs; what `data.path` and `data.files` hold is checked by sparsellm.data.
    """
    return value_mistakes(config, world_size) + _shape_mistakes(config.model) + _compiler_mistakes(config.runtime)


def _compiler_mistakes(runtime: RuntimeConfig) -> list[str]:
    """Whether layers are compiled on a CPU, for which torch calls a C++ compiler, and there is none."""
    compiler = os.environ.get("CXX", "g++")  # as torch._inductor.config.cpp.cxx
    if not runtime.compile or shutil.which(compiler) is not None:
        return []
    import torch

    if runtime.device != Device.cpu and torch.cuda.is_available():
        return []
    return [
        f"runtime.compile is true on a CPU, which takes a C++ compiler, and there is no {compiler}: it should be"
        " installed (g++), or named by CXX=PATH in the environment, or set runtime.compile=false"
    ]


def _shape_mistakes(model: ModelConfig) -> list[str]:
    from sparsellm.ops import MAX_COLUMNS, MULTIPLE

    found = []
    for key, value in (("hidden_size", model.hidden_size), ("intermediate_size", model.intermediate_size)):
        if value % MULTIPLE:
            found.append(f"model.{key} is {value}: it must be a multiple of {MULTIPLE}")
        if value > MAX_COLUMNS:
            found.append(f"model.{key} is {value}: it must be at most {MAX_COLUMNS}")
    return found


def value_mistakes(config: Config, world_size: int) -> list[str]:
    """`mistakes` without the shapes that only the kernels know."""
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
        ("runtime", "data_workers", 0), ("runtime", "ddp_bucket_mb", 1),
        ("runtime", "max_skipped_steps", 1),
        ("optimizer", "warmup_steps", 0), ("sparsity", "relu_tokens", 0),
        ("sparsity", "l1_start_tokens", 0), ("sparsity", "l1_warmup_tokens", 0),
        ("sparsity", "dead_after_tokens", 1), ("sparsity", "reinit_every", 1),
        ("logging", "validation_every", 0), ("logging", "validation_samples", 1), ("evaluation", "every", 0),
        ("run", "checkpoint_every", 1), ("run", "keep_checkpoints", 1),
        ("run", "keep_every", 0),
    ):  # fmt: skip
        value = getattr(getattr(config, group), key)
        require(value >= least, f"{group}.{key} is {value}: it must be at least {least}")
    for key, value in (
        ("model.rope_theta", model.rope_theta), ("model.norm_eps", model.norm_eps),
        ("model.init_std", model.init_std), ("optimizer.learning_rate", optimizer.learning_rate),
        ("optimizer.eps", optimizer.eps), ("optimizer.grad_clip", optimizer.grad_clip),
    ):  # fmt: skip
        require(0 < value < math.inf, f"{key} is {value}: it must be a positive number")
    for key, value in (("weight", config.distill.weight), ("temperature", config.distill.temperature)):
        require(0 < value < math.inf, f"distill.{key} is {value}: it must be a positive number")
        require(
            config.distill.teacher is not None or value == 1,
            f"distill.{key} is {value} without a teacher: add distill.teacher=NAME, or leave it out",
        )
    for key, value in (
        ("sparsity.l1_coefficient", sparsity.l1_coefficient), ("optimizer.weight_decay", optimizer.weight_decay),
    ):  # fmt: skip
        require(0 <= value < math.inf, f"{key} is {value}: it must be zero or a positive number")
    for key, value in flat(to_dict(config)).items():
        if isinstance(value, int):
            require(value < 2**63, f"{key} is {value}: it must be below 2^63")
    require(
        runtime.data_workers <= MAX_WORKERS,
        f"runtime.data_workers is {runtime.data_workers}: it must be at most {MAX_WORKERS} processes per rank",
    )
    for key, value in (("optimizer.beta1", optimizer.beta1), ("optimizer.beta2", optimizer.beta2)):
        require(0 <= value < 1, f"{key} is {value}: it must be at least 0 and below 1")
    require(
        0 <= optimizer.final_lr_fraction <= 1,
        f"optimizer.final_lr_fraction is {optimizer.final_lr_fraction}: it must be between 0 and 1",
    )
    found += _schedule_mistakes(optimizer, training.steps)
    require(
        0 < data.validation_fraction < 1,
        f"data.validation_fraction is {data.validation_fraction}: it must be above 0 and below 1",
    )

    found += architecture_mistakes(model)
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
    step_tokens = training.tokens_per_step
    run_tokens = training.steps * step_tokens
    require(
        run_tokens < 2**63,
        f"training.steps {training.steps} x batch_size {training.batch_size} x sequence_length"
        f" {training.sequence_length} are {run_tokens} tokens: they must be below 2^63, so lower one of them",
    )
    require(
        (sparsity.l1_schedule != L1Schedule.constant) == (sparsity.l1_warmup_tokens != 0),
        f"sparsity.l1_warmup_tokens is {sparsity.l1_warmup_tokens} with"
        f" sparsity.l1_schedule={sparsity.l1_schedule.name}: a linear or cosine schedule needs its tokens, a constant"
        " one has 0",
    )
    if sparsity.relu_tokens:
        require(
            sparsity.activation == Activation.relu and model.gated,
            f"sparsity.relu_tokens is {sparsity.relu_tokens}, over which a gate goes from SiLU to ReLU, with"
            f" sparsity.activation={sparsity.activation.name} and model.gated={str(model.gated).lower()}: set it to 0",
        )
        require(
            run_tokens < 1 or sparsity.relu_tokens <= run_tokens,
            f"sparsity.relu_tokens {sparsity.relu_tokens} exceeds the run's {run_tokens} tokens: the gate would never"
            " be a ReLU, so lower it",
        )
    require(
        run_tokens < 1 or sparsity.l1_start_tokens + max(1, sparsity.l1_warmup_tokens) <= run_tokens,
        f"sparsity.l1_start_tokens {sparsity.l1_start_tokens} and l1_warmup_tokens {sparsity.l1_warmup_tokens} exceed"
        f" the run's {run_tokens} tokens together: the coefficient would never be reached, so lower them",
    )
    blend, silence = sparsity.reinit_blend, sparsity.reinit_dead_after_tokens
    require(0 < blend <= 1, f"sparsity.reinit_blend is {blend}: it must be above 0 and at most 1")
    require(
        blend == 1 or silence is not None,
        f"sparsity.reinit_blend is {blend} with sparsity.reinit_dead_after_tokens=null, which draws no row: give the"
        " tokens of silence, or leave it out",
    )
    if silence is not None:
        require(silence >= 1, f"sparsity.reinit_dead_after_tokens is {silence}: it must be at least 1, or null for off")
        require(
            sparsity.activation == Activation.relu,
            f"sparsity.reinit_dead_after_tokens is {silence} with sparsity.activation={sparsity.activation.name}, whose"
            " neurons are never silent: set it to null, or use relu",
        )
        if min(silence, sparsity.reinit_every, step_tokens) >= 1:
            silent_steps = -(-silence // step_tokens)
            earliest = max(silent_steps, -(-sparsity.relu_tokens // step_tokens))
            first = -(-earliest // sparsity.reinit_every) * sparsity.reinit_every
            after = f" after relu_tokens {sparsity.relu_tokens}" if sparsity.relu_tokens else ""
            require(
                first + silent_steps <= training.steps,
                f"sparsity.reinit_dead_after_tokens {silence} with reinit_every {sparsity.reinit_every}{after} never"
                f" draws a row in the run's {training.steps} steps: the first could be drawn at step {first}, and none"
                f" is in the last {silent_steps}; lower them, or train longer",
            )
    require(
        training.batch_size % world_size == 0,
        f"training.batch_size {training.batch_size} does not divide over {world_size} ranks:"
        " change it, or the number of processes",
    )
    if runtime.ddp_compress != DdpCompress.none:
        found += _compression_mistakes(runtime, world_size)
    if traced := runtime.profile_steps:
        require(
            len(traced) == 2 and 1 <= traced[0] <= traced[1] <= training.steps,
            f"runtime.profile_steps is {traced}: it must be the first and the last step to trace, as [20,22], up to"
            f" training.steps {training.steps}, or [] for none",
        )
    found += number_or_auto("runtime.micro_batch_size", runtime.micro_batch_size)
    require(
        runtime.memory_limit_gib is None or 0 < runtime.memory_limit_gib < math.inf,
        f"runtime.memory_limit_gib is {runtime.memory_limit_gib}: it must be a positive number, or null for all",
    )
    found += device_mistakes("runtime.device", runtime.device)
    found += kernel_mistakes("runtime.kernels", runtime.kernels, obstacles_to_kernels(config))
    require(
        1 <= log.every <= MAX_LOG_INTERVAL,
        f"logging.every is {log.every}: it must be 1 to {MAX_LOG_INTERVAL}, for ranks agree to stop at logged steps",
    )
    found += name_mistakes("run.name", run.name)

    require(
        bool(data.name) and ".." not in Path(data.name).parts and not Path(data.name).is_absolute(),
        f"data.name is {data.name!r}: it names a folder in data/; give another place by data.path",
    )
    if data.source == Source.hub:
        require(data.dataset is not None, "data.source=hub needs the data set's name: data.dataset=OWNER/NAME")
    if data.source != Source.files:
        other = f"data.source={data.source.name}"
        require(not data.files, f"data.files is given with {other}, which reads no files: add data=files")
    if data.source == Source.files:
        require(
            bool(data.files), "data.source=files needs data.files=[PATTERN,...], as in data.files=[corpus/*.parquet]"
        )
    if data.source == Source.stdlib_docs:
        require(
            not data.streaming,
            "data.streaming=true with data.source=stdlib_docs: there is nothing to stream, so leave it out, or choose"
            " data=fineweb_edu_stream",
        )
        require(
            data.tokenizer is None,
            f"data.tokenizer is {data.tokenizer!r} with data.source=stdlib_docs, which trains its own: set it to null",
        )
    elif data.source == Source.hub or data.streaming:
        # Prepared files may do without: a tokenizer is trained on them.
        because = "data.streaming=true" if data.streaming else f"data.source={data.source.name}"
        require(data.tokenizer is not None, f"{because} needs data.tokenizer=NAME or a folder")
    require(
        data.max_tokens is None or data.max_tokens > training.sequence_length,
        f"data.max_tokens is {data.max_tokens}: it must be at least {training.sequence_length + 1}, the tokens of a"
        " block of training.sequence_length",
    )
    return found + mix_mistakes(data) + amount_mistakes(config.evaluation, "evaluation.")


def mix_mistakes(data: DataConfig) -> list[str]:
    """What in data.mix breaks a rule, by its values alone."""
    if not data.mix:
        return []
    for source in data.mix:
        name, weight = source.get("data"), source.get("weight")
        number = isinstance(weight, int | float) and not isinstance(weight, bool) and 0 < weight < math.inf
        if source.keys() != {"data", "weight"} or not isinstance(name, str) or not Path(name).name or not number:
            return [
                f"data.mix has {source}: each of its sources is {{data: NAME, weight: W}}, the name or folder of"
                " prepared tokens and a positive number"
            ]
    found, total = [], sum(source["weight"] for source in data.mix)
    for name, count in Counter(data.mix_names).items():
        if count > 1:
            found.append(f"data.mix has {count} sources called {name}: give folders whose last parts differ")
    for source in data.mix:
        if source["weight"] / total < (least := 1 / MIX_PERIOD):
            found.append(f"data.mix gives {source['data']} less than {least} of all samples: raise its weight")
    for key, value, idle in (("streaming", data.streaming, False), ("max_tokens", data.max_tokens, None)):
        if value != idle:
            found.append(
                f"data.{key} is {value} with data.mix, whose sources are prepared before, one by one: leave it out"
            )
    return found


def _schedule_mistakes(optimizer: OptimizerConfig, steps: int) -> list[str]:
    warmup, fraction = optimizer.warmup_steps, optimizer.decay_fraction
    if steps >= 1 and warmup > steps:
        return [f"optimizer.warmup_steps {warmup} exceeds training.steps {steps}: shorten the warm-up, or train longer"]
    if optimizer.schedule != Schedule.wsd:
        if fraction == OptimizerConfig().decay_fraction:
            return []
        return [
            f"optimizer.decay_fraction is {fraction} with optimizer.schedule={optimizer.schedule.name}, which decays"
            " all the time: add optimizer.schedule=wsd, or leave it out"
        ]
    if not 0 < fraction <= 1:
        return [f"optimizer.decay_fraction is {fraction}: it must be above 0 and at most 1"]
    if steps >= 1 and warmup > (start := decay_start(optimizer, steps)):
        return [
            f"optimizer.warmup_steps {warmup} reaches into the decay of optimizer.schedule=wsd, which begins after step"
            f" {start} of {steps}: shorten the warm-up or optimizer.decay_fraction {fraction}, or train longer"
        ]
    return []


def ranks_that_share(world_size: int, ranks_here: int) -> int:
    """S, the ranks between which runtime.shard divides: those of a node, or all where each node has one."""
    return ranks_here if ranks_here > 1 else world_size


def state_bytes(config: Config, sharing: int) -> float:
    """What a rank holds of the weights, gradients and moments within a step, where `sharing` ranks divide them."""
    weights, shard = FLOAT32 * parameters(config.model), config.runtime.shard
    state = (2 + MOMENTS) * weights  # their gradients, too
    if shard == Shard.none or sharing == 1:
        return state
    return state / sharing + (weights if shard == Shard.optimizer else 0)  # which gathers all while a step computes


def memory_mistakes(config: Config, ranks_here: int, world_size: int) -> list[str]:
    """Whether what training cannot do without exceeds the memory of this machine, as a GPU or `ranks_here` CPU ranks
    share it: the model's state, and the tokens of a step. Activations come on top."""
    import torch

    on_gpu = config.runtime.device != Device.cpu and torch.cuda.is_available()
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    count, training, limit = parameters(config.model), config.training, config.runtime.memory_limit_gib
    sharing = ranks_that_share(world_size, ranks_here)
    state, tokens = state_bytes(config, sharing), 8 * training.batch_size * (training.sequence_length + 1)
    place, memory, copies, found = "GPU", 0, 1, []
    if on_gpu:
        memory = torch.cuda.get_device_properties(0).total_memory
    else:
        place, memory, copies = "machine", host, ranks_here
    if limit is not None and not on_gpu:
        found.append(f"runtime.memory_limit_gib is {limit:g}, of a GPU, and this run takes none: set it to null")
    elif limit is not None and limit * 2**30 > memory:
        found.append(
            f"runtime.memory_limit_gib is {limit:g}, and this GPU has {_gib(memory)}: lower it, or set it to null"
        )
    elif limit is not None:
        place, memory = "run, by runtime.memory_limit_gib,", int(limit * 2**30)
    if copies * state > memory:
        ranks = f" on each of {copies} ranks" if copies > 1 else ""
        if config.runtime.shard != Shard.none:
            ranks += f" with runtime.shard={config.runtime.shard.name} between {sharing}"
        found.append(
            f"model has {count:,} parameters: their weights, gradients and moments take {_gib(state)}{ranks}, and this"
            f" {place} has {_gib(memory)}: choose a smaller model (model=NAME, model.num_layers, model.hidden_size,"
            " model.intermediate_size, model.vocab_size), or divide it between more GPUs (runtime.shard=full)"
        )
    if tokens > host:
        found.append(
            f"training.batch_size {training.batch_size} x sequence_length {training.sequence_length}: the tokens of a"
            f" step take {_gib(tokens)}, and this machine has {_gib(host)}: lower one of them"
        )
    return found


def _gib(size: float) -> str:
    return f"{size / 2**30:,.1f} GiB"


def prepare_mistakes(config: Config) -> list[str]:
    """Every value of `config` that breaks a rule and decides which tokens are prepared."""
    # A mistake begins with the key that it is about: those of the model or the machine do not matter here.
    matters = ("data.", "training.steps is", "training.batch_size is", "training.sequence_length is")
    return [mistake for mistake in value_mistakes(config, world_size=1) if mistake.startswith(matters)]


def amount_mistakes(config: EvaluateConfig | EvaluationConfig, prefix: str = "") -> list[str]:
    found, limit, size = [], config.limit, config.batch_size
    if limit is not None and limit < 1:
        found.append(f"{prefix}limit is {limit}: it must be at least 1, or null for all rows")
    return found + number_or_auto(f"{prefix}batch_size", size)


def number_or_auto(key: str, value: int | str) -> list[str]:
    if value == "auto" if isinstance(value, str) else value >= 1:
        return []
    return [f"{key} is {value}: it must be auto, or a number of at least 1"]


def device_mistakes(key: str, device: Device) -> list[str]:
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if device == Device.cpu or (device == Device.auto and ranks == 1):
        return []
    import torch

    found = []
    if device == Device.cuda and not torch.cuda.is_available():
        found.append(f"{key}=cuda but torch sees no GPU: use {key}=auto or cpu")
    if torch.cuda.is_available():
        gpus = torch.cuda.device_count()
        if ranks > gpus:
            found.append(f"{key}: {ranks} ranks on a node with {gpus} GPUs: lower --nproc_per_node")
    return found


def _compression_mistakes(runtime: RuntimeConfig, world_size: int) -> list[str]:
    """Why gradients need not or cannot be sent in another dtype, which `runtime` asks for."""
    import torch

    if world_size == 1:
        obstacle = "one process sends no gradients"
    elif runtime.shard != Shard.none:
        obstacle = f"runtime.shard={runtime.shard.name} sends shards, in float32, and has no such hook"
    elif runtime.precision == Precision.float32:
        obstacle = "runtime.precision=float32 rounds nothing to bfloat16"
    elif runtime.device == Device.cpu or not torch.cuda.is_available():
        obstacle = "torch compresses only what GPUs send each other"
    else:
        return []
    return [f"runtime.ddp_compress={runtime.ddp_compress.name}, but {obstacle}: use runtime.ddp_compress=none"]


def name_mistakes(key: str, name: str | None) -> list[str]:
    """Why `name`, which `key` gives, names no folder of a run or of a sweep."""
    fits = name is not None and re.fullmatch(r"[A-Za-z0-9._-]+", name) and len(name) <= MAX_NAME
    if fits and name not in (".", ".."):
        return []
    return [f"{key} is {name!r}: use only letters, digits, '.', '_' and '-', at most {MAX_NAME} of them"]


def kernel_mistakes(key: str, kernels: Kernels, obstacles: list[str]) -> list[str]:
    """Why the kernels that `key` demands cannot run: `obstacles` in the configuration, or the machine."""
    if not kernels.demanded:
        return []
    return unavailable_kernels(f"{key}={kernels.name}", f"{key}=auto", kernels, obstacles)


def unavailable_kernels(setting: str, remedy: str, kernels: Kernels, obstacles: list[str]) -> list[str]:
    """Why the kernels, which `setting` demands, cannot run: `obstacles` in the configuration, or the machine."""
    if obstacles:
        return [f"{setting}, but {obstacle}: change it, or use {remedy}" for obstacle in obstacles]
    from sparsellm.ops import backend

    try:
        backend.check(kernels.name)
    except backend.KernelsUnavailable as error:
        return [f"{setting} does not run here ({remedy} goes without): {error}"]
    return []
