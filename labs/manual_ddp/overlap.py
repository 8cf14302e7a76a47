"""Exercise 2.7: each bucket's all-reduce starts as soon as the bucket is complete."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn

from labs.checks.invariants import positions, record_step
from labs.checks.on_ranks import BATCH, on_ranks, raise_on_all_ranks, torchs_own_refused
from labs.checks.reference import Step
from labs.checks.verdicts import Wrong, check, shows
from labs.faults.delayed_rank import GATE_TIMEOUT, Gate
from labs.manual_ddp import variants
from labs.manual_ddp.api_hints import API_HINTS
from labs.manual_ddp.edge_cases import (
    ALL_BUT_RANK_0,
    CAPS,
    EVERY_RANK,
    NESTED_CAP,
    NO_RANK,
    ONLY_RANK_0,
    WORLD_SIZES,
    BranchedModel,
    NestedModel,
    mixed_model,
)
from labs.manual_ddp.gradients import gradient_bytes, sgd
from labs.manual_ddp.make_buckets import Buckets, judged_buckets
from labs.manual_ddp.manual_ddp import train_wrapped
from labs.meters.traffic import CollectiveCall, Mark
from labs.meters.typical_step import require_typical
from labs.pictures import agreement, timelines
from labs.pictures.picture import Picture
from labs.training import data
from labs.training.models import EdgeCaseModel, trainable
from labs.training.presets import Preset
from labs.words import counted, to_within
from labs.workers.launcher import launch
from labs.workers.other_load import name_load

Wrap = Callable[[nn.Module, int], nn.Module]
_STEPS = 2  # of which the last is recorded: what one step leaves behind can spoil the next
_FLAG = 8  # bytes for each parameter that may be sent too, to say which ones were used


@check("2.7", hints=API_HINTS | {"collectives_differ":
                                 "All ranks start the same buckets in the same order, also those "
                                 "with parameters that a rank did not use."})
def check_overlap(wrap):
    """wrap(model, cap_bytes) returns a bucketed module whose buckets are sent during backward, each
    as soon as it is complete."""
    def work():
        # in the last model two layers get ready in another order than they are registered in, so
        # that one gradient completes several buckets while others are still to come
        for make, cap in ((EdgeCaseModel, CAPS[0]), (mixed_model, NESTED_CAP),
                          (_registered_in_another_order, NESTED_CAP)):
            recorded = _record(wrap, make, cap)
            raise_on_all_ranks(_judge_order, recorded)
        # a parameter that only some ranks use never gets ready elsewhere, yet every rank must send
        # its bucket, and in the same order, also a bucket that has no other parameter
        cases = ((EdgeCaseModel, CAPS[0], [EVERY_RANK, ONLY_RANK_0, EVERY_RANK]),
                 (mixed_model, NESTED_CAP, [EVERY_RANK, ALL_BUT_RANK_0, ONLY_RANK_0, NO_RANK]),
                 (EdgeCaseModel, CAPS[1], [ALL_BUT_RANK_0, NO_RANK]),
                 (NestedModel, 10**6, [EVERY_RANK, NO_RANK]))
        return max(train_wrapped(judged_buckets(lambda model, cap=cap: wrap(model, cap)), uses,
                                 make)[0] for make, cap, uses in cases)

    difference = max(on_ranks(work, world_sizes=WORLD_SIZES))
    return (f"every bucket leaves as soon as it is complete, and the numbers are the reference's "
            f"({to_within(difference)})")


def _registered_in_another_order(seed: int) -> BranchedModel:
    return BranchedModel(seed, is_reversed=False)


@dataclass(frozen=True)
class _Backward:
    """One rank's backward. events: in their order. buckets: the module's, None where it has none.
    free: whether the delayed rank found that rank 0 computed on without it."""

    model: nn.Module
    buckets: Buckets | None
    events: Sequence[CollectiveCall | Mark]
    free: bool


def _record(wrap: Wrap, make, cap) -> _Backward:
    """On a rank: what happens in the last backward of a short training. There the last rank begins
    backward only when rank 0 has computed all its gradients."""
    model, gate, found = make(seed=0), Gate(), {"free": True}
    seen = {"forward": 0, "ready": 0}

    def hold(*_):
        seen["forward"] += 1
        if seen["forward"] == _STEPS and dist.get_rank() == dist.get_world_size() - 1:
            # Between its forward and its backward of the last step: it issues no collective
            # meanwhile.
            found["free"] = gate.wait()

    def count(_):
        seen["ready"] += 1
        # The last gradient of the last step on rank 0.
        if seen["ready"] == _STEPS * len(trainable(model)) and dist.get_rank() == 0:
            gate.open()

    def build(model):
        module = judged_buckets(lambda model: wrap(model, cap))(model)
        found["buckets"] = getattr(module, "buckets", None)
        return module, sgd(model)

    model.register_forward_hook(hold)
    for _, parameter in trainable(model):  # before the student's hooks: these are called first
        parameter.register_post_accumulate_grad_hook(count)
    batches = [Step(batch, EVERY_RANK).inputs() for batch in data.xy_batches(_STEPS, BATCH)]
    with torchs_own_refused("DistributedDataParallel"):
        events = record_step(build, model, batches).events
    begin, end = positions(events, "backward")
    return _Backward(model, found["buckets"], events[begin:end], found["free"])


def _judge_order(backward: _Backward):
    events = backward.events
    calls = [i for i, event in enumerate(events) if isinstance(event, CollectiveCall)]
    last_ready = positions(events, "ready")[-1]
    if not calls:
        raise Wrong("backward communicates nothing",
                    "Start a bucket when its last gradient is ready.", code="nothing_sent")
    # "overlapped" by name only: a single bucket, or all of them sent when backward is over
    if len(calls) == 1:
        raise Wrong("one all-reduce carries everything: it can only leave when all is ready",
                    "Send each bucket by itself.", code="one_collective_for_all")
    if calls[0] > last_ready:
        raise Wrong("the first all-reduce is issued after the last gradient is ready: nothing "
                    "overlaps with backward", "Start a bucket in gradient_ready, not at the end.",
                    code="no_overlap")
    judge_not_blocked(events)
    _judge_each_bucket(backward, calls, last_ready)
    judge_free(backward.free)
    _judge_sent(backward, calls)


def judge_not_blocked(events: Sequence[CollectiveCall | Mark]) -> None:
    """Raises Wrong where one of the all-reduces of a backward blocks it, or is waited for in it."""
    calls, waits = positions(events, "all_reduce"), positions(events, "wait all_reduce")
    # the last bucket is sent when backward has nothing left to compute: only it may be waited for
    if not all(events[i].asynchronous for i in calls[:-1]):
        raise Wrong("an all-reduce during backward is not asynchronous: backward stands still",
                    "Use the start of exercise 2.6 and wait at the end of backward.",
                    code="blocking_collective")
    if waits and waits[0] < positions(events, "ready")[-1]:
        raise Wrong("a bucket is waited for while gradients are still being computed",
                    "Wait for all buckets when backward is over.", code="waits_too_early")


def judge_free(is_free: bool) -> None:
    """Raises Wrong where rank 0 did not compute on while another rank was delayed."""
    # any rank that waits, by whatever call, waits for the rank that is delayed: nothing overlaps
    if not is_free:
        raise Wrong(f"rank 0 had not computed its gradients after {GATE_TIMEOUT:g} s, while "
                    "another rank was delayed before its backward: something in backward "
                    "waits for a collective", "Wait for all buckets when backward is over.",
                    code="waits_too_early")


def _judge_each_bucket(backward, calls, last_ready):
    """Raises Wrong unless each bucket is sent between its last gradient and the next one of
    another bucket."""
    events, buckets = backward.events, backward.buckets
    sent = _calls_of_buckets(events, calls, buckets) if buckets else None
    if sent is None:  # not one call for each bucket: all but the last must be sent in time
        if calls[-2] > last_ready:
            raise Wrong("only some of the all-reduces are issued before the last gradient is ready",
                        "Start each bucket in gradient_ready as soon as it is complete.",
                        code="leaves_too_late")
        return
    names = {id(p): name for name, p in backward.model.named_parameters()}
    ready = {event.what.removeprefix("ready "): i for i, event in enumerate(events)
             if isinstance(event, Mark) and event.what.startswith("ready ")}
    complete = 0
    for number, (bucket, call) in enumerate(zip(buckets, sent, strict=True)):
        last = max((names[id(p)] for p in bucket), key=ready.get)
        # what is not ready yet is sent as zeros, or as the gradient of the step before
        if call < ready[last]:
            raise Wrong(f"bucket {number} leaves before the gradient of {last!r} is ready",
                        "A bucket leaves when all its gradients are ready.",
                        code="leaves_too_early")
        complete = max(complete, ready[last])  # after those before it, in the order of all ranks
        late = sum(complete < i < call for i in ready.values())
        # a bucket that is kept until the end is not overlapped, whatever the others do
        if late:
            raise Wrong(f"bucket {number} is complete, and leaves only after "
                        f"{counted(late, 'more gradient')}",
                        "In gradient_ready, start every bucket that is complete and whose turn it "
                        "is, not only the first.", code="leaves_too_late")


def _calls_of_buckets(events, calls, buckets) -> list[int] | None:
    """The place of each bucket's all-reduce among the events; None where they do not match."""
    sizes = [sum(p.numel() for p in bucket) for bucket in buckets]
    found, rest = [], list(calls)
    for size in sizes:
        # A call of another size, such as one of flags for used parameters, is no bucket's.
        while rest and events[rest[0]].elements != size:
            rest.pop(0)
        if not rest:
            return None
        found.append(rest.pop(0))
    return found


def _judge_sent(backward, calls):
    # a bucket sent twice, or the last one forgotten
    sent = sum(backward.events[i].bytes for i in calls)
    want, most = gradient_bytes(backward.model), _FLAG * len(trainable(backward.model))
    if not want <= sent <= want + most:
        raise Wrong(f"rank {dist.get_rank()} sent {sent:,} bytes; its gradients have {want:,}",
                    "Each bucket once, also the last one.",
                    code="too_little_sent" if sent < want else "too_much_sent")


@shows("2.7")
def show_in_flight(wrap: Callable, preset: Preset) -> Picture:
    """Draws when each gradient of rank 0 was ready, and when its bucket left and arrived, in the
    recorded step that is nearest to the median."""
    name_load()
    recorded, buckets = launch(variants.record_marked, wrap, preset, ranks=preset.ranks, quiet=True,
                               verify=False)[0]
    require_typical({"a step": (recorded.seconds, recorded.usual)}, "this cell")
    return timelines.buckets_in_flight(recorded.trace, buckets)


@shows("2.7")
def show_training(wrap: Callable, preset: Preset, steps: int = 20) -> Picture:
    """Draws the loss on `preset.ranks` ranks, and on one rank with the global batch: the same
    model, the same batches, the plain loop."""
    one = variants.losses(lambda model: model, preset, steps, ranks=1)
    several = variants.losses(wrap, preset, steps, ranks=preset.ranks)
    difference = max(abs(a - b) for a, b in zip(one, several, strict=True))
    return agreement.loss_curves({"1 rank, the global batch": one,
                               f"{preset.ranks} ranks, a share each": several}, difference)
