"""Exercise 3.6: clipping by the norm of a gradient that no rank has whole."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from labs.exercises.numbers import as_number, judge_number
from labs.exercises.on_ranks import on_ranks, raise_on_all_ranks, torchs_own_refused
from labs.exercises.verdicts import Wrong, check, kind_of
from labs.meters.traffic import Traffic
from labs.training.models import EdgeCaseModel
from labs.zero_stages.flat_parameter import flatten_layers

LIMITS = (0.5, 1e6, 3.0)  # the norm is clipped, left alone, and clipped again
_MOST_ELEMENTS = 8  # that may be sent: the norm is one number
_TOLERANCE = 1e-4  # of a norm, relative: torch adds 1e-6 to the divisor


@check("3.6")
def check_clip_grad_norm(clip_grad_norm: Callable):
    """clip_grad_norm(optimizer, max_norm): the norm over all ranks, and gradients scaled so that it
    is at most max_norm."""
    def work():
        for limit in LIMITS:
            optimizer, norm_of_all, gradients = _gradients()
            with torchs_own_refused(), Traffic() as traffic:
                norm = clip_grad_norm(optimizer, limit)
            raise_on_all_ranks(_reject, norm, gradients, norm_of_all, limit, traffic)

    on_ranks(work)
    return "the norm is that of the whole gradient on every rank, and one number travels"


def _gradients() -> tuple[torch.optim.Optimizer, float, list]:
    """(an optimizer over shards, the norm over all ranks, [(shard, its gradient before)]). The last
    unit has no gradient, as after a step that did not use it."""
    torch.manual_seed(7)
    units = flatten_layers(EdgeCaseModel(seed=0))
    gradients, squares = [], 0.0
    for unit in units[:-1]:
        full = torch.randn_like(unit.full)
        full[unit.elements:] = 0  # padding
        squares += full.square().sum().item()
        unit.shard.grad = full.view(dist.get_world_size(), -1)[dist.get_rank()].clone()
        gradients.append((unit.shard, unit.shard.grad.clone()))
    optimizer = torch.optim.AdamW([unit.shard for unit in units], lr=1e-3)
    return optimizer, squares**0.5, gradients


def _reject(norm, gradients, want, limit, traffic):
    rank, sent = dist.get_rank(), sum(call.elements for call in traffic.calls)
    # A norm takes one number; gathering gradients would undo ZeRO-2.
    if sent > _MOST_ELEMENTS:
        raise Wrong(f"rank {rank} communicates {sent:,} elements to find one number",
                    "Squares add up: all-reduce the sum of the squares, not the gradients.")
    if as_number(norm) is None:
        raise Wrong(f"clip_grad_norm returned {kind_of(norm)}, not the norm",
                    "As torch.nn.utils.clip_grad_norm_, return the norm from before the clipping.")
    # The norm is the same on all ranks: with its own, each would scale by another factor.
    own = sum(before.square().sum().item() for _, before in gradients) ** 0.5
    causes = [(own, "the norm of this rank's shards alone", "The others have the rest."),
              (want * want, "its square", "Take the root after the sum.")]
    judge_number(norm, want, causes, f"rank {rank}, the norm", rel_tol=_TOLERANCE,
                 hint="Norms do not add up, their squares do: sum the squares over the shards and "
                      "over the ranks, then take the root.",
                 source="that of the whole gradient is")
    # All gradients shrink by one factor, and only if the norm is above the limit.
    factor = min(1.0, limit / want)
    for shard, before in gradients:
        ratio = (shard.grad * before).sum().item() / before.square().sum().item()
        if not abs(ratio - factor) <= _TOLERANCE:  # also where it is not a number
            raise Wrong(f"rank {rank}, max_norm {limit:g}: the gradients are {ratio:.4f}x what "
                        f"they were, instead of {factor:.4f}x", _scale_hint(ratio, factor))


def _scale_hint(ratio, factor) -> str:
    if factor == 1.0:
        return "A norm below max_norm is left alone: scale by at most 1."
    if abs(ratio - 1) < _TOLERANCE:
        return "Scale the gradients in place: gradient.mul_(...)."
    return "Scale every shard's gradient by max_norm / norm."
