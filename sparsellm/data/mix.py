"""Mixes several prepared corpora (data.mix): decides the source of each sample, and its index within that source.

Samples are drawn in periods of 10,000. Each source has the same number of samples in every period, in an order that is
shuffled per period. So the source of sample n, and its index within the source, depend only on n: the position is one
number, and the order depends neither on the ranks nor on resumes. Each source runs through its own epochs (packed.py);
a small source has more epochs.
"""

import shlex
from dataclasses import dataclass
from functools import lru_cache
from os.path import expanduser
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparsellm.config import MIX_PERIOD, DataConfig
from sparsellm.config.groups import choices
from sparsellm.config.rules import mix_mistakes
from sparsellm.data import manifest
from sparsellm.data.errors import DataError
from sparsellm.data.manifest import Manifest, blocks
from sparsellm.data.packed import PackedTokens, Samples, permutation
from sparsellm.data.request import Request

ORDER = 1  # part of the key for a period's permutation, to distinguish the key from an epoch's


def folders(data: DataConfig) -> dict[str, Path]:
    """{name: folder} for the sources. A source given as a name instead of a path is in data/NAME."""
    given = [source["data"] for source in data.mix]
    return {
        name: Path("data", name) if given == name else Path(expanduser(given))  # noqa: PTH111 (Path's may raise)
        for name, given in zip(data.mix_names, given, strict=True)
    }


def counts(data: DataConfig, total: int = MIX_PERIOD) -> tuple[int, ...]:
    """How many of `total` samples come from each source, by weight (largest remainder method)."""
    weights = [source["weight"] for source in data.mix]
    exact = [total * weight / sum(weights) for weight in weights]
    found = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: found[i] - exact[i])
    for i in by_remainder[: total - sum(found)]:
        found[i] += 1
    return tuple(found)


@dataclass(frozen=True)
class MixedTokens(Samples):
    """Samples from several `sources`. `counts`: samples per period from each source."""

    sources: dict[str, PackedTokens]
    counts: tuple[int, ...]
    sequence_length: int  # T
    seed: int

    @property
    def identity(self) -> dict[str, str]:
        return {name: source.identity for name, source in self.sources.items()}

    @property
    def place(self) -> str:
        return ", ".join(source.place for source in self.sources.values())

    @property
    def tokens_before_repeats(self) -> int:
        """Training tokens until the first source starts its second epoch."""
        return min(
            source.manifest.train.tokens * MIX_PERIOD // count
            for source, count in zip(self.sources.values(), self.counts, strict=True)
        )

    def sequences(self, samples: np.ndarray) -> torch.Tensor:
        of, numbers = self.places(samples)
        found = torch.empty(len(samples), self.sequence_length + 1, dtype=torch.int64)
        for i, source in enumerate(self.sources.values()):
            if len(mine := np.flatnonzero(of == i)):
                found[mine] = source.sequences(numbers[mine])
        return found

    def places(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For sample numbers int64 [S]: the source of each sample, and the sample's index in the source; int64 [S]."""
        periods, slots = np.divmod(samples, MIX_PERIOD)
        of, numbers = np.empty_like(samples), np.empty_like(samples)
        for period in np.unique(periods).tolist():
            here = periods == period
            source, before = _period(self.counts, self.seed, period)
            of[here] = source[slots[here]]
            numbers[here] = period * np.array(self.counts)[of[here]] + before[slots[here]]
        return of, numbers


@lru_cache(maxsize=2)
def _period(counts: tuple[int, ...], seed: int, period: int) -> tuple[np.ndarray, np.ndarray]:
    """For each sample in a period: its source, and the number of earlier samples from that source in the period."""
    source = np.repeat(np.arange(len(counts)), counts)[permutation(MIX_PERIOD, seed, period, ORDER)]
    before = np.empty_like(source)
    for i, number in enumerate(counts):
        before[source == i] = np.arange(number)
    return source, before


def mixed(data: DataConfig, found: dict[str, tuple[Path, Manifest]], **reading: Any) -> MixedTokens:
    """Samples mixed from the sources in `found`. `reading`: keyword arguments for PackedTokens."""
    sources = {name: PackedTokens(folder, ready, **reading) for name, (folder, ready) in found.items()}
    return MixedTokens(sources, counts(data), **reading)


def validation(data: DataConfig, samples: int, tokens: MixedTokens) -> torch.Tensor:
    """Held-out blocks, int64 [V, T + 1], in which every source has the same weight as in training. V is `samples`, or
    fewer if a source has too few blocks for its share; every source has at least one block."""
    there = [blocks(source.manifest.validation.tokens, tokens.sequence_length) for source in tokens.sources.values()]
    most = [found * MIX_PERIOD // count for found, count in zip(there, tokens.counts, strict=True)]
    shares = counts(data, min(samples, *most))
    return torch.cat([
        source.validation(max(1, share)) for source, share in zip(tokens.sources.values(), shares, strict=True)
    ])  # fmt: skip


def read(request: Request) -> dict[str, tuple[Path, Manifest]]:
    """The folder and manifest of each source. Raises DataError if a source is missing or cannot be used."""
    found, wrong = _examined(request)
    if wrong:
        raise DataError("; ".join(wrong))
    return found


def mistakes(request: Request) -> list[str]:
    """Error messages about the sources, as far as manifests and file sizes show them; empty if there are none."""
    return [] if mix_mistakes(request.data) else _examined(request)[1]  # sparsellm.config reports mix_mistakes


def _examined(request: Request) -> tuple[dict[str, tuple[Path, Manifest]], list[str]]:
    """The folder and manifest of each source that has a manifest, and error messages."""
    found: dict[str, tuple[Path, Manifest]] = {}
    wrong: list[str] = []
    for name, folder in folders(request.data).items():
        try:
            ready = manifest.read(folder)
        except DataError as error:
            wrong.append(str(error))
            continue
        if ready is None:
            begun = (folder / "progress.json").exists()
            how = "the preparation of its tokens has not finished" if begun else "there are no prepared tokens"
            wrong.append(f"data.mix, {name} in {folder}: {how}; run {_command(request, name, folder)}")
            continue
        found[name] = (folder, ready)
        wrong += manifest.size_mistakes(ready, folder) + _fit(request, name, folder, ready)
    if len({ready.tokenizer_hash for _, ready in found.values()}) > 1:
        each = ", ".join(f"{name} with {ready.tokenizer_hash[:8]}" for name, (_, ready) in found.items())
        wrong.append(
            f"data.mix: its sources were prepared with different tokenizers ({each}): prepare all of them with the same"
            " data.tokenizer"
        )
    return found, wrong


def _fit(request: Request, name: str, folder: Path, ready: Manifest) -> list[str]:
    """Error messages if the source has too few tokens for one sequence, or token ids outside the model's vocabulary."""
    length, rows = request.training.sequence_length, request.vocab_size
    splits, found = (ready.train, ready.validation), []
    if min(blocks(split.tokens, length) for split in splits) < 1:
        found.append(
            f"data.mix, {name} in {folder}: it holds {ready.train.tokens:,} training and {ready.validation.tokens:,}"
            f" held-out tokens, but a block of training.sequence_length {length} takes {length + 1:,} of each: give it"
            " more text (prepared with data.validation_fraction above 0), or leave it out"
        )
    if ready.vocab_size > rows:
        found.append(
            f"data.mix, {name} in {folder}: its tokenizer has {ready.vocab_size:,} ids, but model.vocab_size is"
            f" {rows:,}: choose a model with a larger vocabulary, or model.vocab_size={ready.vocab_size}"
        )
    return found


def _command(request: Request, name: str, folder: Path) -> str:
    """The command that prepares a source with as many tokens as the run reads from this source."""
    share = dict(zip(request.data.mix_names, counts(request.data), strict=True))[name] / MIX_PERIOD
    training = request.training
    tokens = int(share * training.steps * training.tokens_per_step) + training.sequence_length + 1
    known = name in choices("data")
    overrides = [f"data={name}"] if known else ["data=files", f"data.name={name}", "data.files=[...]"]
    overrides += [] if folder == Path("data", name) else [f"data.path={folder}"]
    overrides += [f"data.max_tokens={tokens}", f"training.sequence_length={training.sequence_length}"]
    return shlex.join(["python", "-m", "sparsellm.prepare_data", *overrides])
