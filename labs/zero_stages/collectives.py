"""The two collectives that ZeRO is made of, under one name for every version of torch, and the
reduce-scatter in the way that moves least on the backend in use."""

import torch
import torch.distributed as dist

from labs.workers.collectives import all_gather_single, reduce_scatter_single


def all_gather(whole, shard, async_op: bool = False):
    """Fills `whole` with every rank's `shard`, in rank order; `shard` may be its place in `whole`.
    async_op=True returns a handle at once: wait() on it before `whole` is read."""
    return all_gather_single(whole, shard.detach(), async_op=async_op)


def reduce_scatter(flat) -> "Arriving":
    """Begins to sum the `flat` tensors of all ranks; `.wait()` gives this rank's 1/N of the sum.

    It takes `flat` over: when the sum is there, the memory of `flat` is given back.
    """
    if flat.numel() % dist.get_world_size():
        raise ValueError(f"{flat.numel()} elements do not divide by {dist.get_world_size()} ranks: "
                         "pad them with zeros first")
    return (_Reduced if "nccl" in dist.get_backend() else _Exchanged)(flat)


class Arriving:
    """A shard of a sum that is under way."""

    def __init__(self, flat):
        self.flat = flat
        self.handle = self.begin()

    def wait(self) -> torch.Tensor:
        """This rank's shard of the sum, elements / N long. Raises RuntimeError the second time."""
        if self.handle is None:
            raise RuntimeError("this reduce-scatter has been waited for before: its sum was "
                               "returned then, and is not kept")
        self.handle.wait()
        shard = self.shard()
        # the backend's thread may hold the tensors a little longer: free their memory, here and now
        for tensor in {self.flat, self.received} - {shard}:
            tensor.untyped_storage().resize_(0)
        self.flat = self.received = self.handle = None
        return shard


class _Reduced(Arriving):
    """A true reduce-scatter."""

    def begin(self):
        self.received = self.flat.new_empty(self.flat.numel() // dist.get_world_size())
        return reduce_scatter_single(self.received, self.flat, async_op=True)

    def shard(self):
        return self.received


class _Exchanged(Arriving):
    """All-to-all, then a sum: gloo has no true reduce-scatter and all-reduces everything instead,
    which moves twice as much. Every rank gets N pieces, one from each rank, and adds them up."""

    def begin(self):
        self.received = torch.empty_like(self.flat)
        return dist.all_to_all_single(self.received, self.flat, async_op=True)

    def shard(self):
        return self.received.view(dist.get_world_size(), -1).sum(0)
