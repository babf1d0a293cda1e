"""Writes an untrained but sparse checkpoint and a text for it, to try commands at any size.

    python -m scripts.benchmarks.shaped_checkpoint OUT model=0p5b --mean 36 --locality 0.6
    sparsellm benchmark checkpoint=OUT/hf text=OUT/text.txt

OUT/hf is a `transformers` model with ReLU whose neurons fire at given rates (shaped_models.py; with --activations at
recorded rates, scaled to --mean if given). OUT/text.txt contains --sequences x --length random tokens, as words of a
tokenizer with one word per id. `bench_model` and `bench_train --firing` measure the same kind of weights and tokens, so
their results are comparable with those of `sparsellm benchmark`.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from scripts.benchmarks import patterns, shaped_models
from sparsellm.config import ConfigError, from_overrides
from sparsellm.data import tokenizer as vocabularies
from sparsellm.hf import conversion

END = vocabularies.END_OF_TEXT  # id 0


def word_tokenizer(vocabulary: int) -> Tokenizer:
    """A tokenizer in which id i is the word "wi", except id 0, the end of text."""
    words = {END: 0} | {f"w{number}": number for number in range(1, vocabulary)}
    made = Tokenizer(WordLevel(words, unk_token="w1"))
    made.pre_tokenizer = WhitespaceSplit()
    made.add_special_tokens([END])
    return made


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="a new folder")
    parser.add_argument("overrides", nargs="*", help="overrides of the model, as for `train`")
    patterns.add_activations(parser)
    parser.add_argument("--mean", type=float, help="nonzeros per token, averaged over layers")
    patterns.add_locality(parser)
    parser.add_argument("--sequences", type=int, default=64, help="of the text")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sequence")
    args = parser.parse_intermixed_args(arguments)
    if args.out.exists():
        parser.error(f"{args.out} exists: give a new folder")
    try:
        config = from_overrides(args.overrides)
        model = config.model
        rates = shaped_models.layer_rates(model.num_layers, model.intermediate_size, args.activations, args.mean)
    except (ConfigError, ValueError) as error:
        parser.error(str(error))
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def text(sequences: int, seed: int) -> torch.Tensor:
        tokens = shaped_models.random_text(sequences, args.length, model.vocab_size, device, args.locality, seed)
        return tokens.clamp_(min=1)  # id 0 ends a text

    sample = text(-(-shaped_models.CALIBRATION // args.length), seed=1)
    decoder = shaped_models.shaped_decoder(config, sample, rates, args.locality)
    args.out.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as folder:
        vocabulary = vocabularies.Vocabulary(word_tokenizer(model.vocab_size), END)
        vocabularies.save(vocabulary, Path(folder))
        weights, activation = decoder.state_dict(), config.sparsity.activation
        conversion.export(weights, model, activation, args.out / "hf", Path(folder), 0, torch.bfloat16)
    words = (" ".join(f"w{token}" for token in sequence) for sequence in text(args.sequences, seed=2).tolist())
    (args.out / "text.txt").write_text("\n".join(words))
    nonzeros, _ = shaped_models.firing_statistics(decoder, sample)
    print(f"{args.out / 'hf'}: {sum(nonzeros) / len(nonzeros):.1f} nonzeros per token; {args.out / 'text.txt'}")


if __name__ == "__main__":
    main()
