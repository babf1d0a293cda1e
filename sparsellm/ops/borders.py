"""Token counts at which the engines change their algorithm.

These counts are properties of the kernels, identical on all GPUs, and operators need them at run time. The engine
itself is chosen at a higher level, from measured costs (sparsellm.policy). Letters: M tokens, N neurons.
"""

# FEW_TOKENS and MANY_TOKENS must equal kFewTokens and kManyTokens of the CUDA kernels (kernels/engines.h); this is
# checked when the library is loaded. Up to FEW_TOKENS, a call is bound by reading the weights. The tile engine needs at
# least MANY_TOKENS. For token counts in between, cuBLAS computes the gate GEMM.
FEW_TOKENS = 64
MANY_TOKENS = 1536
# Fewer tokens are not reordered, because ordering would take longer than it saves (LOG.md, "Ordering tokens by the
# neurons they fire").
MIN_ORDERED_TOKENS = 16_384
# A forward pass without backward saves less by ordering, so the Triton kernels order it only from
# ALONE * MIN_ORDERED_TOKENS tokens on (LOG.md, "bit by bit").
ALONE = 4
# For fewer tokens, cuBLAS with separate elementwise kernels is mostly faster than fused kernels; for more, it is mostly
# slower (LOG.md, "From how many tokens on the fused dense kernels pay").
MIN_FUSED_TOKENS = 1344
ALL_FIT = 1 << 22  # if M N is at most this, the tile engine's lists hold all activations, whatever the plan's room


def capacity(tokens: int, neurons: int, room: int) -> int:
    """How many nonzeros the tile engine's lists must hold: `room` per token; in a small call, all activations."""
    return tokens * (neurons if tokens * neurons <= ALL_FIT else min(room, neurons))


def orders(tokens: int) -> bool:
    """Whether the tile engine orders the tokens, so that tokens with the same active neurons share a tile."""
    return tokens >= MIN_ORDERED_TOKENS


def fuses(tokens: int) -> bool:
    """Whether the dense engine computes its elementwise operations inside the GEMM kernels."""
    return tokens >= MIN_FUSED_TOKENS
