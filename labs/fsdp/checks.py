"""Check of exercise 4.1: fully_shard on every block and on the root."""

from collections import Counter

import torch.distributed as dist

from labs.exercises.on_ranks import on_ranks, raise_on_all_ranks
from labs.exercises.verdicts import Wrong, check
from labs.fsdp import trained

WORLDS = (2, 4)
_HINTS = {"parameters": "Every parameter must be in a unit: fully_shard each block, then the root.",
          "gradients": "Gradients must be reduce-scattered: are all parameters in a unit?",
          "optimizer_state": "Make the optimizer from the sharded parameters."}


@check("4.1", hints={"should not be": "The blocks first, the root last."})
def check_shard(strategy):
    """strategy(model, optimizer_class, **settings) -> (module, optimizer): FSDP2, each block a
    unit and the root another, everything freed after use."""
    difference = max(on_ranks(_shard, strategy, world_sizes=WORLDS))
    return (f"equals the twin over {trained.STEPS} steps on 2 and 4 ranks (to {difference:.0e}); a "
            "rank keeps 16Ψ/N bytes, gathers every block twice and reduce-scatters it once")


def _shard(strategy) -> float:
    difference = raise_on_all_ranks(trained.follow, strategy)
    seen = trained.look(strategy)
    want = trained.units(trained.model(), dist.get_world_size(), dist.get_rank())
    raise_on_all_ranks(judge_traffic, seen.calls, want)
    raise_on_all_ranks(judge_memory, seen.report, want)
    return difference


def judge_traffic(calls, want) -> None:
    """Raises Wrong where the calls of a step are not those of one unit for each block and one for
    the root."""
    rank, kinds = f"rank {dist.get_rank()}", Counter(call.kind for call in calls)
    other = [kind for kind in kinds if kind not in ("all_gather", "reduce_scatter")]
    if other:
        moved = sum(call.elements for call in calls if call.kind == other[0])
        raise Wrong(f"{rank}: {other[0]} carries {moved:,} elements per step; fully sharded "
                    "training needs only all-gather and reduce-scatter",
                    "An all-reduce leaves whole gradients on every rank: that is DDP.")
    blocks = trained.LAYERS
    reduced = sorted(c.elements for c in calls if c.kind == "reduce_scatter")
    if reduced != sorted([want.block] * blocks + [want.root]):
        raise Wrong(f"{rank}: gradients leave in {_units(reduced)}; {blocks} blocks and the root "
                    f"make {blocks + 1}", _wrong_units(reduced, blocks))
    gathered = Counter(c.elements for c in calls if c.kind == "all_gather")
    if gathered[want.block] < 2 * blocks:
        raise Wrong(f"{rank}: the parameters of {blocks} blocks are gathered "
                    f"{gathered[want.block]} times per step, not {2 * blocks}: they stay whole "
                    "from forward to backward",
                    "Leave reshard_after_forward as it is: each block's parameters are freed after "
                    "its forward.")
    if gathered[want.block] > 2 * blocks or gathered[want.root] not in (1, 2):
        raise Wrong(f"{rank}: {sum(gathered.values())} all-gathers per step; once for forward and "
                    f"once for backward make {2 * (blocks + 1)} at most")


def _units(reduced) -> str:
    return f"{len(reduced)} unit{'s' * (len(reduced) != 1)}"


def _wrong_units(reduced, blocks) -> str:
    if len(reduced) == 1:
        return ("With one unit the whole model is gathered at once, and nothing is saved at the "
                "peak: fully_shard each block first.")
    if len(reduced) > blocks + 1:
        return "One fully_shard for each block, not for what is inside it."
    return "fully_shard each of lab.blocks(model), then the model."


def judge_memory(report, want) -> None:
    """Raises Wrong where a rank keeps more than its shard."""
    ranks, made = dist.get_world_size(), trained.model()
    state = trained.optimizer_bytes(made, ranks, dist.get_rank())
    for phase in ("build", "forward", "backward", "step"):
        allowed = {"parameters": want.shard, "optimizer_state": state,
                   "gradients": want.shard if phase in ("backward", "step") else 0}
        for category, most in allowed.items():
            held = getattr(report.phases[phase], category)
            if held > most:
                name = category.replace("_", " ")
                after = "building" if phase == "build" else phase
                raise Wrong(f"rank {dist.get_rank()} keeps {held:,} bytes of {name} after {after}; "
                            f"its share on {ranks} ranks is {most:,}", _HINTS[category])
    rest = report.phases["build"].total - report.phases["build"].parameters
    if rest > want.shard / 4:
        raise Wrong(f"rank {dist.get_rank()} keeps {rest:,} bytes beside its shard after building",
                    "Is the whole model still referenced, by an old optimizer or a copy?")
