"""Parameters laid end to end in one flat tensor, which cuts into one equal shard for each rank."""

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import record_function


class Flat:
    """Some parameters of a model in one flat tensor.

    parameters: the model's own; they are views of `whole` from now on.
    whole: flat, N · length elements, zeros behind the last parameter.
    shard: an nn.Parameter of `length` elements: this rank's piece of `whole`, in the same memory
    until `free` is called for the first time, in memory of its own from then on.

    Raises ValueError where there is no parameter, or where types or devices are mixed.
    """

    def __init__(self, parameters, name: str = ""):
        self.parameters, self.name = list(parameters), name
        _check(self.parameters)
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.elements = sum(parameter.numel() for parameter in self.parameters)
        self.length = -(-self.elements // ranks)
        self.whole = self.parameters[0].detach().new_zeros(self.length * ranks)
        for parameter, piece in zip(self.parameters, self.pieces(self.whole), strict=True):
            piece.copy_(parameter.detach())
            parameter.data = piece
        self.shard = nn.Parameter(self.whole.view(ranks, -1)[rank])
        self.handle = None

    def __repr__(self):
        state = "whole" if self.is_whole else "shard only"
        return f"{self.name or 'flat'}: {self.elements:,} elements, {state}"

    @property
    def is_whole(self) -> bool:
        """Whether the memory of `whole` is there."""
        return self.whole.untyped_storage().nbytes() > 0

    def pieces(self, flat) -> list:
        """Views of `flat`, one for each parameter, in its shape."""
        sizes = [parameter.numel() for parameter in self.parameters]
        return [piece.view(parameter.shape) for parameter, piece in
                zip(self.parameters, flat[:self.elements].split(sizes), strict=True)]

    def flatten_gradients(self) -> torch.Tensor:
        """A new flat tensor as long as `whole`: a copy of the parameters' gradients, zeros where
        one is None and at the end."""
        flat = torch.zeros_like(self.whole)
        for parameter, piece in zip(self.parameters, self.pieces(flat), strict=True):
            if parameter.grad is not None:
                piece.copy_(parameter.grad)
        return flat

    def add_gradient(self, gradient) -> None:
        """Adds to `shard.grad`, which may be None: gradients accumulate as everywhere in torch."""
        self.shard.grad = gradient if self.shard.grad is None else self.shard.grad + gradient

    def allocate(self) -> torch.Tensor:
        """`whole`, with memory again; what is in it is undefined until somebody writes it."""
        with record_function("ZeRO::whole"):
            self.whole.untyped_storage().resize_(self.whole.numel() * self.whole.element_size())
        return self.whole

    def free(self) -> None:
        """Gives the memory of `whole` back, after a gather that is still under way (`handle`);
        `shard` stays. The parameters cannot be used until `whole` is allocated and filled again."""
        self.wait()
        if _shares(self.shard, self.whole):
            self.shard.data = self.shard.detach().clone()
        self.whole.untyped_storage().resize_(0)

    def wait(self) -> None:
        """Waits for the gather that was begun into `whole`, if there is one (`handle`)."""
        if self.handle is not None:
            self.handle.wait()
        self.handle = None


def _shares(one, other) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _check(parameters):
    if not parameters:
        raise ValueError("there is no parameter to lay flat")
    kinds = sorted({f"{p.dtype} on {p.device}".removeprefix("torch.") for p in parameters})
    if len(kinds) > 1:
        raise ValueError(f"one flat tensor cannot hold {' and '.join(kinds)}")
