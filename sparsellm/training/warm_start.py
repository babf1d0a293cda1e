"""A run that starts from an existing model instead of random weights: init_from (docs/TRAINING.md).

The architecture and the weights come from there, and its tokenizer must be that of the data. A run that has begun keeps
what it took: its config.yaml holds the architecture and its checkpoints hold the weights, so a resume does not look at
the source any more.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from sparsellm.config import (
    Activation,
    Config,
    ConfigError,
    DataConfig,
    ModelConfig,
    RunConfig,
    Source,
    to_dict,
    typed_values,
)
from sparsellm.config.values import flat
from sparsellm.data import Data, DataError, manifest, tokenizer
from sparsellm.distributed.groups import Ranks, on_main
from sparsellm.hf import conversion, hub, pretrained
from sparsellm.model import Decoder
from sparsellm.runs import folder as run_folder
from sparsellm.runs.locate import Checkpoint, CheckpointNotFound, locate, unreadable
from sparsellm.runs.precision import load_float32
from sparsellm.system.console import warn
from sparsellm.training import sharding


def adopt(config: Config, typed: Sequence[str] = ()) -> list[str]:
    """Give `config`, in place, the architecture of its `init_from`, if it has one, or say why it cannot have that; and
    to its data the name under which that model's tokenizer has prepared them.

    `typed`: the overrides that `config` was composed from; the keys of the model among them must agree.
    """
    if config.init_from is None:
        return []
    try:
        begun = run_folder.begun_as(config.run)
        if begun is not None and begun.init_from == config.init_from:
            config.model = begun.model
            if _names_the_tokenizer(config.data, config.init_from, typed):
                _call_the_tokenizer(config.data, begun.data.tokenizer, begun.data.tokenizer_vocab_size)
        else:
            with source("init_from", config.init_from) as checkpoint:
                config.model, activation = conversion.architecture(checkpoint.model)
                if _names_the_tokenizer(config.data, config.init_from, typed):
                    _find_its_tokens(config.data, checkpoint.model)
            if config.sparsity.relu_tokens and activation == Activation.relu:
                return [
                    f"sparsity.relu_tokens is {config.sparsity.relu_tokens}, over which a gate goes from SiLU to ReLU,"
                    f" and init_from={config.init_from} has ReLU already: leave it out"
                ]
    except ConfigError as error:
        return error.mistakes
    return _disagreements(config.init_from, config.model, list(typed))


def _names_the_tokenizer(data: DataConfig, init_from: str, typed: Sequence[str]) -> bool:
    """Whether init_from says what data.tokenizer is, which is not typed."""
    return data.tokenizer == init_from and tokenizer.KEY not in typed_values(list(typed))


def _find_its_tokens(data: DataConfig, model: str) -> None:
    """Where data.path holds tokens of the tokenizer of `model` under another name, as of the run that trained the model
    on them, let `data` call it by that name."""
    with suppress(DataError):  # said by those who open the data
        ready = None if data.streaming else manifest.read(data.folder)
        if ready is not None and ready.tokenizer_hash in tokenizer.digests(tokenizer.load(model, "init_from")):
            size = ready.recipe.get("data.tokenizer_vocab_size", data.tokenizer_vocab_size)
            _call_the_tokenizer(data, ready.recipe.get(tokenizer.KEY), size)


def _call_the_tokenizer(data: DataConfig, name: str | None, size: int) -> None:
    data.tokenizer, data.tokenizer_vocab_size = name, size


def _disagreements(name: str, model: ModelConfig, typed: list[str]) -> list[str]:
    held = flat({"model": to_dict(model)})
    meant = held | {"model.num_key_value_heads": model.kv_heads, "model.head_dim": model.head_width}  # where null
    return [
        f"{key} is {value!r}, and init_from={name} has {held[key]!r}: leave it out, for the model comes from there"
        for key, value in typed_values(typed).items()
        if key in held and value not in (held[key], meant[key])
    ]


def require_one_tokenizer(models: dict[str, str], corpus: DataConfig, data: Data, ranks: Ranks) -> None:
    """Raise DataError, on the main rank, if texts have other tokens in `data` than for one of `models`, those of
    `read_at_start`; the other ranks get MainRankFailed. If documents only begin or end with another token, a line says
    so. Collective."""

    def compare(key: str, name: str) -> None:
        with source(key, name) as checkpoint:
            own = tokenizer.load(checkpoint.model, key)
        prepared = tokenizer.load(str(data.tokenizer_folder), "data.path")
        used = corpus.tokenizer
        where = f"data.mix={','.join(corpus.mix_names)}" if corpus.mix else f"data.path={corpus.path}"
        if tokenizer.serialized(own) == tokenizer.serialized(prepared):
            if (there := tokenizer.form(prepared)) != (here := tokenizer.form(own)):  # as of a base and its chat model
                warn(f"documents of {where} are {there}, those of {key}={name} {here}")
            return
        # The embedded corpus trains its own tokenizer, whatever it is told.
        text = "data=files data.files=[PATTERN,...] " if corpus.source == Source.stdlib_docs else ""
        raise DataError(
            f"{where} has tokens of {'a tokenizer trained on its text' if used is None else f'the tokenizer {used}'},"
            f" and {key}={name} has another tokenizer, to which they mean other text: prepare"
            f" {'a text of yours' if text else 'them once more'}, in another data.path, with"
            f" {text}data.tokenizer={checkpoint.model}"
        )

    def compare_all() -> None:
        for key, name in models.items():
            compare(key, name)

    on_main(ranks, compare_all)


def tokenizer_mistakes(given: str | None, init_from: str | None, teacher: str | None) -> list[str]:
    """Whether the tokenizer `given`, before it makes tokens, differs from that of init_from or of the teacher."""
    found = []
    for key, name in (("init_from", init_from), ("distill.teacher", teacher)):
        if given is None or name is None or name == given:
            continue
        try:
            with source(key, name) as checkpoint:
                own = tokenizer.load(checkpoint.model, key)
            if tokenizer.serialized(own) != tokenizer.serialized(tokenizer.load(given)):
                found.append(
                    f"data.tokenizer={given} is another tokenizer than that of {key}={name}, to which its tokens mean"
                    f" other text: give data.tokenizer={checkpoint.model}"
                )
        except (ConfigError, DataError) as error:
            found += error.mistakes if isinstance(error, ConfigError) else [str(error)]
    return found


def read_at_start(run: RunConfig, init_from: str | None, teacher: str | None) -> dict[str, str]:
    """The models whose files this start of the run reads, {key: name}: init_from while there is no checkpoint, and the
    teacher."""
    begins = run.restart or not run_folder.saved_steps(run.folder)
    named = {"init_from": init_from if begins else None, "distill.teacher": teacher}
    return {key: name for key, name in named.items() if name is not None}


def weight_mistakes(models: dict[str, str]) -> list[str]:
    """What is wrong with the weights of those of `models` that are folders, as far as the headers of their files say.
    `models`: of `read_at_start`."""
    found = []
    for key, name in models.items():
        if Path(name).expanduser().exists():
            try:
                with source(key, name) as checkpoint:
                    pretrained.verify_files(Path(checkpoint.model), pretrained.read_config(checkpoint.model))
            except ConfigError as error:
                found += error.mistakes
    return found


def write_weights(
    model: Decoder, name: str, architecture: ModelConfig, run_name: str | None, data: Data, ranks: Ranks
) -> list[int]:
    """Give `model`, whole or in shards, the weights of `name`, the init_from; the main rank reads them. Collective.

    Returns, on the main rank, at which tokens a text of `init_from` ends beside the one that ends a document of `data`,
    as at that of a turn. Only special ones: no document holds them, so whoever stops there cuts no text.

    Raises ConfigError on the main rank, and MainRankFailed on the others, if they cannot be read or are of another
    architecture than the run's.
    """
    weights: dict[str, Tensor] = {}
    ends: set[int] = set()

    def read() -> None:
        with source("init_from", name) as checkpoint:
            checkpoint.identity()  # a checkpoint of ours is held to its checksums
            found, _, read = load_float32(checkpoint)
            named = pretrained.stop_tokens(checkpoint.model)
        if found != architecture:
            theirs, ours = (flat({"model": to_dict(each)}) for each in (found, architecture))
            differs = "; ".join(
                f"{key} is {theirs[key]!r} instead of {ours[key]!r}" for key in ours if theirs[key] != ours[key]
            )
            raise ConfigError([
                f"init_from={name} is not the model any more that run {run_name} was begun with ({differs}):"
                " bring that back, or choose another run.name"
            ])  # fmt: skip
        weights.update(read)
        special = tokenizer.special_ids(tokenizer.load(str(data.tokenizer_folder), "data.path"))
        ends.update(named & special - {data.end_of_text_id})

    on_main(ranks, read)
    send(weights, model, ranks)
    ranks.say(f"{run_name}: starting from the weights of {name}")
    return sorted(ends)


def send(weights: dict[str, Tensor], model: Decoder, ranks: Ranks) -> None:
    """Give `model` of each rank, whole or in shards, the main rank's `weights`, which are used up. Collective."""
    for name, parameter in model.named_parameters():
        whole = torch.empty(parameter.shape, device=ranks.device)
        if ranks.is_main:
            whole.copy_(weights.pop(name))
        dist.broadcast(whole, src=0)
        sharding.write(parameter, whole)


@contextmanager
def source(key: str, name: str) -> Iterator[Checkpoint]:
    """What `name`, the value of `key`, means, while it is read. Raises ConfigError if that fails, or if it means
    nothing."""

    def refusal(said: str) -> ConfigError:
        return ConfigError([said.replace("checkpoint=", f"{key}=", 1)])  # as commands say it of their `checkpoint`

    try:
        checkpoint = locate(name)
    except CheckpointNotFound as error:
        raise refusal(str(error)) from error
    try:
        with hub.offline(checkpoint.folder is not None or not hub.answers(f"{key}={name}")):
            yield checkpoint
    except (ConfigError, DataError):
        raise
    except (ValueError, OSError) as error:  # a damaged or foreign model; a hub that does not answer
        raise refusal(unreadable(checkpoint, error)) from error
