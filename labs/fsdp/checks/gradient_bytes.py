"""Exercise 4.10: the bytes in which gradients travel, under any strategy."""

from collections.abc import Callable
from functools import partial

import torch

from labs.exercises.numbers import Cause, judge_number
from labs.exercises.on_ranks import on_ranks
from labs.exercises.verdicts import check, shows
from labs.fsdp import scaffold
from labs.fsdp.checks import common
from labs.meters.traffic import CollectiveCall
from labs.pictures.tables import Table
from labs.training import strategies

RANKS = 4
REDUCTIONS = ("all_reduce", "reduce_scatter")


@check("4.10")
def check_gradient_bytes(gradient_bytes: Callable[[list[CollectiveCall]], int]) -> str:
    """gradient_bytes(calls) -> bytes of the collectives that carry gradients; calls: those of one
    step under any strategy, each with kind, elements and bytes."""
    found = on_ranks(_record, world_sizes=(RANKS,))[0]
    for name, calls in found.items():
        want = sum(call.bytes for call in calls if call.kind in REDUCTIONS)
        judge_number(gradient_bytes(list(calls)), want, _causes(calls, want),
                     f"gradient_bytes of {name}", "bytes",
                     "Gradients are summed over ranks: which collectives sum?")
    return f"counts the gradients' bytes under {', '.join(found)}"


@shows("4.10")
def try_meter(gradient_bytes: Callable[[list[CollectiveCall]], int]) -> Table:
    """Returns a table of what a meter says of a step under each strategy, and what it sent."""
    found = on_ranks(_record, world_sizes=(RANKS,))[0]
    kinds = ("all_gather", *REDUCTIONS)
    rows = [(name, f"{gradient_bytes(list(calls)) / 1e3:,.0f}",
             *(f"{sum(call.bytes for call in calls if call.kind == kind) / 1e3:,.0f}"
               for kind in kinds)) for name, calls in found.items()]
    return Table(f"kB in one step, {RANKS} ranks", ("", "the meter says", *kinds), rows)


def _record() -> dict[str, list[CollectiveCall]]:
    """Returns strategy -> a step's collectives on this rank."""
    chosen = {"FSDP": partial(strategies.fsdp2, reshard=None), "DDP": strategies.ddp,
              "FSDP in bf16": partial(scaffold.shard_mixed, param_dtype=torch.bfloat16,
                                      reduce_dtype=torch.float32),
              "HSDP": partial(scaffold.on_replicas, scaffold.shard_blocks, 2)}
    return {name: [event for event in common.record_events(strategy)
                   if isinstance(event, CollectiveCall)] for name, strategy in chosen.items()}


def _causes(calls, want) -> list[Cause]:
    # What a look at one kind of collective gives.
    def of(*kinds):
        return sum(call.bytes for call in calls if call.kind in kinds)

    causes = [(of("all_reduce"), "under FSDP there is no all-reduce: the gradients are "
               "reduce-scattered", ""),
              (of("reduce_scatter"), "replicas, and DDP's ranks, all-reduce theirs", ""),
              (of("all_gather", "all_reduce", "reduce_scatter"), "an all-gather carries "
               "parameters", ""), (of("all_gather"), "an all-gather carries parameters", ""),
              (sum(c.elements for c in calls if c.kind in REDUCTIONS), "these are elements, not "
               "bytes", "")]
    return [cause for cause in causes if cause[0] != want]
