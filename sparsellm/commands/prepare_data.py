"""Tokenize documents to disk.

Takes the keys of train, and prepares the tokens that a training run reads. Repeat the command to resume after a kill.
It does nothing if all tokens exist, and appends the missing ones if more are requested.
"""

import signal
import sys

from sparsellm.config import Config, ConfigError, entry_point
from sparsellm.data import DataError, Manifest, Request, mistakes, prepare
from sparsellm.data.errors import ProcessesFailed
from sparsellm.data.manifest import LEAST_FRACTION, blocks
from sparsellm.system.console import quantity
from sparsellm.training import warm_start
from sparsellm.training.run import check_preparation


@entry_point("prepare_data", check_preparation, warm_start.adopt)
def main(config: Config) -> int:
    request = Request.of(config)
    print(f"Preparing {_amount(request)} in {request.data.path}.", flush=True)
    try:
        manifest = prepare(request)
    except KeyboardInterrupt:
        print("\nsparsellm: stopped; run the same command to continue from the prepared tokens", file=sys.stderr)
        return 128 + signal.SIGINT
    except ProcessesFailed:
        raise
    except DataError as error:
        raise ConfigError([str(error)]) from error
    if found := mistakes(request, config.run):  # errors that training would report
        raise ConfigError(found)
    print(_summary(manifest, request))
    return 0


def _amount(request: Request) -> str:
    limit, training = request.token_limit, request.training
    if limit is None:
        return "the whole corpus"
    if request.data.max_tokens is not None:
        return f"{limit:,} training tokens (data.max_tokens)"
    return (
        f"the {limit:,} training tokens that the experiment reads ({quantity(training.steps, 'step')} x"
        f" {quantity(training.batch_size, 'sequence')} x {training.sequence_length:,} tokens, plus 1 to predict)"
    )


def _summary(manifest: Manifest, request: Request) -> str:
    length, tokenizer = request.training.sequence_length, f"its tokenizer has {manifest.vocab_size:,} ids"
    if manifest.tokenizer_characters is not None:
        tokenizer += f", trained on {manifest.tokenizer_characters:,} characters of the text"
    lines = [f"{request.data.path} is ready; {tokenizer}."]
    for name, split in (("train", manifest.train), ("validation", manifest.validation)):
        if name == "validation" and request.holds_nothing_out:
            lines.append("  validation: nothing is held out (data.validation_fraction=0), so runs are not validated")
            continue
        count = blocks(split.tokens, length)
        rest = split.tokens - 1 - count * length
        lines.append(
            f"  {name}: {split.tokens:,} tokens of {quantity(split.documents, 'document')},"
            f" {quantity(count, 'block')} of {length:,} and {quantity(rest, 'token')} after the last one"
        )
    if manifest.taken:
        lines.append(
            f"  text: a share by size of {quantity(len(manifest.source_files), 'file')}, of which"
            f" {sum(each['documents'] > 0 for each in manifest.taken.values()):,} gave documents"
        )
    if manifest.cut:
        least = f"{manifest.least_blocks} blocks, or {LEAST_FRACTION:.0%} of a short text"
        share = f"data.validation_fraction={request.data.validation_fraction} of it, and at least"
        lines.append(
            f"  too few documents to hold out whole ones: the last {manifest.validation.tokens:,} tokens of the text"
            f" are held out ({share} {'one block' if manifest.least_blocks == 1 else least})"
        )
    if manifest.empty_documents:
        lines.append(f"  skipped: {quantity(manifest.empty_documents, 'document')} without text")
    if manifest.bad_records:
        lines.append(f"  skipped: {quantity(manifest.bad_records, 'bad record')}")
    if manifest.empty_files:
        lines.append(f"  skipped: {quantity(manifest.empty_files, 'file')} without documents")
    if manifest.unparsable_modules:
        lines.append(f"  skipped: {quantity(manifest.unparsable_modules, 'module')} that cannot be parsed")
    if (limit := request.token_limit) is not None and manifest.train.tokens < limit:
        lines.append(f"  the source is exhausted: training on {limit:,} tokens will repeat it")
    return "\n".join(lines)
