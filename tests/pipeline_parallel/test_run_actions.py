"""What the checks of stages on real ranks must reject, and what they must accept."""

import copy
import functools
import sys

import cloudpickle
import gate
import pytest
import torch
import torch.distributed as dist
from answers import assert_rejected, assert_waits, judge_in_one_launch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from labs.pipeline_parallel.run_actions import check_run_actions
from labs.pipeline_parallel.stages import count_targets, sum_of_losses

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.usefixtures("warm_launcher")


class Runs:
    """A right runner of a rank's list, in pieces that a wrong one replaces."""

    def __call__(self, actions, stages, micro_batches, links):
        self.stages, self.batches, self.links = stages, micro_batches, links
        self.kept, self.loss, self.targets = {}, 0.0, count_targets(micro_batches)
        for action in self.order(actions):
            (self.forward if action.kind == "F" else self.backward)(action)
        return self.result()

    def order(self, actions):
        return actions

    def result(self):
        return self.loss

    def stage(self, action):
        return self.stages[action.stage]

    def forward(self, action):
        batch, received = self.batches[action.micro_batch], self.links.receive(action)
        given = batch["input_ids"] if received is None else self.prepare(received)
        output = self.stage(action)(given)
        if self.links.is_last(action):
            output = self.loss_of(output, batch["targets"])
            self.add(output)
        else:
            self.send_output(action, output)
        self.keep(action, (given, output))

    def backward(self, action):
        given, output = self.take(action)
        self.differentiate(output, self.links.receive(action))
        if action.stage > 0:
            self.send_gradient(action, given.grad)

    def prepare(self, received):
        return received.requires_grad_()

    def loss_of(self, logits, targets):
        return sum_of_losses(logits, targets) / self.targets

    def add(self, loss):
        self.loss += loss.item()

    def keep(self, action, both):
        self.kept[action.stage, action.micro_batch] = both

    def take(self, action):
        return self.kept.pop((action.stage, action.micro_batch))

    def differentiate(self, output, gradient):
        output.backward(gradient)

    def send_output(self, action, output):
        self.links.send(action, output)

    def send_gradient(self, action, gradient):
        self.links.send(action, gradient)


class KeepsTheLossAsATensor(Runs):
    def add(self, loss):
        self.loss = self.loss + loss.detach()


class ByAutogradGrad(Runs):
    """Adds the gradients up itself."""

    def backward(self, action):
        given, output = self.take(action)
        gradient = self.links.receive(action)
        parameters = list(self.stage(action).parameters())
        inputs = parameters if action.stage == 0 else [given, *parameters]
        found = torch.autograd.grad(output, inputs, gradient)
        if action.stage > 0:
            self.links.send(action, found[0])
            found = found[1:]
        for parameter, each in zip(parameters, found, strict=True):
            parameter.grad = each if parameter.grad is None else parameter.grad + each


class ByLists(Runs):
    """Keeps what a stage needs in lists, the oldest first."""

    def keep(self, action, both):
        self.kept.setdefault(action.stage, []).append(both)

    def take(self, action):
        return self.kept[action.stage].pop(0)


def does_nothing(actions, stages, micro_batches, links):
    return 0.0


def one_process_does_all(actions, stages, micro_batches, links):
    """Every rank gets all stages and trains the whole model."""
    by_rank = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, {number: (stage.body, stage.head)
                                     for number, stage in stages.items()})
    every = {number: parts for found in by_rank for number, parts in found.items()}
    loss, targets = 0.0, count_targets(micro_batches)
    for batch in micro_batches:
        hidden = every[0][0](input_ids=batch["input_ids"]).last_hidden_state
        for number in range(1, len(every)):
            hidden = every[number][0](inputs_embeds=hidden).last_hidden_state
        one = sum_of_losses(every[len(every) - 1][1](hidden), batch["targets"]) / targets
        one.backward()
        loss += one.item()
    return loss


class AlsoBroadcasts(Runs):
    def result(self):
        loss = torch.tensor(self.loss)
        dist.broadcast(loss, dist.get_world_size() - 1)
        return loss


class MeanOfMeans(Runs):
    def loss_of(self, logits, targets):
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) / len(self.batches)


class SumOfMeans(Runs):
    def loss_of(self, logits, targets):
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Sums(Runs):
    def loss_of(self, logits, targets):
        return sum_of_losses(logits, targets)


class ScaledTwice(Runs):
    def loss_of(self, logits, targets):
        return sum_of_losses(logits, targets) / self.targets / len(self.batches)


class Stack(Runs):
    """The backward of the newest forward."""

    def keep(self, action, both):
        self.kept.setdefault(action.stage, []).append(both)

    def take(self, action):
        return self.kept[action.stage].pop()


class AllForwardsFirst(Runs):
    def order(self, actions):
        return sorted(actions, key=lambda action: action.kind == "B")


class RetainsGraphs(Runs):
    """Each graph ends with its output all the same."""

    def differentiate(self, output, gradient):
        output.backward(gradient, retain_graph=True)


class KeepsGraphs(RetainsGraphs):
    """Without what a stage has taken and returned."""

    def keep(self, action, both):
        super().keep(action, both)
        self.__dict__.setdefault("graphs", []).append(both[1].grad_fn)


class KeepsInputs(Runs):
    def keep(self, action, both):
        super().keep(action, both)
        self.__dict__.setdefault("inputs", []).append(both[0])


class StepsItself(Runs):
    def result(self):
        parameters = [p for stage in self.stages.values() for p in stage.parameters()]
        torch.optim.SGD(parameters, 0.1).step()
        return self.loss


class ByAllTokens(Runs):
    def loss_of(self, logits, targets):
        tokens = sum(batch["targets"].numel() for batch in self.batches)
        return sum_of_losses(logits, targets) / tokens


class ByOwnTokens(Runs):
    def loss_of(self, logits, targets):
        return sum_of_losses(logits, targets) / targets.numel()


class SkipsMissingGradient(Runs):
    """Takes a missing gradient as the sign of the first stage."""

    def prepare(self, received):
        return received

    def send_gradient(self, action, gradient):
        if gradient is not None:
            super().send_gradient(action, gradient)


class LastStageSends(Runs):
    def add(self, loss):
        super().add(loss)
        self.links.send(self.newest, loss)

    def forward(self, action):
        self.newest = action
        super().forward(action)


class KeepsAll(Runs):
    def take(self, action):
        return self.kept[action.stage, action.micro_batch]


class KeepsItsGraph(Runs):
    def add(self, loss):
        self.loss = self.loss + loss


class LastMicroBatchAlone(Runs):
    def differentiate(self, output, gradient):
        for stage in self.stages.values():
            stage.zero_grad()
        output.backward(gradient)


class ForgetsWhatWasThere(Runs):
    def order(self, actions):
        for stage in self.stages.values():
            stage.zero_grad()
        return actions


class WithoutHistory(Runs):
    def prepare(self, received):
        return received


class GradientOfTheOutput(Runs):
    """Hands on what it received instead of the gradient of its input."""

    def differentiate(self, output, gradient):
        output.backward(gradient)
        self.gradient = gradient

    def send_gradient(self, action, gradient):
        self.links.send(action, gradient if self.gradient is None else self.gradient)


class ZeroGradient(Runs):
    def send_gradient(self, action, gradient):
        self.links.send(action, torch.zeros_like(gradient))


class NoGradientSent(Runs):
    def send_gradient(self, action, gradient):
        pass


class NoOutputSent(Runs):
    def send_output(self, action, output):
        pass


class WithoutLinks(Runs):
    """A send that waits, to a rank that receives on a link."""

    def send_output(self, action, output):
        dist.send(output.detach(), dist.get_rank() + 1)


class FirstChunkOnly(Runs):
    def stage(self, action):
        return self.stages[max(self.stages) if self.links.is_last(action) else min(self.stages)]


class LastLossOnly(Runs):
    def add(self, loss):
        self.loss = loss.item()


class ReturnsNothing(Runs):
    def result(self):
        return None


class WritesIntoTargets(Runs):
    def loss_of(self, logits, targets):
        loss = super().loss_of(logits, targets)
        targets.fill_(0)
        return loss


class ComputesTwice(Runs):
    def forward(self, action):
        super().forward(action)
        given, _ = self.kept[action.stage, action.micro_batch]
        self.stage(action)(given)


class TrainsACopy(Runs):
    def __call__(self, actions, stages, micro_batches, links):
        return super().__call__(actions, copy.deepcopy(stages), micro_batches, links)


class Recomputes(Runs):
    """Activation checkpointing: each stage's forward is run again in its backward."""

    reentrant = False

    def stage(self, action):
        return functools.partial(checkpoint, self.stages[action.stage],
                                 use_reentrant=self.reentrant)


class RecomputesReentrantly(Recomputes):
    """The older way, whose first forward makes no graph; it needs an input with a gradient, so the
    first stage is run as it is."""

    reentrant = True

    def stage(self, action):
        return super().stage(action) if action.stage else self.stages[0]


RIGHT = [KeepsTheLossAsATensor(), ByAutogradGrad(), ByLists(), RetainsGraphs(), Recomputes(),
         RecomputesReentrantly()]
# Those that end the launch are judged alone.
ENDS_LAUNCH = [
    (WithoutHistory(), "raised_ValueError"),
    (SkipsMissingGradient(), "raised_ValueError require"),
    (LastStageSends(), "raised_ValueError nobody"),
    (NoGradientSent(), "raised_ValueError"),
    (NoOutputSent(), "raised_ValueError"),
    (WithoutLinks(), "no_progress"),
    (Stack(), "raised_RuntimeError micro-batch"),
    (FirstChunkOnly(), "raised_RuntimeError 'indices'"),
    (AllForwardsFirst(), "raised_ValueError"),
]
WRONG = [
    (does_nothing, "action_missing"),
    (one_process_does_all, "action_missing"),
    (AlsoBroadcasts(), "wrong_collective"),
    (MeanOfMeans(), "unweighted_mean"),
    (SumOfMeans(), "sum_of_means"),
    (Sums(), "sum_not_mean"),
    (ScaledTwice(), "mean_twice"),
    (KeepsGraphs(), "memory_kept autograd"),
    (KeepsAll(), "memory_kept"),
    (KeepsInputs(), "memory_kept"),
    (StepsItself(), "parameters_changed"),
    (ByAllTokens(), "counts_ignored_targets"),
    (ByOwnTokens(), "counts_own_targets"),
    (KeepsItsGraph(), "graph_kept"),
    (LastMicroBatchAlone(), "last_micro_batch_only"),
    (ForgetsWhatWasThere(), "gradients_overwritten"),
    (GradientOfTheOutput(), "wrong_gradient"),
    (ZeroGradient(), "wrong_gradient"),
    (LastLossOnly(), "wrong_loss"),
    (ReturnsNothing(), "wrong_type"),
    (WritesIntoTargets(), "changes_input"),
    (ComputesTwice(), "wrong_order"),
    (TrainsACopy(), "action_missing|missing_gradient"),
]


@pytest.mark.slow
def test_right_runners_pass():
    answers = [(answer,) for answer in gate.some_of(RIGHT, 1)]
    for verdict in judge_in_one_launch(check_run_actions, answers, 2):
        assert verdict.passed, str(verdict)
    verdict = check_run_actions(ByAutogradGrad())
    assert verdict.passed, str(verdict)


@pytest.mark.slow
def test_wrong_runners_are_rejected():
    wrong = gate.some_of(WRONG)
    verdicts = judge_in_one_launch(check_run_actions, [(answer,) for answer, _ in wrong], 2)
    for verdict, (_, words) in zip(verdicts, wrong, strict=True):
        print(verdict)
        assert_rejected(verdict, words)


@pytest.mark.parametrize(("answer", "words"), ENDS_LAUNCH)
def test_a_runner_that_leaves_others_waiting(answer, words):
    verdict = check_run_actions(answer)
    print(verdict)
    assert_rejected(verdict, words)


def test_7_18_waits():
    assert_waits(check_run_actions, "7.18")
