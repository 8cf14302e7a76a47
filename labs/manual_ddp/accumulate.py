"""Exercise 2.9: gradients of unequal micro-batches, synchronized once."""

from types import SimpleNamespace

import torch.distributed as dist

from labs.checks.on_ranks import (
    close,
    gradients,
    largest_difference,
    on_ranks,
    raise_on_all_ranks,
)
from labs.checks.reference import Step
from labs.checks.verdicts import Wrong, check
from labs.manual_ddp.api_hints import API_HINTS
from labs.manual_ddp.combine import split
from labs.manual_ddp.edge_cases import CAPS, WORLD_SIZES
from labs.manual_ddp.gradients import (
    UNEXPLAINED,
    mean_and_alone,
    name_mistake,
    reference_model,
)
from labs.meters.traffic import CollectiveCall, Traffic
from labs.training import data
from labs.training.models import EdgeCaseModel

SIZES = ((3, 1, 2), (1, 5), (4,))  # examples of a rank's micro-batches, one list for each call
_WEIGHTS = "A micro-batch of 3 examples counts three times one of 1."
_ADDS = "Each backward adds to what is in parameter.grad: clear it only before the first."
_LAST = "All but the last backward belong inside no_sync."


@check("2.9", hints=API_HINTS)
def check_accumulate(accumulate, wrap):
    """accumulate(module, micro_batches) leaves the gradient of the mean loss over all examples of
    all ranks, and the list as it is: forward and backward of one micro-batch ({"x", "y"}) after the
    other, one synchronization. The sizes differ within a rank and are the same on all ranks."""
    def work():
        model = EdgeCaseModel(seed=0)
        module = wrap(model, CAPS[0])
        events = _mark(model)
        for sizes in SIZES:
            _one_step(accumulate, model, module, sizes, events)
            model.zero_grad()

    on_ranks(work, world_sizes=WORLD_SIZES)
    return "unequal micro-batches give the full batch's gradient, with one synchronization"


def _mark(model) -> SimpleNamespace:
    """Returns .traffic, in whose place a new Traffic can be put: the model marks in it when a
    forward begins and when backward has reached the last parameter."""
    recorded = SimpleNamespace(traffic=Traffic())
    model.register_forward_pre_hook(lambda *_: recorded.traffic.mark("forward"))
    # Tied to the embedding, which forward uses first: its gradient is complete last.
    model.head.weight.register_post_accumulate_grad_hook(
        lambda _: recorded.traffic.mark("backward"))
    return recorded


def _one_step(accumulate, model, module, sizes, recorded):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    [batch] = data.xy_batches(1, sum(sizes) * ranks)
    # rank -> its micro-batches
    by_rank = [split(data.shard(batch, r, ranks), list(sizes)) for r in range(ranks)]
    # A copy of the list: accumulate may change it, and by_rank is judged by.
    given, reference = list(by_rank[rank]), reference_model()
    with Traffic() as recorded.traffic:
        accumulate(module, given)
    # The whole batch at once: its gradient is that of the mean over all examples of all ranks.
    reference.differentiate(Step(batch))
    raise_on_all_ranks(_judge_weights, gradients(model), mean_and_alone(reference), by_rank,
                       recorded.traffic.events)
    raise_on_all_ranks(_judge_passes, recorded.traffic, len(sizes), len(module.buckets))
    raise_on_all_ranks(_judge_input, given, by_rank[rank])


def _judge_weights(got, reference, by_rank, events):
    want, alone = reference
    if _alike(got, want):
        return
    _judge_mixture(got, by_rank)
    name = max(want, key=lambda name: largest_difference(got[name], want[name]))
    who = f"rank {dist.get_rank()}, parameter {name!r}: gradient"
    calls = [event for event in events if isinstance(event, CollectiveCall)]
    # with every backward inside no_sync, each rank goes its own way
    if not calls and any(getattr(event, "what", "") == "backward" for event in events):
        raise Wrong(f"{who} is this rank's own: no backward communicated", _LAST,
                    code="gradient_of_one_rank")
    # what the last backward adds stays on its rank
    begins = max((i for i, event in enumerate(events)
                  if getattr(event, "what", "") == "forward"), default=-1)
    if calls and not any(isinstance(event, CollectiveCall) for event in events[begins + 1:]):
        raise Wrong(f"{who} is not the same on all ranks: the last backward is not synchronized",
                    _LAST, code="last_backward_not_reduced")
    code, sentence, hint = name_mistake(got[name], want[name], [one[name] for one in alone])
    if code == UNEXPLAINED:
        far = largest_difference(got[name], want[name])
        sentence = f"differs from the full batch's by {far:.2g}"
        hint = "Weight each loss by its micro-batch's share; synchronize in the last backward."
    raise Wrong(f"{who} {sentence}", hint, code=code)


def _judge_mixture(got, by_rank):
    """Raises Wrong where the gradient is that of losses that were put together in another way."""
    parts, total = len(by_rank[0]), sum(len(part["x"]) for part in by_rank[0])
    # The weight that the last micro-batch has in a right answer.
    share = len(by_rank[0][-1]["x"]) / total
    last = "the last micro-batch alone: those before it are lost"
    for code, weights, whose, hint in (
            # micro-batches of 3, 1 and 2 examples: without weights, each example of the smallest
            # counts three times
            ("sum_of_micro_batches", [1] * parts, "the sum of the micro-batches' mean losses",
             _WEIGHTS),
            ("unweighted_mean", [1 / parts] * parts,
             "the plain mean of the micro-batches' mean losses", _WEIGHTS),
            # a gradient that is cleared in between, or a single backward
            ("only_last_micro_batch", [0] * (parts - 1) + [share], last, _ADDS),
            ("only_last_micro_batch", [0] * (parts - 1) + [1], last, _ADDS)):
        if parts > 1 and _alike(got, _mixed(by_rank, weights)):
            raise Wrong(f"the gradient is that of {whose}", hint, code=code)


def _alike(got, want) -> bool:
    return all(close(got[name], want[name]) for name in want)


def _mixed(by_rank, weights):
    """The mean over the ranks of the gradient of each one's losses, added with these weights."""
    model = EdgeCaseModel(seed=0)
    losses = [weight * model(**part).loss for parts in by_rank
              for part, weight in zip(parts, weights, strict=True)]
    (sum(losses) / len(by_rank)).backward()
    return gradients(model)


def _judge_passes(traffic, parts, buckets):
    # one synchronization is what accumulation is for
    if len(traffic.calls) != buckets:
        raise Wrong(f"{len(traffic.calls)} collectives for {parts} micro-batches; one "
                    f"synchronization takes {buckets}", _LAST, code="wrong_traffic")
    order = [event.what for event in traffic.events if not isinstance(event, CollectiveCall)]
    passes = order.count("backward")
    # a single backward of the summed loss has the same gradient, and the memory of the full batch
    if passes != parts:
        raise Wrong(f"{passes} backward for {parts} micro-batches: what they all saved was "
                    "in memory at once", "One backward for each micro-batch.",
                    code="one_backward_for_all")
    # so have all forwards before the first backward
    if order != ["forward", "backward"] * parts:
        raise Wrong("a forward begins before the backward of the one before it: what both saved is "
                    "in memory at once", "Forward and backward of one micro-batch, then of "
                    "the next.", code="forwards_before_backwards")


def _judge_input(given, parts):
    # who trains on these micro-batches again would find fewer of them
    if [id(part) for part in given] != [id(part) for part in parts]:
        raise Wrong("accumulate changed the list that it was given",
                    "Read it, without pop or append.", code="changes_input")
