"""Invariants on a rank's memory and on the order of its collectives. What a strategy does is
recorded here; limits, hints and the words for what allows them are data that each exercise gives.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch.distributed as dist
from torch import nn

from labs.checks.on_ranks import raise_on_all_ranks
from labs.checks.verdicts import Wrong
from labs.meters import memory
from labs.meters.traffic import CollectiveCall, Mark, Traffic
from labs.training.loop import train
from labs.training.models import trainable

TRIES = 3
OUTSIDE = 2048  # bytes that a solution may need for sizes and indices
STATES = ("parameters", "gradients", "optimizer_state")
_NAMES = {"optimizer_state": "optimizer state", "rest": "activations, buffers and the rest"}
_CODES = {"parameters": "parameter_memory_too_high", "gradients": "gradient_memory_too_high",
          "optimizer_state": "optimizer_memory_too_high"}


def judge_recorded(record: Callable[[], memory.Report], judge: Callable, *args) -> None:
    """On a rank: calls judge(report, *args) on all ranks with what `record()` returns.

    The profiler misses frees on gloo's threads at times, and never invents one. So where `judge`
    raises Wrong, memory is recorded again, up to TRIES times, each time with more time for these
    threads, and the leanest report is judged.
    """
    reports = []
    while True:
        with memory.wait_longer(4 ** len(reports)):
            reports.append(record())
        try:
            raise_on_all_ranks(judge, memory.leanest(reports), *args)
            return raise_on_all_ranks(judge_outside_torch, memory.leanest(reports))
        except Wrong:
            if len(reports) == TRIES:
                raise


def judge_outside_torch(report: memory.Report) -> None:
    """Raises Wrong where this rank holds more than OUTSIDE bytes outside torch's tensors after a
    phase: NumPy arrays, bytes, lists of numbers, mapped files. Memory counts, whatever holds it.

    `judge_recorded` calls it; it judges what `memory.record(..., outside=True)` has recorded, and
    accepts a report that was recorded without.
    """
    # A state that is kept as a NumPy array or as pickled bytes is as large as the tensor was, and
    # torch's profiler does not see it.
    for phase, held in report.outside.items():
        if held.bytes > OUTSIDE:
            after = "building" if phase == "build" else phase
            raise Wrong(f"rank {dist.get_rank()} holds {held.bytes:,} bytes outside torch's "
                        f"tensors after {after}",
                        "NumPy arrays, bytes, lists of numbers and mapped files take a rank's "
                        "memory as tensors do.", held.place, code="memory_outside_torch")


def judge_memory(report: memory.Report, allowed: dict[str, dict[str, float]], rule: str,
                 hints: dict[str, str], formulas: dict[str, str] | None = None) -> None:
    """Raises Wrong where this rank holds more bytes after a phase than is allowed.

    allowed: phase -> category -> bytes; "rest" is all that is not in STATES. rule: what allows so
    much, in words. hints, formulas: category -> what is said with it.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for phase, limits in allowed.items():
        found, after = report.phases[phase], "building" if phase == "build" else phase
        held = vars(found) | {"rest": found.total - sum(getattr(found, name) for name in STATES)}
        # Invariant: after each phase a rank has allocated no more of a category than its shard.
        # Catches gradients that are reduced but not freed, state for all parameters on each rank,
        # and gathered parameters that stay allocated after they were used.
        for category, most in limits.items():
            if held[category] > most:
                name, formula = _NAMES.get(category, category), (formulas or {}).get(category, "")
                raise Wrong(f"rank {rank} holds {held[category]:,} bytes of {name} after {after}; "
                            f"{rule} on {ranks} ranks it is at most {int(most):,}{formula}",
                            hints[category], code=_CODES.get(category, "memory_too_high"))


def record_step(build: Callable[[nn.Module], tuple], model: nn.Module, batches: list[dict],
                layers=()) -> Traffic:
    """On a rank: trains what build(model) -> (module, optimizer) returns on all batches, and
    records the step on the last one: its collectives, and between them these marks.

    "ready NAME": a parameter's gradient is complete. "compute": one of `layers` (each has a weight)
    computes, in forward or in backward. "wait all_gather": the first wait for an all-gather, and so
    for each kind. "backward begins", "backward ends".
    """
    traffic = Traffic()
    # Hooks run in the order of their registration: before the strategy's, these mark a gradient
    # before it can be sent; after them, the next ones mark a layer when it really computes.
    for name, parameter in trainable(model):
        parameter.register_post_accumulate_grad_hook(
            lambda _, name=name: traffic.mark(f"ready {name}"))
    module, optimizer = build(model)
    # The last batch's step is the one recorded: the optimizer has its state by then, and DDP has
    # rebuilt its buckets, which it does after the first backward.
    train(module, optimizer, batches[:-1])
    traffic.events.clear()
    for layer in layers:
        # The backward of a linear layer computes the gradient of its weight, which a tensor hook
        # sees as soon as it is computed; the hook of the parameter above runs after it was
        # accumulated.
        layer.register_forward_pre_hook(lambda *_: traffic.mark("compute"))
        layer.weight.register_hook(lambda _: traffic.mark("compute"))
    with traffic, mark_waits(traffic):
        loss = module(**batches[-1]).loss
        traffic.mark("backward begins")
        loss.backward()
        traffic.mark("backward ends")
        optimizer.step()
        optimizer.zero_grad()
    return traffic


def mark_waits(traffic: Traffic) -> AbstractContextManager:
    """Returns a context manager in which the first wait for each collective is marked "wait KIND",
    by whatever API the rank waits (`Traffic.marked_waits`)."""
    return traffic.marked_waits()


def positions(events: list[CollectiveCall | Mark], *names: str) -> list[int]:
    """Returns where in `events` those are whose name begins with one of `names`: the kind of a
    collective, or what a mark says."""
    return [number for number, event in enumerate(events) if
            (event.kind if isinstance(event, CollectiveCall) else event.what).startswith(names)]
