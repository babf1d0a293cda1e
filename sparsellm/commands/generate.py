"""Generate text with a checkpoint.

Streams the text. Without prompt=TEXT, every line of standard input is a prompt: all are continued in one batch, and
the output has a line of JSON per prompt, {"prompt": ..., "text": ...}. Runs as one process, on a CPU or a GPU, where
the feedforward layers run on the sparse kernels. Exit codes: 0 complete, 1 if the checkpoint cannot be read, 2 for a
refused configuration.
"""

import json
import sys
import time
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from sparsellm.config import Dtype, GenerateConfig, Kernels, entry_point, generate_mistakes
from sparsellm.distributed.groups import device_type
from sparsellm.hf import hub
from sparsellm.runs.locate import Checkpoint, CheckpointNotFound, locate, not_found, unreadable
from sparsellm.system.console import quantity, warn

if TYPE_CHECKING:  # deferred: these imports take seconds
    import torch

    from sparsellm.inference.generation import Generator, Sampling

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # the result of decoding an incomplete sequence of byte tokens


@entry_point("generate", lambda config, _typed: generate_mistakes(config) + not_found(config.checkpoint))
def main(config: GenerateConfig) -> int:
    import torch

    from sparsellm.hf.pretrained import BrokenModel
    from sparsellm.inference.generation import Sampling
    from sparsellm.ops.build import KernelsUnavailable

    assert config.checkpoint is not None
    checkpoint = locate(config.checkpoint)
    try:
        prompts: list[str] = _lines() if config.prompt is None else [config.prompt]
        "".join(prompts).encode()  # raises if bytes that are not UTF-8 were decoded to surrogates
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        where = "standard input" if config.prompt is None else "prompt"
        first = error.object[error.start]  # a byte, or the surrogate \udc80 to \udcff to which one was decoded
        byte = first if isinstance(first, int) else ord(first) & 0xFF
        warn(f"{where} is not UTF-8: it has the byte {byte:#04x}; convert it, for example with iconv")
        return 2
    if not prompts:
        warn("standard input contains no prompt: give one per line, or use prompt=TEXT")
        return 2
    dtype = None if config.dtype == Dtype.auto else getattr(torch, config.dtype.name)
    try:
        generator = _load(checkpoint, device_type(config.device.name), dtype, config.kernels, config.float8)
    except (CheckpointNotFound, BrokenModel, OSError) as error:
        warn(unreadable(checkpoint, error))
        return 1
    except (KernelsUnavailable, ValueError) as error:
        warn(str(error))
        return 1
    write = _write_one if config.prompt is not None else _write_all
    try:
        write(generator, prompts, config.tokens, Sampling(config.temperature, config.top_p), config.seed)
    except ValueError as error:
        warn(str(error))
        return 1
    return 0


def _lines() -> list[str]:
    """The non-empty lines from standard input; [] if standard input is closed."""
    if sys.stdin is None:
        return []
    if sys.stdin.isatty():
        warn("reading prompts from standard input, one per line, until Ctrl-D")
    return [line for line in map(str.strip, sys.stdin) if line]


def _load(
    checkpoint: Checkpoint, device: str, dtype: "torch.dtype | None", kernels: Kernels, float8: bool
) -> "Generator":
    from sparsellm.inference.generation import Generator
    from sparsellm.ops import backend
    from sparsellm.runs import precision

    with hub.offline(checkpoint.folder is not None or not hub.answers(f"checkpoint={checkpoint}")):
        checkpoint.identity()
        obstacle = precision.obstacle(kernels, device)
        on_cpu = device == "cpu" and kernels == Kernels.auto  # the line from `computation` says so
        asked = None if on_cpu else kernels.name
        generator = Generator.load(checkpoint.model, device, dtype, kernels=asked, float8=float8)
    why = precision.default_on(device) if dtype is None else f"dtype={precision.dtype_name(dtype)}"
    if obstacle is None and not generator.is_accelerated:
        obstacle = backend.available()[1] or "they compute ReLU gates"
    warn(precision.computation(generator.dtype, why, obstacle))
    return generator


def _write_one(generator: "Generator", prompts: list[str], new_tokens: int, sampling: "Sampling", seed: int) -> None:
    """Write the prompt and stream the continuation."""
    prompt, ids = generator.tokenizer(prompts[0]).input_ids, list[int]()
    shown, times = 0, [time.perf_counter()]  # characters written; times of the start and of each token
    stream = generator.stream([prompt], new_tokens, sampling, seed)
    print(prompts[0], end="", flush=True)
    for (token,) in stream:
        times.append(time.perf_counter())
        if token is None or token in generator.stop:
            break
        ids.append(token)
        text = generator.continuation(prompt, ids).rstrip(UNFINISHED)
        print(text[shown:], end="", flush=True)
        shown = max(shown, len(text))  # byte tokens may shorten `text` until a character is complete
    print(generator.continuation(prompt, ids)[shown:], flush=True)
    told = (
        f"sparsellm: prompt of {quantity(len(prompt), 'token')} in {times[1] - times[0]:.2f} s (setup included), then"
    )
    told += f" {quantity(len(ids), 'token')}"
    if len(times) > 2:
        # The median ignores the steps in which kernels are loaded and CUDA graphs are captured.
        seconds = median(after - before for before, after in pairwise(times[1:]))
        told += f" at {1e3 * seconds:.2f} ms per token (median), {1 / seconds:,.0f} tokens/s"
    print(told, file=sys.stderr)


def _write_all(generator: "Generator", prompts: list[str], new_tokens: int, sampling: "Sampling", seed: int) -> None:
    """Write one line of JSON per prompt, once all continuations are complete."""
    for prompt, text in zip(prompts, generator.text(prompts, new_tokens, sampling, seed), strict=True):
        print(json.dumps({"prompt": prompt, "text": text}, ensure_ascii=False), flush=True)
