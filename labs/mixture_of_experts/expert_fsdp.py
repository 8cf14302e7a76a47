"""Exercise 9.8: experts sharded over their replicas, all else over all ranks."""

from collections.abc import Callable

from labs.checks.on_ranks import on_ranks
from labs.checks.verdicts import check
from labs.mixture_of_experts.expert_fsdp_trial import STEPS, TRIALS, try_on_rank
from labs.words import to_within


@check("9.8", hints={
    "PREMUL_SUM": "gloo cannot multiply while it sums: set_force_sum_reduction_for_comms(True) of "
                  "the experts' unit makes FSDP sum first, and divide afterwards.",
    "has no attribute 'set_": "fully_shard comes first: it gives the module these methods."})
def check_expert_fsdp(expert_fsdp: Callable):
    """expert_fsdp(model, optimizer_class, mesh, everyone, **settings) -> (model, optimizer)."""
    difference = max(on_ranks(try_on_rank, expert_fsdp, world_sizes=tuple(TRIALS), hang_after=15.0,
                              timeout=60.0))
    return (f"equals one process for {STEPS} steps with SGD on 4 × 2 ranks and with AdamW on "
            f"2 × 2 ({to_within(difference)}); a rank has 1/N of all states, and gathers a block "
            "with its part of the experts at most")
