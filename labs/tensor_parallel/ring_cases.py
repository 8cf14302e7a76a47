"""Queries, keys and values of a full sequence, the piece of it that a rank of a group has, and the
memory that an attention takes on the rank beside that piece, recorded."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn

from labs.meters import memory
from labs.tensor_parallel.attention_blocks import full_attention
from labs.workers import devices


@dataclass(frozen=True)
class Shape:
    """Of one rank's piece. tokens: of the sequence, on each rank. scale: of queries and keys."""

    batch: int = 1
    heads: int = 4
    kv_heads: int = 4
    tokens: int = 8
    d: int = 8
    scale: float = 1.0


@dataclass
class WholeSequence:
    """A full sequence on every rank of `group`, and this rank's piece.

    places: by rank of the group, the positions of its tokens. whole: q, k, v of the sequence in its
    order, each (batch, heads, tokens, d); weights: the gradient of the output, in the same order.
    """

    shape: Shape
    group: dist.ProcessGroup
    places: list[torch.Tensor]
    whole: list[torch.Tensor] = field(init=False)
    weights: torch.Tensor = field(init=False)

    def __post_init__(self):
        # One seed for all ranks: each can compute what any other rank has, without communication.
        s, generator = self.shape, torch.Generator().manual_seed(7)
        size = s.tokens * len(self.places)

        def draw(heads):
            # laid out as a linear layer's output, (batch, tokens, heads, d), and then transposed,
            # as in every transformer: such a tensor is not contiguous, and a send refuses it
            drawn = torch.randn(s.batch, size, heads, s.d, generator=generator)
            return drawn.to(devices.device()).transpose(1, 2)

        self.whole = [draw(s.heads) * s.scale, draw(s.kv_heads) * s.scale, draw(s.kv_heads)]
        self.weights = draw(s.heads)

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return dist.get_rank(self.group)

    @property
    def positions(self) -> torch.Tensor:
        """Those of this rank's tokens."""
        return self.places[self.rank].to(devices.device())

    def piece(self, whole: torch.Tensor, rank: int | None = None) -> torch.Tensor:
        """A rank's own tokens of a tensor of the full sequence; None: this rank's."""
        places = self.places[self.rank if rank is None else rank].to(whole.device)
        # Indexing makes a contiguous tensor; this brings back the strides of a layer's output.
        return whole[:, :, places].transpose(1, 2).contiguous().transpose(1, 2)

    def inputs(self) -> list[torch.Tensor]:
        """This rank's q, k, v, leaves that want a gradient."""
        return [self.piece(each).requires_grad_() for each in self.whole]

    def expected(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The attention of the full sequence and the gradients of q, k and v, in its order."""
        leaves = [each.clone().requires_grad_() for each in self.whole]
        out = full_attention(*leaves, torch.arange(leaves[0].shape[2], device=leaves[0].device))
        out.backward(self.weights)
        return out.detach(), [leaf.grad for leaf in leaves]


def contiguous_places(tokens: int, ranks: int) -> list[torch.Tensor]:
    """Each rank has the tokens that follow those of the rank before."""
    return list(torch.arange(tokens * ranks).view(ranks, tokens))


def shuffled_places(tokens: int, ranks: int) -> list[torch.Tensor]:
    """Each rank has tokens from anywhere, in no order."""
    order = torch.randperm(tokens * ranks, generator=torch.Generator().manual_seed(3))
    return list(order.view(ranks, tokens))


def places_of_chunks(assignment: Sequence[Sequence[int]], tokens: int) -> list[torch.Tensor]:
    """Each rank has the tokens of its chunks, of `tokens` tokens each, in the order given."""
    return [torch.cat([torch.arange(tokens) + tokens * int(chunk) for chunk in chunks])
            for chunks in assignment]


def groups_on(ranks: int) -> list[dist.ProcessGroup | None]:
    """On all of `ranks` ranks: WORLD and one group below it that has this rank, every second one of
    four, the last two of three. None for the rank that is in no such group; of two ranks, WORLD
    alone."""
    members = {4: [[0, 2], [1, 3]], 3: [[1, 2]]}.get(ranks, [])
    # new_group is a collective of all ranks, those outside of the group included.
    made = [dist.new_group(each) for each in members]
    own = [group for group, each in zip(made, members, strict=True) if dist.get_rank() in each]
    return [dist.group.WORLD, *(own or [None])[:len(made)]]


BYTES = 4  # of an fp32 number


def record_attention(attention: Callable, sequence: WholeSequence) -> memory.Report:
    """On a rank: what attention(q, k, v, positions, group) holds in forward and backward; its
    inputs and the gradient of its output were there before."""
    q, k, v = sequence.inputs()
    batch = {"q": q, "k": k, "v": v, "weights": sequence.piece(sequence.weights)}
    module = _Attention(attention, sequence.positions, sequence.group)
    # memory.record takes a module and an optimizer. An attention has no parameters, so this one
    # updates a number that is in no module.
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    # Two steps: what is left behind by the first one counts in the second.
    return memory.record(lambda: (module, optimizer), [batch, batch])


class _Attention(nn.Module):
    """An attention in the place of a model: its loss is the sum of out · weights."""

    def __init__(self, attention, positions, group):
        super().__init__()
        self._attention, self._positions, self._group = attention, positions, group

    def forward(self, q, k, v, weights):
        for each in (q, k, v):  # in a model they are no leaves: no gradient stays to the next step
            each.grad = None
        out = self._attention(q, k, v, self._positions, self._group)
        return SimpleNamespace(loss=_WeightedSum.apply(out, weights))


class _WeightedSum(torch.autograd.Function):
    """A loss with the gradient of the sum of out · weights, which is weights. Its value is that of
    one element: the product of all would be a tensor as large as out at the peak."""

    @staticmethod
    def forward(ctx, out, weights):
        ctx.save_for_backward(weights)
        return torch.dot(out.detach().flatten()[:1], weights.flatten()[:1])

    @staticmethod
    def backward(ctx, grad):
        return ctx.saved_tensors[0], None
