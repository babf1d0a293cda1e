"""Opening the data of a run: what is wrong with it, and the batches of this rank."""

import glob
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sparsellm.config import Config, Source
from sparsellm.data import corpus, manifest, tokenizer
from sparsellm.data.errors import DataError
from sparsellm.data.packed import PackedTokens
from sparsellm.data.preparation import prepare, source_mistakes
from sparsellm.data.stream import TokenStream
from sparsellm.distributed import Ranks, main_first
from sparsellm.files import read_json
from sparsellm.run_layout import STATE, rank_json


@dataclass(frozen=True)
class Data:
    """What a run trains and validates on."""

    tokenizer_folder: Path  # loads with AutoTokenizer
    end_of_text_id: int
    validation: torch.Tensor  # int64 [V, T + 1], V at most logging.validation_samples; the same on all ranks
    tokens: PackedTokens | TokenStream

    @property
    def training_tokens(self) -> int | None:
        """How many there are before they repeat; None for a stream, which does not know."""
        return self.tokens.manifest.train.tokens if isinstance(self.tokens, PackedTokens) else None

    def batches(self, state: dict[str, Any] | None) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
        """This rank's share of one step after the other, without end, and the JSON-able state after each.

        A share is int64 [batch_size / ranks, T + 1], pinned if the device is CUDA. `state` is one that came with an
        earlier share: what follows is what followed then, however far workers had read ahead. None is the start.
        Close the iterator when done with it: its worker processes ignore stop signals.
        """
        return self.tokens.batches(state)


def mistakes(config: Config, typed: Sequence[str] = ()) -> list[str]:
    """Everything wrong with the data of a run that can be known with no network and no writes, each with its remedy.

    `typed`: the overrides that `config` was composed from, of which a remedy takes what it needs.
    """
    data, folder, training = config.data, Path(config.data.path), config.training
    if min(training.steps, training.batch_size, training.sequence_length) < 1:
        return []  # refused by sparsellm.config; how many tokens are needed is not known
    if data.source == Source.files and not data.files:
        return []  # refused by sparsellm.config; a command that prepares them cannot be told
    if data.streaming:
        return source_mistakes(config)
    try:
        if data.source == Source.stdlib_docs and manifest.is_unsealed(folder):
            return []  # `prepare`, which every run calls on this corpus, verifies what an earlier version left
        ready = manifest.read(folder)
        started = ready or manifest.read(folder, "progress.json")
    except DataError as error:
        return [str(error)]
    found = manifest.recipe_mistakes(started, config) if started else []
    if ready is None:
        if data.source == Source.stdlib_docs:
            return found + source_mistakes(config)
        if found:
            return found
        how = "its preparation has not finished" if started else "there are no prepared tokens"
        return [
            f"data.path={folder} (data.name={data.name}): {how}; run {manifest.preparation_command(config, typed)}",
            *source_mistakes(config),
        ]
    limit = manifest.token_limit(config)
    if data.source != Source.stdlib_docs and not manifest.is_enough(ready, limit):
        found.append(
            f"data.path={folder} holds {ready.train.tokens:,} of the {limit:,} training tokens asked for;"
            f" add the others with {manifest.preparation_command(config, typed)}"
            f" or train on these again and again with data.max_tokens={ready.train.tokens}"
        )
    found += manifest.size_mistakes(ready, folder)
    found += manifest.block_mistakes(ready, config)
    found += manifest.vocabulary_mistakes(ready.vocab_size, config)
    return found + _changed_tokenizer_mistakes(config, ready)


def open_data(config: Config, ranks: Ranks) -> Data:
    """The data of `config` for this rank of a process group; all ranks call it together.

    Rank 0 prepares the embedded corpus if it is not there yet, and reads prepared files once to verify their checksums.
    Raises DataError on rank 0, and RuntimeError with its message on the others.
    """
    return _open_stream(config, ranks) if config.data.streaming else _open_packed(config, ranks)


def open_validation(config: Config, tokenizer_folder: Path, run: Path) -> torch.Tensor:
    """The held-out blocks that a run of `config` validates on, int64 [V, T + 1]. For one process; prepares nothing.

    `tokenizer_folder` holds the run's tokenizer: the hf/ of one of its checkpoints. A relative path in `config` starts
    at the folder in which the run was started: the working directory is tried, then the folders that `run` lies in.
    Raises DataError if the blocks are in none of them, are damaged, or were made with another tokenizer.
    """
    data, samples = config.data, config.logging.validation_samples
    if data.streaming:
        alone = {"sequence_length": config.training.sequence_length, "rank": 0, "world_size": 1}
        reading = {"share": 1, "seed": data.seed, "workers": 0, "pin_memory": False}
        stream = TokenStream(
            _files_of_run(config, run), data.text_column, tokenizer_folder, data.validation_fraction, **alone, **reading
        )
        return stream.validation(samples)
    folder, ready = _tokens_of_run(config, tokenizer_folder, run)
    tokens = PackedTokens(
        folder, ready, config.training.sequence_length, 1, 0, 1, data.seed, workers=0, pin_memory=False
    )
    return tokens.validation(samples)


def _starts_of_run(run: Path) -> list[Path]:
    """Folders in which `run` may have been started: the working directory, and those that the run lies in."""
    return [Path.cwd(), *run.absolute().parents]


def _tokens_of_run(config: Config, tokenizer_folder: Path, run: Path) -> tuple[Path, manifest.Manifest]:
    """The first folder of prepared tokens that may be the run's by its path, and is by its manifest; and that."""
    digest, misses = tokenizer.digest(tokenizer.load(str(tokenizer_folder))), []
    # Where data.path is absolute, `start / data.path` is data.path itself.
    for folder in dict.fromkeys(start / config.data.path for start in _starts_of_run(run)):
        try:
            ready = manifest.read(folder)
            if ready is None:
                raise DataError(f"{folder / 'manifest.json'} is missing")
            if found := manifest.recipe_mistakes(ready, replace(config, data=replace(config.data, path=str(folder)))):
                raise DataError("; ".join(found))
            if digest != ready.tokenizer_hash:
                raise DataError(f"{folder} was prepared with another tokenizer than {tokenizer_folder} holds")
            if ready.cut and ready.files["train.tokens"]["xxh3"] != _tokens_trained_on(tokenizer_folder):
                raise DataError(f"{folder} was cut elsewhere: the run may have trained on what it holds out")
            manifest.verify(ready, folder, ["validation.tokens"])
            return folder, ready
        except (DataError, OSError) as error:
            misses.append(str(error))
    relative = "" if Path(config.data.path).is_absolute() else ", start from the folder that data.path is relative to"
    raise DataError(
        f"there are no prepared tokens in data.path={config.data.path} that are those of {run} ({'; '.join(misses)}):"
        f" bring them there{relative}, or run {manifest.preparation_command(config)}"
    )


def _tokens_trained_on(tokenizer_folder: Path) -> str | None:
    """The xxh3 of the training tokens of the checkpoint that `tokenizer_folder` lies in, None if it is in none."""
    path = tokenizer_folder.parent / STATE / rank_json(0)
    if not path.is_file():
        return None
    position = read_json(path, DataError, "use another checkpoint").get("data")
    return position.get("tokens") if isinstance(position, dict) else None


def _files_of_run(config: Config, run: Path) -> corpus.Files:
    """The files that a streaming run reads."""
    data = config.data
    if data.source != Source.files:
        return corpus.find_files(data)
    for start in _starts_of_run(run):
        here = Path(glob.escape(str(start)))
        files, found = corpus.local_files([str(here / Path(pattern).expanduser()) for pattern in data.files])
        if not found:
            return files
    raise DataError(
        f"the files that {run} reads (data.files={','.join(data.files)}) are neither under the working directory nor"
        " under a folder that the run lies in: start from the folder that data.files is relative to"
    )


def _open_packed(config: Config, ranks: Ranks) -> Data:
    folder = Path(config.data.path)
    with main_first(ranks):
        if ranks.is_main:
            if config.data.source == Source.stdlib_docs:
                prepare(config)
            if found := mistakes(config):
                raise DataError("; ".join(found))
        ready = manifest.read(folder)
        if ready is None:
            raise DataError(f"rank {ranks.rank} finds no manifest in {folder}, and rank 0 does: share it between nodes")
        if ranks.is_main:
            manifest.verify(ready, folder)
    tokens = PackedTokens(
        folder=folder,
        manifest=ready,
        batch_size=config.training.batch_size,
        **_common(config, ranks),
    )
    return Data(
        tokenizer_folder=folder / "tokenizer",
        end_of_text_id=ready.end_of_text_id,
        validation=tokens.validation(config.logging.validation_samples),
        tokens=tokens,
    )


def _open_stream(config: Config, ranks: Ranks) -> Data:
    data = config.data
    # Found once, on rank 0, so that all ranks see the same files even while a hub data set changes.
    opened: list[Any] = [None]
    with main_first(ranks):
        if ranks.is_main:
            vocabulary = tokenizer.load(data.tokenizer)
            if found := manifest.vocabulary_mistakes(tokenizer.vocabulary_size(vocabulary), config):
                raise DataError("; ".join(found))
            digest = tokenizer.digest(vocabulary)
            # Named by its content, so that it never takes the place of one that other tokens were made with.
            folder = Path(data.path) / f"tokenizer-{digest[:8]}"
            tokenizer.save(vocabulary, folder)
            tokens = _stream(config, ranks, corpus.find_files(data), folder)
            validation = tokens.validation(config.logging.validation_samples)
            end = vocabulary.token_to_id(tokenizer.END_OF_TEXT)
            opened = [(tokens.files, folder, end, validation)]
    dist.broadcast_object_list(opened, src=0)
    files, folder, end, validation = opened[0]
    return Data(
        tokenizer_folder=folder,
        end_of_text_id=end,
        validation=validation,
        tokens=_stream(config, ranks, files, folder),
    )


def _stream(config: Config, ranks: Ranks, files: corpus.Files, folder: Path) -> TokenStream:
    return TokenStream(
        files=files,
        text_column=config.data.text_column,
        tokenizer_folder=folder,
        validation_fraction=config.data.validation_fraction,
        share=config.training.batch_size // ranks.world_size,
        **_common(config, ranks),
    )


def _common(config: Config, ranks: Ranks) -> dict[str, Any]:
    return {
        "sequence_length": config.training.sequence_length,
        "rank": ranks.rank,
        "world_size": ranks.world_size,
        "seed": config.data.seed,
        "workers": config.runtime.data_workers,
        "pin_memory": ranks.device.type == "cuda",
    }


def _changed_tokenizer_mistakes(config: Config, ready: manifest.Manifest) -> list[str]:
    """Whether a local tokenizer is not the one that the tokens were made with."""
    name = config.data.tokenizer
    if name is None or not Path(name).expanduser().exists():
        return []
    try:
        vocabulary = tokenizer.load(name)
    except DataError as error:
        return [str(error)]
    if tokenizer.digest(vocabulary) == ready.tokenizer_hash:
        return []
    return [
        f"data.tokenizer {name!r} has changed since {config.data.path} was prepared: bring it back, or choose another"
        " data.path and prepare again"
    ]
