"""Check of exercise 2.3: gradients averaged by a function, after backward."""

from collections import Counter
from collections.abc import Sequence

import torch.distributed as dist

from labs.exercises.invariants import mark_waits
from labs.exercises.on_ranks import BATCH, on_ranks, raise_on_all_ranks, torchs_own_refused
from labs.exercises.reference import Step, judge_parameters
from labs.exercises.verdicts import Wrong, check
from labs.manual_ddp.checks.api_hints import API_HINTS
from labs.manual_ddp.edge_cases import (
    ALL_BUT_RANK_0,
    EVERY_RANK,
    NO_RANK,
    ONLY_RANK_0,
    WORLD_SIZES,
    NestedModel,
    hold_back,
)
from labs.manual_ddp.gradients import (
    floats_of,
    gradient_bytes,
    judge_gradients,
    mean_and_alone,
    reference_model,
)
from labs.meters.traffic import CollectiveCall, Traffic
from labs.predictions.traffic import passes
from labs.training import data
from labs.training.models import EdgeCaseModel, trainable
from labs.words import listed, to_within

# A parameter that is None on no rank, on rank 0, on the others and on all; several ranks that use
# it come before one, so that a mean over its users is not taken for one rank's own gradient.
_CASES = ((EdgeCaseModel, EVERY_RANK), (NestedModel, ALL_BUT_RANK_0), (EdgeCaseModel, ONLY_RANK_0),
          (EdgeCaseModel, NO_RANK))


@check("2.3", hints=API_HINTS | {"collectives_differ":
                                 "A rank that did not use a parameter takes part with zeros."})
def check_average_gradients(average_gradients):
    """average_gradients(model), after backward, turns every gradient into the mean over ranks."""
    def work():
        [batch] = data.xy_batches(1, BATCH)
        return max(_one_backward(average_gradients, make, Step(batch, use_all))
                   for make, use_all in _CASES)

    return (f"gradients equal the full batch's on 2, 3 and 4 ranks "
            f"({to_within(max(on_ranks(work, world_sizes=WORLD_SIZES)))})")


def _one_backward(average_gradients, make, step) -> float:
    reference, model = reference_model(make), make(seed=0)
    reference.differentiate(step)
    model(**step.inputs()).loss.backward()
    hold_back(rank=dist.get_world_size() - 1)
    with torchs_own_refused("DistributedDataParallel"), Traffic() as traffic, mark_waits(traffic):
        average_gradients(model)
    difference = raise_on_all_ranks(_judge_average, model, reference, traffic)
    raise_on_all_ranks(judge_bytes, traffic.calls, model)
    return difference


def _judge_average(model, reference, traffic) -> float:
    # averaging the parameters instead also makes ranks equal, but trains on wrong gradients
    judge_parameters(floats_of(model), [reference], "after averaging the gradients")
    return judge_gradients(model, *mean_and_alone(reference), traffic=traffic)


def judge_bytes(calls: Sequence[CollectiveCall], model) -> None:
    """Raises Wrong where a rank's collectives carried more or less than its gradients once. A
    reduce-scatter and an all-gather are counted as the halves of an all-reduce that they are."""
    want, by_kind = gradient_bytes(model), Counter()
    for call in calls:
        by_kind[call.kind] += call.bytes
    sent = sum(passes(kind) * nbytes for kind, nbytes in by_kind.items()) / 2
    number = Counter(call.kind for call in calls)
    carried = listed([f"{by_kind[kind]:,} bytes in {number[kind]} {kind}" for kind in by_kind])
    who = f"rank {dist.get_rank()} communicated {carried or 'nothing'}"
    # right numbers at twice the traffic: all gradients gathered, or each averaged twice
    if sent > want + _padding(calls, model):
        much = f", {sent / want:.1f}x" if sent >= 1.1 * want else "; that is more than"
        raise Wrong(f"{who}{much} one all-reduce of its {len(trainable(model))} gradients, which "
                    f"have {want:,} bytes", "One all-reduce of each gradient is enough.",
                    code="too_much_sent")
    if sent < want:
        raise Wrong(f"{who}; its gradients have {want:,} bytes",
                    "Every trainable parameter's gradient must travel.", code="too_little_sent")


def _padding(calls, model) -> int:
    """Bytes of the zeros that make a gradient divide by the number of ranks, where it is cut."""
    if not any(call.kind in ("reduce_scatter", "all_to_all") for call in calls):
        return 0
    return sum(p.element_size() for _, p in trainable(model)) * dist.get_world_size()
