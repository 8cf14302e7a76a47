"""The messages between stages: outputs go to the next stage, gradients to the one before.

In any legal schedule they can neither deadlock nor be mixed up, with gloo and with NCCL, because of
four rules.

1. A send returns at once and its tensor is kept until it has arrived. If sends waited for their
   receivers, two neighbours that send to each other (one an output, the other a gradient) would
   wait for ever, with every backend. So a rank waits only in `receive`, for an action of another
   rank; a schedule is legal if these waits form no cycle.
2. Each direction of each pair of ranks has a process group of its own, for outputs and for
   gradients separately. NCCL runs what is called on one communicator in order, on one stream:
   if both neighbours first call send and then receive on the same one, neither receive is ever
   started.
3. In a group the receiver takes the messages in the order in which the sender's list makes them,
   and puts aside what it needs later. NCCL has no tags: the k-th receive gets the k-th send,
   whatever it is. The message it waits for comes after those before it anyway, so it waits no
   longer.
4. When the groups are made, one element goes through each in the same order on all ranks. NCCL
   connects two ranks in their first message, and there even an asynchronous send waits.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from labs.predictions.pipelines import Action, Schedule, require_legal
from labs.words import with_article
from labs.workers import devices
from labs.workers.collectives import has_nccl

_WHAT = {"F": "the output", "B": "the gradient"}


class Channel(NamedTuple):
    """One direction between two ranks of the pipeline, for one kind of action, "F" or "B"."""

    source: int
    destination: int
    kind: str


class _Pending(NamedTuple):
    """A send that may not have arrived. consumed_at: index of the action that receives it in its
    rank's list."""

    consumed_at: int
    work: dist.Work
    tensor: torch.Tensor


class StageLinks:
    """What one rank receives and sends while it runs its list of a schedule, once.

    shapes: of the hidden states of each micro-batch, (batch, sequence, hidden). group: of the ranks
    of the pipeline, in its order; None is all ranks. All ranks of the job make their first links
    together. Raises IllegalSchedule before anything is sent.
    """

    def __init__(self, schedule: Schedule, shapes: Sequence[tuple[int, ...]],
                 dtype: torch.dtype = torch.float32, group: dist.ProcessGroup | None = None):
        self.schedule, self._shapes, self._dtype = require_legal(schedule), shapes, dtype
        self.rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        if len(schedule.ranks) != ranks:
            raise ValueError(f"a schedule for {len(schedule.ranks)} ranks was given to {ranks}")
        self._groups = _groups(group)
        self._index = [{action: index for index, action in enumerate(actions)}
                       for actions in schedule.ranks]
        self._to_send = _messages(schedule, lambda channel: channel.source == self.rank)
        self._to_receive = _messages(schedule, lambda channel: channel.destination == self.rank)
        self._here: dict[Action, torch.Tensor] = {}  # received, or handed over on this rank
        self._received: set[Action] = set()
        self._pending: list[list[_Pending]] = [[] for _ in range(ranks)]  # by destination

    def is_last(self, action: Action) -> bool:
        """Whether the action's stage is the last one, which computes the loss."""
        return action.stage == self.schedule.stages - 1

    def receive(self, action: Action) -> torch.Tensor | None:
        """What the action needs from another stage, in a new tensor without history: for F the
        output of the stage before, for B the gradient of its own output. None for the F of the
        first stage and the B of the last one. Waits until it has arrived."""
        source = self._require_own(action, "receives")
        if source is None:
            return None
        if action in self._received:
            raise ValueError(f"{self._name(action)} receives a second time; keep what it got")
        self._require_earlier_sent(action)
        channel = Channel(self.schedule.rank_of(source.stage), self.rank, action.kind)
        while action not in self._here:
            self._receive_next(channel)
        self._received.add(action)
        return self._here.pop(action)

    def send(self, action: Action, tensor: torch.Tensor) -> None:
        """Sends what the action has computed: for F its output, to the next stage; for B the
        gradient of its input, to the stage before. Does not wait; keeps the tensor meanwhile."""
        self._require_own(action, "sends")
        target = _target(self.schedule, action)
        if target is None:
            raise ValueError(f"{self._name(action)} has nobody to send to: "
                             f"stage {action.stage} is the "
                             f"{'last' if action.kind == 'F' else 'first'}")
        self._require_tensor(action, tensor)
        destination = self.schedule.rank_of(target.stage)
        if destination == self.rank:
            # Without history, as what comes from another rank: each stage runs its own backward.
            self._here[target] = tensor.detach()
            return
        channel = Channel(self.rank, destination, action.kind)
        self._require_next(channel, action, target)
        tensor = tensor.detach().to(wire_device()).contiguous()
        work = dist.isend(tensor, group=self._groups[channel],
                          group_dst=_other(self._groups[channel]))
        self._pending[destination].append(
            _Pending(self._index[destination][target], work, tensor))

    def require_complete(self) -> None:
        """Raises ValueError where this rank has left out a message of its list."""
        for channel, targets in self._to_send.items():
            if targets:
                source = self.schedule.source(targets[0])
                raise ValueError(f"{self._name(source)} never sent {_WHAT[source.kind]}, which "
                                 f"rank {channel.destination} waits for")
        for action in self.schedule.ranks[self.rank]:
            if self.schedule.source(action) and action not in self._received:
                raise ValueError(f"{self._name(action)} never received {_WHAT[action.kind]} of "
                                 f"stage {self.schedule.source(action).stage}")

    def finish(self) -> None:
        """Waits until all that this rank sent has arrived; raises ValueError where it has left out
        a message of its list."""
        self.require_complete()
        for pending in self._pending:
            _wait(pending)
            pending.clear()

    def _receive_next(self, channel):
        target = self._to_receive[channel].popleft()
        tensor = torch.empty(self._shapes[target.micro_batch], dtype=self._dtype,
                             device=wire_device())
        dist.irecv(tensor, group=self._groups[channel],
                   group_src=_other(self._groups[channel])).wait()
        self._here[target] = tensor.to(devices.device())
        # The sender had received these before it computed what has arrived: so they are done.
        sent_at = self._index[channel.source][self.schedule.source(target)]
        pending = self._pending[channel.source]
        _wait([each for each in pending if each.consumed_at < sent_at])
        self._pending[channel.source] = [each for each in pending if each.consumed_at >= sent_at]

    def _require_own(self, action, verb) -> Action | None:
        """The action's source, if the action stands in this rank's list."""
        if not isinstance(action, Action) or action not in self._index[self.rank]:
            raise ValueError(f"rank {self.rank} {verb} for {action!r}, which is not in its list")
        return self.schedule.source(action)

    def _require_earlier_sent(self, action):
        # Who waits before it has sent what others wait for may wait for ever.
        index = self._index[self.rank]
        for targets in self._to_send.values():
            source = self.schedule.source(targets[0]) if targets else action
            if index[source] < index[action]:
                raise ValueError(f"{self._name(action)} waits for {_WHAT[action.kind]} of another "
                                 f"stage before {self.schedule.name(source)} has sent "
                                 f"{_WHAT[source.kind]}")

    def _require_tensor(self, action, tensor):
        what = f"{self._name(action)} sends {_WHAT[action.kind]}"
        if tensor is None and action.kind == "B":
            raise ValueError(f"{what} of its input, which is None: the input did not require "
                             "gradients in forward")
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{what}: {with_article(type(tensor).__name__)} instead of a tensor")
        wanted = tuple(self._shapes[action.micro_batch])
        if tuple(tensor.shape) != wanted or tensor.dtype != self._dtype:
            raise ValueError(f"{what} as {tensor.dtype} of shape {list(tensor.shape)}; the "
                             f"receiver expects {self._dtype} of {list(wanted)}")

    def _require_next(self, channel, action, target):
        # The receiver takes messages in the order of the sender's list: another one mixes them up.
        targets = self._to_send[channel]
        if not targets or target not in targets:
            raise ValueError(f"{self._name(action)} sends {_WHAT[action.kind]} a second time")
        if targets[0] != target:
            first = self.schedule.source(targets[0])
            raise ValueError(f"{self._name(action)} sends before {self.schedule.name(first)}, "
                             "which stands before it in the list")
        targets.popleft()

    def _name(self, action) -> str:
        return f"rank {self.rank}, {self.schedule.name(action)}"


def _target(schedule, action) -> Action | None:
    """The action that receives what this one has computed."""
    step = {"F": 1, "B": -1, "W": 0}[action.kind]
    if step == 0 or not 0 <= action.stage + step < schedule.stages:
        return None
    return Action(action.kind, action.micro_batch, action.stage + step)


def _messages(schedule, chosen) -> dict[Channel, deque[Action]]:
    """channel -> the actions that receive its messages, in the order in which they are sent."""
    found: dict[Channel, deque[Action]] = {}
    for source, actions in enumerate(schedule.ranks):
        for action in actions:
            target = _target(schedule, action)
            if target is None:
                continue
            channel = Channel(source, schedule.rank_of(target.stage), action.kind)
            if channel.source != channel.destination and chosen(channel):
                found.setdefault(channel, deque()).append(target)
    return found


_made: dict[tuple, dict[Channel, dist.ProcessGroup]] = {}


def _groups(group: dist.ProcessGroup | None) -> dict[Channel, dist.ProcessGroup]:
    """channel -> a group of its two ranks, for the channels of this rank. They are made once. All
    ranks of the job make them together, those of other pipelines, too: torch numbers groups."""
    members = dist.get_process_group_ranks(group or dist.group.WORLD)
    # WORLD is another object after init_process_group is called again; its old groups are dead.
    key = (dist.group.WORLD, *members)
    if key not in _made:
        pipelines = [members]
        if len(members) < dist.get_world_size():
            by_rank = [None] * dist.get_world_size()
            dist.all_gather_object(by_rank, members)
            # Sorted: new_group must be called for the same groups in the same order on all ranks.
            pipelines = sorted({tuple(each) for each in by_rank})
        _made[key] = {channel: made for pipeline in pipelines
                      for channel, made in _made_for(pipeline)}
    return _made[key]


def _made_for(pipeline: Sequence[int]) -> Iterator[tuple[Channel, dist.ProcessGroup]]:
    """The groups of this rank's channels; in the same order on all ranks, see rule 4."""
    for channel in _channels(len(pipeline)):
        pair = [pipeline[channel.source], pipeline[channel.destination]]
        group = dist.new_group(pair)
        if dist.get_rank() in pair:
            _first_message(group, sends=dist.get_rank() == pair[0])
            yield channel, group


def _channels(ranks: int) -> Iterator[Channel]:
    """Outputs go to the next rank, and from the last to the first; gradients the other way."""
    # The last rank sends outputs to the first one if a rank has several stages.
    for source in range(ranks if ranks > 1 else 0):
        yield Channel(source, (source + 1) % ranks, "F")
        yield Channel(source, (source - 1) % ranks, "B")


def _first_message(group, sends):
    tensor = torch.zeros(1, device=wire_device())
    if sends:
        dist.send(tensor, group=group, group_dst=_other(group))
    else:
        dist.recv(tensor, group=group, group_src=_other(group))


def _other(group) -> int:
    """The other one of a group of two ranks, by its rank in the group."""
    return 1 - dist.get_rank(group)


def _wait(pending: Sequence[_Pending]):
    for each in pending:
        each.work.wait()


def wire_device() -> torch.device:
    """Where messages lie: gloo cannot send from a GPU's memory, so ranks that share one send copies
    from the host's."""
    return devices.device() if has_nccl() else torch.device("cpu")

