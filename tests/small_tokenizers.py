"""Small tokenizers in the forms of Llama 2, Mistral and Llama 3."""

import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SENTENCEPIECE = ["<unk>", "<s>", "</s>"]
LLAMA3 = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def template(token: str, number: int):
    return processors.TemplateProcessing(single=f"{token} $A", pair=f"{token} $A $B", special_tokens=[(token, number)])


def mistral(texts: list[str], size: int = 400) -> Tokenizer:
    """Its pre-tokenizer puts a mark in front of a text and turns spaces into marks, and makes one word of all."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()  # by words: no token goes across spaces
    letters = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=size - 1, special_tokens=SENTENCEPIECE + letters, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = content["added_tokens"][: len(SENTENCEPIECE)]  # bytes are tokens of the model alone
    content["model"]["vocab"]["▁▁"] = len(content["model"]["vocab"])
    content["model"]["merges"].insert(0, ["▁", "▁"])
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = template("<s>", 1)
    return tokenizer


def llama2(texts: list[str], size: int = 400) -> Tokenizer:
    """The same by its normalizer, without a pre-tokenizer."""
    content = json.loads(mistral(texts, size).to_str()) | {"pre_tokenizer": None}
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


def llama3(texts: list[str], size: int = 400) -> Tokenizer:
    """Byte-level BPE within words, with one token for the end of a text and another for the end of a turn."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(LLAMA3_WORDS), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=LLAMA3, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.Sequence(
        [processors.ByteLevel(trim_offsets=False), template("<|begin_of_text|>", 0)]
    )
    return tokenizer


def write(tokenizer: Tokenizer, folder: Path, eos: object, file: str = "tokenizer_config.json") -> Path:
    """The folder with tokenizer.json and `file`, which defines `eos` as eos_token."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / file).write_text(json.dumps({"eos_token": eos, "tokenizer_class": "LlamaTokenizer"}))
    return folder
