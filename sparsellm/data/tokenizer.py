"""The tokenizer: from the hub, from a local folder, or trained here; and kept in a folder that AutoTokenizer loads.

The tokens of a text are those of `tokenizer.json` alone. Loading the folder through the class that its
`tokenizer_config.json` names can change them: transformers 5 builds a GPT2Tokenizer from vocabulary and merges, and
loses how SmolLM2 splits digits. From the files beside it comes only which token ends a text.
"""

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from sparsellm import hub
from sparsellm.data import pieces
from sparsellm.data.errors import DataError
from sparsellm.files import read_json, write_whole
from sparsellm.run_layout import CHECKPOINTS, HF

END_OF_TEXT = "<|endoftext|>"  # follows every document, where a tokenizer has it
_FILE, _CONFIG = "tokenizer.json", "tokenizer_config.json"
_ROLES = (_CONFIG, "special_tokens_map.json")  # one of these names the eos_token; the first that does so counts


@dataclass(frozen=True)
class Vocabulary:
    tokenizer: Tokenizer
    end_of_text: str  # the token of it that follows every document: END_OF_TEXT, or else its own eos_token


def load(name: str) -> Vocabulary:
    """The tokenizer of a local folder, of the tokenizer.json in it, of a run or its checkpoint, or of a hub repository.
    Raises DataError."""
    path = Path(name).expanduser()
    here = path.exists()
    try:
        if here:
            file = _file_in(path) if path.is_dir() else path
            tokenizer = Tokenizer.from_file(str(file))
            end_of_text = _end_of_text(tokenizer, name, file.parent.joinpath)
        else:
            with hub.offline(not hub.answers(f"data.tokenizer={name}")):
                tokenizer = Tokenizer.from_pretrained(name)
                end_of_text = _end_of_text(tokenizer, name, partial(_on_the_hub, name))
    except DataError:
        raise
    except Exception as error:  # the library raises a bare Exception for a file that it cannot parse
        what = "cannot be loaded" if here else "is no folder here, and no tokenizer of that name is read from the hub"
        raise DataError(
            f"data.tokenizer={name} {what} ({' '.join(str(error).split())}): give a folder with {_FILE}, which needs no"
            " network, or the name of a repository on the hub"
        ) from error
    # Settings of other uses, which would cut or pad documents without a word.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return Vocabulary(tokenizer, end_of_text)


def _file_in(folder: Path) -> Path:
    """The tokenizer.json of a folder, of a checkpoint, or of a run, whose checkpoints all have the same."""
    found = (folder / _FILE, folder / HF / _FILE, *sorted((folder / CHECKPOINTS).glob(f"step_*/{HF}/{_FILE}")))
    return next(filter(Path.is_file, found), folder / _FILE)


def _end_of_text(tokenizer: Tokenizer, name: str, find: Callable[[str], Path]) -> str:
    """END_OF_TEXT, or the eos_token that the files beside tokenizer.json name; `find` gives their paths. Raises
    DataError."""
    if tokenizer.token_to_id(END_OF_TEXT) is not None:
        return END_OF_TEXT
    for path in filter(Path.is_file, map(find, _ROLES)):
        role = read_json(path, DataError, "restore it").get("eos_token")
        token = role.get("content") if isinstance(role, dict) else role  # as a string, or as an AddedToken
        if token is None:
            continue
        if not isinstance(token, str) or tokenizer.token_to_id(token) is None:
            raise DataError(
                f"{path} names {token!r} as eos_token, which ends every document of data.tokenizer={name}, and it is no"
                f" token of {_FILE}: name one that is"
            )
        return token
    raise DataError(
        f"data.tokenizer {name!r} has no {END_OF_TEXT}, and neither {' nor '.join(_ROLES)} beside its {_FILE} names an"
        f' eos_token, one of which ends every document: name a token of {_FILE} in {_CONFIG} ("eos_token": "TOKEN")'
    )


def _on_the_hub(name: str, file: str) -> Path:
    """The hub's copy on this machine of a file of a repository; a path with nothing there if it has no such file.
    Raises DataError if the hub cannot be asked."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError, RemoteEntryNotFoundError

    try:
        return Path(hf_hub_download(name, file))
    except RemoteEntryNotFoundError:
        return Path(name, file)
    except LocalEntryNotFoundError as error:
        raise DataError(
            f"data.tokenizer={name} has no {END_OF_TEXT}, and its {file}, which names the token that ends a text, is"
            f" not among the hub's copies on this machine: connect it once, or give a folder with {_FILE} and {_CONFIG}"
        ) from error


def is_missing(name: str) -> bool:
    """Whether `name` can only be a local path (the hub's names are OWNER/NAME), and nothing is there."""
    looks_local = name.startswith((".", "/", "~")) or name.endswith(".json") or name.count("/") > 1
    return looks_local and not Path(name).expanduser().exists()


def train(texts: Iterable[str], vocab_size: int) -> Vocabulary:
    """A byte-level BPE with END_OF_TEXT as id 0. The same texts give the same tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return Vocabulary(tokenizer, END_OF_TEXT)


def save(vocabulary: Vocabulary, folder: Path) -> str:
    """Write `vocabulary` to `folder` as `load` and AutoTokenizer load it, and return its `digest`."""
    folder.mkdir(parents=True, exist_ok=True)
    content = serialized(vocabulary)
    # A class that only wraps tokenizer.json; transformers 4 and 5 both know it by this name.
    roles = {role: vocabulary.end_of_text for role in ("bos_token", "eos_token", "pad_token")}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **roles}
    for name, text in ((_FILE, content), (_CONFIG, json.dumps(config, indent=2) + "\n")):
        write_whole(folder / name, text)
    return digest(vocabulary)


def serialized(vocabulary: Vocabulary) -> str:
    """The tokenizer.json that `save` writes: what decides the tokens of a text."""
    return vocabulary.tokenizer.to_str(pretty=True)


def digest(vocabulary: Vocabulary, content: bytes | None = None) -> str:
    """What decides the tokens of documents: sha256 of tokenizer.json, and of the token at their end if it is not
    END_OF_TEXT. `content`: of that file, if not the one that `save` would write."""
    content = serialized(vocabulary).encode() if content is None else content
    own = b"" if vocabulary.end_of_text == END_OF_TEXT else f"\n{vocabulary.end_of_text}".encode()
    return hashlib.sha256(content + own).hexdigest()


def vocabulary_size(vocabulary: Vocabulary) -> int:
    """One more than the largest id, added tokens included."""
    return max(vocabulary.tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def end_of_text_id(vocabulary: Vocabulary) -> int:
    found = vocabulary.tokenizer.token_to_id(vocabulary.end_of_text)
    assert found is not None  # `load` has refused a tokenizer without one, and `train` gives each one
    return found


def say_what_ends_documents(vocabulary: Vocabulary, name: str) -> None:
    """One line, unless it is END_OF_TEXT."""
    if vocabulary.end_of_text != END_OF_TEXT:
        end = f"{vocabulary.end_of_text} (id {end_of_text_id(vocabulary)})"
        print(f"data.tokenizer={name}: every document ends with {end}, its eos_token.", flush=True)


def encode(vocabulary: Vocabulary, texts: list[str]) -> list[list[int]]:
    """The ids of each document, the end of text behind them; documents in parallel.

    A special token that is spelled out in a text is text: only the end of a document ends it. What the tokenizer puts
    in front of a prompt or behind it, as Llama's, is not in a document.
    """
    tokenizer, end = vocabulary.tokenizer, end_of_text_id(vocabulary)
    tokenizer.encode_special_tokens = True
    documents: list[list[int]] = [[] for _ in texts]
    for batch in pieces.batches(tokenizer, texts):
        encodings = tokenizer.encode_batch_fast([piece for _, piece in batch], add_special_tokens=False)
        for (number, _), encoding in zip(batch, encodings, strict=True):
            documents[number] += encoding.ids
    for document in documents:
        document.append(end)
    return documents
