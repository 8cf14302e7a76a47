"""Checks of exercises 2.5 to 2.7: how buckets are cut, how one travels, and when it leaves."""

import torch
import torch.distributed as dist

from labs.exercises.on_ranks import on_ranks
from labs.exercises.verdicts import Wrong, check
from labs.manual_ddp import twin as twins
from labs.manual_ddp.checks import follow_twin
from labs.meters.traffic import CollectiveCall, Mark, Traffic, hook_waits
from labs.training import data
from labs.training.models import EdgeCaseModel, count_trainable, trainable


@check("2.5")
def check_make_buckets(make_buckets):
    """make_buckets(parameters, cap_bytes): lists of trainable parameters, the last one first."""
    model = EdgeCaseModel()
    for cap in (900, 400, 2000, 280, 10**6):  # 280: the last two parameters fill it exactly
        judge_buckets(make_buckets(model.parameters(), cap), model, cap)
    for part in ("second", "first"):
        mixed = EdgeCaseModel()
        getattr(mixed, part).to(torch.float64)
        judge_buckets(make_buckets(mixed.parameters(), 900), mixed, 900)
    return "every trainable parameter is in one bucket, last layer first, within the cap"


def judge_buckets(buckets, model, cap=None):
    """Raises Wrong where the buckets are not as exercise 2.5 wants them; cap None: of any size."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    try:
        order = [names[id(parameter)] for bucket in buckets for parameter in bucket]
    except (TypeError, KeyError):
        raise Wrong("make_buckets must return lists of the model's own parameters",
                    "A list of lists, with the parameters themselves, not copies.") from None
    want = [name for name, _ in trainable(model)][::-1]
    _check_complete(order, want)
    if [] in [list(bucket) for bucket in buckets]:
        raise Wrong("one bucket is empty", "Open a bucket only when there is something for it.")
    if order != want:
        raise Wrong(f"the first bucket begins with {order[0]!r}, not with the last layer",
                    "Backward reaches the last layer first: go through the parameters in reverse.")
    sizes = [[p.numel() * p.element_size() for p in bucket] for bucket in buckets]
    for number, bucket in enumerate(buckets):
        types = sorted({str(p.dtype).removeprefix("torch.") for p in bucket})
        if len(types) > 1:
            raise Wrong(f"bucket {number} mixes {' and '.join(types)}: no tensor can hold both",
                        "Open a new bucket where the dtype changes.")
    if cap is None:
        return
    for number, bucket in enumerate(sizes):
        if len(bucket) > 1 and sum(bucket) > cap:
            raise Wrong(f"bucket {number} has {sum(bucket)} bytes, the cap is {cap}",
                        "Close a bucket before it would exceed the cap; count bytes, not elements.")
    _check_full(buckets, sizes, cap)


def _check_complete(order, want):
    frozen = [name for name in order if name not in want]
    if frozen:
        raise Wrong(f"{frozen[0]!r} is frozen and has no gradient to send",
                    "Leave out parameters with requires_grad=False.")
    missing = [name for name in want if name not in order]
    if missing:
        raise Wrong(f"{', '.join(map(repr, missing))} is in no bucket",
                    "Is the last bucket, not full, kept too?")
    if len(order) > len(want):
        twice = next(name for name in order if order.count(name) > 1)
        raise Wrong(f"{twice!r} is in {order.count(twice)} buckets", "Once is enough.")


def _check_full(buckets, sizes, cap):
    for number in range(len(buckets) - 1):
        fits = sum(sizes[number]) + sizes[number + 1][0] <= cap
        same_type = buckets[number][-1].dtype == buckets[number + 1][0].dtype
        if fits and same_type:
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
    rank, ranks = dist.get_rank(), dist.get_world_size()
    shapes = [(3, 5), (7,), (2, 2, 2), (1,)]
    bucket = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    for number, parameter in enumerate(bucket):
        if rank != 1 or number != 2:  # a parameter that rank 1 did not use
            parameter.grad = torch.arange(parameter.numel()).view(parameter.shape) + 100.0 * rank
    own = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in bucket]
    want = [gradient.clone() for gradient in own]
    for gradient in want:
        dist.all_reduce(gradient)
        gradient /= ranks
    _delay_the_last_rank()
    with Traffic() as traffic, waits_marked(traffic):
        started = start(bucket)
        # no meeting of the ranks in between: a finish that does not wait must be seen not to
        wrong = _wrong_start(traffic, sum(p.numel() for p in bucket), started)
        if wrong is None:
            finish(bucket, *started)
    waited = any(getattr(event, "what", "") == "wait" for event in traffic.events)
    twins.raise_on_all_ranks(_judge_bucket, wrong, bucket, want, own, waited)


def _delay_the_last_rank():
    """So that a `finish` that does not wait reads gradients that have not been summed yet."""
    import time

    dist.barrier()
    if dist.get_rank() == dist.get_world_size() - 1:
        time.sleep(0.2)


def _wrong_start(*found):
    try:
        _judge_start(*found)
    except Wrong as wrong:
        return wrong


def _judge_bucket(wrong, *found):
    if wrong:
        raise wrong
    _judge_gradients(*found)


def _judge_start(traffic, elements, started):
    calls = traffic.of("all_reduce")
    if len(calls) != 1 or len(traffic.calls) != 1:
        kinds = ", ".join(call.kind for call in traffic.calls) or "nothing"
        raise Wrong(f"start called {len(traffic.calls)} collectives ({kinds}), not one all_reduce",
                    "Put the gradients one after the other in one flat tensor.")
    if calls[0].elements != elements:
        raise Wrong(f"the all-reduce carries {calls[0].elements} elements, the bucket has "
                    f"{elements}", "A gradient that is None travels as zeros.")
    if not calls[0].asynchronous or len(traffic.events) > 1:
        raise Wrong("start waits for its all-reduce: backward would stand still",
                    "dist.all_reduce(..., async_op=True) returns at once; wait in finish.")
    if not isinstance(started, tuple | list):
        what = "nothing (None)" if started is None else f"one {type(started).__name__}"
        raise Wrong(f"start returned {what}", "Return two things: the flat tensor and the handle.")


def _judge_gradients(bucket, want, own, waited):
    for number, parameter in enumerate(bucket):
        who = f"rank {dist.get_rank()}, gradient {number} of the bucket"
        if parameter.grad is None or parameter.grad.shape != parameter.shape:
            shape = None if parameter.grad is None else tuple(parameter.grad.shape)
            raise Wrong(f"{who}: shape {shape}, not {tuple(parameter.shape)}",
                        "Cut the flat tensor up again, in the same order, with the same shapes.")
        if not twins.close(parameter.grad, want[number]):
            if not waited:
                raise Wrong(f"{who} was used before it arrived: finish does not wait",
                            "Call handle.wait() before you touch the flat tensor.")
            sentence, hint = twins.fault(parameter.grad, want[number], own[number])
            raise Wrong(f"{who} {sentence}", hint)


@check("2.7", hints={"The size of tensor a": "`in` compares tensors by value. Ask a set, as in "
                                            "self.ready.issuperset(bucket)."})
def check_overlap(wrap):
    """wrap(model, cap_bytes): a bucketed module whose buckets leave during backward."""
    wrap = complete_buckets(small_buckets(wrap))

    def work():
        everywhere, _, _ = follow_twin(_watched(wrap), steps=4)
        sometimes, _, _ = follow_twin(wrap, steps=3, rare=lambda rank: rank == 0)
        return max(everywhere, sometimes)

    return (f"the first bucket leaves before backward ends, and the numbers are the twin's "
            f"(to {max(on_ranks(work)):.0e})")


def small_buckets(wrap):
    """wrap with a cap so small that the trap model has several buckets."""
    return lambda model: wrap(model, 900)


def _watched(wrap):
    """Wraps as the student does, and checks the order of events in one backward."""
    def wrapped(model):
        rehearsal = EdgeCaseModel(seed=0)
        events = order_of_events(wrap, rehearsal)
        twins.raise_on_all_ranks(_check_overlap, events, rehearsal)
        return wrap(model)

    return wrapped


def complete_buckets(wrap):
    """wrap, but its buckets are looked at first: what is wrong there is no fault of the hooks."""
    def wrapped(model, *args):
        module = wrap(model, *args)
        if hasattr(module, "buckets"):
            try:
                judge_buckets(module.buckets, model)
            except Wrong as wrong:
                raise Wrong(f"its buckets are not those of exercise 2.5: {wrong.sentence}",
                            wrong.hint) from None
        return module

    return wrapped


def order_of_events(wrap, model, batch=None) -> list:
    """One forward and backward of `wrap(model)`: gradients that got ready (marks), collectives,
    and waits, in the order in which they happened on this rank."""
    traffic = Traffic()
    for name, parameter in trainable(model):  # before the student's hooks, so it is seen first
        parameter.register_post_accumulate_grad_hook(
            lambda _, name=name: traffic.mark(f"ready {name}"))
    with twins.torchs_own_refused():
        module = wrap(model)
    if batch is None:
        [whole] = data.xy_batches(1, twins.BATCH)
        batch = {**data.shard(whole, dist.get_rank(), dist.get_world_size()), "use_all": True}
    loss = module(**batch).loss
    with traffic, waits_marked(traffic):
        traffic.mark("backward begins")
        loss.backward()
        traffic.mark("backward ends")
    return traffic.events


def waits_marked(traffic):
    return hook_waits(before=lambda _: traffic.mark("wait"))


def _check_overlap(events, model):
    calls = [i for i, event in enumerate(events) if isinstance(event, CollectiveCall)]
    ready = [i for i, event in enumerate(events)
             if isinstance(event, Mark) and event.what.startswith("ready")]
    waits = [i for i, event in enumerate(events)
             if isinstance(event, Mark) and event.what == "wait"]
    if not calls:
        raise Wrong("backward communicates nothing",
                    "Start a bucket when its last gradient is ready.")
    if len(calls) == 1:
        raise Wrong("one all-reduce carries everything: it can only leave when all is ready",
                    "Send each bucket by itself.")
    if calls[0] > ready[-1]:
        raise Wrong("the first all-reduce is issued after the last gradient is ready: nothing "
                    "overlaps with backward", "Start a bucket in gradient_ready, not at the end.")
    if not all(events[i].asynchronous for i in calls[:-1]):
        raise Wrong("an all-reduce during backward is not asynchronous: backward stands still",
                    "Use the start of exercise 2.6 and wait at the end of backward.")
    if waits and waits[0] < ready[-1]:
        raise Wrong("a bucket is waited for while gradients are still being computed",
                    "Wait for all buckets in backward_done.")
    sent = sum(events[i].bytes for i in calls)
    if sent != 4 * count_trainable(model):
        raise Wrong(f"rank {dist.get_rank()} sent {sent:,} bytes; its gradients have "
                    f"{4 * count_trainable(model):,}", "Each bucket once, also the last one.")
