"""Holds gradients to the reference's, and names the mistake behind those that differ."""

from collections import Counter
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from labs.checks.on_ranks import close, gradients, largest_difference
from labs.checks.reference import Reference, Tensors
from labs.checks.verdicts import Wrong
from labs.checks.waits import WaitTraffic, require_waits
from labs.meters.traffic import CollectiveCall
from labs.predictions.communication.traffic import passes
from labs.training.models import EdgeCaseModel, trainable
from labs.words import listed

UNEXPLAINED = "wrong_gradient"  # the code of a gradient that no mistake explains
# A code, what a gradient is instead of the mean over the ranks, a hint, and the value that shows
# it: a function of the mean, of the gradients that each rank's share alone gives, and of this rank.
MISTAKES = (
    ("sum_not_mean", "is the SUM over ranks, {ranks}.0x the reference's",
     "Divide by the world size.", lambda mean, alone, rank: mean * len(alone)),
    ("gradient_of_one_rank", "is still this rank's own: it was not averaged",
     "Is every gradient communicated, in every step, and put back where it came from?",
     lambda mean, alone, rank: alone[rank]),
    ("not_summed", "is this rank's own divided by {ranks}: nothing was summed",
     "Sum over the ranks before you divide.", lambda mean, alone, rank: alone[rank] / len(alone)),
    ("mean_twice", "is the mean divided by {ranks} once more", "Divide once.",
     lambda mean, alone, rank: mean / len(alone)),
    ("mean_over_users", "is the mean over the ranks that used the parameter only",
     "A rank that did not use it counts too, with zeros: divide by the world size.",
     lambda mean, alone, rank: mean * len(alone) / max(1, sum(one.any().item() for one in alone))),
)
_LATE = ("never_waited",
         "is read before it has arrived: nothing waits for the asynchronous all-reduce",
         "work = dist.all_reduce(tensor, async_op=True) returns at once; the tensor holds the sum "
         "after work.wait().")


def name_mistake(got: torch.Tensor, mean: torch.Tensor, alone: Sequence[torch.Tensor],
                 never_waited: Sequence[CollectiveCall] = ()) -> tuple[str, str, str]:
    """(code, sentence, hint) on a gradient that is not the mean over the ranks. alone: by rank, the
    gradient of its share alone. never_waited: as of `WaitTraffic`."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    # First: what was read before it arrived may be equal to any of the mistakes below.
    if never_waited:
        return _LATE
    for code, sentence, hint, gives in MISTAKES:
        if close(got, gives(mean, alone, rank)):
            return code, sentence.format(ranks=ranks), hint
    for other, gradient in enumerate(alone):
        if close(got, gradient) and gradient.any():
            return ("gradient_of_another_rank", f"is rank {other}'s own",
                    "Every rank's gradient counts: sum over the ranks.")
    if not got.any():
        return "zero_gradient", "is zero", "Where did the gradient go?"
    if not got.isfinite().all():
        return "not_finite", "is not finite", "Was memory read before it was written?"
    # The right direction with a wrong length: a wrong divisor.
    ratio = (got.norm() / mean.norm()).item()
    if got.numel() > 1 and close(got, mean * ratio):  # one number is a multiple of any other
        divisor = ranks / ratio
        named = (f"is the sum divided by {divisor:.0f}" if abs(divisor - round(divisor)) < 1e-3
                 else f"is {ratio:.3g}x the reference's")
        return ("wrong_divisor", f"{named}, on {ranks} ranks",
                "Divide the sum by the world size, once.")
    return (UNEXPLAINED, f"differs from the reference's by {largest_difference(got, mean):.2g}",
            "It is neither the mean, nor the sum, nor this rank's own.")


def sgd(model) -> torch.optim.SGD:
    """The optimizer of a module and of its reference; momentum carries a mistake to later steps."""
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def reference_model(make: Callable[..., nn.Module] = EdgeCaseModel,
                    unused: str = "skip") -> Reference:
    """The reference of a model with edge cases. unused: as of `Reference`; "skip" leaves alone a
    parameter that no rank used, as torch's optimizers do."""
    return Reference(make(seed=0), sgd, unused=unused)


def mean_and_alone(reference: Reference) -> tuple[Tensors, list[Tensors]]:
    """The gradients of the reference's last step by name: averaged, and of each rank's share."""
    return (reference.by_name(reference.mean),
            [reference.by_name(gradients) for gradients in reference.alone])


def floats_of(model: nn.Module) -> Tensors:
    """name -> parameter or persistent buffer that holds floating-point numbers."""
    return {name: t for name, t in model.state_dict().items() if t.is_floating_point()}


def gradient_bytes(model: nn.Module) -> int:
    """The bytes of a model's gradients, each in its own dtype."""
    return sum(p.numel() * p.element_size() for _, p in trainable(model))


def judge_gradients(model: nn.Module, mean: Tensors, alone: Sequence[Tensors], when: str = "",
                    traffic: WaitTraffic | None = None, got: Tensors | None = None) -> float:
    """Returns the largest difference from the averaged gradients. Raises Wrong with the mistake.

    alone: by rank, the gradients of its share alone. got: the gradients where they were read
    earlier; None reads them now. traffic: what was recorded while they were averaged.
    """
    for name, parameter in trainable(model):
        # a piece of a flat bucket that was not given its shape back
        if parameter.grad is not None and parameter.grad.shape != parameter.shape:
            raise Wrong(f"{_who(when, name)}: gradient has shape {tuple(parameter.grad.shape)}, "
                        f"the parameter {tuple(parameter.shape)}",
                        "Give each piece of the bucket its parameter's shape back.",
                        code="wrong_shape")
    untouched = {name for name, p in trainable(model) if p.grad is None} if got is None else ()
    got = gradients(model) if got is None else got
    for name in mean:
        # the reference saw all examples of the batch, this rank only its share: only the mean over
        # the ranks makes the two equal
        if not close(got[name], mean[name]):
            if name in untouched:
                raise Wrong(f"{_who(when, name)}: gradient is still None, on other ranks it is not",
                            "A rank that did not use a parameter gets the mean, too.",
                            code="gradient_missing")
            code, sentence, hint = name_mistake(
                got[name], mean[name], [one[name] for one in alone],
                traffic.never_waited if traffic else ())
            raise Wrong(f"{_who(when, name)}: gradient {sentence}", hint, code=code)
    if traffic:
        require_waits(traffic.never_waited)
    for name, parameter in model.named_parameters():
        # an optimizer would update a frozen parameter that has a gradient, even one of zeros
        if not parameter.requires_grad and parameter.grad is not None:
            raise Wrong(f"{_who(when, name)} is frozen, and now has a gradient",
                        "Leave parameters with requires_grad=False alone.", code="frozen_parameter")
    return max(largest_difference(got[name], mean[name]) for name in mean)


def _who(when, name):
    return f"rank {dist.get_rank()}, {when}parameter {name!r}"


def judge_bytes(calls: Sequence[CollectiveCall], model) -> None:
    """Raises Wrong where a rank's collectives carried more or less than its gradients once. A
    reduce-scatter and an all-gather are counted as the halves of an all-reduce that they are."""
    want, by_kind = gradient_bytes(model), Counter()
    for call in calls:
        by_kind[call.kind] += call.bytes
    # `passes` counts an all-reduce as two, a reduce-scatter and an all-gather as one; half of the
    # sum is in all-reduces.
    sent = sum(passes(kind) * nbytes for kind, nbytes in by_kind.items()) / 2
    number = Counter(call.kind for call in calls)
    carried = listed([f"{by_kind[kind]:,} bytes in {number[kind]} {kind}" for kind in by_kind])
    who = f"rank {dist.get_rank()} communicated {carried or 'nothing'}"
    # right numbers at twice the traffic: all gradients gathered, or each averaged twice
    if sent > want + _padding(calls, model):
        much = f", {sent / want:.1f}x" if sent >= 1.1 * want else "; that is more than"
        raise Wrong(f"{who}{much} one all-reduce of its {len(trainable(model))} gradients, which "
                    f"have {want:,} bytes", "One all-reduce of each gradient is enough.",
                    code="too_much_sent")
    if sent < want:
        raise Wrong(f"{who}; its gradients have {want:,} bytes",
                    "Send every trainable parameter's gradient.", code="too_little_sent")


def _padding(calls, model) -> int:
    """Bytes of zeros with which a gradient is padded to a multiple of the number of ranks, where it
    is sharded."""
    if not any(call.kind in ("reduce_scatter", "all_to_all") for call in calls):
        return 0
    return sum(p.element_size() for _, p in trainable(model)) * dist.get_world_size()
