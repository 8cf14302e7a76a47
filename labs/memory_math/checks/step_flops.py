"""Exercise 1.5: the FLOPs of a step, with and without checkpointing."""

import random

from labs.exercises.numbers import Cause, judge_number, require_signature
from labs.exercises.verdicts import check
from labs.memory_math.ground_truth import counted_flops


@check("1.5")
def check_step_flops(step_flops):
    """FLOPs of a step against those that torch counts in a real stack of linear layers."""
    require_signature(step_flops, ("parameters", "tokens", "checkpointing"))
    dice = random.Random()
    for checkpointing in (False, True):
        # Random widths: the count holds for any matrices, and no constant passes.
        widths = tuple(dice.randint(3, 30) for _ in range(dice.randint(3, 5)))
        tokens = dice.randint(2, 50)
        parameters, counted = counted_flops(widths, tokens, checkpointing)
        what = (f"{parameters} parameters, {tokens} tokens, "
                f"{'with' if checkpointing else 'without'} checkpointing")
        judge_number(step_flops(parameters, tokens, checkpointing), counted,
                     _causes(parameters * tokens, counted, checkpointing), what, "FLOPs",
                     "2 per parameter and token in forward, twice that in backward.",
                     source="torch counts")
    return "the FLOPs that torch counts in real layers: 6 per parameter and token, 8 if recomputed"


def _causes(once, counted, checkpointing) -> list[Cause]:
    """once: one multiplication for each parameter and token."""
    return [
        (2 * once, "that is forward alone",
         "Backward makes two products where forward makes one."),
        (4 * once, "that is backward alone" if checkpointing else
         "forward and backward count as much", "Backward makes two products for each one of "
         "forward: for the layer's input and for its weight."),
        (6 * once, "nothing is computed again", "Checkpointing runs forward a second time."),
        (7.98 * once, "a third more is 4/3, not 1.33", "Forward twice and backward: 2 + 2 + 4."),
        (8 * once, "forward runs twice, though nothing is dropped here",
         "Recompute only where `checkpointing` is True."),
        (12 * once, "the whole step is done twice", "Only forward runs again, not backward."),
        (10 * once, "backward is computed again", "Only forward runs again."),
        (counted / 2, "a multiplication and an addition are two operations", "2 per parameter.")]
