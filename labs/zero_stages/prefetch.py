"""Exercise 3.5: the next layer's all-gather is in flight while this layer computes."""

from collections.abc import Callable
from functools import partial

import torch.distributed as dist

from labs.checks.invariants import positions, record_step
from labs.checks.on_ranks import on_ranks, raise_on_all_ranks, torchs_own_refused
from labs.checks.verdicts import Wrong, check
from labs.meters.traffic import CollectiveCall, Mark
from labs.training import data
from labs.training.models import DeepMLP
from labs.words import to_within
from labs.zero_stages.architectures import compare_on_other_architectures
from labs.zero_stages.stage_limits import judge_invariants, unsharded_memory
from labs.zero_stages.stage_training import SETTINGS, STEPS, build, difference_from_reference
from labs.zero_stages.stages import MEMORY_HINTS, WORLD_SIZES


@check("3.5", hints=MEMORY_HINTS)
def check_prefetch(strategy: Callable):
    """strategy(model, optimizer_class, **settings) -> (module, optimizer): ZeRO-3 in which the
    next layer's parameters are gathered while this layer computes."""
    unsharded = unsharded_memory()

    def work():
        with torchs_own_refused():
            model, batches = DeepMLP(), data.xy_batches(2, 4, seed=dist.get_rank())
            step = record_step(partial(build, strategy, settings=SETTINGS), model, batches,
                               model.layers)
            raise_on_all_ranks(require_prefetch, step.events)
            difference = difference_from_reference(strategy, 3)
            judge_invariants(strategy, 3, unsharded)
            if dist.get_world_size() == 3:
                compare_on_other_architectures(strategy)
        return difference

    worst = max(on_ranks(work, world_sizes=WORLD_SIZES))
    return (f"the next layer's all-gather is in flight while this one computes, forward and "
            f"backward, and it equals the reference over {STEPS} steps ({to_within(worst)})")


def require_prefetch(events: list[CollectiveCall | Mark]) -> None:
    """Raises Wrong if a layer computes while the next one's gather has not begun, or has been
    waited for."""
    begin, end = positions(events, "backward")
    for direction, part in (("forward", events[:begin]), ("backward", events[begin:end])):
        gathers, computes = positions(part, "all_gather"), positions(part, "compute")
        waits = positions(part, "wait all_gather")
        _require_counts(gathers, computes, direction)
        _require_order(gathers, computes, direction)
        _require_no_waiting([part[n] for n in gathers], waits, computes, direction)


def _require_counts(gathers, computes, direction):
    # ZeRO-3 gathers each layer for each direction; ZeRO-2 or a layer kept gathered gathers less.
    if len(gathers) < len(computes):
        raise Wrong(f"in {direction}, {len(gathers)} gathers are called for {len(computes)} "
                    "layers", "Each layer's parameters are gathered for each direction.",
                    code="too_few_gathers")
    # A unit is gathered once for each direction: catches one that is fetched again while it has
    # memory, which the order below would read as two units fetched ahead.
    units, called = len(computes) + 1, sum(place < computes[-1] for place in gathers)
    if called > units:
        raise Wrong(f"in {direction}, {called} gathers are called for {units} units: a unit is "
                    "gathered again while it has memory", "fetch does nothing for a unit that "
                    "has been fetched: unit.is_gathered says so.", code="gathered_again")


def _require_order(gathers, computes, direction):
    # The root is gathered first, then one gather for each layer in order: when layer k computes
    # (from 0), the root's, k + 1 layers' and the next one's have begun.
    for who, number, begun in _when_layers_compute(gathers, computes, direction):
        if begun < number + 3:
            raise Wrong(f"{who} has not been begun", "Begin the gather of "
                        "self.next_unit(unit) before this unit computes.", code="no_overlap")
    # One layer ahead is enough to hide a gather, and each layer ahead is memory.
    for number, moment in enumerate(computes[:-2]):
        begun = sum(place < moment for place in gathers)
        if begun > number + 3:
            raise Wrong(f"in {direction}, when layer number {number + 1} computes, the gather "
                        f"of number {number + 3} of {len(computes)} has begun, too",
                        "Fetch one unit ahead: each one more is another layer in memory.",
                        code="too_far_ahead")


def _require_no_waiting(calls, waits, computes, direction):
    # A synchronous gather has ended before the layer computes, whatever its order. The root's
    # and the first layer's may be: no layer computes before them.
    if not all(gather.asynchronous for gather in calls[2:]):
        raise Wrong(f"in {direction}, the next layer's gather is called and waited for at "
                    "once: nothing is in flight while this layer computes", "async_op=True returns "
                    "a handle: wait for it when the layer's turn comes.",
                    code="blocking_collective")
    # Asynchronous by name only: when layer k computes, at most the root's gather and those of
    # k + 1 layers have been waited for.
    for who, number, waited in _when_layers_compute(waits, computes, direction):
        if waited > number + 2:
            raise Wrong(f"{who} has been waited for: nothing is in flight", "Wait for "
                        "this unit's own gather alone; the next one's turn to wait comes "
                        "later.", code="waits_too_early")


def _when_layers_compute(places, computes, direction) -> list[tuple[str, int, int]]:
    """For each layer but the last: the next one's gather in words, its own number from 0, and how
    many of `places` come before it computes."""
    return [(f"in {direction}, when layer number {number + 1} of {len(computes)} computes, the "
             f"gather of number {number + 2}", number, sum(place < moment for place in places))
            for number, moment in enumerate(computes[:-1])]
