"""Logs every storage of a dry run: when it is allocated, how large it is, when it is freed."""

import contextlib
import weakref

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from labs.predictions.dryrun import kernels
from labs.predictions.dryrun.operators import allocates_results_only
from labs.predictions.dryrun.patches import FAKE_KERNELS
from labs.predictions.dryrun.probe import Probe
from labs.predictions.dryrun.values import Unknown, Values

_ADD = torch.ops.aten.add.Tensor
_ITEM = torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default


class Tracker(TorchDispatchMode):
    """`with Tracker(threads) as tracker:` logs what an allocator would see.

    events: (storage key, bytes allocated or, negative, freed), and (None, what happened) for marks.
    labels: storage key -> category; storages without one are temporaries or activations. threads:
    of a rank; some CPU kernels take a buffer per thread. backend: gloo's collectives copy. device:
    "cpu" or "cuda"; tensors on other devices are not logged.
    """

    def __init__(self, threads: int = 1, backend: str = "gloo", device: str = "cpu",
                 probe: Probe | None = None):
        super().__init__()
        self._backend, self._device = backend, device
        self.events, self.labels = [], {}
        self._threads = threads
        self._probe, self.values = probe, Values()
        self.untried = {}  # operator -> bytes of its largest call's arguments and results
        self._keys, self._sizes, self._references, self._owners = {}, {}, {}, {}
        self._label = self._summed = self._node = None
        self._older = 0
        self._paused = self._numbers_allowed = False

    def __enter__(self):
        self._resize = torch.UntypedStorage.resize_
        # FSDP frees a gathered parameter by resize_(0) of its storage: no operator of the
        # dispatcher sees it.
        torch.UntypedStorage.resize_ = self._resizing(self._resize)
        return super().__enter__()

    def __exit__(self, *exception):
        torch.UntypedStorage.resize_ = self._resize
        return super().__exit__(*exception)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # it comes back as what it does on the local shard
        kwargs = kwargs or {}
        try:
            result = FAKE_KERNELS.get(func, func)(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            return self._from_numbers(func, args, kwargs)
        return result if self._paused else self._follow(func, args, kwargs, result)

    def _from_numbers(self, func, args, kwargs):
        """The result of an operator that depends on numbers, where they are known."""
        try:
            real = self.values.compute(func, args, kwargs)
        except Unknown:
            if func in _ITEM and self._numbers_allowed:
                return 1.0 if args[0].is_floating_point() else 1
        else:
            result = tree_map_only(torch.Tensor, lambda t: torch.empty_strided(
                t.shape, t.stride(), dtype=t.dtype), real)
            self.values.set(result, real)
            return self._follow(func, args, kwargs, result)
        return func(*args, **kwargs)  # which raises again

    def _follow(self, func, args, kwargs, result):
        self._enter_node()
        scratch, result = self._inside(func, args, kwargs, result)
        self.values.follow(func, args, kwargs, result)
        for tensor in tensors(result):
            self.see(tensor)
        if func is _ADD and self._made_before_this_node(args[0]):
            self._summed = self._summing(args[0], result)
        if scratch:
            self.temporary(scratch, "buffers" if func.namespace == "c10d" else None)
        return result

    def _inside(self, func, args, kwargs, result) -> tuple:
        """(bytes that the operator takes for itself, its result with the real layout)."""
        if func.namespace == "c10d" and self._backend != "gloo" or self._device != "cpu":
            return 0, result
        if allocates_results_only(func, args, kwargs) and func.namespace != "c10d":
            return 0, result
        probed = self._probe and self._probe(func, args, kwargs, result)
        if not probed:
            return self._by_rule(func, args, result), result
        return probed.scratch, _laid_out(result, probed.layouts)

    def _by_rule(self, func, args, result) -> int:
        """Scratch bytes of an operator that was not tried, from its kernel's source."""
        if scratch := kernels.scratch(func, args):
            return scratch.nbytes(self._threads)
        if self._probe and func.namespace == "aten":
            self.untried[str(func)] = max(self.untried.get(str(func), 0), _nbytes(args, result))
        return 0

    def see(self, tensor, size: int | None = None) -> int:
        """The key of a tensor's storage, which is logged if it is new or has grown. size: bytes,
        where the real one has others."""
        storage = tensor.untyped_storage()
        # The C++ object's address: a fake tensor has no data pointer.
        address, size = storage._cdata, storage.nbytes() if size is None else size
        if tensor.device.type != self._device:
            size = 0
        if address not in self._keys:
            self._new(storage, address)
            self._owners[self._keys[address]] = tensor._cdata
        key = self._keys[address]
        self._sized(key, size)
        return key

    def _new(self, storage, address):
        key = self._keys[address] = len(self._sizes)
        self._sizes[key] = 0
        if self._label:
            self.labels[key] = self._label
        # The callback runs at the moment at which the last reference goes: no garbage collection is
        # needed unless tensors are in a cycle.
        self._references[address] = weakref.ref(storage, lambda _: self._gone(address))

    def _gone(self, address):
        key = self._keys.pop(address)
        del self._references[address]
        if self._summed and self._summed[0] == key and self._only_freed_since(self._summed[1]):
            self._in_place(*self._summed)
        else:
            self._sized(key, 0)

    def _enter_node(self):
        """Remembers which storages are older than the autograd node that runs now."""
        node = _autograd_node()
        number = node._sequence_nr() if node is not None else None
        if number != self._node:
            self._node, self._older = number, len(self._sizes)

    def _made_before_this_node(self, tensor) -> bool:
        """Whether autograd itself may call in backward, to sum: a node's formula adds what it has
        just computed, to its own results."""
        if torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled():
            return False
        node = _autograd_node()
        own = isinstance(node, torch.autograd.function.BackwardCFunction)
        return node is None or not own and self.see(tensor) < self._older

    def _summing(self, old, new):
        """Remembers a sum of two gradients of one tensor. Autograd adds to the first in place if it
        is no view and nobody else holds it, but never for fake tensors: then the first is freed
        right after, as is the second."""
        owner, old, new = old._cdata, self.see(old), self.see(new)
        own = owner == self._owners[old] and self._sizes[old] == self._sizes[new]
        made = self.events[-1] == (new, self._sizes[new])
        return (old, len(self.events) - 1) if own and made else None

    def _only_freed_since(self, index) -> bool:
        return all(key is not None and size < 0 for key, size in self.events[index + 1:])

    def _in_place(self, old, index):
        """The sum takes the place of the gradient that has just been freed."""
        new, _ = self.events.pop(index)
        address = next(a for a, key in self._keys.items() if key == new)
        self._keys[address], self._summed = old, None
        self._owners[old] = self._owners[new]

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
    def stepping(self, optimizer):
        """While one of torch's optimizers steps, numbers read from tensors are 1: they scale its
        update, and do not decide what it allocates. L-BFGS's line search does."""
        own = type(optimizer).__module__.startswith("torch.") and not isinstance(
            optimizer, torch.optim.LBFGS)
        self._numbers_allowed = own
        try:
            yield
        finally:
            self._numbers_allowed = False

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


def _nbytes(*values) -> int:
    return sum(t.numel() * t.element_size() for t in tensors(values))


def _laid_out(result, layouts):
    """The result, with the layouts that the real operator gives to new tensors."""
    leaves, tree = tree_flatten(result)
    if len(leaves) != len(layouts):
        return result
    return tree_unflatten([_with_layout(*pair) for pair in zip(leaves, layouts, strict=True)], tree)


def _with_layout(tensor, layout):
    if layout is not None and layout.hidden:
        return torch.empty(layout.hidden, dtype=torch.uint8)
    if layout is None or (tuple(tensor.shape), tensor.stride()) == (layout.shape, layout.strides):
        return tensor
    return torch.empty_strided(layout.shape, layout.strides, dtype=layout.dtype)


def _autograd_node():
    """The node whose backward runs, or ran last; None outside of backward."""
    if torch._C._current_graph_task_id() == -1:
        return None
    return torch._C._current_autograd_node()


def tensors(value) -> list[torch.Tensor]:
    """Every tensor in nested containers; of a DTensor its local part."""
    return [leaf._local_tensor if isinstance(leaf, DTensor) else leaf
            for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
