"""Sends and receives that were issued one by one: where they wait for each other with NCCL, though
gloo, which buffers, lets them through."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch.distributed as dist

from labs.exercises.verdicts import Wrong
from labs.workers.collective_kernels import IssuedCollective, around_collectives

PEERS = ("Ranks are numbered in their group: dist.P2POp(..., group=group, group_peer=number). Its "
         "third argument is a number among all ranks.")


class Unbatched:
    """`with Unbatched() as unbatched:` records this rank's sends and receives that are in no
    dist.batch_isend_irecv. messages: (kind, the peer's number in the group), in order."""

    def __init__(self):
        self.messages: list[tuple[str, int]] = []
        self._batched = []  # tensors of a P2POp

    def __enter__(self):
        init, self._stack = dist.P2POp.__init__, ExitStack()

        def noted(operation, op, tensor, *args, **named):
            self._batched.append(tensor)
            init(operation, op, tensor, *args, **named)

        self._stack.enter_context(mock.patch.object(dist.P2POp, "__init__", noted))
        self._stack.enter_context(around_collectives(self._around))
        return self

    def __exit__(self, *exception):
        self._batched.clear()
        self._stack.close()

    def _around(self, collective: IssuedCollective, issue: Callable[[], Any]) -> Any:
        if collective.peer is not None and not any(
                one is collective.inputs[0] for one in self._batched):
            self.messages.append((collective.kind, collective.peer))
        return issue()


def messages_of_all(unbatched: Unbatched) -> list[list[tuple[str, int]]]:
    """By rank, the messages; all ranks call it."""
    by_rank = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, unbatched.messages)
    return by_rank


def require_no_deadlock(by_rank: list[list[tuple[str, int]]]) -> None:
    """Raises Wrong where two ranks begin by sending to each other."""
    firsts = [{peer: kind for kind, peer in reversed(messages)} for messages in by_rank]
    # The invariant: of two ranks that exchange, one receives first. With NCCL a send is over when
    # the other rank receives; what is issued after it on the same communicator waits for it.
    for rank, first in enumerate(firsts):
        for peer, kind in first.items():
            if kind == firsts[peer].get(rank) == "send":
                raise Wrong(f"ranks {rank} and {peer} both send to each other before they receive, "
                            "outside of dist.batch_isend_irecv", "gloo buffers sends. With NCCL "
                            "each waits until the other receives, and neither does. Put sends and "
                            "receives into one batch.")
