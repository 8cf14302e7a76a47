"""What the notebook draws of any function that it runs on ranks: which pieces each rank holds, and
the exit status of each rank."""

from collections.abc import Callable

from labs.checks.guesses import guessed
from labs.checks.verdicts import print_in_script, shows
from labs.pictures import collectives, outcomes
from labs.pictures.collectives import State
from labs.pictures.picture import Picture
from labs.start_here import recorded_collectives
from labs.start_here.return_values import require_world_size
from labs.workers.failures import LaunchError


@shows("Who holds what")
def who_holds_what(collective: Callable, ranks: int, begin: str = "whole",
                   guess: str | None = None) -> Picture:
    """Runs `collective(mine)` on real ranks and draws what each held before, after every
    collective it called, and at the end.

    begin: "whole" (each rank has all pieces) or "shard" (rank r has piece r alone).
    guess: the exercise whose guess, one number, is looked for at the end.
    """
    return _holdings(collective, ranks, begin, guess)


@shows("0.2")
def two_steps(all_reduce: Callable, ranks: int) -> Picture:
    """`who_holds_what` for the student's all-reduce, with what lies between its two calls."""
    return _holdings(all_reduce, ranks)


def diagnose(function: Callable, ranks: int, guess: str | None = None, **options) -> Picture:
    """Launches `function` and draws how each rank ended; what it raises is shown, not raised.

    guess: the exercise whose guess is the rank that the others wait for.
    """
    try:
        results = recorded_collectives.run(function, ranks=ranks, **options)
    except LaunchError as error:
        return print_in_script(outcomes.draw_failure(error, guess and guessed(guess)))
    return print_in_script(outcomes.draw_success(results))


def _holdings(collective, ranks, begin="whole", guess=None) -> Picture:
    require_world_size(ranks)
    recorded = recorded_collectives.run_answer(
        recorded_collectives.record_collectives, collective, begin, ranks=ranks)
    # Those of rank 0: all ranks call the same ones.
    names = recorded[0][0]
    held = [list(moment) for moment in zip(*(moments for _, moments in recorded), strict=True)]
    titles = ["before", *["in between"] * (len(held) - 2), "after"]
    states = list(map(State, titles, held, ["", *(names or ["no collective"])]))
    return collectives.who_holds_what(states, _compared(guess, held[-1]) if guess else "")


def _compared(guess, held) -> str:
    """Which rank holds the number that was guessed."""
    number = guessed(guess)
    if number is None:
        return "no guess yet: put a number in place of ... above"
    ranks = [str(rank) for rank, numbers in enumerate(held) if number in numbers]
    found = f"rank {', '.join(ranks)} holds it" if ranks else "no rank holds it"
    return f"your guess: {collectives.digits(number)}; {found}"
