"""FSDP2 whose collectives are in flight while the rank computes, on gloo too."""

import torch
from torch.distributed.fsdp import FSDPModule

from labs.workers.collectives import reduce_scatter_single


def make_asynchronous(model, optimizer) -> None:
    """Lets a rank continue computing while collectives of FSDP2 are in flight. NCCL runs them on a
    stream of the GPU; gloo, on the CPU and where ranks share a GPU, has none, and FSDP2 would wait
    at each call."""
    model._set_unshard_async_op(True)  # private
    reduce_scatter = _ReduceScatter()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(reduce_scatter)
    optimizer.register_step_pre_hook(lambda *_: reduce_scatter.wait())


class _ReduceScatter:
    """FSDP2 calls it in place of its own reduce-scatter. Like FSDP2 on a GPU, at most one is in
    flight; the last one is waited for before the optimizer uses the gradients."""

    def __init__(self):
        self.pending = None

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op: bool = False):
        self.wait()
        # FSDP2 gives the average, which needs no division afterwards: it only makes views of what
        # is written here later.
        self.pending = reduce_scatter_single(output_tensor, input_tensor, group=group,
                                             async_op=True, op=op)

    def wait(self) -> None:
        if self.pending is not None:
            self.pending.wait()
        self.pending = None
