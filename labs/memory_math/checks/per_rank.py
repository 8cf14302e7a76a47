"""Exercise 1.3: bytes of one rank under ZeRO."""

import math
import random

from labs.exercises.numbers import Cause, judge_number, require_numbers, require_signature
from labs.exercises.verdicts import check
from labs.memory_math.checks import STATES, TABLE_HINT
from labs.predictions.memory_recipes import Recipe, model_states
from labs.training.memory_categories import GB


def states_per_rank(count: float, recipe: tuple, stage: int, ranks: int) -> list[float]:
    """Bytes of parameters, gradients and optimizer state on one rank. recipe: bytes per parameter
    of each."""
    held = model_states(count, Recipe("", *recipe), ranks=ranks, stage=stage).by_name()
    return [held[name] for name in STATES]


@check("1.3", hints=TABLE_HINT)
def check_per_rank(per_rank):
    """Three numbers for every stage: the paper's figure 1, 70B on 8 ranks, and random sizes."""
    require_signature(per_rank, ("count", "recipe", "stage", "ranks"))
    for name, count, recipe, ranks in _jobs():
        for stage in (0, 1, 2, 3):
            what = f"{name}, stage {stage}"
            returned = require_numbers(per_rank(count, recipe, stage, ranks), STATES, what)
            real = states_per_rank(count, recipe, stage, ranks)
            totals = f"{_gb(sum(returned))} GB in all, where a rank holds {_gb(sum(real))}"
            for state, got, want, size in zip(STATES, returned, real, recipe, strict=True):
                causes = _causes(want, count * size, ranks, f"missing: {totals}")
                judge_number(got / GB, want / GB, causes, f"{what}: {state}", "GB per rank",
                             "count times bytes; divided by N, or not.")
    return "stages 0 to 3 for the paper's figure 1, for 70B on 8 ranks and for random sizes"


def _jobs() -> list[tuple]:
    """(name, parameters, recipe, ranks)."""
    dice = random.Random()
    recipe, ranks = tuple(dice.sample(range(1, 20), 3)), dice.randint(20, 99)
    count = ranks * dice.randint(10**4, 10**7) + 1  # not divisible, which rejects //
    return [("70B on 8 ranks", 70e9, (2, 2, 8), 8), ("7.5B on 64 ranks", 7.5e9, (2, 2, 12), 64),
            ("a job drawn at random", count, recipe, ranks)]


def _causes(want, whole, ranks, missing) -> list[Cause]:
    """In GB. whole: bytes on all ranks together."""
    rule = "Stage 1 divides the optimizer state alone, 2 the gradients too, 3 the parameters too."
    less, more = math.floor(want) / GB, math.ceil(want) / GB
    rounded = "off by less than a byte", "Divide with /: // drops the rest."
    return [(0, missing, "A rank keeps its share of what is divided: 1/N of it, not nothing."),
            (less, *rounded), (more, *rounded), (whole / GB, "not divided", rule),
            (whole / ranks / GB, "divided, though this stage keeps it whole", rule)]


def _gb(nbytes) -> str:
    return f"{nbytes / GB:,.6g}"
