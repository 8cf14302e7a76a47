"""Which tensors of a process that uses a GPU are the host's: those that were sent to the CPU.

They are known by their storage, so views of them are the host's, too.
"""

import weakref

from pretend_gpus import allocator

_bytes = {}  # storage -> bytes
_pinned = set()
_watching = {}  # storage -> weak reference
_MORE_THAN_ALL = 2**50  # bytes


def has(tensor) -> bool:
    """Whether a tensor was sent to the CPU."""
    return bool(_bytes) and key(tensor) in _bytes


def has_storage(storage) -> bool:
    """Whether a tensor with this storage was."""
    return storage._cdata in _bytes


def is_pinned(tensor) -> bool:
    return key(tensor) in _pinned


def pinned_bytes() -> int:
    """Returns the bytes of pinned tensors, each rounded up to a power of two, as torch's allocator
    of pinned memory does."""
    return sum(1 << (_bytes[one] - 1).bit_length() for one in _pinned if _bytes[one])


def made(make, pinned=False):
    """Returns the host's tensor that make() returns. What it allocates counts in no limit and in no
    peak of the GPU: nobody knows how much that is before it has been done."""
    allocator.count_on_host(_MORE_THAN_ALL)
    try:
        tensor = make()
        found = key(tensor)
        if found is not None and found not in _bytes:
            storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
            _bytes[found] = storage.nbytes()
            _watching[found] = weakref.ref(storage, lambda _: _forget(found))
            allocator.count_on_host(_bytes[found])
    finally:
        allocator.count_on_host(-_MORE_THAN_ALL)
    if pinned:
        _pinned.add(found)
    return tensor


def _forget(storage):
    allocator.count_on_host(-_bytes.pop(storage))
    _watching.pop(storage)
    _pinned.discard(storage)


def key(tensor):
    """Returns what a tensor's storage is known by; views share it. None where there is none."""
    try:  # of a DTensor: this rank's shard
        return getattr(tensor, "_local_tensor", tensor).untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):  # of a wrapper or a sparse tensor
        return None
