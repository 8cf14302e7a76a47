"""Exercise 2.11: buckets rebuilt in the order in which rank 0's gradients became ready."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch.distributed as dist
from torch import nn

from labs.checks.invariants import mark_waits, positions
from labs.checks.on_ranks import (
    BATCH,
    labs_own_refused,
    on_ranks,
    raise_on_all_ranks,
    torchs_own_refused,
)
from labs.checks.reference import Step
from labs.checks.verdicts import Wrong, check, shows
from labs.faults.delayed_rank import Gate
from labs.manual_ddp.api_hints import API_HINTS
from labs.manual_ddp.edge_cases import (
    ALL_BUT_RANK_0,
    BRANCHED_CAP,
    CAPS,
    EVERY_RANK,
    NESTED_CAP,
    NO_RANK,
    ONLY_RANK_0,
    WORLD_SIZES,
    BranchedModel,
    UseAll,
    branched_model_with_optional,
    mixed_model,
)
from labs.manual_ddp.gradients import gradient_bytes, sgd
from labs.manual_ddp.manual_ddp import train_wrapped
from labs.manual_ddp.overlap import Wrap, judge_free, judge_not_blocked
from labs.manual_ddp.scaffold import BucketedWrapper, Wrapper
from labs.meters.traffic import CollectiveCall, Mark, Traffic
from labs.pictures.tables import Table
from labs.training import data
from labs.training.models import EdgeCaseModel, trainable
from labs.words import counted, listed, to_within
from labs.workers.launcher import launch

Events = Sequence[CollectiveCall | Mark]
_REFUSED = ("Build it from torch.nn.Module and torch's hooks; your own functions of 2.2, 2.5 and "
            "2.6 may stay.")
_ONE_ORDER = ("All ranks start the same buckets in the same order: take rank 0's order on every "
              "rank, keep it, and when backward is over send also what did not become complete.")
_MIDDLE = ("What is in flight belongs to the buckets of this backward: rebuild only when they have "
           "arrived, and begin the next backward with nothing started.")
# Models, caps and, for each step, which ranks swap two branches or use an optional layer. In the
# last step rank 0 itself gets its gradients ready in another order than in the first.
_RECORDED = ((BranchedModel, [ALL_BUT_RANK_0, EVERY_RANK, ONLY_RANK_0]),
             (branched_model_with_optional, [ALL_BUT_RANK_0, ONLY_RANK_0, EVERY_RANK]))
_TRAINED = ((BranchedModel, 700, [ONLY_RANK_0, ALL_BUT_RANK_0, EVERY_RANK]),
            (branched_model_with_optional, BRANCHED_CAP, [NO_RANK, ALL_BUT_RANK_0, ONLY_RANK_0]),
            (EdgeCaseModel, CAPS[0], [ALL_BUT_RANK_0, EVERY_RANK]),
            (mixed_model, NESTED_CAP, [ONLY_RANK_0, ALL_BUT_RANK_0, NO_RANK]))


@check("2.11", hints=API_HINTS | {
    "collectives_differ": _ONE_ORDER, "deadlock": _ONE_ORDER,
    "no_progress": _ONE_ORDER, "split_with_sizes": _MIDDLE, "size of split": _MIDDLE,
    "Final callbacks can only be installed":
        "Queue the callback in a hook: the engine takes callbacks only during backward.",
    "takes 2 positional arguments but 3 were given":
        "It is called as ReadyOrderDDP(module, cap_bytes), once for each model."})
def check_ready_order(wrap):
    """wrap(model, cap_bytes), for example the class ReadyOrderDDP, returns a module without lab
    classes that rebuilds its buckets after its first backward, in the order in which rank 0's
    gradients became ready, on all ranks."""
    def work():
        own = _without_scaffold(wrap)
        for make, uses in _RECORDED:
            recorded = _record(own, make, uses)
            for number in range(1, len(uses)):
                raise_on_all_ranks(_judge_step, recorded, number)
            raise_on_all_ranks(judge_free, recorded.is_free)
        return max(train_wrapped(lambda model, cap=cap: own(model, cap), uses, make)[0]
                   for make, cap, uses in _TRAINED)

    difference = max(on_ranks(work, world_sizes=WORLD_SIZES))
    return (f"from the second step on, buckets leave in the order of rank 0's first gradients, on "
            f"2, 3 and 4 ranks; the numbers are the reference's ({to_within(difference)})")


def _without_scaffold(wrap: Wrap) -> Wrap:
    def wrapped(model, cap):
        with labs_own_refused((Wrapper, BucketedWrapper), _REFUSED), \
                torchs_own_refused("DistributedDataParallel"):
            return wrap(model, cap)

    return wrapped


@dataclass(frozen=True)
class _Recorded:
    """A short training on one rank. forwards, backwards: the events of each step. order: the names
    of rank 0's parameters, as they became ready in its first backward. is_free: whether the rank
    that was delayed in the last step found that rank 0 computed on without it."""

    model: nn.Module
    forwards: list[Events]
    backwards: list[Events]
    order: list[str]
    is_free: bool

    @property
    def elements(self) -> dict[str, int]:
        """name -> elements of each trainable parameter."""
        return {name: p.numel() for name, p in trainable(self.model)}


def _record(wrap: Wrap, make: Callable[..., nn.Module], uses: Sequence[UseAll]) -> _Recorded:
    """On a rank: trains wrap(make(0)). In the last step, in which rank 0 uses all parameters, the
    last rank begins backward only when rank 0 has computed all its gradients."""
    model, traffic, gate, is_free = make(seed=0), Traffic(), Gate(), True
    forwards, backwards = [], []
    rank, last_rank = dist.get_rank(), dist.get_world_size() - 1

    def ready(name):
        traffic.mark(f"ready {name}")
        seen = positions(traffic.events[begin:], "ready")
        if len(forwards) == len(uses) and len(seen) == len(trainable(model)) and rank == 0:
            gate.open()

    for name, parameter in trainable(model):  # before the student's hooks: these are called first
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: ready(name))
    module = wrap(model, BRANCHED_CAP)
    optimizer = sgd(model)
    batches = data.xy_batches(len(uses), BATCH)
    with traffic, mark_waits(traffic), torchs_own_refused("DistributedDataParallel"):
        for batch, use_all in zip(batches, uses, strict=True):
            # `ready` counts from here: events of earlier steps stay in the list.
            begin = len(traffic.events)
            loss = module(**Step(batch, use_all).inputs()).loss
            forwards.append(traffic.events[begin:])
            if len(forwards) == len(uses) and rank == last_rank:
                is_free = gate.wait()
            begin = len(traffic.events)
            loss.backward()
            backwards.append(traffic.events[begin:])
            optimizer.step()
            optimizer.zero_grad()
    order = [[event.what.removeprefix("ready ") for event in backwards[0]
              if isinstance(event, Mark) and event.what.startswith("ready ")]]
    # Ranks get their gradients ready in different orders; all are judged by rank 0's.
    dist.broadcast_object_list(order, src=0)
    return _Recorded(model, forwards, backwards, order[0], is_free)


def _judge_step(recorded: _Recorded, number: int):
    events, when = recorded.backwards[number], f"in step {number + 1}"
    calls = [events[i] for i in positions(events, "all_reduce")]
    if not calls:
        raise Wrong(f"{when}, backward communicates nothing",
                    "Start a bucket when its last gradient is ready.", code="nothing_sent")
    # the ranks agree once: an order that is learned in every step costs a collective in every step
    others = [event.kind for event in (*recorded.forwards[number], *events)
              if isinstance(event, CollectiveCall) and event not in calls]
    if number > 1 and others:
        raise Wrong(f"{when}, {listed(others)} is called besides the buckets' all-reduces",
                    "The order is learned once, after the first backward.", code="extra_collective")
    _judge_bytes(recorded, calls, when)
    judge_not_blocked(events)
    _judge_buckets(recorded, events, when)


def _judge_bytes(recorded, calls, when):
    sent, want = sum(call.bytes for call in calls), gradient_bytes(recorded.model)
    if sent > want:
        raise Wrong(f"{when}, rank {dist.get_rank()} sent {sent:,} bytes; its gradients have "
                    f"{want:,}", "Each gradient is sent once, in one bucket. Is the callback "
                    "queued once in each backward?", code="too_much_sent")
    # a parameter that was not ready in the first backward must have its place in the new buckets
    late = [name for name in recorded.elements if name not in recorded.order]
    # Exactly the bytes of the parameters that rank 0 did not use in the first step.
    if sent < want and want - sent == 4 * sum(recorded.elements[name] for name in late):
        raise Wrong(f"{when}, {listed(map(repr, late))} are in no bucket: rank 0 did not use "
                    "them in the first step", "Append what is not in the order at its end.",
                    code="unused_left_out")
    if sent < want:
        raise Wrong(f"{when}, rank {dist.get_rank()} sent {sent:,} bytes; its gradients have "
                    f"{want:,}", "Is every parameter in a bucket, and the last bucket sent, too?",
                    code="too_little_sent")


def _judge_buckets(recorded, events, when):
    """Raises Wrong unless each bucket has the next gradients of the order, and is sent when it is
    complete."""
    elements, order = recorded.elements, recorded.order
    places = positions(events, "all_reduce")
    # Elements sent after each all-reduce, and elements of the order's first 1, 2, ... parameters: a
    # bucket that holds the next parameters of the order ends at one of the latter.
    reached = list(itertools.accumulate(events[i].elements for i in places))
    prefix = list(itertools.accumulate(elements[name] for name in order))
    ready = {event.what.removeprefix("ready "): i for i, event in enumerate(events)
             if isinstance(event, Mark) and event.what.startswith("ready ")}
    begin, needed = 0, []
    for number, end in enumerate(reached):
        if end > prefix[-1]:
            break  # the rest are parameters that were not ready in the first step, in any order
        if end not in prefix:
            raise _other_order(recorded, reached, number, when)
        members = order[begin:prefix.index(end) + 1]
        begin += len(members)
        _judge_size(members, elements, f"{when}, bucket {number}", order[begin:begin + 1])
        needed.append(order[:begin])
    # all sent at the end, because nothing is ever complete: of parameters that were sent as objects
    # each rank has copies, which get no gradients
    if places[0] > max(ready.values()):
        raise Wrong(f"{when}, the first all-reduce is issued after the last gradient is ready: "
                    "nothing overlaps with backward", "Start a bucket when it is complete. The new "
                    "buckets hold the model's own parameters, not copies that were sent.",
                    code="no_overlap")
    for number, names in enumerate(needed):
        if all(name in ready for name in names):  # else it is sent when backward is over
            _judge_time(places[number], names, ready, f"{when}, bucket {number}")


def _other_order(recorded, reached, number, when) -> Wrong:
    registered = set(itertools.accumulate(list(recorded.elements.values())[::-1]))
    if registered.issuperset(reached):
        return Wrong(f"{when}, the buckets still follow the order of registration: the first one "
                     f"waits for {list(recorded.elements)[-1]!r}, which becomes ready last",
                     "After the first backward, cut buckets again, in the order that was noted.",
                     code="order_of_registration")
    return Wrong(f"{when}, bucket {number} does not hold the next gradients in the order in which "
                 "rank 0's became ready in the first step",
                 "First those that were ready, in their order; then the others. make_buckets goes "
                 "through a list from its end.", code="wrong_order")


def _judge_size(members, elements, who, following):
    # 4 bytes: the recorded models are fp32.
    nbytes = 4 * sum(elements[name] for name in members)
    # a bucket for everything is sent when all is ready; one for each parameter saves no call
    if len(members) > 1 and nbytes > BRANCHED_CAP:
        raise Wrong(f"{who} has {nbytes} bytes, the cap is {BRANCHED_CAP}",
                    "The new buckets keep the cap: use make_buckets again.", code="cap_exceeded")
    if following and nbytes + 4 * elements[following[0]] <= BRANCHED_CAP:
        raise Wrong(f"{who} has {nbytes} bytes, and the next gradient, {following[0]!r}, would fit "
                    f"into the cap of {BRANCHED_CAP}", "Cut the new order with make_buckets.",
                    code="bucket_not_filled")


def _judge_time(place, needed, ready, who):
    last = max(needed, key=ready.get)
    # what is not ready yet is sent as zeros, or as the gradient of the step before
    if place < ready[last]:
        raise Wrong(f"{who} leaves before the gradient of {last!r} is ready",
                    "A bucket leaves when all its gradients are ready.", code="leaves_too_early")
    late = sum(ready[last] < i < place for i in ready.values())
    if late:
        raise Wrong(f"{who} is complete, and leaves only after {counted(late, 'more gradient')}",
                    "With each gradient that gets ready, start every bucket that is complete and "
                    "whose turn it is.", code="leaves_too_late")


def count_early(wrap: Wrap, steps: int, **options) -> list[tuple[int, int]]:
    """On a rank: for each step of a short training of wrap(BranchedModel(**options)), how many
    all-reduces are issued while gradients are still being computed, and how many in all."""
    recorded = _record(wrap, lambda seed: BranchedModel(seed, **options), [EVERY_RANK] * steps)
    return [(sum(i < positions(events, "ready")[-1] for i in positions(events, "all_reduce")),
             len(positions(events, "all_reduce"))) for events in recorded.backwards]


@shows("2.11")
def show_starts(wrap: Callable, steps: int = 3) -> Table:
    """A table of the buckets that are sent while gradients are still being computed, by step, for
    one model whose layers are registered in two orders."""
    rows = [(f"registered {how}", *(f"{early} of {calls}" for early, calls in launch(
        partial(count_early, is_reversed=is_reversed), wrap, steps, ranks=2, quiet=True)[0]))
        for how, is_reversed in (("in the order of forward", False), ("in reverse", True))]
    return Table("Buckets that leave before the last gradient is ready",
                 ("the same model", *(f"step {number + 1}" for number in range(steps))), rows)
