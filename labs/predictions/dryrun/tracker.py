"""Logs every storage of a dry run: when it is allocated, how large it is, when it is freed."""

import contextlib
import weakref

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from labs.predictions.dryrun import kernels

_ADD = torch.ops.aten.add.Tensor


class Tracker(TorchDispatchMode):
    """`with Tracker(threads) as tracker:` logs what an allocator would see.

    events: (storage key, bytes allocated or, negative, freed), and (None, what happened) for marks.
    labels: storage key -> category; storages without one are temporaries or activations. threads:
    of a rank; some CPU kernels take a buffer per thread. backend: gloo's collectives copy. device:
    "cpu" or "cuda"; tensors on other devices are not logged.
    """

    def __init__(self, threads: int = 1, backend: str = "gloo", device: str = "cpu"):
        super().__init__()
        self._backend, self._device = backend, device
        self.events, self.labels = [], {}
        self._threads = threads
        self._keys, self._sizes, self._references = {}, {}, {}
        self._label = self._summed = None
        self._paused = False

    def __enter__(self):
        self._resize = torch.UntypedStorage.resize_
        torch.UntypedStorage.resize_ = self._resizing(self._resize)
        return super().__enter__()

    def __exit__(self, *exception):
        torch.UntypedStorage.resize_ = self._resize
        return super().__exit__(*exception)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # it comes back as what it does on the local shard
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self._paused:
            self._follow(func, args, kwargs, result)
        return result

    def _follow(self, func, args, kwargs, result):
        sums_gradients = func is _ADD and _between_nodes()
        for tensor in tensors(result):
            self.see(tensor)
        if sums_gradients:
            self._summed = self._summing(args[0], result)
        self._inside(func, args)

    def _inside(self, func, args):
        collective = func.namespace == "c10d"
        if collective and self._backend != "gloo" or self._device != "cpu":
            return
        if scratch := kernels.scratch(func, args):
            self.temporary(scratch.nbytes(self._threads), "buffers" if collective else None)

    def see(self, tensor, size: int | None = None) -> int:
        """The key of a tensor's storage, which is logged if it is new or has grown. size: bytes,
        where the real one has others."""
        storage = tensor.untyped_storage()
        address, size = storage._cdata, storage.nbytes() if size is None else size
        if tensor.device.type != self._device:
            size = 0
        if address not in self._keys:
            self._new(storage, address)
        key = self._keys[address]
        self._sized(key, size)
        return key

    def _new(self, storage, address):
        key = self._keys[address] = len(self._sizes)
        self._sizes[key] = 0
        if self._label:
            self.labels[key] = self._label
        self._references[address] = weakref.ref(storage, lambda _: self._gone(address))

    def _gone(self, address):
        key = self._keys.pop(address)
        del self._references[address]
        if self._summed and self._summed == (key, len(self.events)):
            self._in_place(key)
        else:
            self._sized(key, 0)

    def _summing(self, old, new):
        """Remembers a sum of two gradients of one tensor. Autograd adds to the first in place if
        nobody else holds it, but never for fake tensors: then the first is freed right after."""
        old, new = self.see(old), self.see(new)
        same = self._sizes[old] == self._sizes[new] and self.events[-1] == (new, self._sizes[new])
        return (old, len(self.events)) if same else None

    def _in_place(self, old):
        """The sum takes the place of the gradient that has just been freed."""
        new, _ = self.events.pop()
        address = next(a for a, key in self._keys.items() if key == new)
        self._keys[address] = old

    def _sized(self, key, size):
        if size != self._sizes[key]:
            self.events.append((key, size - self._sizes[key]))
            self._sizes[key] = size

    def _resizing(self, resize):
        def resize_(storage, size):
            resize(storage, size)
            if storage._cdata in self._keys:
                self._sized(self._keys[storage._cdata], storage.nbytes())
            return storage
        return resize_

    def temporary(self, size: int, label=None) -> None:
        """Bytes that come and go inside one operator."""
        key = len(self._sizes)
        self._sizes[key] = 0
        self.labels[key] = label or self._label
        self.events += [(key, size), (key, -size)]

    def mark(self, what) -> None:
        """Appends a mark between the events."""
        self.events.append((None, what))

    def label(self, category: str, *found) -> None:
        """Labels the storages of these tensors, for their whole life."""
        for tensor in tensors(found):
            self.labels[self.see(tensor)] = category

    @contextlib.contextmanager
    def paused(self):
        """Logs nothing that is allocated inside."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    @contextlib.contextmanager
    def labelled(self, category: str):
        """Labels everything allocated inside, e.g. `with tracker.labelled("buffers"):`."""
        before, self._label = self._label, category
        try:
            yield
        finally:
            self._label = before


def _between_nodes() -> bool:
    """Whether autograd itself calls, not the backward formula of an operator."""
    return (torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled()
            and torch._C._current_autograd_node() is None)


def tensors(value) -> list[torch.Tensor]:
    """Every tensor in nested containers; of a DTensor its local part."""
    return [leaf._local_tensor if isinstance(leaf, DTensor) else leaf
            for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
