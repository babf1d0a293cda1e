"""Padding of accelerated Hugging Face models: tokens that the attention mask hides fire no neurons.

A batch of unequal prompts is padded on the left, and every layer computes the padding too. A padding token sees no
token, not even itself, so nothing depends on it; yet it would fire neurons, as the first token of a text does, which
fires many. The sparse engines would compute them, and layers would choose their engines from counts of padding.

So before a stack of layers begins, the embeddings of tokens that are hidden become zeros. They stay zeros through all
layers: norms and biasless products of zeros are zeros, and attention that sees nothing is zero (in PyTorch's
scaled_dot_product_attention, not in transformers' "eager" one, which then takes a mean). A row of zeros fires nothing,
so it costs a sparse engine nothing after the gate product, and adds nothing to any count. Other tokens keep every bit.

The host waits for nothing, and the number of rows stays, so a compiled model sees no new shape. Only calls without
gradients are changed, and calls of one token per sequence, as in decoding, are not: none of them is padding.
"""

from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn


def spare_padding(model: nn.Module) -> None:
    """Let each stack of layers inside `model` begin with zeros for padding. Stacks are recognised by what they are
    called with in transformers: `input_ids` with `attention_mask`, or `inputs_embeds`."""
    for module in model.modules():
        if "embed_tokens" in module._modules and "inputs_embeds" in signature(module.forward).parameters:
            module.register_forward_pre_hook(_with_zeros, with_kwargs=True)


def stop_sparing(model: nn.Module) -> None:
    """Undo `spare_padding`."""
    for module in model.modules():
        for key in [key for key, hook in module._forward_pre_hooks.items() if hook is _with_zeros]:
            del module._forward_pre_hooks[key], module._forward_pre_hooks_with_kwargs[key]


def _with_zeros(stack: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    """The arguments of `stack` with embeddings, zero where a token is hidden, in the place of token ids."""
    ids, mask = kwargs.get("input_ids"), kwargs.get("attention_mask")
    if ids is None or mask is None or ids.shape[1] == 1 or torch.is_grad_enabled():
        return None
    seen = _seen(mask, ids.shape[1])
    if seen is None:
        return None
    embedded = stack.embed_tokens(ids)  # type: ignore[operator]  # a module
    embedded = embedded.masked_fill(~seen[..., None].to(embedded.device), 0)
    return args, kwargs | {"input_ids": None, "inputs_embeds": embedded}


def _seen(mask: Tensor | dict[str, Tensor | None], length: int) -> Tensor | None:
    """bool [B or 1, T]: which of the last T tokens see any token; None if the mask does not say. Masks are [B, S] of
    zeros and ones, or bool [B or 1, 1, T, S] as made for a static cache, alone or by kinds of layers."""
    if isinstance(mask, dict):  # a hidden token sees nothing in any kind of layer, another one always itself
        first = next(iter(mask.values()), None)
        return None if first is None else _seen(first, length)
    if mask.dim() == 2:
        return mask[:, -length:].bool()
    return mask.any(-1)[:, 0] if mask.dtype == torch.bool else None
