"""Runs any legal schedule on ranks, and records when each action ran and what was in flight. A
stage's backward of one micro-batch runs whole, or in two parts: the gradient of the input first,
which the stage before waits for, and the gradients of the weights whenever there is time."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from labs.pipeline_parallel.messages import StageLinks
from labs.pipeline_parallel.saved_bytes import SavedBytes
from labs.pipeline_parallel.stages import MicroBatch, Stage, count_targets, sum_of_losses
from labs.predictions.pipelines import Action, Schedule
from labs.workers import devices


class MeasuredSpan(NamedTuple):
    """One action as it ran; `Timeline.from_measured` takes those of all ranks. begin, end: seconds
    on `time.perf_counter`, which all ranks of a host share: from when what it needs was there until
    its result was."""

    rank: int
    action: Action
    begin: float
    end: float


@dataclass
class RankRecord:
    """What one rank did in one step.

    loss: the sum over the micro-batches, of the last stage; 0 on other ranks. spans: in order.
    in_flight: bytes saved for backward after each of these actions; peak: their highest moment,
    within an action, too.
    """

    rank: int
    loss: float = 0.0
    spans: list[MeasuredSpan] = field(default_factory=list)
    in_flight: list[int] = field(default_factory=list)
    peak: int = 0


class PipelineRunner:
    """Runs a schedule on this rank's stages; the gradients of a step add up in the parameters.

    stages: number -> this rank's stages. group: the ranks of the pipeline; None is all.
    at_least: kind of action -> seconds that each takes at least: it sleeps for the rest, so that 4
    ranks show their order on 2 cores. recorded: measures in-flight bytes and, on a GPU, waits for
    its kernels after each action. Raises IllegalSchedule before anything is sent.
    """

    def __init__(self, schedule: Schedule, stages: Mapping[int, Stage], *,
                 group: dist.ProcessGroup | None = None,
                 at_least: Mapping[str, float] | None = None,
                 recorded: bool = True):
        self.schedule, self.stages, self._group = schedule, stages, group
        self._at_least, self._recorded = at_least or {}, recorded
        self._work = {"F": self._forward, "B": self._backward, "W": self._weights}

    def step(self, micro_batches: Sequence[MicroBatch]) -> RankRecord:
        """Runs this rank's actions. Every rank has all micro-batches, on its device; only the first
        stage reads the tokens, only the last the targets. The loss is the mean over all targets."""
        self._batches, self._targets = micro_batches, count_targets(micro_batches)
        self._links = make_links(self.schedule, self.stages, micro_batches, self._group)
        self._kept, self._halves = {}, {}
        # Only if bytes are recorded: a sharded parameter is a DTensor, whose storage is none.
        self._saved = SavedBytes(p for stage in self.stages.values() for p in stage.parameters()
                                 if self._recorded)
        self._record = RankRecord(self._links.rank)
        for action in self.schedule.ranks[self._links.rank]:
            # Only the computation is timed: a rank that waits in receive is idle.
            received = None if action.kind == "W" else self._links.receive(action)
            result = self._timed(action, received)
            if result is not None:
                self._links.send(action, result)
        self._links.finish()
        self._record.peak = self._saved.peak
        return self._record

    def _timed(self, action, received):
        began = time.perf_counter()
        result = self._work[action.kind](action, received)
        if self._recorded:
            devices.synchronize()
        rest = self._at_least.get(action.kind, 0.0) - (time.perf_counter() - began)
        if rest > 0:
            time.sleep(rest)
        self._record.spans.append(
            MeasuredSpan(self._links.rank, action, began, time.perf_counter()))
        self._record.in_flight.append(self._saved.now)
        return result

    def _forward(self, action, received) -> torch.Tensor | None:
        """The output to send; None of the last stage."""
        batch, is_last = self._batches[action.micro_batch], self._links.is_last(action)
        if received is not None:
            # A leaf: what was received has no history, and backward leaves its gradient in .grad.
            received.requires_grad_()
        given = batch["input_ids"] if received is None else received
        with self._saved.recording() if self._recorded else nullcontext():
            output = self.stages[action.stage](given)
            if is_last:
                # Divided by the targets of all micro-batches, so that gradients of the parts add up
                # to those of the mean.
                output = sum_of_losses(output, batch["targets"]) / self._targets
        # Until its backward: input and output are all that is kept, autograd has the rest.
        self._kept[action.stage, action.micro_batch] = received, output
        if is_last:
            self._record.loss += output.item()
        return None if is_last else output

    def _backward(self, action, gradient) -> torch.Tensor | None:
        """The gradient of the input to send; None of the first stage."""
        received, output = self._kept.pop((action.stage, action.micro_batch))
        if not self.schedule.is_split(action.stage, action.micro_batch):
            backward(output, gradient)
            return None if received is None else received.grad
        parameters = list(self.stages[action.stage].parameters())
        halves = InputThenWeights(output, received, gradient, parameters)
        self._halves[action.stage, action.micro_batch] = halves
        return halves.input_gradient()

    def _weights(self, action, _) -> None:
        self._halves.pop((action.stage, action.micro_batch)).weights()


def make_links(schedule: Schedule, stages: Mapping[int, Stage],
               micro_batches: Sequence[MicroBatch],
               group: dist.ProcessGroup | None = None) -> StageLinks:
    """The links of this rank for one step on these micro-batches."""
    if len(micro_batches) != schedule.micro_batches:
        raise ValueError(f"the schedule is for {schedule.micro_batches} micro-batches, and there "
                         f"are {len(micro_batches)}")
    stage = next(iter(stages.values()))
    shapes = [(*batch["input_ids"].shape, stage.hidden_size) for batch in micro_batches]
    return StageLinks(schedule, shapes, group=group)


def run_step(run_actions: Callable, schedule: Schedule, stages: Mapping[int, Stage],
             micro_batches: Sequence[MicroBatch], group: dist.ProcessGroup | None = None) -> Any:
    """On a rank: what `run_actions(actions, stages, micro_batches, links)` of exercise 7.18 returns
    for this rank's list; all that it has sent has arrived then."""
    links = make_links(schedule, stages, micro_batches, group)
    result = run_actions(schedule.ranks[links.rank], stages, micro_batches, links)
    links.finish()
    return result


try:  # private, there since torch 2.5
    from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
except ImportError:
    stage_backward_input = stage_backward_weight = None


def backward(output: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """The whole backward: all gradients add up in `.grad`. gradient: of the output; None for a
    loss."""
    torch.autograd.backward(output, gradient)


class InputThenWeights:
    """The two parts of a backward. `input_gradient()` computes the gradient of `received` alone and
    returns it; `weights()`, later, adds those of the parameters to their `.grad`.

    With torch's private functions each part runs its own half of the graph: the gradients where a
    weight is used are kept from one part to the other. Without them, the second part runs the whole
    backward once more: same gradients, more time.
    """

    def __init__(self, output: torch.Tensor, received: torch.Tensor | None,
                 gradient: torch.Tensor | None, parameters: Sequence[torch.nn.Parameter]):
        self._output, self._received, self._gradient = output, received, gradient
        self._parameters = [p for p in parameters if p.requires_grad]
        self._groups: list | None = None

    def input_gradient(self) -> torch.Tensor | None:
        """The gradient of the stage's input; None in the first stage, which has nothing to do."""
        if self._received is None:
            return None
        if stage_backward_input is None:
            # The graph stays: weights() runs through it once more.
            found, = torch.autograd.grad(self._output, self._received, self._gradient,
                                         retain_graph=True)
            return found
        gradients = None if self._gradient is None else [self._gradient]
        (found,), self._groups = stage_backward_input([self._output], gradients, [self._received],
                                                      iter(self._parameters))
        self._output = self._gradient = None  # the graph above the weights is freed
        # torch's function also stores the gradient there; it is sent, and nobody reads it again.
        self._received.grad = None
        return found

    def weights(self) -> None:
        """Adds the gradients of the parameters to what they have."""
        if self._groups is not None:
            stage_backward_weight(iter(self._parameters), self._groups)
        else:
            torch.autograd.backward(self._output, self._gradient, inputs=self._parameters)
        self._groups = self._output = self._gradient = None
