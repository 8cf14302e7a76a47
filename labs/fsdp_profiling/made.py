"""Small traces made by hand, with round numbers: what a recorded one cannot promise to contain."""

from labs.meters.trace import Collective, Span, Trace

UNITS = ("layer.0", "layer.1", "layer.2")


def trace(flights, compute, seconds=10.0, labels=(), steps=1) -> Trace:
    """flights: (kind, begin, end), with when it was issued if not at its begin. compute: (begin,
    end) stretches."""
    step = [Span("labs::step", "label", number * seconds / steps, (number + 1) * seconds / steps)
            for number in range(steps)]
    collectives = [Collective(f"gloo:{kind}", "communication", begin, end, kind,
                              issued[0] if issued else begin)
                   for kind, begin, end, *issued in flights]
    return Trace(0, "gloo", tuple(sorted(collectives, key=lambda one: one.issued)), tuple(compute),
                 tuple(sorted([*step, *labels], key=lambda span: (span.begin, -span.end))),
                 ends=seconds)


def shares() -> dict:
    """Name -> a trace of 10 seconds in which one mistake would show."""
    return {
        "two all-gathers at once": trace(
            [("all_gather", 1, 4), ("all_gather", 2, 5), ("reduce_scatter", 6, 9),
             ("reduce_scatter", 7, 8.5)], [(0, 2.5), (5.5, 7.5)]),
        "one after the other": trace(
            [("all_gather", 0, 2), ("all_gather", 3, 4), ("reduce_scatter", 8, 10)],
            [(1, 3.5), (4.5, 7.5)]),
        "an all-reduce among them": trace(
            [("all_gather", 0, 1), ("all_reduce", 2, 6), ("reduce_scatter", 5, 8)],
            [(1, 4), (7.5, 10)]),
        "called long before it begins": trace(
            [("all_gather", 5, 6, 1), ("reduce_scatter", 8, 9, 7)], [(0, 5.5), (6, 8.25)]),
        "two steps": trace(
            [("all_gather", 0, 1), ("all_gather", 10, 12), ("reduce_scatter", 18, 20)],
            [(0, 0.5), (1, 10), (12, 19)], seconds=20.0, steps=2)}


def fetching(ahead: bool = True, late: tuple = (), flight: float = 0.5) -> Trace:
    """A step of three layers and the root under FSDP2, labels and all. ahead: each all-gather of
    backward is issued while the layer after it still computes; late: the units for which it is
    not, all the same. An all-gather is under way when `flight` seconds have passed since its call:
    long after the labels around the call have ended."""
    labels, flights, now = [], [], 0.0

    def label(name, begin, end):
        labels.append(Span(name, "label", begin, end))

    def gather(unit, at):
        label(f"FSDP::all_gather{_named(unit)}", at, at + 0.1)
        flights.append(("all_gather", at + flight, at + flight + 0.2, at + 0.05))

    begin = now
    for unit in ("root", *UNITS):
        label(f"FSDP::pre_forward{_named(unit)}", now, now + 0.5)
        gather(unit, now + 0.2)
        label(f"FSDP::post_forward{_named(unit)}", now + 1.4, now + 1.5)
        now += 1.5
    label("labs::forward", begin, now)
    begin = now
    now = _backward(label, gather, now, ahead, late)
    label("FSDP::post_backward_accumulate", now, now + 0.1)
    label("labs::backward", begin, now + 0.2)
    return trace(flights, [(0, now)], seconds=now + 0.2, labels=labels)


def _backward(label, gather, now, ahead, late) -> float:
    label("FSDP::pre_backward", now, now + 0.9)
    gather("root", now + 0.1)
    order = list(reversed(UNITS))
    in_time = {unit: ahead and unit not in late for unit in order}
    if in_time[order[0]]:
        label(f"FSDP::backward_prefetch for {order[0]}", now + 0.4, now + 0.8)
        gather(order[0], now + 0.5)
    now += 1.0
    for unit, following in zip(order, [*order[1:], None], strict=True):
        label(f"FSDP::pre_backward{_named(unit)}", now, now + 0.9)
        if not in_time[unit]:
            gather(unit, now + 0.1)
        if following and in_time[following]:
            label(f"FSDP::backward_prefetch for {following}", now + 0.4, now + 0.8)
            gather(following, now + 0.5)
        label(f"FSDP::post_backward_accumulate{_named(unit)}", now + 1.5, now + 1.6)
        label(f"FSDP::post_backward_reduce{_named(unit)}", now + 1.6, now + 1.8)
        now += 2.0
    return now


def _named(unit) -> str:
    return "" if unit == "root" else f" ({unit})"
