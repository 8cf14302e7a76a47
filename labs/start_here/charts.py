"""What the notebook draws from real runs: who holds what, the ring, what became of each rank."""

from collections.abc import Callable
from itertools import pairwise

from labs.exercises.guesses import guessed
from labs.exercises.numbers import require_number, require_signature
from labs.exercises.verdicts import print_in_script, shows
from labs.pictures import collectives, outcomes
from labs.pictures.bars import Bar, bars, numbers_before_and_after
from labs.pictures.collectives import State
from labs.pictures.picture import Picture
from labs.start_here import recording, scripts
from labs.start_here.return_values import require_world_size
from labs.workers.failures import LaunchError
from labs.workers.progress import status

MEASURED = (2, 3, 4, 8)  # world sizes in the chart of the ring's bytes
CHART_SIZE = 12_000_000  # bytes: divides by all of them


@shows("Who holds what")
def who_holds_what(collective: Callable, ranks: int, begin: str = "whole",
                   guess: str | None = None) -> Picture:
    """Runs `collective(mine)` on real ranks and draws what each held before, after every
    collective it called, and at the end.

    begin: "whole" (each rank has all pieces) or "shard" (rank r has piece r alone).
    guess: the exercise whose guess, one number, is looked for at the end.
    """
    return _holdings(collective, ranks, begin, guess)


@shows("Ring")
def ring_steps(algorithm: Callable, ranks: int = 4) -> Picture:
    """Runs `algorithm(mine)`, made of sends and receives, and draws every step of it."""
    require_world_size(ranks)
    with recording.where_messages_pass(ranks):
        recorded = recording.run_answer(recording.record_sends, algorithm, ranks=ranks)
    steps = [list(held) for held in zip(*recorded, strict=True)]
    titles = ["before"] + [f"step {number}: {'copy' if _copied(old, new) else 'add'}"
                           for number, (old, new) in enumerate(pairwise(steps), 1)]
    return collectives.ring(list(map(State, titles, steps)))


@shows("0.1")
def before_and_after_mean(mean_over_ranks: Callable, ranks: int) -> Picture:
    """Runs the student's mean on one number per rank and draws each rank's before and after."""
    require_world_size(ranks)
    pairs = recording.run_answer(recording.try_one_number, mean_over_ranks, ranks=ranks)
    return numbers_before_and_after(*map(list, zip(*pairs, strict=True)), guessed("0.1"))


@shows("0.2")
def two_steps(all_reduce: Callable, ranks: int) -> Picture:
    """`who_holds_what` for the student's all-reduce, with what lies between its two calls."""
    return _holdings(all_reduce, ranks)


@shows("0.3")
def ring_traffic(ring_bytes: Callable) -> Picture:
    """Counts what a ring sends on 2, 3, 4 and 8 ranks and draws it with the student's formula,
    and the guess for 4 ranks in MB."""
    require_signature(ring_bytes, ("size", "ranks"))
    rows = []
    for ranks in MEASURED:
        formula = require_number(ring_bytes(CHART_SIZE, ranks), "ring_bytes")
        rows.append(Bar(f"{ranks} ranks", max(recording.counted_bytes(ranks, CHART_SIZE)) / 1e6,
                        formula / 1e6, guessed("0.3") if ranks == 4 else None))
    return bars(rows, unit="MB", title="sent by each rank to all-reduce 12 MB",
                limit=(2 * CHART_SIZE / 1e6, "2 S"))


def diagnose(function: Callable, ranks: int, guess: str | None = None, **options) -> Picture:
    """Launches `function` and draws what became of each rank; what it raises is shown, not raised.

    guess: the exercise whose guess is the rank that the others wait for.
    """
    try:
        results = recording.run(function, ranks=ranks, **options)
    except LaunchError as error:
        return print_in_script(outcomes.draw_failure(error, guess and guessed(guess)))
    return print_in_script(outcomes.draw_success(results))


@shows("Script")
def run_script(script: str, ranks: int = 2) -> scripts.Run:
    """Runs a script as `python script.py RANKS` in a terminal would: what it printed, and its exit
    code."""
    with scripts.written(script) as folder, status(f"{ranks} ranks at work"):
        running = scripts.Running(folder, ranks)
        try:
            return running.finish()
        finally:
            running.kill()


def _holdings(collective, ranks, begin="whole", guess=None) -> Picture:
    require_world_size(ranks)
    recorded = recording.run_answer(recording.record_collectives, collective, begin, ranks=ranks)
    names = recorded[0][0]
    held = [list(moment) for moment in zip(*(moments for _, moments in recorded), strict=True)]
    titles = ["before", *["in between"] * (len(held) - 2), "after"]
    states = list(map(State, titles, held, ["", *(names or ["no collective"])]))
    return collectives.who_holds_what(states, _compared(guess, held[-1]) if guess else "")


def _copied(old, new) -> bool:
    """Whether what arrived took the place of a piece; else it was added to it."""
    return all(number == old[rank - 1][piece] for rank, row in enumerate(new)
               for piece, number in enumerate(row) if number != old[rank][piece])


def _compared(guess, held) -> str:
    """Which rank holds the number that was guessed."""
    number = guessed(guess)
    if number is None:
        return "no guess yet: put a number in place of ... above"
    ranks = [str(rank) for rank, numbers in enumerate(held) if number in numbers]
    found = f"rank {', '.join(ranks)} holds it" if ranks else "no rank holds it"
    return f"your guess: {collectives.digits(number)}; {found}"
