"""Exercise 4.4: activation checkpointing of every block, under the same sharding."""

from collections import Counter
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from labs.checks.invariants import judge_recorded
from labs.checks.on_ranks import on_ranks, raise_on_all_ranks
from labs.checks.verdicts import Wrong, check
from labs.fsdp import strategy_checks
from labs.fsdp.strategy_checks import Units
from labs.fsdp.units import judge_collectives, judge_unit_memory
from labs.meters.memory import Report
from labs.predictions.memory import activations
from labs.training import models, strategies
from labs.workers import devices

_SEVERAL = ("A checkpoint around several blocks, or around the model, brings back all of them at "
            "once: one for each block.")
BATCH = 2  # sequences of each rank, as in strategy_checks.steps


@check("4.4")
def check_checkpointed(strategy: Callable) -> str:
    """strategy(model, optimizer_class, **settings) -> (module, optimizer): as in exercise 4.1, and
    each block's activations are computed again in backward."""
    difference = max(on_ranks(_train_and_record, strategy, world_sizes=(2,),
                              timeout=strategy_checks.TIMEOUT))
    close = strategy_checks.closeness(difference)
    return (f"equals the reference ({close}); every block runs forward "
            "twice per step and keeps only its input in between, and no collective is added")


def _train_and_record(strategy) -> float:
    difference = strategy_checks.compare_with_reference(strategy)
    raise_on_all_ranks(_judge_forwards, _forwards(strategy))
    want = strategy_checks.one_unit_per_block(dist.get_world_size())
    raise_on_all_ranks(judge_collectives, strategy_checks.record_events(strategy), want, _SEVERAL)
    without = strategy_checks.record_memory(strategies.fsdp2)
    judge_recorded(partial(strategy_checks.record_memory, strategy), _judge_memory, without, want)
    return difference


def _forwards(strategy) -> list[int]:
    """Returns how often each block runs forward in one step: 1 if any part of it runs only once."""
    model, counts = strategy_checks.make_model(), Counter()
    parts = [(block.ln_1, block.mlp) for block in models.blocks(model)]  # its first and last part
    for part in (part for pair in parts for part in pair):
        part.register_forward_pre_hook(lambda *_, part=part: counts.update([part]))
    module, _ = strategy_checks.build(strategy, model)
    module(**strategy_checks.steps(1)[0].inputs()).loss.backward()
    return [1 if 1 in times else max(times)
            for times in ([counts[part] for part in pair] for pair in parts)]


def _judge_forwards(forwards):
    # Recomputation is a second forward of the whole block: a checkpoint of only the MLP, or a
    # wrapper that never replaced the block, is found by the number of forwards.
    for number, found in enumerate(forwards):
        if found == 1:
            raise Wrong(f"rank {dist.get_rank()}: block {number} runs forward once per step: what "
                        "it computed is kept for backward",
                        "Wrap every block, and put it back: blocks[i] = "
                        "checkpoint_wrapper(blocks[i]).", code="not_checkpointed")
        if found != 2:
            raise Wrong(f"rank {dist.get_rank()}: block {number} runs forward {found} times per "
                        "step; once in forward and once in backward make 2",
                        "Is it wrapped twice, or something inside it too?",
                        code="checkpointed_twice")


def _judge_memory(report: Report, without: Report, want: Units):
    judge_unit_memory(report, without, want)
    config, rank = strategy_checks.make_model().config, f"rank {dist.get_rank()}"
    in_blocks = activations.saved(config, batch=BATCH, sequence=strategy_checks.CONTEXT,
                                  device=devices.device().type)["blocks"]
    # At the end of forward a block keeps its input and the state of the random numbers, nothing
    # else: a checkpoint that also keeps products inside the block runs it twice and saves little.
    kept = BATCH * strategy_checks.CONTEXT * strategy_checks.HIDDEN * strategy_checks.BYTES
    kept += torch.get_rng_state().nbytes
    most = without.phases["forward"].activations - in_blocks + 1.25 * strategy_checks.LAYERS * kept
    held = report.phases["forward"].activations
    if held > most:
        raise Wrong(f"{rank} holds {held:,} bytes of activations after forward; with nothing but "
                    f"each block's input kept it is at most {int(most):,}",
                    "checkpoint_wrapper(block), without a policy, keeps the input alone.",
                    code="activations_kept")
    # At the peak of backward one block's activations exist, and of the others only the input. One
    # checkpoint around the model also runs every block twice, but brings all blocks back at once.
    held, whole = (one.peaks["backward"].activations for one in (report, without))
    if whole - held < in_blocks / 2:
        raise Wrong(f"{rank} still holds {held:,} bytes of activations at the peak of backward; "
                    f"without checkpointing it is {whole:,}",
                    _SEVERAL, code="activations_kept")
