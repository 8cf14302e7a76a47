"""Pictures of mixed precision and of state dicts."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from labs.exercises.comparison import compare
from labs.exercises.gpu_notes import measured_on_gpus, rounds_of
from labs.exercises.guesses import guessed
from labs.exercises.verdicts import shows
from labs.fsdp import memory_limits, scaffold
from labs.fsdp.charts.sharding import memory_panel
from labs.pictures.bars import Panel, side_by_side
from labs.pictures.picture import Picture
from labs.pictures.tables import Table
from labs.workers import devices
from labs.workers.launcher import launch


@shows("4.5")
def show_precision(shard: Callable, mixed: Callable) -> Picture:
    """Draws the peak of forward by category (in backward, blocks are freed while others compute),
    and the bytes that are gathered and reduced for each parameter in a step, with the guess."""
    both = partial(scaffold.shard_mixed, param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    size = replace(memory_limits.preset(4, ranks=2), batch=2)
    compared = compare({"fp32": shard, "bf16, reduced in fp32": mixed,
                        "bf16, reduced in bf16": both},
                       size, rounds=rounds_of(size), quiet=True)
    found = compared.results
    moved = [{kind: one.bytes[kind] / compared.parameters
              for kind in ("all_gather", "reduce_scatter")} for one in found.values()]
    return side_by_side(list(found), [
        memory_panel("peak of forward", [r.report.peaks["forward"] for r in found.values()]),
        Panel("gathered and reduced", "bytes per parameter", moved,
              guessed=[None, guessed("4.5"), None])], measured_on_gpus(compared))


@shows("State dicts")
def compare_state_dicts(strategy: Callable, ranks: int = 4) -> Table:
    """Returns a table of what each rank holds of a sharded and of a full state dict."""
    # gloo gathers a DTensor by a call that it has for the CPU's tensors only (pytorch issue
    # 132471), so ranks that share a GPU stay off it; bytes are the same.
    alone = devices.plan(ranks).library == "nccl"
    by_rank = launch(scaffold.state_dict_bytes, strategy, ranks=ranks, quiet=True,
                     device=None if alone else "cpu")
    rows = [(f"rank {rank}", *(f"{nbytes / 1e3:,.0f}" for nbytes in found.values()))
            for rank, found in enumerate(by_rank)]
    return Table("kB of parameters in a state dict", ("", *by_rank[0]), rows,
                 note="A full one is gathered tensor by tensor, and kept on rank 0's host; any "
                      "program can read it. A sharded one is never gathered.")
