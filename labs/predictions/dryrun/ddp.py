"""DDP's C++ reducer under fake tensors: its all-reduce and its rebuilt buckets are replaced."""

import unittest.mock

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

_FIRST_BUCKET = 1 << 20  # bytes; dist._DEFAULT_FIRST_BUCKET_BYTES, where there is one


def complete_all_reduces(module) -> None:
    """Registers a hook that all-reduces as DDP does. The fake process group's own future never gets
    a result, and the reducer would wait for it."""
    if isinstance(module, DistributedDataParallel):
        module.register_comm_hook(None, _all_reduce)


def _all_reduce(state, bucket) -> torch.futures.Future[torch.Tensor]:
    dist.all_reduce(bucket.buffer(), async_op=True)
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def rebuild_buckets(module, order, tracker) -> None:
    """Allocates the buckets that DDP allocates after its first step, from the order in which
    gradients were computed: its own code reads that order from a tensor, and a fake one has no
    numbers."""
    if not isinstance(module, DistributedDataParallel):
        return
    module.reducer = module.logger = None  # the buckets of the first step go
    parameters, _ = module._build_params_for_reducer()
    trained = {id(p) for p in parameters}
    parameters = [p for p in order if id(p) in trained]
    with (tracker.labelled("buffers"),
          unittest.mock.patch.object(dist, "_compute_bucket_assignment_by_size",
                                     _reversed(module.bucket_bytes_cap))):
        module._ddp_init_helper(parameters, [False] * len(parameters), {}, module.static_graph)
    complete_all_reduces(module)


def _reversed(cap):
    """The real assignment in reverse: DDP reverses it again, since it expects forward order."""
    assign = dist._compute_bucket_assignment_by_size
    first = getattr(dist, "_DEFAULT_FIRST_BUCKET_BYTES", _FIRST_BUCKET)

    def assigned(parameters, limits, sparse):
        indices, limits = assign(parameters, [first, cap], sparse)
        return indices[::-1], limits[::-1]
    return assigned


def bucket_sizes(gradients: list[int], cap: int) -> list[int]:
    """Bytes of DDP's buckets after the first step. gradients: bytes of each, in the order of their
    computation. A bucket closes when it reaches its limit, the first at 1 MiB, the others at `cap`
    (torch's reducer.cpp, compute_bucket_assignment_by_size)."""
    sizes, filled = [], 0
    for size in gradients:
        filled += size
        if filled >= (cap if sizes else _FIRST_BUCKET):
            sizes.append(filled)
            filled = 0
    return sizes + [filled] if filled else sizes
