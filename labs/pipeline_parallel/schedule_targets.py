"""Judges a schedule by what it achieves: whether it is legal, its slots and its peak of
activations; never by its order, of which several are equally good."""

from collections.abc import Callable, Sequence

from labs.checks.generator import is_graded, new_generator
from labs.checks.verdicts import Wrong, kind_of
from labs.predictions.pipelines.formulas import Kind
from labs.predictions.pipelines.legality import require_legal
from labs.predictions.pipelines.schedule import IllegalSchedule, Schedule
from labs.predictions.pipelines.simulate import Timeline, Times, simulate
from labs.words import counted

# (ranks, micro-batches): that of the pictures first; fewer micro-batches than ranks, one rank, one
# micro-batch, numbers that do not divide each other.
SIZES = ((4, 8), (2, 4), (3, 5), (4, 2), (5, 3), (1, 3), (2, 1), (1, 1), (6, 16), (8, 8))
DRAWN = 6  # sizes that differ at each call
ORDER_HINT = ("A rank runs its list from left to right and waits where something is missing. "
              "Follow one micro-batch: F from rank 0 to the last rank, then B back to rank 0.")


def legal_schedule(returned, ranks: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """What a student returned, as a schedule; raises Wrong where it is none, or illegal."""
    if not isinstance(returned, list | tuple):
        raise Wrong(f"a schedule is a list with one list of actions for each rank, not "
                    f"{kind_of(returned)}", code="wrong_type")
    if len(returned) != ranks:
        raise Wrong(f"there are {counted(len(returned), 'list')} for {counted(ranks, 'rank')}",
                    "Return one list of actions for each rank: schedule[rank] is that of a rank.",
                    code="wrong_count")
    try:
        schedule = Schedule.from_lists(returned, micro_batches, chunks)
    except IllegalSchedule as error:
        raise Wrong(str(error), code=error.code) from None
    try:
        return require_legal(schedule)
    except IllegalSchedule as error:
        raise Wrong(str(error), ORDER_HINT, code=error.code) from None


def drawn_sizes(are_interleaved: bool = False) -> list[tuple[int, ...]]:
    """Sizes that no table of schedules lists: (ranks, micro-batches), and for an interleaved
    schedule chunks too, with micro-batches that are a multiple of the ranks."""
    rng, found = new_generator(), []
    while len(found) < DRAWN:
        ranks = rng.randint(2, 9)
        found.append((ranks, ranks * rng.randint(1, 4), rng.randint(2, 5)) if are_interleaved
                     else (ranks, rng.randint(1, 40)))
    return found


def judge_targets(function: Callable, kind: Kind, sizes: Sequence[tuple], slots_hint: str,
                  peak_hint: str, cause: Callable[[Schedule, Schedule], Wrong | None] | None = None,
                  ) -> str:
    """Compares what `function(*size)` returns, for each size, with the slots and the peak of the
    known schedule, and then for drawn ones; returns the sentence on a right answer. Raises Wrong.
    cause: of a schedule with too many slots and the known one, what makes it longer; None where it
    finds nothing."""
    first, tried = None, [*sizes, *drawn_sizes(len(sizes[0]) == 3)]
    for size in tried:
        where = _where(*size)
        try:
            schedule = legal_schedule(function(*size), *size)
        except Wrong as error:
            raise error.said_of(where) from None
        timeline = simulate(schedule)  # a slot here is what a chunk's F takes, so that all is whole
        _judge_slots(schedule, timeline, kind, size, where, slots_hint, cause)
        _judge_peak(timeline, kind, size, where, peak_hint)
        first = first or (where, timeline)
    where, timeline = first
    chunks = (*sizes[0], 1)[2]
    return (f"legal for {len(tried)} sizes, also with one rank and one micro-batch; {where}: "
            f"{_slots(timeline.makespan, chunks)}, a bubble of {timeline.bubble():.1%}, at most "
            f"{_held(max(timeline.peaks()), chunks)} in flight on a rank")


def _judge_slots(schedule, timeline: Timeline, kind, size, where, hint, cause=None):
    """The step must not be longer than the known schedule's: catches ranks that wait for each
    other, the laziest of them one after the other."""
    ranks, micro_batches, chunks = (*size, 1)[:3]
    enough = kind.length(ranks, micro_batches, chunks, Times(chunks, chunks, chunks))
    # At most, not exactly: any order that is as short is right.
    if timeline.makespan <= enough:
        return
    idle = [timeline.makespan - _busy(spans) for spans in timeline.spans]
    worst = max(range(ranks), key=idle.__getitem__)
    # Where points are given, the right number is not said.
    enough = "fewer" if is_graded() else f"{enough / chunks:g}"
    length = (f"{where}: the step takes {_slots(timeline.makespan, chunks)}, and {enough} are "
              "enough")
    text = f"{length}; rank {worst} is idle for {idle[worst] / chunks:g}"
    if ranks > 1 and sum(map(_busy, timeline.spans)) == timeline.makespan:
        raise Wrong(f"{text}, because only one rank ever computes at a time",
                    "While a later rank works on micro-batch 0, rank 0 can begin micro-batch 1.",
                    code="one_rank_at_a_time")
    if kind.name.startswith("ZB") and not any(action.kind == "W" for action in schedule.everything):
        raise Wrong(f"{text}; there is no W in any list, so each B computes both gradients",
                    "Write B(i) for the gradient of the input and, later, W(i) for that of the "
                    "weights.", code="backward_not_split")
    if cause and (found := cause(schedule, kind.build(ranks, micro_batches, chunks))):
        raise found.said_of(length)
    raise Wrong(text + _longest_wait(schedule, timeline.spans[worst], chunks), hint,
                code="too_many_slots")


def _judge_peak(timeline: Timeline, kind, size, where, hint):
    """No rank may hold more than the known schedule's highest rank: all GPUs have one size. Catches
    forwards that run far ahead of their backwards."""
    ranks, micro_batches, chunks = (*size, 1)[:3]
    # The highest of all ranks, not each rank's own: a schedule may distribute the same peak
    # otherwise.
    enough = max(kind.peak(ranks, micro_batches, chunks, rank) for rank in range(ranks))
    for rank, peak in enumerate(timeline.peaks()):
        if peak > enough:
            enough = "fewer" if is_graded() else f"{enough / chunks:g}"
            raise Wrong(f"{where}: rank {rank} has the activations of {_held(peak, chunks)} in "
                        f"flight at its peak, and {enough} are enough for a step of as many slots",
                        hint, code="too_many_in_flight")


def _longest_wait(schedule, spans, chunks) -> str:
    """Before which of a rank's actions it waits longest, and how long; nothing if it never does."""
    ends = [0.0, *(span.end for span in spans)]
    wait, index = max((span.begin - end, -index) for index, (span, end) in
                      enumerate(zip(spans, ends, strict=False)))
    name = schedule.name(spans[-index].action)
    return f", longest before {name}, {_slots(wait, chunks)}" if wait else ""


def _where(ranks, micro_batches, chunks=None) -> str:
    text = f"{counted(ranks, 'rank')}, {micro_batches} micro-batch{'es' * (micro_batches != 1)}"
    return text if chunks is None else f"{text}, {counted(chunks, 'chunk')} a rank"


def _slots(length, chunks) -> str:
    return _counted(length / chunks, "slot", "slots")


def _held(peak, chunks) -> str:
    return _counted(peak / chunks, "micro-batch", "micro-batches")


def _counted(number: float, one: str, more: str) -> str:
    return f"{number:g} {one if number == 1 else more}"


def _busy(spans) -> float:
    return sum(span.duration for span in spans)

