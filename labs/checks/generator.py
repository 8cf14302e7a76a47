"""The random numbers of checks, and whether a verdict may say the right one."""

import os
import random

from labs.workers import variant

SEED = "WORKBOOK_SEED"  # set by scripts/grade: a secret, the same for all students of a run
GRADED = "WORKBOOK_GRADES"  # set by scripts/grade in the process that judges


def new_generator() -> random.Random:
    """Another generator at every call, so that no table of answers fits; with SEED, the same, and
    another one in each variant."""
    seed = os.environ.get(SEED)
    return random.Random(f"{variant.name()}{seed}" if seed else None)


def is_graded() -> bool:
    """Whether points are given: then no verdict says the right number. Who hands in twice would
    have the answer from the first verdict."""
    return GRADED in os.environ


def unless_graded(answer: object) -> str:
    """The right answer, as a verdict says it; "…" where points are given."""
    return "…" if is_graded() else str(answer)
