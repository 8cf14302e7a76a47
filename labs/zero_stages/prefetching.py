"""Check of exercise 3.5: the next layer's gather is under way while this layer computes."""

import torch.distributed as dist

from labs.exercises.on_ranks import on_ranks, raise_on_all_ranks, torchs_own_refused
from labs.exercises.verdicts import Wrong, check
from labs.meters.traffic import CollectiveCall, Traffic, hook_waits
from labs.training import data
from labs.training.models import DeepMLP
from labs.zero_stages import promises
from labs.zero_stages.checks import NO_MEMORY
from labs.zero_stages.twin import SETTINGS, STEPS, built, follow

_GATHERS = (4, 5, 6)  # c10d::OpType ALLGATHER, _ALLGATHER_BASE, ALLGATHER_COALESCED


@check("3.5", hints=NO_MEMORY)
def check_prefetch(strategy):
    """strategy(model, optimizer_class, **settings) -> (module, optimizer): ZeRO-3 in which the
    next layer's parameters travel while this layer computes."""
    def work():
        with torchs_own_refused():
            raise_on_all_ranks(judge_order, order_of_events(strategy))
            difference = follow(strategy, 3)
            promises.keep(strategy, 3)
        return difference

    return (f"the next layer travels while this one computes, forward and backward, and the "
            f"numbers are the twin's over {STEPS} steps (to {max(on_ranks(work)):.0e})")


def order_of_events(strategy) -> list:
    """One forward and backward of a chain, after one to warm up: its collectives, and a mark each
    time a layer computes and each time a gather is waited for."""
    model, traffic = DeepMLP(), Traffic()
    mine = data.xy_batches(2, 4, seed=dist.get_rank())
    module, optimizer = built(strategy, model, SETTINGS)
    module(**mine[0]).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    hooks = []
    for layer in model.layers:  # after the student's hooks: here the layer really computes
        hooks.append(layer.register_forward_pre_hook(lambda *_: traffic.mark("forward")))
        hooks.append(layer.weight.register_hook(lambda _: traffic.mark("backward")))
    with traffic, _waits_marked(traffic):
        loss = module(**mine[1]).loss
        traffic.mark("turn")
        loss.backward()
    for hook in hooks:
        hook.remove()
    return traffic.events


def _waits_marked(traffic):
    """A mark when a gather is waited for; a second wait for the same one is none."""
    seen = []  # kept, so that no other can take its place in memory

    def mark(work):
        if work._get_op_type() in _GATHERS and not any(work is one for one in seen):
            seen.append(work)
            traffic.mark("waited")

    return hook_waits(before=mark)


def judge_order(events) -> None:
    """Raises Wrong where a layer computes and the next one's gather has not been begun, or has been
    waited for."""
    turn = next(n for n, event in enumerate(events) if getattr(event, "what", "") == "turn")
    for direction, part in (("forward", events[:turn]), ("backward", events[turn + 1:])):
        gathers = [n for n, event in enumerate(part)
                   if isinstance(event, CollectiveCall) and event.kind == "all_gather"]
        computes = [n for n, event in enumerate(part) if getattr(event, "what", "") == direction]
        if len(gathers) < len(computes):
            raise Wrong(f"in {direction}, {len(gathers)} gathers are called for {len(computes)} "
                        "layers", "Each layer's parameters are gathered for each direction.")
        # the root is gathered first, then one gather for each layer, in order
        for number, moment in enumerate(computes[:-1]):
            begun = sum(gather < moment for gather in gathers)
            if begun < number + 3:
                raise Wrong(f"in {direction}, when layer number {number + 1} of {len(computes)} "
                            f"computes, the gather of number {number + 2} has not been begun",
                            "Begin the gather of self.following(unit) before you wait for this "
                            "unit's own.")
        _judge_handles([part[n] for n in gathers], direction)
        _judge_waits(part, computes, direction)


def _judge_handles(gathers, direction):
    for call in gathers[2:]:
        if not call.asynchronous:
            raise Wrong(f"in {direction}, the next layer's gather is called and waited for at "
                        "once: nothing travels while this layer computes",
                        "async_op=True returns a handle: wait for it when the layer's turn comes.")


def _judge_waits(part, computes, direction):
    waits = [n for n, event in enumerate(part) if getattr(event, "what", "") == "waited"]
    for number, moment in enumerate(computes[:-1]):
        if sum(wait < moment for wait in waits) > number + 2:  # the root's, and one for each layer
            raise Wrong(f"in {direction}, when layer number {number + 1} of {len(computes)} "
                        f"computes, the gather of number {number + 2} has been waited for: nothing "
                        "travels meanwhile", "Wait for this unit's own gather alone; the next "
                        "one's turn to wait comes later.")
