"""Exercise 3.6: clipping by the global norm of sharded gradients."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from labs.checks.numbers import Cause, as_number, judge_number
from labs.checks.on_ranks import on_ranks, raise_on_all_ranks, torchs_own_refused
from labs.checks.tolerances import NORM
from labs.checks.verdicts import Wrong, check, kind_of
from labs.checks.waits import WaitTraffic, require_waits
from labs.meters.traffic import numbers_sent
from labs.training.models import EdgeCaseModel
from labs.zero_stages.flat_parameter import flatten_layers
from labs.zero_stages.scaffold import ShardedOptimizer
from labs.zero_stages.stages import WORLD_SIZES

LIMITS = (0.5, 1e6, 3.0)  # the norm is clipped, left alone, and clipped again
# That may be sent: the norm is one number; all ranks' squares, gathered, are one of each.
_MOST_NUMBERS = 16


@check("3.6")
def check_clip_grad_norm(clip_grad_norm: Callable):
    """clip_grad_norm(optimizer, max_norm): the norm over all ranks, and gradients of all groups
    scaled in place so that it is at most max_norm."""
    def work():
        for limit in LIMITS:
            optimizer, case = _gradients()
            with torchs_own_refused(), WaitTraffic() as traffic:
                # Three limits on fresh gradients: a norm below the limit must leave them as they
                # are.
                norm = clip_grad_norm(optimizer, limit)
                as_number(norm)  # reading a functional collective's result counts as its wait
            raise_on_all_ranks(_judge, norm, case, limit, traffic)
        # Catches a norm of shards that have no gradient yet: under ZeRO-1 they come with the step.
        optimizer, case = _gradients(late=True)
        norm = clip_grad_norm(optimizer, LIMITS[0])
        raise_on_all_ranks(_judge_unreduced, norm, case)

    on_ranks(work, world_sizes=WORLD_SIZES)
    return "every rank has the global norm, and one number is communicated"


@dataclass(frozen=True)
class _Case:
    """norm: of the gradients of all ranks. shards: (shard, its gradient before, the gradient's
    tensor); the first group's come first, there are `first` of them."""

    norm: float
    shards: list[tuple[torch.nn.Parameter, torch.Tensor, torch.Tensor]]
    first: int


class _ReducesLate(ShardedOptimizer):
    """Gives the shards their gradients in `reduce`, as ZeRO-1 does."""

    def __init__(self, inner, flats):
        super().__init__(inner, flats)
        self.late = [flat.shard.grad for flat in flats]
        for flat in flats:
            flat.shard.grad = None

    def reduce(self):
        for flat, gradient in zip(self.flats, self.late, strict=True):
            flat.shard.grad = gradient


def _gradients(late=False) -> tuple[torch.optim.Optimizer, _Case]:
    """An optimizer with two groups of shards, and what is known of their gradients. The last unit
    has no gradient, as after a step that did not use it. late: they come with `reduce`."""
    # One seed for all ranks: each knows the full gradients, and so their norm, without a
    # collective.
    torch.manual_seed(7)
    units = flatten_layers(EdgeCaseModel(seed=0))
    shards, squares = [], 0.0
    for unit in units[:-1]:
        full = torch.randn_like(unit.full)  # (N · shard_elements,)
        full[unit.elements:] = 0  # padding
        # Units share no element, so their squares add up to that of the whole gradient.
        squares += full.square().sum().item()
        unit.shard.grad = full.view(dist.get_world_size(), -1)[dist.get_rank()].clone()
        shards.append((unit.shard, unit.shard.grad.clone(), unit.shard.grad))
    first, second = [units[0].shard], [unit.shard for unit in units[1:]]
    inner = torch.optim.AdamW([{"params": first}, {"params": second, "lr": 1e-4}], lr=1e-3)
    optimizer = _ReducesLate(inner, units) if late else ShardedOptimizer(inner, units)
    return optimizer, _Case(squares**0.5, shards, len(first))


def _judge(norm, case, limit, traffic):
    rank, sent = dist.get_rank(), numbers_sent(traffic.calls)
    # A norm takes one number; gathering gradients would undo ZeRO-2.
    if sent > _MOST_NUMBERS:
        raise Wrong(f"rank {rank} communicates {sent:,.0f} numbers to find one number",
                    "Squares add up: all-reduce the sum of the squares, not the gradients.",
                    code="too_much_sent")
    if as_number(norm) is None:
        raise Wrong(f"clip_grad_norm returned {kind_of(norm)}, not the norm",
                    "As torch.nn.utils.clip_grad_norm_, return the norm from before the clipping.",
                    code="not_a_number")
    _judge_norm(norm, case, limit, rank)
    # All gradients shrink by one factor, and only if the norm is above the limit.
    factor = min(1.0, limit / case.norm)
    for number, (shard, before, tensor) in enumerate(case.shards):
        group = 1 + (number >= case.first)
        # By how much the gradient was scaled: its projection on the one from before.
        ratio = (shard.grad * before).sum().item() / before.square().sum().item()
        if not abs(ratio - factor) <= NORM:  # also where it is not a number
            code, hint = _scale_hint(ratio, factor)
            raise Wrong(f"rank {rank}, max_norm {limit:g}, group {group} of 2: the gradients are "
                        f"{ratio:.4f}x what they were, instead of {factor:.4f}x", hint, code=code)
        # One factor for all elements: a change at right angles to the gradient, as noise is, does
        # not show in the projection.
        off = (shard.grad - factor * before).abs().max().item()
        if not off <= NORM * before.abs().max().item():
            raise Wrong(f"rank {rank}, max_norm {limit:g}, group {group} of 2: an element of the "
                        f"gradients differs by {off:.2g} from {factor:.4f}x what it was",
                        "Clipping multiplies all elements by one factor and does nothing else.",
                        code="not_one_factor")
        # In place: a new tensor leaves the old one as it was for those that hold it.
        if shard.grad is not tensor:
            raise Wrong(f"rank {rank}: a gradient was replaced by another tensor, not scaled in "
                        "place", "gradient.mul_(factor) scales it in place.",
                        code="gradient_replaced")
    require_waits(traffic.never_waited)


def _judge_norm(norm, case, limit, rank):
    # The norm is the same on all ranks: with its own, each would scale by another factor.
    own = _norm(before for _, before, _ in case.shards)
    whole = case.norm
    causes = [Cause("norm_of_one_rank", own, "the norm of this rank's shards alone",
                    "The others have the rest."),
              Cause("norm_after_clipping", min(whole, limit), "the norm after the clipping",
                    "Return the one from before."),
              Cause("square_not_root", whole * whole, "its square", "Take the root after the sum.")]
    judge_number(norm, whole, causes, f"rank {rank}, the norm", rel_tol=NORM,
                 hint="Norms do not add up, their squares do: sum the squares over the shards of "
                      "all groups and over the ranks, then take the root.",
                 source="that of the full gradient is")


def _judge_unreduced(norm, case):
    # Under ZeRO-1 the shards have no gradients before `reduce`.
    if as_number(norm) is None or abs(as_number(norm) - case.norm) > NORM * case.norm:
        raise Wrong(f"rank {dist.get_rank()}: under ZeRO-1, where the gradients are not reduced "
                    f"before the step, the norm is {norm}, not {case.norm:.4f}",
                    "Begin with optimizer.reduce_once(): it reduces the gradients now, and not "
                    "again in the step.", code="norm_before_reduce")


def _norm(tensors) -> float:
    return sum(tensor.square().sum().item() for tensor in tensors)**0.5


def _scale_hint(ratio, factor) -> tuple[str, str]:
    """(code, hint) where the gradients were scaled by another factor."""
    if factor == 1.0:
        return "clipped_below_limit", "A norm below max_norm is left alone: scale by at most 1."
    if abs(ratio - 1) < NORM:
        return "not_scaled", "Scale the gradients of all groups in place: gradient.mul_(...)."
    return "wrong_scale", "Scale every shard's gradient by max_norm / norm."
