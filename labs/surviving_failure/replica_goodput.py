"""Exercise 8.12: the goodput of a job of replica groups."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, takewhile

from labs.checks.generator import new_generator
from labs.checks.numbers import (
    Mistake,
    common_cause,
    judge_number,
    require_number,
    require_signature,
)
from labs.checks.verdicts import Wrong, check, shows
from labs.pictures import marks, palette
from labs.pictures.picture import WIDTH, Picture, canvas
from labs.predictions.failures.replica_groups import replica_goodput as right_share
from labs.predictions.failures.simulation import exponential_gaps
from labs.surviving_failure.save_plan import CLUSTERS

ARGUMENTS = ("groups", "failures", "wait", "restart", "end")
DRAWN = 30  # jobs with random numbers


@dataclass(frozen=True)
class Case:
    """The arguments of an answer; what: the job in words."""

    groups: int
    failures: tuple[tuple[float, int], ...]
    wait: float
    restart: float
    end: float
    what: str = "a job"

    @property
    def share(self) -> float:
        return right_share(self.groups, self.failures, self.wait, self.restart, self.end)

    def __str__(self) -> str:
        when = ", ".join(f"group {group} at {time:.4g}" for time, group in self.failures[:4])
        more = ", …" if len(self.failures) > 4 else ""
        failing = f"failures of {when}{more}" if self.failures else "no failure"
        return (f"{self.what}: {self.groups} groups for {self.end:.4g} s, {failing}; wait "
                f"{self.wait:.3g}, restart {self.restart:.3g}")


# The laziest first: each has one thing more that may go wrong, and the message names the first.
JOBS = (
    Case(4, (), 10, 100, 1000, "without a failure"),
    Case(4, ((300, 2),), 10, 100, 1000, "one failure"),
    Case(4, ((300, 2), (600, 0)), 10, 100, 1000, "two failures"),
    Case(1, ((300, 0),), 10, 100, 1000, "one group alone"),
    Case(4, ((300, 2), (350, 0)), 10, 100, 1000, "two groups missing at once"),
    Case(4, ((300, 2), (306, 0)), 10, 100, 1000, "two failures in one wait"),
    Case(4, ((300, 2), (360, 2)), 10, 100, 1000, "a group that fails while it is missing"),
    Case(4, ((950, 3),), 10, 100, 1000, "a group that is missing in the end"),
    Case(2, ((300, 0), (330, 1)), 10, 100, 1000, "all groups missing"),
    Case(4, ((300, 2), (301, 3)), 0, 100, 1000, "no wait"),
    Case(4, ((300, 2),), 50, 20, 1000, "a restart that is shorter than the wait"))


@check("8.12")
def check_replica_goodput(replica_goodput: Callable):
    """replica_goodput(groups, failures, wait, restart, end) -> from 0 to 1; failures: a list of
    (time, group), in the order of time."""
    require_signature(replica_goodput, ARGUMENTS)
    jobs = [*JOBS, *random_cases()]
    answers = [_answer(replica_goodput, job) for job in jobs]
    for at, (job, answer) in enumerate(zip(jobs, answers, strict=True)):
        judge_number(answer, job.share, common_cause(MISTAKES, jobs, answers, at), str(job), "",
                     _HINT, rel_tol=1e-6)
    return (f"{len(jobs)} jobs of 1 to 16 groups: failures one by one, in one wait, in one "
            "restart, and of the same group again")


_HINT = ("Cut the time where anything changes: at 0, at each failure, after its wait and after its "
         "restart, at the end. Between two cuts, count the groups that train.")


def random_cases() -> list[Case]:
    """In whole seconds: sums and differences have no rounding, whichever an answer compares."""
    rng = new_generator()
    jobs = []
    for _ in range(DRAWN):
        groups, number = rng.randrange(1, 17), rng.randrange(1, 25)
        times = sorted(rng.sample(range(1000), number))
        failures = tuple((time, rng.randrange(groups)) for time in times)
        jobs.append(Case(groups, failures, rng.randrange(1, 30), rng.randrange(30, 300), 1000))
    return jobs


def _answer(replica_goodput, job) -> float:
    failures = list(job.failures)
    found = replica_goodput(job.groups, failures, job.wait, job.restart, job.end)
    if failures != list(job.failures):
        raise Wrong("replica_goodput changed its list of failures",
                    "Work on a copy: list(failures).", code="changes_input")
    return require_number(found, str(job))


def _other(*, waits=True, misses=True, by_failures=False, renews=True, clips=True, after=False,
           stops=False):
    """The share with one mistake. waits=False: nobody waits; misses=False: no group is missing;
    by_failures: two failures of a group count twice; renews=False: a second failure of a missing
    group changes nothing; clips=False: what comes after the end counts; after: a group is missing
    from the end of the wait; stops: all groups wait for the restart."""
    def share(job: Case) -> float:
        later, last = (job.wait if after else 0.0), {}
        absences = []
        for time, group in job.failures:
            if not renews and time < last.get(group, -1.0):
                continue
            last[group] = time + later + job.restart
            absences.append((time + later, last[group], group))
        pauses = [(time, time + (job.restart if stops else job.wait)) for time, _ in job.failures]
        absences, pauses = absences if misses else [], pauses if waits else []
        latest = [until for _, until, *_ in [*absences, *pauses]]
        end = job.end if clips else max([job.end, *latest])
        # Between two cuts nothing changes, so each interval has one number of missing groups.
        cuts = sorted({0.0, end, *(at for begin, until, *_ in [*absences, *pauses]
                                   for at in (begin, until) if at < end)})
        lost = 0.0
        for begin, until in zip(cuts, cuts[1:], strict=False):
            missing = [group for left, right, group in absences if left <= begin < right]
            count = len(missing) if by_failures else len(set(missing))
            paused = any(left <= begin < right for left, right in pauses)
            lost += (until - begin) * (1.0 if paused else count / job.groups)
        return 1 - lost / job.end
    return share


def _by_failure(job: Case) -> float:
    return 1 - sum(job.wait + (job.restart - job.wait) / job.groups for _ in job.failures) / job.end


MISTAKES: list[Mistake] = [
    Mistake("failures_cost_nothing", lambda job: 1.0, "failures cost nothing",
            "After each, all wait, and one group is missing."),
    Mistake("lost", lambda job: 1 - job.share, "that is what is lost",
            "Return what is done: 1 − that."),
    Mistake("in_percent", lambda job: 100 * job.share, "that is in percent",
            "Return a share, from 0 to 1."),
    Mistake("seconds", lambda job: job.share * job.end, "those are seconds",
            "Divide by the time from 0 to `end`."),
    Mistake("others_go_on_once", _other(waits=False), "the others continue at once",
            "After a failure nobody trains for `wait`."),
    Mistake("group_back_after_wait", _other(misses=False), "the group is back after the wait",
            "It is missing for `restart`."),
    Mistake("all_groups_wait_for_restart", _other(stops=True), "all groups wait for the restart",
            "Only one is missing; the others train after `wait`."),
    Mistake("restart_begins_after_wait", _other(after=True), "the restart begins after the wait",
            "Both begin at the failure."),
    Mistake("failure_costs_same", _by_failure, "each failure costs the same",
            "They may overlap: two in one wait, two groups missing at once, one that fails "
            "again."),
    Mistake("group_fails_twice_missing_twice", _other(by_failures=True),
            "a group that fails twice is missing twice",
            "It is one group: count groups, not failures."),
    Mistake("group_fails_while_missing_comes", _other(renews=False),
            "a group that fails while it is missing comes back as if it had not",
            "Its restart begins again."),
    Mistake("lost_after_end_counts", _other(clips=False), "what is lost after the end counts",
            "Only the time from 0 to `end` does."),
]
GROUPS = (1, 2, 4, 8, 16, 32, 64)
GPUS = (16_384, 131_072)
WAIT, END = 10.0, 5 * 86_400.0  # seconds


@shows("8.12")
def show_replica_groups(replica_goodput: Callable) -> Picture:
    """Draws the share of its work that a job does in five days, by the student's function, over the
    number of its replica groups. Failures come as often per GPU as in Llama 3's training."""
    llama = CLUSTERS[0]
    figure, ax = canvas(WIDTH, 3.6 + marks.HEADLINE)
    words, drawn = [], {}
    for gpus, colour in zip(GPUS, palette.RUNS[2:], strict=False):
        mean = 3600 * llama.gpu_hours / gpus
        # whole seconds: sums and differences have no rounding, whichever an answer compares
        times = [round(time) for time in takewhile(lambda time: time < END, accumulate(
            exponential_gaps(mean, gpus)))]
        shares = [_share(replica_goodput, groups, times, llama.restart) for groups in GROUPS]
        ax.plot(GROUPS, shares, "o-", color=colour, markersize=5, linewidth=1.4,
                label=f"{gpus:,} GPUs, a failure every {mean / 60:,.0f} min")
        ax.axhline(math.exp(-WAIT / mean), color=colour, linestyle="--", linewidth=1,
                   label=f"its waits of {WAIT:.0f} s alone")
        drawn[gpus] = dict(zip(GROUPS, shares, strict=True))
        words.append(f"{gpus:,} GPUs, {len(times)} failures in five days: {shares[0]:.1%} with one "
                     f"group, " + ", ".join(f"{share:.1%} with {groups}" for groups, share in
                                            list(zip(GROUPS, shares, strict=True))[1:]))
    ax.set_xscale("log", base=2)
    ax.set_xticks(GROUPS, [f"{groups}" for groups in GROUPS])
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    ax.set_ylim(min(0.5, *drawn[GPUS[-1]].values()), 1.02)
    ax.grid(axis="y", color=palette.GRID)
    ax.set_xlabel("replica groups")
    ax.set_ylabel("work that is done")
    most = max(zip(shares, GROUPS, strict=True))
    lesson = (f"{GPUS[-1]:,} GPUs do {shares[0]:.0%} of their work with one replica group, "
              f"{most[0]:.0%} with {most[1]}")
    marks.headline(figure, lesson)
    marks.legend_above(figure, ax.get_legend_handles_labels()[0])
    return Picture(figure, "\n".join([lesson, f"restarts of {llama.restart:.0f} s", *words]),
                   data=drawn)


def _share(replica_goodput, groups, times, restart) -> float:
    """Each failure hits one of the groups, the same ones in every run."""
    rng = random.Random(groups)
    failures = [(time, rng.randrange(groups)) for time in times]
    return require_number(replica_goodput(groups, failures, WAIT, restart, END), f"{groups} groups")
