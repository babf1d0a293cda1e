"""Padding in accelerated Hugging Face models: tokens hidden by the attention mask fire no neurons.

Prompts of unequal lengths are padded on the left, and every layer computes the padding too. A padding token attends to
nothing, not even itself, and no other token depends on it. But padding would fire many neurons, as the first token of a
sequence does: the sparse engines would compute these neurons, and layers would choose their engines from counts of
padding.

So the embeddings of hidden tokens are set to zero before the first layer. Norms and bias-free matmuls map zeros to
zeros. The attention output of a token that attends to nothing depends on the kernel: zeros on a CPU, a mean of all
values in some CUDA kernels. So each layer's attention output is set to zero for hidden tokens too. A row of zeros fires
no neuron, so the row costs a sparse engine nothing after the gate GEMM and adds to no count. Other tokens keep every
bit. Two kinds of padding still fire: float masks, as in transformers' "eager" attention, do not identify hidden tokens,
and padding on the right attends to the prompt.

The host never waits, and shapes stay the same for compiled models. Calls with gradients are not changed, nor are calls
of one token per sequence (decoding), which contain no padding.
"""

from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn


def spare_padding(model: nn.Module) -> None:
    """Make each stack of layers inside `model` start from zeros for padding. A stack is a module with `embed_tokens`
    whose forward takes `inputs_embeds`."""
    for module in model.modules():
        if "embed_tokens" in module._modules and "inputs_embeds" in signature(module.forward).parameters:
            module.register_forward_pre_hook(_with_zeros, with_kwargs=True)
            for layer in getattr(module, "layers", ()):
                if "self_attn" in layer._modules:
                    layer.self_attn.register_forward_hook(_giving_zeros, with_kwargs=True)


def stop_sparing(model: nn.Module) -> None:
    """Undo `spare_padding`."""
    for module in model.modules():
        for key in [key for key, hook in module._forward_pre_hooks.items() if hook is _with_zeros]:
            del module._forward_pre_hooks[key], module._forward_pre_hooks_with_kwargs[key]
        for key in [key for key, hook in module._forward_hooks.items() if hook is _giving_zeros]:
            del module._forward_hooks[key], module._forward_hooks_with_kwargs[key]


def _with_zeros(stack: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    """The arguments of `stack`, with token ids replaced by embeddings that are zero for masked tokens."""
    ids, embedded, mask = (kwargs.get(key) for key in ("input_ids", "inputs_embeds", "attention_mask"))
    given = embedded if ids is None else ids
    if given is None or mask is None or given.shape[1] == 1 or torch.is_grad_enabled():
        return None
    cache = kwargs.get("past_key_values")
    seen = _seen(mask, given.shape[1], 0 if cache is None else cache.get_seq_length())
    if seen is None:
        return None
    if embedded is None:
        embedded = stack.embed_tokens(ids)  # type: ignore[operator]  # a module
    embedded = embedded.masked_fill(~seen[..., None].to(embedded.device), 0)
    return args, kwargs | {"input_ids": None, "inputs_embeds": embedded}


def _giving_zeros(_attention: nn.Module, _args: tuple, kwargs: dict[str, Any], output: Any) -> tuple | None:
    """The output of a layer's attention, ([B, T, K], ...), with zeros for the tokens that attend to nothing according
    to the attention mask, bool [B or 1, 1, T, S]."""
    mask = kwargs.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.dim() != 4 or mask.shape[-2] == 1:
        return None
    if not isinstance(output, tuple) or torch.is_grad_enabled():
        return None
    y, *others = output
    return y.masked_fill(~mask.any(-1)[:, 0, :, None].to(y.device), 0), *others


def _seen(mask: Tensor | dict[str, Tensor | None], length: int, before: int | Tensor) -> Tensor | None:
    """bool [B or 1, T]: whether each of the T tokens of a call attends to any token; None if unknown. Masks are
    [B, S] of zeros and ones, or bool [B or 1, 1, T, S] as for a static cache, alone or in a dict by layer type.
    `before`: tokens in the cache; a static cache keeps their number on the device."""
    if isinstance(mask, dict):
        # One layer type is enough, because padding attends to no token in any layer.
        first = next(iter(mask.values()), None)
        return None if first is None else _seen(first, length, before)
    if mask.dim() == 2:
        # Column 0 is the first token of the cache. With a static cache, or a prompt computed in pieces, the mask may
        # have more columns than there are tokens so far; columns after the last token are hidden.
        before = before.to(mask.device) if isinstance(before, Tensor) else before
        columns = torch.arange(length, device=mask.device) + before
        return mask.bool()[:, columns.clamp(max=mask.shape[1] - 1)] & (columns < mask.shape[1])
    return mask.any(-1)[:, 0] if mask.dtype == torch.bool else None
