"""A module that says when each of its layers is about to be used and has been used, in forward and
in backward: what a student's ZeRO-2 and ZeRO-3 hang their work on."""

from collections.abc import Mapping
from functools import partial

import torch
from torch import nn
from torch.autograd import Variable

from labs.exercises.verdicts import Wrong
from labs.zero_stages.flat import Flat


def layers(model) -> list:
    """A `Flat` for each group of `grouped`, its module as `.module`."""
    flats = []
    for name, module, parameters in grouped(model):
        flats.append(Flat(parameters, name))
        flats[-1].module = module
    return flats


def grouped(model) -> list:
    """(name, module, parameters) of the model's trainable parameters: first the root's (what
    belongs to no layer, such as embeddings and the head), then each layer's, in the order of
    forward. A layer is an entry of a ModuleList; without one, a child that shares no parameter
    with another."""
    groups = [(name, module, [p for p in module.parameters() if p.requires_grad])
              for name, module in _layers_of(model)]
    taken = {id(p) for _, _, parameters in groups for p in parameters}
    rest = [p for p in model.parameters() if p.requires_grad and id(p) not in taken]
    return ([("root", model, rest)] if rest else []) + groups


def _layers_of(model) -> list:
    """(name, module) of the modules that are a layer each."""
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList):
            return [(f"{name}.{number}".removeprefix("transformer."), layer)
                    for number, layer in enumerate(module) if _trains(layer)]
    homes = [p for child in model.children() for p in set(child.parameters())]
    return [(name, child) for name, child in model.named_children()
            if _trains(child) and all(sum(p is q for q in homes) == 1 for p in child.parameters())]


def _trains(module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


class Sharded(nn.Module):
    """A module around `model` that is called as `model` is, and calls its own methods:

    before_forward(unit), after_forward(unit): around the forward of each unit;
    before_backward(unit): when backward reaches the unit;
    after_backward(unit): once all its gradients are there, last unit first, the root last, in the
    same order on every rank; units that backward did not use come at the end;
    backward_done(): after all of them.

    self.units: a `Flat` for each layer, and for the root, whose forward is that of the whole model.
    Frozen parameters are in none of them: they stay whole.
    """

    def __init__(self, model):
        super().__init__()
        self.module = model
        self.units = layers(model)
        self._backward_order = [u for u in self.units[::-1] if u.module is not model]
        self._backward_order += [u for u in self.units if u.module is model]
        self._ready, self._begun, self._ended = set(), set(), 0
        self._in_backward = False
        for unit in self.units:
            self._watch(unit)

    def before_forward(self, unit):
        """For a subclass to fill."""

    def after_forward(self, unit):
        """For a subclass to fill."""

    def before_backward(self, unit):
        """For a subclass to fill."""

    def after_backward(self, unit):
        """For a subclass to fill."""

    def backward_done(self):
        """For a subclass to fill."""

    def following(self, unit):
        """The unit that is used after this one, in the direction in which the model runs now; None
        after the last."""
        order = self._order()
        place = order.index(unit) + 1
        return order[place] if place < len(order) else None

    def forward(self, *inputs, **named_inputs):
        self._in_backward = False
        root = next((unit for unit in self.units if unit.module is self.module), None)
        if root:
            self._before(root)
        output = self.module(*inputs, **named_inputs)
        if root:
            self._after(root, None, None, output)
        return output

    def whole_parameters(self) -> dict:
        """name -> a copy of each parameter of the model, gathered unit by unit as in a forward. All
        ranks must call it."""
        self._in_backward = False
        found = {}
        for unit in self.units:
            self.before_forward(unit)
            found |= {id(p): p.detach().clone() for p in unit.parameters}
            self.after_forward(unit)
        return {name: found.get(id(p), p.detach())
                for name, p in self.module.named_parameters()}

    def _order(self):
        """Root first, in both directions: its backward begins with the loss."""
        if not self._in_backward:
            return self.units
        return self._backward_order[-1:] + self._backward_order[:-1]

    def _watch(self, unit):
        if unit.module is not self.module:
            unit.module.register_forward_pre_hook(lambda *_: self._before(unit))
            unit.module.register_forward_hook(partial(self._after, unit))
        for parameter in unit.parameters:
            parameter.register_post_accumulate_grad_hook(self._complete)

    def _before(self, unit):
        self.before_forward(unit)
        _must_be_whole(unit, "forward")

    def _after(self, unit, module, inputs, output):
        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._reached, unit))
        self.after_forward(unit)

    def _reached(self, unit, gradient):
        self._begin_backward()
        if unit not in self._begun:
            self._begun.add(unit)
            self.before_backward(unit)
            _must_be_whole(unit, "backward")

    def _complete(self, parameter):
        self._begin_backward()
        self._ready.add(parameter)
        while self._ended < len(self._backward_order):
            if not self._ready.issuperset(self._backward_order[self._ended].parameters):
                return
            self._end_unit()

    def _begin_backward(self):
        if not self._in_backward:
            self._in_backward = True
            Variable._execution_engine.queue_callback(self._end)

    def _end_unit(self):
        self._ended += 1
        self.after_backward(self._backward_order[self._ended - 1])

    def _end(self):
        while self._ended < len(self._backward_order):
            self._end_unit()
        self.backward_done()
        self._ready, self._begun, self._ended = set(), set(), 0
        self._in_backward = False


def _must_be_whole(unit, direction):
    """Without memory behind its parameters the unit would read whatever lies at address 0."""
    if not unit.is_whole:
        raise Wrong(f"{direction} of {unit.name!r} begins, and its parameters are not there",
                    f"Gather them in before_{direction}, every time.")


def _tensors(value):
    """The tensors in what a module returns."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)
    elif hasattr(value, "__dict__"):
        yield from _tensors(list(vars(value).values()))
