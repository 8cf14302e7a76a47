"""Exercise 4.1: fully_shard on every block and on the root."""

from collections import Counter
from collections.abc import Callable
from functools import partial

import torch.distributed as dist

from labs.exercises.invariants import judge_memory, judge_recorded
from labs.exercises.on_ranks import on_ranks, raise_on_all_ranks
from labs.exercises.verdicts import Wrong, check
from labs.fsdp.checks import common
from labs.fsdp.checks.common import Units
from labs.meters.memory import Report
from labs.meters.traffic import CollectiveCall
from labs.words import counted

WORLD_SIZES = (2, 4)
_HINTS = {"parameters": "Every parameter must be in a unit: fully_shard each block, then the root.",
          "gradients": "Gradients must be reduce-scattered: are all parameters in a unit?",
          "optimizer_state": "Make the optimizer from the sharded parameters.",
          "rest": "Is the whole model still referenced, by an old optimizer or a copy?"}


@check("4.1", hints={"should not be": "The blocks first, the root last."})
def check_shard(strategy: Callable) -> str:
    """strategy(model, optimizer_class, **settings) -> (module, optimizer): FSDP2, each block a
    unit and the root another, all parameters resharded after use."""
    difference = max(on_ranks(_train_and_record, strategy, world_sizes=WORLD_SIZES))
    return (f"equals the reference over {common.STEPS} steps on 2 and 4 ranks "
            f"({common.closeness(difference)}); a rank keeps 16Ψ/N bytes, gathers every block "
            "twice and reduce-scatters it once")


def _train_and_record(strategy) -> float:
    difference = common.compare_with_reference(strategy)
    want = common.one_unit_per_block(dist.get_world_size())
    raise_on_all_ranks(check_collectives, common.record_collectives(strategy), want)
    judge_recorded(partial(common.record_memory, strategy), _check_memory, want)
    return difference


def check_collectives(calls: list[CollectiveCall], want: Units) -> None:
    """Raises Wrong where a step's collectives are not those of one unit per block and a root."""
    reject_other_kinds(calls)
    rank = f"rank {dist.get_rank()}"
    # One reduce-scatter per unit, of its size: shows the units, whatever their classes are.
    blocks = common.LAYERS
    reduced = sorted(c.elements for c in calls if c.kind == "reduce_scatter")
    if reduced != sorted([want.block] * blocks + [want.root]):
        raise Wrong(f"{rank}: gradients leave in {counted(len(reduced), 'unit')}; {blocks} blocks "
                    f"and the root make {blocks + 1}", _hint(reduced, blocks))
    _check_all_gathers(Counter(c.elements for c in calls if c.kind == "all_gather"), want, rank)


def reject_other_kinds(calls: list[CollectiveCall]) -> None:
    """Raises Wrong where there is another collective than all-gather and reduce-scatter."""
    # Only shards are exchanged: DDP trains as well, but all-reduces whole gradients.
    other = [call for call in calls if call.kind not in ("all_gather", "reduce_scatter")]
    if other:
        kind = other[0].kind
        moved = sum(call.elements for call in other if call.kind == kind)
        raise Wrong(f"rank {dist.get_rank()}: {kind} carries {moved:,} elements per step; fully "
                    "sharded training needs only all-gather and reduce-scatter",
                    "An all-reduce leaves whole gradients on every rank: that is DDP.")


def _check_all_gathers(gathered, want, rank):
    blocks = common.LAYERS
    # A block is gathered for forward and again for backward: once means it was kept (ZeRO-2).
    if gathered[want.block] < 2 * blocks:
        raise Wrong(f"{rank}: the parameters of {blocks} blocks are gathered "
                    f"{gathered[want.block]} times per step, not {2 * blocks}: they stay whole "
                    "from forward to backward",
                    "Leave reshard_after_forward as it is: each block's parameters are freed after "
                    "its forward.")
    # The root may be kept, which is FSDP2's default, or gathered twice like a block.
    if gathered[want.block] > 2 * blocks or gathered[want.root] not in (1, 2):
        raise Wrong(f"{rank}: {sum(gathered.values())} all-gathers per step; once for forward and "
                    f"once for backward make {2 * (blocks + 1)} at most")


def _hint(reduced, blocks) -> str:
    if len(reduced) == 1:
        return ("With one unit the whole model is gathered at once, and nothing is saved at the "
                "peak: fully_shard each block first.")
    if len(reduced) > blocks + 1:
        return "One fully_shard for each block, not for what is inside it."
    return "fully_shard each of lab.blocks(model), then the model."


def _check_memory(report: Report, want: Units) -> None:
    state = common.optimizer_bytes(dist.get_world_size(), dist.get_rank())
    # After every phase a rank holds its shard of each category, and gradients only while they wait
    # for the step. A strategy that trains right and shards nothing fails here.
    held = {"parameters": want.shard, "optimizer_state": state, "gradients": 0}
    step = held | {"gradients": want.shard}
    # Before training there is nothing but the shard: a second copy of the model is seen here.
    built = held | {"optimizer_state": 0, "rest": want.shard / 4}
    judge_memory(report, {"build": built, "forward": held, "backward": step, "step": step},
                 "under full sharding", _HINTS)
