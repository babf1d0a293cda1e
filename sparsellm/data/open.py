"""Opens a run's data: checks it for errors, and yields this rank's batches."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from sparsellm.config import SHORTEST_SEQUENCE, RunConfig, Source
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
    """A run's training and validation data."""

    tokenizer_folder: Path  # loads with AutoTokenizer
    end_of_text_id: int
    validation: torch.Tensor  # int64 [V, T + 1], V at most logging.validation_samples; the same on all ranks
    tokens: PackedTokens | mix.MixedTokens | TokenStream
    named_validation: dict[str, torch.Tensor] = field(default_factory=dict)  # per data.mix source
    begin_of_text_id: int | None = None  # None: no begin-of-text token

    @property
    def training_tokens(self) -> int | None:
        """The number of training tokens before any of them repeats; None for a stream."""
        if isinstance(self.tokens, mix.MixedTokens):
            return self.tokens.tokens_before_repeats
        return self.tokens.manifest.train.tokens if isinstance(self.tokens, PackedTokens) else None

    def batches(self, state: dict[str, Any] | None) -> Generator[Batch, None, None]:
        """Endlessly yields this rank's share of each step, with the JSON-serializable state after that step.

        A share is int64 [batch_size / ranks, T + 1], pinned if the device is CUDA. `state` is a state yielded earlier,
        after which iteration continues exactly, however far workers had read ahead; None starts from the beginning.
        Close the iterator when done: its worker processes ignore stop signals.
        """
        return self.tokens.batches(state)


def mistakes(request: Request, run: RunConfig, typed: Sequence[str] = ()) -> list[str]:
    """Error messages, with remedies, about a run's data that can be found without network access or writes.

    `typed`: the overrides from which the configuration was composed, used for the commands in remedies.
    """
    data, training = request.data, request.training
    if min(training.steps, training.batch_size) < 1 or training.sequence_length < SHORTEST_SEQUENCE:
        return []  # sparsellm.config reports this; the number of tokens is unknown
    if data.source == Source.files and not data.files:
        return []  # sparsellm.config reports this; the command that prepares the data is unknown
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
    if data.source != Source.stdlib_docs and not ready.is_enough(limit):
        found.append(
            f"data.path={folder} holds {ready.train.tokens:,} of the {limit:,} requested training tokens; add the rest"
            f" with {request.command(typed)} or repeat these with data.max_tokens={ready.train.tokens}"
        )
    found += manifest.size_mistakes(ready, folder)
    # With several ranks, rank 0 alone checks this later, because the check may read whole files.
    if world_size_from_environment() == 1 and not _has_begun(run):
        found += [sources.refusal(change, folder) for change in sources.changes(ready, folder)]
    found += request.block_mistakes(ready)
    found += request.vocabulary_mistakes(ready.vocab_size)
    return found + request.changed_tokenizer_mistakes(ready)


def _has_begun(run: RunConfig) -> bool:
    """Whether a run with this name exists and will resume. (Its data position includes the tokens' checksum.)"""
    return run.name is not None and not run.restart and (run.folder / CONFIG).is_file()


def open_data(request: Request, run: RunConfig, validation_samples: int, workers: int, ranks: Ranks) -> Data:
    """The data of `run` for this rank. Collective.

    `workers`: data-loading processes per rank.

    Rank 0 prepares the embedded corpus if needed, and verifies the checksums of prepared files. If the data cannot be
    used, raises DataError on rank 0, and MainRankFailed with its message on the others.
    """
    opening = _Opening(request, run, validation_samples, workers, ranks)
    if request.holds_nothing_out and ranks.is_main:
        warn("data.validation_fraction=0 holds nothing out: this run is not validated")
    if request.data.mix:
        return opening.mixed()
    return opening.streamed() if request.data.streaming else opening.packed()


def open_validation(request: Request, samples: int, tokenizer_folder: Path, run: Path) -> torch.Tensor:
    """The held-out blocks on which a run validates, int64 [V, T + 1], at most `samples`. Not collective: call this in a
    single process. Prepares nothing.

    `tokenizer_folder` holds the run's tokenizer: hf/ of one of its checkpoints. A relative path in `request` is
    relative to the folder in which the run was started: the working directory is tried, then the parents of `run`.
    Raises DataError if the blocks are in none of these folders, are damaged, or were made with another tokenizer.
    """
    if request.holds_nothing_out:
        raise DataError("the run's data holds nothing out (data.validation_fraction=0)")
    return _OfRun(request, samples, tokenizer_folder, run).validation()


@dataclass(frozen=True)
class _Opening:
    """Opens the data of `run`. Public methods are collective over `ranks`."""

    request: Request
    run: RunConfig
    samples: int  # maximum number of held-out blocks
    workers: int
    ranks: Ranks

    def packed(self) -> Data:
        folder, batch_size = self.request.data.folder, self.request.training.batch_size
        on_main(self.ranks, self._verify)
        ready = manifest.read(folder)
        require_shared(f"data.path={folder}", ready if ready and not manifest.size_mistakes(ready, folder) else None)
        assert ready is not None
        tokens = PackedTokens(folder, ready, batch_size=batch_size, **_reading(self.request, self.ranks, self.workers))
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
        tokens = mix.mixed(
            data, mix.read(self.request), batch_size=batch_size, **_reading(self.request, self.ranks, self.workers)
        )
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
        """On the main rank: prepare the embedded corpus if needed, and verify checksums."""
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
            warn(f"{change}: the run continues with the tokens that it started with")

    def streamed(self) -> Data:
        # Only rank 0 lists the files, so that all ranks use the same ones even if a hub data set changes meanwhile.
        files, ends, folder, (end, begin), validation = on_main(self.ranks, self._find)
        local = [Path(name) for name in files if "://" not in name]
        tokenizer_files = sorted(path.name for path in folder.glob("*"))
        require_shared(f"data.path={self.request.data.folder}", tokenizer_files)
        require_shared("data.files", [path.stat().st_size if path.is_file() else None for path in local])
        tokens = self._stream(files, ends, folder)
        return Data(folder, end, validation, tokens, begin_of_text_id=begin)

    def _find(self) -> tuple[corpus.Files, dict[str, str], Path, tuple[int, int | None], torch.Tensor]:
        """On the main rank: the files, the checksums of their ends, the tokenizer's folder, the end- and begin-of-text
        ids, and held-out blocks."""
        data = self.request.data
        assert data.tokenizer is not None
        vocabulary = tokenizer.load(data.tokenizer, self.request.tokenizer_key)
        if found := self.request.vocabulary_mistakes(tokenizer.vocabulary_size(vocabulary)):
            raise DataError("; ".join(found))
        tokenizer.say_form(vocabulary, f"{self.request.tokenizer_key}={data.tokenizer}")
        # The folder's name depends on its content, so it never replaces the tokenizer of other tokens.
        folder = data.folder / f"tokenizer-{tokenizer.digest(vocabulary)[:8]}"
        as_found = (vocabulary.found or "").encode()
        earlier = data.folder / f"tokenizer-{tokenizer.digest(vocabulary, as_found)[:8]}"
        if as_found and earlier.is_dir():
            folder = earlier  # runs started before 0.1.0 used tokenizers unchanged
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
            **_reading(self.request, self.ranks, self.workers),
        )  # fmt: skip


def _reading(request: Request, ranks: Ranks | None = None, workers: int = 0) -> dict[str, Any]:
    """Keyword arguments shared by PackedTokens, MixedTokens and TokenStream. Without `ranks`: for a single process."""
    rank, world_size, device = (ranks.rank, ranks.world_size, ranks.device.type) if ranks else (0, 1, "cpu")
    return {
        "sequence_length": request.training.sequence_length, "rank": rank, "world_size": world_size,
        "seed": request.data.seed, "workers": workers, "pin_memory": device == "cuda",
    }  # fmt: skip


@dataclass(frozen=True)
class _OfRun:
    """Finds the data with which the run in the folder `run` was trained."""

    request: Request
    samples: int  # maximum number of held-out blocks
    tokenizer_folder: Path
    run: Path

    def validation(self) -> torch.Tensor:
        data, samples = self.request.data, self.samples
        alone = _reading(self.request)
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
        """Where the run may have been started: the working directory, and the parents of the run's folder."""
        return [Path.cwd(), *self.run.absolute().parents]

    def _tokens(self, path: Path, source: str | None = None) -> tuple[Path, manifest.Manifest]:
        """The first folder of prepared tokens that has the run's `path` and matches the run, and its manifest.

        `source`: the data.mix source to which the tokens belong, if any.
        """
        request = self.request
        digest, misses = tokenizer.digest(tokenizer.load(str(self.tokenizer_folder), "checkpoint")), []
        # If data.path is absolute, `start / path` is `path`.
        for folder in dict.fromkeys(start / path for start in self._starts):
            try:
                ready = manifest.read(folder)
                if ready is None:
                    raise DataError(f"{folder / 'manifest.json'} is missing")
                if source is None and (found := request.recipe_mistakes(ready, folder)):
                    raise DataError("; ".join(found))
                # Folders prepared before 0.1.0 have the hash of the unchanged tokenizer.
                if digest != ready.tokenizer_hash and digest != tokenizer.digest(
                    tokenizer.load(str(folder / "tokenizer"), "data.path")
                ):
                    raise DataError(
                        f"{folder} was prepared with a tokenizer other than that of {self.tokenizer_folder}"
                    )
                if ready.cut and ready.files["train.tokens"]["xxh3"] != self._trained_on(source):
                    raise DataError(
                        f"{folder} has another held-out split: the run may have trained on tokens that are held out"
                        f" there"
                    )
                manifest.verify(ready, folder, ["validation.tokens"])
                return folder, ready
            except (DataError, OSError) as error:
                misses.append(str(error))
        relative = "" if path.is_absolute() else ", start from the folder that data.path is relative to"
        key, again = (f"data.path={path}", f", or run {request.command()}") if source is None else (str(path), "")
        raise DataError(
            f"the prepared tokens of {self.run} are not in {key} ({'; '.join(misses)}): restore them"
            f" there{relative}{again}"
        )

    def _trained_on(self, source: str | None) -> str | None:
        """The xxh3 of the training tokens, as stored in the checkpoint that holds the tokenizer; None if there is none.

        `source`: the data.mix source to which the tokens belong, if any.
        """
        path = self.tokenizer_folder.parent / STATE / rank_json(0)
        if not path.is_file():
            return None
        position = read_json(path, DataError, "use another checkpoint").get("data")
        tokens = position.get("tokens") if isinstance(position, dict) else None
        return tokens.get(source) if isinstance(tokens, dict) else tokens

    def _files(self) -> corpus.Files:
        """The files read by a streaming run."""
        data = self.request.data
        if data.source != Source.files:
            return corpus.find_files(data)
        for start in self._starts:
            files, found = corpus.local_files(data.files, start)
            if not found:
                return files
        raise DataError(
            f"the files that {self.run} reads (data.files={','.join(data.files)}) are neither under the working"
            " directory nor under a parent of the run's folder: start from the folder that data.files is relative to"
        )
