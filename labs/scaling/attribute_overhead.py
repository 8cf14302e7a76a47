"""Exercise 6.4: the parts of a step, and its overhead against one rank alone."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import fmean

from labs.checks.generator import new_generator
from labs.checks.numbers import Cause, judge_number, require_named, require_signature
from labs.checks.verdicts import check
from labs.meters import lost_time
from labs.meters.lost_time import LOADER, PARTS, last_begins, lost_seconds
from labs.meters.trace import Trace, subtract, total_seconds, union
from labs.scaling import lost_time_runs, lost_time_traces
from labs.workers import devices

_HINTS = {
    "cannot unpack non-iterable": "lab.total_seconds and lab.subtract take intervals: lab.union "
                                  "makes them from spans.",
    "list index out of range": "Is it the run `alone`? It has one trace, that of rank 0.",
    "zip() argument": "Every rank has the same collectives: zip the traces' collectives.",
    "must be real number, not": "Both functions return a dictionary of numbers."}
_RULE = {
    "communication": "Inside a collective that all ranks have entered, while nothing computes "
                     "or loads.",
    "waiting": "Inside a collective that some rank has not entered yet, while nothing computes, "
               "loads or communicates.",
    "data loading": "Inside the data loader's spans, where the rank does not compute.",
    "computing": "What is left of the step when the other three are subtracted."}
Run = Sequence[Trace]


@check("6.4", device=None, hints=_HINTS)
def check_attribute_overhead(parts_of_step: Callable, attribute_overhead: Callable):
    """parts_of_step(run, rank): part -> seconds of a rank's step. attribute_overhead(run, alone):
    part -> seconds that a step loses against one rank alone."""
    require_signature(parts_of_step, ("run", "rank"))
    require_signature(attribute_overhead, ("run", "alone"))
    known, rng = lost_time_traces.cases(), new_generator()
    cases = known | {f"of drawn moments, {number}": lost_time_traces.drawn_case(rng)
                     for number in (1, 2)}
    for name, (run, alone) in cases.items():
        for rank in range(len(run)):
            _judge_parts(parts_of_step, run, rank, f"trace {name!r}, rank {rank}")
        _judge_parts(parts_of_step, alone, 0, f"trace {name!r}, the rank alone")
    for name, (run, alone) in cases.items():
        _judge_lost(attribute_overhead, run, alone, f"run {name!r}")
        # Invariant: no rank is special; the last one may as well be the first.
        backwards = [replace(trace, rank=number) for number, trace in enumerate(reversed(run))]
        _judge_lost(attribute_overhead, backwards, alone, f"run {name!r}, ranks reversed")
    recorded = recorded_runs(devices.gpus())
    for name, run in recorded.items():
        for rank in range(len(run)):
            _judge_parts(parts_of_step, run, rank, f"recorded run {name!r}, rank {rank}", 1e-6)
        _judge_lost(attribute_overhead, run, recorded.alone, f"recorded run {name!r}", 1e-6)
    return (f"the parts add up on {len(cases)} synthetic runs of 2, 3 and 4 ranks and on "
            f"{len(recorded)} recorded just now")


@functools.cache
def recorded_runs(gpus: int) -> lost_time_runs.RunsOnRanks:
    """Returns two runs recorded once in a process. gpus: that are used; another choice of the
    device is another recording."""
    return lost_time_runs.record_once(lost_time_runs.preset_for_checks(),
                                      ("slow link", "slow rank"))


def _judge_parts(parts_of_step, run, rank, what, abs_tol=1e-9) -> None:
    got = require_named(parts_of_step(list(run), rank), PARTS, f"{what}: parts_of_step")
    want = lost_time.parts_of_step(run, rank)
    for part in PARTS:
        # Invariants: a part is the time in which nothing before it in the list takes place; what
        # is hidden costs nothing, and no moment counts twice, nor for two parts.
        judge_number(got[part], want[part], _causes_of_part(part, run, rank, want),
                     f"{what}: {part}", "s", _RULE[part], rel_tol=1e-6, abs_tol=abs_tol)


def _judge_lost(attribute_overhead, run, alone, what, abs_tol=1e-9) -> None:
    got = require_named(attribute_overhead(list(run), list(alone)), PARTS,
                        f"{what}: attribute_overhead")
    want = lost_seconds(run, alone)
    # Invariant: together the parts are what a step takes longer, a gain included.
    judge_number(sum(got.values()), sum(want.values()), _causes_of_sum(run, alone),
                 f"{what}: the sum of the parts", "s", "They add up to a step of the rank that "
                 "waits most, less that of the rank alone.", rel_tol=1e-6, abs_tol=4 * abs_tol)
    for part in PARTS:
        # Invariant: of the rank that waits most, because what another one is slower by shows there
        # as waiting; less the same part of the rank alone.
        judge_number(got[part], want[part], _causes_of_loss(part, run, alone),
                     f"{what}: {part}", "s", "Take the parts of the rank that waits most, and "
                     "subtract those of the rank alone.", rel_tol=1e-6, abs_tol=abs_tol)


class _Variants:
    """The intervals of a rank's step with one thing or another done differently."""

    def __init__(self, run, rank):
        self.trace, self.steps = run[rank], max(1, len(run[rank].steps))
        # Collectives are matched by their order of issue. Nothing is communicated before the last
        # rank has begun one: until then the others wait.
        self.last = last_begins(run)
        self.loading = union(self.trace.labelled(LOADER))
        self.busy = union([*self.loading, *self.trace.compute])
        self.in_flight = union(self.trace.collectives)
        self.moving = self._moving(self.last)
        # Where a collective begins by mistake: at the last call, the first begin, the mean of the
        # begins.
        self.issued = self._moving([max(one.issued for one in same) for same in
                                    zip(*(each.collectives for each in run), strict=True)])
        self.first = self._moving([min(one.begin for one in same) for same in
                                   zip(*(each.collectives for each in run), strict=True)])
        self.mean = self._moving([fmean(one.begin for one in same) for same in
                                  zip(*(each.collectives for each in run), strict=True)])

    def _moving(self, begins) -> list:
        return union((max(begin, one.begin), one.end) for one, begin in
                     zip(self.trace.collectives, begins, strict=True))

    def exposed(self, intervals, busy=None) -> float:
        return total_seconds(subtract(intervals, self.busy if busy is None else busy)) / self.steps

    def waiting(self, moving) -> float:
        return self.exposed(subtract(self.in_flight, moving))

    def before(self) -> float:
        """Of all collectives that wait, whatever else moves."""
        return self.exposed(union((one.begin, last) for one, last in
                                  zip(self.trace.collectives, self.last, strict=True)))

    def each(self, begins_at_last: bool) -> float:
        """The seconds of collectives, in which one moment counts as often as there are some."""
        spans = zip(self.trace.collectives, self.last, strict=True)
        return sum(self.exposed([(last, one.end) if begins_at_last else (one.begin, last)])
                   for one, last in spans)


def _causes_of_part(part, run, rank, want) -> Iterator[Cause]:
    """What mistakes lead to; nothing is computed before the first is asked for."""
    causes = {"communication": _of_communication, "waiting": _of_waiting,
              "data loading": _of_loading, "computing": _of_computing}[part]
    found = [*causes(_Variants(run, rank), want),
             Cause("all_recorded_steps_together", want[part] * max(1, len(run[rank].steps)),
                   "that is of all recorded steps together", "Divide by len(trace.steps)."),
             Cause("in_milliseconds", 1e3 * want[part], "that is in milliseconds",
                   "Return seconds.")]
    yield from (cause for cause in found if cause.number and cause.number != want[part])


def _of_communication(rank, want) -> list[Cause]:
    return [
        Cause("counts_waiting_for_last_rank", rank.exposed(rank.in_flight),
              "that counts waiting for the last rank as communication",
              "A collective communicates from when it has begun on all ranks."),
        Cause("counts_computing_loading_hides", rank.exposed(rank.moving, []),
              "that counts what computing or loading hides",
              "Subtract the intervals in which the rank computes or loads."),
        Cause("all_time_in_flight", rank.exposed(rank.in_flight, []),
              "that is all of the time in flight", "Subtract the intervals in which the rank "
              "computes or loads, and begin when all ranks have begun."),
        Cause("overlaps_counted_twice", rank.each(True),
              "that counts a moment twice where two collectives are in flight",
              "Unite the intervals first: lab.union."),
        Cause("counts_loading_hides", rank.exposed(rank.moving, rank.trace.compute),
              "that counts what loading hides",
              "A moment inside the data loader's label is data loading."),
        Cause("begins_when_last_rank_called", rank.exposed(rank.issued),
              "that begins when the last rank has called",
              "After its call a collective may wait in a queue: take `begin`."),
        Cause("begins_first_rank", rank.exposed(rank.first), "that begins with the first rank",
              "Nothing can arrive before the last rank has begun: max, not min."),
        Cause("begins_ranks_mean", rank.exposed(rank.mean), "that begins at the ranks' mean",
              "The slowest rank decides: max, not the mean."),
        Cause("leaves_out_moves_while_another",
              want["communication"] - (rank.before() - want["waiting"]),
              "that leaves out what moves while another collective waits",
              "Such a moment is communication: subtract what moves from what waits, not the other "
              "way round.")]


def _of_waiting(rank, want) -> list[Cause]:
    return [
        Cause("communication", rank.exposed(rank.in_flight), "that is communication, too",
              "Waiting ends when the last rank has begun."),
        Cause("counts_waiting_communication", rank.before(),
              "that counts as waiting what is communication of another collective",
              "While any collective moves, a moment is communication."),
        Cause("overlaps_counted_twice", rank.each(False),
              "that counts a moment twice where two collectives wait",
              "Unite the intervals first: lab.union."),
        Cause("counts_computing_loading_hides",
              rank.exposed(subtract(rank.in_flight, rank.moving), []),
              "that counts what computing or loading hides",
              "Subtract the intervals in which the rank computes or loads."),
        Cause("counts_loading_hides",
              rank.exposed(subtract(rank.in_flight, rank.moving), rank.trace.compute),
              "that counts what loading hides",
              "A moment inside the data loader's label is data loading."),
        Cause("ends_when_last_rank_called", rank.waiting(rank.issued),
              "that ends when the last rank has called",
              "After its call a collective may wait in a queue: take `begin`."),
        Cause("ends_first_rank", rank.waiting(rank.first), "that ends with the first rank",
              "It waits for the last one: max, not min."),
        Cause("ends_ranks_mean", rank.waiting(rank.mean), "that ends at the ranks' mean",
              "The slowest rank decides: max, not the mean.")]


def _of_loading(rank, want) -> list[Cause]:
    after = total_seconds(subtract(subtract(rank.loading, rank.trace.compute), rank.in_flight))
    return [
        Cause("counts_computing_hides", rank.exposed(rank.loading, []),
              "that counts what computing hides",
              "Subtract the intervals in which the rank computes."),
        Cause("leaves_out_loading_while", after / rank.steps,
              "that leaves out loading while a collective is in flight",
              "Loading comes before communication and waiting."),
        Cause("takes_other_labels",
              sum(label.seconds for label in rank.trace.labels if not label.name.startswith(
                  ("labs::step", "enumerate"))) / rank.steps, "that takes other labels",
              "Those that begin with enumerate(DataLoader) are the data loader's.")]


def _of_computing(rank, want) -> list[Cause]:
    return [
        Cause("leaves_out_pauses_between", total_seconds(rank.trace.compute) / rank.steps,
              "that leaves out the pauses between operations, so the parts do not add up to the "
              "step", _RULE["computing"]),
        Cause("counts_data_loading_again", want["computing"] + want["data loading"],
              "that counts data loading again", _RULE["computing"]),
        Cause("counts_waiting_again", want["computing"] + want["waiting"],
              "that counts waiting again", _RULE["computing"]),
        Cause("counts_communication_again", want["computing"] + want["communication"],
              "that counts communication again", _RULE["computing"]),
        Cause("step", rank.trace.seconds / rank.steps, "that is the whole step",
              _RULE["computing"]),
        Cause("counts_pause_between_two_steps",
              rank.trace.ends / rank.steps - sum(want.values()) + want["computing"],
              "that counts the pause between two steps", "trace.seconds is of the steps alone.")]


def _causes_of_sum(run, alone) -> Iterator[Cause]:
    """What mistakes lead to."""
    parts = [lost_time.parts_of_step(run, rank) for rank in range(len(run))]
    single, lost = lost_time.parts_of_step(alone, 0), lost_seconds(run, alone)
    step, whole = (sum(one.values()) for one in (parts[0], single))
    yield Cause("step_itself", step, "that is the step itself",
                "Subtract what the rank alone takes, part by part.")
    yield Cause("upside_down", -sum(lost.values()), "that is upside down",
                "What is lost is above 0.")
    if min(lost.values()) < 0:
        hint = "A part may be below 0: the sum is right only with it."
        yield Cause("hides_something_gained", sum(max(each, 0.0) for each in lost.values()),
                    "that hides that something is gained", hint)
        yield Cause("gain_for_loss", sum(map(abs, lost.values())),
                    "that takes a gain for a loss", hint)
    yield Cause("sum_ranks", sum(sum(one.values()) for one in parts) - whole,
                "that is the sum of the ranks", "They work at the same time.")
    yield Cause("takes_largest_part",
                sum(max(one[part] for one in parts) for part in PARTS) - whole,
                "that takes the largest of each part, from different ranks",
                "The parts add up only within one rank.")


def _causes_of_loss(part, run, alone) -> Iterator[Cause]:
    """What mistakes lead to."""
    parts = [lost_time.parts_of_step(run, rank) for rank in range(len(run))]
    single = lost_time.parts_of_step(alone, 0)[part]
    least = min(parts, key=lambda one: one["waiting"])
    yield Cause("mean_ranks", fmean(one[part] for one in parts) - single,
                "that is the mean of the ranks", "In the mean, one slow rank is slower computing "
                "as well as waiting. Take the rank that waits most.")
    waits = [one["waiting"] for one in parts]
    most = max(waits)
    for rank, one in enumerate(parts):
        who = "the last rank" if rank == len(parts) - 1 else f"rank {rank}"
        yield Cause("wrong_rank", one[part] - single,
                    f"that is of {who}, which waits {waits[rank]:.4g} s in a step; "
                    f"rank {waits.index(most)} waits {most:.4g} s", "Which rank's parts have the "
                    "most \"waiting\"? What computing hides is not waiting.")
    yield Cause("rank_waits_least", least[part] - single, "that is of the rank that waits least",
                "What the slow rank takes longer for shows on the others.")
