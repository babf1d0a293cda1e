"""FP8 products of plain linear layers, by the optional package torchao. Weights stay nn.Parameters of the same names.

Numerics: values are rounded to 8 bits (e4m3: 4 bits of exponent, 3 of mantissa; gradients of the tensorwise recipe:
e5m2) after division by a scale, which is the largest magnitude of a tensor or of one of its rows. Products are
accumulated in float32 and rounded once to the dtype of the input.
"""

from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from sparsellm.ops.float8_gate import SMALLEST
from sparsellm.system.packages import needed_by

MULTIPLE = 16  # both dimensions of a weight must be multiples of this for torch._scaled_mm
CAPABILITY = (8, 9)  # Ada, the first generation whose tensor cores multiply FP8


def missing() -> str | None:
    """A sentence if torchao is not installed, else None."""
    if find_spec("torchao") is None:
        return "the package torchao is not installed: install it with `pip install torchao`"
    return None


def obstacle() -> str | None:
    """Why torchao cannot compute FP8 products here; None if it can."""
    if (package := missing()) is not None:
        return package
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    if torch.cuda.get_device_capability() < CAPABILITY:
        return f"{torch.cuda.get_device_name()} has no FP8, which needs compute capability 8.9 or higher"
    return None


def train_linears(module: nn.Module, recipe: str) -> None:
    """Make the nn.Linear modules inside `module` compute forward and backward in FP8, in place, with the same weights.

    recipe: "tensorwise" or "rowwise", what shares a scale.
    """
    with needed_by("FP8 training"):
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    convert_to_float8_training(module, config=Float8LinearConfig.from_recipe_name(recipe))


def quantize_linears(module: nn.Module) -> None:
    """Replace the weights of the nn.Linear modules inside `module` with FP8 weights that have a scale per row. Inputs
    are rounded to FP8 in each call, with a scale per token. The original weight tensors are not changed.

    torchao leaves weights in bfloat16 whose sizes are no multiples of MULTIPLE, so callers check the sizes.
    """
    linears = [each for each in module.modules() if isinstance(each, nn.Linear)]
    zeros = {linear: ~linear.weight.any(dim=1) for linear in linears}
    with needed_by("FP8 inference"):
        from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow, quantize_
    # Without a lower bound, torchao divides a token of zeros, such as padding, by its scale of 0, which gives NaN. By
    # default, it also changes inductor's settings for the whole process.
    config = Float8DynamicActivationFloat8WeightConfig(
        granularity=PerRow(), activation_value_lb=SMALLEST, set_inductor_config=False
    )
    quantize_(module, config)
    for linear, rows in zeros.items():
        if rows.any():  # the same division, of a row of the weight
            weight: Any = linear.weight  # a Float8Tensor of torchao
            weight.qdata.view(torch.uint8)[rows] = 0
