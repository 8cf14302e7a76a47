"""What runs on the ranks for this notebook's checks and pictures, and how it gets there.

Nothing here or in what it imports draws: a rank would pay half a second to load matplotlib.
"""

import torch
import torch.distributed as dist

from labs.start_here.recorder import Recorder
from labs.workers import devices
from labs.workers.launcher import launch

TRIED = (2, 3, 4)  # the world sizes on which every check runs
PATIENCE = 5.0  # seconds that a check waits in a collective before it calls it a hang


def run(function, *args, ranks: int, **options):
    """`launch`, on GPUs only where each rank has its own: gloo cannot send GPU tensors."""
    options.setdefault("device", None if ranks <= devices.gpus() else "cpu")
    options.setdefault("quiet", True)
    options.setdefault("hang_after", PATIENCE)
    return launch(function, *args, ranks=ranks, **options)


def pieces_of(rank: int, ranks: int) -> torch.Tensor:
    """What rank `rank` holds at the start of a picture: one number for each piece.

    Of 4 ranks, rank 0 has 1000, 2000 ..., rank 1 has 100, 200 ..., so each digit of a sum tells
    which rank gave it (the first digit is rank 0's) and which piece it was. At most 9 ranks.
    """
    return (torch.arange(ranks, device=devices.device()) + 1) * 10 ** (ranks - 1 - rank)


def watch_collective(collective, begin):
    """(names of the collectives it called, what this rank held before, between and after)."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine = pieces_of(rank, ranks)
    mine = mine[rank : rank + 1].clone() if begin == "shard" else mine
    before = mine.tolist()
    with Recorder() as recorder:
        result = collective(mine)
    between = [tensor.tolist() for tensor in recorder.left[:-1]]
    return recorder.names, [before, *between, result.reshape(-1).tolist()]


def watch_sends(algorithm):
    """What this rank holds before each send of an algorithm that works in place, and at the end."""
    mine = pieces_of(dist.get_rank(), dist.get_world_size())
    with Recorder(watched=mine) as recorder:
        result = algorithm(mine)
    return [copy.tolist() for copy in [*recorder.copies, result]]


def count_bytes(algorithm, size):
    """Bytes this rank sends while the algorithm all-reduces `size` bytes of 4-byte numbers."""
    mine = torch.full((size // 4,), float(dist.get_rank()), device=devices.device())
    with Recorder() as recorder:
        total = algorithm(mine)
    assert total.eq(sum(range(dist.get_world_size()))).all(), "the algorithm did not sum"
    return sum(call.bytes for call in recorder.of("send"))


def try_one_number(mean_over_ranks):
    """(number before, number after) of this rank, (rank + 1)² at first."""
    mine = torch.tensor([float((dist.get_rank() + 1) ** 2)], device=devices.device())
    before = mine.item()
    return before, float(mean_over_ranks(mine))


def try_mean(mean_over_ranks):
    """(own tensor before, result, own tensor after)."""
    rank = dist.get_rank()
    mine = torch.arange(6.0, device=devices.device()).reshape(3, 2) * (rank + 1) ** 2 + 7 * rank + 1
    before = mine.clone()
    result = mean_over_ranks(mine)
    return before.cpu(), _cpu(result), mine.cpu()


def try_all_reduce(all_reduce):
    """(own tensor before, result, names of the collectives, elements of each)."""
    rank = dist.get_rank()
    mine = torch.arange(12.0, device=devices.device()) * (rank + 1) ** 2 + 5 * rank + 1
    before = mine.clone()
    with Recorder() as recorder:
        result = all_reduce(mine)
    return before.cpu(), _cpu(result), recorder.names, [call.elements for call in recorder.calls]


def try_losses(mean_losses, lengths):
    """(result, own losses); this rank has lengths[rank] of them."""
    rank = dist.get_rank()
    losses = [8.0 / (step + 1) + rank**2 for step in range(lengths[rank])]
    means = mean_losses(list(losses))
    return ([float(mean) for mean in means] if isinstance(means, list | tuple) else means), losses


def _cpu(value):
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value
