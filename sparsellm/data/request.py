"""What a configuration requires of prepared tokens: how many, from which text, and the command that prepares them."""

import json
import platform
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from sparsellm.config import SHORTEST_SEQUENCE, Config, DataConfig, Source, TrainingConfig, composition
from sparsellm.data import corpus, tokenizer
from sparsellm.data.errors import DataError
from sparsellm.data.manifest import Manifest, blocks
from sparsellm.hf import hub


@dataclass(frozen=True)
class Request:
    """The tokens that a run needs. Methods named *_mistakes return error messages with remedies; empty if none."""

    data: DataConfig
    training: TrainingConfig
    vocab_size: int  # the model's vocabulary size
    init_from: str | None = None

    @classmethod
    def of(cls, config: Config) -> "Request":
        return cls(config.data, config.training, config.model.vocab_size, config.init_from)

    @property
    def token_limit(self) -> int | None:
        """The number of training tokens to prepare: data.max_tokens, or as many as the run reads.

        None means all: the default for the embedded corpus, which takes only seconds to prepare.
        """
        data, training = self.data, self.training
        if data.max_tokens is not None:
            return data.max_tokens
        if data.source == Source.stdlib_docs:
            return None
        return training.steps * training.tokens_per_step + 1

    @property
    def holds_nothing_out(self) -> bool:
        """Whether no text is held out, so that the run cannot be validated."""
        return self.data.validation_fraction == 0 and not self.data.mix

    @property
    def recipe(self) -> dict[str, Any]:
        """The configuration keys, and their values, that decide which tokens are prepared."""
        data = self.data
        keys: tuple[str, ...] = {
            Source.stdlib_docs: ("tokenizer_vocab_size",),
            Source.hub: ("dataset", "subset", "revision", "split", "text_column", "tokenizer"),
            Source.files: ("files", "text_column", "tokenizer"),
        }[data.source]
        if data.source == Source.files and data.tokenizer is None:
            keys += ("tokenizer_vocab_size",)
        found = {"data.source": data.source.name, "data.validation_fraction": data.validation_fraction}
        found |= {f"data.{key}": getattr(data, key) for key in keys}
        if data.source == Source.stdlib_docs:
            found["the version of Python"] = platform.python_version()
        return found

    @property
    def tokenizer_key(self) -> str:
        """The configuration key that names the tokenizer: init_from if data.tokenizer was derived from it."""
        own = self.init_from is not None and self.data.tokenizer == self.init_from
        return "init_from" if own else tokenizer.KEY

    def recipe_mistakes(self, manifest: Manifest, folder: Path | None = None) -> list[str]:
        """Error messages if the recipe in `manifest` (in `folder`, default data.path) differs from this request's."""
        made, asked = manifest.recipe, self.recipe
        differences = [
            f"{key} was {made.get(key)!r}, now it is {asked.get(key)!r}"
            for key in sorted(made.keys() | asked.keys())
            if made.get(key) != asked.get(key)
        ]
        if manifest.bad_records and not self.data.skip_bad_records:
            differences.append(
                f"data.skip_bad_records=true skipped {manifest.bad_records:,} unreadable records, now it is false"
            )
        if not differences:
            return []
        return [
            f"{folder or self.data.path} was prepared with other settings ({'; '.join(differences)}): restore them,"
            " choose another folder for this corpus (data.name=NAME means data/NAME, or data.path), or delete the"
            " folder"
        ]

    def block_mistakes(self, manifest: Manifest) -> list[str]:
        """Error messages if a finished folder has a split too small for even one block; empty if not."""
        length, shortest = self.training.sequence_length, min(split.tokens for split in manifest.splits_to_fill)
        if blocks(shortest, length) > 0:
            return []
        remedies = []
        if (fits := shortest - 1) >= SHORTEST_SEQUENCE:
            remedies.append(f"shorten training.sequence_length to at most {fits}")
        if not manifest.exhausted or length <= manifest.longest_sequence:
            remedies.append("prepare the text for this length in another data.path")
        else:
            remedies.append("give more text, with another data.path")
        return [
            f"data.path={self.data.path} holds {manifest.train.tokens:,} training and"
            f" {manifest.validation.tokens:,} held-out tokens, but a block of training.sequence_length {length} takes"
            f" {length + 1:,} of each: {', or '.join(remedies)}"
        ]

    def vocabulary_mistakes(self, vocab_size: int) -> list[str]:
        """Error messages if the tokenizer has ids outside the model's vocabulary."""
        data, rows = self.data, self.vocab_size
        if vocab_size <= rows:
            return []
        if data.tokenizer is None:
            name = f"the tokenizer trained on the text (data.tokenizer_vocab_size={data.tokenizer_vocab_size})"
            remedy = f"lower data.tokenizer_vocab_size to {rows}"
        else:
            name = f"the tokenizer of {self.tokenizer_key}={data.tokenizer}"
            remedy = "use a smaller tokenizer"
            if data.source == Source.files and not data.streaming:
                remedy = f"train one on the text (data.tokenizer=null data.tokenizer_vocab_size={rows})"
        if self.init_from is not None:
            return [
                f"{name} has {vocab_size:,} ids, but the model of init_from={self.init_from} has {rows:,}: they should"
                " belong together; your own texts use the model's tokenizer by default (data=files"
                " data.files=[PATTERN,...])"
            ]
        return [
            f"{name} has {vocab_size:,} ids, but model.vocab_size is {rows:,}: choose a model with a larger vocabulary"
            f" (its experiment=NAME, or model.vocab_size={vocab_size}), or {remedy}"
        ]

    def source_mistakes(self) -> list[str]:
        """Error messages if files are missing, or the tokenizer is missing, unreadable or too large for the model."""
        data = self.data
        found = corpus.local_files(data.files)[1] if data.source == Source.files else []
        if data.tokenizer is None:
            return found + self.vocabulary_mistakes(data.tokenizer_vocab_size)
        if hub.is_missing(data.tokenizer):
            found.append(f"{self.tokenizer_key}={data.tokenizer} does not exist: give a folder with tokenizer.json")
        elif Path(data.tokenizer).expanduser().exists():
            try:
                vocabulary = tokenizer.load(data.tokenizer, self.tokenizer_key)
            except DataError as error:
                return [*found, str(error)]
            found += self.vocabulary_mistakes(tokenizer.vocabulary_size(vocabulary))
        return found

    def changed_tokenizer_mistakes(self, manifest: Manifest) -> list[str]:
        """Error messages if a local tokenizer differs from the one with which the tokens were prepared."""
        name = self.data.tokenizer
        if name is None or manifest.recipe.get(tokenizer.KEY) != name or not Path(name).expanduser().exists():
            return []
        try:
            vocabulary = tokenizer.load(name, self.tokenizer_key)
        except DataError as error:
            return [str(error)]
        if manifest.tokenizer_hash in tokenizer.digests(vocabulary):
            return []
        return [
            f"the tokenizer of {self.tokenizer_key}={name} has changed since {self.data.path} was prepared:"
            " restore it, or choose another data.path and prepare again"
        ]

    def command(self, typed: Sequence[str] = ()) -> str:
        """The command that prepares these tokens.

        With `typed`, the overrides from which the configuration was composed, the command repeats only those that
        matter. Otherwise it contains every value that matters.
        """
        overrides = wanted = self._overrides()

        def prepares_it(texts: Sequence[str]) -> bool:
            composed = composition(list(texts))
            return not composed.mistakes and Request.of(composed.config)._overrides() == wanted

        if typed and prepares_it(typed):
            overrides = list(typed)
            for text in typed:
                if prepares_it(fewer := [each for each in overrides if each != text]):
                    overrides = fewer
        return shlex.join(["python", "-m", "sparsellm.prepare_data", *overrides])

    def _overrides(self) -> list[str]:
        """Overrides for every value that preparation uses."""
        # data=files only adds its name and source to the defaults, so the differences from the defaults are complete.
        data, default = self.data, DataConfig(name="files", source=Source.files)
        keys = ["name", "source", *(key.removeprefix("data.") for key in self.recipe if key.startswith("data."))]
        keys += ["skip_bad_records", "seed"]
        keys = [key for key in dict.fromkeys(keys) if getattr(data, key) != getattr(default, key)]
        overrides = [_override(f"data.{key}", getattr(data, key)) for key in [*keys, "path"]]
        overrides.append(_override("data.max_tokens", self.token_limit))
        # The command composes another experiment, so it needs the model and training values that preparation uses.
        overrides.append(_override("model.vocab_size", self.vocab_size))
        overrides.append(_override("training.sequence_length", self.training.sequence_length))
        return ["data=files", *overrides]


def _override(key: str, value: Any) -> str:
    if isinstance(value, Enum):
        value = value.name
    if value is None:
        value = "null"
    elif isinstance(value, list | bool) or (isinstance(value, str) and not re.fullmatch(r"[\w./-]+", value)):
        value = json.dumps(value, ensure_ascii=False)
    return f"{key}={value}"
