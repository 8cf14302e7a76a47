"""What the checks of notebook 02 train to tell right from nearly right: a second model with edge
cases, and which ranks use its optional layers."""

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F

from labs.training.models import VOCABULARY, move_to_rank

# Which ranks use the layers that not every step uses; on the others their gradients are None.
UseAll = Callable[[int], bool]
EVERY_RANK, NO_RANK = (lambda rank: True), (lambda rank: False)
ONLY_RANK_0, ALL_BUT_RANK_0 = (lambda rank: rank == 0), (lambda rank: rank != 0)

CAPS = (900, 700)  # of EdgeCaseModel's buckets: with 700 `sometimes_unused` has one to itself
NESTED_CAP = 120  # of NestedModel's: two buckets in a row hold optional layers only
BRANCHED_CAP = 400  # of BranchedModel's: its first bucket and its last have one parameter each
# With 3 ranks a mean, a sum, another rank's and half of a sum are four different numbers; with 2
# some are equal, and a message would name the wrong one. So 3 ranks come first.
WORLD_SIZES = (3, 2, 4)


class Block(nn.Module):
    """Two linear layers with a residual connection, computed in its parameters' dtype."""

    def __init__(self, width: int = 3, hidden: int = 7):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, width))

    def forward(self, x):
        return x + self.net(x.to(self.net[0].weight.dtype)).to(x.dtype)


class Outlet(nn.Module):
    """A scalar parameter, buffers of three kinds, and the largest matrix of the model."""

    def __init__(self, width: int = 3):
        super().__init__()
        self.gain = nn.Parameter(torch.rand(()) + 0.5)
        self.register_buffer("counted", torch.randint(1000, ()))
        self.register_buffer("mask", torch.rand(64) > 0.5)
        self.register_buffer("offset", torch.randn(width), persistent=False)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, x):
        return self.head(x * self.gain + self.offset)


class NestedModel(nn.Module):
    """A small model with what EdgeCaseModel lacks.

    All parameters lie in modules inside of modules; one is a scalar; the last one, which a bucket
    meets first, is as large as the first; `shared` is used twice; `optional` runs only with
    use_all; buffers are an integer, booleans, and one that state_dict() leaves out. mixed: `wide`
    has float64 parameters, so that the dtype changes twice. forward(x, y, use_all) as of
    EdgeCaseModel.
    """

    def __init__(self, seed: int = 0, mixed: bool = False):
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.ModuleDict({"embedding": nn.Embedding(VOCABULARY, 3), "shared": Block(),
                                   "wide": Block().to(torch.float64 if mixed else torch.float32),
                                   "optional": Block()})
        self.outlet = Outlet()
        move_to_rank(self)

    def forward(self, x, y, use_all: bool = False):
        body = self.body
        # (batch, sequence, 3)
        hidden = body["wide"](body["shared"](body["shared"](body["embedding"](x))))
        if use_all:
            hidden = body["optional"](hidden)
        logits = self.outlet(hidden)  # (batch, sequence, 256)
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        return SimpleNamespace(logits=logits, loss=loss)


class BranchedModel(nn.Module):
    """Layers that are used in one order and registered in the same or in the opposite one.

    `left` and `right`, of different sizes, change places on a rank with use_all, so that ranks get
    their gradients ready in different orders. optional: `optional` is one more layer, and use_all
    runs it instead. forward(x, y, use_all) as of EdgeCaseModel.
    """

    def __init__(self, seed: int = 0, optional: bool = False, is_reversed: bool = True):
        super().__init__()
        torch.manual_seed(seed)
        layers = {"embedding": nn.Embedding(VOCABULARY, 3), "inlet": nn.Linear(3, 6),
                  "left": Block(6, 5), "right": Block(6, 9),
                  **({"optional": Block(6, 4)} if optional else {}),
                  "outlet": nn.Linear(6, 4), "head": nn.Linear(4, VOCABULARY, bias=False)}
        # The order of registration is that of model.parameters(), and so of buckets.
        for name in list(layers)[::-1 if is_reversed else 1]:
            self.add_module(name, layers[name])
        move_to_rank(self)

    def forward(self, x, y, use_all: bool = False):
        # (batch, sequence, 6)
        hidden = torch.tanh(self.inlet(self.embedding(x)))
        has_optional = hasattr(self, "optional")
        swaps = use_all and not has_optional
        for block in (self.right, self.left) if swaps else (self.left, self.right):
            hidden = block(hidden)
        if use_all and has_optional:
            hidden = self.optional(hidden)
        logits = self.head(self.outlet(hidden))  # (batch, sequence, 256)
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        return SimpleNamespace(logits=logits, loss=loss)


def branched_model_with_optional(seed: int = 0) -> BranchedModel:
    """A BranchedModel whose layer `optional` not every step uses."""
    return BranchedModel(seed, optional=True)


def mixed_model(seed: int = 0) -> NestedModel:
    """A NestedModel with float64 parameters between float32 ones."""
    return NestedModel(seed, mixed=True)
