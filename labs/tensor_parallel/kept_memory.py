"""What a module made of a part of a layer keeps in memory: its own tensors, and the weight of the
unsharded layer that it was made from."""

import gc
from collections.abc import Iterator

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from labs.workers import devices

_SLACK = 64  # bytes, for indices and counts


class StorageRef:
    """A weak reference to the memory of a tensor. bytes: its size."""

    def __init__(self, tensor: torch.Tensor):
        storage = tensor.untyped_storage()
        self.bytes, self._storage = storage.nbytes(), StorageWeakRef(storage)

    def is_alive(self) -> bool:
        """Whether anything still has this memory: the tensor, a view of it, a closure, a list."""
        gc.collect()  # a module and its hooks are a cycle
        return not self._storage.expired()


def surplus_bytes(module: nn.Module, needed: int) -> int:
    """Bytes that the module's tensors hold in addition to those needed, each memory counted once;
    0 where it is no more than rounding."""
    # By address: views of one storage count once, and with all of it.
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _tensors(module)}
    surplus = sum(held.values()) - needed
    return surplus if surplus > devices.rounding() + _SLACK else 0


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    """What the module and its parts hold, in attributes and in containers there, too."""
    seen, todo = set(), [module]
    while todo:
        value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, nn.Module):
            todo += vars(value).values()
        elif isinstance(value, dict):
            todo += value.values()
        elif isinstance(value, list | tuple | set):
            todo += value
