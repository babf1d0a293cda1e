"""Tokenizers of others, wherever one is loaded: made to do what training and prompts need.

- The same text always gives the same tokens: BPE dropout and Unigram sampling are switched off.
- A prompt is gone on from, so nothing stands behind it: what a post-processor puts there, as RoBERTa's </s>, is taken
  away. What it puts in front stays.
- A text has all its tokens: truncation and padding are switched off.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

# A tokenizer that has nothing but a post-processor, with which the library reads one from JSON.
_EMPTY = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}


def settle(tokenizer: Tokenizer) -> list[str]:
    """Make `tokenizer` one as above; what of it was changed and could be missed, in words."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    model, post, changed = tokenizer.model, tokenizer.post_processor, []
    for setting in ("dropout", "alpha", "nbest_size"):  # of a BPE; of a Unigram
        if value := getattr(model, setting, None):
            setattr(model, setting, None)
            changed.append(f"{setting} {value:g} is switched off, so that a text always has the same tokens")
    if post is not None:
        held = json.loads(post.__getstate__())
        if (wanted := _open(held)) != held:
            read = Tokenizer.from_str(json.dumps(_EMPTY | {"post_processor": wanted}))
            tokenizer.post_processor = read.post_processor
            changed.append("its post-processor ends every prompt with a special token, which is left out")
    return changed


def settle_file(path: Path) -> None:
    """`settle` the tokenizer in the tokenizer.json `path`, as of a folder that an earlier version prepared."""
    content = json.loads(path.read_text(encoding="utf-8"))
    post = content.get("post_processor")
    if content["model"].get("dropout") or (post is not None and _open(post) != post):
        tokenizer = Tokenizer.from_file(str(path))
        settle(tokenizer)
        path.write_text(tokenizer.to_str(pretty=True), encoding="utf-8")


def _open(post: dict[str, Any]) -> dict[str, Any]:
    """The post-processor `post`, as tokenizer.json has it, without the special tokens that it puts behind a text."""
    kind = post["type"]
    if kind == "Sequence":
        return post | {"processors": [_open(each) for each in post["processors"]]}
    if kind in ("RobertaProcessing", "BertProcessing"):
        post = _template(post)
    return post | {form: _without_end(post[form]) for form in ("single", "pair") if form in post}


def _template(post: dict[str, Any]) -> dict[str, Any]:
    """What RoBERTa's and BERT's post-processors do to tokens, as a template."""
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


def _without_end(form: list[dict[str, Any]]) -> list[dict[str, Any]]:
    size = max((i + 1 for i, piece in enumerate(form) if "Sequence" in piece), default=len(form))
    return form[:size]
