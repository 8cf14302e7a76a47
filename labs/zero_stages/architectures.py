"""Small models of every structure that a ZeRO stage must train as one process does: with and
without parameters outside the layers, layers used twice or never, weights that layers share."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F

from labs.checks.mistakes import MOMENTUM_MISSING, NOT_UPDATED
from labs.checks.on_ranks import BATCH, module_and_optimizer, raise_on_all_ranks
from labs.checks.reference import Reference, Step
from labs.checks.training import train_and_compare
from labs.checks.verdicts import Wrong
from labs.training import data
from labs.training.models import move_to_rank, trainable
from labs.zero_stages.stage_training import HINTS, parameters_of

BYTES = 8  # of a sequence: the inputs and the outputs of a model


class Predictor(nn.Module):
    """Predicts y from x, both bytes of shape (batch, 8), as numbers: `predict` is of a subclass."""

    def forward(self, x, y):
        predicted = self.predict(x / 255)
        # No pytree container: a search for tensors in outputs that knows only those finds none
        # here.
        return SimpleNamespace(logits=predicted, loss=F.mse_loss(predicted, y / 255))

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        """What the model says of x, in the shape of x."""
        raise NotImplementedError


class Listed(Predictor):
    """Layers in a ModuleList, called in an order, between an inlet and an outlet, or without."""

    def __init__(self, layers: list[nn.Module], order: list[int] | None = None,
                 root: bool = True):
        super().__init__()
        width = layers[0].in_features
        self.layers = nn.ModuleList(layers)
        # The order of calls may differ from that of definition, and leave layers out.
        self.order = range(len(layers)) if order is None else order
        self.inlet = nn.Linear(BYTES, width) if root else nn.Identity()
        self.outlet = nn.Linear(width, BYTES) if root else nn.Identity()

    def predict(self, x):
        hidden = self.inlet(x)
        for number in self.order:
            hidden = hidden + torch.tanh(self.layers[number](hidden))
        return self.outlet(hidden)


class Chained(Predictor, nn.Sequential):
    """An nn.Sequential: no parameter lies outside its layers."""

    def predict(self, x):
        return nn.Sequential.forward(self, x)


class Bare(Predictor):
    """A module without children, whose parameters are its own."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.eye(BYTES)), nn.Parameter(torch.zeros(BYTES))

    def predict(self, x):
        return x @ self.weight + self.bias


class OddShapes(Predictor):
    """Parameters with no dimension and with many, one of one number, and a frozen one; a layer that
    is called with keywords and returns a dict."""

    class Layer(nn.Module):
        """Scales, shifts and mixes."""

        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(0.9))
            self.shift = nn.Parameter(torch.randn(1, 2, 1, 4))
            self.one = nn.Parameter(torch.ones(1))
            self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)

        def forward(self, *, hidden):
            return {"hidden": torch.tanh(hidden * self.scale + self.shift.flatten() * self.one
                                         + self.frozen.sum())}

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(3))
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def predict(self, x):
        for layer in self.layers:
            x = layer(hidden=x)["hidden"]
        return x * self.temperature


def _linears(*widths: int) -> list[nn.Linear]:
    return [nn.Linear(a, b) for a, b in zip(widths, widths[1:], strict=False)]


def _two_layers_with_one_weight() -> Predictor:
    layers = _linears(7, 7, 7, 7)
    layers[2].weight = layers[0].weight
    return Listed(layers)


def _layer_with_a_root_weight() -> Predictor:
    model = Listed(_linears(BYTES, BYTES, BYTES))
    model.layers[1].weight = model.outlet.weight
    return model


def _one_layer_far_larger() -> Predictor:
    return Chained(nn.Linear(BYTES, 3), nn.Tanh(), nn.Linear(3, 211), nn.Tanh(),
                   nn.Linear(211, BYTES))


# name -> makes the model; call it after torch.manual_seed
ARCHITECTURES: dict[str, Callable[[], Predictor]] = {
    "layers and a root": lambda: Listed(_linears(7, 7, 7, 7)),
    "a list of layers, no root": lambda: Listed(_linears(8, 8, 8, 8), root=False),
    "an nn.Sequential": lambda: Chained(*_linears(8, 11), nn.Tanh(), *_linears(11, 5), nn.Tanh(),
                                        *_linears(5, 8)),
    "one layer": lambda: Chained(nn.Linear(BYTES, BYTES)),
    "no layers": Bare,
    "odd shapes": OddShapes,
    "a layer used twice": lambda: Listed(_linears(7, 7, 7), order=[0, 1, 0]),
    "one layer listed three times": lambda: Listed(_linears(7, 7) * 3),
    "layers in another order": lambda: Listed(_linears(7, 7, 7, 7), order=[2, 0, 1]),
    "a layer never used": lambda: Listed(_linears(7, 7, 7, 7), order=[0, 2]),
    "the last layer never used": lambda: Listed(_linears(8, 8, 8, 8), order=[0, 1], root=False),
    "two layers with one weight": _two_layers_with_one_weight,
    "a layer with a weight of the root": _layer_with_a_root_weight,
    "one layer far larger": _one_layer_far_larger,
}


def make(name: str, seed: int = 0) -> Predictor:
    """The model with this name, the same on every rank, on its device."""
    torch.manual_seed(seed)
    return move_to_rank(ARCHITECTURES[name]())


# Those in which a stage goes wrong that trains a model with a root and layers of its own.
_CHECKED = ("an nn.Sequential", "odd shapes", "a layer used twice", "a layer never used",
            "two layers with one weight", "a layer with a weight of the root",
            "one layer far larger")
_SETTINGS = {"lr": 0.1, "momentum": 0.9}
_STEPS = 3
_MISTAKES = (
    NOT_UPDATED.with_hint("Does the optimizer hold a shard of it, and does the shard get its "
                          "gradient?"),
    MOMENTUM_MISSING)


def compare_on_other_architectures(strategy: Callable) -> None:
    """On a rank: trains a model of each structure next to the reference, with an optimizer class
    that only the strategy's second argument can tell. Raises Wrong."""
    for name in _CHECKED:
        try:
            _compare_with_reference(strategy, make(name))
        except Wrong as error:
            raise error.said_of(f"in a model with {name}") from None


def _compare_with_reference(strategy, model):
    class GivenSGD(torch.optim.SGD):
        """Remembers that it was made."""

        made = False

        def __init__(self, *args, **settings):
            super().__init__(*args, **settings)
            GivenSGD.made = True

    # Of a layer that is never used: without weight decay, SGD leaves the same numbers for gradients
    # of zeros and for none.
    reference = Reference(model, _sgd, unused="skip")
    module, optimizer = raise_on_all_ranks(module_and_optimizer, strategy, model, GivenSGD,
                                           _SETTINGS)
    # catches an optimizer that is chosen by name, whatever class it is given
    if not GivenSGD.made:
        raise Wrong("the strategy was given the optimizer class SGD and has made none of it",
                    "Make the inner optimizer by optimizer_class(shards, **settings).",
                    code="optimizer_class_ignored")
    steps = [Step(batch) for batch in data.xy_batches(_STEPS, BATCH, seed=3)]
    train_and_compare(module, optimizer, [reference], steps, mistakes=_MISTAKES, hints=HINTS,
                           parameters_of=partial(parameters_of, model=model))


def _sgd(model):
    return torch.optim.SGD([p for _, p in trainable(model)], **_SETTINGS)
