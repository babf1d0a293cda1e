"""A feedforward block whose weights are stored once, in e4m3, for text generation on the CUDA kernels."""

from torch import Tensor, nn

from sparsellm.inference.engine_choice import EngineChoice
from sparsellm.inference.feedforward import SparseFeedForward
from sparsellm.ops.float8_weights import MAX_WIDTH, MULTIPLE, Float8Layer


class Float8FeedForward(nn.Module):
    """x bfloat16 [M, K] -> y [M, K], without gradients: EngineChoice.output_float8.

    Made from an accelerated block, whose weights it rounds and does not keep. Raises ValueError for a width that the
    kernels do not read in e4m3.
    """

    def __init__(self, block: SparseFeedForward) -> None:
        super().__init__()
        gate = block.get_parameter("gate_proj.weight") if block.gated else None
        up, down = (block.get_parameter(f"{name}_proj.weight") for name in ("up", "down"))
        if (width := up.shape[1]) % MULTIPLE or width > MAX_WIDTH:
            raise ValueError(
                f"the hidden size is {width}: for float8=True it should be a multiple of {MULTIPLE} up to"
                f" {MAX_WIDTH:,}, or kernels=None, which computes dense feedforward layers"
            )
        self.layer = Float8Layer.of(gate, up, down)
        self.choice = EngineChoice(None, block.choice.policy, copies=False, float8=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.choice.output_float8(x, self.layer)
