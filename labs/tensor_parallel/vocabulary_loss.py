"""Exercise 7.5: cross-entropy of logits of which each rank has its part of the vocabulary."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn import functional as F

from labs.checks.inputs import UnchangedInputs
from labs.checks.on_ranks import raise_on_all_ranks
from labs.checks.tolerances import BFLOAT16, LOSS, SUMS
from labs.checks.verdicts import Wrong, kind_of
from labs.meters.traffic import Traffic, numbers_sent
from labs.tensor_parallel.groups import groups_to_try, named_rank
from labs.words import format_distinct
from labs.workers import devices

IGNORED = -100
FACTOR = 0.5  # of the loss, before backward: as with gradient accumulation
MOST_PER_TOKEN = 8  # numbers that may be sent for each token; three are needed


@dataclass(frozen=True)
class Case:
    """shape: of the tokens. size: what normal numbers are multiplied by to be logits. owner: the
    rank that has the rows of all targets; None: any rank."""

    called: str
    shape: tuple[int, ...] = (2, 9)
    vocabulary: int = 48
    size: float = 3.0
    dtype: torch.dtype = torch.float32
    owner: int | None = None
    ignored: int = 5

    @property
    def tolerance(self) -> float:
        """Relative: what the order of sums and the gradient's own dtype may change."""
        return SUMS if self.dtype == torch.float32 else BFLOAT16


# The first has all that is usual; each of the others has one thing in which answers go wrong.
CASES = (Case("logits of shape (2, 9, v/t)"),
         Case("no token ignored", ignored=0),
         Case("a vocabulary of 240", vocabulary=240, shape=(7,)),  # row -100 is one of the rows
         Case("logits of ±10,000", size=1e4),
         Case("all targets on the last rank", owner=-1, shape=(3, 4)),
         Case("logits in bfloat16", dtype=torch.bfloat16, vocabulary=960, shape=(1, 40)))


class _Run:
    """One call of the student's function on a rank's part of the logits, and F.cross_entropy of
    all of them."""

    def __init__(self, case: Case, group, number: int):
        self.case, self.ranks, self.own = case, dist.get_world_size(group), dist.get_rank(group)
        self.group = group
        generator = torch.Generator().manual_seed(31 * number + len(case.called))
        whole = case.size * torch.randn(*case.shape, case.vocabulary, generator=generator)
        targets = torch.randint(case.vocabulary, case.shape, generator=generator)
        rows = case.vocabulary // self.ranks
        if case.owner is not None:
            # owner -1 is the last rank: Python's % of a negative number is not negative.
            targets = targets % rows + case.owner % self.ranks * rows
        places = torch.randperm(targets.numel(), generator=generator)[:case.ignored]
        targets.view(-1)[places] = IGNORED
        self.targets = targets.to(devices.device())
        self.whole = whole.to(devices.device(), case.dtype)
        self.local = self.part(self.whole).clone().requires_grad_()  # (*tokens, v/t)
        # The reference computes in fp32 from the rounded logits: both see the same numbers.
        exact = self.whole.float().requires_grad_()
        self.want = F.cross_entropy(exact.flatten(0, -2), self.targets.flatten())
        (FACTOR * self.want).backward()
        self.gradient = exact.grad

    def part(self, whole):
        """This rank's part of something with the full vocabulary."""
        return whole.chunk(self.ranks, -1)[self.own]

    def forward(self, function):
        self.kept = UnchangedInputs("your function", logits=self.local.detach(),
                                    targets=self.targets)
        with Traffic() as traffic:
            self.loss = function(self.local, self.targets, self.group)
        self.sent_forward = traffic.calls

    def backward(self):
        with Traffic() as traffic:
            (FACTOR * self.loss).backward()
        self.sent_backward = traffic.calls


def try_loss(function: Callable) -> None:
    """On a rank: raises Wrong unless function(logits, targets, group) is the cross-entropy of the
    logits of all ranks of a group, with its gradient, and sends O(b·s) numbers."""
    for called, group in groups_to_try():
        number = dist.get_process_group_ranks(group)[0]  # other groups get other logits
        for case in CASES:
            where = f"{called}, {case.called}: {named_rank(group)}"
            run = _Run(case, group, number)
            run.forward(function)
            raise_on_all_ranks(_judge_loss, run, where)
            raise_on_all_ranks(_judge_collectives, run.sent_forward, run, where)
            run.backward()
            raise_on_all_ranks(_judge_gradient, run, where)


def _judge_loss(run, who):
    loss, want = run.loss, run.want.item()
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise Wrong(f"{who}: your function returned {kind_of(loss)}, not one number in a tensor",
                    "The mean over the tokens that count.", code="wrong_type")
    run.kept.judge()
    # A mean of thousands of losses in bf16 has two digits.
    if loss.dtype != torch.float32:
        raise Wrong(f"{who}: the loss is {str(loss.dtype).removeprefix('torch.')}, not float32",
                    "Compute in fp32: logits.float() before the first sum.", code="wrong_dtype")
    if not loss.requires_grad:
        raise Wrong(f"{who}: the loss has no gradient",
                    "Detach the maximum only: it is a constant that cancels.",
                    code="no_gradient_function")
    # The invariant: the loss is that of all ranks' logits, and the same on every rank.
    got = loss.item()
    if abs(got - want) <= LOSS * max(1.0, abs(want)):
        return
    if not math.isfinite(got):
        raise Wrong(f"{who}: the loss is {got}, the reference's is {want:.5g}",
                    "exp of a large number is infinite: subtract the largest logit of all ranks "
                    "first. And a token whose target is -100 must not be looked up.",
                    code="not_finite")
    is_, should_be = format_distinct(got, want, digits=5)
    code, cause, hint = next(
        ((code, f": {said}", hint) for code, value, said, hint in _causes(run)
         if abs(got - value) <= LOSS * max(1.0, abs(value))),
        ("wrong_loss", "", "log Σ exp over all ranks' logits, minus the target's logit, which one "
                           "rank has; the mean over the targets that are not -100."))
    raise Wrong(f"{who}: the loss is {is_}, the reference's is {should_be}{cause}", hint,
                code=code)


def _causes(run):
    """(code, the loss that a mistake leads to, what it is, a hint)."""
    logits, targets = run.whole.float().flatten(0, -2), run.targets.flatten()
    counted, rows = targets != IGNORED, run.case.vocabulary // run.ranks
    largest = logits.amax(-1, keepdim=True)  # (n, 1), where n is the number of tokens
    target = logits.gather(-1, targets.clamp(min=0)[:, None])[:, 0] * counted  # (n,)
    each = logits.logsumexp(-1) - target  # (n,): a token's loss

    def mean(losses, count=0):
        return (losses * counted).sum().item() / (count or max(int(counted.sum()), 1))

    yield ("ignored_counted", mean(each, targets.numel()), "the mean over all tokens, those with "
           "target -100 too", "Divide by the number of targets that are not -100.")
    for shift in (largest[:, 0], 0 * largest[:, 0]):  # most subtract the maximum from all logits
        yield ("ignored_counted", (each - shift * ~counted).mean().item(), "tokens whose target is "
               "-100 are counted, with a target logit of zero",
               "They count neither in the sum nor in the number.")
    yield ("sum_not_mean", mean(each, 1), "the sum, not the mean",
           "Divide by the number of tokens that count.")
    yield ("shift_not_undone", mean(each - largest[:, 0]), "the maximum is subtracted, and not "
           "from the target's logit",
           "Subtract it from all logits, the target's too: then it cancels.")
    yield ("wrong_scale", run.ranks * mean(each), f"{run.ranks} times as large",
           "Sum each thing once.")
    yield ("mean_not_sum", mean(each) / run.ranks, f"1/{run.ranks} of it",
           "Nothing is averaged over the ranks.")
    for shifted in (logits - largest, logits):
        yield from _causes_of_one_rank(run, shifted, targets, mean)
    parts = logits.split(rows, -1)
    maxima = torch.stack([part.amax(-1) for part in parts])  # (t, n)
    total = sum(part.sub(own[:, None]).exp().sum(-1)
                for part, own in zip(parts, maxima, strict=True)).log()
    of_owner = maxima.gather(0, (targets // rows).clamp(min=0)[None])[0]
    for subtracted in (of_owner, maxima[run.own], 0):
        yield ("maximum_of_one_rank", mean(total - target + subtracted), "each rank subtracts the "
               "largest of its own logits",
               "One maximum for all: all-reduce it with ReduceOp.MAX.")


def _causes_of_one_rank(run, logits, targets, mean):
    """What is not summed over the ranks, or summed with what does not belong there."""
    rows = run.case.vocabulary // run.ranks
    parts = logits.split(rows, -1)
    every, own = logits.logsumexp(-1), parts[run.own].logsumexp(-1)
    target = logits.gather(-1, targets.clamp(min=0)[:, None])[:, 0]
    here = targets // rows == run.own
    yield ("exponentials_of_one_rank", mean(own - target), "the sum of exponentials is that of "
           "this rank alone", "All-reduce the sum of exp over the group.")
    yield ("target_of_one_rank", mean(every - target * here), "the target's logit is zero where "
           "another rank has it",
           "All-reduce the target's logit: zero on all ranks but the one that has its row.")
    yield ("nothing_reduced", mean(own - target * here), "the loss over this rank's part of the "
           "vocabulary alone",
           "The sum of exp and the target's logit are of all ranks: all-reduce both.")
    # Cross-entropy as ever, on what this rank has: targets are made to fit, -100 too.
    alone = own - parts[run.own].gather(-1, (targets % rows)[:, None])[:, 0]
    for loss in (mean(alone), alone.mean().item()):
        yield ("nothing_reduced", loss, "the loss over this rank's part of the vocabulary, with "
               "targets modulo its size", "A target is a row of one rank alone, and the sum of exp "
               "is of all ranks: all-reduce both.")
    local = [targets - rows * rank for rank in range(run.ranks)]  # row as each rank counts
    for places in ([at.clamp(0, rows - 1) for at in local],
                   [at * ((at >= 0) & (at < rows)) for at in local], [at % rows for at in local]):
        found = sum(part.gather(-1, at[:, None])[:, 0]
                    for part, at in zip(parts, places, strict=True))
        yield ("targets_of_others", mean(every - found), "logits that ranks looked up for targets "
               "of others are in the sum",
               "Put zeros where the target's row is on another rank, before the sum.")


def _judge_collectives(calls, run, who):
    # The invariant: communication grows with b·s, not with b·s·v. Catches an all-gather of the
    # logits, which has the right loss and saves no memory.
    tokens = run.targets.numel()
    sent = numbers_sent(calls)
    if sent > MOST_PER_TOKEN * tokens:
        largest = max(calls, key=lambda call: call.elements)
        raise Wrong(f"{who}: forward sends {sent:,.0f} numbers for {tokens} tokens, "
                    f"{sent / tokens:g} for each, most of them in {largest.kind}: that grows with "
                    "the vocabulary",
                    "No rank needs the logits of another one: reduce the maximum, the sum of "
                    "exponentials and the target's logit, three numbers for each token.",
                    code="wrong_traffic")


def _judge_gradient(run, who):
    got = run.local.grad
    if got is None:
        raise Wrong(f"{who}: the logits get no gradient", "Detach the maximum only.",
                    code="gradient_missing")
    # The invariant: rank r's gradient is its part of FACTOR · (softmax - one-hot of the target) /
    # number of tokens that count.
    want, got = run.part(run.gradient), got.float()
    # Relative to the largest element: most elements of a softmax are near zero.
    scale = max(want.abs().max().item(), 1e-3)
    if not got.isfinite().all():
        raise Wrong(f"{who}: a gradient of the logits is not finite", "Detach the maximum, which "
                    "all ranks subtract. Then the largest exponential is 1, and no sum of them is "
                    "0.", code="not_finite")

    def near(value):
        return bool(((got - value).abs() <= run.case.tolerance * scale).all())

    if near(want):
        # The loss is the same on all ranks, so its gradient is there already.
        if run.sent_backward:
            call = run.sent_backward[0]
            raise Wrong(f"{who}: backward sends {call.elements:,} elements in {call.kind}",
                        "A rank's gradient needs its own logits and the sums of forward only.",
                        code="extra_collective")
        return
    code, cause, hint = next(
        ((code, f": {said}", hint) for code, value, said, hint in _gradient_causes(run, want)
         if near(value)),
        ("wrong_gradient", "", "softmax of this rank's logits, minus 1 at the target on the rank "
                               "that has it, divided by the number of tokens that count; zero for "
                               "-100."))
    raise Wrong(f"{who}: the gradient of the logits is not the reference's{cause}", hint,
                code=code)


def _gradient_causes(run, want):
    """(code, the gradient that a mistake leads to, what it is, a hint)."""
    targets, rows = run.targets, run.case.vocabulary // run.ranks
    counted = targets != IGNORED
    share = FACTOR / max(int(counted.sum()), 1)
    softmax = run.part(run.whole.float().softmax(-1)) * share  # (*tokens, v/t)
    here = (targets // rows == run.own) & counted
    is_target = F.one_hot(targets.clamp(min=0) % rows, rows) * share
    minus_one = is_target * here[..., None]
    at_row_0 = F.one_hot((targets.clamp(min=0) % rows) * here, rows) * share
    yield ("target_missing", softmax * counted[..., None], "the target's -1 is missing",
           "Where this rank has the target's row, the gradient is softmax - 1.")
    for elsewhere in (is_target, at_row_0):
        yield ("targets_of_others", (softmax - elsewhere) * counted[..., None],
               "every rank subtracts 1 for the target",
               "Only the rank that has the target's row subtracts 1.")
    for value, what in ((run.ranks * want, "it"),
                        (run.ranks * softmax * counted[..., None] - minus_one, "its softmax"),
                        (softmax * counted[..., None] - run.ranks * minus_one, "the target's -1")):
        yield ("summed_in_backward", value, f"{what} is {run.ranks} times too large",
               "All ranks have the same loss. torch.distributed.nn and functional collectives sum "
               "gradients in backward; ReduceFromRegion passes them on as they are.")
    yield ("summed_in_backward", sum(run.gradient.chunk(run.ranks, -1)), "it is the sum of all "
           "ranks' parts", "A rank's logits have their own gradient: all-reduce nothing.")
    yield ("upstream_ignored", want / FACTOR, "it does not depend on what comes after the loss",
           "Multiply by the gradient that backward is given.")
    yield ("sum_not_mean", want * int(counted.sum()), "it is that of the sum, not of the mean",
           "Divide by the number of tokens that count.")
    yield ("ignored_counted", softmax - minus_one, "tokens whose target is -100 have one",
           "Their rows are zero.")
    at_largest = F.one_hot(run.local.detach().argmax(-1), rows)
    yield ("maximum_not_detached", want - at_largest * want.sum(-1, keepdim=True),
           "the maximum has a gradient, too", "Detach it: a constant that cancels.")
    yield ("target_of_one_rank", softmax * here[..., None] - minus_one, "the log of the sum of "
           "exponentials has one only on the rank that has the target", "Sum the target's logit "
           "over the ranks alone, and subtract it from the log of the sum afterwards.")
    yield ("exponentials_detached", -minus_one, "the sum of exponentials has none",
           "Only the maximum is detached: softmax is the gradient of the log of the sum.")
    own = run.part(run.whole.float()).softmax(-1) * share
    yield ("exponentials_of_one_rank", (own - minus_one) * counted[..., None],
           "it is the softmax over this rank's part of the vocabulary alone",
           "Divide by the sum of all ranks.")
