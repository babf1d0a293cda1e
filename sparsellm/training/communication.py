"""What ranks send each other of their gradients: in which buckets, and in which dtype."""

from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from sparsellm.config import DdpCompress, RuntimeConfig


def arrange(model: DistributedDataParallel, runtime: RuntimeConfig) -> None:
    """Have `model` send its gradients as `runtime` says. Collective, before the first step."""
    if runtime.ddp_compress == DdpCompress.bf16:
        model.register_comm_hook(None, bf16_compress_hook)
    if runtime.deterministic:
        # DDP arranges its buckets anew after a process's first step. Where three ranks or more add up a bucket, the
        # order of the terms depends on a gradient's place in it, so a resumed run would round its first step otherwise
        # than the run that was not interrupted. Arranged now, in the order of the parameters, buckets stay as they are.
        model.reducer._push_all_rebuilt_params()
        model.reducer._rebuild_buckets()
