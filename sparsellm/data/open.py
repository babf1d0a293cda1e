"""Opening the data of a run: what is wrong with it, and the batches of this rank."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from sparsellm.config import RunConfig, Source
from sparsellm.data import corpus, manifest, mix, sources, tokenizer
from sparsellm.data.checksums import Verified
from sparsellm.data.errors import DataError
from sparsellm.data.packed import Batch, PackedTokens
from sparsellm.data.preparation import prepare
from sparsellm.data.request import Request
from sparsellm.data.stream import TokenStream
from sparsellm.distributed.groups import Ranks, on_main, require_shared, world_size_from_environment
from sparsellm.runs.layout import CONFIG, STATE, rank_json
from sparsellm.system.console import warn
from sparsellm.system.files import read_json


@dataclass(frozen=True)
class Data:
    """What a run trains and validates on."""

    tokenizer_folder: Path  # loads with AutoTokenizer
    end_of_text_id: int
    validation: torch.Tensor  # int64 [V, T + 1], V at most logging.validation_samples; the same on all ranks
    tokens: PackedTokens | mix.MixedTokens | TokenStream
    named_validation: dict[str, torch.Tensor] = field(default_factory=dict)  # the same of each source of data.mix
    begin_of_text_id: int | None = None  # None: documents begin with no such token

    @property
    def training_tokens(self) -> int | None:
        """How many there are before they repeat, of a mix those of any source; None for a stream, which has no end."""
        if isinstance(self.tokens, mix.MixedTokens):
            return self.tokens.tokens_before_repeats
        return self.tokens.manifest.train.tokens if isinstance(self.tokens, PackedTokens) else None

    def batches(self, state: dict[str, Any] | None) -> Generator[Batch, None, None]:
        """This rank's share of one step after the other, without end, and the JSON-able state after each.

        A share is int64 [batch_size / ranks, T + 1], pinned if the device is CUDA. `state` is one that came with an
        earlier share: what follows is what followed then, however far workers had read ahead. None is the start.
        Close the iterator when done with it: its worker processes ignore stop signals.
        """
        return self.tokens.batches(state)


def mistakes(request: Request, run: RunConfig, typed: Sequence[str] = ()) -> list[str]:
    """Everything wrong with the data of a run that can be known with no network and no writes, each with its remedy.

    `typed`: the overrides that the configuration was composed from, of which a remedy takes what it needs.
    """
    data, training = request.data, request.training
    if min(training.steps, training.batch_size, training.sequence_length) < 1:
        return []  # refused by sparsellm.config; how many tokens are needed is not known
    if data.source == Source.files and not data.files:
        return []  # refused by sparsellm.config; a command that prepares them cannot be told
    if data.streaming:
        return request.source_mistakes()
    if data.mix:
        return mix.mistakes(request)
    folder = data.folder
    try:
        ready = manifest.read(folder)
        started = ready or manifest.read(folder, "progress.json")
    except DataError as error:
        return [str(error)]
    found = request.recipe_mistakes(started) if started else []
    if ready is None:
        if data.source == Source.stdlib_docs:
            return found + request.source_mistakes()
        if found:
            return found
        how = "its preparation has not finished" if started else "there are no prepared tokens"
        return [
            f"data.path={folder} (data.name={data.name}): {how}; run {request.command(typed)}",
            *request.source_mistakes(),
        ]
    limit = request.token_limit
    if data.source != Source.stdlib_docs and not manifest.is_enough(ready, limit):
        found.append(
            f"data.path={folder} holds {ready.train.tokens:,} of the {limit:,} training tokens asked for;"
            f" add the others with {request.command(typed)}"
            f" or train on these again and again with data.max_tokens={ready.train.tokens}"
        )
    found += manifest.size_mistakes(ready, folder)
    if world_size_from_environment() == 1 and not _has_begun(run):  # of several ranks one looks, later: it may read
        found += [sources.refusal(change, folder) for change in sources.changes(ready, folder)]
    found += request.block_mistakes(ready)
    found += request.vocabulary_mistakes(ready.vocab_size)
    return found + request.changed_tokenizer_mistakes(ready)


def _has_begun(run: RunConfig) -> bool:
    """Whether there is a run of this name, which goes on: its position belongs to the tokens, by their checksum."""
    return run.name is not None and not run.restart and (run.folder / CONFIG).is_file()


def open_data(request: Request, run: RunConfig, validation_samples: int, workers: int, ranks: Ranks) -> Data:
    """The data of `run` for this rank of a process group; all ranks call it together.

    `workers`: processes of each rank that load it.

    Rank 0 prepares the embedded corpus if it is not there yet, and reads prepared files once to verify their checksums.
    Raises DataError on rank 0, and RuntimeError with its message on the others.
    """
    opening = _Opening(request, run, validation_samples, workers, ranks)
    if request.data.mix:
        return opening.mixed()
    return opening.streamed() if request.data.streaming else opening.packed()


def open_validation(request: Request, samples: int, tokenizer_folder: Path, run: Path) -> torch.Tensor:
    """The held-out blocks that a run validates on, int64 [V, T + 1], `samples` or all. For one process; prepares
    nothing.

    `tokenizer_folder` holds the run's tokenizer: the hf/ of one of its checkpoints. A relative path in `request` starts
    at the folder in which the run was started: the working directory is tried, then the folders that `run` lies in.
    Raises DataError if the blocks are in none of them, are damaged, or were made with another tokenizer.
    """
    return _OfRun(request, samples, tokenizer_folder, run).validation()


@dataclass(frozen=True)
class _Opening:
    """What opens the data of `run` on one of the `ranks`, which call every method together."""

    request: Request
    run: RunConfig
    samples: int  # held-out blocks at most
    workers: int
    ranks: Ranks

    def packed(self) -> Data:
        folder = self.request.data.folder
        on_main(self.ranks, self._verify)
        ready = manifest.read(folder)
        require_shared(f"data.path={folder}", ready if ready and not manifest.size_mistakes(ready, folder) else None)
        assert ready is not None
        tokens = PackedTokens(
            folder=folder, manifest=ready, batch_size=self.request.training.batch_size, **self._reading()
        )
        return Data(
            tokenizer_folder=folder / "tokenizer",
            end_of_text_id=ready.end_of_text_id,
            begin_of_text_id=ready.begin_of_text_id,
            validation=tokens.validation(self.samples),
            tokens=tokens,
        )

    def mixed(self) -> Data:
        def verify() -> None:
            for folder, ready in mix.read(self.request).values():
                self._verify_folder(folder, ready)

        on_main(self.ranks, verify)
        data, batch_size = self.request.data, self.request.training.batch_size
        tokens = mix.mixed(data, mix.read(self.request), batch_size=batch_size, **self._reading())
        first = next(iter(tokens.sources.values()))
        return Data(
            tokenizer_folder=first.folder / "tokenizer",
            end_of_text_id=first.manifest.end_of_text_id,
            begin_of_text_id=first.manifest.begin_of_text_id,
            validation=mix.validation(data, self.samples, tokens),
            tokens=tokens,
            named_validation={name: source.validation(self.samples) for name, source in tokens.sources.items()},
        )

    def _verify(self) -> None:
        """On the main rank: prepare the embedded corpus if need be, and hold what is there against its checksums."""
        folder = self.request.data.folder
        if self.request.data.source == Source.stdlib_docs:
            prepare(self.request)
        if found := mistakes(self.request, self.run):
            raise DataError("; ".join(found))
        if (ready := manifest.read(folder)) is not None:
            self._verify_folder(folder, ready)

    def _verify_folder(self, folder: Path, ready: manifest.Manifest) -> None:
        manifest.verify(ready, folder, verified=Verified(folder, again=self.request.data.verify))
        for change in sources.changes(ready, folder):
            if not _has_begun(self.run):
                raise DataError(sources.refusal(change, folder))
            warn(f"{change}: the run goes on with the tokens that it began with")

    def streamed(self) -> Data:
        # Found once, on rank 0, so that all ranks see the same files even while a hub data set changes.
        files, ends, folder, (end, begin), validation = on_main(self.ranks, self._find)
        local = [Path(name) for name in files if "://" not in name]
        tokenizer_files = sorted(path.name for path in folder.glob("*"))
        require_shared(f"data.path={self.request.data.folder}", tokenizer_files)
        require_shared("data.files", [path.stat().st_size if path.is_file() else None for path in local])
        tokens = self._stream(files, ends, folder)
        return Data(folder, end, validation, tokens, begin_of_text_id=begin)

    def _find(self) -> tuple[corpus.Files, dict[str, str], Path, tuple[int, int | None], torch.Tensor]:
        """On the main rank: the files and the checksums of their ends, the tokenizer's folder, the ids that end and
        begin a text, held-out blocks."""
        data = self.request.data
        assert data.tokenizer is not None
        vocabulary = tokenizer.load(data.tokenizer, self.request.tokenizer_key)
        if found := self.request.vocabulary_mistakes(tokenizer.vocabulary_size(vocabulary)):
            raise DataError("; ".join(found))
        tokenizer.say_form(vocabulary, f"{self.request.tokenizer_key}={data.tokenizer}")
        # Named by its content, so that it never takes the place of one that other tokens were made with.
        folder = data.folder / f"tokenizer-{tokenizer.digest(vocabulary)[:8]}"
        as_found = (vocabulary.found or "").encode()
        earlier = data.folder / f"tokenizer-{tokenizer.digest(vocabulary, as_found)[:8]}"
        if as_found and earlier.is_dir():
            folder = earlier  # of runs started before 0.1.0, when tokenizers were used as they were found
        else:
            tokenizer.save(vocabulary, folder)
        files = corpus.find_files(data)
        tokens = self._stream(files, corpus.ends(files), folder)
        validation = tokens.validation(self.samples)
        ends = tokenizer.end_of_text_id(vocabulary), tokenizer.begin_of_text_id(vocabulary)
        return files, tokens.ends, folder, ends, validation

    def _stream(self, files: corpus.Files, ends: dict[str, str], folder: Path) -> TokenStream:
        data, share = self.request.data, self.request.training.batch_size // self.ranks.world_size
        return TokenStream(
            files=files, ends=ends, text_column=data.text_column, tokenizer_folder=folder,
            validation_fraction=data.validation_fraction, skip_bad_records=data.skip_bad_records, share=share,
            **self._reading(),
        )  # fmt: skip

    def _reading(self) -> dict[str, Any]:
        """What prepared tokens and a stream are read with alike."""
        return {
            "sequence_length": self.request.training.sequence_length,
            "rank": self.ranks.rank,
            "world_size": self.ranks.world_size,
            "seed": self.request.data.seed,
            "workers": self.workers,
            "pin_memory": self.ranks.device.type == "cuda",
        }


@dataclass(frozen=True)
class _OfRun:
    """The data that the run in the folder `run` was trained with, found again."""

    request: Request
    samples: int  # held-out blocks at most
    tokenizer_folder: Path
    run: Path

    def validation(self) -> torch.Tensor:
        data, samples = self.request.data, self.samples
        alone: dict[str, Any] = {
            "sequence_length": self.request.training.sequence_length,
            "rank": 0,
            "world_size": 1,
            "seed": data.seed,
            "workers": 0,
            "pin_memory": False,
        }
        if data.streaming:
            stream = TokenStream(
                self._files(), {}, data.text_column, self.tokenizer_folder, data.validation_fraction, share=1,
                skip_bad_records=data.skip_bad_records, **alone,
            )  # fmt: skip
            return stream.validation(samples)
        if data.mix:
            found = {name: self._tokens(folder, name) for name, folder in mix.folders(data).items()}
            return mix.validation(data, samples, mix.mixed(data, found, batch_size=1, **alone))
        folder, ready = self._tokens(data.folder)
        return PackedTokens(folder, ready, batch_size=1, **alone).validation(samples)

    @property
    def _starts(self) -> list[Path]:
        """Folders in which the run may have been started: the working directory, and those that the run lies in."""
        return [Path.cwd(), *self.run.absolute().parents]

    def _tokens(self, path: Path, source: str | None = None) -> tuple[Path, manifest.Manifest]:
        """The first folder of prepared tokens that may be the run's by its `path`, and is by its manifest; and that.

        `source`: the name of those tokens in the mix, if they are of one.
        """
        request = self.request
        digest, misses = tokenizer.digest(tokenizer.load(str(self.tokenizer_folder), "checkpoint")), []
        # Where data.path is absolute, `start / path` is `path` itself.
        for folder in dict.fromkeys(start / path for start in self._starts):
            try:
                ready = manifest.read(folder)
                if ready is None:
                    raise DataError(f"{folder / 'manifest.json'} is missing")
                if source is None and (found := request.recipe_mistakes(ready, folder)):
                    raise DataError("; ".join(found))
                # Folders prepared before 0.1.0 have the hash of the tokenizer as it was found.
                if digest != ready.tokenizer_hash and digest != tokenizer.digest(
                    tokenizer.load(str(folder / "tokenizer"), "data.path")
                ):
                    raise DataError(f"{folder} was prepared with another tokenizer than {self.tokenizer_folder} holds")
                if ready.cut and ready.files["train.tokens"]["xxh3"] != self._trained_on(source):
                    raise DataError(f"{folder} was cut elsewhere: the run may have trained on what it holds out")
                manifest.verify(ready, folder, ["validation.tokens"])
                return folder, ready
            except (DataError, OSError) as error:
                misses.append(str(error))
        relative = "" if path.is_absolute() else ", start from the folder that data.path is relative to"
        key, again = (f"data.path={path}", f", or run {request.command()}") if source is None else (str(path), "")
        raise DataError(
            f"there are no prepared tokens in {key} that are those of {self.run} ({'; '.join(misses)}): bring them"
            f" there{relative}{again}"
        )

    def _trained_on(self, source: str | None) -> str | None:
        """The xxh3 of the training tokens of the checkpoint that the tokenizer lies in, None if it is in none.

        `source`: of which source of a mix.
        """
        path = self.tokenizer_folder.parent / STATE / rank_json(0)
        if not path.is_file():
            return None
        position = read_json(path, DataError, "use another checkpoint").get("data")
        tokens = position.get("tokens") if isinstance(position, dict) else None
        return tokens.get(source) if isinstance(tokens, dict) else tokens

    def _files(self) -> corpus.Files:
        """The files that a streaming run reads."""
        data = self.request.data
        if data.source != Source.files:
            return corpus.find_files(data)
        for start in self._starts:
            files, found = corpus.local_files(data.files, start)
            if not found:
                return files
        raise DataError(
            f"the files that {self.run} reads (data.files={','.join(data.files)}) are neither under the working"
            " directory nor under a folder that the run lies in: start from the folder that data.files is relative to"
        )
