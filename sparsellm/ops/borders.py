"""How the engines compute a call of some size: the numbers of tokens from which on they do it in another way.

    capacity   how many nonzeros the lists of the tile engine hold
    orders     whether the tile engine orders the tokens
    fuses      whether the dense engine fuses its elementwise half into the products

These are properties of the kernels, the same on every GPU, and an operator needs them when it runs. Which engine
computes a call is decided above, by measured costs (sparsellm.policy). Letters: M tokens, N neurons.
"""

# Of the CUDA kernels (kernels/engines.h: kFewTokens, kManyTokens); loading the library compares them. Up to FEW_TOKENS
# a call takes as long as reading the weights does. From MANY_TOKENS on the tile engine may compute; of fewer, but more
# than FEW_TOKENS, cuBLAS multiplies the gate.
FEW_TOKENS = 64
MANY_TOKENS = 1536
# Fewer tokens stay in their own order: ordering them would take longer than it saves (LOG.md, "Ordering tokens by the
# neurons they fire").
MIN_ORDERED_TOKENS = 16_384
ALONE = 4  # times as many, for a forward pass of the Triton kernels without a backward (LOG.md, "bit by bit")
# With fewer tokens, cuBLAS and elementwise kernels mostly take less time than fused kernels, with more tokens mostly
# more (LOG.md, "From how many tokens on the fused dense kernels pay").
MIN_FUSED_TOKENS = 1344
ALL_FIT = 1 << 22  # M N: in a call with no more activations, the lists hold all of them, whatever the plan's room is


def capacity(tokens: int, neurons: int, room: int) -> int:
    """How many nonzeros the lists of a call must hold: `room` per token; in a small call, all that there can be."""
    return tokens * (neurons if tokens * neurons <= ALL_FIT else min(room, neurons))


def orders(tokens: int) -> bool:
    """Whether the tile engine orders the tokens, so that those which fire the same neurons share a tile."""
    return tokens >= MIN_ORDERED_TOKENS


def fuses(tokens: int) -> bool:
    """Whether the dense engine's elementwise half is computed within the products' kernels, not in its own kernels."""
    return tokens >= MIN_FUSED_TOKENS
