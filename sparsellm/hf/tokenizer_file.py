"""Loads tokenizers trained elsewhere: tries them in a separate process, and adapts them to training and prompts.

A damaged tokenizer.json may exhaust memory, hang, or kill the process that loads it: the tokenizers library does not
validate the file, and some of the library's errors are Rust panics. So the file is first tried in a separate process,
which runs this module.

Training and prompts need three guarantees:

- The same text always gives the same tokens: BPE dropout and Unigram sampling are switched off.
- A prompt ends with its own tokens, because generation continues from them: tokens that a post-processor appends, such
  as RoBERTa's </s>, are removed. Tokens that a post-processor prepends stay.
- No tokens are lost or added: truncation and padding are switched off.
"""

import json
import resource
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from sparsellm.system.errors import SparsellmError

LARGEST = 256 << 20  # bytes of a tokenizer.json; 260,000 tokens take 33 MB
# Limits of CPU time and memory for loading a tokenizer and encoding a few words. 260,000 tokens take 2 s and 0.5 GB.
SECONDS, MEMORY = 30, 4 << 30
WAITED = 10  # wall-clock limit as a multiple of SECONDS, because the processors may be busy
TEXT = "Why is water 42 times as wet?\n\n  Ein Fluß\t日本の川 🙂 <s> don't\r\n"
TOKENS_PER_CHARACTER = 100  # upper bound, for TEXT
# An otherwise empty tokenizer, through which the library parses a post-processor from JSON.
_EMPTY = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}


class BrokenTokenizer(SparsellmError, ValueError):
    """A tokenizer.json cannot be used. The message says why, but does not name the file."""


def plain() -> Tokenizer:
    """An untrained byte-level BPE, the form of every tokenizer that is trained here."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def load(path: Path) -> Tokenizer:
    """The tokenizer in the tokenizer.json at `path`. Raises BrokenTokenizer if it is broken, OSError if unreadable."""
    check(path)
    try:
        return Tokenizer.from_file(str(path))
    except BaseException as error:
        if not is_of_the_library(error):
            raise
        raise BrokenTokenizer(_reason(error)) from error


def check(path: Path) -> None:
    """Raises BrokenTokenizer if the tokenizer.json at `path` fails to load or encode, OSError if it is unreadable."""
    stat = path.stat()
    if stat.st_size > LARGEST:
        raise BrokenTokenizer(f"it has {stat.st_size:,} bytes: it should have at most {LARGEST:,}")
    if obstacle := _obstacle(path.resolve(), stat.st_mtime_ns, stat.st_size, stat.st_ino):
        raise BrokenTokenizer(obstacle)


def is_of_the_library(error: BaseException) -> bool:
    """Whether the tokenizers library raised `error`: a bare Exception, or a Rust panic, which is a BaseException."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


@lru_cache(maxsize=64)
def _obstacle(path: Path, *_state: int) -> str | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        return f"it is not JSON: {_reason(error)}"
    if not isinstance(content, dict):
        return f"it holds a JSON {type(content).__name__}: it should hold an object"
    if _form(content) == _form(json.loads(plain().to_str())):
        return None  # only the vocabulary differs, and for a wrong vocabulary the library raises exceptions
    tried = [sys.executable, "-P", __file__, str(path), str(SECONDS), str(MEMORY)]
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    try:
        done = subprocess.run(tried, **pipes, timeout=WAITED * SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"a short text takes longer than {WAITED * SECONDS} s"
    if done.returncode:
        return done.stdout.decode(errors="replace").strip() or (
            f"a short text takes more than {SECONDS} s or {MEMORY:,} bytes, or ends the process"
        )
    return None


def _form(content: dict[str, Any]) -> dict[str, Any]:
    """The tokenizer without its vocabulary."""
    model = content.get("model")
    words = ("vocab", "merges")
    form = {key: value for key, value in model.items() if key not in words} if isinstance(model, dict) else None
    return content | {"added_tokens": [], "model": form}


def _try(path: str) -> str | None:
    """What is wrong with the tokenizer in this file, found by using it; None if it works."""
    try:
        tokenizer = Tokenizer.from_file(path)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        ids = tokenizer.encode(TEXT).ids
        if len(ids) > TOKENS_PER_CHARACTER * len(TEXT):
            return f"it encodes {len(TEXT)} characters as {len(ids):,} tokens"
        if len(text := tokenizer.decode(ids)) > TOKENS_PER_CHARACTER * len(TEXT):
            return f"it decodes {len(ids)} tokens to {len(text):,} characters"
        settle(tokenizer)
    except BaseException as error:
        return _reason(error)
    return None


def _reason(error: BaseException) -> str:
    return f"{' '.join(str(error).split()) or type(error).__name__:.300}"


def settle(tokenizer: Tokenizer) -> list[str]:
    """Adapt `tokenizer` as described above, in place; returns a message for each change that a user might miss."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    model, post, changed = tokenizer.model, tokenizer.post_processor, []
    for setting in ("dropout", "alpha", "nbest_size"):  # dropout of a BPE, the others of a Unigram
        if value := getattr(model, setting, None):
            setattr(model, setting, None)
            changed.append(f"{setting} {value:g} is switched off, so that a text always gives the same tokens")
    if post is not None:
        held = json.loads(post.__getstate__())
        if (wanted := _open(held)) != held:
            read = Tokenizer.from_str(json.dumps(_EMPTY | {"post_processor": wanted}))
            tokenizer.post_processor = read.post_processor
            changed.append("its post-processor appends a special token to every prompt, which is left out")
    return changed


def settle_file(path: Path) -> None:
    """Apply `settle` to the tokenizer.json at `path`, in place; needed for data prepared before 0.1.0."""
    content = json.loads(path.read_text(encoding="utf-8"))
    post = content.get("post_processor")
    if content["model"].get("dropout") or (post is not None and _open(post) != post):
        tokenizer = Tokenizer.from_file(str(path))
        settle(tokenizer)
        path.write_text(tokenizer.to_str(pretty=True), encoding="utf-8")


def _open(post: dict[str, Any]) -> dict[str, Any]:
    """The post-processor `post`, as in tokenizer.json, without the special tokens that it appends."""
    kind = post["type"]
    if kind == "Sequence":
        return post | {"processors": [_open(each) for each in post["processors"]]}
    if kind in ("RobertaProcessing", "BertProcessing"):
        post = _template(post)
    for form in {"single", "pair"} & post.keys():
        ends = [i + 1 for i, piece in enumerate(post[form]) if "Sequence" in piece]
        post = post | {form: post[form][: max(ends, default=None)]}
    return post


def _template(post: dict[str, Any]) -> dict[str, Any]:
    """RoBERTa's and BERT's post-processors, rewritten as a template."""
    first, between = ({"SpecialToken": {"id": post[name][0], "type_id": 0}} for name in ("cls", "sep"))
    a, b = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    middle = [between] * (2 if post["type"] == "RobertaProcessing" else 1)
    tokens = {token: {"id": token, "ids": [number], "tokens": [token]} for token, number in (post["cls"], post["sep"])}
    return {
        "type": "TemplateProcessing",
        "single": [first, a, between],
        "pair": [first, a, *middle, b, between],
        "special_tokens": tokens,
    }


if __name__ == "__main__":
    seconds, memory = map(int, sys.argv[2:])
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if (wrong := _try(sys.argv[1])) is not None:
        print(wrong)
        sys.exit(1)
