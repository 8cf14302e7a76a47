"""The bridge from notebook 03: the ZeRO-3 that was built there beside fully_shard, on one model."""

from functools import partial

from labs.exercises import previous_work
from labs.exercises.guesses import guessed
from labs.exercises.verdicts import Wrong, shows
from labs.fsdp.measuring import measure
from labs.pictures import fsdp as pictures
from labs.pictures import palette
from labs.predictions.memory_recipes import model_states
from labs.predictions.traffic import passes, stage_passes
from labs.training import strategies

FREED = "fully_shard,\nroot freed too"


@shows("3.4")
def your_zero3() -> previous_work.PreviousStrategy:
    """The strategy zero3 of the student's notebook 03, if it trains, holds and sends as ZeRO-3 does
    on 2 ranks; else that of the worked answer, and why."""
    return previous_work.previous_strategy("03_zero_stages", "zero3", "3.4", _judged)


def _judged(zero3) -> str:
    from labs.zero_stages.checks.stages import verify_stage

    return f"equals its twin on 2 ranks (to {verify_stage(zero3, 3, world_sizes=(2,)):.0e})"


@shows("4.1")
def beside_zero3(zero3, strategy, preset):
    """What one rank holds and sends under DDP, ZeRO-3 by hand, the student's fully_shard, and the
    same with its root freed after forward as well; with what ZeRO's formulas say."""
    return drawn(measured(zero3, strategy, preset))


def drawn(found):
    """The picture of what `measured` found."""
    results, stages = found.results.values(), (0, 3, 3, 3)
    states = pictures.Panel(
        "held after backward", "MB", [r.report.phases["backward"] for r in results], 1e6,
        [model_states(found.parameters, ranks=found.size.ranks, stage=s).total for s in stages],
        [None, None, _bytes(guessed("MB per rank after backward, fully_shard")), None])
    sent = pictures.Panel(
        "sent in a step", "Ψ", [travels(r, found.parameters) for r in results], 1,
        [sum(passes(kind) * n for kind, n in stage_passes(s).items()) for s in stages],
        colour=palette.PHASES["communication"])
    calls = pictures.Panel("collectives", "per step", [len(r.calls) for r in results],
                           colour=palette.PHASES["communication"])
    return pictures.side_by_side(list(found.results), [states, sent, calls], _note(found))


def measured(zero3, strategy, preset):
    """The four of `beside_zero3`, as labs.fsdp.measuring.Measured."""
    variants = {"DDP": strategies.ddp, "ZeRO-3 by hand": zero3, "fully_shard": strategy,
                FREED: partial(_root_freed, strategy)}
    return measure(variants, preset, rounds=0)


def _root_freed(strategy, model, optimizer_class, **settings):
    module, optimizer = strategy(model, optimizer_class, **settings)
    if not hasattr(module, "set_reshard_after_forward"):
        raise Wrong("the module is no unit of FSDP's", "fully_shard(model) comes last.")
    module.set_reshard_after_forward(True, recurse=False)
    return module, optimizer


def _bytes(megabytes):
    return None if megabytes is None else megabytes * 1e6


def travels(result, parameters: int) -> float:
    """How many Ψ a step sends, an all-reduce counted twice; each rank sends (N-1)/N."""
    return sum(passes(call.kind) * call.elements for call in result.calls) / parameters


def _note(found) -> str:
    by_name = [result.losses for result in found.results.values()]
    apart = max(max(step) - min(step) for step in zip(*by_name, strict=True))
    words = f"are {apart:.0e} apart at most" if apart else "are equal to the last digit"
    return (f"{found.size.ranks} ranks, Ψ = {found.parameters:,}; the four losses of each of "
            f"{len(by_name[0])} steps {words}")
