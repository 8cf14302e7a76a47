"""Forwards of random sizes, each of which saves something that one mistake in counting misses.

No tensor that needs a gradient is multiplied with a number of Python's: autograd keeps that number
in a tensor of 8 bytes which no hook sees.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from labs.checks.generator import new_generator


@dataclass(frozen=True)
class ForwardCase:
    """A forward: it takes nothing and returns a tensor. held: the tensors that are in memory
    without it."""

    name: str
    forward: Callable[[], torch.Tensor]
    held: list[torch.Tensor]


def forward_cases() -> list[ForwardCase]:
    """Returns all of them, with random sizes and data, new ones at every call."""
    rng = new_generator()
    batch, tokens, heads = rng.randint(2, 4), rng.randint(9, 20), rng.randint(2, 4)
    hidden, wide = heads * 2 * rng.randint(5, 9), rng.randint(150, 250)
    sizes = _Sizes(batch, tokens, heads, hidden, wide)
    return [build(sizes) for build in (
        _linear_layers, _attention, _half_of_a_tensor, _part_of_an_input, _expanded, _in_place,
        _bf16_with_dropout, _indices, _without_gradients, _tied_embedding, _flat_parameter,
        _checkpointed)]


@dataclass(frozen=True)
class _Sizes:
    batch: int
    tokens: int
    heads: int
    hidden: int
    wide: int

    def input(self, **options) -> torch.Tensor:
        # (batch, tokens, hidden)
        return torch.randn(self.batch, self.tokens, self.hidden, **options)

    def mlp(self) -> tuple[nn.Linear, nn.Linear]:
        return nn.Linear(self.hidden, self.wide), nn.Linear(self.wide, self.hidden)


def _held(x, *modules) -> list[torch.Tensor]:
    return [x, *(parameter for module in modules for parameter in module.parameters())]


def _linear_layers(sizes) -> ForwardCase:
    x, (up, _) = sizes.input(), sizes.mlp()
    down = nn.Linear(sizes.wide, sizes.hidden + 3)  # the output is not as large as the input
    return ForwardCase("linear layers with a GELU", lambda: down(F.gelu(up(x))), _held(x, up, down))


def _attention(sizes) -> ForwardCase:
    """Queries, keys and values are views of one storage."""
    x, project = sizes.input(), nn.Linear(sizes.hidden, 3 * sizes.hidden)
    shape = sizes.batch, sizes.tokens, sizes.heads, sizes.hidden // sizes.heads

    def forward():
        # Query, key and value: (batch, heads, tokens, hidden / heads) each.
        parts = [part.view(shape).transpose(1, 2) for part in project(x).chunk(3, -1)]
        return F.scaled_dot_product_attention(*parts, is_causal=True)

    return ForwardCase("attention", forward, _held(x, project))


def _half_of_a_tensor(sizes) -> ForwardCase:
    """Two operations use the second half only, and keep all of it in memory."""
    x, (up, _) = sizes.input(), sizes.mlp()

    def forward():
        # (batch, tokens, wide - wide // 2), of a storage of wide
        half = up(x)[..., sizes.wide // 2:]
        return F.silu(half) + F.gelu(half)

    return ForwardCase("activations of a half", forward, _held(x, up))


def _part_of_an_input(sizes) -> ForwardCase:
    """What is saved of the input begins in the middle of it."""
    x, scale = sizes.input(), nn.Parameter(torch.randn(sizes.hidden))
    return ForwardCase("an input without its first token", lambda: F.silu(x[:, 1:] * scale),
                       [x, scale])


def _expanded(sizes) -> ForwardCase:
    """A tensor whose elements share memory, and an output that backward needs."""
    x, (up, _) = sizes.input(), sizes.mlp()
    return ForwardCase("an expanded tensor", lambda: F.silu(
        up(x).sum(-1, keepdim=True).expand(-1, -1, sizes.wide)).exp(), _held(x, up))


def _in_place(sizes) -> ForwardCase:
    """ReLU in place, and a residual that is added in place."""
    x, (up, down) = sizes.input(), sizes.mlp()

    def forward():
        return F.silu(down(up(x).relu_()).add_(x))

    return ForwardCase("operations in place", forward, _held(x, up, down))


def _bf16_with_dropout(sizes) -> ForwardCase:
    """One input for two layers, as in SwiGLU, in bf16, under masks and a norm with statistics."""
    x, dtype = sizes.input(dtype=torch.bfloat16), torch.bfloat16
    up, gate = (nn.Linear(sizes.hidden, sizes.wide, dtype=dtype) for _ in range(2))
    down, norm = nn.Linear(sizes.wide, sizes.hidden, dtype=dtype), nn.LayerNorm(sizes.hidden,
                                                                              dtype=dtype)

    def forward():
        y = norm(x)
        return F.dropout(down(F.silu(gate(y)) * up(y)), 0.1) + x

    return ForwardCase("a norm, SwiGLU and dropout in bf16", forward,
                       _held(x, norm, up, gate, down))


def _indices(sizes) -> ForwardCase:
    """Indices are 8 bytes each."""
    x, (up, _) = sizes.input(), sizes.mlp()
    return ForwardCase("the largest values", lambda: up(x).topk(sizes.wide // 2).values,
                       _held(x, up))


def _without_gradients(sizes) -> ForwardCase:
    """A teacher's output, which is computed and not saved."""
    x, (up, down) = sizes.input(), sizes.mlp()

    def forward():
        with torch.no_grad():
            target = down(F.gelu(up(x)))
        return (down(up(x)) - target).square()

    return ForwardCase("a distance to what has no gradient", forward, _held(x, up, down))


def _tied_embedding(sizes) -> ForwardCase:
    """One weight is embedding and head; the loss keeps log-softmax."""
    words, norm = nn.Embedding(sizes.wide, sizes.hidden), nn.LayerNorm(sizes.hidden)
    tokens = torch.randint(sizes.wide, (sizes.batch, sizes.tokens))  # (batch, tokens)

    def forward():
        # (batch, tokens - 1, wide)
        logits = F.linear(norm(words(tokens[:, :-1])), words.weight)
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    return ForwardCase("a tied embedding and cross-entropy", forward, _held(tokens, words, norm))


def _flat_parameter(sizes) -> ForwardCase:
    """Two weights are views of one parameter, as under ZeRO-3; one is cast to bf16."""
    x, size = sizes.input(), sizes.hidden**2
    flat = nn.Parameter(torch.randn(2 * size))

    def forward():
        first, second = (part.view(sizes.hidden, sizes.hidden) for part in flat.split(size))
        return F.linear(F.silu(F.linear(x, first)).bfloat16(), second.bfloat16())

    return ForwardCase("two weights in a flat parameter", forward, [x, flat])


def _checkpointed(sizes) -> ForwardCase:
    """Of a checkpointed block only its input stays. Checkpointing would also keep the state of the
    random generator, 5,056 bytes on a CPU, in no tensor that autograd saves."""
    x, (up, down) = sizes.input(), sizes.mlp()
    block = nn.Sequential(nn.LayerNorm(sizes.hidden), up, nn.GELU(), down)

    def forward():
        y = down(up(x))
        for _ in range(3):
            y = y + checkpoint(block, y, use_reentrant=False, preserve_rng_state=False)
        return F.silu(y)

    return ForwardCase("checkpointed blocks", forward, _held(x, block))
