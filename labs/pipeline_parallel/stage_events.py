"""What a student's runner does with the stages of its rank: which runs when, and what is kept."""

import contextlib
import functools
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch

from labs.checks.verdicts import Wrong
from labs.pipeline_parallel.saved_bytes import SavedBytes
from labs.pipeline_parallel.stages import Stage
from labs.predictions.pipelines import Action, Schedule

SPARE = 2  # outputs that a loop's variables may hold after their backward


def _in_backward() -> bool:
    """Whether this thread runs a backward now, for which there is no public question."""
    return torch._C._current_graph_task_id() != -1


class StageEvents:
    """`with events.recorded():` records on one rank the forwards and backwards of its stages.

    A backward is recorded when the gradient of the stage's output is there; a forward that runs
    inside a backward is none of the list's: activation checkpointing computes one again. events: in
    order.
    kept: of how many forwards at most an input or output was alive, at the start of a forward or at
    the end, although their backward was over. peak: the most bytes that autograd kept.
    """

    def __init__(self, schedule: Schedule, rank: int, stages: Mapping[int, Stage]):
        self.schedule, self.rank, self._stages = schedule, rank, stages
        self.events: list[Action] = []
        self.kept = 0
        self._alive: dict[Action, list[weakref.ref]] = {}  # by the backward that ends them
        self._forwards = Counter()
        self._inputs: dict[tuple[int, int], Action] = {}  # by stage and address of its input
        self._saved = SavedBytes(p for stage in stages.values() for p in stage.parameters())

    @property
    def peak(self) -> int:
        return self._saved.peak

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        handles = []
        for number, stage in self._stages.items():
            # A pre-hook, so that what the forward itself makes is not counted.
            handles += [stage.register_forward_pre_hook(lambda *_: self._count_kept()),
                        stage.register_forward_hook(functools.partial(self._forward, number))]
        try:
            with self._saved.recording():
                yield
        finally:
            for handle in handles:
                handle.remove()

    def finish(self) -> None:
        """Counts what is kept when the runner has returned."""
        self._count_kept()

    def judge_order(self) -> None:
        """Raises Wrong where other actions ran than those of the list, or in another order."""
        mine = self.schedule.ranks[self.rank]
        for index, wanted in enumerate(mine):
            place = f"rank {self.rank}, index {index} of its list"
            if index >= len(self.events):
                raise Wrong(f"{place}: {self._name(wanted)} never ran on the stage of this rank",
                            "Each rank runs every action of its own list, and only those.",
                            code="action_missing")
            if self.events[index] != wanted:
                # A backward of another micro-batch uses the graph of the wrong forward.
                raise Wrong(f"{place}: {self._name(self.events[index])} ran where "
                            f"{self._name(wanted)} stands",
                            "Keep input and output by micro-batch and stage, because backwards do "
                            "not come in the order of a stack.", code="wrong_order")
        if len(self.events) > len(mine):
            raise Wrong(f"rank {self.rank} runs {self._name(self.events[len(mine)])} after the end "
                        "of its list", code="extra_action")

    def judge_kept(self, peak: int) -> None:
        """Raises Wrong where activations outlive their backward. peak: bytes that are enough."""
        in_list = Counter(action.kind for action in self.schedule.ranks[self.rank])["B"]
        if self.kept > min(SPARE, in_list - 1):
            raise Wrong(f"rank {self.rank} still holds input or output of {self.kept} forwards "
                        "whose backward is over",
                        "Take input and output out of what you keep (dict.pop) in their backward.",
                        code="memory_kept")
        if self.peak > peak:
            raise Wrong(f"rank {self.rank}: autograd keeps {self.peak:,} bytes at the peak; with "
                        f"the forwards in flight that its list allows, {peak:,} are enough",
                        "A backward frees what autograd saved, unless it is told to retain_graph.",
                        code="memory_kept")

    def _forward(self, number, _, args, output):
        """The k-th forward of a stage is that of its k-th F in the list."""
        if _in_backward():
            # A reentrant checkpoint runs its forward without a graph, so the one that is computed
            # again is the first whose output has a gradient. What it was computed from is still
            # allocated, so its address tells of which forward it is.
            action = self._inputs.get((number, args[0].data_ptr()))
            ended = action and Action("B", action.micro_batch, number)
            if action and ended not in self._alive:
                self._watch(ended, args, output)
            return
        mine: Sequence[Action] = [action for action in self.schedule.ranks[self.rank]
                                  if (action.kind, action.stage) == ("F", number)]
        index = self._forwards[number]
        self._forwards[number] += 1
        action = mine[index] if index < len(mine) else Action("F", index, number)
        self.events.append(action)
        self._inputs[number, args[0].data_ptr()] = action
        if output.requires_grad:
            self._watch(Action("B", action.micro_batch, number), args, output)

    def _watch(self, ended, args, output):
        # The first stage's input is the batch's tokens, which are kept anyway.
        activations = [output, *(each for each in args if each.is_floating_point())]
        # Weak: a reference of the check's own would keep what it looks for.
        self._alive[ended] = [weakref.ref(each) for each in activations]
        output.register_hook(lambda _: self.events.append(ended))

    def _count_kept(self):
        if _in_backward():  # the backward whose forward is computed again is not over yet
            return
        done = set(self.events)
        kept = sum(any(each() is not None for each in tensors)
                   for ended, tensors in self._alive.items() if ended in done)
        self.kept = max(self.kept, kept)

    def _name(self, action) -> str:
        return self.schedule.name(action)
