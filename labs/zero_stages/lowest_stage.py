"""Exercise 3.9: the lowest ZeRO stage that fits."""

import itertools
from collections.abc import Callable

from labs.checks.generator import new_generator, unless_graded
from labs.checks.numbers import as_number
from labs.checks.verdicts import Wrong, check, shows
from labs.pictures.tables import Table
from labs.predictions import hardware
from labs.training.memory_categories import GB
from labs.words import counted
from labs.zero_stages.scaffold import state_bytes
from labs.zero_stages.stage_comparison import STAGES

MODELS = {"1.3B": 1.3e9, "7B": 7e9, "13B": 13e9, "70B": 70e9}  # parameters
GPUS = ("A100-40", "A100-80", "H200")
RANKS = (1, 4, 8, 64)
_EXACT = MODELS["7B"]
# With few and with many GB: no stage shards activations, so the many decide on many ranks, too.
ACTIVATIONS = (1 * GB, 12 * GB, 36 * GB)


def _lowest_that_fits(parameters: float, ranks: int, capacity: float,
                      activations: float) -> int | None:
    """The lowest stage whose states and activations (bytes) fit, None if none does."""
    return next((stage for stage in (0, 1, 2, 3)
                 if state_bytes(parameters, ranks, stage) + activations <= capacity), None)


@check("3.9")
def check_lowest_stage(lowest_stage: Callable):
    """lowest_stage(parameters, ranks, capacity, activations): the lowest one that fits, or None."""
    cases = _cases()
    for name, case in (cases | _random_cases()).items():
        returned, want = lowest_stage(*case), _lowest_that_fits(*case)
        # 0 is a stage and None is none: a test of truth would take one for the other.
        got = None if returned is None else as_number(returned)
        if returned is not None and got not in (0, 1, 2, 3):
            raise Wrong(f"{name}: lowest_stage returned {returned!r}",
                        "Return one number, 0, 1, 2 or 3, or None.", code="not_a_stage")
        if got != want:
            raise _wrong(name, got, want, *case)
    return f"right in {len(cases)} cases, from DDP to 'it does not fit'"


def _cases() -> dict[str, tuple[float, int, float, float]]:
    """What a case is called -> (parameters, ranks, capacity, activations)."""
    found = {f"{model} on {ranks} × {gpu} with {activations / GB:g} GB of activations":
             (MODELS[model], ranks, hardware.gpu(gpu).usable, activations)
             for model, ranks, gpu, activations in
             itertools.product(MODELS, RANKS, GPUS, ACTIVATIONS)}
    # At the boundary, one stage fits to the byte. All these GB are exact in a float, so that the
    # order of an honest sum does not matter.
    for stage in (0, 1, 2, 3):
        capacity = state_bytes(_EXACT, 8, stage) + 12 * GB
        found[f"7B on 8 GPUs of exactly {capacity / GB:g} GB with 12 GB of activations"] = (
            _EXACT, 8, capacity, 12 * GB)
    return found


def _random_cases() -> dict[str, tuple[float, int, float, float]]:
    """As `_cases`, of random sizes: no table of those above has them."""
    rng, found = new_generator(), {}
    for _ in range(20):
        parameters, ranks = rng.randrange(1, 90) * 1e9, rng.randint(2, 96)
        stage, spare = rng.choice((0, 1, 2, 3)), rng.choice((-1, 1)) * rng.uniform(0.05, 0.3)
        capacity = round(state_bytes(parameters, ranks, stage) * (1 + spare) + 5 * GB)
        found[f"{parameters / 1e9:g}B on {ranks} GPUs of {capacity / GB:.1f} GB with 5 GB of "
              "activations"] = (parameters, ranks, capacity, 5 * GB)
    return found


def _wrong(name, got, want, parameters, ranks, capacity, activations) -> Wrong:
    answer = "that nothing fits" if got is None else f"stage {got:g}"
    # Too low a stage runs out of memory: limits for N → ∞, or activations forgotten.
    if got is not None and (want is None or got < want):
        needed = state_bytes(parameters, ranks, got) + activations
        return Wrong(f"{name}: you say {answer}, which takes {needed / GB:.1f} of "
                     f"{capacity / GB:.1f} GB",
                     "States and activations must fit together, and no stage shards activations; "
                     "with few ranks a stage saves less than its limit.", code="stage_too_low")
    if state_bytes(parameters, ranks, want) + activations == capacity:
        return Wrong(f"{name}: you say {answer}; stage {unless_graded(want)} takes exactly the "
                     "capacity",
                     "It must not be more than the capacity: as much as that fits.",
                     code="exact_fit_refused")
    # Too high a stage sends more than it must.
    return Wrong(f"{name}: you say {answer}; stage {unless_graded(want)} fits too and costs less",
                 "Take the lowest stage that fits: stage 3 sends half as much again, and each "
                 "stage has more that can go wrong. Capacity counts in bytes, and GB are 1e9.",
                 code="stage_too_high")


TABLE_RANKS = (1, 4, 8, 16, 64, 512)


@shows("3.9")
def show_choices(lowest_stage: Callable, gpu: str = "A100-80",
                 activations: float = 10 * GB) -> Table:
    """What the student's function chooses on a GPU of `hardware`, for some models and ranks."""
    capacity = hardware.gpu(gpu).usable
    rows = [(model, *("-" if stage is None else STAGES[int(stage)] for stage in (
        lowest_stage(parameters, ranks, capacity, activations) for ranks in TABLE_RANKS)))
            for model, parameters in MODELS.items()]
    return Table(f"on GPUs of type {gpu}, on which CUDA reports {capacity / GB:.1f} GB, with "
                 f"{activations / GB:g} GB of activations",
                 ("model", *(counted(ranks, "rank") for ranks in TABLE_RANKS)),
                 rows, note="-: no stage fits")
