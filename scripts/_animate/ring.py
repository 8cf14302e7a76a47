"""All-reduce round a ring: notebook 00's answer on real ranks, each piece seen on its way."""

from collections.abc import Iterator
from dataclasses import asdict

from _build.definitions import definitions

from labs.pictures.collectives import State
from labs.pictures.picture import Picture
from labs.pictures.ring import LESSON, ring_step
from labs.start_here import all_reduce

TITLE = LESSON
STEPS = 7  # drawings of a piece on its way
WAY, HOLD, BEFORE, END = 0.06, 0.72, 1.0, 2.0  # seconds: of one of those, and between steps


def record(ranks: int) -> dict:
    """What each of `ranks` real ranks held before each send, and at the end."""
    states = all_reduce.ring_states(
        definitions("00_start_here", RANKS=ranks).ring_all_reduce, ranks)
    return {"states": [asdict(state) for state in states]}


def frames(recorded: dict) -> Iterator[tuple[Picture, float]]:
    """(picture, seconds) of each frame."""
    states = _states(recorded)
    last = len(states) - 1
    yield ring_step(states, 0, moved=1.0), BEFORE
    for number in range(1, last + 1):
        for along in range(1, STEPS + 1):
            share = along / (STEPS + 1)
            # Slow at both ends, so that the eye finds where a piece comes from and goes to.
            yield ring_step(states, number, moved=share * share * (3 - 2 * share)), WAY
        if number < last:
            yield ring_step(states, number, moved=1.0), HOLD
    yield still(recorded), END


def still(recorded: dict) -> Picture:
    """The last frame: what the ring has done."""
    states = _states(recorded)
    ranks, last = len(states[0].held), len(states) - 1
    return ring_step(states, last, moved=1.0, told=(
        f"Every rank holds every sum. Each rank has sent {last} pieces, each 1/{ranks} of its "
        "tensor."))


def alt(recorded: dict) -> str:
    """What the moving picture shows, for who does not see it."""
    states = _states(recorded)
    ranks = len(states[0].held)
    return (f"A grid of {ranks} ranks and {ranks} pieces. In each of {len(states) - 1} steps every "
            "rank sends one piece to the next rank, the last one to rank 0. In the first "
            f"{ranks - 1}, the reduce-scatter, the receiver adds it to its own; in the last "
            f"{ranks - 1}, the all-gather, it copies it. At the end every rank holds the sum of "
            "every piece over all ranks.")


def _states(recorded):
    return [State(**fields) for fields in recorded["states"]]
