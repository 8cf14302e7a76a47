"""Checks of the three stages: numbers against the twin, then traffic and memory as promised."""

from labs.exercises.on_ranks import WORLD_SIZES, on_ranks, torchs_own_refused
from labs.exercises.verdicts import check
from labs.zero_stages import promises
from labs.zero_stages.twin import STEPS, follow

_FREED = ("Is a gather still under way while its memory is freed or allocated anew? With "
          "async_op=True, keep what all_gather returns in unit.handle: unit.wait() and unit.free() "
          "wait for it.")
NO_MEMORY = {"storage of size 0": "unit.whole has no memory after unit.free(): unit.allocate() "
             "returns it with memory, for the all-gather to fill.",
             "SIGSEGV": _FREED, "SIGABRT": _FREED, "SIGBUS": _FREED}


def on_every_world(strategy, stage: int, world_sizes=WORLD_SIZES) -> float:
    """The largest difference from the twin on 2, 3 and 4 ranks. Raises what the ranks raise."""
    def work():
        with torchs_own_refused():
            difference = follow(strategy, stage)
            promises.keep(strategy, stage)
        return difference

    return max(on_ranks(work, world_sizes=world_sizes))


@check("3.2")
def check_zero1(strategy):
    """strategy(model, optimizer_class, **settings) -> (module, optimizer): ZeRO-1."""
    difference = on_every_world(strategy, 1)
    return (f"equals the twin over {STEPS} steps on 2, 3 and 4 ranks (to {difference:.0e}), holds "
            "8Ψ/N bytes of optimizer state and moves 2Ψ elements")


@check("3.3")
def check_zero2(strategy):
    """strategy(model, optimizer_class, **settings) -> (module, optimizer): ZeRO-2."""
    difference = on_every_world(strategy, 2)
    return (f"equals the twin over {STEPS} steps on 2, 3 and 4 ranks (to {difference:.0e}), keeps "
            "4Ψ/N bytes of gradients, never half of them at once, and moves 2Ψ elements")


@check("3.4", hints=NO_MEMORY)
def check_zero3(strategy):
    """strategy(model, optimizer_class, **settings) -> (module, optimizer): ZeRO-3."""
    difference = on_every_world(strategy, 3)
    return (f"equals the twin over {STEPS} steps on 2, 3 and 4 ranks (to {difference:.0e}), keeps "
            "16Ψ/N bytes and one layer, and moves 3Ψ elements")
