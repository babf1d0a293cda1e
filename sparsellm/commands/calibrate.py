"""python -m sparsellm.calibrate model=NAME [key=value] : time the engines here, and choose by that from then on.

Each engine of a model's feedforward layers is timed at 1 to 65,536 tokens, forward and backward too, on random weights
that fire as trained ones do; of the Triton kernels, the fastest block sizes are found first. What is fitted to the
times goes into the cache beside the kernels, for this GPU model, these kernels and this version of torch. From then on
it chooses the engines of such layers, in training, evaluate, generate, benchmark and sparsellm.accelerate; without it,
constants that were measured on an H200 do. A run keeps what it began with, in its checkpoints. One process, on an idle
GPU. Exit codes: 0 complete, 1 for a GPU that cannot do it or a cache that cannot be written, 2 for a refused
configuration.
"""

import torch

from sparsellm.calibration import block_sizes, measure, report, store
from sparsellm.calibration.layer import Layer
from sparsellm.config import CalibrateConfig, ConfigError, calibrate_mistakes, entry_point, from_overrides
from sparsellm.console import progress, warn
from sparsellm.ops import MAX_COLUMNS, MULTIPLE, backend
from sparsellm.ops.triton import tuning


@entry_point(lambda config, _typed: calibrate_mistakes(config), calibrate_mistakes, CalibrateConfig)
def main(config: CalibrateConfig) -> int:
    layers = dict.fromkeys(layer_of(name) for name in config.model)
    try:
        backend.load(config.kernels.name)
    except backend.KernelsUnavailable as error:
        warn(f"nothing can be measured here: {error}")
        return 1
    sizes, device = None, torch.device("cuda", torch.cuda.current_device())
    print(f"{torch.cuda.get_device_name()}, {backend.NAMES[backend.loaded() or 'cuda']}, torch {torch.__version__}")
    for width, neurons in layers:
        try:
            layer = Layer(width, neurons, measure.SIZES[-1], device, torch.bfloat16)
            if backend.loaded() == "triton" and sizes is None:
                with progress("block sizes", len(block_sizes.LISTED), "kernel") as advance:
                    sizes = block_sizes.find(layer, advance=advance)
                tuning.use(sizes)
            total = len(measure.SIZES) + len(measure.TRAINING_SIZES)
            with progress(f"K {width:,}, N {neurons:,}", total, "size") as advance:
                costs, times = measure.measure(backend.loaded() or "cuda", layer, advance=advance)
            path = store.keep(costs, sizes)
        except (torch.OutOfMemoryError, OSError) as error:
            warn(f"K {width:,}, N {neurons:,} is not measured: {' '.join(str(error).split())}")
            return 1
        print(f"\nK {width:,}, N {neurons:,}: {report.text(report.choices(costs, times))}", flush=True)
    if sizes is not None:
        print(f"block sizes: {sizes}")
    print(f"kept in {path}")
    return 0


def layer_of(name: str) -> tuple[int, int]:
    """(K, N) of a model of the group `model`, or of a text as 2048x5632. Raises ConfigError."""
    if "x" in name and name.replace("x", "", 1).isdigit():
        width, neurons = (int(size) for size in name.split("x"))
    else:
        model = from_overrides([f"model={name}"]).model
        width, neurons = model.hidden_size, model.intermediate_size
    for size in (width, neurons):
        if size % MULTIPLE or size > MAX_COLUMNS:
            raise ConfigError(
                [f"model={name} has a size of {size}: K and N must be multiples of {MULTIPLE} up to {MAX_COLUMNS}"]
            )
    return width, neurons
