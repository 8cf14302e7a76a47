"""What exercises 3.2, 3.3 and 3.4 share: each stage must train as the reference does, and keep the
traffic and the memory that it allows."""

from collections.abc import Callable

import torch.distributed as dist

from labs.checks.on_ranks import on_ranks, torchs_own_refused
from labs.words import to_within
from labs.zero_stages.architectures import compare_on_other_architectures
from labs.zero_stages.stage_limits import judge_invariants, unsharded_memory
from labs.zero_stages.stage_training import STEPS, difference_from_reference

WORLD_SIZES = (3, 2, 4)  # 3 first: on 2 ranks a half, a square and a difference look alike
_FREED_IN_FLIGHT = (
    "Is a gather still in flight while its memory is freed or allocated again? With "
    "async_op=True, store the all-gather's handle in unit.handle: unit.wait() and unit.free() "
    "wait for it.")
DETACH = "Give the collective shard.detach(): collectives are not differentiable."
MEMORY_HINTS = {
    "storage of size 0": "unit.full has no memory after unit.free(): unit.allocate() returns it "
                         "with memory, for the all-gather to fill.",
    "A view was created in no_grad mode": DETACH,
    "SIGSEGV": _FREED_IN_FLIGHT, "SIGABRT": _FREED_IN_FLIGHT, "SIGBUS": _FREED_IN_FLIGHT}


def verify_stage(strategy: Callable, stage: int, overlap: bool = False,
                 reader: Callable | None = None, nothing_updated: str = "",
                 world_sizes: tuple[int, ...] = WORLD_SIZES) -> tuple[float, float]:
    """(the largest difference from the reference, the most Ψ that a step moves) on any rank of any
    world size. Raises Wrong if a rank differs, or sends or holds more than its stage allows; on 3
    ranks also if it differs on models of another structure.

    overlap: whether gradients must be communicated while backward computes. reader,
    nothing_updated: as of `difference_from_reference`.
    """
    unsharded = unsharded_memory()

    def work():
        with torchs_own_refused():
            difference = difference_from_reference(strategy, stage, reader, nothing_updated)
            volume = judge_invariants(strategy, stage, unsharded, overlap)
            # On one world size only: whether a strategy knows a model's structure does not depend
            # on N.
            if dist.get_world_size() == 3:
                compare_on_other_architectures(strategy)
        return difference, volume

    differences, volumes = zip(*on_ranks(work, world_sizes=world_sizes), strict=True)
    return max(differences), max(volumes)


def equal(difference) -> str:
    return (f"equals the reference over {STEPS} steps on 2, 3 and 4 ranks "
            f"({to_within(difference)})")


def moves(volume: float) -> str:
    """The measured volume as a verdict says it: a layer that stays gathered moves less than 3Ψ."""
    return f"moves {volume:.2f}Ψ elements a step (measured, padding included)"
