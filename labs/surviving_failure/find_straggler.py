"""Exercise 8.11: which rank is slow, and why, by the timings of all ranks: synthetic ones, recorded
ones, and the picture of these.

In a synthetic job one rank, its data or the link becomes slow, or nothing does. A rank loads and
computes; then its collectives begin, and end on all ranks at once, when the last rank has come and
the bytes are moved. So all ranks have the same step, no matter which is slow.
"""

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import median

from matplotlib.lines import Line2D

from labs.checks.generator import is_graded, new_generator, unless_graded
from labs.checks.guesses import guessed
from labs.checks.numbers import as_number, require_several, require_signature
from labs.checks.verdicts import Wrong, check, kind_of, shows
from labs.pictures import marks, palette
from labs.pictures.picture import WIDTH, Picture, canvas
from labs.pictures.tables import Table
from labs.surviving_failure.scaffold import StepSeconds
from labs.surviving_failure.slow_ranks import RANKS, RecordedRun, recorded_stragglers

CAUSES = ("compute", "data", "link")
HEALTHY = 10  # steps at the beginning in which no link is slow
LASTS = 5  # steps that a straggler is slow for, at least
LATE = 1.8  # seconds by which an outlier is longer: nine times what a rank computes
Timings = list[list[StepSeconds]]  # [rank][step]
Straggler = tuple[int | None, str, int]  # the rank, the cause, the first slow step


@dataclass(frozen=True)
class Case:
    """A job and what is wrong in it, in seconds.

    straggler: None where nothing is. extra: by how much it makes each step longer. all_slower: from
    this step on all ranks compute half as long again, as with longer sequences. outliers: the rank,
    the cause and the step of single steps that are LATE seconds longer. small_data: a rank whose
    data takes three times as long as that of the others, which is a hundredth of a step. recovers:
    the step from which on the straggler is healthy again.
    """

    ranks: int
    steps: int
    straggler: Straggler | None = None
    extra: float = 0.0
    all_slower: int | None = None
    outliers: tuple[Straggler, ...] = ()
    small_data: int | None = None
    recovers: int | None = None
    noise: float = 0.02
    data: float = 0.002
    compute: float = 0.2
    transfer: float = 0.05

    def timings(self, seed: float) -> Timings:
        """What the ranks measured."""
        rng = random.Random(seed)
        steps = [self._step(step, rng) for step in range(self.steps)]
        return [list(own) for own in zip(*steps, strict=True)]

    def _step(self, step, rng) -> list[StepSeconds]:
        later = {(rank, cause): LATE for rank, cause, at in self.outliers if at == step}
        if self.straggler and self.straggler[2] <= step < (self.recovers or self.steps):
            later[self.straggler[:2]] = self.extra + later.get(self.straggler[:2], 0.0)

        def noisy(seconds):
            return seconds * max(0.5, rng.gauss(1, self.noise))

        own = []
        for each in range(self.ranks):
            data = noisy(self.data * (3 if each == self.small_data else 1))
            compute = noisy(self.compute * (1.5 if self._is_longer(step) else 1))
            own.append(StepSeconds(data + later.get((each, "data"), 0.0),
                                   compute + later.get((each, "compute"), 0.0), 0.0))
        # All ranks leave the collectives together, so the slow rank is in them for the shortest
        # time.
        end = max(each.data + each.compute for each in own)
        end += noisy(self.transfer) + later.get((None, "link"), 0.0)
        return [replace(each, collectives=end - each.data - each.compute) for each in own]

    @property
    def answer(self) -> Straggler | None:
        """What find_straggler must return: a straggler is slow until the end, for LASTS steps at
        least."""
        lasts = self.straggler is not None and self.steps - self.straggler[2] >= LASTS
        return self.straggler if lasts and not self.recovers else None

    def _is_longer(self, step) -> bool:
        return self.all_slower is not None and step >= self.all_slower

    def __str__(self) -> str:
        found = [f"{self.ranks} ranks, {self.steps} steps of {1e3 * self._seconds:.0f} ms"]
        if self.straggler:
            found.append(f"{_who(self.straggler)} by {1e3 * self.extra:.0f} ms from step "
                         f"{self.straggler[2]} on"
                         + (f", until step {self.recovers}" if self.recovers else ""))
        if self.all_slower is not None:
            found.append(f"all ranks compute 1.5 times as long from step {self.all_slower} on")
        if self.outliers:
            found.append(f"{_who(self.outliers[0])} by {LATE} s in step {self.outliers[0][2]}, once"
                         + f", and {len(self.outliers) - 1} more such steps"
                         * (len(self.outliers) > 1))
        if self.small_data is not None:
            found.append(f"rank {self.small_data} takes 6 ms for its data, the others 2 ms")
        return "; ".join(found)

    @property
    def _seconds(self) -> float:
        return self.data + self.compute + self.transfer


def _who(found: Straggler) -> str:
    rank, cause, _ = found
    return {"link": "the link is slower", "compute": f"rank {rank} computes longer",
            "data": f"rank {rank} waits longer for its data"}[cause]


def jobs(rng: random.Random) -> list[Case]:
    """Jobs on every number of ranks from 2 to 16, the laziest answer's first. Which causes, first
    steps and further events come together is not left to the rng: each pair comes in every run."""
    found = [Case(4, 40, (2, "compute", 20), 0.15), Case(4, 40), Case(3, 40, (1, "data", 15), 0.15),
             Case(4, 40, (None, "link", 20), 0.15)]
    for ranks in range(2, 17):
        steps = rng.randrange(40, 61)
        for at, cause in enumerate(CAUSES):
            # On even numbers of ranks it is slow from the first step: only the other ranks show it,
            # no step before. A slow link needs HEALTHY steps, because it is the same for all ranks.
            since = rng.randrange(12, steps - 12) if ranks % 2 or cause == "link" else 0
            # The first and the last rank come often: loops that leave one of them out are found.
            rank = None if cause == "link" else rng.choice((0, ranks - 1, rng.randrange(ranks)))
            job = Case(ranks, steps, (rank, cause, since), rng.uniform(0.1, 0.5))
            found.append(_with_more(job, ranks + at, rng))
        found.append(_with_more(Case(ranks, steps), ranks, rng))
        longer = Case(ranks, steps, all_slower=rng.randrange(12, steps - 12))
        found.append(_with_more(longer, ranks + 1, rng))
    steps = 45
    found.append(Case(5, steps, (3, "compute", 12), 0.2, recovers=25))
    found.append(Case(6, steps, (None, "link", 14), 0.2, recovers=27))
    # slow at the end, for too few steps and for just enough
    for at, cause in enumerate(CAUSES):
        for lasts in (1, 3, LASTS + 1):
            rank = None if cause == "link" else at
            found.append(Case(4 + at, steps, (rank, cause, steps - lasts), 0.3))
    return found


def _with_more(job, kind, rng) -> Case:
    """The job, in two of three kinds with what is no straggler, far from where one begins."""
    if kind % 3 == 1:
        return replace(job, small_data=rng.randrange(job.ranks))
    if kind % 3 == 2:
        return replace(job, outliers=tuple(_outliers(job, rng)))
    return job


def _outliers(job, rng) -> Iterator[Straggler]:
    """Single steps, five at least from each other, from the ends and from where a fault begins.
    The first of them is the straggler's own, and early, so that it looks like the beginning."""
    begins = job.straggler[2] if job.straggler else job.all_slower
    last = rng.randrange(5, 8)
    yield *(job.straggler or _anybody(job, rng))[:2], last
    for step in range(last + 5, job.steps - 5):
        far = begins is None or abs(step - begins) > 4
        if far and step - last > 4 and rng.random() < 0.2:
            last = step
            yield *_anybody(job, rng), step


def _anybody(job, rng) -> tuple[int | None, str]:
    cause = rng.choice(CAUSES)
    return None if cause == "link" else rng.randrange(job.ranks), cause


# Steps that the first slow one may be off by in a recorded run, whose steps vary. In a synthetic
# job it may not be: its noise is a tenth of the minimum that a straggler adds, and single slow
# steps are so far from it that a median of five steps leaves it where it is.
NEAR = 2
_HINTS = {
    "compute": "Who computes longer than the other ranks in the same steps? It waits least; the "
               "others wait for it.",
    "data": "Who takes longer for its data than the others do, by a tenth of a step at least?",
    "link": "Nobody computes or loads longer, and all are in collectives longer than in the first "
            "ten steps. No rank can be named.",
    None: "A straggler makes every step longer by a tenth or more, from some step until the end, "
          "five steps at least. One slow step is none; and if all ranks compute longer alike, the "
          "job has changed."}


@check("8.11")
def check_find_straggler(find_straggler: Callable):
    """find_straggler(timings) -> (rank, cause, first slow step) or None; timings[rank][step]."""
    require_signature(find_straggler, ("timings",))
    rng = new_generator()
    synthetic = jobs(rng)
    for job in synthetic:
        _judge(find_straggler, job.timings(rng.random()), job.answer, str(job), near=0)
    recorded = {name: run for name, run in recorded_stragglers().items() if run.is_clear}
    for name, run in recorded.items():
        _judge(find_straggler, run.timings, run.straggler, f"recorded run {name!r}, {run}",
               near=NEAR)
    return (f"{len(synthetic)} synthetic jobs on 2 to 16 ranks and {len(recorded)} recorded ones: "
            "the rank, the cause and the first slow step")


def _judge(find_straggler, timings: Timings, want: Straggler | None, what: str, near: int):
    # Where points are given, neither the job's description nor the hint says the answer.
    what = "a job" if is_graded() else what
    hint = _HINTS[None if is_graded() or want is None else want[1]]
    given = copy.deepcopy(timings)
    got = _straggler(find_straggler(given), what)
    # Invariant: the caller goes on using its timings.
    if given != timings:
        raise Wrong(f"{what}: find_straggler changed its input `timings`", "Work on a copy.",
                    code="changes_input")
    # Invariants, one after the other: whether there is a straggler, which rank and cause, and since
    # when. Catches the rank that waits longest, which is never the slow one.
    if got is None and want is None:
        return
    if got is None:
        raise Wrong(f"{what}: you say None", hint, code="nothing_returned")
    rank, cause, since = got
    if want is None:
        raise Wrong(f"{what}: you say {_words(got)}, and there is no straggler", hint,
                    code="no_straggler")
    if (rank, cause) != want[:2]:
        raise Wrong(f"{what}: you say {_words(got)}{_evidence(got, want, timings)}",
                    hint, code="wrong_straggler")
    if abs(since - want[2]) > near:
        raise Wrong(f"{what}: {_words(got)} is right, but since step "
                    f"{unless_graded(want[2])}, not {since}",
                    "The first step from which on it stays slow. A single slow step before it is "
                    "none; the median of several steps leaves such a one out.", code="wrong_step")


def _straggler(returned, what) -> Straggler | None:
    if returned is None:
        return None
    rank, cause, since = require_several(returned, ("rank", "cause", "since"),
                                         f"{what}: find_straggler returned",
                                         hint="(rank, cause, first slow step), or None.")
    if cause not in CAUSES:
        raise Wrong(f"{what}: the cause is {cause!r}", f"One of {', '.join(map(repr, CAUSES))}.",
                    code="unknown_name")
    rank, since = (None if rank is None else as_number(rank)), as_number(since)
    if since is None or (rank is None and returned[0] is not None):
        raise Wrong(f"{what}: find_straggler returned {kind_of(returned[0])} and "
                    f"{kind_of(returned[2])} as rank and step", "Both are whole numbers.",
                    code="wrong_type")
    return rank, cause, since


def _words(found: Straggler) -> str:
    rank, cause, _ = found
    return f"{cause!r}" if rank is None else f"rank {rank}, {cause!r}"


def _evidence(got: Straggler, want: Straggler, timings: Timings) -> str:
    """What the timings say of the rank that was blamed."""
    rank, cause, _ = got
    if rank is None or not 0 <= rank < len(timings) or want[1] == "link":
        return ": its own part is as long as that of the others" * (want[1] == "link"
                                                                    and rank is not None)
    slow = [step.collectives for step in timings[want[0]][want[2]:]]
    blamed = [step.collectives for step in timings[rank][want[2]:]]
    if rank != want[0]:
        return (f": it is in collectives for {1e3 * median(blamed):.0f} ms of a step, and rank "
                f"{unless_graded(want[0])} for {1e3 * median(slow):.0f} ms. It waits for that one")
    return f": its {cause} is as long as that of the others"


@shows("8.11")
def show_step_seconds() -> Table:
    """The parts of a step on each rank, while one rank is slow: medians of the last ten steps."""
    rows = []
    for rank, steps in enumerate(recorded_stragglers()["slow rank"].timings):
        parts = [1e3 * median(getattr(step, name) for step in steps[-10:])  # ms
                 for name in ("data", "compute", "collectives")]
        rows.append((f"rank {rank}", *(f"{ms:.0f} ms" for ms in (*parts, sum(parts)))))
    return Table("Medians of ten steps, one rank is slow",
                 ("", ".data", ".compute", ".collectives", "together"), rows)


@shows("8.11")
def show_stragglers(find_straggler: Callable) -> Picture:
    """Draws, for four recorded runs, what each rank needs for its own data and computing and how
    long it is in collectives, and what find_straggler says of them."""
    runs = recorded_stragglers()
    said = {name: find_straggler(run.timings) for name, run in runs.items()}
    guess, (cost, percent) = guessed("8.11"), _cost(runs["slow rank"])
    answer = marks.answered(guess, percent, "%")
    figure, axes = canvas(WIDTH, 4.6 + marks.HEADLINE + marks.NOTE_LINE * bool(answer), nrows=2,
                          ncols=len(runs), sharex=True, sharey=True)
    marks.headline(figure, cost)
    for column, (name, run) in enumerate(runs.items()):
        _draw_run(axes[:, column], run, said[name])
        found = _answer(said[name]).replace(", ", ",\n")
        axes[0, column].set_title(f"{name}:\n{found}", fontsize=9.5, loc="left")
        axes[1, column].set_xlabel("step")
    axes[0, 0].set_ylabel("ms of its own:\ndata, computing")
    axes[1, 0].set_ylabel("ms in collectives")
    marks.note_below(figure, answer)
    marks.legend_above(figure, [Line2D([], [], color=palette.rank(rank), label=f"rank {rank}")
                                for rank in range(RANKS)])
    unclear = [name for name, run in runs.items() if not run.is_clear]
    busy = [f"this machine is busy with something else, which shows in: {', '.join(unclear)}"]
    return Picture(figure, "\n".join([
        cost, *(f"{name}: find_straggler says {_answer(said[name])}" for name in runs),
        *filter(None, [answer]), *busy * bool(unclear)]), data=(runs, guess))


def _draw_run(axes, run, said):
    for rank, own in enumerate(run.timings):
        is_slow = said is not None and said[0] == rank
        style = {"color": palette.rank(rank), "linewidth": 2.4 if is_slow else 1.2}
        axes[0].plot([1e3 * (step.data + step.compute) for step in own], **style)
        axes[1].plot([1e3 * step.collectives for step in own], **style)
    for ax in axes:
        ax.grid(axis="y", color=palette.GRID)
        if said is not None:
            ax.axvline(said[2], color=palette.MUTED, linewidth=1, linestyle=(0, (4, 3)))


def _answer(said) -> str:
    if said is None:
        return "nobody"
    rank, cause, since = said
    return f"{cause}{f' of rank {rank}' if rank is not None else ''}, since step {since}"


def _cost(run: RecordedRun) -> tuple[str, float]:
    """What the slow rank and each step of all ranks take longer; the latter in percent, too."""
    rank, _, since = run.straggler

    def longer(measured) -> tuple[float, float]:
        before = median(map(measured, range(since)))
        return before, median(map(measured, range(since, len(run.timings[0])))) - before

    own = run.timings[rank]
    _, more = longer(lambda step: own[step].data + own[step].compute)
    step, slower = longer(lambda step: median(sum(vars(each[step]).values())
                                              for each in run.timings))
    return (f"One of {RANKS} ranks computes {1e3 * more:.0f} ms more; each step of all takes "
            f"{1e3 * slower:.0f} ms more, {slower / step:.0%}", 100 * slower / step)
