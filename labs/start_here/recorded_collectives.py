"""Runs the student's functions on ranks, and records what each rank held and which collectives it
called.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from labs.checks.numbers import as_list, as_number, require_several
from labs.checks.on_ranks import WORLD_SIZES, scaled_timeout
from labs.checks.verdicts import Wrong, kind_of
from labs.meters.collective_hooks import IssuedCollective
from labs.meters.traffic import CollectiveCall, Traffic
from labs.start_here.return_values import require_fitting_output, require_tensor, wrong_on_rank
from labs.start_here.scaffold import ring_reduce_scatter
from labs.workers import devices
from labs.workers.failures import RankFailed
from labs.workers.launcher import Results, launch

TENSORS = 3  # that a check of tensors tries, each in a launch of its own
LATE = 0.03  # seconds: how long the last rank holds back what it issues asynchronously
NOT_WAITED = ("With async_op=True a collective returns at once, with a handle: call the handle's "
              "wait() before you use the tensor.")
HANG_AFTER = 5.0  # seconds that a check waits in a collective before it calls it a hang
TIMEOUT = 30.0  # seconds after which it stops ranks that still compute, in an endless loop
# Names of c10d's operators, and of torch's functions that call them.
_SIZED = {"_reduce_scatter_base_": "reduce_scatter_single",
          "_allgather_base_": "all_gather_single"}  # take (output, input)


def run(function: Callable, *args, ranks: int, **options) -> Results:
    """`launch` with the limits of this notebook."""
    return launch(function, *args, ranks=ranks, **{
        "quiet": True, "hang_after": scaled_timeout(HANG_AFTER),
        "timeout": scaled_timeout(TIMEOUT), **options})


def run_answer(function: Callable, answer: Callable, *args, ranks: int) -> Results:
    """`run` for one of the functions below with a student's `answer`; a Wrong that a rank raised
    is raised here too."""
    try:
        return run(function, answer, *args, ranks=ranks)
    except RankFailed as error:
        if not isinstance(error.cause, Wrong):
            raise
        raise wrong_on_rank(error) from error


def counted_bytes(ring_all_gather: Callable, ranks: int, *sizes: int) -> list[int]:
    """Bytes that a rank really sends while a ring, whose second half is the student's, all-reduces
    a tensor of each of these sizes in bytes: those of the rank that sends most."""
    with devices.send_recv_device(ranks):
        each = run_answer(count_bytes, ring_all_gather, sizes, ranks=ranks)
    return list(map(max, zip(*each, strict=True)))


class Recorder(Traffic):
    """A Traffic that also copies tensors, when the student's code waits for them: it waits for
    nothing by itself, so a missing wait stays missing.

    results[k] is what the k-th collective that was waited for left on this rank, flat. copies holds
    `watched` as it was before each send. A collective whose output does not fit its input raises
    Wrong. late: seconds for which this rank holds back each asynchronous collective, so that on
    the other ranks none is over before it is waited for.
    """

    def __init__(self, watched: torch.Tensor | None = None, late: float = 0.0):
        super().__init__()
        self.watched, self._late = watched, late
        self.copies: list[torch.Tensor] = []
        self.results: list[torch.Tensor] = []
        self._issued: list[tuple[CollectiveCall, dist.Work, list[torch.Tensor]]] = []

    def __enter__(self):
        super().__enter__()
        self._waits_marked = self.marked_waits()
        self._waits_marked.__enter__()
        return self

    def __exit__(self, *exception):
        self._waits_marked.__exit__(*exception)
        return super().__exit__(*exception)

    def before(self, collective: IssuedCollective) -> None:
        if collective.kind == "send" and self.watched is not None:
            self.copies.append(self.watched.clone())
        if collective.operator in _SIZED:
            require_fitting_output(_SIZED[collective.operator], collective.outputs[0],
                                   collective.inputs[0], collective.ranks)
        if collective.asynchronous:
            time.sleep(self._late)
        super().before(collective)

    def after(self, collective: IssuedCollective, work: dist.Work | None) -> None:
        super().after(collective, work)
        if collective.kind not in ("send", "recv", "barrier"):
            self._issued.append((self.calls[-1], work, collective.outputs))

    def mark(self, what: str, call: CollectiveCall | None = None) -> None:
        super().mark(what, call)
        for number, (issued, work, outputs) in enumerate(self._issued):
            if issued is call:  # the student waits for it now
                del self._issued[number]
                # The student's wait has begun, so waiting here changes nothing. The copy is made
                # before the student can write into the tensor.
                work.wait()
                self.results.append(torch.cat([t.detach().flatten() for t in outputs]))
                return

    @property
    def names(self) -> list[str]:
        """The kinds of the collectives that were called."""
        return [call.kind for call in self.calls]

    def require_all_waited_for(self) -> None:
        """Raises Wrong where a collective was issued and never waited for. To be called with what
        the student's code returned already used: functional collectives wait then."""
        forgotten = self.never_waited_for()
        if forgotten:
            who = f"rank {dist.get_rank()} of {dist.get_world_size()}"
            raise Wrong(f"{who}: {forgotten[0].kind} was issued and never waited for, so its "
                        "result may not be there yet", NOT_WAITED, code="never_waited")


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
        result = _to_cpu(collective(mine))
        recorder.require_all_waited_for()
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
                    f"{list(mine.shape)}", "A ring works in place: return `mine`.",
                    code="wrong_shape")
    return [copy.tolist() for copy in [*recorder.copies, result]]


def count_bytes(ring_all_gather: Callable, sizes: tuple[int, ...]) -> list[int]:
    """Bytes this rank sends while both halves of a ring all-reduce 4-byte numbers, for each size in
    bytes."""
    sent = []
    for size in sizes:
        mine = torch.full((size // 4,), float(dist.get_rank()), device=devices.device())
        with Recorder() as recorder:
            ring_all_gather(ring_reduce_scatter(mine))
        sent.append(sum(call.bytes for call in recorder.of("send")))
    return sent


def try_own_number(own_and_mean: Callable) -> tuple[float, float]:
    """What the student's function returns on this rank: its number, (rank + 1)², and the mean."""
    where = f"rank {dist.get_rank()} of {dist.get_world_size()}"
    with Recorder() as recorder:
        returned = own_and_mean()
        several = as_list(returned)
        numbers = [as_number(value) for value in several or ()]
        recorder.require_all_waited_for()
    if len(numbers) != 2 or None in numbers:
        raise Wrong(f"{where} returned {kind_of(returned)}, not two numbers",
                    "Return the rank's own number and the mean; x.item() is a tensor's number.",
                    code="nothing_returned" if returned is None else "wrong_type")
    squared = (dist.get_rank() + 1) ** 2
    if numbers[0] != squared:
        raise Wrong(f"{where} made the number {numbers[0]:g}, not {squared}",
                    "Rank r holds (r + 1)²; dist.get_rank() is r.", code="wrong_number")
    return float(numbers[0]), float(numbers[1])


@dataclass(frozen=True)
class Tried:
    """A tensor of this rank before, what the student's function returned for it, and the tensor
    afterwards; the collectives that the function called."""

    own: torch.Tensor
    result: object
    after: torch.Tensor
    calls: list[CollectiveCall]

    @property
    def names(self) -> list[str]:
        """The kinds of its collectives."""
        return [call.kind for call in self.calls]

    @property
    def is_async(self) -> bool:
        """Whether any of them returned before it was done."""
        return any(call.asynchronous for call in self.calls)


def try_tensor(function: Callable, tensors: Callable, number: int) -> Tried:
    """What the student's function does with this rank's tensor, `tensors(rank, ranks)[number]`. The
    last rank is late, so that a result that is used too early is wrong on the others."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine = tensors(rank, ranks)[number].to(devices.device())
    before = mine.clone()
    with Recorder(late=LATE * (rank == ranks - 1)) as recorder:
        result = _to_cpu(function(mine))
        recorder.require_all_waited_for()
    return Tried(before.cpu(), result, mine.cpu(), recorder.calls)


def tensors_to_average(rank: int, ranks: int) -> list[torch.Tensor]:
    """A matrix, one number as in the picture, and numbers in double precision."""
    matrix = torch.arange(6.0).reshape(3, 2) * (rank + 1) ** 2 + 7 * rank + 1
    return [matrix, matrix[:1, :1].flatten(), matrix.flatten()[1:].double()]


def tensors_to_sum(rank: int, ranks: int) -> list[torch.Tensor]:
    """Twelve numbers; whole numbers, one for each rank, as in the picture; more numbers in double
    precision. All lengths divide by the number of ranks."""
    numbers = torch.arange(12.0) * (rank + 1) ** 2 + 5 * rank + 1
    return [numbers, numbers[:ranks].long(), numbers.double().repeat(2)]


def try_losses(mean_losses: Callable, lengths: tuple[int, ...]) -> tuple:
    """(means, dropped batches, own losses); this rank has lengths[rank] of them. Numbers of the
    result are Python's, also where they were tensors."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    losses = [8.0 / (step + 1) + rank**2 for step in range(lengths[rank])]
    with Recorder() as recorder:
        means, dropped = require_several(mean_losses(list(losses)), ("means", "dropped"),
                                         f"rank {rank} of {ranks} returned")
        several = as_list(means)
        means = means if several is None else list(map(_to_number, several))
        dropped = _to_number(dropped)
        recorder.require_all_waited_for()
    return means, dropped, losses


def try_ring(ring_all_gather: Callable) -> Tried:
    """What the student's half of a ring makes of the other half's result. A piece has two
    numbers."""
    mine = pieces_of(dist.get_rank(), dist.get_world_size()).repeat_interleave(2)
    ring_reduce_scatter(mine)
    before = mine.clone()
    with Recorder() as recorder:
        result = _to_cpu(ring_all_gather(mine))
        recorder.require_all_waited_for()
    return Tried(before.cpu(), result, mine.cpu(), recorder.calls)


def _to_number(value):
    number = as_number(value)
    return _to_cpu(value) if number is None else number


def _to_cpu(value):
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(value, AsyncCollectiveTensor):  # waits by itself, where it is used
        value = value.wait()
    return value.detach().cpu()


RETURNS_NONE = {"NoneType": "A collective writes into its tensor and returns None: call it on a "
                            "line of its own, then use the tensor."}


def try_on_ranks(answer, tensors) -> Iterator[list[Tried]]:
    """What each rank did with its tensor: for each tensor, on each number of ranks."""
    for number in range(TENSORS):
        for ranks in WORLD_SIZES:
            yield run_answer(try_tensor, answer, tensors, number, ranks=ranks)


def first_number(tensor) -> str:
    return f"{tensor.reshape(-1)[0].item():.4g}, …"
