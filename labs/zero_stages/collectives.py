"""The two collectives that ZeRO is made of; the reduce-scatter moves as little as the backend
allows."""

import torch
import torch.distributed as dist

from labs.workers.collectives import all_gather_single, has_nccl, reduce_scatter_single


def all_gather(full: torch.Tensor, shard: torch.Tensor,
               async_op: bool = False) -> dist.Work | None:
    """Fills `full` (N · k elements) with every rank's `shard` (k elements), in rank order; `shard`
    may be its own place in `full`. With async_op=True returns a handle at once: call its wait()
    before `full` is read."""
    return all_gather_single(full, shard.detach(), async_op=async_op)


def reduce_scatter(flat: torch.Tensor) -> "PendingReduceScatter":
    """Begins to sum the `flat` tensors (N · k elements) of all ranks; `.wait()` returns this rank's
    piece of the sum (k elements).

    `flat` must not be used afterwards: `.wait()` frees its memory. Raises ValueError if N does not
    divide its elements.
    """
    if flat.numel() % dist.get_world_size():
        raise ValueError(f"{flat.numel()} elements do not divide by {dist.get_world_size()} ranks: "
                         "pad them with zeros first")
    return (_ReduceScatter if has_nccl() else _AllToAll)(flat)


class PendingReduceScatter:
    """A reduce-scatter in flight."""

    def __init__(self, flat):
        self.flat = flat
        self.handle = self._begin()

    def wait(self) -> torch.Tensor:
        """This rank's piece of the sum. Raises RuntimeError the second time."""
        if self.handle is None:
            raise RuntimeError("this reduce-scatter has been waited for before: its sum was "
                               "returned then, and is stored nowhere")
        self.handle.wait()
        shard = self._piece()
        # The backend's thread may keep references a little longer, so dropping ours frees nothing
        # yet: resize_(0) frees the memory now.
        # Tensors hash by identity: both are freed, but not the one that is returned.
        for tensor in {self.flat, self.received} - {shard}:
            tensor.untyped_storage().resize_(0)
        self.flat = self.received = self.handle = None
        return shard


class _ReduceScatter(PendingReduceScatter):
    """The backend's own reduce-scatter."""

    def _begin(self):
        self.received = self.flat.new_empty(self.flat.numel() // dist.get_world_size())  # (k,)
        return reduce_scatter_single(self.received, self.flat, async_op=True)

    def _piece(self):
        return self.received


class _AllToAll(PendingReduceScatter):
    """An all-to-all and a local sum. gloo emulates reduce-scatter by an all-reduce, which moves
    twice as much (pytorch PRs 118911 and 149869)."""

    def _begin(self):
        self.received = torch.empty_like(self.flat)  # (N · k,)
        return dist.all_to_all_single(self.received, self.flat, async_op=True)

    def _piece(self):
        # (N, k): row r is rank r's part for this rank; their sum over the rows has shape (k,).
        return self.received.view(dist.get_world_size(), -1).sum(0)
