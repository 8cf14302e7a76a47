"""Check of exercise 4.4: activation checkpointing of every block, under the same sharding."""

from collections import Counter

import torch.distributed as dist

from labs.exercises.on_ranks import on_ranks, raise_on_all_ranks
from labs.exercises.verdicts import Wrong, check
from labs.fsdp import trained
from labs.fsdp.checks import judge_traffic
from labs.predictions import activations
from labs.training import models, strategies

WORLDS = (2,)


@check("4.4", hints={"should not be": "The blocks first, the root last."})
def check_checkpointed(strategy):
    """strategy(model, optimizer_class, **settings) -> (module, optimizer): as in exercise 4.1, and
    each block's activations are computed again in backward."""
    difference = max(on_ranks(_checkpointed, strategy, world_sizes=WORLDS))
    return (f"equals the twin (to {difference:.0e}); every block runs forward twice per step and "
            "keeps only its input in between, and no collective is added")


def _checkpointed(strategy) -> float:
    difference = raise_on_all_ranks(trained.follow, strategy)
    raise_on_all_ranks(_judge_passes, _passes(strategy))
    seen, usual = trained.look(strategy), trained.look(strategies.fsdp2, tries=1)
    raise_on_all_ranks(_judge_memory, seen.report, usual.report)
    want = trained.units(trained.model(), dist.get_world_size(), dist.get_rank())
    raise_on_all_ranks(judge_traffic, seen.calls, want)
    return difference


def _passes(strategy) -> list:
    """How often each block runs forward in one step."""
    counted, made = Counter(), trained.model()
    for number, block in enumerate(models.blocks(made)):
        for part in (block.ln_1, block.mlp):  # where it begins, and its last part
            part.register_forward_pre_hook(lambda _, __, n=(number, part): counted.update([n]))
    module, _ = trained.built(strategy, made)
    module(**trained.share(trained.batches(1)[0])).loss.backward()
    found = {}
    for (number, _), times in counted.items():
        found[number] = 1 if 1 in (times, found.get(number)) else max(times, found.get(number, 0))
    return [found[number] for number in sorted(found)]


def _judge_passes(passes):
    for number, found in enumerate(passes):
        if found == 1:
            raise Wrong(f"rank {dist.get_rank()}: block {number} runs forward once per step: what "
                        "it computed is kept for backward",
                        "Wrap every block before it is sharded: blocks[i] = "
                        "checkpoint_wrapper(blocks[i]).")
        if found != 2:
            raise Wrong(f"rank {dist.get_rank()}: block {number} runs forward {found} times per "
                        "step; once in forward and once in backward make 2",
                        "Is it wrapped twice, or something inside it too?")


def _judge_memory(report, usual):
    """At the peak of backward only one block's activations may be there: of the others, the
    input."""
    config = trained.model().config
    inside = activations.saved(config, batch=2, sequence=trained.CONTEXT)["blocks"]
    saved = usual.peaks["backward"].activations - report.peaks["backward"].activations
    if saved < inside / 2:
        raise Wrong(f"rank {dist.get_rank()} still holds "
                    f"{report.peaks['backward'].activations:,} bytes of activations at the peak of "
                    f"backward; without checkpointing it is "
                    f"{usual.peaks['backward'].activations:,}",
                    "If one checkpoint holds the whole model, all of it is there again when "
                    "backward begins: one for each block.")
