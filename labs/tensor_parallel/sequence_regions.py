"""Exercise 7.7, first half: the conjugate pair along the sequence, as functions."""

import dataclasses
from collections.abc import Callable

import torch
import torch.distributed as dist

from labs.checks.inputs import require_dtype
from labs.checks.on_ranks import raise_on_all_ranks
from labs.checks.verdicts import Wrong, kind_of
from labs.meters.traffic import CollectiveCall, Traffic
from labs.tensor_parallel.regions import read_tensor

GATHER, SCATTER = "GatherToRegion", "ReduceScatterFromRegion"
_KINDS = {"all_gather": "all_gather_sequence", "reduce_scatter": "reduce_scatter_sequence"}
# Of a piece: batch, tokens, hidden. 2, 3 and 4 ranks divide the first one's tokens once more, so
# that the two functions in each other's place return a shape that can be named.
SHAPES = ((2, 12, 5), (1, 1, 4), (3, 2, 1))


def judge_regions(gather: Callable, reduce_scatter: Callable, group: dist.ProcessGroup) -> None:
    """On the ranks of `group`: tries both functions on several shapes and dtypes; raises Wrong with
    what broke. Numbers are whole, so that sums are exact in any order."""
    ranks = dist.get_world_size(group)
    for batch, tokens, hidden in SHAPES:
        piece, whole = (batch, tokens, hidden), (batch, tokens * ranks, hidden)
        _judge(gather, GATHER, piece, whole, group)
        _judge(reduce_scatter, SCATTER, whole, piece, group)


def _judge(region, name, taken, given, group):
    # One of the shapes in float64: a result in torch's default dtype shows.
    dtype = torch.float64 if taken[0] == 1 else torch.float32
    # not contiguous, as hidden states after a transpose are
    x = _draw(taken[::-1], 0, dtype).transpose(0, 2).requires_grad_()
    before = x.detach().clone()
    with Traffic() as forward, forward.marked_waits():
        y = region.apply(x, group)
        # Read as a user of it does: a functional collective waits only then, and rightly.
        read_tensor(y)
        forgotten = forward.never_waited_for()
    raise_on_all_ranks(_require_tensor, y, given, x, name)
    upstream = _draw(y.shape, 1, dtype)
    with Traffic() as backward, backward.marked_waits():
        # one step on the way, so that the gradient which arrives is the function's own
        (gradient,) = torch.autograd.grad((y * 1).mul(upstream).sum(), x, allow_unused=True)
        read_tensor(gradient)
        forgotten += backward.never_waited_for()
    # What the other ranks had, with which the result is computed here.
    everyone = [_of_all(tensor, group) for tensor in (before, upstream)]
    raise_on_all_ranks(_judge_numbers, name, (x, before), (y, gradient), everyone, group)
    raise_on_all_ranks(_judge_calls, name, (forward.calls, backward.calls), x,
                       dist.get_world_size(group))
    raise_on_all_ranks(_judge_waits, name, forgotten)


def counted_alike(call: CollectiveCall) -> CollectiveCall:
    """The call; an all-to-all, or one scatter from each rank, as a reduce-scatter: with a sum they
    send what it sends. torch's own differentiable all_gather does so on gloo."""
    is_equal = call.kind in ("all_to_all", "scatter")
    return dataclasses.replace(call, kind="reduce_scatter") if is_equal else call


def _draw(shape, stream, dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * dist.get_rank() + stream)
    return torch.randint(-50, 50, tuple(shape), generator=generator).to(dtype)


def _of_all(tensor, group) -> list[torch.Tensor]:
    found = [torch.empty(tensor.shape, dtype=tensor.dtype)
             for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, tensor.contiguous(), group=group)
    return found


def _require_tensor(y, shape, x, name):
    who = f"rank {dist.get_rank()}: {name}.apply(x, group) of x with shape {list(x.shape)}"
    if not isinstance(y, torch.Tensor) or tuple(y.shape) != shape:
        raise Wrong(f"{who} returned {kind_of(y)}, not a tensor of shape {list(shape)}",
                    "The pieces are cut along dimension 1, the sequence.", code="wrong_type")
    require_dtype(y, x, f"{name}'s result")
    # An output that does not depend on x ends the backward pass here, in silence.
    if not y.requires_grad:
        raise Wrong(f"{who}: the result has no gradient function",
                    "Call it as a torch.autograd.Function, through .apply, outside no_grad.",
                    code="no_gradient_function")


def _judge_numbers(name, inputs, results, everyone, group):
    (x, before), (y, gradient), (all_x, all_up) = inputs, results, everyone
    who, own = f"rank {dist.get_rank()}, {name}", dist.get_rank(group)
    # the caller goes on using the hidden states: they are on the residual path, too
    if not torch.equal(x.detach(), before):
        raise Wrong(f"{who} changed its input x", "Work on a copy.", code="changes_input")
    if gradient is None:
        raise Wrong(f"{who}: backward returns no gradient for x",
                    "backward returns (gradient of x, None): the group has none.",
                    code="gradient_missing")
    # The invariant: an all-gather and a reduce-scatter along the sequence are each other's
    # backward, because each rank uses the gathered tensor in another way: gradients of one piece
    # come from all ranks, and are summed.
    ways = {"forward": (_gathered, _scattered), "backward": (_scattered, _gathered)}
    for direction, got, tensors in (("forward", y, all_x), ("backward", gradient, all_up)):
        right = ways[direction][name == SCATTER]
        want = right(tensors, own)
        if got.shape == want.shape and torch.equal(got, want):
            continue
        if got.shape != want.shape:
            raise Wrong(f"{who}, {direction}: the shape is {list(got.shape)}, not "
                        f"{list(want.shape)}", "backward of one is forward of the other.",
                        code="wrong_shape")
        code, sentence = _explained(got, tensors, own, right)
        raise Wrong(f"{who}, {direction}: {sentence}", _HINTS[right is _gathered], code=code)


_HINTS = {True: "An all-gather along dimension 1: rank r's piece is the r-th of the sequence.",
          False: "A reduce-scatter along dimension 1: the sum over all ranks, of which rank r "
                 "keeps the r-th piece."}


def _gathered(tensors, _):
    return torch.cat(tensors, dim=1)


def _scattered(tensors, own):
    return sum(tensors).chunk(len(tensors), dim=1)[own]


def _explained(got, tensors, own, right) -> tuple[str, str]:
    """(code, what the numbers are, where a known mistake leads to them)."""
    ranks = len(tensors)
    if right is _gathered:
        padded = [torch.zeros_like(each) for each in tensors]
        padded[own] = tensors[own]
        whole = _gathered(tensors, own)
        causes = [("wrong_order", "the pieces are in another order than the ranks",
                   torch.cat(tensors[::-1], dim=1)),
                  ("not_gathered", "it is this rank's piece, repeated",
                   torch.cat([tensors[own]] * ranks, dim=1)),
                  ("not_gathered", "it has zeros where the other ranks' pieces belong",
                   torch.cat(padded, dim=1)),
                  ("wrong_scale", f"it is {ranks} times the gathered pieces", ranks * whole),
                  ("wrong_scale", f"it is 1/{ranks} of the gathered pieces", whole / ranks)]
    else:
        causes = [("not_summed", "it is this rank's own piece; the other ranks' parts are not "
                   "added", tensors[own].chunk(ranks, dim=1)[own]),
                  ("averaged", "it is the mean over ranks, not the sum",
                   _scattered(tensors, own) / ranks),
                  *(("wrong_part", f"it is the piece of rank {other} of the group",
                     _scattered(tensors, other)) for other in range(ranks) if other != own),
                  ("wrong_scale", f"it is {ranks} times the sum",
                   ranks * _scattered(tensors, own))]
    return next(((code, sentence) for code, sentence, value in causes
                 if value.shape == got.shape and torch.equal(got.double(), value.double())),
                ("wrong_value", f"{int((got != right(tensors, own)).sum())} of {got.numel()} "
                 "numbers are wrong"))


def _judge_calls(name, calls, x, ranks):
    kinds = ("all_gather", "reduce_scatter")
    order = kinds if name == GATHER else kinds[::-1]
    whole = x.numel() * (ranks if name == GATHER else 1)
    # The invariant: one collective in each direction, of the size of the gathered tensor.
    for direction, found, kind in zip(("forward", "backward"), calls, order, strict=True):
        if ({counted_alike(call).kind for call in found} == {kind}
                and sum(call.elements for call in found) == whole):
            continue
        # An all-reduce of which a piece is kept gives the same numbers for twice the bytes; a
        # gather of all ranks' whole tensors costs t times as much.
        raise Wrong(f"rank {dist.get_rank()}, {name}, {direction}: {described(found)}; one {kind} "
                    f"of {whole:,} elements is enough", f"{_KINDS[kind]} does it.",
                    code="wrong_traffic")


def described(calls: list[CollectiveCall]) -> str:
    """The calls in words: `all_reduce of 24 elements`, or `no collective`."""
    return ", ".join(f"{call.kind} of {call.elements:,} elements" for call in calls) \
        or "no collective"


def _judge_waits(name, forgotten):
    # What is not waited for may be done in time, or not.
    if forgotten:
        raise Wrong(f"rank {dist.get_rank()}, {name}: it does not wait for its "
                    f"{forgotten[0].kind}", "With async_op=True a collective returns before it is "
                    "done: call .wait() on what it returns.", code="never_waited")
