"""What every FSDP exercise is held to: each block is a unit and the root another, a block is freed
after its forward and gathered alone, by a step's collectives and by the memory after forward."""

from collections import Counter

import torch.distributed as dist

from labs.checks.invariants import STATES, judge_memory
from labs.checks.verdicts import Wrong
from labs.fsdp import strategy_checks
from labs.fsdp.strategy_checks import BYTES, Units
from labs.meters.memory import Report
from labs.meters.traffic import CollectiveCall, Mark
from labs.words import counted, plural

SMALL = 4096  # bytes, for indices and counts: the smallest matrix of a block has more
AHEAD = 2  # blocks that are gathered at once: the one that computes, and one that is prefetched
_PREFETCH = "set_modules_to_forward_prefetch, set_modules_to_backward_prefetch or unshard()"
_HINTS = {"parameters": "Every parameter must be in a unit: fully_shard each block, then the root.",
          "gradients": "Gradients must be reduce-scattered: are all parameters in a unit?",
          "optimizer_state": "Make the optimizer from the sharded parameters.",
          "buffers": "Leave reshard_after_forward as it is: each block's gathered parameters are "
                     "freed after its forward.",
          "rest": "Is the full model still referenced, by an old optimizer, or a copy of what was "
                  "gathered temporarily?"}


def judge_collectives(events: list[CollectiveCall | Mark], want: Units,
                      hint: str = f"Does something gather early: {_PREFETCH}?") -> None:
    """Raises Wrong where a step's collectives are not those of one unit per block and a root, or
    where several blocks are gathered at once; hint: said with the latter."""
    calls = [event for event in events if isinstance(event, CollectiveCall)]
    require_kinds(calls)
    rank = f"rank {dist.get_rank()}"
    # One reduce-scatter per unit, of its size: shows the units, whatever their classes are.
    blocks = strategy_checks.LAYERS
    reduced = sorted(c.elements for c in calls if c.kind == "reduce_scatter")
    if reduced != sorted([want.block] * blocks + [want.root]):
        sizes = " of other sizes" * (len(reduced) == blocks + 1)
        raise Wrong(f"{rank}: gradients leave in {counted(len(reduced), 'unit')}{sizes}; {blocks} "
                    f"blocks and the root make {blocks + 1}", _units_hint(reduced, blocks),
                    code="wrong_units")
    _judge_all_gathers(Counter(c.elements for c in calls if c.kind == "all_gather"), want, rank)
    judge_gathered_alone(events, want, rank, hint)


def require_kinds(calls: list[CollectiveCall]) -> None:
    """Raises Wrong where there is another collective than all-gather and reduce-scatter."""
    # Only shards are exchanged: DDP trains as well, but all-reduces full gradients.
    other = [call for call in calls if call.kind not in ("all_gather", "reduce_scatter")]
    if other:
        kind = other[0].kind
        moved = sum(call.elements for call in other if call.kind == kind)
        raise Wrong(f"rank {dist.get_rank()}: {kind} carries {moved:,} {plural('element', moved)} "
                    "per step; fully sharded training needs only all-gather and reduce-scatter",
                    _other_hint(kind, moved, any(c.kind == "reduce_scatter" for c in calls)),
                    code="wrong_collective")


def _other_hint(kind, moved, sharded) -> str:
    if kind != "all_reduce" or moved == 1:
        return "Nothing but the units' own collectives belongs into a step."
    if sharded:
        return ("Shards that are all-reduced have replicas: with one dimension in the mesh, "
                "lab.mesh(), there are none.")
    return "An all-reduce leaves full gradients on every rank: that is DDP."


def _units_hint(reduced, blocks) -> str:
    if len(reduced) == 1:
        return ("With one unit the full model is gathered at once, and nothing is saved at the "
                "peak: fully_shard each block first.")
    if len(reduced) > blocks + 1:
        return "One fully_shard for each block, not for what is inside it."
    return "fully_shard each of lab.blocks(model) by itself, then the model."


def _judge_all_gathers(gathered, want, rank):
    blocks = strategy_checks.LAYERS
    # A block is gathered for forward and again for backward: once means it was kept (ZeRO-2).
    if gathered[want.block] < 2 * blocks:
        raise Wrong(f"{rank}: the parameters of {blocks} blocks are gathered "
                    f"{gathered[want.block]} times per step, not {2 * blocks}: they stay "
                    "gathered where they should be freed",
                    "Leave resharding as it is: each block's parameters are freed after its "
                    "forward, and again after its backward.", code="gathered_kept")
    # The root may be kept, which is FSDP2's default, or gathered twice like a block.
    if gathered[want.block] > 2 * blocks or gathered[want.root] not in (1, 2):
        raise Wrong(f"{rank}: {sum(gathered.values())} all-gathers per step; once for forward and "
                    f"once for backward make {2 * (blocks + 1)} at most", code="extra_collective")


def judge_gathered_alone(events: list[CollectiveCall | Mark], want: Units, rank: str,
                         hint: str) -> None:
    """Raises Wrong where more than AHEAD blocks are gathered at once."""
    # A unit saves memory only if the others are not gathered meanwhile: blocks that are gathered
    # before they are needed send the same bytes in as many calls.
    whole, phase = 0, "forward"
    for event in events:
        if isinstance(event, Mark):
            phase = "backward" if event.what == "backward begins" else phase
            # Both a block's forward and its reduce-scatter end the time in which it is gathered.
            whole -= phase == "forward" and event.what == "block done"
        elif event.elements == want.block:
            whole += {"all_gather": 1, "reduce_scatter": -1}.get(event.kind, 0)
        if whole > AHEAD:
            raise Wrong(f"{rank}: in {phase} {whole} blocks are gathered at once; the one that "
                        f"computes and the next are {AHEAD}", hint, code="gathered_at_once")


def judge_unit_memory(report: Report, usual: Report, want: Units, element: int = BYTES) -> None:
    """Raises Wrong where a rank holds more than its shards after a phase. usual: what torch's own
    does, in fp32, with the same units. element: bytes of a gathered number."""
    state = strategy_checks.optimizer_bytes(dist.get_world_size(), dist.get_rank())
    # After every phase a rank holds its shard of each category, and gradients only while they wait
    # for the step. A strategy that trains right and shards nothing fails here.
    held = {"parameters": want.shard, "optimizer_state": state, "gradients": 0}
    # Beside activations only the gathered root stays after forward: blocks that are not freed, or
    # only on some of the ranks (reshard_after_forward=2), and halves or copies of them are seen
    # here; "rest" has all that is not one of the three states.
    gathered = element * (want.root + 0.25 * want.block)
    forward = held | {"buffers": gathered, "rest": _rest(usual, "forward") + gathered}
    # Between steps there are only shards: what was copied while it was gathered is seen here, and
    # full gradients that are kept beside the shard.
    backward, step = (held | {"gradients": want.shard, "rest": _rest(usual, phase) + SMALL}
                      for phase in ("backward", "step"))
    # Before training there is nothing but the shard: a second copy of the model, or of a part of
    # it, is seen here.
    built = held | {"optimizer_state": 0, "rest": _rest(usual, "build") + SMALL}
    judge_memory(report, {"build": built, "forward": forward, "backward": backward, "step": step},
                 "under full sharding", _HINTS)


def _rest(report, phase) -> int:
    """Bytes of all that is none of the three states."""
    held = report.phases[phase]
    return held.total - sum(getattr(held, name) for name in STATES)
