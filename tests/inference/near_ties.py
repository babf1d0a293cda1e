"""Greedy texts of two implementations of the same model may diverge only at a near-tie.

Two paths that compute in bfloat16 round differently, so their logits differ. A near-tie is a position at which float32
finds both chosen tokens within reach of that rounding from the likeliest one. Let e be the largest difference between
logits of the dense bfloat16 model and of float32, over the text up to there. The dense path then chooses a token whose
float32 logit is below the largest by at most 2 e; and the other path, which may have twice the dense one's error
(DESIGN §5), by at most 4 e. A path that computes anything else soon chooses a token that is further below.
"""

import copy

import torch
from torch import nn

REACH = 4  # of the dense path's largest error


def exact(model: nn.Module) -> nn.Module:
    """A copy in float32, of the same weights."""
    return copy.deepcopy(model).float()


def assert_texts_part_at_near_ties(
    dense: nn.Module, prompts: list[list[int]], theirs: list[list[int]], ours: list[list[int]], agreeing: float = 0.5
) -> None:
    """theirs, ours: the greedy tokens of each prompt by the path `dense`, a Hugging Face model in bfloat16, and by
    another one. At least the share `agreeing` of all tokens must come before texts part."""
    reference, agreed = exact(dense), 0
    for prompt, expected, found in zip(prompts, theirs, ours, strict=True):
        pairs = list(zip(expected, found, strict=True))
        parting = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        agreed += parting
        if parting == len(pairs):
            continue
        ids = torch.tensor([prompt + expected[:parting]], device=dense.device)
        with torch.no_grad():
            logits, rounded = reference(ids).logits[0], dense(ids).logits[0].float()
        error = (logits - rounded).abs().max().item()
        for path, token in (("dense", expected[parting]), ("other", found[parting])):
            below = (logits[-1].max() - logits[-1, token]).item()
            assert below <= REACH * error, (
                f"after {ids.shape[1]} tokens the {path} path chooses token {token}, whose logit is {below:.4f} below"
                f" the largest: no near-tie, for the dense model's error is {error:.4f}"
            )
    total = sum(map(len, theirs))
    assert agreed >= agreeing * total, f"only {agreed} of {total} tokens come before the texts part"
