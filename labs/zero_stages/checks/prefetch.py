"""Exercise 3.5: the next layer's all-gather is in flight while this layer computes."""

from collections.abc import Callable

import torch.distributed as dist

from labs.exercises.on_ranks import on_ranks, raise_on_all_ranks, torchs_own_refused
from labs.exercises.verdicts import Wrong, check
from labs.meters.traffic import CollectiveCall, Mark, Traffic, hook_waits
from labs.training import data
from labs.training.loop import train
from labs.training.models import DeepMLP
from labs.zero_stages.checks.invariants import reject_broken_invariants
from labs.zero_stages.checks.reference import (
    SETTINGS,
    STEPS,
    build,
    difference_from_reference,
)
from labs.zero_stages.checks.stages import MEMORY_HINTS

_GATHERS = (4, 5, 6)  # c10d::OpType ALLGATHER, _ALLGATHER_BASE, ALLGATHER_COALESCED


@check("3.5", hints=MEMORY_HINTS)
def check_prefetch(strategy: Callable):
    """strategy(model, optimizer_class, **settings) -> (module, optimizer): ZeRO-3 in which the
    next layer's parameters are gathered while this layer computes."""
    def work():
        with torchs_own_refused():
            raise_on_all_ranks(reject_late_gathers, record_order(strategy))
            difference = difference_from_reference(strategy, 3)
            reject_broken_invariants(strategy, 3)
        return difference

    return (f"the next layer travels while this one computes, forward and backward, and the "
            f"numbers equal the reference over {STEPS} steps (to {max(on_ranks(work)):.0e})")


def record_order(strategy: Callable) -> list[CollectiveCall | Mark]:
    """On a rank: collectives of a forward and a backward of a DeepMLP, in order, with a mark each
    time a layer computes, each time a gather is waited for, and at the turn to backward."""
    model, traffic = DeepMLP(), Traffic()
    batches = data.xy_batches(2, 4, seed=dist.get_rank())
    module, optimizer = build(strategy, model, SETTINGS)
    train(module, optimizer, batches[:1])
    # Hooks run in the order of their registration: after the student's, the layer computes.
    hooks = [hook for layer in model.layers for hook in (
        layer.register_forward_pre_hook(lambda *_: traffic.mark("forward")),
        layer.weight.register_hook(lambda _: traffic.mark("backward")))]
    with traffic, _waits_marked(traffic):
        loss = module(**batches[1]).loss
        traffic.mark("turn")
        loss.backward()
    for hook in hooks:
        hook.remove()
    return traffic.events


def _waits_marked(traffic):
    """Inside, the first wait for each gather is marked."""
    seen = []  # the objects, not their ids: a freed one's id may be that of the next

    def mark(work):
        if work._get_op_type() in _GATHERS and not any(work is one for one in seen):
            seen.append(work)
            traffic.mark("waited")

    return hook_waits(before=mark)


def reject_late_gathers(events: list[CollectiveCall | Mark]) -> None:
    """Raises Wrong if a layer computes while the next one's gather has not begun, or has been
    waited for."""
    [turn] = _marks(events, "turn")
    for direction, part in (("forward", events[:turn]), ("backward", events[turn + 1:])):
        gathers = [n for n, event in enumerate(part)
                   if isinstance(event, CollectiveCall) and event.kind == "all_gather"]
        computes = _marks(part, direction)
        # ZeRO-3 gathers each layer for each direction; ZeRO-2 or a layer kept whole gathers less.
        if len(gathers) < len(computes):
            raise Wrong(f"in {direction}, {len(gathers)} gathers are called for {len(computes)} "
                        "layers", "Each layer's parameters are gathered for each direction.")
        _reject_not_begun(gathers, computes, direction)
        _reject_blocking([part[n] for n in gathers], direction)
        _reject_early_waits(_marks(part, "waited"), computes, direction)


def _marks(events, what) -> list[int]:
    return [n for n, event in enumerate(events) if isinstance(event, Mark) and event.what == what]


def _reject_not_begun(gathers, computes, direction):
    # The root is gathered first, then one gather for each layer in order: when layer k computes
    # (from 0), the root's, k + 1 layers' and the next one's have begun.
    for number, moment in enumerate(computes[:-1]):
        if sum(gather < moment for gather in gathers) < number + 3:
            raise Wrong(f"in {direction}, when layer number {number + 1} of {len(computes)} "
                        f"computes, the gather of number {number + 2} has not been begun",
                        "Begin the gather of self.next_unit(unit) before you wait for this unit's "
                        "own.")


def _reject_blocking(gathers, direction):
    # A synchronous gather has ended before the layer computes, whatever its order. The root's and
    # the first layer's may be: no layer computes before them.
    if not all(call.asynchronous for call in gathers[2:]):
        raise Wrong(f"in {direction}, the next layer's gather is called and waited for at once: "
                    "nothing travels while this layer computes",
                    "async_op=True returns a handle: wait for it when the layer's turn comes.")


def _reject_early_waits(waits, computes, direction):
    # Asynchronous by name only: when layer k computes, at most the root's gather and those of k + 1
    # layers have been waited for.
    for number, moment in enumerate(computes[:-1]):
        if sum(wait < moment for wait in waits) > number + 2:
            raise Wrong(f"in {direction}, when layer number {number + 1} of {len(computes)} "
                        f"computes, the gather of number {number + 2} has been waited for: nothing "
                        "travels meanwhile", "Wait for this unit's own gather alone; the next "
                        "one's turn to wait comes later.")
