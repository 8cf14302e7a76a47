"""Recordings that can be judged by their seconds: one that the machine disturbed is made again."""

from dataclasses import replace

from labs.exercises.verdicts import shows
from labs.fsdp_profiling import recording
from labs.meters.trace import total_seconds

EVEN, UNEVEN = 2.0, 5.0  # times one rank computes as long as another: by chance; beside a slow one
ALIKE, APART = 0.4, 0.6  # of a step that one rank waits longer than another: likewise
SHORT, LONG = 0.1, 0.5  # of a step that the data loader takes: usually; where it is slow
ROUNDS, FEW = 8, 4  # of recordings: to be judged; to be looked at


class TooBusy(Exception):
    """What a machine that does much else made of the recordings, again and again."""


def record(job_preset, name: str = "healthy", exercise: str = "5.1", **changes):
    """Trains FSDP2 and records one step on every rank; `changes` are fields of `Job`. A Verdict of
    `exercise` where `configure` is not filled in yet."""
    job = recording.Job(job_preset, name, **changes)
    return shows(exercise)(lambda: record_all([job], FEW)[0])()


def record_all(jobs: list, rounds: int = ROUNDS) -> list:
    """The runs of the jobs; those that were disturbed are recorded again, in up to so many rounds
    in all."""
    runs = recording.run_all(jobs)
    for _ in range(rounds - 1):
        again = [number for number, run in enumerate(runs) if disturbed(run)]
        if not again:
            break
        fresh = recording.run_all([jobs[number] for number in again])
        for number, run in zip(again, fresh, strict=True):
            runs[number] = run
    return runs


def disturbed(run) -> str:
    """How a run's seconds contradict what was planted in it, or was not; "" where they do not."""
    slow_rank, slow_data = run.job.fault == "rank", run.job.fault == "data"
    busy, waits = computing(run), waiting(run)
    ratio, apart = max(busy) / max(min(busy), 1e-9), max(waits) - min(waits)
    shares = loading(run)
    if slow_rank and (ratio < UNEVEN or busy.index(max(busy)) != run.job.slow_rank):
        return f"its slow rank computed only {ratio:.1f} times as long as another"
    if not slow_rank and ratio > EVEN:
        return f"one rank computed {ratio:.1f} times as long as another, by chance"
    if apart < APART if slow_rank else apart > ALIKE:
        return f"one rank waited longer than another by {apart:.2f} of the step"
    if min(shares) < LONG if slow_data else max(shares) > SHORT:
        return f"its data loader took {max(shares):.2f} of the step"
    return ""


def computing(run) -> list:
    """Seconds that each rank computed."""
    return [total_seconds(trace.compute) for trace in run]


def waiting(run) -> list:
    """The exposed share of each rank's step."""
    return [trace.seconds_of()["exposed"] / trace.seconds for trace in run]


def loading(run) -> list:
    """The share of each rank's step that its data loader took."""
    return [max(label.seconds for label in trace.labelled("enumerate(DataLoader)")) / trace.seconds
            for trace in run]


def by_chance(run):
    """A copy of a run as chance could have made it, too, so little that it would not be recorded
    again: how long its ranks compute, and its data loaders take, is a tenth away from that."""
    times = 1.1 * UNEVEN if run.job.fault == "rank" else 0.9 * EVEN
    share = 1.1 * LONG if run.job.fault == "data" else 0.9 * SHORT
    busy = computing(run)
    slow = run.job.slow_rank
    longest = min(busy[slow], times * min(busy[:slow] + busy[slow + 1:]))
    return recording.Recorded(
        [_changed(trace, (longest if rank == slow else longest / times) / busy[rank], share)
         for rank, trace in enumerate(run)], run.job)


def _changed(trace, factor, share):
    """The trace with `factor` of its computing; its data loader takes `share` of the step."""
    loader = trace.labelled("enumerate(DataLoader)")[0]
    other = replace(loader, end=loader.begin + share * trace.seconds)
    return replace(
        trace, labels=tuple(other if label == loader else label for label in trace.labels),
        compute=tuple((begin, begin + factor * (end - begin)) for begin, end in trace.compute))
