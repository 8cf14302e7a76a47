"""Runs the student's functions on ranks, and records what each rank held and which collectives it
called.

Nothing here or in what it imports draws: a rank would take half a second to load matplotlib.
"""

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist

from labs.exercises.numbers import as_number
from labs.exercises.verdicts import Wrong
from labs.meters.collective_hooks import IssuedCollective
from labs.meters.traffic import Traffic
from labs.start_here.return_values import require_fitting_output, require_tensor, wrong_on_rank
from labs.start_here.scaffold import ring_all_reduce
from labs.workers import devices
from labs.workers.failures import RankFailed
from labs.workers.launcher import Results, launch

HANG_AFTER = 5.0  # seconds that a check waits in a collective before it calls it a hang
TIMEOUT = 30.0  # seconds after which it stops ranks that still compute, in an endless loop
_SIZED = {"_reduce_scatter_base_": "reduce_scatter_tensor",
          "_allgather_base_": "all_gather_into_tensor"}  # take (output, input)


def run(function: Callable, *args, ranks: int, **options) -> Results:
    """`launch`, on GPUs only where each rank has its own: gloo cannot send GPU tensors."""
    return launch(function, *args, ranks=ranks, **{
        "device": None if ranks <= devices.gpus() else "cpu", "quiet": True,
        "hang_after": HANG_AFTER, "timeout": TIMEOUT, **options})


def run_answer(function: Callable, answer: Callable, *args, ranks: int) -> Results:
    """`run` for one of the functions below with a student's `answer`; a Wrong that a rank raised
    is raised here too."""
    try:
        return run(function, answer, *args, ranks=ranks)
    except RankFailed as error:
        if not isinstance(error.cause, Wrong):
            raise
        raise wrong_on_rank(error) from error


@functools.cache
def counted_bytes(ranks: int, size: int) -> tuple[int, ...]:
    """Bytes each rank really sends while a ring all-reduces a tensor of `size` bytes."""
    return tuple(run(count_bytes, ring_all_reduce, size, ranks=ranks))


class Recorder(Traffic):
    """A Traffic that also copies tensors.

    results[k] is what the k-th collective left on this rank, flat. copies holds `watched` as it was
    before each send. A collective whose output does not fit its input raises Wrong. It waits for
    every collective, so it must not be used to measure time.
    """

    def __init__(self, watched: torch.Tensor | None = None):
        super().__init__()
        self.watched = watched
        self.copies: list[torch.Tensor] = []
        self.results: list[torch.Tensor] = []

    def before(self, collective: IssuedCollective) -> None:
        if collective.kind == "send" and self.watched is not None:
            self.copies.append(self.watched.clone())
        if collective.operator in _SIZED:
            require_fitting_output(_SIZED[collective.operator], collective.outputs[0].numel(),
                                   collective.inputs[0].numel(), collective.ranks)
        super().before(collective)

    def after(self, collective: IssuedCollective, work: dist.Work | None) -> None:
        super().after(collective, work)
        if collective.kind not in ("send", "recv", "barrier"):
            work.wait()
            self.results.append(torch.cat([t.detach().flatten() for t in collective.outputs]))

    @property
    def names(self) -> list[str]:
        """The kinds of the collectives that were called."""
        return [call.kind for call in self.calls]


# On a rank, with a student's function


def pieces_of(rank: int, ranks: int) -> torch.Tensor:
    """What rank `rank` holds at the start of a picture: one number for each piece.

    Of 4 ranks, rank 0 has 1000, 2000 ..., rank 1 has 100, 200 ..., so each digit of a sum tells
    which rank gave it (the first digit is rank 0's) and which piece it was. At most 9 ranks.
    """
    return (torch.arange(ranks, device=devices.device()) + 1) * 10 ** (ranks - 1 - rank)


def record_collectives(collective: Callable, begin: str) -> tuple[list[str], list[list]]:
    """(names of the collectives it called, what this rank held before, between and after)."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine = pieces_of(rank, ranks)
    mine = mine[rank : rank + 1].clone() if begin == "shard" else mine
    before = mine.tolist()
    with Recorder() as recorder:
        result = collective(mine)
    require_tensor(rank, ranks, result)
    between = [tensor.tolist() for tensor in recorder.results[:-1]]
    return recorder.names, [before, *between, result.reshape(-1).tolist()]


def record_sends(algorithm: Callable) -> list[list]:
    """What this rank holds before each send of an algorithm that works in place, and at the end."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine = pieces_of(rank, ranks)
    with Recorder(watched=mine) as recorder:
        result = algorithm(mine)
    require_tensor(rank, ranks, result)
    if result.shape != mine.shape:
        raise Wrong(f"rank {rank} of {ranks} returned shape {list(result.shape)}, not "
                    f"{list(mine.shape)}", "A ring works in place: return `mine`.")
    return [copy.tolist() for copy in [*recorder.copies, result]]


def count_bytes(algorithm: Callable, size: int) -> int:
    """Bytes this rank sends while the algorithm all-reduces `size` bytes of 4-byte numbers."""
    mine = torch.full((size // 4,), float(dist.get_rank()), device=devices.device())
    with Recorder() as recorder:
        total = algorithm(mine)
    assert total.eq(sum(range(dist.get_world_size()))).all(), "the algorithm did not sum"
    return sum(call.bytes for call in recorder.of("send"))


def try_one_number(mean_over_ranks: Callable) -> tuple[float, float]:
    """(number before, number after) of this rank, (rank + 1)² at first."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine = torch.tensor([float((rank + 1) ** 2)], device=devices.device())
    before, result = mine.item(), mean_over_ranks(mine)
    require_tensor(rank, ranks, result)
    if result.numel() != 1:
        raise Wrong(f"rank {rank} of {ranks} returned {result.numel()} numbers, its tensor has 1",
                    "The mean is taken number by number, over ranks only.")
    return before, float(result)


def try_mean(mean_over_ranks: Callable) -> tuple:
    """(own tensor before, result, own tensor after)."""
    rank = dist.get_rank()
    mine = torch.arange(6.0, device=devices.device()).reshape(3, 2) * (rank + 1) ** 2 + 7 * rank + 1
    before = mine.clone()
    result = mean_over_ranks(mine)
    return before.cpu(), _to_cpu(result), mine.cpu()


def try_all_reduce(all_reduce: Callable) -> tuple:
    """(own tensor before, result, names of the collectives, elements of each)."""
    rank = dist.get_rank()
    mine = torch.arange(12.0, device=devices.device()) * (rank + 1) ** 2 + 5 * rank + 1
    before = mine.clone()
    with Recorder() as recorder:
        result = all_reduce(mine)
    return before.cpu(), _to_cpu(result), recorder.names, [call.elements for call in recorder.calls]


def try_losses(mean_losses: Callable, lengths: tuple[int, ...]) -> tuple:
    """(result, own losses); this rank has lengths[rank] of them. Numbers of the result are
    Python's, also where they were tensors."""
    rank = dist.get_rank()
    losses = [8.0 / (step + 1) + rank**2 for step in range(lengths[rank])]
    means = mean_losses(list(losses))
    return (list(map(_to_number, means)) if isinstance(means, list | tuple) else means), losses


def _to_number(value):
    number = as_number(value)
    return _to_cpu(value) if number is None else number


def _to_cpu(value):
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value
