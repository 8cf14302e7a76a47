"""Small traces with round numbers, written by hand: a recorded one cannot promise to contain what
tells a right answer from a wrong one."""

import random

from labs.meters.trace import Collective, Interval, Span, Trace

UNITS = ("layer.0", "layer.1", "layer.2")
ELEVEN = tuple(f"layers.{number}" for number in range(11))  # as texts, layers.10 is before layers.2


def trace(collectives, compute, seconds: float = 10.0, labels=(), steps: int = 1,
          pause: float = 0.0) -> Trace:
    """collectives: (kind, begin, end), and when it was issued if not at its begin. compute:
    intervals. seconds: of all steps together; pause: between two of them."""
    each = seconds / steps
    step = [Span("labs::step", "label", number * (each + pause), number * (each + pause) + each)
            for number in range(steps)]
    found = sorted((Collective(f"gloo:{kind}", "communication", begin, end, kind,
                               issued[0] if issued else begin)
                    for kind, begin, end, *issued in collectives), key=lambda one: one.issued)
    return Trace(0, "gloo", tuple(found), tuple(compute),
                 tuple(sorted([*step, *labels], key=lambda span: (span.begin, -span.end))),
                 ends=seconds + (steps - 1) * pause)


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
        "three all-gathers at once": trace(
            [("all_gather", 1, 4), ("all_gather", 2, 5), ("all_gather", 3, 6),
             ("reduce_scatter", 5.5, 7), ("reduce_scatter", 6, 8), ("reduce_scatter", 6.5, 9)],
            [(0, 1.5), (2.5, 3.5), (4.5, 7.5)]),
        "short all-gathers inside a long one": trace(
            [("all_gather", 1, 7), ("all_gather", 2, 3), ("all_gather", 4, 5),
             ("all_gather", 6.5, 8), ("reduce_scatter", 7.5, 9.5), ("reduce_scatter", 8, 8.5)],
            [(0.5, 1.5), (2, 2.5), (4.5, 6), (8.25, 9)]),
        "begun in another order than issued": trace(
            [("all_gather", 5, 7, 0.5), ("all_gather", 1, 5.5, 1),
             ("reduce_scatter", 8.5, 9.5, 3), ("reduce_scatter", 7.5, 9, 4)],
            [(0, 2), (3, 4), (6, 8)]),
        "a pause between two steps": trace(
            [("all_gather", 1, 2), ("reduce_scatter", 3, 5), ("all_gather", 12, 13.5),
             ("reduce_scatter", 14, 16)], [(0, 1.5), (4, 5), (11, 12.5), (15, 16)],
            seconds=10.0, steps=2, pause=6.0),
        "two steps": trace(
            [("all_gather", 0, 1), ("all_gather", 10, 12), ("reduce_scatter", 18, 20)],
            [(0, 0.5), (1, 10), (12, 19)], seconds=20.0, steps=2)}


def drawn_for_shares(rng: random.Random) -> Trace:
    """A trace of drawn moments: collectives that overlap with each other and with computing."""
    kinds = ["all_gather"] * rng.randint(2, 5) + ["reduce_scatter"] * rng.randint(1, 4)
    kinds += ["all_reduce"] * rng.randint(0, 2)
    collectives = []
    for kind in kinds:
        begin = rng.uniform(0.2, 8)
        collectives.append((kind, begin, begin + rng.uniform(0.3, 1.9),
                            begin - rng.uniform(0.01, 0.2)))
    return trace(collectives, drawn_intervals(rng, rng.randint(2, 5), 10.0),
                 seconds=rng.uniform(10, 12))


def drawn_intervals(rng: random.Random, count: int, end: float) -> list[Interval]:
    """So many intervals between 0 and `end`, apart from each other."""
    moments = sorted(rng.uniform(0, end) for _ in range(2 * count))
    return list(zip(moments[::2], moments[1::2], strict=True))


def drawn_for_prefetch(rng: random.Random) -> Trace:
    """A trace with FSDP2's labels, of units with drawn names of which some are prefetched late."""
    name = rng.choice(("blocks", "model.layers", "transformer.h", "encoder.layer"))
    first = rng.randint(0, 40)
    units = tuple(f"{name}.{first + number}" for number in range(rng.randint(3, 9)))
    return for_prefetch(late=tuple(rng.sample(units[:-1], rng.randint(1, len(units) - 1))),
                        latency=rng.choice((0.05, 0.5, 4.0)), units=units)


def for_prefetch(prefetch: bool = True, late: tuple[str, ...] = (), latency: float = 0.5,
                 units: tuple[str, ...] = UNITS, kept: tuple[str, ...] = (),
                 steps: int = 1) -> Trace:
    """Returns steps of some units and the root under FSDP2, with FSDP2's labels.

    prefetch: each all-gather of backward is issued while the unit after it still computes. late:
    units for which it is not, even so. latency: seconds from the call of an all-gather to its
    begin, which lies long after the labels that enclose the call. kept: units that are not freed
    after forward, so that backward does not gather them again.
    """
    # In seconds: a unit's forward takes 1.5, its backward 2.
    writer, now = _Writer(latency), 0.0
    for _ in range(steps):
        now = _step(writer, now, units, [unit for unit in units if prefetch and unit not in late],
                    kept)
    return trace(writer.gathers, [(0, now)], seconds=now, labels=writer.labels, steps=steps)


class _Writer:
    def __init__(self, latency):
        self.labels, self.gathers, self.latency = [], [], latency

    def label(self, name, begin, end):
        self.labels.append(Span(name, "label", begin, end))

    # The call lies in the label, the flight `latency` seconds after it.
    def gather(self, unit, at):
        self.label(f"FSDP::all_gather{_in_brackets(unit)}", at, at + 0.1)
        self.gathers.append(("all_gather", at + self.latency, at + self.latency + 0.2, at + 0.05))


def _step(write, now, units, prefetched, kept) -> float:
    """The end of a step that begins at `now`."""
    begin = now
    for unit in ("root", *units):
        write.label(f"FSDP::pre_forward{_in_brackets(unit)}", now, now + 0.5)
        write.gather(unit, now + 0.2)
        write.label(f"FSDP::post_forward{_in_brackets(unit)}", now + 1.4, now + 1.5)
        now += 1.5
    write.label("labs::forward", begin, now)
    begin = now
    now = _backward(write, now, units, prefetched, kept)
    write.label("FSDP::post_backward_accumulate", now, now + 0.1)
    write.label("labs::backward", begin, now + 0.2)
    return now + 0.2


def _backward(write, now, units, prefetched, kept) -> float:
    """The end of a backward that begins at `now`."""
    def prefetch(unit, at):
        if unit in prefetched and unit not in kept:
            write.label(f"FSDP::backward_prefetch for {unit}", at, at + 0.4)
            write.gather(unit, at + 0.1)

    order = units[::-1]
    write.label("FSDP::pre_backward", now, now + 0.9)
    write.gather("root", now + 0.1)
    prefetch(order[0], now + 0.4)
    now += 1.0
    for unit, following in zip(order, [*order[1:], None], strict=True):
        write.label(f"FSDP::pre_backward{_in_brackets(unit)}", now, now + 0.9)
        if unit not in prefetched and unit not in kept:
            write.gather(unit, now + 0.1)
        prefetch(following, now + 0.4)
        write.label(f"FSDP::post_backward_accumulate{_in_brackets(unit)}", now + 1.5, now + 1.6)
        write.label(f"FSDP::post_backward_reduce{_in_brackets(unit)}", now + 1.6, now + 1.8)
        now += 2.0
    return now


def _in_brackets(unit) -> str:
    return "" if unit == "root" else f" ({unit})"
