"""How gradients are communicated between ranks: buckets and dtype."""

from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from sparsellm.config import DdpCompress, RuntimeConfig


def arrange(model: DistributedDataParallel, runtime: RuntimeConfig) -> None:
    """Configure the gradient communication of `model` by `runtime`. Collective, before the first step."""
    if runtime.ddp_compress == DdpCompress.bf16:
        model.register_comm_hook(None, bf16_compress_hook)
    if runtime.deterministic:
        # DDP rebuilds its buckets after a process's first step. With three ranks or more, the order of summation
        # depends on a gradient's place in its bucket, so a resumed run would round its first step differently from an
        # uninterrupted run. Buckets built now, in parameter order, are not rebuilt.
        model.reducer._push_all_rebuilt_params()
        model.reducer._rebuild_buckets()
