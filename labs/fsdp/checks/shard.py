"""Exercise 4.1: fully_shard on every block and on the root."""

from collections import Counter
from collections.abc import Callable

import torch.distributed as dist

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
          "optimizer_state": "Make the optimizer from the sharded parameters."}


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
    report, calls = common.record_step(strategy)
    want = common.one_unit_per_block(dist.get_world_size())
    raise_on_all_ranks(check_collectives, calls, want)
    raise_on_all_ranks(_check_memory, report, want)
    return difference


def check_collectives(calls: list[CollectiveCall], want: Units) -> None:
    """Raises Wrong where a step's collectives are not those of one unit per block and a root."""
    rank, kinds = f"rank {dist.get_rank()}", Counter(call.kind for call in calls)
    # Only shards are exchanged: DDP trains as well, but all-reduces whole gradients.
    other = [kind for kind in kinds if kind not in ("all_gather", "reduce_scatter")]
    if other:
        moved = sum(call.elements for call in calls if call.kind == other[0])
        raise Wrong(f"{rank}: {other[0]} carries {moved:,} elements per step; fully sharded "
                    "training needs only all-gather and reduce-scatter",
                    "An all-reduce leaves whole gradients on every rank: that is DDP.")
    # One reduce-scatter per unit, of its size: shows the units, whatever their classes are.
    blocks = common.LAYERS
    reduced = sorted(c.elements for c in calls if c.kind == "reduce_scatter")
    if reduced != sorted([want.block] * blocks + [want.root]):
        raise Wrong(f"{rank}: gradients leave in {counted(len(reduced), 'unit')}; {blocks} blocks "
                    f"and the root make {blocks + 1}", _hint(reduced, blocks))
    _check_all_gathers(Counter(c.elements for c in calls if c.kind == "all_gather"), want, rank)


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
    rank, ranks = dist.get_rank(), dist.get_world_size()
    state = common.optimizer_bytes(ranks, rank)
    # After every phase a rank holds its shard of each category, and gradients only while they wait
    # for the step. A strategy that trains right and shards nothing fails here.
    for phase in ("build", "forward", "backward", "step"):
        allowed = {"parameters": want.shard, "optimizer_state": state,
                   "gradients": want.shard if phase in ("backward", "step") else 0}
        for category, most in allowed.items():
            held = getattr(report.phases[phase], category)
            if held > most:
                name = category.replace("_", " ")
                after = "building" if phase == "build" else phase
                raise Wrong(f"rank {rank} keeps {held:,} bytes of {name} after {after}; "
                            f"its share on {ranks} ranks is {most:,}", _HINTS[category])
    # Before training there is nothing but the shard: a second copy of the model is seen here.
    rest = report.phases["build"].total - report.phases["build"].parameters
    if rest > want.shard / 4:
        raise Wrong(f"rank {rank} keeps {rest:,} bytes in addition to its shard after building",
                    "Is the whole model still referenced, by an old optimizer or a copy?")
