"""Warm start: a run that starts from an existing model instead of random weights (init_from, docs/TRAINING.md).

The model provides the architecture and the weights, and its tokenizer must match the data's. Once a run has started,
it no longer needs the model: config.yaml holds the architecture and checkpoints hold the weights.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from sparsellm.config import Activation, Config, ConfigError, DataConfig, ModelConfig, RunConfig, Source, typed_values
from sparsellm.config.values import flat, to_dict
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
    """Set the architecture of `config` in place from its `init_from`, if any. Unless data.tokenizer was typed, also set
    it to the name with which the tokens were prepared. Returns error messages, if any.

    `typed`: the overrides from which `config` was composed. Typed values of model.* must agree with `init_from`.
    """
    if config.init_from is None:
        return []
    data = config.data
    # Composition takes the tokenizer from init_from if none was typed.
    follows = data.tokenizer == config.init_from and tokenizer.KEY not in typed_values(list(typed))
    try:
        begun = run_folder.begun_as(config.run)
        if begun is not None and begun.init_from == config.init_from:
            config.model = begun.model
            if follows:
                data.tokenizer, data.tokenizer_vocab_size = begun.data.tokenizer, begun.data.tokenizer_vocab_size
        else:
            with source("init_from", config.init_from) as checkpoint:
                config.model, activation = conversion.architecture(checkpoint.model)
                if follows:
                    _find_its_tokens(data, checkpoint.model)
            if config.sparsity.relu_tokens and activation == Activation.relu:
                return [
                    f"sparsity.relu_tokens is {config.sparsity.relu_tokens}, which anneals SiLU to ReLU, but"
                    f" init_from={config.init_from} already has ReLU: leave it out"
                ]
    except ConfigError as error:
        return error.mistakes
    return _disagreements(config.init_from, config.model, list(typed))


def _find_its_tokens(data: DataConfig, model: str) -> None:
    """If the tokens in data.path were made with `model`'s tokenizer under another name, for example by the run that
    trained `model`, use that name. Changes `data`."""
    with suppress(DataError):  # the error is reported when the data is opened
        ready = None if data.streaming else manifest.read(data.folder)
        if ready is not None and ready.tokenizer_hash in tokenizer.digests(tokenizer.load(model, "init_from")):
            data.tokenizer = ready.recipe.get(tokenizer.KEY)
            data.tokenizer_vocab_size = ready.recipe.get("data.tokenizer_vocab_size", data.tokenizer_vocab_size)


def _disagreements(name: str, model: ModelConfig, typed: list[str]) -> list[str]:
    """Error messages for typed values of model.* that differ from `model`, the architecture of init_from=`name`."""
    theirs = flat({"model": to_dict(model)})
    # `meant`: the same, with the values that null stands for.
    meant = theirs | {"model.num_key_value_heads": model.kv_heads, "model.head_dim": model.head_width}
    return [
        f"{key} is {value!r}, but init_from={name} has {theirs[key]!r}: leave it out, because init_from decides it"
        for key, value in typed_values(typed).items()
        if key in theirs and value not in (theirs[key], meant[key])
    ]


def require_one_tokenizer(models: dict[str, str], corpus: DataConfig, data: Data, ranks: Ranks) -> None:
    """Raise DataError on the main rank, and MainRankFailed on the others, if the tokenizer of `data` differs from that
    of any of `models` (from `read_at_start`). Warn if only the begin- or end-of-text tokens differ. Collective."""

    def compare() -> None:
        where = f"data.mix={','.join(corpus.mix_names)}" if corpus.mix else f"data.path={corpus.path}"
        used = "a tokenizer trained on its text" if corpus.tokenizer is None else f"the tokenizer {corpus.tokenizer}"
        for key, name in models.items():
            with source(key, name) as checkpoint:
                own = tokenizer.load(checkpoint.model, key)
            prepared = tokenizer.load(str(data.tokenizer_folder), "data.path")
            if tokenizer.serialized(own) != tokenizer.serialized(prepared):
                # The corpus stdlib_docs always trains its own tokenizer, so another tokenizer needs another corpus.
                what, text = "the data again", ""
                if corpus.source == Source.stdlib_docs:
                    what, text = "your own text", "data=files data.files=[PATTERN,...] "
                raise DataError(
                    f"{where} was tokenized with {used}, but {key}={name} uses another tokenizer, in which the same"
                    f" token ids mean something else: prepare {what}, in another data.path, with"
                    f" {text}data.tokenizer={checkpoint.model}"
                )
            ours, theirs = tokenizer.form(prepared), tokenizer.form(own)
            if ours != theirs:  # a base model and its chat model, for example
                warn(f"documents of {where} have the form {ours}, but those of {key}={name} have the form {theirs}")

    on_main(ranks, compare)


def tokenizer_mistakes(given: str | None, init_from: str | None, teacher: str | None) -> list[str]:
    """Error messages if data.tokenizer, `given`, differs from the tokenizer of init_from or of the teacher. Called
    before preparation."""
    found = []
    for key, name in (("init_from", init_from), ("distill.teacher", teacher)):
        if given is None or name is None or name == given:
            continue
        try:
            with source(key, name) as checkpoint:
                own = tokenizer.load(checkpoint.model, key)
            if tokenizer.serialized(own) != tokenizer.serialized(tokenizer.load(given)):
                found.append(
                    f"data.tokenizer={given} differs from the tokenizer of {key}={name}, which gives the same tokens"
                    f" other meanings: use data.tokenizer={checkpoint.model}"
                )
        except (ConfigError, DataError) as error:
            found += error.mistakes if isinstance(error, ConfigError) else [str(error)]
    return found


def read_at_start(run: RunConfig, init_from: str | None, teacher: str | None) -> dict[str, str]:
    """{key: name} of the models read when the run starts: init_from if there is no checkpoint, and the teacher."""
    begins = run.restart or not run_folder.saved_steps(run.folder)
    named = {"init_from": init_from if begins else None, "distill.teacher": teacher}
    return {key: name for key, name in named.items() if name is not None}


def weight_mistakes(models: dict[str, str]) -> list[str]:
    """Error messages for local `models` (from `read_at_start`) whose file headers show damaged or missing weights."""
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
    """Load the weights of init_from=`name` into `model`, which may be sharded; the main rank reads them. Collective.

    Returns, on the main rank, the stop tokens of `name` other than the end-of-text token of `data`, for example the end
    of a chat turn. Documents never contain these special tokens, so stopping there truncates no text.

    Raises ConfigError on the main rank, and MainRankFailed on the others, if the weights cannot be read or have another
    architecture.
    """
    weights: dict[str, Tensor] = {}
    ends: set[int] = set()

    def read() -> None:
        with source("init_from", name) as checkpoint:
            checkpoint.identity()  # verifies the checksums if sparsellm wrote the checkpoint
            found, _, read = load_float32(checkpoint)
            named = pretrained.stop_tokens(checkpoint.model)
        if found != architecture:
            theirs, ours = (flat({"model": to_dict(each)}) for each in (found, architecture))
            differs = "; ".join(
                f"{key} is {theirs[key]!r} instead of {ours[key]!r}" for key in ours if theirs[key] != ours[key]
            )
            raise ConfigError([
                f"init_from={name} is no longer the model with which run {run_name} was started ({differs}): restore"
                " it, or choose another run.name"
            ])  # fmt: skip
        weights.update(read)
        special = tokenizer.special_ids(tokenizer.load(str(data.tokenizer_folder), "data.path"))
        ends.update(named & special - {data.end_of_text_id})

    on_main(ranks, read)
    send(weights, model, ranks)
    ranks.say(f"{run_name}: starting from the weights of {name}")
    return sorted(ends)


def send(weights: dict[str, Tensor], model: Decoder, ranks: Ranks) -> None:
    """Copy the main rank's `weights` into every rank's `model`, which may be sharded. Empties `weights`. Collective."""
    for name, parameter in model.named_parameters():
        whole = torch.empty(parameter.shape, device=ranks.device)
        if ranks.is_main:
            whole.copy_(weights.pop(name))
        dist.broadcast(whole, src=0)
        sharding.write(parameter, whole)


@contextmanager
def source(key: str, name: str) -> Iterator[Checkpoint]:
    """Context manager that locates the model `name`, the value of `key`. The block runs offline if the model is local
    or the hub does not answer. Raises ConfigError if the model does not exist or cannot be read."""

    def refusal(said: str) -> ConfigError:
        return ConfigError([said.replace("checkpoint=", f"{key}=", 1)])  # `locate` names the key `checkpoint`

    try:
        checkpoint = locate(name)
    except CheckpointNotFound as error:
        raise refusal(str(error)) from error
    try:
        with hub.offline(checkpoint.folder is not None or not hub.answers(f"{key}={name}")):
            yield checkpoint
    except (ConfigError, DataError):
        raise
    except (ValueError, OSError) as error:  # a damaged or unsupported model, or an unreachable hub
        raise refusal(unreadable(checkpoint, error)) from error
