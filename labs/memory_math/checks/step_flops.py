"""Exercise 1.5: the FLOPs of a step, with and without checkpointing."""

import random

from labs.exercises.verdicts import check
from labs.memory_math import formula_feedback as feedback
from labs.memory_math.formula_feedback import Cause
from labs.memory_math.ground_truth import counted_flops


@check("1.5")
def check_step_flops(step_flops):
    """FLOPs of a step against those that torch counts in a real stack of linear layers."""
    feedback.require_signature(step_flops, ("parameters", "tokens", "checkpointing"))
    dice = random.Random()
    for checkpointing in (False, True):
        # Random widths: the count holds for any matrices, and no constant passes.
        widths = tuple(dice.randint(3, 30) for _ in range(dice.randint(3, 5)))
        tokens = dice.randint(2, 50)
        parameters, counted = counted_flops(widths, tokens, checkpointing)
        what = (f"{parameters} parameters, {tokens} tokens, "
                f"{'with' if checkpointing else 'without'} checkpointing")
        feedback.require_value(step_flops(parameters, tokens, checkpointing), counted, what,
                               "FLOPs", _causes(parameters * tokens, counted, checkpointing),
                               "2 per parameter and token in forward, twice that in backward.",
                               source="torch counts")
    return "the FLOPs that torch counts in real layers: 6 per parameter and token, 8 if recomputed"


def _causes(once, counted, checkpointing) -> list[Cause]:
    """once: one multiplication for each parameter and token."""
    wrong = {
        2: ("that is forward alone", "Backward makes two products where forward makes one."),
        4: ("that is backward alone" if checkpointing else "forward and backward count as much",
            "Backward makes two products for each one of forward: for the layer's input and for "
            "its weight."),
        6: ("nothing is computed again", "Checkpointing runs forward a second time."),
        7.98: ("a third more is 4/3, not 1.33", "Forward twice and backward: 2 + 2 + 4."),
        8: ("forward runs twice, though nothing is dropped here",
            "Recompute only where `checkpointing` is True."),
        12: ("the whole step is done twice", "Only forward runs again, not backward."),
        10: ("backward is computed again", "Only forward runs again."),
        counted / once / 2: ("a multiplication and an addition are two operations",
                             "2 per parameter.")}
    return [Cause.returning(factor * once, counted, *words) for factor, words in wrong.items()]
