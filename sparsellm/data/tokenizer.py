"""The tokenizer: from the hub, from a local folder, or trained here; saved in a folder that AutoTokenizer loads.

Tokens depend only on `tokenizer.json`. Loading the folder through the class in its `tokenizer_config.json` can change
them: transformers 5 builds a GPT2Tokenizer from vocabulary and merges, and loses how SmolLM2 splits digits. The other
files only provide the tokens that begin and end a document.
"""

import hashlib
import json
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, pre_tokenizers, trainers

from sparsellm.data import pieces
from sparsellm.data.errors import DataError
from sparsellm.hf import hub, tokenizer_file
from sparsellm.runs.layout import CHECKPOINTS, HF
from sparsellm.system.files import read_json, write_whole

KEY = "data.tokenizer"
END_OF_TEXT = "<|endoftext|>"  # follows every document if the tokenizer has it
_FILE, _CONFIG = "tokenizer.json", "tokenizer_config.json"
_ROLES = (_CONFIG, "special_tokens_map.json")  # files that may define eos_token; the first one that does is used


@dataclass(frozen=True)
class Vocabulary:
    tokenizer: Tokenizer
    end_of_text: str  # the token that follows every document: END_OF_TEXT, otherwise eos_token
    begin_of_text: str | None = None  # the token that precedes every document and every prompt
    found: str | None = None  # the original content of tokenizer.json, if `tokenizer` was changed on loading
    changes: tuple[str, ...] = ()  # descriptions of the changes


def load(name: str, key: str = KEY) -> Vocabulary:
    """Load the tokenizer from a local folder, a tokenizer.json, a run or checkpoint, or a hub repository. `key`: the
    configuration key whose value is `name`, for messages. Raises DataError if the tokenizer cannot be loaded."""
    path = Path(name).expanduser()
    given = f"{key}={name}" if key == KEY else f"the tokenizer of {key}={name}"  # for messages
    here = path.exists()
    what = (
        "cannot be loaded" if here else "is not a local folder, and no tokenizer of that name can be read from the hub"
    )
    try:
        if here:
            file = _file_in(path) if path.is_dir() else path
            if not file.is_file():
                raise DataError(
                    f"{given} is missing: the folder has no {_FILE}. Copy that file into it, or let transformers write"
                    " one (AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER))"
                )
            vocabulary = _vocabulary(file, given, file.parent.joinpath)
        else:
            from huggingface_hub import hf_hub_download

            with hub.offline(not hub.answers(f"{key}={name}")):
                vocabulary = _vocabulary(Path(hf_hub_download(name, _FILE)), given, partial(_on_the_hub, name, given))
    except DataError:
        raise
    except Exception as error:  # from the tokenizers library, which raises bare Exception, or the hub
        raise DataError(
            f"{given} {what} ({' '.join(str(error).split())}): give a folder with {_FILE} or the name of a repository"
            " on the hub"
        ) from error
    return _ours(vocabulary)


def _ours(vocabulary: Vocabulary) -> Vocabulary:
    """`vocabulary` after `settle`, with its begin- and end-of-text tokens marked as special, so that a document that
    spells one out is encoded as ordinary text."""
    tokenizer = vocabulary.tokenizer
    found, changes = tokenizer.to_str(pretty=True), tokenizer_file.settle(tokenizer)
    for token in filter(None, (vocabulary.end_of_text, vocabulary.begin_of_text)):
        added = next((each for each in tokenizer.get_added_tokens_decoder().values() if each.content == token), None)
        if added is not None and not added.special:
            flags = {name: getattr(added, name) for name in ("single_word", "lstrip", "rstrip", "normalized")}
            tokenizer.add_special_tokens([AddedToken(token, **flags, special=True)])
            changes.append(f"{token} is now a special token, so that a text that spells it out does not end there")
    return replace(vocabulary, found=found, changes=tuple(changes)) if changes else vocabulary


def _file_in(folder: Path) -> Path:
    """The path of tokenizer.json in a folder, a checkpoint, or a run (all checkpoints of a run have the same)."""
    found = (folder / _FILE, folder / HF / _FILE, *sorted((folder / CHECKPOINTS).glob(f"step_*/{HF}/{_FILE}")))
    return next(filter(Path.is_file, found), folder / _FILE)


def _vocabulary(file: Path, given: str, find: Callable[[str], Path]) -> Vocabulary:
    """The tokenizer in `file`, with its begin- and end-of-text tokens. `given`: how messages refer to the tokenizer.
    `find` returns the paths of other files in the same folder. Raises DataError if the file is damaged."""
    try:
        tokenizer = tokenizer_file.load(file)
    except tokenizer_file.BrokenTokenizer as error:
        raise DataError(
            f"{given} cannot be loaded because {file} is damaged: {error}; restore an intact copy"
        ) from error
    # Drop settings, meant for other uses, that would silently truncate or pad documents.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    end = END_OF_TEXT if tokenizer.token_to_id(END_OF_TEXT) is not None else _end_of_text(tokenizer, given, find)
    encoding = tokenizer.encode("a")
    special = takewhile(lambda each: each[1], zip(encoding.tokens, encoding.special_tokens_mask, strict=True))
    begin = [token for token, _ in special]
    # A begin-of-text token that equals the end-of-text token is not used. If tokenizer_config.json names another
    # bos_token, only prompts begin with that token, so documents get none.
    if len(begin) != 1 or begin == [end] or _named("bos_token", [find(_CONFIG)])[1] not in (None, *begin):
        return Vocabulary(tokenizer, end)
    return Vocabulary(tokenizer, end, begin[0])


def _end_of_text(tokenizer: Tokenizer, given: str, find: Callable[[str], Path]) -> str:
    path, token = _named("eos_token", map(find, _ROLES))
    if token is None:
        raise DataError(
            f"{given} has no {END_OF_TEXT}, and neither {' nor '.join(_ROLES)} in its folder defines the eos_token that"
            f' should end every document: in {_CONFIG}, set "eos_token" to a token of {_FILE}'
        )
    if not isinstance(token, str) or tokenizer.token_to_id(token) is None:
        raise DataError(
            f"{path} defines eos_token as {token!r}, which ends every document of {given}, but {_FILE} has no such"
            " token: define one that it has"
        )
    return token


def _named(role: str, files: Iterable[Path]) -> tuple[Path | None, Any]:
    """The first of `files` that defines a token for `role`, and the token; (None, None) if none does. Raises DataError
    if a file is damaged."""
    for path in filter(Path.is_file, files):
        found = read_json(path, DataError, "restore it").get(role)
        token = found.get("content") if isinstance(found, dict) else found  # a string or an AddedToken
        if token is not None:
            return path, token
    return None, None


def _on_the_hub(name: str, given: str, file: str) -> Path:
    """The local copy of a file in a hub repository; a nonexistent path if the repository has no such file. Raises
    DataError if the hub cannot be reached."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError, RemoteEntryNotFoundError

    try:
        return Path(hf_hub_download(name, file))
    except RemoteEntryNotFoundError:
        return Path(name, file)
    except LocalEntryNotFoundError as error:
        raise DataError(
            f"{given}: its {file}, which defines the tokens that begin and end a text, is not cached on this machine:"
            f" connect it once, or give a folder with {_FILE} and {_CONFIG}"
        ) from error


def train(texts: Iterable[str], vocab_size: int) -> Vocabulary:
    """A byte-level BPE tokenizer trained on `texts`, with END_OF_TEXT as id 0. Training is deterministic."""
    tokenizer = tokenizer_file.plain()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return Vocabulary(tokenizer, END_OF_TEXT)


def save(vocabulary: Vocabulary, folder: Path) -> str:
    """Write `vocabulary` to `folder`, for `load` and AutoTokenizer, and return its `digest`."""
    folder.mkdir(parents=True, exist_ok=True)
    content = serialized(vocabulary)
    # PreTrainedTokenizerFast only wraps tokenizer.json, and has the same name in transformers 4 and 5.
    end = vocabulary.end_of_text
    roles = {"bos_token": vocabulary.begin_of_text or end, "eos_token": end, "pad_token": end}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **roles}
    for name, text in ((_FILE, content), (_CONFIG, json.dumps(config, indent=2) + "\n")):
        write_whole(folder / name, text)
    return digest(vocabulary)


def serialized(vocabulary: Vocabulary) -> str:
    """The content of tokenizer.json, as `save` writes it."""
    return vocabulary.tokenizer.to_str(pretty=True)


def digest(vocabulary: Vocabulary, content: bytes | None = None) -> str:
    """A sha256 of everything that determines how documents are tokenized: tokenizer.json, the end-of-text token if it
    is not END_OF_TEXT, and the begin-of-text token if there is one. `content`: content of tokenizer.json; default: as
    `save` writes it."""
    content = serialized(vocabulary).encode() if content is None else content
    own = b"" if vocabulary.end_of_text == END_OF_TEXT else f"\n{vocabulary.end_of_text}".encode()
    begin = b"" if vocabulary.begin_of_text is None else f"\nbegins with {vocabulary.begin_of_text}".encode()
    return hashlib.sha256(content + own + begin).hexdigest()


def digests(vocabulary: Vocabulary) -> set[str]:
    """The digests that tokens may have: `digest`, and if prepared before 0.1.0, that of the unchanged tokenizer."""
    contents = [None] if vocabulary.found is None else [None, vocabulary.found.encode()]
    return {digest(vocabulary, content) for content in contents}


def vocabulary_size(vocabulary: Vocabulary) -> int:
    """The largest id, including added tokens, plus one."""
    return max(vocabulary.tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def end_of_text_id(vocabulary: Vocabulary) -> int:
    found = vocabulary.tokenizer.token_to_id(vocabulary.end_of_text)
    assert found is not None  # `load` refuses tokenizers without one, and `train` always adds one
    return found


def special_ids(vocabulary: Vocabulary) -> set[int]:
    """The ids of special tokens, none of which `encode` produces inside a document."""
    return {number for number, token in vocabulary.tokenizer.get_added_tokens_decoder().items() if token.special}


def begin_of_text_id(vocabulary: Vocabulary) -> int | None:
    begin = vocabulary.begin_of_text
    return None if begin is None else vocabulary.tokenizer.token_to_id(begin)


def form(vocabulary: Vocabulary) -> str:
    """How a document is tokenized, for messages: "<s> TEXT </s>"."""
    begin = "" if vocabulary.begin_of_text is None else f"{vocabulary.begin_of_text} "
    return f"{begin}TEXT {vocabulary.end_of_text}"


def say_form(vocabulary: Vocabulary, given: str) -> None:
    """Print each change made to the tokenizer, and the form of documents unless it is the default (only END_OF_TEXT at
    the end). `given`: the setting KEY=NAME that names the tokenizer."""
    for change in vocabulary.changes:
        print(f"{given}: {change}.", flush=True)
    if form(vocabulary) != f"TEXT {END_OF_TEXT}":
        print(f"{given}: every document becomes {form(vocabulary)}.", flush=True)


def encode(vocabulary: Vocabulary, texts: list[str]) -> "list[array[int]]":
    """The token ids of each document in `texts`, with the end-of-text token at the end and, if there is one (Llama's
    <s>), the begin-of-text token at the start. Documents are encoded in parallel.

    If a document spells out a special token, this is encoded as ordinary text, so it does not end the document.
    """
    tokenizer, end, begin = vocabulary.tokenizer, end_of_text_id(vocabulary), begin_of_text_id(vocabulary)
    tokenizer.encode_special_tokens = True
    # uint32, because for a long document Python integers would take ten times the memory of its text.
    documents = [array("I", () if begin is None else (begin,)) for _ in texts]
    # A model may itself produce a special token for text that spells it out, for example a Unigram model with the token
    # in its vocabulary.
    around = [each for each in (end, begin) if each is not None]
    reached = [each for each in around if each in _made(tokenizer, str(tokenizer.id_to_token(each)))]
    for batch in pieces.batches(tokenizer, texts):
        try:
            encodings = tokenizer.encode_batch_fast([piece for _, piece in batch], add_special_tokens=False)
        except BaseException as error:
            if not tokenizer_file.is_of_the_library(error):
                raise
            raise DataError(
                f"the tokenizer fails on some text ({' '.join(str(error).split())}): use another data.tokenizer"
            ) from error
        for (number, _), encoding in zip(batch, encodings, strict=True):
            ids = encoding.ids
            for special in reached:
                if special in ids:
                    ids = [part for each in ids for part in (_spelled(tokenizer, each) if each == special else [each])]
            documents[number].extend(ids)
    for document in documents:
        document.append(end)
    return documents


def _spelled(tokenizer: Tokenizer, special: int) -> list[int]:
    """Ordinary tokens that spell out the `special` token, in two parts. Raises DataError if there are none."""
    text = str(tokenizer.id_to_token(special))
    for middle in range(1, len(text)):
        first, second = _made(tokenizer, text[:middle]), _made(tokenizer, text[middle:])
        if first and second and special not in first + second:
            return first + second
    raise DataError(
        f"a text spells out {text}, which this tokenizer cannot encode as plain text: remove it from the text"
    )


def _made(tokenizer: Tokenizer, text: str) -> list[int]:
    """The model's tokens for a word; [] if the model cannot encode it, for example because it has no unknown token."""
    try:
        return [token.id for token in tokenizer.model.tokenize(text)]
    except Exception:  # the library raises bare Exception
        return []
