"""Checks of exercises 2.8 and 2.9: gradients that accumulate before they are synchronized."""

import contextlib

import torch.distributed as dist

from labs.exercises.on_ranks import (
    BATCH,
    close,
    gradients,
    largest_difference,
    on_ranks,
    raise_on_all_ranks,
)
from labs.exercises.reference import Step
from labs.exercises.verdicts import Wrong, check
from labs.manual_ddp.checks.average_gradients import EVERY_RANK
from labs.manual_ddp.checks.combine import split
from labs.manual_ddp.checks.overlap import CAP
from labs.manual_ddp.gradients import judge_gradients, mean_and_own, reference_model
from labs.meters.traffic import Traffic
from labs.training import data
from labs.training.models import EdgeCaseModel

SIZES = (3, 1, 2)  # examples of a rank's micro-batches in exercise 2.9


@check("2.8", hints={"not an iterator": "no_sync must `yield` once, where the block runs.",
                     "context manager": "Decorate no_sync with @contextlib.contextmanager."})
def check_no_sync(wrap):
    """In wrap(model, cap_bytes).no_sync() backward communicates nothing; the next backward outside
    synchronizes all that was accumulated."""
    def work():
        model, reference = EdgeCaseModel(seed=0), reference_model()
        module = wrap(model, CAP)
        steps = [Step(batch, EVERY_RANK) for batch in data.xy_batches(3, BATCH)]
        for _ in range(2):  # the second time finds a flag that was not put back
            _accumulate(module, model, reference, steps)
            model.zero_grad()
        _raise_inside(module, steps[0])

    on_ranks(work)
    return "no_sync communicates nothing; the next backward averages all that was accumulated"


def _accumulate(module, model, reference, steps):
    """One backward for each step, all but the last inside no_sync."""
    mean, own = {}, {}

    def backward(step):
        reference.differentiate(step)
        for sums, found in zip((mean, own), mean_and_own(reference), strict=True):
            sums.update({name: sums.get(name, 0) + g for name, g in found.items()})
        with Traffic() as traffic:
            module(**step.inputs()).loss.backward()
        return traffic

    with module.no_sync():
        for number, step in enumerate(steps[:-1], 1):
            raise_on_all_ranks(_judge_inside, backward(step), module, model, own, number)
    raise_on_all_ranks(_judge_synchronized, backward(steps[-1]),
                       "after no_sync, backward still communicates nothing",
                       "Put the flag back when the block ends.")
    # what was accumulated inside must be averaged too, not only the last backward's part
    raise_on_all_ranks(judge_gradients, model, mean, own, "after no_sync, ")


def _judge_inside(traffic, module, model, own, number):
    # a synchronization in each backward gives right numbers at several times the traffic
    if traffic.calls:
        flag = "self.synchronize is still True, and "
        raise Wrong(f"inside no_sync, {flag * module.synchronize}{len(traffic.calls)} collectives "
                    "were called", "Set self.synchronize to False before the `yield`.")
    got = gradients(model)
    for name in own:
        if not close(got[name], own[name]):
            raise Wrong(f"rank {dist.get_rank()}, parameter {name!r}: inside no_sync its gradient "
                        f"is not the sum of this rank's own after {number} backward passes",
                        "Inside no_sync, gradients accumulate locally: neither averaged nor lost.")


def _judge_synchronized(traffic, sentence, hint):
    if not traffic.calls:
        raise Wrong(sentence, hint)


def _raise_inside(module, step):
    """Leaves no_sync by an exception, as an interrupted cell does."""
    with contextlib.suppress(KeyError), module.no_sync():
        raise KeyError
    with Traffic() as traffic:
        module(**step.inputs()).loss.backward()
    # the module must not stay silent for good
    raise_on_all_ranks(_judge_synchronized, traffic, "an exception inside no_sync left the flag "
                       "down: nothing communicates any more", "Put the flag back in a `finally`.")


@check("2.9")
def check_accumulate(accumulate, wrap):
    """accumulate(module, micro_batches) leaves the gradient of the mean loss over all examples of
    all ranks: one backward per micro-batch ({"x", "y"}), one synchronization. The sizes differ
    within a rank and are the same on all ranks."""
    def work():
        rank, ranks = dist.get_rank(), dist.get_world_size()
        [batch] = data.xy_batches(1, sum(SIZES) * ranks)
        by_rank = [split(data.shard(batch, r, ranks), SIZES) for r in range(ranks)]
        model, reference, passes = EdgeCaseModel(seed=0), reference_model(), []
        # this hook counts the backward passes that reach the parameter
        model.head.weight.register_post_accumulate_grad_hook(passes.append)
        module = wrap(model, CAP)
        with Traffic() as traffic:
            accumulate(module, by_rank[rank])
        reference.differentiate(Step(batch))
        raise_on_all_ranks(_judge_weights, gradients(model), mean_and_own(reference)[0], by_rank)
        raise_on_all_ranks(_judge_passes, len(passes), len(traffic.calls), len(module.buckets))

    on_ranks(work)
    return "unequal micro-batches give the full batch's gradient, with one synchronization"


def _judge_weights(got, want, by_rank):
    # micro-batches of 3, 1 and 2 examples: without weights, each example of the smallest counts
    # three times
    if _alike(got, want):
        return
    for divide, sentence in ((1, "the sum of the micro-batches' mean losses"),
                             (len(SIZES), "the plain mean of the micro-batches' mean losses")):
        if _alike(got, _unweighted(by_rank, divide)):
            raise Wrong(f"the gradient is that of {sentence}",
                        "A micro-batch of 3 examples counts three times one of 1.")
    name = max(want, key=lambda name: largest_difference(got[name], want[name]))
    raise Wrong(f"rank {dist.get_rank()}, parameter {name!r}: gradient differs from the full "
                f"batch's by {largest_difference(got[name], want[name]):.2g}",
                "Weight each loss by its micro-batch's share; synchronize in the last backward.")


def _alike(got, want) -> bool:
    return all(close(got[name], want[name]) for name in want)


def _unweighted(by_rank, divide):
    """The mean over the ranks of the gradient of each one's sum of losses, divided by `divide`."""
    model = EdgeCaseModel(seed=0)
    losses = [model(**part).loss for parts in by_rank for part in parts]
    (sum(losses) / (divide * len(by_rank))).backward()
    return gradients(model)


def _judge_passes(passes, calls, buckets):
    # one synchronization is what accumulation is for
    if calls != buckets:
        raise Wrong(f"{calls} collectives for {len(SIZES)} micro-batches; one synchronization "
                    f"takes {buckets}", "All but the last backward belong inside no_sync.")
    # a single backward of the summed loss has the same gradient, and the memory of the full batch
    if passes != len(SIZES):
        raise Wrong(f"{passes} backward for {len(SIZES)} micro-batches: what they all saved was "
                    "held in memory at once", "One backward for each micro-batch.")
