"""The bridge from notebook 03: what ZeRO-3 promises, by formula, and what fully_shard does."""

from labs.exercises import guessed, shows
from labs.fsdp.measuring import measure
from labs.pictures import fsdp as pictures
from labs.predictions.memory_recipes import model_states
from labs.predictions.traffic import passes, stage_passes
from labs.training import strategies


@shows("4.1")
def beside_zero3(strategy, preset):
    """One rank's states and one step's traffic under DDP and the student's strategy, with what
    ZeRO's formulas of stages 0 and 3 say."""
    variants = {"DDP": strategies.ddp, "your fully_shard": strategy}
    found = measure(variants, preset, rounds=0)
    stages = (0, 3)
    states = pictures.Panel(
        "held after backward", "MB", [_states(r) for r in found.results.values()], 1e6,
        [model_states(found.parameters, ranks=found.size.ranks, stage=s).total for s in stages],
        [None, _bytes(guessed("MB per rank after backward, fully_shard"))])
    travels = pictures.Panel(
        "sent in a step", "Ψ", [_travels(r, found.parameters) for r in found.results.values()], 1,
        [sum(passes(kind) * n for kind, n in stage_passes(s).items()) for s in stages])
    return pictures.side_by_side(list(variants), [states, travels], _note(found))


def _states(result):
    return result.report.phases["backward"]


def _bytes(megabytes):
    return None if megabytes is None else megabytes * 1e6


def _travels(result, parameters) -> float:
    return sum(passes(call.kind) * call.elements for call in result.calls) / parameters


def _note(found) -> str:
    ours, theirs = found.results["your fully_shard"].losses, found.results["DDP"].losses
    apart = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    words = f"differ by at most {apart:.0e}" if apart else "are equal to the last digit"
    return (f"{found.size.ranks} ranks, Ψ = {found.parameters:,}; the losses of {len(ours)} steps "
            f"{words}")
