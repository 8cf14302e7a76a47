"""Check of exercise 3.9: which stage to use when."""

import itertools

from labs.exercises.verdicts import Wrong, check
from labs.predictions.memory_recipes import model_states
from labs.training.memory_categories import GB

RECIPE = "bf16, fp32 master"  # K = 12: 16 bytes per parameter, as in the paper
MODELS = {"1.3B": 1.3e9, "7B": 7e9, "13B": 13e9, "70B": 70e9}
CARDS = {"A100-40": 40 * GB, "A100-80": 80 * GB, "H200": 141 * GB}


def states(parameters: float, ranks: int, stage: int) -> float:
    """Bytes of parameters, gradients and optimizer state of one rank, in bf16 with an fp32 master
    copy; stage 0 is DDP."""
    return model_states(parameters, RECIPE, ranks=ranks, stage=stage).total


def right_stage(parameters, ranks, capacity, activations):
    """The lowest stage that fits, None where none does."""
    return next((stage for stage in (0, 1, 2, 3)
                 if states(parameters, ranks, stage) + activations <= capacity), None)


@check("3.9")
def check_choose(choose):
    """choose(parameters, ranks, capacity, activations): the lowest stage that fits, or None."""
    for (model, parameters), ranks, (card, capacity), gigabytes in itertools.product(
            MODELS.items(), (1, 4, 8, 64), CARDS.items(), (1, 12)):
        want = right_stage(parameters, ranks, capacity, gigabytes * GB)
        got = choose(parameters, ranks, capacity, gigabytes * GB)
        if got != want or isinstance(got, bool):
            raise _wrong(f"{model} on {ranks} × {card} with {gigabytes} GB of activations", got,
                         want, parameters, ranks, capacity, gigabytes * GB)
    return f"right in {len(MODELS) * 4 * len(CARDS) * 2} cases, from DDP to 'it does not fit'"


def _wrong(case, got, want, parameters, ranks, capacity, activations) -> Wrong:
    said = "that nothing fits" if got is None else f"stage {got}"
    if got not in (0, 1, 2, 3, None) or isinstance(got, bool):
        return Wrong(f"{case}: choose returned {got!r}", "Return 0, 1, 2, 3 or None.")
    if got is not None and (want is None or got < want):
        takes = states(parameters, ranks, got) + activations
        return Wrong(f"{case}: you say {said}, which takes {takes / GB:.1f} of "
                     f"{capacity / GB:g} GB",
                     "States and activations must fit together; with few ranks a stage saves less "
                     "than its limit.")
    return Wrong(f"{case}: you say {said}; stage {want} fits too and costs less",
                 "Take the lowest stage that fits: stage 3 sends half as much again, and each "
                 "stage is more to go wrong. Capacity counts in bytes, and GB are 1e9.")
