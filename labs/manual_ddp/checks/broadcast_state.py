"""Check of exercise 2.2: every rank holds rank 0's parameters and buffers."""

import torch.distributed as dist

from labs.exercises.on_ranks import close, on_ranks, raise_on_all_ranks, torchs_own_refused
from labs.exercises.verdicts import Wrong, check
from labs.meters.traffic import Traffic
from labs.training.models import EdgeCaseModel


@check("2.2")
def check_broadcast_state(broadcast_state):
    """broadcast_state(model) writes rank 0's parameters and buffers into every rank's model."""
    def work():
        model = EdgeCaseModel(seed=dist.get_rank())
        identities = [id(parameter) for parameter in model.parameters()]
        with torchs_own_refused("DistributedDataParallel"), Traffic() as traffic:
            broadcast_state(model)
        raise_on_all_ranks(_judge, model, identities, traffic)

    on_ranks(work)
    return "on 2, 3 and 4 ranks, all parameters and buffers equal rank 0's"


def _judge(model, identities, traffic):
    rank = dist.get_rank()
    # a new seed on every rank would give equal models without any communication
    if not traffic.calls:
        raise Wrong("nothing was communicated: rank 0's state stayed where it was",
                    "It must travel to every rank.")
    _judge_values(model, EdgeCaseModel(seed=0), EdgeCaseModel(seed=rank))
    # an optimizer that was built before the broadcast would go on updating the old parameters
    if identities != [id(parameter) for parameter in model.parameters()]:
        raise Wrong(f"rank {rank}: the parameters were replaced by new ones",
                    "Write into the tensors: an optimizer made earlier still holds them.")


def _judge_values(model, rank_0s, own):
    rank = dist.get_rank()
    got, want, before = (m.state_dict() for m in (model, rank_0s, own))
    # all state counts: also frozen parameters, which no optimizer touches, and buffers
    for name in want:
        if close(got[name], want[name]):
            continue
        kind = "buffer" if name in dict(model.named_buffers()) else "parameter"
        who = f"rank {rank}, {kind} {name!r}"
        if rank == 0:
            raise Wrong(f"{who}: rank 0's own state changed", "Rank 0 sends, it does not receive.")
        if close(got[name], before[name]):
            raise Wrong(f"{who} is still this rank's own",
                        "Buffers and frozen parameters are state too; write into the tensor.")
        raise Wrong(f"{who} is neither rank 0's nor this rank's own", "Broadcast from rank 0.")
