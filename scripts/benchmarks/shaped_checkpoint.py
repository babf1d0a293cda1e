"""Writes an untrained but sparse checkpoint and a text for it, to measure commands at any size and sparsity.

    python -m scripts.benchmarks.shaped_checkpoint OUT model=0p5b --mean 36 --locality 0.6
    sparsellm benchmark checkpoint=OUT/hf text=OUT/text.txt
    python -m scripts.benchmarks.shaped_checkpoint OUT model=0p5b --tokenizer FOLDER --text FILE

OUT/hf is a `transformers` model with ReLU whose neurons fire at chosen rates (shaped_models.py): at the recorded rates
with --activations, and scaled to average --mean. OUT/text.txt contains --sequences x --length random tokens, as words
of a tokenizer with one word per id. With --tokenizer and --text, the model has that tokenizer, fires at these rates on
the first 16,384 tokens of the text, and no text is written. `bench_train --firing` uses the same kind of weights and
tokens, so its results are comparable with those of `sparsellm benchmark`.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from scripts.benchmarks import patterns, shaped_models
from sparsellm.analysis import text
from sparsellm.config import ConfigError, from_overrides
from sparsellm.data import tokenizer as vocabularies
from sparsellm.hf import conversion

END = vocabularies.END_OF_TEXT  # id 0


def word_tokenizer(vocabulary: int) -> vocabularies.Vocabulary:
    """A tokenizer in which id i is the word "wi", except id 0, the end of text."""
    words = {END: 0} | {f"w{number}": number for number in range(1, vocabulary)}
    made = Tokenizer(WordLevel(words, unk_token="w1"))
    made.pre_tokenizer = WhitespaceSplit()
    made.add_special_tokens([END])
    return vocabularies.Vocabulary(made, END)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="a new folder")
    parser.add_argument("overrides", nargs="*", help="overrides of the model, as for `train`")
    patterns.add_activations(parser)
    parser.add_argument("--mean", type=float, help="nonzeros per token, averaged over layers")
    patterns.add_locality(parser)
    parser.add_argument("--sequences", type=int, default=64, help="number of sequences in OUT/text.txt")
    parser.add_argument("--length", type=int, default=2048, help="tokens per sequence")
    parser.add_argument("--tokenizer", type=Path, metavar="FOLDER", help="the model's tokenizer; needs --text")
    parser.add_argument("--text", type=Path, metavar="FILE", help="text on which neurons fire at the chosen rates")
    args = parser.parse_intermixed_args(arguments)
    if args.out.exists():
        parser.error(f"{args.out} exists: OUT should be a new folder")
    if (args.tokenizer is None) != (args.text is None):
        parser.error("--tokenizer and --text need each other")
    try:
        config = from_overrides(args.overrides)
        model = config.model
        rates = shaped_models.layer_rates(model.num_layers, model.intermediate_size, args.activations, args.mean)
    except (ConfigError, ValueError) as error:
        parser.error(str(error))
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def random_text(sequences: int, seed: int) -> torch.Tensor:
        tokens = shaped_models.random_text(sequences, args.length, model.vocab_size, device, args.locality, seed)
        return tokens.clamp_(min=1)  # id 0 is the end-of-text token

    sequences = -(-shaped_models.CALIBRATION // args.length)
    with tempfile.TemporaryDirectory() as folder:
        if args.tokenizer is None:
            vocabulary, sample = word_tokenizer(model.vocab_size), random_text(sequences, seed=1)
        else:
            from transformers import AutoTokenizer

            vocabulary = vocabularies.load(str(args.tokenizer))
            model.vocab_size = vocabularies.vocabulary_size(vocabulary)
            reader = AutoTokenizer.from_pretrained(args.tokenizer, trust_remote_code=False)
            sample = text.of_file(args.text, reader, sequences, args.length).to(device)
        vocabularies.save(vocabulary, Path(folder))
        decoder = shaped_models.shaped_decoder(config, sample, rates, args.locality)
        weights, end = decoder.state_dict(), vocabularies.end_of_text_id(vocabulary)
        args.out.mkdir(parents=True)
        conversion.export(
            weights, model, config.sparsity.activation, args.out / "hf", Path(folder), end, torch.bfloat16
        )
    if args.text is None:
        tokens = random_text(args.sequences, seed=2).tolist()
        words = (" ".join(f"w{token}" for token in sequence) for sequence in tokens)
        (args.out / "text.txt").write_text("\n".join(words))
    nonzeros, _ = shaped_models.firing_statistics(decoder, sample)
    print(f"{args.out / 'hf'}: {sum(nonzeros) / len(nonzeros):.1f} nonzeros per token")


if __name__ == "__main__":
    main()
