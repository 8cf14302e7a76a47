"""Exercise 1.10: the fewest ranks on which one rank has room for its model states under ZeRO."""

import math

from labs.checks.generator import new_generator, unless_graded
from labs.checks.numbers import Cause, as_number, judge_number, require_signature
from labs.checks.verdicts import Wrong, check, kind_of
from labs.memory_math.scaffold import TABLE_HINT


@check("1.10", hints=TABLE_HINT)
def check_fewest_ranks(fewest_ranks):
    """The fewest ranks whose shards fit, or None where no number of ranks is enough."""
    require_signature(fewest_ranks, ("count", "recipe", "stage", "room"))
    for name, count, recipe, room in _rooms():
        for stage in (0, 1, 2, 3):
            _judge_fewest(fewest_ranks(count, recipe, stage, room), count, recipe, stage, room,
                          name)
    return ("ZeRO-2 never brings 70B below 140 GB, ZeRO-3 needs 11 ranks of 80 GB; right for "
            "random sizes, too")


def _rooms() -> list[tuple]:
    """(name, parameters, recipe, bytes of room on a rank). In the second, the shards fill
    the room exactly; in the third, what is not sharded does."""
    rng = new_generator()
    recipe = tuple(rng.sample(range(1, 20), 3))
    return [("70B, 80 GB of room", 70e9, (2, 2, 8), 80e9),
            ("1B, 5 GB of room", 10**9, (2, 2, 12), 5 * 10**9),
            ("2B, 4 GB of room", 2 * 10**9, (2, 2, 8), 4 * 10**9),
            ("10B, 170 GB of room", 10**10, (2, 2, 12), 170 * 10**9),
            ("a random job", rng.randint(10**9, 10**11), recipe,
             rng.randint(10**9, 10**12))]


def sharded_sizes(recipe: tuple, stage: int) -> list[float]:
    """Bytes per parameter of what a stage shards among the ranks."""
    return [size for size, first in zip(recipe, (3, 2, 1), strict=True) if stage >= first]


def fewest(count: int, recipe: tuple, stage: int, room: float) -> int | None:
    """The fewest ranks on which the states of one take at most `room` bytes; None if no number
    does."""
    sharded = count * sum(sharded_sizes(recipe, stage))
    # Bytes of the room that are left for a rank's shards.
    left = room - (count * sum(recipe) - sharded)
    # The room must hold what the stage does not shard, and a part of what it shards.
    if left < 0 or (sharded and not left):
        return None
    return max(1, math.ceil(sharded / left)) if sharded else 1


def _judge_fewest(got, count, recipe, stage, room, name):
    what = f"{name}, stage {stage}: fewest ranks"
    right = fewest(count, recipe, stage, room)
    # Where the unsharded part fills the room, more ranks do not help: catches a formula
    # that shards everything, and one that returns a negative number.
    if right is None:
        if got is not None:
            raise Wrong(f"{what}: it returned {_said(got)}, but on any number of ranks a rank "
                        "holds more than that", "What the stage does not shard stays on every "
                        "rank. Return None where it fills the room.", code="impossible_room")
        return
    if got is None:
        raise Wrong(f"{what}: it returned None, but {unless_graded(right)} ranks are enough",
                    "`at most` the room: equal counts as fitting.", code="nothing_returned")
    # Bytes of the states on all ranks together.
    whole = count * sum(recipe)
    left = room - whole + sum(sharded_sizes(recipe, stage)) * count
    causes = [Cause("one_rank_too_few", right - 1,
                    "on so many ranks the states take more than the room",
                    "Round up: a part of a rank is a rank."),
              Cause("equal_does_not_fit", right + 1,
                    f"{unless_graded(right)} are enough, they take at most the room",
                    "Equal fits."),
              Cause("everything_divided", math.ceil(whole / room),
                    "as if the stage sharded everything",
                    "First subtract what every rank replicates."),
              Cause("everything_divided", whole / room,
                    "as if the stage sharded everything", "Ranks are whole numbers: round up."),
              Cause("undivided_part_twice", math.ceil(whole / left) if left else 0,
                    "what every rank replicates is counted twice",
                    "Divide only what the stage shards.")]
    judge_number(got, right, causes, what,
                 hint="What a rank replicates, and its shard of the rest.")


def _said(got) -> str:
    number = as_number(got)
    return kind_of(got) if number is None else f"{number:,.6g}"
