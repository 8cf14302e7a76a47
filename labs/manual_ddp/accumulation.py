"""Checks of exercises 2.8 and 2.9: gradients that accumulate before they are synchronized."""

import copy

import torch.distributed as dist

from labs.exercises.on_ranks import on_ranks
from labs.exercises.verdicts import Wrong, check
from labs.manual_ddp import twin as twins
from labs.meters.traffic import Traffic
from labs.training import data
from labs.training.models import EdgeCaseModel


@check("2.8", hints={"not an iterator": "no_sync must `yield` once, where the block runs.",
                     "context manager": "Decorate no_sync with @contextlib.contextmanager."})
def check_no_sync(wrap):
    """wrap(model, cap_bytes).no_sync(): backward inside it communicates nothing, the next one
    outside it synchronizes all that was accumulated."""
    def work():
        rank, ranks = dist.get_rank(), dist.get_world_size()
        model = EdgeCaseModel(seed=0)
        module, reference = wrap(model, 900), copy.deepcopy(model)
        batches = [data.shard(b, rank, ranks) for b in data.xy_batches(3, twins.BATCH)]
        for _ in range(2):  # the second time finds a flag that was not put back
            _check_accumulation(module, model, reference, batches)
            model.zero_grad()
        _check_exception(module, model, batches)

    on_ranks(work)
    return "no_sync communicates nothing; the next backward averages all that was accumulated"


def _check_accumulation(module, model, reference, batches):
    reference.zero_grad()
    with module.no_sync():
        for number, batch in enumerate(batches[:-1], 1):
            with Traffic() as quiet:
                module(**batch, use_all=True).loss.backward()
            reference(**batch, use_all=True).loss.backward()
            twins.raise_on_all_ranks(_judge_inside, module, model, reference, quiet, number)
    with Traffic() as loud:
        module(**batches[-1], use_all=True).loss.backward()
    reference(**batches[-1], use_all=True).loss.backward()
    own = twins.gradients(reference)
    want = {name: gradient.clone() for name, gradient in own.items()}
    for gradient in want.values():
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
    twins.raise_on_all_ranks(_judge_after, model, want, own, loud)


def _judge_after(model, want, own, loud):
    if not loud.calls:
        raise Wrong("after no_sync, backward still communicates nothing",
                    "Put the flag back when the block ends.")
    twins.compare_gradients(model, want, own, "after no_sync, ")


def _judge_inside(module, model, reference, traffic, number):
    if traffic.calls:
        flag = "self.synchronize is still True, and "
        raise Wrong(f"inside no_sync, {flag * module.synchronize}{len(traffic.calls)} collectives "
                    "were called", "Set self.synchronize to False before the `yield`.")
    got, want = twins.gradients(model), twins.gradients(reference)
    for name in want:
        if not twins.close(got[name], want[name]):
            raise Wrong(f"rank {dist.get_rank()}, parameter {name!r}: inside no_sync its gradient "
                        f"is not the sum of this rank's own after {number} backward passes",
                        "Inside no_sync, gradients accumulate locally: neither averaged nor lost.")


def _check_exception(module, model, batches):
    try:
        with module.no_sync():
            raise KeyError
    except KeyError:
        pass
    with Traffic() as traffic:
        module(**batches[0], use_all=True).loss.backward()
    model.zero_grad()
    twins.raise_on_all_ranks(_judge_exception, traffic)


def _judge_exception(traffic):
    if not traffic.calls:
        raise Wrong("an exception inside no_sync left the flag down: nothing communicates any more",
                    "Put the flag back in a `finally`.")


@check("2.9")
def check_accumulate(accumulate, wrap):
    """accumulate(module, micro_batches): the gradient of the mean loss over all examples of all
    ranks, one backward per micro-batch and one synchronization. Each is {"x", "y"}; their sizes
    differ within a rank and are the same on all ranks."""
    def work():
        rank, ranks = dist.get_rank(), dist.get_world_size()
        sizes = (3, 1, 2)
        [batch] = data.xy_batches(1, sum(sizes) * ranks)
        model, twin = EdgeCaseModel(seed=0), EdgeCaseModel(seed=0)
        passes = []
        model.head.weight.register_post_accumulate_grad_hook(passes.append)
        module = wrap(model, 900)
        mine = data.shard(batch, rank, ranks)
        micro = [dict(zip(mine, piece, strict=True))
                 for piece in zip(*(value.split(sizes) for value in mine.values()), strict=True)]
        with Traffic() as traffic:
            accumulate(module, micro)
        twin(**batch).loss.backward()
        _explain_accumulation(model, twins.gradients(twin), micro)
        twins.raise_on_all_ranks(_judge_passes, len(passes), traffic, module, len(micro))

    on_ranks(work)
    return "unequal micro-batches give the full batch's gradient, with one synchronization"


def _judge_passes(passes, traffic, module, parts):
    if len(traffic.calls) != len(module.buckets):
        raise Wrong(f"{len(traffic.calls)} collectives for {parts} micro-batches; one "
                    f"synchronization takes {len(module.buckets)}",
                    "All but the last backward belong inside no_sync.")
    if passes != parts:
        raise Wrong(f"{passes} backward for {parts} micro-batches: what they all saved was held "
                    "in memory at once", "One backward for each micro-batch.")


def _explain_accumulation(model, want, micro):
    got = twins.gradients(model)
    fine = all(twins.close(got[name], want[name]) for name in want)
    if all(_everyone(fine)):
        return
    for (divide, sentence) in ((1, "the sum of the micro-batches' mean losses"),
                               (len(micro), "the plain mean of the micro-batches' mean losses")):
        wrong = EdgeCaseModel(seed=0)
        (sum(wrong(**part).loss for part in micro) / divide).backward()
        expected = twins.gradients(wrong)
        for gradient in expected.values():
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()
        alike = all(twins.close(got[name], expected[name]) for name in expected)
        if all(_everyone(alike)):
            raise Wrong(f"the gradient is that of {sentence}",
                        "A micro-batch of 3 examples counts three times one of 1.")
    name = max(want, key=lambda name: twins.worst(got[name], want[name]))
    raise Wrong(f"rank {dist.get_rank()}, parameter {name!r}: gradient differs from the full "
                f"batch's by {twins.worst(got[name], want[name]):.2g}",
                "Weight each loss by its micro-batch's share; synchronize in the last backward.")


def _everyone(value) -> list:
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
