"""Checks of exercises 2.5 and 2.6: how parameters are cut into buckets, and how one bucket is
reduced."""

import time

import torch
import torch.distributed as dist
from torch import nn

from labs.exercises.invariants import mark_waits, positions
from labs.exercises.on_ranks import close, on_ranks, raise_on_all_ranks
from labs.exercises.verdicts import Wrong, check
from labs.manual_ddp.gradients import name_mistake
from labs.meters.traffic import Traffic
from labs.training.models import EdgeCaseModel, trainable

SHAPES = ((3, 5), (7,), (2, 2, 2), (1,))  # of the parameters in the bucket of exercise 2.6


@check("2.5")
def check_make_buckets(make_buckets):
    """make_buckets(parameters, cap_bytes) returns lists of trainable parameters, the last first."""
    model = EdgeCaseModel()
    for cap in (900, 400, 2000, 280, 10**6):  # 280: the last two parameters fill it exactly
        judge_buckets(make_buckets(model.parameters(), cap), model, cap)
    for layer in ("second", "first"):
        mixed = EdgeCaseModel()
        getattr(mixed, layer).to(torch.float64)
        judge_buckets(make_buckets(mixed.parameters(), 900), mixed, 900)
    return "every trainable parameter is in one bucket, last layer first, within the cap"


def judge_buckets(buckets: list[list[nn.Parameter]], model: nn.Module,
                  cap: int | None = None) -> None:
    """Raises Wrong where the buckets are not as exercise 2.5 wants them; cap None: of any size."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    try:
        order = [names[id(parameter)] for bucket in buckets for parameter in bucket]
    except (TypeError, KeyError):
        raise Wrong("make_buckets must return lists of the model's own parameters",
                    "A list of lists, with the parameters themselves, not copies.") from None
    want = [name for name, _ in trainable(model)][::-1]
    _judge_complete(order, want)
    # a bucket without parameters would be an all-reduce of nothing
    if [] in [list(bucket) for bucket in buckets]:
        raise Wrong("one bucket is empty", "Open a bucket only when there is something for it.")
    # backward completes gradients from the last layer to the first: in the other order the first
    # bucket leaves last, and nothing overlaps
    if order != want:
        raise Wrong(f"the first bucket begins with {order[0]!r}, not with the last layer",
                    "Backward reaches the last layer first: go through the parameters in reverse.")
    for number, bucket in enumerate(buckets):
        # torch.cat would promote a mixed bucket: the lower precision would travel as the higher
        types = sorted({str(p.dtype).removeprefix("torch.") for p in bucket})
        if len(types) > 1:
            raise Wrong(f"bucket {number} mixes {' and '.join(types)}: no tensor can hold both",
                        "Open a new bucket where the dtype changes.")
    if cap is not None:
        _judge_sizes(buckets, cap)


def _judge_complete(order, want):
    frozen = [name for name in order if name not in want]
    if frozen:
        raise Wrong(f"{frozen[0]!r} is frozen and has no gradient to send",
                    "Leave out parameters with requires_grad=False.")
    # a parameter in no bucket is never averaged: the ranks drift apart
    missing = [name for name in want if name not in order]
    if missing:
        raise Wrong(f"{', '.join(map(repr, missing))} is in no bucket",
                    "Is the last bucket, not full, kept too?")
    if len(order) > len(want):
        twice = next(name for name in order if order.count(name) > 1)
        raise Wrong(f"{twice!r} is in {order.count(twice)} buckets", "Once is enough.")


def _judge_sizes(buckets, cap):
    sizes = [[p.numel() * p.element_size() for p in bucket] for bucket in buckets]
    for number, bucket in enumerate(sizes):
        if len(bucket) > 1 and sum(bucket) > cap:
            raise Wrong(f"bucket {number} has {sum(bucket)} bytes, the cap is {cap}",
                        "Close a bucket before it would exceed the cap; count bytes, not elements.")
    for number in range(len(buckets) - 1):
        # a bucket for each parameter is within any cap, but saves no call
        fits = sum(sizes[number]) + sizes[number + 1][0] <= cap
        if fits and buckets[number][-1].dtype == buckets[number + 1][0].dtype:
            raise Wrong(f"with a cap of {cap} bytes, bucket {number} has {sum(sizes[number])} "
                        f"bytes and the next parameter has {sizes[number + 1][0]}: it would fit",
                        "Fill a bucket before you open the next.")


@check("2.6", hints={"missing 1 required positional": "start returns what finish needs: the flat "
                                                     "tensor and the handle."})
def check_bucket(start, finish):
    """start(bucket) begins one all-reduce of all its gradients; finish(bucket, *started) waits and
    gives every parameter its averaged gradient."""
    on_ranks(_one_bucket, start, finish)
    return "one asynchronous all-reduce per bucket; every gradient comes back averaged"


def _one_bucket(start, finish):
    """On a rank: one bucket through both functions."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    bucket = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    by_rank = [[_gradient(r, n) for n in range(len(SHAPES))] for r in range(ranks)]
    for parameter, gradient in zip(bucket, by_rank[rank], strict=True):
        parameter.grad = gradient
    own = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in bucket]
    mean = [sum(g for g in column if g is not None) / ranks
            for column in zip(*by_rank, strict=True)]
    _delay_the_last_rank()
    with Traffic() as traffic, mark_waits(traffic):
        started = start(bucket)
        # the ranks must not meet in between, or a finish that does not wait would go unnoticed
        wrong = _judge_start(traffic, sum(p.numel() for p in bucket), started)
        if wrong is None:
            finish(bucket, *started)
    waited = positions(traffic.events, "wait")
    raise_on_all_ranks(_judge_finish, wrong, bucket, mean, own, waited)


def _gradient(rank, number):
    """A rank's gradient of one parameter of the bucket; rank 1 did not use number 2."""
    if (rank, number) == (1, 2):
        return None
    shape = torch.Size(SHAPES[number])
    return torch.arange(shape.numel()).view(shape) + 100.0 * rank


def _delay_the_last_rank():
    """So that a `finish` that does not wait reads gradients that have not been summed yet."""
    dist.barrier()
    if dist.get_rank() == dist.get_world_size() - 1:
        time.sleep(0.2)


def _judge_start(traffic, elements, started) -> Wrong | None:
    # one call for the whole bucket: each call has a fixed cost, which buckets save
    calls = traffic.of("all_reduce")
    if len(calls) != 1 or len(traffic.calls) != 1:
        kinds = ", ".join(call.kind for call in traffic.calls) or "nothing"
        return Wrong(f"start called {len(traffic.calls)} collectives ({kinds}), not one all_reduce",
                     "Put the gradients one after the other in one flat tensor.")
    if calls[0].elements != elements:
        return Wrong(f"the all-reduce carries {calls[0].elements} elements, the bucket has "
                     f"{elements}", "A gradient that is None travels as zeros.")
    # a synchronous call, or a wait right after it, stops backward until the bucket has arrived
    if not calls[0].asynchronous or len(traffic.events) > 1:
        return Wrong("start waits for its all-reduce: backward would stand still",
                     "dist.all_reduce(..., async_op=True) returns at once; wait in finish.")
    if not isinstance(started, tuple | list):
        what = "nothing (None)" if started is None else f"one {type(started).__name__}"
        return Wrong(f"start returned {what}", "Return two things: the flat tensor and the handle.")
    return None


def _judge_finish(wrong, bucket, mean, own, waited):
    if wrong:
        raise wrong
    for number, parameter in enumerate(bucket):
        who = f"rank {dist.get_rank()}, gradient {number} of the bucket"
        if parameter.grad is None or parameter.grad.shape != parameter.shape:
            shape = None if parameter.grad is None else tuple(parameter.grad.shape)
            raise Wrong(f"{who}: shape {shape}, not {tuple(parameter.shape)}",
                        "Cut the flat tensor up again, in the same order, with the same shapes.")
        if not close(parameter.grad, mean[number]):
            if not waited:
                raise Wrong(f"{who} was used before it arrived: finish does not wait",
                            "Call handle.wait() before you touch the flat tensor.")
            sentence, hint = name_mistake(parameter.grad, mean[number], own[number])
            raise Wrong(f"{who} {sentence}", hint)
