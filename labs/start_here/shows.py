"""What the notebook draws from real runs: who holds what, the ring, what became of each rank."""

import functools

from labs.exercises import guesses, verdicts
from labs.exercises.verdicts import Verdict, Wrong
from labs.pictures import collectives, outcomes
from labs.pictures.measured import Bar, bars, numbers_before_and_after
from labs.start_here import answers, ring
from labs.start_here import ranks as on
from labs.start_here.checks import takes_size_and_ranks
from labs.workers.failures import LaunchError

MEASURED = (2, 3, 4, 8)  # world sizes in the chart of the ring's bytes
CHART_SIZE = 12_000_000  # bytes: divides by all of them


class NotDrawn(Verdict):
    """Why a picture that belongs to no exercise was not drawn; `exercise` is its name."""

    def __str__(self):
        return super().__str__().replace("Exercise ", "", 1)

    __repr__ = __str__

    def _repr_html_(self):
        return super()._repr_html_().replace("Exercise ", "", 1)


def _refuses(show):
    """A picture that says what was wrong with what it was given."""
    @functools.wraps(show)
    def refusing(*arguments, **options):
        try:
            return show(*arguments, **options)
        except Wrong as wrong:
            return verdicts.print_in_script(
                NotDrawn(show.__name__, False, wrong.sentence, wrong.hint))

    return refusing


@_refuses
def who_holds_what(collective, ranks: int, begin: str = "whole", guess: str = None):
    """Runs `collective(mine)` on real ranks and draws what each held before, after every
    collective it called, and at the end.

    begin: "whole" (each rank has all pieces) or "shard" (rank r has piece r alone).
    guess: name of a guess of one number, to be looked for at the end.
    """
    return _who_holds_what(collective, ranks, begin, guess)


def _who_holds_what(collective, ranks, begin="whole", guess=None):
    answers.must_be_ranks(ranks)
    seen = on.run_answer(on.watch_collective, collective, begin, ranks=ranks)
    names, states = seen[0][0], list(zip(*(states for _, states in seen), strict=True))
    titles = ["before", *["in between"] * (len(states) - 2), "after"]
    drawn = [collectives.State(title, list(held), arrow)
             for title, held, arrow in zip(titles, states, ["", *(names or ["no collective"])],
                                            strict=False)]
    return collectives.who_holds_what(drawn, _compared(guess, drawn[-1].held))


@_refuses
def ring_steps(algorithm, ranks: int = 4):
    """Runs `algorithm(mine)`, made of sends and receives, and draws every step of it."""
    answers.must_be_ranks(ranks)
    states = ring.watch(algorithm, ranks)
    titles = [f"step {number}: {_deed(old, new)}" for number, (old, new)
              in enumerate(zip(states, states[1:], strict=False), 1)]
    return collectives.ring([collectives.State(title, held) for title, held
                             in zip(["before", *titles], states, strict=True)])


@verdicts.shows("0.1")
def before_and_after_mean(mean_over_ranks, ranks: int, guess: str = None):
    """Runs the student's mean on one number per rank and draws each rank's before and after."""
    answers.must_be_ranks(ranks)
    seen = on.run_answer(on.try_one_number, mean_over_ranks, ranks=ranks)
    return numbers_before_and_after([before for before, _ in seen], [after for _, after in seen],
                            guesses.guessed(guess))


@verdicts.shows("0.2")
def two_steps(all_reduce, ranks: int):
    """`who_holds_what` for the student's all-reduce, with what lies between its two calls."""
    return _who_holds_what(all_reduce, ranks)


@verdicts.shows("0.3")
def ring_traffic(ring_bytes, guess: str = None):
    """Counts what a ring sends on 2, 3, 4 and 8 ranks and draws it with the student's formula,
    and the guess for 4 ranks in MB."""
    takes_size_and_ranks(ring_bytes)
    said = {ranks: ring_bytes(CHART_SIZE, ranks) for ranks in MEASURED}
    for number in said.values():
        answers.must_be_bytes(number)
    rows = [Bar(f"{ranks} ranks", max(ring.counted_bytes(ranks, CHART_SIZE)) / 1e6,
                said[ranks] / 1e6, guesses.guessed(guess) if ranks == 4 else None)
            for ranks in MEASURED]
    return bars(rows, unit="MB", title="sent by each rank to all-reduce 12 MB",
                limit=(2 * CHART_SIZE / 1e6, "2 S"))


def diagnose(function, ranks: int, guess: str = None, **options):
    """Launches `function` and draws what became of each rank; what it raises is shown, not raised.

    guess: name of a guess of the rank that the others wait for.
    """
    try:
        results = on.run(function, ranks=ranks, **options)
    except LaunchError as error:
        return outcomes.picture(error, guesses.guessed(guess))
    return outcomes.all_is_well(results)


def _deed(old, new) -> str:
    """Whether what arrived from the left neighbour was added to a piece or took its place."""
    copied = all(number == old[rank - 1][piece] for rank, row in enumerate(new)
                 for piece, number in enumerate(row) if number != old[rank][piece])
    return "copy" if copied else "add"


def _compared(guess, held) -> str:
    """Which rank holds the number that was guessed."""
    if guess is None:
        return ""
    number = guesses.guessed(guess)
    if number is None:
        return f"no guess yet: {guess}"
    ranks = [str(rank) for rank, numbers in enumerate(held) if number in numbers]
    found = f"rank {', '.join(ranks)} holds it" if ranks else "no rank holds it"
    return f"your guess, {guess}: {collectives.digits(number)}; {found}"
