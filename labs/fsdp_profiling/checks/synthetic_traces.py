"""Small traces with round numbers, written by hand: a recorded one cannot promise to contain what
tells a right answer from a wrong one."""

from labs.meters.trace import Collective, Span, Trace

UNITS = ("layer.0", "layer.1", "layer.2")


def trace(collectives, compute, seconds: float = 10.0, labels=(), steps: int = 1) -> Trace:
    """collectives: (kind, begin, end), and when it was issued if not at its begin. compute:
    intervals."""
    step = [Span("labs::step", "label", number * seconds / steps, (number + 1) * seconds / steps)
            for number in range(steps)]
    found = sorted((Collective(f"gloo:{kind}", "communication", begin, end, kind,
                               issued[0] if issued else begin)
                    for kind, begin, end, *issued in collectives), key=lambda one: one.issued)
    return Trace(0, "gloo", tuple(found), tuple(compute),
                 tuple(sorted([*step, *labels], key=lambda span: (span.begin, -span.end))),
                 ends=seconds)


def for_shares() -> dict[str, Trace]:
    """Returns name -> a trace in which one mistake about shares would show."""
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


def for_prefetch(prefetch: bool = True, late: tuple[str, ...] = (),
                 latency: float = 0.5) -> Trace:
    """Returns a step of three layers and the root under FSDP2, with FSDP2's labels.

    prefetch: each all-gather of backward is issued while the layer after it still computes. late:
    units for which it is not, even so. latency: seconds from the call of an all-gather to its
    begin, which lies long after the labels that enclose the call.
    """
    labels, gathers, now = [], [], 0.0

    def label(name, begin, end):
        labels.append(Span(name, "label", begin, end))

    def gather(unit, at):
        label(f"FSDP::all_gather{_in_brackets(unit)}", at, at + 0.1)
        gathers.append(("all_gather", at + latency, at + latency + 0.2, at + 0.05))

    for unit in ("root", *UNITS):
        label(f"FSDP::pre_forward{_in_brackets(unit)}", now, now + 0.5)
        gather(unit, now + 0.2)
        label(f"FSDP::post_forward{_in_brackets(unit)}", now + 1.4, now + 1.5)
        now += 1.5
    label("labs::forward", 0.0, now)
    begin = now
    now = _backward(label, gather, now, [unit for unit in UNITS if prefetch and unit not in late])
    label("FSDP::post_backward_accumulate", now, now + 0.1)
    label("labs::backward", begin, now + 0.2)
    return trace(gathers, [(0, now)], seconds=now + 0.2, labels=labels)


def _backward(label, gather, now, prefetched) -> float:
    """The end of a backward that begins at `now`."""
    def prefetch(unit, at):
        if unit in prefetched:
            label(f"FSDP::backward_prefetch for {unit}", at, at + 0.4)
            gather(unit, at + 0.1)

    order = UNITS[::-1]
    label("FSDP::pre_backward", now, now + 0.9)
    gather("root", now + 0.1)
    prefetch(order[0], now + 0.4)
    now += 1.0
    for unit, following in zip(order, [*order[1:], None], strict=True):
        label(f"FSDP::pre_backward{_in_brackets(unit)}", now, now + 0.9)
        if unit not in prefetched:
            gather(unit, now + 0.1)
        prefetch(following, now + 0.4)
        label(f"FSDP::post_backward_accumulate{_in_brackets(unit)}", now + 1.5, now + 1.6)
        label(f"FSDP::post_backward_reduce{_in_brackets(unit)}", now + 1.6, now + 1.8)
        now += 2.0
    return now


def _in_brackets(unit) -> str:
    return "" if unit == "root" else f" ({unit})"
