"""What the student calls: one step of a ring; and the half of a ring that the notebook shows."""

import torch
import torch.distributed as dist


def send_recv(sent: torch.Tensor, received: torch.Tensor) -> None:
    """Sends `sent` to the next rank of the ring and fills `received` from the previous one.

    Both go out in one batch: issued one after the other they deadlock on NCCL, where a send waits
    for its receive; gloo buffers it.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    both = [dist.P2POp(dist.isend, sent, (rank + 1) % ranks),
            dist.P2POp(dist.irecv, received, (rank - 1) % ranks)]
    for work in dist.batch_isend_irecv(both):
        work.wait()


def ring_reduce_scatter(mine: torch.Tensor) -> torch.Tensor:
    """The first half of a ring all-reduce, in place: afterwards rank r holds the sum of piece r + 1
    over all ranks. The length of `mine` divides by the number of ranks.

    Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, JPDC 69(2), 2009.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    pieces = mine.chunk(ranks)  # views of (length / N,): writing into a piece writes into mine
    received = torch.empty_like(pieces[0])
    # What is sent in a step is the piece that was received in the step before.
    for step in range(ranks - 1):
        sent = pieces[(rank - step) % ranks]
        target = pieces[(rank - step - 1) % ranks]
        send_recv(sent, received)
        target += received
    return mine
