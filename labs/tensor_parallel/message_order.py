"""Sends and receives in an order in which they wait for each other with NCCL, though gloo, which
buffers, lets them through."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple
from unittest import mock

import torch.distributed as dist

from labs.checks.verdicts import Wrong
from labs.words import listed
from labs.workers.collective_kernels import IssuedCollective, around_collectives

PEERS = ("Ranks are numbered in their group: dist.P2POp(..., group=group, group_peer=number). Its "
         "third argument is a number among all ranks.")


class Message(NamedTuple):
    """kind: send or recv. peer: the other rank's number in the group. batched: by
    dist.batch_isend_irecv."""

    kind: str
    peer: int
    batched: bool


class MessageOrder:
    """`with MessageOrder() as order:` records this rank's sends and receives."""

    def __init__(self):
        self.messages: list[Message] = []
        self._batched = []  # tensors of a P2POp

    def __enter__(self):
        init, self._stack = dist.P2POp.__init__, ExitStack()

        def noted(operation, op, tensor, *args, **named):
            self._batched.append(tensor)
            init(operation, op, tensor, *args, **named)

        # not batch_isend_irecv, which a student may have imported by its name
        self._stack.enter_context(mock.patch.object(dist.P2POp, "__init__", noted))
        self._stack.enter_context(around_collectives(self._around))
        return self

    def __exit__(self, *exception):
        self._batched.clear()
        self._stack.close()

    def _around(self, collective: IssuedCollective, issue: Callable[[], Any]) -> Any:
        if collective.peer is not None:
            # By identity: the tensor of a P2POp is the one that is sent or received.
            batched = any(one is collective.inputs[0] for one in self._batched)
            self.messages.append(Message(collective.kind, collective.peer, batched))
        return issue()

    def of_all(self) -> list[list[Message]]:
        """By rank, the messages; all ranks call it."""
        by_rank = [None] * dist.get_world_size()
        dist.all_gather_object(by_rank, self.messages)
        return by_rank


def require_no_deadlock(by_rank: list[list[Message]]) -> None:
    """Raises Wrong where these messages of all ranks never end with NCCL."""
    waiting = _never_matched([_batches(messages) for messages in by_rank])
    # The invariant: with NCCL a send is over when the other rank receives, and what a rank issues
    # after it waits for it, so ranks that all send first wait in a cycle. A batch has no order.
    if any(waiting):
        verbs = {"send": "sends to", "recv": "receives from"}
        first = [f"rank {rank} {verbs[messages[0].kind]} rank {messages[0].peer}"
                 for rank, messages in enumerate(waiting) if messages]
        raise Wrong(f"on NCCL ranks would wait for each other, outside of "
                    f"dist.batch_isend_irecv: {listed(first)} first",
                    "gloo buffers sends. On NCCL a send waits for its receive, and so does what "
                    "comes after it: put sends and receives into one batch.",
                    code="deadlock_on_nccl")


def _batches(messages) -> list[list[Message]]:
    """What is issued together; a message outside of a batch is alone."""
    found = []
    for message in messages:
        if message.batched and found and found[-1][0].batched:
            found[-1].append(message)
        else:
            found.append([message])
    return found


def _never_matched(queues: list[list[list[Message]]]) -> list[list[Message]]:
    """By rank, what it waits for at the end, where each rank begins a batch when the one before has
    met its counterparts."""
    moved = True
    while moved:
        moved = False
        for rank, queue in enumerate(queues):
            # Only heads of queues meet: a rank issues its next batch when all of this one is done.
            for message in list(queue[0]) if queue else []:
                other = "recv" if message.kind == "send" else "send"
                meets = next((each for each in (queues[message.peer] or [[]])[0]
                              if each.kind == other and each.peer == rank), None)
                if meets is not None:
                    queue[0].remove(message)
                    queues[message.peer][0].remove(meets)
                    moved = True
        queues[:] = [[batch for batch in queue if batch] for queue in queues]
    return [queue[0] if queue else [] for queue in queues]
