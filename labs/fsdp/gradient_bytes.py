"""Exercise 4.10: the bytes in which gradients are communicated, under any strategy; and the rates
of a node beside those of the same node at a laptop's pace."""

from collections.abc import Callable
from functools import cache, partial

import torch

from labs.checks.numbers import Mistake, as_number, judge_number, likeliest_cause, number_or_none
from labs.checks.on_ranks import on_ranks
from labs.checks.verdicts import check, shows
from labs.fsdp import scaffold, strategy_checks
from labs.fsdp.paced_run import SlowedNode
from labs.fsdp.slowed_node import HOP
from labs.meters.traffic import CollectiveCall
from labs.pictures.tables import Table
from labs.training import strategies
from labs.words import listed
from labs.workers import devices

RANKS = 4
REDUCTIONS = ("all_reduce", "reduce_scatter")


@check("4.10")
def check_gradient_bytes(gradient_bytes: Callable[[list[CollectiveCall]], int]) -> str:
    """gradient_bytes(calls) -> bytes of the collectives that carry gradients; calls: those of one
    step under any strategy, each with kind, elements and bytes."""
    found = _recorded(devices.gpus())
    for place, (name, calls) in enumerate(found.items()):
        want = sum(call.bytes for call in calls if call.kind in REDUCTIONS)
        got = gradient_bytes(list(calls))
        # One strategy alone fits several mistakes; the answers to all of them decide which is
        # named.
        causes = [] if as_number(got) == want else likeliest_cause(
            _MISTAKES, list(found.values()), [
                number_or_none(lambda one=one: gradient_bytes(list(one)))
                for one in found.values()], place)
        judge_number(got, want, causes, f"gradient_bytes of {name}", "bytes",
                     "Gradients are summed over ranks: which collectives sum?")
    return f"counts the gradients' bytes under {listed(found)}"


@shows("4.10")
def try_meter(gradient_bytes: Callable[[list[CollectiveCall]], int]) -> Table:
    """Returns a table of what a meter says of a step under each strategy, and what it sent."""
    found = _recorded(devices.gpus())
    kinds = ("all_gather", *REDUCTIONS)
    rows = [(name, f"{gradient_bytes(list(calls)) / 1e3:,.0f}",
             *(f"{sum(call.bytes for call in calls if call.kind == kind) / 1e3:,.0f}"
               for kind in kinds)) for name, calls in found.items()]
    return Table(f"kB in one step, {RANKS} ranks", ("", "the meter says", *kinds), rows)


@cache
def _recorded(gpus: int) -> dict[str, list[CollectiveCall]]:
    """Returns what `_record` does on rank 0, launched once on a machine's GPUs or its CPU: it does
    not depend on the answer."""
    return on_ranks(_record, world_sizes=(RANKS,))[0]


def _record() -> dict[str, list[CollectiveCall]]:
    """Returns strategy -> a step's collectives on this rank."""
    chosen = {"FSDP": partial(strategies.fsdp2, reshard=None), "DDP": strategies.ddp,
              "FSDP in bf16": partial(scaffold.shard_mixed, param_dtype=torch.bfloat16,
                                      reduce_dtype=torch.float32),
              # Without this one, 4 bytes for each element would be right everywhere.
              "FSDP that reduces in bf16": partial(scaffold.shard_mixed, param_dtype=torch.bfloat16,
                                                   reduce_dtype=torch.bfloat16),
              "HSDP": partial(scaffold.on_replicas, scaffold.shard_blocks, 2)}
    return {name: [event for event in strategy_checks.record_events(strategy)
                   if isinstance(event, CollectiveCall)] for name, strategy in chosen.items()}


def _sum_of(*kinds, size=lambda call: call.bytes) -> Callable[[list[CollectiveCall]], int]:
    return lambda calls: sum(size(call) for call in calls if call.kind in kinds)


# What a look at one kind of collective gives. FSDP all-reduces nothing and DDP reduce-scatters
# nothing, so one strategy alone does not tell these mistakes apart; all of them do.
_MISTAKES = (
    Mistake("reduce_scatter_missing", _sum_of("all_reduce"),
            "FSDP has no all-reduce: each unit's gradients are reduce-scattered",
            "Gradients are sent in two kinds of collectives."),
    Mistake("all_reduce_missing", _sum_of("reduce_scatter"), "where a rank has whole gradients "
            "(DDP), or a replica's shard of them (HSDP), an all-reduce sums them",
            "Gradients are sent in two kinds of collectives."),
    Mistake("all_gather_counted", _sum_of("all_gather", *REDUCTIONS),
            "an all-gather carries parameters", ""),
    Mistake("all_gather_counted", _sum_of("all_gather"), "an all-gather carries parameters", ""),
    Mistake("all_gather_counted", _sum_of("all_gather", "all_reduce"),
            "an all-gather carries parameters", ""),
    Mistake("all_gather_counted", _sum_of("all_gather", "reduce_scatter"),
            "an all-gather carries parameters", ""),
    Mistake("in_elements", _sum_of(*REDUCTIONS, size=lambda call: call.elements),
            "these are elements, not bytes", "Each call has `bytes`."),
    *(Mistake("one_size_for_all",
              _sum_of(*REDUCTIONS, size=lambda call, each=each: each * call.elements), "you count "
              f"{each} bytes for each element, but gradients are sent in other types too",
              "Each call has `bytes`: 4 for each element in fp32, 2 in bf16.") for each in (2, 4)))


@shows("A billion parameters")
def show_pace(node: SlowedNode) -> Table:
    """Returns a table of what the real and the slowed node compute and carry, and of the share that
    communication has of computing on both."""
    real, slow = node.real.card, node.slowed.card
    rates = [("products in 16 bits, GFLOP/s", real.flops, slow.flops),
             ("NVLink, GB/s", real.nvlink, slow.nvlink), ("PCIe, GB/s", real.pcie, slow.pcie),
             ("the card's memory, GB/s", real.bandwidth, slow.bandwidth),
             ("the host's memory, GB/s", node.real.host_bandwidth, node.slowed.host_bandwidth)]
    rows = [(name, f"{usual / 1e9:,.0f}", f"{slowed / 1e9:.3g}", f"{usual / slowed:,.0f}x")
            for name, usual, slowed in rates]
    rows.append(("collectives, for each second of computing",
                 *(f"{ratio:.3f} s" for ratio in node.ratios), ""))
    return Table("A node of A100s, and the same node slowed down",
                 ("", "A100 node", "slowed node", "slower"), rows,
                 note=f"On the slowed node a block's forward takes {1e3 * node.block:g} ms, and "
                      f"each step of a ring {1e3 * HOP:g} ms besides its bytes. The last row: the "
                      "billion-parameter model on 4 A100s, and the laptop's on 4 ranks.")
