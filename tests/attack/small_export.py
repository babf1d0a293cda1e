"""A tiny exported model in an hf/ folder, and ways to damage a copy of it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from sparsellm.config import Activation, ModelConfig
from sparsellm.data import tokenizer
from sparsellm.hf import conversion
from sparsellm.model import Decoder

VOCABULARY = 280
CONFIG = ModelConfig(
    vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_layers=1, num_heads=2, context_length=64,
    init_std=0.2,
)  # fmt: skip
Damage = Callable[[Path], object]


def write_export(folder: Path) -> Path:
    torch.manual_seed(0)
    words = tokenizer.train(["why water stone bird fish tree"] * 20, VOCABULARY)
    tokenizer.save(words, folder / "tokenizer")
    weights = Decoder(CONFIG, Activation.relu).state_dict()
    conversion.export(weights, CONFIG, Activation.relu, folder / "hf", folder / "tokenizer", 0)
    return folder / "hf"


def damaged(whole: Path, folder: Path, damage: Damage) -> Path:
    """A copy of `whole` in `folder`, damaged."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole, folder)
    damage(folder)
    return folder


def keys(name: str, **changes: object) -> Damage:
    """Other values of some keys of the JSON file `name`."""
    return lambda folder: (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | changes))


def content(name: str, data: bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(data)


def cut(name: str, at: float) -> Damage:
    """Only the first part of the file `name`."""
    return lambda folder: (folder / name).write_bytes(
        (folder / name).read_bytes()[: int(at * (folder / name).stat().st_size)]
    )


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    def damage(folder: Path) -> None:
        found = load_file(folder / "model.safetensors")
        change(found)
        save_file(found, folder / "model.safetensors", metadata={"format": "pt"})

    return damage


def sharded(change: Callable[[dict], object] = lambda _: None, lost: bool = False) -> Damage:
    """The weights in two files, with an index that `change` changed; `lost`: without the second file."""

    def damage(folder: Path) -> None:
        found = load_file(folder / "model.safetensors")
        names = sorted(found)
        index = {}
        for number, part in enumerate((names[:4], names[4:]), 1):
            file = f"model-0000{number}-of-00002.safetensors"
            save_file({name: found[name] for name in part}, folder / file, metadata={"format": "pt"})
            index |= dict.fromkeys(part, file)
        change(index)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
        (folder / "model.safetensors").unlink()
        if lost:
            (folder / "model-00002-of-00002.safetensors").unlink()

    return damage
