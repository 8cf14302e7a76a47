"""Exercise 6.10: the seconds of a step from its parts, with overlap."""

from collections.abc import Callable
from statistics import fmean

from labs.checks.generator import new_generator
from labs.checks.inputs import UnchangedInputs
from labs.checks.numbers import (
    Mistake,
    as_number,
    common_cause,
    judge_number,
    require_number,
    require_signature,
)
from labs.checks.verdicts import check
from labs.predictions.step_time import StepParts, load_published_runs
from labs.predictions.step_time.fit import held_out
from labs.predictions.step_time.parts import Collectives

PUBLISHED = ("mosaic-010", "mosaic-038", "titan-8b-cp4", "korth-530B-sel")
BOUND = 6  # percent of mean error; 4 to 5 are left where overlap is modelled
OVERLAPPED = 0.1  # of the step in which computing could hide communication: only there it shows


def right(parts: StepParts) -> float:
    """Seconds: all computing, and of each communication what nothing hides."""
    return _computing(parts) + sum(
        sent.seconds - hidden(sent) + parts.interference * hidden(sent)
        for sent in parts.communication.values())


def hidden(sent: Collectives) -> float:
    """Seconds in which the communication and computing beside it both run."""
    return min(sent.seconds, sent.beside)


def _computing(parts) -> float:
    return sum(parts.computing.values())


def _all(parts) -> float:
    return sum(sent.seconds for sent in parts.communication.values())


def _all_hidden(parts) -> float:
    return sum(map(hidden, parts.communication.values()))


def _pooled(parts, beside) -> float:
    """All communication together against so many seconds."""
    # A mistake: a collective without anything beside it cannot hide behind computing that is
    # elsewhere.
    together = min(_all(parts), beside)
    return _computing(parts) + _all(parts) - together + parts.interference * together


def _each(exposed) -> Callable[[StepParts], float]:
    """Computing, and for each communication what exposed(seconds, beside, interference) says."""
    return lambda parts: _computing(parts) + sum(
        exposed(sent.seconds, sent.beside, parts.interference)
        for sent in parts.communication.values())


_EACH = "Each communication hides only behind its own `beside`: compare them one by one."
_LONGER = "Its first `beside` seconds are hidden, and of these the share `interference` comes back."
_BOTH = "Interference is a share of the seconds in which both run: min(seconds, beside)."
MISTAKES: list[Mistake] = [
    Mistake("communication_missing", _computing, "communication is missing",
            "What computing does not hide lengthens the step."),
    Mistake("nothing_hidden", lambda parts: _computing(parts) + _all(parts), "nothing is hidden",
            "While `beside` seconds are computed, a collective costs only what it lasts longer."),
    Mistake("interference_missing",
            lambda parts: right(parts) - parts.interference * _all_hidden(parts),
            "interference is missing",
            "A share of the hidden seconds comes back: both use the GPU."),
    Mistake("nothing_hidden",
            lambda parts: _computing(parts) + (1 + parts.interference) * _all(parts),
            "nothing is hidden, and interference comes on top",
            "While `beside` seconds are computed, a collective costs only what it lasts longer."),
    Mistake("only_interference_counted",
            lambda parts: _computing(parts) + parts.interference * _all(parts),
            "only interference is counted", "Seconds longer than `beside` count in full."),
    Mistake("interference_counted_for_exposed",
            lambda parts: right(parts) + parts.interference * (_all(parts) - _all_hidden(parts)),
            "interference is counted for exposed seconds too",
            "Where nothing is computed, nothing is disturbed."),
    Mistake("interference_share_exposed_seconds",
            _each(lambda seconds, beside, share: (1 + share) * max(0, seconds - beside)),
            "interference is a share of the exposed seconds, not of the hidden ones", _BOTH),
    Mistake("share_stays_hidden_counted",
            lambda parts: right(parts) + (1 - 2 * parts.interference) * _all_hidden(parts),
            "the fraction of the overlap that stays hidden is counted, not the one that is lost",
            "interference is the share that comes back."),
    Mistake("interference_share_beside", lambda parts: right(parts) + parts.interference * sum(
                sent.beside - hidden(sent) for sent in parts.communication.values()),
            "interference is a share of `beside`",
            "Only seconds in which both run are disturbed: the shorter of the two."),
    Mistake("interference_shortens_beside",
            _each(lambda seconds, beside, share: max(0, seconds - (1 - share) * beside)),
            "interference shortens `beside`, so that nothing comes back where a collective is "
            "shorter", _BOTH),
    Mistake("nothing_hidden_collective_longer",
            _each(lambda seconds, beside, share: share * seconds if seconds < beside else seconds),
            "nothing is hidden of a collective that is longer than `beside`", _LONGER),
    Mistake("interference_missing_where",
            _each(lambda seconds, beside, share: share * seconds if seconds < beside
                else seconds - beside),
            "interference is missing where a collective is longer than `beside`", _LONGER),
    Mistake("interference_missing_where", _each(lambda seconds, beside, share: 0 if seconds < beside
                else seconds - beside + share * beside),
            "interference is missing where a collective is shorter than `beside`", _BOTH),
    Mistake("exposed_seconds_below_0_where", _each(lambda seconds, beside, share: seconds - beside),
            "exposed seconds are below 0 where a collective is shorter than what hides it",
            "At least 0: max(0, seconds - beside)."),
    Mistake("exposed_seconds_below_0_where",
            _each(lambda seconds, beside, share: seconds - beside + share * min(seconds, beside)),
            "exposed seconds are below 0 where a collective is shorter than what hides it",
            "At least 0: max(0, seconds - beside)."),
    Mistake("seconds_exposed_where_collective",
            _each(lambda seconds, beside, share:
                  abs(seconds - beside) + share * min(seconds, beside)),
            "seconds are exposed where a collective is shorter than what hides it",
            "There nothing is exposed: max(0, seconds - beside)."),
    Mistake("all_communication_hides_behind_all", lambda parts: max(_computing(parts), _all(parts)),
            "all communication hides behind all computing", _EACH),
    Mistake("all_communication_hides_behind_all", lambda parts: _pooled(parts, _computing(parts)),
            "all communication hides behind all computing", _EACH),
    Mistake("all_communication_hides_behind_sum",
            lambda parts: _pooled(parts, sum(sent.beside for sent in parts.communication.values())),
            "all communication hides behind the sum of all `beside`", _EACH),
    Mistake("memory_traffic_missing",
            lambda parts: right(parts) - parts.computing["memory traffic"],
            "memory traffic is missing",
            "Norms and activations run between the products, not beside them: add it."),
    Mistake("smallest_part_computing_missing",
            lambda parts: right(parts) - min(parts.computing.values()),
            "the smallest part of computing is missing", "Add up all values of parts.computing."),
    Mistake("attention_missing", lambda parts: right(parts) - parts.computing["attention"],
            "attention is missing", "Add up all values of parts.computing."),
    Mistake("parts_computing_run_same_time",
            lambda parts: right(parts) - _computing(parts) + max(parts.computing.values()),
            "the parts of computing run at the same time",
            "Attention waits for the products and the norms for both: add them up."),
    Mistake("in_milliseconds", lambda parts: 1e3 * right(parts), "that is in milliseconds",
            "Return seconds."),
    Mistake("computing_missing", lambda parts: right(parts) - _computing(parts),
            "computing is missing", "The step computes, too."),
]


@check("6.10")
def check_step_seconds(step_seconds):
    """Seconds of synthetic steps in which every mistake shows, and of published runs."""
    require_signature(step_seconds, ("parts",))
    cases = {**synthetic(), **published()}
    kept = UnchangedInputs("step_seconds", parts=[vars(parts) for parts in cases.values()])
    answers = [step_seconds(parts) for parts in cases.values()]
    kept.judge()
    numbers = list(map(as_number, answers))
    for at, (name, parts) in enumerate(cases.items()):
        judge_number(answers[at], right(parts),
                     common_cause(MISTAKES, list(cases.values()), numbers, at),
                     f"{name}: the step", "s", "Computing, then each communication by itself.")
    every, overlapped, number = _mean_errors(step_seconds)
    return (f"right for {len(synthetic())} synthetic steps, with and without interference, and for "
            f"{len(PUBLISHED)} published runs; against all published seconds the mean error is "
            f"{every:.1f} %, and {overlapped:.1f} % on the {number} runs in which computing could "
            f"hide over {OVERLAPPED:.0%} of the step (target: at most {BOUND} %)")


def _mean_errors(step_seconds) -> tuple[float, float, int]:
    """Percent of the published seconds, of all runs and of those whose communication computing
    could hide for over OVERLAPPED of the step; the number of these."""
    # Constants that were fitted without the run itself, or the error would be too small.
    constants, errors = held_out(), []
    for row in load_published_runs():
        if row.run:
            parts = StepParts.of(row.run, constants[row.id])
            share = _all_hidden(parts) / row.seconds
            # The target is on runs where overlap matters: elsewhere even a model without it is
            # near.
            errors.append((share, 100 * abs(
                require_number(step_seconds(parts), row.id) / row.seconds - 1)))
    overlapped = [error for share, error in errors if share > OVERLAPPED]
    return fmean(error for _, error in errors), fmean(overlapped), len(overlapped)


def synthetic() -> dict[str, StepParts]:
    """One thing at a time, then all of them, then sizes drawn at random."""
    rng = new_generator()
    computing = {"products": 3.0, "attention": 1.0, "memory traffic": 0.5}
    cases = {
        "one GPU": StepParts(computing, {}, 0.7),
        "a collective that computing hides": StepParts(computing, {
            "gathered": Collectives(1.0, 4.5)}, 0.0),
        "hidden, with interference 0.7": StepParts(computing, {
            "gathered": Collectives(1.0, 4.5)}, 0.7),
        "a collective beside which nothing is computed": StepParts(computing, {
            "embedding": Collectives(1.0, 0.0)}, 0.7),
        "one longer than what hides it": StepParts(computing, {
            "reduced": Collectives(2.0, 0.75)}, 0.2),
        "a network that takes longer than all computing": StepParts(computing, {
            "reduced": Collectives(9.0, 3.0)}, 0.2),
        "a hidden and an exposed one": StepParts(computing, {
            "gathered": Collectives(1.0, 3.0), "embedding": Collectives(0.5, 0.0)}, 0.0)}
    for number in range(3):
        sent = {f"collective {n}": Collectives(rng.uniform(0.1, 3), rng.uniform(0, 3))
                for n in range(1, rng.randint(3, 5))}
        cases[f"random step {number + 1}"] = StepParts(
            {name: rng.uniform(0.5, 5) for name in computing}, sent, rng.uniform(0.1, 0.9))
    return cases


def published() -> dict[str, StepParts]:
    """The parts of four published runs, with constants that were fitted without them."""
    constants = held_out()
    return {row.id: StepParts.of(row.run, constants[row.id]) for row in load_published_runs()
            if row.id in PUBLISHED}
