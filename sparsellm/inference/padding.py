"""Padding of accelerated Hugging Face models: tokens that the attention mask hides fire no neurons.

A batch of unequal prompts is padded on the left, and every layer computes the padding too. A padding token sees no
token, not even itself, so nothing depends on it; yet it would fire neurons, as the first token of a text does, which
fires many. The sparse engines would compute them, and layers would choose their engines from counts of padding.

So before a stack of layers begins, the embeddings of tokens that are hidden become zeros. They stay zeros through all
layers, if attention gives them zeros: norms and biasless products of zeros are zeros. What attention gives a token that
sees nothing depends on its kernel: zeros on a CPU, a mean of all values in some of CUDA's. So what each layer's
attention gives such tokens becomes zeros, too. A row of zeros fires nothing, so it costs a sparse engine nothing after
the gate product, and adds nothing to any count. Other tokens keep every bit. Masks of floats, as transformers' "eager"
attention takes, do not say so, and there padding fires. So does padding on the right, which sees the text.

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
    """The arguments of `stack` with embeddings, zero where a token is hidden, in the place of token ids."""
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
    """The output of a layer's attention, [B, T, K] and others, with zeros for tokens that see nothing, by its mask,
    bool [B or 1, 1, T, S]."""
    mask = kwargs.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.dim() != 4 or mask.shape[-2] == 1:
        return None
    if not isinstance(output, tuple) or torch.is_grad_enabled():
        return None
    y, *others = output
    return y.masked_fill(~mask.any(-1)[:, 0, :, None].to(y.device), 0), *others


def _seen(mask: Tensor | dict[str, Tensor | None], length: int, before: int | Tensor) -> Tensor | None:
    """bool [B or 1, T]: which of the T tokens of a call see any token; None if the mask does not say. Masks are [B, S]
    of zeros and ones, or bool [B or 1, 1, T, S] as made for a static cache, alone or by kinds of layers. `before`:
    tokens that the cache holds; a static one keeps their number on the device."""
    if isinstance(mask, dict):  # a hidden token sees nothing in any kind of layer, another one always itself
        first = next(iter(mask.values()), None)
        return None if first is None else _seen(first, length, before)
    if mask.dim() == 2:
        # Columns count from the first token of the cache. There may be more of them than tokens so far, as for a static
        # cache's room or for a prompt that is computed in pieces; what lies behind the last one is hidden.
        before = before.to(mask.device) if isinstance(before, Tensor) else before
        columns = torch.arange(length, device=mask.device) + before
        return mask.bool()[:, columns.clamp(max=mask.shape[1] - 1)] & (columns < mask.shape[1])
    return mask.any(-1)[:, 0] if mask.dtype == torch.bool else None
