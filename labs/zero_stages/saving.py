"""Saving and loading when no rank has everything, and the check of exercise 3.7."""

import torch
import torch.distributed as dist

from labs.exercises.on_ranks import BATCH, raise_on_all_ranks, worst
from labs.exercises.verdicts import Wrong, check, kind_of
from labs.training import data
from labs.training.models import EdgeCaseModel
from labs.workers.launcher import launch
from labs.zero_stages.optimizer import ShardedOptimizer
from labs.zero_stages.twin import SETTINGS, Twin, built, parameters_of

CASES = [(size, before, after) for size in (1597, 12, 5) for before, after in
         ((2, 3), (3, 2), (4, 2), (1, 4), (2, 2))]
SAVED, LOADED = 3, 2  # ranks before and after
STEPS = 2  # on each


def saved(optimizer) -> list:
    """On a rank: what this rank must write to go on later, a dict for each flat tensor: how many
    elements it has, this rank's shard, and the shards of its optimizer state."""
    return [{"elements": flat.elements, "shard": flat.shard.detach().clone(),
             "state": {name: value.clone() for name, value in optimizer.state[flat.shard].items()}}
            for flat in optimizer.flats]


def load(optimizer, files: list, reshard) -> None:
    """On a rank: goes on from what the ranks of an earlier run `saved`, however many they were;
    files[r] is rank r's."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for number, flat in enumerate(optimizer.flats):
        parts = [file[number] for file in files]

        def mine(pieces, flat=flat):
            return reshard(pieces, flat.elements, ranks)[rank]

        with torch.no_grad():
            flat.shard.copy_(mine([part["shard"] for part in parts]))
        optimizer.state[flat.shard] = {
            name: mine([part["state"][name] for part in parts]).clone() if value.dim() else value
            for name, value in parts[0]["state"].items()}
    optimizer.gather()


@check("3.7")
def check_reshard(reshard, strategy):
    """reshard(pieces, elements, ranks): the shards of another number of ranks. strategy: ZeRO-1."""
    for size, before, after in CASES:
        _judge_pieces(reshard, size, before, after)
    difference = _go_on(reshard, strategy)
    return (f"saved on {SAVED} ranks, loaded on {LOADED}: training goes on as if never interrupted "
            f"(to {difference:.0e})")


def _pieces(size, ranks) -> list:
    flat = torch.arange(1.0, size + 1)
    return list(torch.cat([flat, flat.new_zeros(-size % ranks)]).view(ranks, -1))


def _judge_pieces(reshard, size, before, after):
    who = f"{size} elements from {before} to {after} ranks"
    want, got = _pieces(size, after), reshard(_pieces(size, before), size, after)
    if not isinstance(got, list | tuple) or not all(isinstance(p, torch.Tensor) for p in got):
        raise Wrong(f"reshard returned {kind_of(got)}, not a list of tensors",
                    "A list with one piece for each rank.")
    if len(got) != after:
        raise Wrong(f"{who}: {len(got)} pieces", "One piece for each of the new ranks.")
    for rank, (mine, right) in enumerate(zip(got, want, strict=True)):
        if mine.shape != right.shape:
            raise Wrong(f"{who}: rank {rank} gets {_size(mine)}, not {_size(right)}",
                        "The old padding goes, new padding comes: equal pieces, rounded up.")
        if not mine.equal(right):
            raise Wrong(f"{who}: rank {rank} gets other numbers than are its own",
                        "Put the old pieces together in the order of the ranks, take the padding "
                        "off, and cut anew.")


def _size(piece):
    return f"{len(piece)} numbers" if piece.dim() == 1 else f"a shape of {tuple(piece.shape)}"


def _go_on(reshard, strategy) -> float:
    first = launch(_train, strategy, None, reshard, ranks=SAVED, quiet=True, device="cpu")
    files = [file for file, _ in first]
    second = launch(_train, strategy, files, reshard, ranks=LOADED, quiet=True, device="cpu")
    return max(difference for _, difference in second)


def _train(strategy, files, reshard) -> tuple:
    """On a rank: some steps, of a new training or of that which was saved in `files`: (what is to
    be saved, the largest difference from a twin that was never interrupted)."""
    twin = Twin("zero")
    batches = data.xy_batches(2 * STEPS, BATCH)
    model = EdgeCaseModel(seed=0)
    module, optimizer = raise_on_all_ranks(built, strategy, model, SETTINGS)
    if not isinstance(optimizer, ShardedOptimizer):
        raise Wrong(f"the strategy's optimizer is {kind_of(optimizer)}, not a "
                    "lab.ShardedOptimizer", "Give your ZeRO-1 of exercise 3.2.")
    if files:
        load(optimizer, files, reshard)
    for batch in batches[STEPS:] if files else batches[:STEPS]:
        share = data.shard(batch, dist.get_rank(), dist.get_world_size())
        module(**share, use_all=True).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for batch in batches[:2 * STEPS if files else STEPS]:
        twin.step(batch, lambda rank: True, 1, scheduled=False)
    found = parameters_of(module, model)
    return saved(optimizer), raise_on_all_ranks(_judge_end, found, twin, bool(files))


def _judge_end(found, twin, loaded) -> float:
    worst_name, difference = max(
        ((name, worst(found[name], p.detach())) for name, p in twin.model.named_parameters()),
        key=lambda pair: pair[1])
    if difference > 1e-4:
        when = (f"{STEPS} steps after loading on {LOADED} ranks" if loaded
                else f"{STEPS} steps on {SAVED} ranks, before anything is saved")
        raise Wrong(f"rank {dist.get_rank()}, parameter {worst_name!r}, {when}: it differs from "
                    f"that of a run without a break by {difference:.2g}",
                    "Parameters and both moments must come back to their places.")
    return difference
