"""A job of replica groups, of which some may be missing while the others train: the share of its
work that is done."""

from collections.abc import Iterable, Sequence

Span = tuple[float, float]


def replica_goodput(groups: int, failures: Sequence[tuple[float, int]], wait: float, restart: float,
               end: float) -> float:
    """The share of the work that is done from 0 to `end`, 1 without failures.

    failures: (time, group). After each, nobody trains for `wait`; the group that failed is missing
    for `restart`, again if it fails again in that time. While n groups train, n/groups of the work
    is done. All times in the same unit.
    """
    changes = []  # (time, how many groups more are missing, how many pauses more)
    for begin, until in _merged((time, time + wait) for time, _ in failures):
        changes += [(begin, 0, 1), (until, 0, -1)]
    for group in {group for _, group in failures}:
        own = ((time, time + restart) for time, failed in failures if failed == group)
        for begin, until in _merged(own):
            changes += [(begin, 1, 0), (until, -1, 0)]
    work, clock, missing, pauses = 0.0, 0.0, 0, 0
    # Between two changes everything is constant: the work of each span is added.
    for time, more_missing, more_pauses in [*sorted(changes), (end, 0, 0)]:
        until = min(time, end)
        work += 0.0 if pauses else (until - clock) * (groups - missing) / groups
        clock, missing, pauses = until, missing + more_missing, pauses + more_pauses
    return work / end


def _merged(spans: Iterable[Span]) -> list[Span]:
    """The same times as spans that do not overlap."""
    found: list[Span] = []
    for begin, until in sorted(spans):
        if found and begin <= found[-1][1]:
            begin, until = found[-1][0], max(until, found.pop()[1])
        found.append((begin, until))
    return found
