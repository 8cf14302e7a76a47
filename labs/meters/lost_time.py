"""Where the time of a step goes, and what it loses against one rank alone.

Each moment of a rank's step counts once, in the first of these that it fits:
1. computing: a moment of `Trace.compute`;
2. data loading: inside a label of torch's DataLoader;
3. communication: a collective is in flight that has begun on all ranks;
4. waiting: a collective is in flight that has not yet begun on the last rank;
5. computing again: nothing of these, which is Python, or a device without work.

A collective begins on a rank when it begins to run there (`Collective.begin`). The call would be
too early: on a GPU the program runs ahead of the kernels. What computing or loading hides counts as
neither communication nor waiting. The efficiencies of the POP project (pop-coe.eu) divide a run in
a similar way: into load balance (waiting), transfer (communication) and computation scaling.
"""

from collections.abc import Sequence

from labs.meters.trace import Trace, subtract, total_seconds, union

PARTS = ("communication", "waiting", "data loading", "computing")
LOADER = "enumerate(DataLoader)"


def parts_of_step(run: Sequence[Trace], rank: int) -> dict[str, float]:
    """Returns the seconds of each of PARTS in one step of a rank, the mean over its recorded steps.

    run: one trace per rank, on one time axis (`labs.meters.trace_clock`).
    """
    trace = run[rank]
    loading, in_flight = union(trace.labelled(LOADER)), union(trace.collectives)
    busy = union([*loading, *trace.compute])
    moving = union((last, one.end) for one, last in
                   zip(trace.collectives, last_begins(run), strict=True))
    seconds = {"communication": total_seconds(subtract(moving, busy)),
               "waiting": total_seconds(subtract(subtract(in_flight, moving), busy)),
               "data loading": total_seconds(subtract(loading, trace.compute))}
    seconds["computing"] = trace.seconds - sum(seconds.values())
    return {part: of_all / max(1, len(trace.steps)) for part, of_all in seconds.items()}


def last_begins(run: Sequence[Trace]) -> list[float]:
    """Returns for each collective, in the order of issue, which is the same on all ranks, when it
    began on the last rank."""
    return [max(one.begin for one in same)
            for same in zip(*(trace.collectives for trace in run), strict=True)]


def lost_seconds(run: Sequence[Trace], alone: Sequence[Trace]) -> dict[str, float]:
    """Returns the seconds of each of PARTS that a step loses against that of a single rank with the
    same share of the work: together what the step takes longer. Below 0: gained.

    Of the rank that waits most: what another rank takes longer for shows there as waiting.
    """
    parts = [parts_of_step(run, rank) for rank in range(len(run))]
    most = max(parts, key=lambda part: part["waiting"])
    single = parts_of_step(alone, 0)
    return {part: most[part] - single[part] for part in PARTS}
