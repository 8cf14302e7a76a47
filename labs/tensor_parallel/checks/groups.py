"""Process groups on which the checks of notebook 07a try an answer: all ranks, and two groups of
every second rank, so that a collective on all ranks shows."""

from collections.abc import Iterator

import torch.distributed as dist

from labs.exercises.verdicts import Wrong
from labs.meters.traffic import Traffic


def groups_to_try() -> Iterator[tuple[str, dist.ProcessGroup]]:
    """On a rank: (in words, group): all ranks; on 4 ranks also this rank's of the groups of ranks 0
    and 2, and of ranks 1 and 3."""
    ranks = dist.get_world_size()
    yield f"{ranks} ranks", dist.group.WORLD
    if ranks == 4:
        yield "a group of 2 of 4 ranks", every_second_rank()


def every_second_rank() -> dist.ProcessGroup:
    """On a rank: the group of the ranks whose numbers are even, or odd, as this rank's is."""
    halves = [dist.new_group(list(range(half, dist.get_world_size(), 2))) for half in (0, 1)]
    return halves[dist.get_rank() % 2]


def reject_other_ranks(traffic: Traffic, group: dist.ProcessGroup, who: str) -> None:
    """Raises Wrong where a collective is not on exactly the ranks of the group."""
    members = dist.get_process_group_ranks(group)
    for call in traffic.calls:
        if call.members and list(call.members) != members:
            raise Wrong(f"{who}: an {call.kind.replace('_', '-')} of {call.elements:,} elements is "
                        f"on ranks {list(call.members)}; the group is ranks {members}",
                        "Pass `group` on to every collective: dist.all_reduce(x, group=group).",
                        code="wrong_group")


def named_rank(group: dist.ProcessGroup) -> str:
    """This rank as a message names it, with its number in the group where that is another one."""
    rank, own = dist.get_rank(), dist.get_rank(group)
    return f"rank {rank}" + f" ({own} of its group)" * (rank != own)
