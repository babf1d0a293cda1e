"""Time the engines on this GPU, so that the fastest are chosen.

Times each engine of a model's feedforward layers at 1 to 65,536 tokens (131,072 with the Triton kernels), forward and
backward, on random weights that are as sparse as trained ones. Tunes the block sizes of the Triton kernels first. The
fitted costs are cached for this GPU model, these kernels and this torch version, and from then on choose the engines of
such layers in train, evaluate, generate, benchmark and sparsellm.accelerate. Without cached costs, these commands
calibrate a layer themselves, without tuning block sizes, on a GPU that may be busy. A run stores the costs with which
it started in its checkpoints. Run one process, on an idle GPU.

Exit codes: 0 complete, 1 if the GPU is not supported or the cache cannot be written, 2 for a refused configuration.
"""

import torch

from sparsellm.config import LAYER, CalibrateConfig, ConfigError, entry_point, from_overrides
from sparsellm.ops import MAX_COLUMNS, MULTIPLE, backend
from sparsellm.ops.triton import tuning
from sparsellm.policy import block_sizes, measure, report, store
from sparsellm.policy.layer import Layer
from sparsellm.system.console import progress, warn


@entry_point("calibrate")
def main(config: CalibrateConfig) -> int:
    layers = dict.fromkeys(layer_of(name) for name in config.model)
    try:
        backend.load(config.kernels.name)
    except backend.KernelsUnavailable as error:
        warn(f"calibration is not possible here: {error}")
        return 1
    sizes, device, kernels = None, torch.device("cuda", torch.cuda.current_device()), backend.loaded() or "cuda"
    print(f"{torch.cuda.get_device_name()}, {backend.NAMES[kernels]}, torch {torch.__version__}")
    with store.measuring() as free:
        if not free:
            warn("another process is measuring this GPU model: try again when it has finished")
            return 1
        for width, neurons in layers:
            try:
                layer = Layer(width, neurons, measure.SIZES[kernels][-1], device, torch.bfloat16)
                if kernels == "triton" and sizes is None:
                    with progress("block sizes", len(block_sizes.LISTED), "kernel") as advance:
                        sizes = block_sizes.find(layer, advance=advance)
                    tuning.use(sizes, device)
                with progress(f"K {width:,}, N {neurons:,}", measure.steps(kernels), "step") as advance:
                    costs, times = measure.measure(kernels, layer, advance=advance)
                path = store.keep(costs, sizes)
            except (torch.OutOfMemoryError, OSError) as error:
                warn(f"K {width:,}, N {neurons:,} was not measured: {' '.join(str(error).split())}")
                return 1
            print(f"\nK {width:,}, N {neurons:,}: {report.text(report.choices(costs, times))}", flush=True)
    if sizes is not None:
        print(f"block sizes: {sizes}")
    print(f"saved in {path}")
    return 0


def layer_of(name: str) -> tuple[int, int]:
    """(K, N) for `name`, a choice of the group `model` or KxN like 2048x5632. Raises ConfigError if `name` is neither,
    or the engines do not support the size."""
    if typed := LAYER.fullmatch(name):
        width, neurons = int(typed[1]), int(typed[2])
    else:
        model = from_overrides([f"model={name}"]).model
        width, neurons = model.hidden_size, model.intermediate_size
    for size in (width, neurons):
        if size % MULTIPLE or size > MAX_COLUMNS:
            wanted = f"K and N should be multiples of {MULTIPLE} up to {MAX_COLUMNS}"
            raise ConfigError([f"model={name} has a dimension of {size}: {wanted}"])
    return width, neurons
