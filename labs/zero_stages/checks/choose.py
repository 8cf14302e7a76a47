"""Exercise 3.9: which stage to use when."""

import itertools
from collections.abc import Callable

from labs.exercises.numbers import as_number
from labs.exercises.verdicts import Wrong, check
from labs.predictions import hardware
from labs.training.memory_categories import GB
from labs.zero_stages.scaffold.sizes import state_bytes

MODELS = {"1.3B": 1.3e9, "7B": 7e9, "13B": 13e9, "70B": 70e9}  # parameters
GPUS = ("A100-40", "A100-80", "H200")
RANKS = (1, 4, 8, 64)
# With few and with many GB: no stage divides activations, so the many decide on many ranks, too.
ACTIVATIONS = (1 * GB, 12 * GB, 36 * GB)


def lowest_stage(parameters: float, ranks: int, capacity: float, activations: float) -> int | None:
    """The lowest stage whose states and activations (bytes) fit, None if none does."""
    return next((stage for stage in (0, 1, 2, 3)
                 if state_bytes(parameters, ranks, stage) + activations <= capacity), None)


@check("3.9")
def check_choose(choose: Callable):
    """choose(parameters, ranks, capacity, activations): the lowest stage that fits, or None."""
    cases = list(itertools.product(MODELS, RANKS, GPUS, ACTIVATIONS))
    for model, ranks, gpu, activations in cases:
        case = MODELS[model], ranks, hardware.gpu(gpu).usable, activations
        name = f"{model} on {ranks} × {gpu} with {activations / GB:g} GB of activations"
        returned, want = choose(*case), lowest_stage(*case)
        got = None if returned is None else as_number(returned)
        if returned is not None and got not in (0, 1, 2, 3):
            raise Wrong(f"{name}: choose returned {returned!r}",
                        "Return one number, 0, 1, 2 or 3, or None.")
        if got != want:
            raise _wrong(name, got, want, *case)
    return f"right in {len(cases)} cases, from DDP to 'it does not fit'"


def _wrong(name, got, want, parameters, ranks, capacity, activations) -> Wrong:
    answer = "that nothing fits" if got is None else f"stage {got:g}"
    # Too low a stage runs out of memory: limits for N → ∞, or activations forgotten.
    if got is not None and (want is None or got < want):
        needed = state_bytes(parameters, ranks, got) + activations
        return Wrong(f"{name}: you say {answer}, which takes {needed / GB:.1f} of "
                     f"{capacity / GB:.1f} GB",
                     "States and activations must fit together, and no stage divides activations; "
                     "with few ranks a stage saves less than its limit.")
    # Too high a stage sends more than it must.
    return Wrong(f"{name}: you say {answer}; stage {want} fits too and costs less",
                 "Take the lowest stage that fits: stage 3 sends half as much again, and each "
                 "stage has more that can go wrong. Capacity counts in bytes, and GB are 1e9.")
