"""One rank's step, replayed at a stated pace: which collectives it issues and waits for, and how
many FLOPs it computes between them, is recorded on real ranks; seconds are FLOPs and bytes divided
by a speed. So the order is the program's own, and nothing depends on how busy the machine is."""

from dataclasses import dataclass

from torch.distributed.fsdp import FSDPModule
from torch.utils.flop_counter import FlopCounterMode

from labs.checks.verdicts import Wrong
from labs.meters.trace import Collective, Span, Trace
from labs.meters.traffic import CollectiveCall, Mark, Traffic
from labs.workers.collective_kernels import IssuedCollective
from labs.workers.slow_link import link_bytes


@dataclass(frozen=True)
class Pace:
    """flops: per second of computing. bytes: per second that a rank sends. latency: seconds of
    each collective."""

    flops: float
    bytes: float
    latency: float


@dataclass(frozen=True)
class Event:
    """Something that a rank does after `flops` operations. what: "issue", "wait", or a phase that
    begins. call: the collective."""

    what: str
    flops: int
    call: CollectiveCall | None = None


class FlopTraffic(Traffic):
    """Records collectives and waits, as Traffic does, and the FLOPs so far at each of them."""

    def __init__(self, counter: FlopCounterMode):
        super().__init__()
        self._counter, self.flops = counter, []

    def before(self, collective: IssuedCollective) -> None:
        super().before(collective)
        self.flops.append(self._counter.get_total_flops())

    def mark(self, what: str, call: CollectiveCall | None = None) -> None:
        super().mark(what, call)
        self.flops.append(self._counter.get_total_flops())

    def replayable(self) -> list[Event]:
        """The events, without collectives that carry nothing."""
        found = []
        for event, flops in zip(self.events, self.flops, strict=True):
            if isinstance(event, Mark):
                is_wait = event.what.startswith("wait") and event.call
                if is_wait or not event.what.startswith("wait"):
                    found.append(Event("wait" if is_wait else event.what, flops, event.call))
            elif event.elements:
                found.append(Event("issue", flops, event))
        return found


def record_events(module, optimizer, batches: list[dict]) -> list[Event]:
    """On a rank: the events of a step on the last batch. FSDP's all-gathers are in flight while the
    rank computes, as on a GPU."""
    *first, last = batches
    module._set_unshard_async_op(True)  # private: over gloo FSDP2 would wait at each call
    _train(module, optimizer, first)
    with (FlopCounterMode(display=False) as counter, FlopTraffic(counter) as traffic,
          traffic.marked_waits()):
        traffic.mark("forward")
        loss = module(**last).loss
        traffic.mark("backward")
        loss.backward()
        traffic.mark("end")
    return traffic.replayable()


def _train(module, optimizer, batches):
    for batch in batches:
        module(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def prefetch(model) -> None:
    """In forward each unit has the next one gathered while it computes. On a GPU FSDP2 does so by
    itself, because the program runs ahead of the device. Raises Wrong where the model is not
    sharded."""
    if not isinstance(model, FSDPModule):
        raise Wrong("the model is not sharded: FSDP has no unit for it", "fully_shard(model), "
                    "after its blocks.", code="not_sharded")
    units = [unit for block in model.layers for unit in (block, *block.modules())
             if isinstance(unit, FSDPModule)]
    units = list(dict.fromkeys(units))
    for unit, following in zip(units, units[1:], strict=False):
        unit.set_modules_to_forward_prefetch([following])


def sent(event: Event) -> float:
    """Bytes that the rank sends in the collective that the event issues."""
    if event.what != "issue":
        return 0.0
    return link_bytes(event.call.kind, event.call.bytes, event.call.ranks)


def replay(events: list[Event], pace: Pace, rank: int = 0) -> Trace:
    """The events as a trace. One link carries the collectives in the order in which they were
    issued. An all-to-all is waited for where it is issued, an all-gather where its parameters are
    used, and a reduce-scatter before the next one and at the end, as FSDP2 does on a GPU."""
    now, link_free, done, phases = 0.0, 0.0, 0, []
    ends, collectives, computed, scattering = {}, [], [], 0.0
    for event in events:
        if event.flops > done:
            later = now + (event.flops - done) / pace.flops
            computed.append((now, later))
            now, done = later, event.flops
        if event.what == "issue":
            call = event.call
            if call.kind == "reduce_scatter":
                now = max(now, scattering)
            begin = max(now, link_free)
            link_free = begin + pace.latency + sent(event) / pace.bytes
            ends[id(call)] = link_free
            collectives.append(Collective(call.kind, "communication", begin, link_free, call.kind,
                                          now, call.elements, call.bytes, ranks=call.ranks))
            if call.kind == "reduce_scatter":
                scattering = link_free
            elif call.kind == "all_to_all":
                now = link_free
        elif event.what == "wait":
            if event.call.kind != "reduce_scatter":
                now = max(now, ends.get(id(event.call), now))
        else:
            phases.append((event.what, now))
    now = max(now, scattering)
    spans = [Span(f"labs::{what}", "label", begin, end) for (what, begin), (_, end) in
             zip(phases, [*phases[1:-1], ("end", now)], strict=False)]
    return Trace(rank, "gloo", tuple(collectives), tuple(computed),
                 (Span("labs::step", "label", 0.0, now), *spans))
