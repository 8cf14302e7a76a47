"""Exercise 3.7: what one number of ranks saved is loaded on another."""

from collections.abc import Callable

import torch

from labs.exercises.on_ranks import BATCH, raise_on_all_ranks
from labs.exercises.reference import Hints, Reference, Step, judge_parameters
from labs.exercises.verdicts import Wrong, check, kind_of
from labs.training import data
from labs.training.loop import train
from labs.training.models import EdgeCaseModel
from labs.workers.launcher import launch
from labs.zero_stages.checks.reference import SETTINGS, adamw, build, parameters_of
from labs.zero_stages.scaffold.checkpoint import load_sharded_state_dict, sharded_state_dict
from labs.zero_stages.scaffold.optimizer import ShardedOptimizer

CASES = [(size, before, after) for size in (1597, 12, 5) for before, after in
         ((2, 3), (3, 2), (4, 2), (1, 4), (2, 2))]
SAVED, LOADED = 3, 2  # ranks before and after
STEPS = 2  # on each
HINTS = Hints(unexplained="Parameters and both moments must come back to their places.")


@check("3.7")
def check_reshard(reshard: Callable, strategy: Callable):
    """reshard(shards, elements, ranks): the shards of another number of ranks. strategy: ZeRO-1."""
    for size, before, after in CASES:
        _reject_wrong_shards(reshard, size, before, after)
    return (f"saved on {SAVED} ranks, loaded on {LOADED}: training goes on as if never interrupted "
            f"(to {_resume(reshard, strategy):.0e})")


def _shards(size, ranks) -> list[torch.Tensor]:
    flat = torch.arange(1.0, size + 1)
    return list(torch.cat([flat, flat.new_zeros(-size % ranks)]).view(ranks, -1))


def _reject_wrong_shards(reshard, size, before, after):
    case = f"{size} elements from {before} to {after} ranks"
    want, got = _shards(size, after), reshard(_shards(size, before), size, after)
    if not isinstance(got, list | tuple) or not all(isinstance(p, torch.Tensor) for p in got):
        raise Wrong(f"reshard returned {kind_of(got)}, not a list of tensors",
                    "A list with one piece for each rank.")
    if len(got) != after:
        raise Wrong(f"{case}: {len(got)} pieces", "One piece for each of the new ranks.")
    for rank, (mine, right) in enumerate(zip(got, want, strict=True)):
        # Old padding that is kept makes shards too long, and lies between parameters.
        if mine.shape != right.shape:
            raise Wrong(f"{case}: rank {rank} gets {_size(mine)}, not {_size(right)}",
                        "The old padding goes, new padding comes: equal pieces, rounded up.")
        if not mine.equal(right):
            raise Wrong(f"{case}: rank {rank} gets other numbers than are its own",
                        "Put the old pieces together in the order of the ranks, take the padding "
                        "off, and cut again.")


def _size(shard) -> str:
    return f"{len(shard)} numbers" if shard.dim() == 1 else f"a shape of {tuple(shard.shape)}"


def _resume(reshard, strategy) -> float:
    """Trains on SAVED ranks, saves, loads on LOADED ranks and trains on; the largest difference."""
    first = launch(_train, strategy, None, reshard, ranks=SAVED, quiet=True, device="cpu")
    saved = [state for state, _ in first]
    second = launch(_train, strategy, saved, reshard, ranks=LOADED, quiet=True, device="cpu")
    return max(difference for _, difference in second)


def _train(strategy, saved, reshard) -> tuple[list[dict], float]:
    """On a rank: STEPS steps of a new training, or of the one that was saved: (what to save, the
    largest difference from a reference that was never interrupted)."""
    reference = Reference(EdgeCaseModel(seed=0), adamw)
    steps = [Step(batch, lambda rank: True) for batch in data.xy_batches(2 * STEPS, BATCH)]
    model = EdgeCaseModel(seed=0)
    module, optimizer = raise_on_all_ranks(build, strategy, model, SETTINGS)
    if not isinstance(optimizer, ShardedOptimizer):
        raise Wrong(f"the strategy's optimizer is {kind_of(optimizer)}, not a "
                    "lab.ShardedOptimizer", "Give your ZeRO-1 of exercise 3.2.")
    if saved:
        load_sharded_state_dict(optimizer, saved, reshard)
    own = steps[STEPS:] if saved else steps[:STEPS]
    train(module, optimizer, [step.inputs() for step in own])
    for step in steps if saved else steps[:STEPS]:
        reference.train(step)
    when = (f"{STEPS} steps after loading on {LOADED} ranks" if saved
            else f"after {STEPS} steps on {SAVED} ranks, before anything is saved")
    found = parameters_of(module, model)
    if found is None:
        raise Wrong(f"the parameters have no memory {when}", "Give your ZeRO-1 of exercise 3.2.")
    # Parameters alone could come back right: steps after loading also show lost or moved moments.
    difference = raise_on_all_ranks(judge_parameters, found, [reference], when, (), HINTS)
    return sharded_state_dict(optimizer), difference
