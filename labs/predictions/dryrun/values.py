"""Numbers of small tensors that a fake run knows after all: made by no random generator, computed
from no parameter. Models look at such numbers: masks, positions, rates of dropout by layer."""

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

MAX_ELEMENTS = 2**16  # elements


class Unknown(Exception):
    """The numbers of a tensor are not known."""


class Values:
    """The real counterparts of fake tensors, where they are known."""

    def __init__(self):
        self._real = WeakTensorKeyDictionary()

    def follow(self, func, args, kwargs, result) -> None:
        """Computes the numbers of an operator's results if those of its arguments are known."""
        if func.namespace == "c10d":  # other ranks are taken to be like this one
            return
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if not made:
            return
        try:
            if any(leaf.numel() > MAX_ELEMENTS for leaf in made):
                raise Unknown
            self.set(result, self.compute(func, args, kwargs))
        except Unknown:
            self._forget(func, args, made)

    def compute(self, func, args, kwargs):
        """What an operator returns for the known numbers; raises Unknown where they are not."""
        random = torch.Tag.nondeterministic_seeded in func.tags
        if random or func.namespace == "prim":
            raise Unknown
        args, kwargs = tree_map(self._known, (args, kwargs))
        try:
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        except (RuntimeError, NotImplementedError, IndexError, TypeError) as error:
            raise Unknown from error

    def _known(self, leaf):
        if not isinstance(leaf, torch.Tensor):
            return leaf
        # Weak keys: the tracker must see a fake tensor freed at the moment at which the job drops
        # it.
        if leaf in self._real:
            return self._real[leaf]
        if type(leaf) is torch.Tensor and leaf.numel() <= MAX_ELEMENTS:
            return leaf
        raise Unknown

    def real(self, leaf):
        """The real counterpart of a fake tensor, if it is known; else the leaf itself."""
        return self._real.get(leaf, leaf) if isinstance(leaf, torch.Tensor) else leaf

    def set(self, result, real) -> None:
        """Remembers real tensors as the numbers of fake ones."""
        for fake, numbers in zip(tree_leaves(result), tree_leaves(real), strict=True):
            if isinstance(fake, torch.Tensor) and isinstance(numbers, torch.Tensor):
                self._real[fake] = numbers

    def _forget(self, func, args, made):
        """What unknown numbers are written into is unknown, and all that shares its memory."""
        if not func._schema.is_mutable:
            return
        written = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        lost = {self._real[leaf].untyped_storage()._cdata for leaf in [*written, *made]
                if leaf in self._real}
        for fake in [fake for fake, real in self._real.items()
                     if real.untyped_storage()._cdata in lost] if lost else ():
            del self._real[fake]
