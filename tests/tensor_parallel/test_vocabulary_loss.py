"""What the check of exercise 7.5 must reject of the loss, with the words that must say why; and
what it must accept."""

import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from answers import judge_in_one_launch
from vocabulary_answers import (
    ByHand,
    assert_all_rejected,
    gathered,
    pieces,
    right,
    size_and_rank,
    summed,
)

import labs.tensor_parallel as lab

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(sys.modules["vocabulary_answers"])
pytestmark = pytest.mark.usefixtures("warm_launcher")


# wrong ones


def loss_of(logits, targets, group, shift=None, total=summed, target=summed, mask=True,
            mean=lambda each, counted: each[counted].sum() / counted.sum()):
    """The right answer in pieces that a wrong one replaces."""
    shifted, local, elsewhere, counted = pieces(logits, targets, group)
    shifted = shifted if shift is None else shift(logits.float())
    mine = shifted.gather(-1, local[..., None])[..., 0]
    mine = mine.masked_fill(elsewhere, 0) if mask else mine
    return mean(total(shifted.exp().sum(-1), group).log() - target(mine, group), counted)


def alone(tensor, group):
    return tensor


def by_funcol(tensor, group):
    return funcol.all_reduce(tensor, "sum", group)


def variant(**changed):
    return lambda logits, targets, group: loss_of(logits, targets, group, **changed)


class Loss:
    def nothing_parallel(logits, targets, group):
        targets = targets % logits.shape[-1]
        return F.cross_entropy(logits.float().flatten(0, -2), targets.flatten())

    def logits_gathered(logits, targets, group):
        return F.cross_entropy(gathered(logits.float(), group).flatten(0, -2), targets.flatten())

    def logits_summed_into_zeros(logits, targets, group):
        """An all-reduce in place of the all-gather."""
        (ranks, rank), rows = size_and_rank(group), logits.shape[-1]
        whole = summed(F.pad(logits.float(), (rank * rows, (ranks - rank - 1) * rows)), group)
        return F.cross_entropy(whole.flatten(0, -2), targets.flatten())

    def row_minus_100(logits, targets, group):
        """-100 is looked up: a row counted from the end, or an error."""
        shifted, local, elsewhere, counted = pieces(logits, targets, group)
        flat = shifted.flatten(0, -2)
        local = torch.where(counted, local, targets).flatten()
        mine = flat[torch.arange(len(flat)), local].view(targets.shape)
        target = summed(mine.masked_fill(elsewhere & counted, 0), group)
        return (summed(shifted.exp().sum(-1), group).log() - target)[counted].mean()

    def sum_kept_in_bf16(logits, targets, group):
        shifted, local, elsewhere, counted = pieces(logits, targets, group)
        shifted = shifted.to(logits.dtype)
        mine = shifted.gather(-1, local[..., None])[..., 0].masked_fill(elsewhere, 0)
        each = summed(shifted.exp().sum(-1), group).log() - summed(mine, group)
        return each[counted].sum() / counted.sum()

    def cast_at_the_end(logits, targets, group):
        return Loss.sum_kept_in_bf16(logits, targets, group).float()

    def maximum_not_detached(logits, targets, group):
        largest = logits.float().max(-1, keepdim=True).values
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        return loss_of(logits, targets, group, shift=lambda whole: whole - largest)

    def one_maximum_for_all_tokens(logits, targets, group):
        largest = logits.detach().float().max()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        return loss_of(logits, targets, group, shift=lambda whole: whole - largest)

    def losses_of_owners_summed(logits, targets, group):
        """log-softmax on every rank, then the sum of the targets' over the ranks: the loss is
        right, and only the target's rank gets the gradient of its log."""
        shifted, local, elsewhere, counted = pieces(logits, targets, group)
        each = summed(shifted.exp().sum(-1), group).log() - shifted.gather(
            -1, local[..., None])[..., 0]
        return summed(each.masked_fill(elsewhere, 0), group)[counted].mean()

    def nothing_detached(logits, targets, group):
        """The loss is right, and backward never reaches the logits."""
        return loss_of(logits.detach(), targets, group)

    def targets_changed(logits, targets, group):
        counted = targets != -100
        targets[~counted] = 0
        return loss_of(logits, targets, group, mean=lambda each, _: each[counted].mean())

    def scaled_on_one_rank(logits, targets, group):
        loss = loss_of(logits, targets, group)
        return 2 * loss if dist.get_rank(group) == 1 else loss

    def mean_over_ranks(logits, targets, group):
        return loss_of(logits, targets, group) / dist.get_world_size(group)

    def mean_of_sequences(logits, targets, group):
        """The mean of means: sequences with few targets weigh as much as others."""
        return loss_of(logits, targets, group, mean=lambda each, counted: (
            (each * counted).sum(-1) / counted.sum(-1).clamp(min=1)).mean())


class WithoutMinusOne(ByHand):
    @classmethod
    def minus_one(cls, shares, local, elsewhere):
        return shares


class MinusOneEverywhere(ByHand):
    @classmethod
    def minus_one(cls, shares, local, elsewhere):
        rows = shares.shape[-1]
        return shares - F.one_hot(local % rows, rows)


class UpstreamIgnored(ByHand):
    @classmethod
    def scaled(cls, gradient, counted, upstream):
        return gradient * counted[..., None] / counted.sum()


class OfTheSum(ByHand):
    @classmethod
    def scaled(cls, gradient, counted, upstream):
        return gradient * counted[..., None] * upstream


class IgnoredHaveGradients(ByHand):
    @classmethod
    def scaled(cls, gradient, counted, upstream):
        return gradient * upstream / counted.sum()


class AllReducedInBackward(ByHand):
    @classmethod
    def scaled(cls, gradient, counted, upstream):
        gradient = super().scaled(gradient, counted, upstream)
        dist.all_reduce(gradient)
        return gradient


WRONG_LOSSES = [
    (Loss.nothing_parallel, "nothing_reduced"),
    (Loss.logits_gathered, "wrong_traffic all_gather"),
    (Loss.logits_summed_into_zeros, "wrong_traffic all_reduce"),
    (variant(total=alone), "exponentials_of_one_rank"),
    (variant(target=alone), "target_of_one_rank"),
    (variant(total=alone, target=alone), "nothing_reduced"),
    (variant(mask=False), "targets_of_others"),
    (variant(shift=lambda logits: logits - logits.detach().amax(-1, keepdim=True)),
     "maximum_of_one_rank"),
    (variant(shift=lambda logits: logits), "not_finite"),
    (variant(mean=lambda each, counted: (each * counted).mean()), "ignored_counted"),
    (variant(mean=lambda each, counted: each.mean()), "ignored_counted"),
    (variant(mean=lambda each, counted: each[counted].sum()), "sum_not_mean"),
    (variant(mean=lambda each, counted: each[counted]), "wrong_type Tensor"),
    (variant(mean=lambda each, counted: each[counted].mean().item()), "wrong_type float"),
    (Loss.row_minus_100, "raised_IndexError"),
    (Loss.sum_kept_in_bf16, "wrong_dtype"),
    (Loss.cast_at_the_end, "wrong_loss"),
    (Loss.nothing_detached, "no_gradient_function"),
    (Loss.maximum_not_detached, "maximum_not_detached"),
    (Loss.one_maximum_for_all_tokens, "not_finite"),
    (Loss.losses_of_owners_summed, "target_of_one_rank"),
    (Loss.targets_changed, "changes_input"),
    (Loss.scaled_on_one_rank, "wrong_loss"),
    (Loss.mean_over_ranks, "mean_not_sum 1/4"),
    (Loss.mean_of_sequences, "wrong_loss"),
    (variant(total=by_funcol, target=by_funcol), "summed_in_backward"),
    (variant(total=by_funcol), "summed_in_backward"),
    (variant(target=by_funcol), "summed_in_backward"),
    (WithoutMinusOne.apply, "target_missing"),
    (MinusOneEverywhere.apply, "targets_of_others"),
    (UpstreamIgnored.apply, "upstream_ignored"),
    (OfTheSum.apply, "sum_not_mean"),
    (IgnoredHaveGradients.apply, "ignored_counted"),
    (AllReducedInBackward.apply, "summed_in_backward"),
]


# right ones written differently


def by_all_gather(logits, targets, group):
    """Each rank's log of the sum of exponentials is gathered: t + 1 numbers for each token."""
    _, local, elsewhere, counted = pieces(logits, targets, group)
    own = logits.float().logsumexp(-1)
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, own.detach(), group=group)
    parts[dist.get_rank(group)] = own
    mine = logits.float().gather(-1, local[..., None])[..., 0].masked_fill(elsewhere, 0)
    each = torch.stack(parts).logsumexp(0) - summed(mine, group)
    return torch.where(counted, each, 0).sum() / counted.sum()


def by_one_hot(logits, targets, group):
    """A plain all-reduce on what autograd has not saved: torch warns, and the result is right."""
    shifted, local, elsewhere, counted = pieces(logits, targets, group)
    one_hot = F.one_hot(local, logits.shape[-1]) * ~elsewhere[..., None]
    total, target = shifted.exp().sum(-1), (shifted * one_hot).sum(-1)
    dist.all_reduce(total, group=group)
    dist.all_reduce(target, group=group)
    return ((total.log() - target) * counted).sum() / counted.sum()


RIGHT_LOSSES = [right.vocabulary_parallel_cross_entropy, by_all_gather, by_one_hot, ByHand.apply]


def judge_losses(answers):
    """The loss alone: no Llama is trained where the loss is wrong."""
    def untouched(model, group):
        raise NotImplementedError("Exercise 7.5")

    return judge_in_one_launch(lab.check_vocabulary_parallel,
                               [(each, untouched) for each in answers], 4)


def test_losses():
    """Wrong ones are rejected, right ones accepted, in one launch."""
    verdicts = judge_losses([*(answer for answer, _ in WRONG_LOSSES), *RIGHT_LOSSES])
    assert_all_rejected(WRONG_LOSSES, verdicts[:len(WRONG_LOSSES)])
    for verdict in verdicts[len(WRONG_LOSSES):]:
        assert verdict.passed is None and "is waiting for your code" in str(verdict), verdict
