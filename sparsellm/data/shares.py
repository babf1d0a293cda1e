"""Decides how much preparation reads from each file: a share of the requested tokens, in proportion to the file's size.

Preparation goes through the files in passes. Each pass has a goal: the number of training tokens to reach. Each file
has a target: the number to reach after this file, which is the sum of the shares of the files so far. So documents
longer than a share cause no drift, and a file whose target has been reached already is not opened. The last file is
read until the goal is reached. If that file ends earlier, another pass divides the rest among the files with text left.

Within a file, documents come from shuffled blocks (rows.py). A later pass, for example in an extension, continues each
file where the previous pass stopped: no document is used twice, and tokens are only appended.

The reader is ahead of the tokenizing processes, whose number must not change the result. So the reader compares targets
with an estimate: the characters read, times the tokens per character in a sample of the same file.
"""

from collections.abc import Iterator
from itertools import accumulate, chain, islice
from typing import NamedTuple

from sparsellm.data import corpus, tokenizer
from sparsellm.data.corpus import Document
from sparsellm.data.manifest import Manifest
from sparsellm.data.tokenizer import Vocabulary

# Sample for estimating a file's tokens per character: its first documents, and the first characters of each.
SAMPLE_DOCUMENTS, SAMPLE_TEXT = 32, 20_000
# Further files are sampled while all samples together have at most this many tokens, plus this fraction of those read.
FREE_SAMPLES, SAMPLED_FRACTION = 50_000, 0.02


class Estimate(NamedTuple):
    """The reader's running token estimate after a document; saved with the document's position."""

    tokens: float  # estimated number of training tokens
    ratio: float = 0.0  # tokens per character in the current file
    sampled: int = 0  # tokens in all of this pass's samples
    characters: int = 0  # characters in all of this pass's samples


def begin_pass(manifest: Manifest, limit: int) -> int:
    """Begin a pass unless one is under way. Returns the pass's goal: an earlier goal not reached yet, or `limit`."""
    unreached = [goal for goal in manifest.goals if not manifest.is_enough(goal)]
    if not unreached:
        manifest.goals.append(limit)
        unreached = [limit]
    if next(reversed(manifest.targets.values()), None) != unreached[0]:  # no targets, or targets of an earlier goal
        start, used = manifest.tokens_left, used_up(manifest)
        sizes = {file: size or 1 for file, size in manifest.source_files.items() if file not in used}
        sums, total = accumulate(sizes.values()), sum(sizes.values())
        manifest.targets = {
            file: start + (unreached[0] - start) * so_far // total for file, so_far in zip(sizes, sums, strict=True)
        }
        manifest.position, manifest.begun = {**corpus.START, "estimate": [*Estimate(start)]}, None
    return unreached[0]


def used_up(manifest: Manifest) -> set[str]:
    """The files that have no text left."""
    return {file for file, taken in manifest.taken.items() if taken["all"]}


def finish(manifest: Manifest) -> None:
    """End a finished preparation's pass. If fewer tokens were requested than the pass would yield, the pass stays open,
    and an extension continues it."""
    if manifest.is_enough(manifest.goals[-1]):
        manifest.targets, manifest.position = {}, dict(corpus.START)
    elif left := [file for file, target in manifest.targets.items() if target > manifest.train.tokens]:
        print(
            f"sparsellm: this preparation was started for {manifest.goals[-1]:,} tokens, but fewer are requested now:"
            f" {len(left):,} of {len(manifest.source_files):,} files contribute less than their share",
            flush=True,
        )


def documents(
    manifest: Manifest, vocabulary: Vocabulary, text_column: str, skip_bad_records: bool
) -> Iterator[Document]:
    """The current pass's documents from `manifest.position` on. After a file's last document comes a Document with
    `end` set. Without targets, yields all documents in order.
    """
    files, position, targets = list(manifest.source_files), manifest.position, manifest.targets
    estimate, held_out = Estimate(*position.get("estimate", (0,))), manifest.validation_fraction
    last = next(reversed(targets), None)
    for index in range(position["file"], len(files)):
        file, resumed = files[index], index == position["file"] and position["document"] > 0
        target = targets.get(file, 0) if targets and file != last else float("inf")
        if estimate.tokens >= target:
            continue
        skip = position["document"] if resumed else manifest.taken.get(file, {"documents": 0})["documents"]
        found = corpus.documents(file, index, text_column, skip_bad_records, manifest.seed, skip)
        if targets and not resumed:
            found, estimate = _sampled(found, estimate, vocabulary)
        number = skip
        for document in found:
            number = document.number + 1
            tokens = estimate.tokens + estimate.ratio * len(document.text or "") * (1 - held_out)
            estimate = estimate._replace(tokens=tokens)
            yield document._replace(estimate=estimate) if targets else document
            if tokens >= target:
                break
        else:
            yield Document(None, None, index, number, end=True, estimate=estimate if targets else None)


def _sampled(
    found: Iterator[Document], estimate: Estimate, vocabulary: Vocabulary
) -> tuple[Iterator[Document], Estimate]:
    """The documents `found` in a file, and `estimate` updated with the file's tokens per character."""
    head: list[Document] = []
    tokens = characters = 0
    if estimate.sampled <= FREE_SAMPLES + SAMPLED_FRACTION * estimate.tokens:
        head = list(islice(found, SAMPLE_DOCUMENTS))
        texts = [document.text[:SAMPLE_TEXT] for document in head if document.text]
        tokens, characters = sum(map(len, tokenizer.encode(vocabulary, texts))), sum(map(len, texts))
    sampled, of_all = estimate.sampled + tokens, estimate.characters + characters
    ratio = tokens / characters if characters else (sampled or 1) / (of_all or 4)
    return chain(head, found), Estimate(estimate.tokens, ratio, sampled, of_all)
