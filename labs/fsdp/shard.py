"""Exercise 4.1: fully_shard on every block and on the root."""

from collections.abc import Callable
from functools import partial

import torch.distributed as dist

from labs.checks.invariants import judge_recorded
from labs.checks.on_ranks import on_ranks, raise_on_all_ranks
from labs.checks.verdicts import check, shows
from labs.fsdp import strategy_checks
from labs.fsdp.comparisons import draw_zero3, measure_zero3
from labs.fsdp.units import judge_collectives, judge_unit_memory
from labs.pictures.picture import Picture
from labs.training import strategies
from labs.training.presets import Preset

WORLD_SIZES = (2, 4)


@check("4.1")
def check_shard(strategy: Callable) -> str:
    """strategy(model, optimizer_class, **settings) -> (module, optimizer): FSDP2, each block a
    unit and the root another, all parameters resharded after use."""
    difference = max(on_ranks(_train_and_record, strategy, world_sizes=WORLD_SIZES,
                              timeout=strategy_checks.TIMEOUT))
    close = strategy_checks.closeness(difference)
    return (f"equals the reference over {strategy_checks.STEPS} steps on 2 and 4 ranks "
            f"({close}); a rank keeps 16Ψ/N bytes, gathers every block "
            "twice and alone, frees it in between, and reduce-scatters it once")


def _train_and_record(strategy) -> float:
    difference = strategy_checks.compare_with_reference(strategy)
    want = strategy_checks.one_unit_per_block(dist.get_world_size())
    # By the calls of a third step, then by memory: the right numbers alone could come from DDP.
    raise_on_all_ranks(judge_collectives, strategy_checks.record_events(strategy), want)
    usual = strategy_checks.record_memory(strategies.fsdp2)
    judge_recorded(partial(strategy_checks.record_memory, strategy), judge_unit_memory, usual, want)
    return difference


# ZeRO-3 by hand against fully_shard


@shows("4.1")
def show_beside_zero3(zero3: Callable, strategy: Callable, preset: Preset) -> Picture:
    """Draws what one rank holds and sends under DDP, ZeRO-3 by hand, the student's fully_shard, and
    the same with its root resharded after forward too; with ZeRO's formulas as ticks."""
    return draw_zero3(measure_zero3(zero3, strategy, preset))
