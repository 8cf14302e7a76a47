"""Bytes that autograd keeps for backward, followed while they live."""

from collections.abc import Iterable
from contextlib import AbstractContextManager

import torch
from torch.autograd.graph import saved_tensors_hooks


class SavedBytes:
    """Counts the bytes of the tensors that forwards have saved for backward and that are still
    kept; each storage once, without those of `excluded` (parameters).

    `with saved.recording():` around each forward. now, peak: bytes.
    """

    def __init__(self, excluded: Iterable[torch.Tensor] = ()):
        self.now = self.peak = 0
        self._excluded = {_storage(tensor) for tensor in excluded}
        self._uses: dict[int, int] = {}  # storage -> how many saved tensors use it

    def recording(self) -> AbstractContextManager:
        """Inside, what autograd saves is counted until autograd frees it."""
        return saved_tensors_hooks(self._pack, lambda saved: saved.tensor)

    def _pack(self, tensor):
        saved = _Saved(tensor)
        storage = _storage(tensor)
        if storage not in self._excluded:
            saved.meter, saved.storage = self, storage
            saved.nbytes = _local(tensor).untyped_storage().nbytes()
            if self._uses.setdefault(storage, 0) == 0:
                self.now += saved.nbytes
                self.peak = max(self.peak, self.now)
            self._uses[storage] += 1
        return saved

    def _release(self, storage, nbytes):
        self._uses[storage] -= 1
        if not self._uses[storage]:
            del self._uses[storage]
            self.now -= nbytes


class _Saved:
    """What autograd keeps in place of a tensor; ends when autograd frees it."""

    __slots__ = ("meter", "nbytes", "storage", "tensor")

    def __init__(self, tensor):
        # Without detach, what an operation saves of its own output would hold the operation's node,
        # which holds this: a cycle that only a backward through that very node breaks.
        self.tensor, self.meter = tensor.detach(), None

    def __del__(self):
        if self.meter is not None:
            self.meter._release(self.storage, self.nbytes)


def _storage(tensor) -> int:
    return _local(tensor).untyped_storage().data_ptr()


def _local(tensor) -> torch.Tensor:
    """Of a DTensor this rank's shard, which it wraps: it has no storage of its own."""
    return getattr(tensor, "_local_tensor", tensor)
