"""Small traces of several ranks with round numbers, by which the division of lost time is judged:
recorded ones cannot promise to contain what tells a right answer from a wrong one."""

import random
from dataclasses import dataclass

from labs.meters.trace import Collective, Interval, Span, Trace

LOADER = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"


@dataclass(frozen=True)
class Rank:
    """What one rank does in each step, in seconds since the step begins. collectives: (begin, end),
    and when it was issued, if not at its begin. loading: of the data loader's labels."""

    collectives: tuple[tuple[float, ...], ...] = ()
    compute: tuple[Interval, ...] = ()
    loading: tuple[Interval, ...] = ()


def run(*ranks: Rank, seconds: float = 10.0, steps: int = 1, pause: float = 0.0) -> list[Trace]:
    """One trace per rank. seconds: of a step; pause: between two steps."""
    return [_trace(number, rank, seconds, steps, pause) for number, rank in enumerate(ranks)]


def _trace(number, rank, seconds, steps, pause) -> Trace:
    collectives, compute, labels = [], [], []
    for step in range(steps):
        start = step * (seconds + pause)
        collectives += [Collective(
            "gloo:all_reduce", "communication", start + begin, start + end, "all_reduce",
            start + (issued[0] if issued else begin)) for begin, end, *issued in rank.collectives]
        compute += [(start + begin, start + end) for begin, end in rank.compute]
        labels += [Span("labs::step", "label", start, start + seconds),
                   # other labels, that are no data loader's
                   Span("labs::forward", "label", start, start + 0.4 * seconds),
                   Span("FSDP::all_gather", "label", start + 1, start + 1.5)]
        labels += [Span(LOADER, "label", start + begin, start + end) for begin, end in rank.loading]
    # As a trace lists them: the same order on all ranks, which is not that of their begins.
    collectives.sort(key=lambda one: one.issued)
    return Trace(number, "gloo", tuple(collectives), tuple(compute),
                 tuple(sorted(labels, key=lambda span: (span.begin, -span.end))),
                 ends=steps * (seconds + pause))


def alone(seconds: float = 5.0, loading: float = 0.25, steps: int = 1) -> list[Trace]:
    """A single rank with a step of so many seconds, its data loader's included."""
    return run(Rank(compute=((loading, seconds),), loading=((0.0, loading),)), seconds=seconds,
               steps=steps)


Cases = dict[str, tuple[list[Trace], list[Trace]]]


def cases() -> Cases:
    """Name -> (run, alone). In each run no two ranks wait equally long."""
    return {**_collectives(), **_who_waits_most(), **_data_loading(), **_issues_and_pauses()}


def drawn_case(rng: random.Random) -> tuple[list[Trace], list[Trace]]:
    """(run, alone) of drawn moments: ranks that load, compute, and wait for the slowest of them."""
    loading, sending, tail = rng.uniform(0.1, 0.6), rng.uniform(0.5, 2), rng.uniform(0.1, 0.9)
    begins = [rng.uniform(2, 6) for _ in range(rng.randint(2, 4))]
    end = max(begins) + sending
    ranks = [Rank(((begin, end, begin - rng.uniform(0, 1)),),
                  ((loading, begin), (end - rng.uniform(0, 0.4), end + tail)), ((0, loading),))
             for begin in begins]
    return (run(*ranks, seconds=end + tail + rng.uniform(0, 0.5), steps=rng.randint(1, 3),
                pause=rng.uniform(0, 1)),
            alone(rng.uniform(3, 5), rng.uniform(0.1, 0.6)))


def _collectives() -> Cases:
    """Runs in which ranks wait for each other, and communicate, beside computing or not."""
    return {
        # the last begin of the all-reduce is at 6: rank 0 waits for 1 s, then both send for 3 s
        "one all-reduce": (run(
            Rank(((5, 9),), ((0.25, 5), (9, 10)), ((0, 0.25),)),
            Rank(((6, 9),), ((0.25, 6), (9, 10)), ((0, 0.25),))), alone()),
        "hidden communication": (run(
            Rank(((2, 4), (4, 6.5)), ((0, 8.5),)), Rank(((3, 4), (4, 6)), ((0, 9),))),
            alone(loading=0)),
        "rank 0 is slow": (run(
            Rank(((9, 9.5),), ((0, 9), (9.5, 10))), Rank(((4, 9.5),), ((0, 4), (9.5, 10))),
            Rank(((5, 9.5),), ((0, 5), (9.5, 10)))), alone(4.5, 0)),
        "rank 1 of 4 is slow": (run(
            Rank(((3, 9),), ((0.5, 3), (9, 10)), ((0, 0.5),)),
            Rank(((8, 9),), ((0.5, 8), (9, 10)), ((0, 0.5),)),
            Rank(((4, 9),), ((0.5, 4), (9, 10)), ((0, 0.5),)),
            Rank(((3.5, 9),), ((0.5, 3.5), (9, 10)), ((0, 0.5),))), alone(4.0, 0.125)),
        "two collectives at once": (run(
            Rank(((2, 6), (3, 8)), ((0, 2), (8.5, 10))), Rank(((4, 6), (5, 8)), ((0, 4.5), (8, 10))
                                                              )), alone(3, 0)),
        "one waits while another moves": (run(
            Rank(((1, 6), (2, 9)), ((0, 1), (9, 10))), Rank(((3, 6), (7, 9)), ((0, 3), (6, 7))
                                                            )), alone(3, 0)),
    }


def _who_waits_most() -> Cases:
    """Runs in which another rank than the one that waits most begins first or last, is in flight
    longest, has the longest single wait, communicates most or computes least."""
    return {
        # rank 0 begins first, and computes while it waits; rank 1 waits for 3 s, and no other does
        "hidden waiting": (run(
            Rank(((0.5, 3.5), (5.5, 9)), ((0, 3), (3.5, 7.5), (8, 8.5), (9, 10))),
            Rank(((2.5, 3.5), (4.5, 9)), ((0, 2.5), (3, 3.25), (3.5, 4.5), (6, 7), (9, 10))),
            Rank(((3, 3.5), (8, 9)), ((0, 3), (3.5, 8), (9, 10)))), alone(4.5, 0.25)),
        # rank 0 pauses, and then waits for 3 s; rank 1 waits for 2 s and for 1.5 s
        "two short waits and a long one": (run(
            Rank(((4, 4.5), (5.5, 9.5)), ((0, 1), (9.5, 10))),
            Rank(((2, 4.5), (7, 9.5)), ((0, 2), (4.5, 7), (9.5, 10))),
            Rank(((3.75, 4.5), (8.5, 9.5)), ((0, 3.75), (4.5, 8.5), (9.5, 10)))), alone(4, 0.25)),
    }


def _data_loading() -> Cases:
    """Runs in which ranks wait for data, beside computing or a collective, or not."""
    return {
        "a slow data loader": (run(
            Rank(((8, 9.5),), ((4, 8), (9.5, 10)), ((0, 4),)),
            Rank(((8.25, 9.5),), ((4.25, 8.25), (9.5, 10)), ((0, 4.25),))), alone(4.5, 0.25)),
        "a slow data loader on one rank": (run(
            Rank(((9, 9.5),), ((5, 9), (9.5, 10)), ((0, 5),)),
            Rank(((4.25, 9.5),), ((0.25, 4.25), (9.5, 10)), ((0, 0.25),))), alone(4.75, 0.25)),
        "loading under computing": (run(
            Rank(((6, 9),), ((0, 3), (4, 6), (9, 10)), ((1, 4),)),
            Rank(((7, 9),), ((0, 3), (4, 7), (9, 10)), ((1, 4),))), alone(5, 0.5)),
        "loading while a collective is in flight": (run(
            Rank(((2, 7),), ((0, 2), (8, 10)), ((3, 5.5), (7, 7.5))),
            Rank(((2.5, 7),), ((0, 2.5), (7, 10)), ((4, 5),))), alone(4.5, 0)),
    }


def _issues_and_pauses() -> Cases:
    """Runs whose collectives begin long after they are issued, and that pause or have several
    steps."""
    return {
        "issued long before it begins": (run(
            Rank(((5, 9, 0.5), (9, 9.5, 1)), ((0, 5), (9.5, 10))),
            Rank(((7, 9, 6), (9, 9.5, 6.5)), ((0, 7), (9.5, 10)))), alone(5, 0)),
        "begun in another order than issued": (run(
            Rank(((6, 9, 1), (2, 5, 1.5)), ((0, 2), (5, 6))),
            Rank(((7, 9, 1), (3, 5, 1.5)), ((0, 3), (5, 7)))), alone(3, 0)),
        # on two streams: what rank 0 begins first, rank 1 begins last
        "begun in another order on each rank": (run(
            Rank(((1, 8, 0.5), (4, 6, 0.75)), ((0, 1), (8, 10))),
            Rank(((5, 8, 0.5), (2, 6, 0.75)), ((0, 2), (9, 10)))), alone(3, 0)),
        "pauses of the program": (run(
            Rank(((4, 6),), ((0, 2), (3, 4), (7, 8))), Rank(((5, 6),), ((0, 2), (3, 5), (6.5, 8))
                                                            )), alone(5, 0.5)),
        "faster than alone": (run(
            Rank(((2, 9),), ((0, 2), (9, 10))), Rank(((3, 9),), ((0, 3), (9, 10)))),
            alone(5, 0.5)),
        "three steps, and two alone": (run(
            Rank(((5, 9),), ((0.5, 5), (9, 10)), ((0, 0.5),)),
            Rank(((6, 9),), ((0.5, 6), (9, 10)), ((0, 0.5),)),
            Rank(((6.5, 9),), ((0.5, 6.5), (9, 10)), ((0, 0.5),)), steps=3), alone(5, 0.25, 2)),
        "a pause between two steps": (run(
            Rank(((5, 9),), ((0, 5), (9, 10))), Rank(((5.5, 9),), ((0, 5.5), (9, 10))), steps=2,
            pause=3.0), alone(5, 0.25)),
    }
