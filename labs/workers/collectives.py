"""The two collectives that torch 2.13 renamed, under their new names for every version of torch;
and which backend runs them."""

import torch
import torch.distributed as dist

_renamed = hasattr(dist, "all_gather_single")  # torch >= 2.13; there the old names warn
_ALL_GATHER = "all_gather_single" if _renamed else "all_gather_into_tensor"
_REDUCE_SCATTER = "reduce_scatter_single" if _renamed else "reduce_scatter_tensor"


def add_new_names() -> None:
    """On a rank: gives torch < 2.13 the new names too, so that what notebooks teach runs there."""
    for new, old in (("all_gather_single", "all_gather_into_tensor"),
                     ("reduce_scatter_single", "reduce_scatter_tensor")):
        for module in (dist, dist.distributed_c10d):
            if not hasattr(module, new):
                setattr(module, new, getattr(module, old))


def has_nccl() -> bool:
    """On a rank: returns whether NCCL runs the collectives of its device, not gloo."""
    return "nccl" in dist.get_backend()


# Looked up at each call: `collective_matching` replaces torch's functions when a rank starts.
def all_gather_single(output: torch.Tensor, input: torch.Tensor, group=None,
                      async_op: bool = False) -> dist.Work | None:
    """Fills `output` (N · k elements) with every rank's `input` (k elements), in rank order.
    Returns a Work handle with async_op=True, else None."""
    return getattr(dist, _ALL_GATHER)(output, input, group=group, async_op=async_op)


def reduce_scatter_single(output: torch.Tensor, input: torch.Tensor, group=None,
                          async_op: bool = False, op=dist.ReduceOp.SUM) -> dist.Work | None:
    """Fills `output` (k elements) with this rank's piece of the sum, or what `op` makes, of all
    ranks' `input` (N · k elements). Returns a Work handle with async_op=True, else None."""
    return getattr(dist, _REDUCE_SCATTER)(output, input, op=op, group=group, async_op=async_op)
