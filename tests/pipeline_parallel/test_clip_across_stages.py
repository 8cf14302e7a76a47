"""What the check of exercise 7.20 must reject, and what it must accept."""

import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from answers import assert_rejected, assert_waits, judge_all

from labs.pipeline_parallel.clip_across_stages import check_clip_across_stages

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.usefixtures("warm_launcher")


# 7.20


class Clips:
    """A right answer, in pieces that a wrong one replaces."""

    def __call__(self, parameters, tied, max_norm, group, tied_group):
        self.group, self.tied_group = group, tied_group
        if tied is not None:
            self.join(tied.grad)
        gradients = self.gradients(parameters)
        norm = self.norm(gradients, tied)
        for gradient in gradients:
            gradient.mul_(self.factor(max_norm, norm))
        return self.result(norm, max_norm)

    def join(self, gradient):
        dist.all_reduce(gradient, group=self.tied_group)

    def gradients(self, parameters):
        return [p.grad for p in parameters if p.grad is not None]

    def norm(self, gradients, tied):
        total = sum(self.square(gradient) for gradient in gradients)
        if tied is not None and not self.counts():
            total = total - self.square(tied.grad)
        return self.reduced(total).sqrt()

    def square(self, gradient):
        return gradient.square().sum()

    def counts(self):
        return dist.get_rank(self.tied_group) == 0

    def reduced(self, total):
        dist.all_reduce(total, group=self.group)
        return total

    def factor(self, max_norm, norm):
        return min(1.0, max_norm / (norm.item() + 1e-6))

    def result(self, norm, max_norm):
        return norm


def does_nothing(parameters, tied, max_norm, group, tied_group):
    return torch.tensor(0.0)


def torchs_own(parameters, tied, max_norm, group, tied_group):
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm)


def torchs_own_after_tying(parameters, tied, max_norm, group, tied_group):
    if tied is not None:
        dist.all_reduce(tied.grad, group=tied_group)
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm)


class GathersGradients(Clips):
    def reduced(self, total):
        dist.all_gather_object([None] * dist.get_world_size(self.group),
                               torch.zeros(5000), group=self.group)
        return super().reduced(total)


class NotTied(Clips):
    def join(self, gradient):
        pass


class TiedAfterwards(Clips):
    """The copies stay equal, but the norm is of their parts."""

    def __call__(self, parameters, tied, max_norm, group, tied_group):
        self.join = lambda gradient: None
        norm = super().__call__(parameters, tied, max_norm, group, tied_group)
        if tied is not None:
            dist.all_reduce(tied.grad, group=tied_group)
        return norm


class NotTiedAndBothCount(NotTied):
    def counts(self):
        return True


class MeanOfTied(Clips):
    def join(self, gradient):
        super().join(gradient)
        gradient /= 2


class JoinedTwice(Clips):
    def join(self, gradient):
        super().join(gradient)
        super().join(gradient)


class CountedTwice(Clips):
    def counts(self):
        return True


class NotCounted(Clips):
    def counts(self):
        return False


class Rank0Counts(Clips):
    """The job's rank 0, which is not in every pipeline."""

    def counts(self):
        return dist.get_rank() == 0


class OwnNorm(Clips):
    def reduced(self, total):
        return total


class SumOfNorms(Clips):
    def norm(self, gradients, tied):
        return self.reduced(self.square(
            torch.cat([gradient.flatten() for gradient in gradients])).sqrt())


class WholeJob(Clips):
    def reduced(self, total):
        dist.all_reduce(total)
        return total


class Squared(Clips):
    def result(self, norm, max_norm):
        return norm**2


class FromAfter(Clips):
    def result(self, norm, max_norm):
        return norm.clamp(max=max_norm)


class NoResult(Clips):
    def result(self, norm, max_norm):
        return None


class AlwaysScales(Clips):
    def factor(self, max_norm, norm):
        return max_norm / (norm.item() + 1e-6)


class NeverScales(Clips):
    def factor(self, max_norm, norm):
        return 1.0


class ForgetsTheTied(Clips):
    def gradients(self, parameters):
        return super().gradients(parameters)[1:]


class FromVectorNorms(Clips):
    """In another style: foreach, a number in place of a tensor, the last rank counts."""

    def norm(self, gradients, tied):
        own = [g for g in gradients if tied is None or g is not tied.grad or self.counts()]
        norms = torch.stack(torch._foreach_norm(own))
        return self.reduced(norms.square().sum().double()).sqrt()

    def counts(self):
        return dist.get_rank(self.tied_group) == dist.get_world_size(self.tied_group) - 1

    def result(self, norm, max_norm):
        return norm.item()


class HalfFromEach(Clips):
    """Both ranks count half of the tied gradient's squares."""

    def norm(self, gradients, tied):
        total = sum(self.square(gradient) for gradient in gradients)
        if tied is not None:
            total = total - self.square(tied.grad) / 2
        return self.reduced(total).sqrt()


WRONG = [
    (does_nothing, "wrong_number"),
    (torchs_own, "norm_own_stages_alone"),
    (torchs_own_after_tying, "wrong_number"),
    (GathersGradients(), "too_much_sent"),
    (NotTied(), "one_tied_gradient"),
    (TiedAfterwards(), "one_tied_gradient"),
    (NotTiedAndBothCount(), "tied_gradients_apart"),
    (MeanOfTied(), "tied_gradients_averaged"),
    (JoinedTwice(), "too_much_sent"),
    (CountedTwice(), "norm_tied_gradient_counted_twice"),
    (NotCounted(), "norm_without_tied_gradient"),
    (OwnNorm(), "wrong_number"),
    (SumOfNorms(), "wrong_number"),
    (Squared(), "square"),
    (FromAfter(), "norm_after_clipping"),
    (NoResult(), "wrong_type norm"),
    (AlwaysScales(), "wrong_scale"),
    (NeverScales(), "wrong_scale 0.05"),
    (ForgetsTheTied(), "norm_without_tied_gradient"),
]
ON_TWO_PIPELINES = [
    (WholeJob(), "norm_over_all_pipelines_job"),
    (Rank0Counts(), "norm_without_tied_gradient pipeline"),
]
RIGHT = [FromVectorNorms(), HalfFromEach()]


@pytest.mark.slow
def test_clipping_on_two_ranks():
    judge_all(check_clip_across_stages, WRONG, RIGHT, 2)


@pytest.mark.slow
def test_clipping_in_two_pipelines():
    judge_all(check_clip_across_stages, ON_TWO_PIPELINES, [FromVectorNorms()], 4)


class OnlyTheTiedRanks(Clips):
    """A collective that the ranks in the middle never call."""

    def join(self, gradient):
        dist.all_reduce(gradient, group=self.group)


def test_a_collective_of_some_ranks_alone_ends():
    verdict = check_clip_across_stages(OnlyTheTiedRanks())
    assert_rejected(verdict, "collectives_differ|deadlock|no_progress")


def test_7_19_and_7_20_wait():
    assert_waits(check_clip_across_stages, "7.20")
