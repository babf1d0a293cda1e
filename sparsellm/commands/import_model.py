"""Convert a published sparse checkpoint to a stock Hugging Face model.

Converts a published sparse checkpoint (model_type llama_sparse_relu) to a LlamaForCausalLM, or to an ArceeForCausalLM
if it is not gated, with hidden_act relu and its tokenizer; transformers loads the folder as it is. Runs no code from
the checkpoint; every tensor must be present, finite and of the expected shape. The folder is written under a temporary
name and then renamed, so it is either complete or absent. Exit codes: 0 complete, 1 if the checkpoint cannot be read or
the folder cannot be written, 2 for a refused configuration.
"""

import shutil
from pathlib import Path
from typing import Any

from sparsellm.config import Dtype, ImportConfig, entry_point, import_mistakes
from sparsellm.hf import hub
from sparsellm.runs.locate import CheckpointNotFound, locate, not_found, unreadable
from sparsellm.system.console import warn


def _mistakes(config: ImportConfig, _typed: list[str]) -> list[str]:
    found = import_mistakes(config) + not_found(config.checkpoint)
    if not found and (partial := _partial(Path(str(config.output_dir)).expanduser())).exists():
        found.append(
            f"output_dir={config.output_dir}: {partial} exists, from an import that is running or was killed: wait for"
            " it, remove that folder, or give another output_dir"
        )
    return found


@entry_point("import_model", _mistakes)
def main(config: ImportConfig) -> int:
    import torch

    from sparsellm.hf import pretrained

    assert config.checkpoint is not None
    assert config.output_dir is not None
    checkpoint, output = locate(config.checkpoint), Path(config.output_dir).expanduser()
    dtype = "auto" if config.dtype == Dtype.auto else getattr(torch, config.dtype.name)
    try:
        with hub.offline(checkpoint.folder is not None or not hub.answers(f"checkpoint={checkpoint}")):
            checkpoint.identity()
            model = pretrained.read_model(checkpoint.model, dtype)
            tokenizer = pretrained.read_tokenizer(checkpoint.model, model.config.get_text_config().vocab_size)
            source = pretrained.data_folder(checkpoint.model)
    except (CheckpointNotFound, pretrained.BrokenModel, OSError) as error:
        warn(unreadable(checkpoint, error))
        return 1
    try:
        _write(model, tokenizer, source, output)
    except (pretrained.BrokenModel, OSError) as error:
        warn(f"output_dir={output} cannot be written: {' '.join(str(error).split())}")
        return 1
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"{output}: {type(model).__name__}, {count:,} parameters, {model.dtype}")
    return 0


def _partial(output: Path) -> Path:
    """The temporary folder that is written first, and then renamed to `output`."""
    return output.with_name(f"{output.name}.partial")


def _write(model: Any, tokenizer: Any, source: Path, output: Path) -> None:
    """Write the stock `model`, and the tokenizer from the folder `source`, to `output` atomically. Raises OSError if
    `output` cannot be written, and BrokenModel if, next to the stock config.json, transformers would load a tokenizer
    of another class than `tokenizer`."""
    from sparsellm.hf import pretrained

    partial = _partial(output)
    partial.mkdir(parents=True)
    try:
        model.save_pretrained(partial)
        for name in pretrained.COMPANIONS:
            if (source / name).is_file():
                shutil.copyfile(source / name, partial / name)
        written = pretrained.read_tokenizer(partial, model.config.get_text_config().vocab_size)
        if type(written) is not type(tokenizer):
            raise pretrained.BrokenModel(
                f"the tokenizer is a {type(tokenizer).__name__} with the checkpoint, but would be a"
                f" {type(written).__name__} with the stock model: set its class in tokenizer_config.json"
            )
        partial.rename(output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
