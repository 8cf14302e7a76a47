"""Flat parameters: parameters one after the other in one padded tensor, which splits into one
equal shard for each rank."""

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import record_function

_WITHOUT_FORWARD = (nn.ModuleList, nn.ModuleDict)  # nobody calls these, so no hook would be called


class FlatParameter:
    """Some parameters of a model in one flat tensor.

    parameters: the model's own; from now on they are views of `full`.
    full: 1-D, N · shard_elements elements: all parameters, then zeros as padding.
    shard: an nn.Parameter of shard_elements elements, this rank's piece of `full`. It is a view of
    `full` until `free` is called for the first time, and has memory of its own from then on.
    elements: of the parameters, without padding. module: the layer that they belong to, if any.
    handle: of an all-gather into `full` that is in flight, else None.

    Raises ValueError if there is no parameter, if one is given twice or belongs to another flat
    parameter, or if dtypes or devices are mixed.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], name: str = "",
                 module: nn.Module | None = None):
        self.parameters, self.name, self.module = list(parameters), name, module
        _refuse_mixed(self.parameters)
        _refuse_shared(self.parameters)
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.elements = sum(parameter.numel() for parameter in self.parameters)
        # Rounded up: collectives on one flat tensor need equally long pieces on all ranks.
        self.shard_elements = -(-self.elements // ranks)
        # (N · shard_elements,)
        self.full = self.parameters[0].detach().new_zeros(self.shard_elements * ranks)
        for parameter, view in zip(self.parameters, self.views(self.full), strict=True):
            view.copy_(parameter.detach())
            # Assigning .data keeps the parameter object, so its hooks and ties remain.
            parameter.data = view
            # Weak: when this flat parameter is gone, another one may take the parameter.
            parameter._flat = weakref.ref(self)
        self.shard = nn.Parameter(self.full.view(ranks, -1)[rank])  # (shard_elements,)
        self.handle = None

    def __repr__(self):
        state = "gathered" if self.is_gathered else "shard only"
        return f"{self.name or 'flat parameter'}: {self.elements:,} elements, {state}"

    @property
    def is_gathered(self) -> bool:
        """Whether `full` has memory (an all-gather into it may still be in flight)."""
        return self.full.untyped_storage().nbytes() > 0

    @property
    def is_sharded(self) -> bool:
        """Whether `free` has been called: `shard` has memory of its own."""
        return (self.shard.untyped_storage().data_ptr()
                != self.full.untyped_storage().data_ptr())

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Views of `flat`, one for each parameter, in its shape."""
        sizes = [parameter.numel() for parameter in self.parameters]
        # flat[:elements] leaves out the padding; split gives 1-D pieces, view their shapes.
        return [view.view(parameter.shape) for parameter, view in
                zip(self.parameters, flat[:self.elements].split(sizes), strict=True)]

    def flatten_gradients(self) -> torch.Tensor:
        """A new flat tensor in the shape of `full`: copies of the parameters' gradients, zeros
        where a gradient is None and in the padding."""
        flat = torch.zeros_like(self.full)
        for parameter, view in zip(self.parameters, self.views(flat), strict=True):
            if parameter.grad is not None:
                view.copy_(parameter.grad)
        return flat

    def add_gradient(self, gradient: torch.Tensor) -> None:
        """Adds to `shard.grad`, which may be None: gradients accumulate, as everywhere in torch."""
        self.shard.grad = gradient if self.shard.grad is None else self.shard.grad + gradient

    def allocate(self) -> torch.Tensor:
        """`full`, with memory again; its contents are undefined until an all-gather fills it."""
        with record_function("ZeRO::full"):  # labs.meters.memory counts it as a buffer, by its name
            # The storage is resized, not the tensor: the parameters, views of it, get memory with
            # it.
            self.full.untyped_storage().resize_(self.full.numel() * self.full.element_size())
        return self.full

    def free(self) -> None:
        """Frees the memory of `full`, after a gather that is in flight; `shard` stays. The
        parameters cannot be used until `full` is allocated and filled again."""
        # A gather in flight writes into this memory from the backend's thread: a free before it
        # ends can end the process with SIGSEGV.
        self.wait()
        # The first time, shard is still a view of full: without memory of its own it would be freed
        # too.
        if not self.is_sharded:
            self.shard.data = self.shard.detach().clone()
        # resize_(0) frees the bytes but keeps the storage object. Parameters, and views of them
        # that autograd saved in forward, still point to it: refilled, it makes them valid again.
        self.full.untyped_storage().resize_(0)

    def keep_own_piece(self) -> None:
        """Copies this rank's piece of `full`, which must be gathered, into `shard`."""
        if self.is_sharded:
            with torch.no_grad():
                # (N, shard_elements): row r is the shard of rank r.
                self.shard.copy_(self.full.view(-1, self.shard_elements)[dist.get_rank()])

    def wait(self) -> None:
        """Waits for the all-gather into `full` that is in flight, if there is one (`handle`)."""
        if self.handle is not None:
            self.handle.wait()
        self.handle = None


def flatten_layers(model: nn.Module) -> list[FlatParameter]:
    """A FlatParameter for each group of `layer_groups`."""
    return [FlatParameter(parameters, name, module)
            for name, module, parameters in layer_groups(model)]


def layer_groups(model: nn.Module) -> list[tuple[str, nn.Module, list[nn.Parameter]]]:
    """(name, module, parameters) of the model's trainable parameters: first the root's, then each
    layer's, in the order of definition. A layer is an entry of a ModuleList; in a model without
    one, a child of the model.

    The root's are those that are in no layer, such as embeddings and the head, and those that
    several layers share, or a layer and the root: the root is gathered whenever a layer computes.
    """
    layers = _layers_of(model)
    # How many layers use each parameter: a tied one is one object.
    uses = Counter(id(p) for _, module in layers for p in module.parameters())
    outside = {id(p) for p in _outside(model, {id(module) for _, module in layers})}
    groups = [(name, module, [p for p in module.parameters() if p.requires_grad
                              and uses[id(p)] == 1 and id(p) not in outside])
              for name, module in layers]
    in_layers = {id(p) for _, _, parameters in groups for p in parameters}
    rest = [p for p in model.parameters() if p.requires_grad and id(p) not in in_layers]
    # A group of frozen parameters only has nothing to reduce, and a FlatParameter needs one.
    return [group for group in [("root", model, rest), *groups] if group[2]]


def _layers_of(model) -> list[tuple[str, nn.Module]]:
    """(name, layer), each layer once, even if it is listed several times."""
    children = list(model.named_children())  # these, too, are each named once
    found = {id(layer): (name, layer) for name, layer in _listed(model)}
    return list(found.values()) or children


def _listed(module, prefix="") -> Iterator[tuple[str, nn.Module]]:
    """(name, entry) of each ModuleList inside a module, but not of those inside of entries."""
    for name, child in module.named_children():
        if isinstance(module, nn.ModuleList) and not isinstance(child, _WITHOUT_FORWARD):
            yield f"{prefix}{name}".removeprefix("transformer."), child
        else:
            yield from _listed(child, f"{prefix}{name}.")


def _outside(module, layers) -> list[nn.Parameter]:
    """The parameters outside of the layers, a set of ids."""
    if id(module) in layers:
        return []
    return [*module.parameters(recurse=False),
            *(p for child in module.children() for p in _outside(child, layers))]


def _refuse_shared(parameters):
    """Raises ValueError: a parameter in two flat ones would be a view of the last one only."""
    # Tensors hash by identity, so the set has each parameter object once.
    if len(set(parameters)) < len(parameters):
        raise ValueError("a parameter is given twice: a flat parameter holds each once")
    for parameter in parameters:
        other = getattr(parameter, "_flat", lambda: None)()
        if other is not None:
            raise ValueError(f"a parameter of shape {tuple(parameter.shape)} is in the flat "
                             f"parameter {other.name!r} already: layers that share a weight need "
                             "one flat parameter for it, as lab.flatten_layers makes")


def _refuse_mixed(parameters):
    if not parameters:
        raise ValueError("there is no parameter to flatten")
    kinds = sorted({f"{p.dtype} on {p.device}".removeprefix("torch.") for p in parameters})
    if len(kinds) > 1:
        raise ValueError(f"one flat parameter cannot hold {' and '.join(kinds)}")
