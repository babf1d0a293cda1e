"""What is in a folder of prepared tokens, whether it is whole, and whether it is what a configuration asks for.

    tokenizer/              loads with AutoTokenizer
    train.tokens            one stream of token ids, each document ended by the end-of-text token;
                            little-endian uint16, or uint32 for a vocabulary above 65,536
    train.documents         where each document starts in it; little-endian int64
    validation.tokens, validation.documents
    manifest.json           this file's `Manifest`; written last, so its presence means that the rest is complete
    progress.json           the same, without checksums, while preparation goes on
    lock                    held by the process that prepares

Block n of a stream is its tokens [n T, n T + T], so blocks overlap by one token and the files fit every length T.

Held out are whole documents, chosen by their content (corpus.is_held_out). Where these leave a split without a single
block, as with one text file, the manifest says `cut`: take the training documents, and after them the held-out ones, as
one stream; its last tokens are the validation split, the tokens before them the training split, and no token is in
both. The document that the cut goes through is counted in both splits.
"""

import json
import os
import platform
import re
import shlex
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

import xxhash
from tqdm import tqdm

from sparsellm.config import Config, DataConfig, Source
from sparsellm.data.errors import DataError

VERSION = 1  # of the layout above
SPLITS = ("train", "validation")
DOCUMENT_DTYPE = "<i8"


@dataclass
class Split:
    """Of one split; blocks and dropped tail at the sequence length that it was prepared for."""

    documents: int = 0
    tokens: int = 0
    blocks: int = 0
    dropped_tail: int = 0  # tokens after the last whole block


@dataclass
class Manifest:
    recipe: dict[str, Any]  # the configuration that decides the tokens: see `recipe`
    source_files: dict[str, int | None]  # in reading order; see corpus.Files
    tokenizer_hash: str  # sha256 of tokenizer/tokenizer.json
    vocab_size: int
    end_of_text_id: int
    sequence_length: int  # that was asked for when preparation began; decides whether the stream is cut, and where
    licence: str | None = None  # as the card of the hub data set names it
    licences: dict[str, int] = field(default_factory=dict)  # documents by the value of their licence column
    train: Split = field(default_factory=Split)
    validation: Split = field(default_factory=Split)
    empty_documents: int = 0  # read, and left out for having no text
    unparsable_modules: int = 0  # of the standard library
    tokenizer_characters: int | None = (
        None  # of the text that the tokenizer was trained on; None: it came from elsewhere
    )
    position: dict[str, int] = field(default_factory=lambda: {"file": 0, "document": 0})  # after the last document read
    exhausted: bool = False  # whether the source has no more documents
    cut: bool = False  # whether the end of the stream is held out, because the documents are too few
    # Whether this preparation adds to a finished folder. Runs may have trained on its tokens, so `sequence_length`
    # stays: then a cut moves only towards the end, and no token of theirs is held out later.
    extends: bool = False
    files: dict[str, dict[str, Any]] = field(default_factory=dict)  # name -> bytes, xxh3; empty until finished
    version: int = VERSION

    @property
    def token_dtype(self) -> str:
        return "<u2" if self.vocab_size <= 65_536 else "<u4"


def blocks(tokens: int, sequence_length: int) -> int:
    """How many blocks of sequence_length + 1 tokens, one starting every sequence_length, a stream holds."""
    return max(0, tokens - 1) // sequence_length


def token_limit(config: Config) -> int | None:
    """How many training tokens to prepare: data.max_tokens, or what the experiment reads.

    None is all: the default of the embedded corpus, which costs seconds.
    """
    if config.data.max_tokens is not None:
        return config.data.max_tokens
    if config.data.source == Source.stdlib_docs:
        return None
    training = config.training
    return training.steps * training.batch_size * training.sequence_length + 1


def is_enough(manifest: Manifest, limit: int | None) -> bool:
    return manifest.exhausted or (limit is not None and manifest.train.tokens >= limit)


def tokens_to_cut(manifest: Manifest) -> int:
    """How many tokens at the end of the stream to hold out, because whole documents leave a split without a block;
    0 where they do not. The share asked for, and at least one block."""
    length, (train, validation) = manifest.sequence_length, (manifest.train, manifest.validation)
    if min(blocks(train.tokens, length), blocks(validation.tokens, length)) > 0:
        return 0
    return max(length + 1, int(_fraction(manifest) * (train.tokens + validation.tokens)))


def longest_sequence(manifest: Manifest) -> int:
    """The largest sequence length at which a cut leaves both splits a block of these tokens; below 1 if none does."""
    total = manifest.train.tokens + manifest.validation.tokens
    return min(total // 2, total - int(_fraction(manifest) * total)) - 1


def _fraction(manifest: Manifest) -> float:
    return manifest.recipe["data.validation_fraction"]


def recipe(data: DataConfig) -> dict[str, Any]:
    """The keys that decide which tokens are prepared, and their values."""
    keys = {
        Source.stdlib_docs: ("tokenizer_vocab_size",),
        Source.hub: ("dataset", "subset", "split", "text_column", "tokenizer"),
        Source.files: ("files", "text_column", "tokenizer"),
    }[data.source]
    if data.source == Source.files and data.tokenizer is None:
        keys += ("tokenizer_vocab_size",)
    found = {"data.source": data.source.name, "data.validation_fraction": data.validation_fraction}
    found |= {f"data.{key}": getattr(data, key) for key in keys}
    if data.source == Source.stdlib_docs:
        found["the version of Python"] = platform.python_version()
    return found


def read(folder: Path, name: str = "manifest.json") -> Manifest | None:
    """The manifest in `folder`, or its progress.json; None if there is none. Raises DataError if it is damaged."""
    path = folder / name
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text())
        if values["version"] != VERSION:
            raise DataError(
                f"{path} has layout version {values['version']} and this sparsellm reads {VERSION}: {_again(folder)}"
            )
        splits = {split: Split(**values[split]) for split in SPLITS}
        return Manifest(**{**values, **splits})
    except (TypeError, KeyError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DataError(f"{path} is damaged ({type(error).__name__}: {error}): {_again(folder)}") from error


def write(manifest: Manifest, folder: Path, name: str) -> None:
    """Write `manifest` to `folder`, whole or not at all, and on disk when this returns."""
    path, partial = folder / name, folder / f"{name}.partial"
    with partial.open("w") as file:
        json.dump(asdict(manifest), file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checksums(folder: Path, names: list[str] | None = None) -> dict[str, dict[str, Any]]:
    """Bytes and xxh3 of every prepared file in `folder`, or of `names` there."""
    if names is None:
        names = [f"{split}.{kind}" for split in SPLITS for kind in ("tokens", "documents")]
        names += sorted(path.relative_to(folder).as_posix() for path in (folder / "tokenizer").iterdir())
    sizes = {name: (folder / name).stat().st_size for name in names}
    found = {}
    # The bar appears only where reading takes long: 1 GB takes a second or two.
    with tqdm(total=sum(sizes.values()), desc=f"checksums of {folder}", unit="B", unit_scale=True, delay=5) as bar:
        for name in names:
            digest = xxhash.xxh3_64()
            with (folder / name).open("rb") as file:
                while piece := file.read(1 << 24):
                    digest.update(piece)
                    bar.update(len(piece))
            found[name] = {"bytes": sizes[name], "xxh3": digest.hexdigest()}
    return found


def size_mistakes(manifest: Manifest, folder: Path) -> list[str]:
    """Every file of `manifest` that is missing from `folder` or has another size."""
    found = []
    for name, expected in manifest.files.items():
        path = folder / name
        if not path.is_file():
            found.append(f"{path} is missing: {_again(folder)}")
        elif path.stat().st_size != expected["bytes"]:
            found.append(
                f"{path} has {path.stat().st_size:,} bytes and {folder}/manifest.json says {expected['bytes']:,}:"
                f" {_again(folder)}"
            )
    return found


def verify(manifest: Manifest, folder: Path, names: list[str] | None = None) -> None:
    """Read every file of `manifest`, or `names`, and compare. Raises DataError naming what is missing or changed."""
    if names is not None:
        manifest = replace(manifest, files={name: manifest.files[name] for name in names})
    found = size_mistakes(manifest, folder)
    if not found:
        actual = checksums(folder, names)
        found = [
            f"{folder / name} is corrupt: its xxh3 is {actual[name]['xxh3'] if name in actual else 'unknown'}"
            f" and {folder}/manifest.json says {expected['xxh3']}: {_again(folder)}"
            for name, expected in manifest.files.items()
            if actual.get(name) != expected
        ]
    if found:
        raise DataError("; ".join(found))


def recipe_mistakes(manifest: Manifest, config: Config) -> list[str]:
    """What `manifest` was made with that `config` does not say."""
    made, asked = manifest.recipe, recipe(config.data)
    differences = [
        f"{key} was {made.get(key)!r} and is {asked.get(key)!r} now"
        for key in sorted(made.keys() | asked.keys())
        if made.get(key) != asked.get(key)
    ]
    if not differences:
        return []
    return [
        f"{config.data.path} was prepared from something else ({'; '.join(differences)}):"
        " set that back, choose another data.path, or delete the folder"
    ]


def block_mistakes(manifest: Manifest, config: Config) -> list[str]:
    """Whether a split of a finished folder is too small for a single block of `config`."""
    length, (train, validation) = config.training.sequence_length, (manifest.train, manifest.validation)
    if min(blocks(train.tokens, length), blocks(validation.tokens, length)) > 0:
        return []
    remedies = []
    if (fits := min(train.tokens, validation.tokens) - 1) >= 1:
        remedies.append(f"shorten training.sequence_length to {fits} at most")
    if not manifest.exhausted or length <= longest_sequence(manifest):
        remedies.append("prepare the text for this length in another folder, by another data.path")
    else:
        remedies.append("give more text, with another data.path")
    return [
        f"data.path={config.data.path} holds {train.tokens:,} training and {validation.tokens:,} held-out tokens, and a"
        f" block of training.sequence_length {length} takes {length + 1:,} of each: {', or '.join(remedies)}"
    ]


def vocabulary_mistakes(vocab_size: int, config: Config) -> list[str]:
    """Whether the tokenizer of `config` has ids that the model has no row for."""
    data, rows = config.data, config.model.vocab_size
    if vocab_size <= rows:
        return []
    if data.tokenizer is None:
        name = f"the tokenizer trained on the text (data.tokenizer_vocab_size={data.tokenizer_vocab_size})"
        remedy = f"lower data.tokenizer_vocab_size to {rows}"
    else:
        name = f"data.tokenizer {data.tokenizer!r}"
        remedy = "use a smaller tokenizer"
        if data.source == Source.files and not data.streaming:
            remedy = f"have one trained on the text (data.tokenizer=null data.tokenizer_vocab_size={rows})"
    return [
        f"{name} has {vocab_size:,} ids and model.vocab_size is {rows:,}: choose a model with a row for each (its"
        f" experiment=NAME, or model.vocab_size={vocab_size}), or {remedy}"
    ]


def preparation_command(config: Config) -> str:
    """The command line that prepares what `config` asks for, whatever choices it was composed from."""
    # data=files adds nothing to the defaults but its name and source, so what differs from the defaults says it all.
    default = DataConfig(name="files", source=Source.files)
    keys = ["name", "source", *(key.removeprefix("data.") for key in recipe(config.data) if key.startswith("data."))]
    keys = [key for key in dict.fromkeys(keys) if getattr(config.data, key) != getattr(default, key)]
    overrides = [_override(f"data.{key}", getattr(config.data, key)) for key in [*keys, "path"]]
    overrides.append(_override("data.max_tokens", token_limit(config)))
    # Of the model and the training, what preparation looks at: the command composes another experiment.
    overrides.append(_override("model.vocab_size", config.model.vocab_size))
    overrides.append(_override("training.sequence_length", config.training.sequence_length))
    return shlex.join(["python", "-m", "sparsellm.prepare_data", "data=files", *overrides])


def _override(key: str, value: Any) -> str:
    if isinstance(value, Enum):
        value = value.name
    if value is None:
        value = "null"
    elif isinstance(value, list) or (isinstance(value, str) and not re.fullmatch(r"[\w./-]+", value)):
        value = json.dumps(value, ensure_ascii=False)
    return f"{key}={value}"


def _again(folder: Path) -> str:
    return f"restore it, or delete {folder} and prepare again"
