"""Check of exercise 2.7: a bucket's all-reduce starts as soon as the bucket is complete."""

from collections.abc import Callable

import torch.distributed as dist

from labs.exercises.invariants import positions, record_step
from labs.exercises.on_ranks import BATCH, on_ranks, raise_on_all_ranks, torchs_own_refused
from labs.exercises.reference import Step
from labs.exercises.verdicts import Wrong, check
from labs.manual_ddp.checks.average_gradients import EVERY_RANK, ONLY_RANK_0, train_wrapped
from labs.manual_ddp.checks.buckets import judge_buckets
from labs.manual_ddp.gradients import sgd
from labs.meters.traffic import CollectiveCall
from labs.training import data
from labs.training.models import EdgeCaseModel, count_trainable

CAP = 900  # bytes: small enough for EdgeCaseModel to have several buckets


@check("2.7", hints={"The size of tensor a": "`in` compares tensors by value. Ask a set, as in "
                                            "self.ready.issuperset(bucket)."})
def check_overlap(wrap):
    """wrap(model, cap_bytes) returns a bucketed module whose buckets leave during backward."""
    def work():
        small = judged_buckets(lambda model: wrap(model, CAP))
        model, [batch] = EdgeCaseModel(seed=0), data.xy_batches(1, BATCH)
        with torchs_own_refused("DistributedDataParallel"):
            step = record_step(lambda model: (small(model), sgd(model)), model,
                               [Step(batch, EVERY_RANK).inputs()])
        raise_on_all_ranks(_judge_order, step, model)
        everyone, _ = train_wrapped(small, steps=4, use_all=EVERY_RANK)
        # a parameter that only rank 0 uses never gets ready elsewhere, yet its bucket must leave
        # on every rank, and in the same order
        some, _ = train_wrapped(small, steps=3, use_all=ONLY_RANK_0)
        return max(everyone, some)

    return (f"the first bucket leaves before backward ends, and the numbers are the reference's "
            f"(to {max(on_ranks(work)):.0e})")


def judged_buckets(wrap: Callable) -> Callable:
    """Returns wrap, but its buckets are judged first: a parameter that is in none of them is not a
    mistake of the hooks."""
    def wrapped(model):
        module = wrap(model)
        if hasattr(module, "buckets"):
            try:
                judge_buckets(module.buckets, model)
            except Wrong as wrong:
                raise Wrong(f"its buckets are not those of exercise 2.5: {wrong.sentence}",
                            wrong.hint) from None
        return module

    return wrapped


def _judge_order(step, model):
    begin, end = positions(step.events, "backward")
    events = step.events[begin:end]
    calls = [i for i, event in enumerate(events) if isinstance(event, CollectiveCall)]
    last_ready, waits = positions(events, "ready")[-1], positions(events, "wait")
    if not calls:
        raise Wrong("backward communicates nothing",
                    "Start a bucket when its last gradient is ready.")
    # "overlapped" by name only: a single bucket, or all of them sent when backward is over
    if len(calls) == 1:
        raise Wrong("one all-reduce carries everything: it can only leave when all is ready",
                    "Send each bucket by itself.")
    if calls[0] > last_ready:
        raise Wrong("the first all-reduce is issued after the last gradient is ready: nothing "
                    "overlaps with backward", "Start a bucket in gradient_ready, not at the end.")
    # the last bucket leaves when backward has nothing left to compute, so only it may be waited for
    if not all(events[i].asynchronous for i in calls[:-1]):
        raise Wrong("an all-reduce during backward is not asynchronous: backward stands still",
                    "Use the start of exercise 2.6 and wait at the end of backward.")
    if waits and waits[0] < last_ready:
        raise Wrong("a bucket is waited for while gradients are still being computed",
                    "Wait for all buckets in backward_done.")
    # a bucket sent twice, or the last one forgotten
    sent, want = sum(events[i].bytes for i in calls), 4 * count_trainable(model)
    if sent != want:
        raise Wrong(f"rank {dist.get_rank()} sent {sent:,} bytes; its gradients have {want:,}",
                    "Each bucket once, also the last one.")
