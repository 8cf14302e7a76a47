"""Check of exercise 3.6: clipping by the norm of a gradient that no rank has whole."""

import torch
import torch.distributed as dist

from labs.exercises.on_ranks import on_ranks, raise_on_all_ranks, torchs_own_refused
from labs.exercises.verdicts import Wrong, check, kind_of
from labs.meters.traffic import Traffic
from labs.training.models import EdgeCaseModel
from labs.zero_stages.sharded import layers

LIMITS = (0.5, 1e6, 3.0)  # the norm is clipped, left alone, and clipped again
_FEW = 8  # elements that may travel: the norm is one number
_CLOSE = 1e-4  # of a norm, relative: some add a small number to the divisor


@check("3.6")
def check_clip_grad_norm(clip_grad_norm):
    """clip_grad_norm(optimizer, max_norm): the norm over all ranks, and gradients scaled so that it
    is at most max_norm."""
    def work():
        for limit in LIMITS:
            optimizer, whole, gradients = _gradients()
            with torchs_own_refused(), Traffic() as traffic:
                norm = clip_grad_norm(optimizer, limit)
            raise_on_all_ranks(_judge, norm, gradients, whole, limit, traffic)

    on_ranks(work)
    return "the norm is that of the whole gradient on every rank, and one number travels"


def _gradients() -> tuple:
    """(an optimizer over shards, the whole gradient, [(shard, its gradient before)]). The last unit
    has no gradient, as after a step that did not use it."""
    torch.manual_seed(7)
    units = layers(EdgeCaseModel(seed=0))
    found, squares = [], 0.0
    for unit in units[:-1]:
        whole = torch.randn_like(unit.whole)
        whole[unit.elements:] = 0
        squares += whole.square().sum().item()
        unit.shard.grad = whole.view(dist.get_world_size(), -1)[dist.get_rank()].clone()
        found.append((unit.shard, unit.shard.grad.clone()))
    optimizer = torch.optim.AdamW([unit.shard for unit in units], lr=1e-3)
    return optimizer, squares**0.5, found


def _judge(norm, gradients, whole, limit, traffic):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    moved = sum(call.elements for call in traffic.calls)
    if moved > _FEW:
        raise Wrong(f"rank {rank} communicates {moved:,} elements to find one number",
                    "Squares add up: all-reduce the sum of the squares, not the gradients.")
    number = _number(norm)
    own = sum(before.square().sum().item() for _, before in gradients) ** 0.5
    if number is None:
        raise Wrong(f"clip_grad_norm returned {kind_of(norm)}, not the norm",
                    "As torch.nn.utils.clip_grad_norm_, return the norm from before the clipping.")
    if abs(number - whole) > _CLOSE * whole:
        raise Wrong(f"rank {rank}: the norm is {number:.4f}, that of the whole gradient is "
                    f"{whole:.4f}", _about(number, own, whole, ranks))
    want = min(1.0, limit / whole)
    for shard, before in gradients:
        ratio = (shard.grad * before).sum().item() / before.square().sum().item()
        if abs(ratio - want) > _CLOSE:
            raise Wrong(f"rank {rank}, max_norm {limit:g}: the gradients are {ratio:.4f}x what "
                        f"they were, instead of {want:.4f}x", _scaled(ratio, want, limit, whole))


def _about(number, own, whole, ranks) -> str:
    if abs(number - own) < _CLOSE * own:
        return "That is the norm of this rank's shards alone. The others have the rest."
    if abs(number - whole * whole) < _CLOSE * whole * whole:
        return "That is its square: take the root after the sum."
    return ("Norms do not add up, their squares do: sum the squares over the shards and over the "
            "ranks, then take the root.")


def _scaled(ratio, want, limit, whole) -> str:
    if want == 1.0:
        return "A norm below max_norm is left alone: scale by at most 1."
    if abs(ratio - 1) < _CLOSE:
        return "Scale the gradients in place: gradient.mul_(...)."
    return "Scale every shard's gradient by max_norm / norm."


def _number(norm):
    try:
        return float(norm)
    except (TypeError, ValueError):
        return None
