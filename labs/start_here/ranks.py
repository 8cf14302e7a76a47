"""What runs on the ranks for this notebook's checks and pictures, and how it gets there.

Nothing here or in what it imports draws: a rank would pay half a second to load matplotlib.
"""

import torch
import torch.distributed as dist

from labs.exercises.verdicts import Wrong
from labs.start_here import answers
from labs.start_here.recorder import Recorder
from labs.workers import devices
from labs.workers.failures import RankFailed
from labs.workers.launcher import launch

TRIED = (2, 3, 4)  # the world sizes on which every check runs
PATIENCE = 5.0  # seconds that a check waits in a collective before it calls it a hang


def run(function, *args, ranks: int, **options):
    """`launch`, on GPUs only where each rank has its own: gloo cannot send GPU tensors."""
    options.setdefault("device", None if ranks <= devices.gpus() else "cpu")
    options.setdefault("quiet", True)
    options.setdefault("hang_after", PATIENCE)
    return launch(function, *args, ranks=ranks, **options)


def run_answer(function, answer, *args, ranks: int):
    """`run` for one of the functions below with a student's `answer`; a Wrong that a rank raised
    is raised here too."""
    try:
        return run(function, answer, *args, ranks=ranks)
    except RankFailed as error:
        if not isinstance(error.cause, Wrong):
            raise
        raise answers.explained(error) from error


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
    answers.must_be_tensor(rank, ranks, result)
    between = [tensor.tolist() for tensor in recorder.left[:-1]]
    return recorder.names, [before, *between, result.reshape(-1).tolist()]


def watch_sends(algorithm):
    """What this rank holds before each send of an algorithm that works in place, and at the end."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine = pieces_of(rank, ranks)
    with Recorder(watched=mine) as recorder:
        result = algorithm(mine)
    answers.must_be_tensor(rank, ranks, result)
    if result.shape != mine.shape:
        raise Wrong(f"rank {rank} of {ranks} returned shape {list(result.shape)}, not "
                    f"{list(mine.shape)}", "A ring works in place: return `mine`.")
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
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine = torch.tensor([float((rank + 1) ** 2)], device=devices.device())
    before, result = mine.item(), mean_over_ranks(mine)
    answers.must_be_tensor(rank, ranks, result)
    if result.numel() != 1:
        raise Wrong(f"rank {rank} of {ranks} returned {result.numel()} numbers, its tensor has 1",
                    "The mean is taken number by number, over ranks only.")
    return before, float(result)


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
    return (list(map(_number, means)) if isinstance(means, list | tuple) else means), losses


def _number(value):
    """A float, also of a tensor with one number; anything else as it is."""
    one = isinstance(value, int | float) or isinstance(value, torch.Tensor) and value.numel() == 1
    return float(value) if one else _cpu(value)


def _cpu(value):
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value
