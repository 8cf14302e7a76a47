"""Exercise 8.7: the wall time of a job that fails and saves, event by event."""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from labs.checks.generator import new_generator
from labs.checks.numbers import (
    Mistake,
    common_cause,
    judge_number,
    require_number,
    require_signature,
)
from labs.checks.verdicts import Wrong, check
from labs.predictions.failures.simulation import exponential_gaps, simulate

ARGUMENTS = ("work", "interval", "save", "restart", "gaps")
DRAWN = 40  # jobs with random numbers
MAX_GAPS_READ = 10_000  # gaps that an answer may read of a list that does not end


@dataclass(frozen=True)
class Case:
    """The arguments of an answer, all in minutes; gaps: those that a failure ends, the list's end
    is the last failure. what: the job in words."""

    work: float
    interval: float
    save: float
    restart: float
    gaps: tuple[float, ...]
    what: str = ""

    @property
    def wall(self) -> float:
        """Minutes from the first start to the end of the last save."""
        return simulate(self.work, self.interval, self.save, self.restart, self.gaps).wall

    def __str__(self) -> str:
        ends = itertools.accumulate(self.gaps)
        when = ", ".join(f"{end:,.4g}" for end in itertools.islice(ends, 5))
        more = len(self.gaps) > 5 and ", …" or ""
        failing = f"failures after {when}{more} minutes" if self.gaps else "no failure"
        return (f"{self.what or 'a job'}: {self.work:,.4g} minutes of work, saved for "
                f"{self.save:.3g} after every {self.interval:.3g}, restart {self.restart:.3g}, "
                f"{failing}")


# The laziest first: each has one thing more that may go wrong, and the message names the first.
JOBS = (
    Case(60, 20, 2, 5, (), "without a failure"),
    Case(50, 20, 2, 5, (), "a last piece of 10 minutes"),
    Case(60, 20, 2, 5, (30,), "a failure while it computes"),
    Case(60, 20, 2, 5, (43.5,), "a failure during a save"),
    Case(60, 20, 2, 5, (30, 3), "a failure during a restart"),
    Case(60, 20, 2, 5, (30, 26, 100), "two failures in one piece"),
    Case(60, 20, 2, 5, (10, 2, 2, 2), "restarts that fail again and again"),
    Case(7, 20, 2, 5, (8,), "a job shorter than an interval"),
    Case(30, 10, 0, 4, (25,), "saves that take no time"),
    Case(30, 10, 3, 0, (20,), "restarts that take no time"),
    Case(60, 20, 2, 5, (500, 1), "a failure after the end"))


@check("8.7")
def check_wall_time(wall_time: Callable):
    """wall_time(work, interval, save, restart, gaps) -> minutes; gaps may be any iterable, also one
    that never ends."""
    require_signature(wall_time, ARGUMENTS)
    jobs = [*JOBS, *random_cases()]
    answers = [_answer(wall_time, job, at) for at, job in enumerate(jobs)]
    for at, (job, answer) in enumerate(zip(jobs, answers, strict=True)):
        judge_number(answer, job.wall, common_cause(MISTAKES, jobs, answers, at), str(job),
                     "minutes", _HINT, rel_tol=1e-6)
    _judge_long(wall_time)
    return (f"{len(jobs)} jobs to the minute, with failures while it computes, saves and restarts, "
            "and one of 3,000 failures")


_HINT = ("Follow the clock: what comes next, the end of this restart, piece and save, or the "
         "failure? Then continue from there.")


def random_cases() -> list[Case]:
    rng = new_generator()
    jobs = []
    for _ in range(DRAWN):
        interval, save, restart = (rng.uniform(*span) for span in ((10, 60), (1, 9), (2, 15)))
        work, mean = interval * rng.uniform(1.2, 12), rng.uniform(0.5, 3) * interval
        gaps = tuple(itertools.islice(exponential_gaps(mean, rng.random()), rng.randrange(1, 12)))
        jobs.append(Case(work, interval, save, restart, gaps))
    return jobs


def _answer(wall_time, job, at) -> float:
    """What the answer returns. Every second job's gaps do not end: after its own come such that no
    job of these lasts until then."""
    # An iterator, because failures have no last one: list(gaps) or sum(gaps) would never end.
    gaps = _Gaps(itertools.chain(job.gaps, itertools.repeat(1e9)), str(job)) if at % 2 else job.gaps
    return require_number(wall_time(job.work, job.interval, job.save, job.restart, gaps), str(job))


class _Gaps:
    """Gaps that do not end, and that may be read once."""

    def __init__(self, gaps: Iterator[float], what: str):
        self._gaps, self._left, self._what = gaps, MAX_GAPS_READ, what

    def __iter__(self):
        return self

    def __next__(self) -> float:
        self._left -= 1
        if not self._left:
            raise Wrong(f"{self._what}: it read {MAX_GAPS_READ:,} gaps of a list that does not end",
                        "Draw a gap when the one before it is over: next(gaps, math.inf).",
                        code="endless_list")
        return next(self._gaps)


def _judge_long(wall_time):
    """With thousands of failures, rounding and recursion show."""
    gaps = tuple(itertools.islice(exponential_gaps(100, 7), 3000))
    job = Case(150_000, 30, 2, 5, gaps, "a long job")
    judge_number(_answer(wall_time, job, 0), job.wall, [], str(job), "minutes", _HINT, rel_tol=1e-6)


def _other(*, during_restart=True, undone_save=True, restarts=True, lost=True, half=False,
           last_save=True, forgets=False, whole_last=False, first_start=False, keeps=False,
           from_restart=False):
    """The wall time of a job by a simulation with one mistake.

    during_restart=False: no failure then; undone_save=False: a piece counts once it is computed;
    restarts=False: no restart takes time; lost=False: nothing is computed again; half: a failure
    costs half an interval; last_save=False: the end is not saved; forgets: the time to the next
    failure starts again with each piece; whole_last: the last piece is as long as the others;
    first_start: the first start takes a restart; keeps: a failure loses nothing but its save;
    from_restart: a gap begins when the restart has ended.
    """
    def wall(job: Case) -> float:
        gaps, clock, done, starts = iter(job.gaps), 0.0, 0.0, first_start
        # gap: minutes from one failure to the next; left: what is left of them.
        gap = left = next(gaps, math.inf)
        while done < job.work - 1e-9:
            piece = job.interval if whole_last else min(job.interval, job.work - done)
            waiting = job.restart if starts and restarts else 0.0
            is_last = done + piece >= job.work - 1e-9
            # A failure counts if it comes before restart, piece and save have all ended.
            save = job.save if last_save or not is_last else 0.0
            if not during_restart and left < waiting:
                left = waiting
            if left >= waiting + piece + save:
                left = gap if forgets else left - waiting - piece - save
                clock, done, starts = clock + waiting + piece + save, done + piece, False
                continue
            computed = min(piece, max(0.0, left - waiting))
            if half:
                clock += min(left, waiting) + (job.interval / 2 if left > waiting else 0.0)
            elif lost:
                clock += left
            if keeps or (not undone_save and computed == piece):
                done += computed
            gap = left = next(gaps, math.inf) + (job.restart if from_restart else 0.0)
            starts = True
        return clock
    return wall


MISTAKES: list[Mistake] = [
    Mistake("work_alone", lambda job: job.work, "that is the work alone",
            "Saves, restarts and lost work come to it."),
    Mistake("failures_cost_nothing",
            lambda job: job.work + math.ceil(job.work / job.interval) * job.save,
            "failures cost nothing", "Each loses what was computed since the last finished save."),
    Mistake("last_piece_not_saved", _other(last_save=False), "the last piece is not saved",
            "The job ends when its last piece is saved."),
    Mistake("last_piece_long_others", _other(whole_last=True),
            "the last piece is as long as the others",
            "The last piece is what is left of the work."),
    Mistake("restarts_take_no_time", _other(restarts=False), "restarts take no time",
            "After each failure comes a restart."),
    Mistake("first_start_takes_restart", _other(first_start=True),
            "the first start takes a restart, too", "Only a failure is followed by a restart."),
    Mistake("failure_undoes_takes_no_time", _other(lost=False),
            "what a failure undoes takes no time", "The clock stands where the failure came."),
    Mistake("failure_costs_half_interval", _other(half=True), "each failure costs half an interval",
            "That is a mean. Here it is known when the failure comes."),
    Mistake("piece_counts_although_failure_came", _other(undone_save=False),
            "a piece counts although a failure came before its save had ended",
            "Only a finished save can be loaded."),
    Mistake("computed_before_failure_kept", _other(keeps=True),
            "what was computed before a failure is kept",
            "What was computed since the last finished save is lost."),
    Mistake("no_failure_comes_during_restart", _other(during_restart=False),
            "no failure comes during a restart",
            "A restart may fail as well; then another begins."),
    Mistake("time_next_failure_begins_when", _other(from_restart=True),
            "the time to the next failure begins when the restart has ended",
            "A gap runs from one failure to the next; the restart is a part of it."),
    Mistake("time_next_failure_starts_anew", _other(forgets=True),
            "the time to the next failure starts again with each piece",
            "A gap runs from one failure to the next, over all pieces between them."),
]
