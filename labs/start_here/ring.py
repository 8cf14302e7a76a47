"""The ring all-reduce, built from nothing but send and receive, and the bytes it sends."""

import functools

import torch
import torch.distributed as dist

from labs.start_here import ranks as on


def pass_on(leaving, arriving):
    """Sends `leaving` to the next rank of the ring and fills `arriving` from the one before.

    Both go out in one batch: issued one after the other they deadlock on NCCL.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    both = [dist.P2POp(dist.isend, leaving, (rank + 1) % ranks),
            dist.P2POp(dist.irecv, arriving, (rank - 1) % ranks)]
    for work in dist.batch_isend_irecv(both):
        work.wait()


def ring_all_reduce(mine):
    """Sums `mine`, whose length divides by the number of ranks, over all ranks, in place.

    Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, JPDC 69(2), 2009.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    pieces = mine.chunk(ranks)
    arriving = torch.empty_like(pieces[0])
    for step in range(2 * (ranks - 1)):
        leaving = pieces[(rank - step) % ranks]
        place = pieces[(rank - step - 1) % ranks]
        pass_on(leaving, arriving)
        if step < ranks - 1:
            place += arriving
        else:
            place.copy_(arriving)
    return mine


@functools.cache
def counted_bytes(ranks: int, size: int) -> tuple:
    """Bytes each rank really sends while a ring all-reduces a tensor of `size` bytes."""
    return tuple(on.run(on.count_bytes, ring_all_reduce, size, ranks=ranks))


def watch(algorithm, ranks: int) -> list:
    """What every rank holds before each send of `algorithm(mine)` and at the end:
    states[k][rank] is a list of numbers, k = 0 before the first."""
    seen = on.run_answer(on.watch_sends, algorithm, ranks=ranks)
    return [list(state) for state in zip(*seen, strict=True)]
