"""Invariants on a rank's memory, on what it sends, and on the order of its collectives. What a
strategy does is recorded here; limits, hints and the words for what allows them are data that each
exercise gives.

Memory: `judge_recorded` records, `judge_memory` compares with bytes for each phase and category;
`ResidentBytes` gives these bytes where some parameters are sharded and the others replicated.
Traffic: `record_step` records, `judge_collectives` compares with collectives of activations,
`require_group` with the ranks that may take part. Order: `positions` of what `record_step` marks.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch.distributed as dist
from torch import nn

from labs.checks.on_ranks import raise_on_all_ranks
from labs.checks.verdicts import Wrong
from labs.meters import memory
from labs.meters.traffic import CollectiveCall, Mark, Traffic
from labs.training.loop import train
from labs.training.models import trainable
from labs.words import counted

TRIES = 3
BYTES = 4  # of an fp32 element
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
                raise Wrong(f"rank {rank} has allocated {held[category]:,} bytes of {name} after "
                            f"{after}; {rule} on {ranks} ranks it is at most "
                            f"{int(most):,}{formula}", hints[category],
                            code=_CODES.get(category, "memory_too_high"))


# memory, where some parameters are sharded and the others replicated


@dataclass(frozen=True)
class ResidentBytes:
    """Bytes that a rank may hold in fp32: 1/ranks of what is sharded, all that is replicated.

    sharded, replicated: elements of the full model. tensors: how many parameters. buffers: bytes.
    rest: bytes of all else that may be there at the end of a phase; not judged after forward, when
    there are activations. states: numbers that the optimizer keeps for each element, 2 for AdamW.
    padding: elements that the shards may have in addition.
    """

    ranks: int
    sharded: int
    replicated: int
    tensors: int
    buffers: int = 0
    rest: int = 16_384
    states: int = 2
    padding: int = 0

    @classmethod
    def of(cls, model: nn.Module, sharded: Sequence[str], ranks: int, **more) -> "ResidentBytes":
        """Of a full model, whose parameters with these names are sharded."""
        sizes = {name: p.numel() for name, p in trainable(model)}
        cut = sum(sizes[name] for name in sharded)
        buffers = sum(b.numel() * b.element_size() for b in model.buffers())
        return cls(ranks, cut, sum(sizes.values()) - cut, len(sizes), buffers, **more)

    @property
    def elements(self) -> int:
        """Of one rank's parameters, or of its gradients."""
        return -(-self.sharded // self.ranks) + self.replicated + self.padding

    def by_category(self, phase: str) -> dict[str, int]:
        """Category -> bytes at the end of a phase."""
        has_gradients = phase in ("backward", "step")
        # AdamW has a step count for each parameter besides its states: one fp32 number a tensor.
        limits = {"parameters": BYTES * self.elements + self.buffers,
                  "gradients": BYTES * self.elements * has_gradients,
                  "optimizer_state": BYTES * (self.states * self.elements + self.tensors)}
        return limits if phase == "forward" else {**limits, "rest": self.rest}

    @property
    def formula(self) -> str:
        """How many elements of parameters that is, in words."""
        return (f" ({self.sharded:,} / {self.ranks} + {self.replicated:,} elements of "
                f"{BYTES} bytes)")


def judge_resident_bytes(build: Callable[[], tuple], batches: list[dict], allowed: ResidentBytes,
                         rule: str, hints: dict[str, str]) -> None:
    """On a rank: raises Wrong on all ranks where one holds more than is allowed after building, or
    at the end of forward, backward or step. build() makes the model, shards it, and returns
    (module, optimizer): so what the full model left behind is counted."""
    judge_recorded(partial(memory.record, build, batches, outside=True), _judge_bytes, allowed,
                   rule, hints)


def _judge_bytes(report, allowed, rule, hints):
    limits = {phase: allowed.by_category(phase) for phase in report.phases}
    # Catches views of the full weight, a copy of it kept aside, layers that were forgotten, and
    # optimizer state for the whole model.
    judge_memory(report, limits, rule, hints,
                 {"parameters": allowed.formula, "gradients": allowed.formula})


# what is sent, and when


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


@dataclass(frozen=True)
class Activations:
    """What tensor parallelism sends: activations of b·s·h elements, in each of so many layers."""

    layers: int
    batch: int
    sequence: int
    hidden: int

    @property
    def elements(self) -> int:
        """b·s·h, of one layer's hidden states."""
        return self.batch * self.sequence * self.hidden


def judge_collectives(traffic: Traffic, allowed: dict[str, float], activations: Activations,
                      group: dist.ProcessGroup | None = None, small: int | None = None,
                      hints: dict[str, str] | None = None,
                      outside: dict[str, int] | None = None) -> None:
    """Raises Wrong on all ranks where one sends more in a step than is allowed, or to ranks outside
    the group.

    allowed: kind -> how many collectives of b·s·h elements a layer and step needs, forward and
    backward together; an all-gather is counted by its output, a reduce-scatter by its input. small:
    elements of all other collectives of the step together, by default half of one activation.
    group: the one in which all must be. hints: kind -> what to say where there is too much of it.
    outside: kind -> how many more of b·s·h elements a step needs outside the layers.
    """
    # Half of one activation: less than the smallest collective that is one too many.
    most = activations.elements / 2 if small is None else small
    raise_on_all_ranks(_judge_kinds, traffic, allowed, activations, most, hints or {},
                       outside or {})
    raise_on_all_ranks(require_group, traffic, group or dist.group.WORLD,
                       f"rank {dist.get_rank()}")


def _judge_kinds(traffic, allowed, activations, small, hints, outside):
    rank, rest = dist.get_rank(), 0.0
    for kind in dict.fromkeys(call.kind for call in traffic.calls):
        calls = traffic.of(kind)
        # In elements, not calls: whether one activation is sent in one piece or two is free.
        sent, due = sum(call.elements for call in calls), allowed.get(kind, 0)
        more = outside.get(kind, 0)
        extra = sent - (due * activations.layers + more) * activations.elements
        rest += max(0.0, extra)
        if extra > small:
            raise Wrong(_too_much(rank, kind, calls, due, more, activations), hints.get(kind, ""),
                        code="wrong_traffic")
    # Catches what is sent beside the activations, each too small to be seen alone.
    if rest > small:
        raise Wrong(f"rank {rank} sends {int(rest):,} elements a step beside the activations' "
                    f"collectives; at most {int(small):,} are needed", hints.get("rest", ""),
                    code="extra_collective")


def _too_much(rank: int, kind: str, calls: list[CollectiveCall], due: float, outside: int,
              activations: Activations) -> str:
    name, size = kind.replace("_", "-"), activations.elements
    usual = [call for call in calls if call.elements == size]
    needed = (f"{due:g} of them are needed" if due else "none is needed")
    if len(usual) - outside > due * activations.layers:
        each = (len(usual) - outside) / activations.layers
        return (f"rank {rank}: {each:g} {name}s of b·s·h = {size:,} elements a layer and step; "
                f"{needed}")
    # No more of the usual size than due, so something of another size is too much; the largest is
    # named.
    other = max((call for call in calls if call.elements != size), key=lambda call: call.elements)
    return (f"rank {rank}: {counted(len(calls), name)} a step, one of {other.elements:,} elements, "
            f"which is no activation of b·s·h = {size:,}; {needed}")


def require_group(traffic: Traffic, group: dist.ProcessGroup, who: str) -> None:
    """Raises Wrong where a collective is not on exactly the ranks of the group."""
    members = dist.get_process_group_ranks(group)
    for call in traffic.calls:
        if call.members and list(call.members) != members:
            raise Wrong(f"{who}: an {call.kind.replace('_', '-')} of {call.elements:,} elements is "
                        f"on ranks {list(call.members)}; the group is ranks {members}",
                        "Pass `group` on to every collective: dist.all_reduce(x, group=group).",
                        code="wrong_group")
