"""Exercise 2.2: the copies start equal, and gradients averaged by a function, after backward, keep
them equal."""

from collections.abc import Callable

import torch.distributed as dist

from labs.checks.on_ranks import BATCH, gradients, on_ranks, raise_on_all_ranks, torchs_own_refused
from labs.checks.reference import Step
from labs.checks.training import judge_parameters
from labs.checks.verdicts import check, shows
from labs.checks.waits import WaitTraffic
from labs.faults.delayed_rank import delay_rank
from labs.manual_ddp import variants
from labs.manual_ddp.api_hints import API_HINTS
from labs.manual_ddp.broadcast_state import judge_broadcast
from labs.manual_ddp.edge_cases import (
    ALL_BUT_RANK_0,
    EVERY_RANK,
    NO_RANK,
    ONLY_RANK_0,
    WORLD_SIZES,
    NestedModel,
)
from labs.manual_ddp.gradients import (
    floats_of,
    judge_bytes,
    judge_gradients,
    mean_and_alone,
    reference_model,
)
from labs.pictures import agreement
from labs.pictures.picture import Picture
from labs.training import data
from labs.training.models import EdgeCaseModel
from labs.words import to_within
from labs.workers.launcher import launch

# A parameter that is None on no rank, on rank 0, on the others and on all; several ranks that use
# it come before one, so that a mean over its users is not taken for one rank's own gradient.
_CASES = ((EdgeCaseModel, EVERY_RANK), (NestedModel, ALL_BUT_RANK_0), (EdgeCaseModel, ONLY_RANK_0),
          (EdgeCaseModel, NO_RANK))


@check("2.2", hints=API_HINTS | {"collectives_differ":
                                 "All ranks call the same collectives; a rank that did not use a "
                                 "parameter takes part with zeros."})
def check_average_gradients(broadcast_state: Callable, average_gradients: Callable):
    """broadcast_state(model) writes rank 0's state into every rank's model;
    average_gradients(model), after backward, turns every gradient into the mean over ranks."""
    def work():
        # The start first: gradients of copies that differ have no common reference.
        judge_broadcast(broadcast_state)
        [batch] = data.xy_batches(1, BATCH)
        return max(_one_backward(average_gradients, make, Step(batch, use_all))
                   for make, use_all in _CASES)

    return (f"on 2, 3 and 4 ranks the state is rank 0's, and gradients equal the full batch's "
            f"({to_within(max(on_ranks(work, world_sizes=WORLD_SIZES)))})")


def _one_backward(average_gradients, make, step) -> float:
    reference, model = reference_model(make), make(seed=0)
    # The reference sees the shares of all ranks, the model below only this rank's.
    reference.differentiate(step)
    model(**step.inputs()).loss.backward()
    # The last rank is late: who does not wait for an asynchronous all-reduce reads numbers without
    # it.
    delay_rank(dist.get_world_size() - 1, WORLD_SIZES[0])
    with torchs_own_refused("DistributedDataParallel"), WaitTraffic() as traffic:
        average_gradients(model)
        gradients(model)  # reading a functional collective's result counts as its wait
    difference = raise_on_all_ranks(_judge_average, model, reference, traffic)
    raise_on_all_ranks(judge_bytes, traffic.calls, model)
    return difference


def _judge_average(model, reference, traffic) -> float:
    # averaging the parameters instead also makes ranks equal, but trains on wrong gradients
    judge_parameters(floats_of(model), [reference], "after averaging the gradients")
    return judge_gradients(model, *mean_and_alone(reference), traffic=traffic)


@shows("2.2")
def show_gradients(average_gradients: Callable, ranks: int = 2) -> Picture:
    """Draws the gradients of every rank before and after the student's function averaged them."""
    return agreement.gradients_by_rank(launch(variants.record_averaging, average_gradients,
                                              ranks=ranks, quiet=True))
