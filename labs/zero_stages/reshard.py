"""Exercise 3.7: sharded state that N ranks saved is loaded on M ranks, and never gathered."""

import itertools
import math
from collections.abc import Callable

import torch

from labs.checks.guesses import guessed
from labs.checks.numbers import as_number
from labs.checks.on_ranks import BATCH, raise_on_all_ranks
from labs.checks.reference import Reference, Step
from labs.checks.training import Hints, judge_parameters
from labs.checks.verdicts import Wrong, check, kind_of, shows
from labs.pictures import palette
from labs.pictures.bars import Bar, bars
from labs.pictures.picture import Picture
from labs.training import data
from labs.training.loop import train
from labs.training.models import EdgeCaseModel
from labs.words import to_within
from labs.workers.launcher import launch
from labs.zero_stages.scaffold import ShardedOptimizer, load_sharded_state_dict, sharded_state_dict
from labs.zero_stages.stage_training import SETTINGS, adamw, build, parameters_of

# 1597 is prime, so no number of ranks divides it, and 12 is divided by most. 5 and 1 leave ranks
# with padding only.
CASES = [(size, before, after) for size in (1597, 12, 5, 1) for before, after in
         ((3, 2), (2, 3), (4, 2), (1, 4), (2, 2), (3, 1), (5, 7), (7, 5))]
RANKS = (3, 2, 4)  # one training, saved and loaded on fewer ranks, then on more
STEPS = 2  # on each
HINTS = Hints(unexplained="Parameters and both moments must come back to their places.")


@check("3.7")
def check_reshard(reshard: Callable, strategy: Callable):
    """reshard(read, elements, before, after, rank): the shard of one of the `after` new ranks, from
    slices of the old ones. strategy: ZeRO-1."""
    for size, before, after in CASES:
        # Old padding of zeros hides in parameters that are zero; of NaN, it shows in a new shard.
        for rank, padding in itertools.product(range(after), (0.0, math.nan)):
            _judge_shard(reshard, size, before, after, rank, padding)
    return (f"each new rank reads what it needs, once; saved on {RANKS[0]} ranks, loaded on "
            f"{RANKS[1]}, then on {RANKS[2]}: training continues as if never interrupted "
            f"({to_within(_resume(reshard, strategy))})")


def shards_of(flat: torch.Tensor, ranks: int, padding: float = 0.0) -> list[torch.Tensor]:
    """The shards of a flat tensor on so many ranks, padded with zeros or with another number."""
    return list(torch.cat([flat, flat.new_full((-len(flat) % ranks,), padding)]).view(ranks, -1))


class CountingReader:
    """read(old, begin, end) of the shards that are given, and how many elements were read."""

    def __init__(self, shards):
        self.shards, self.elements = shards, 0

    def __call__(self, old, begin, end):
        old, begin, end = (as_number(each) for each in (old, begin, end))
        length = len(self.shards[0])
        if old not in range(len(self.shards)):
            raise Wrong(f"read({old}, {begin}, {end}): the old ranks are 0 to "
                        f"{len(self.shards) - 1}", "before, not after, says how many there were.",
                        code="no_such_rank")
        if None in (begin, end) or not 0 <= begin <= end <= length:
            raise Wrong(f"read({old}, {begin}, {end}): a shard of {len(self.shards)} ranks has "
                        f"elements 0 to {length}", "begin and end count from the beginning of the "
                        "old shard, not of the full tensor.", code="out_of_range")
        # Counts what is read: overlaps that are read twice count twice.
        self.elements += end - begin
        return self.shards[int(old)][int(begin):int(end)].clone()


def _judge_shard(reshard, size, before, after, rank, padding):
    case = f"{size} elements from {before} to {after} ranks, new rank {rank}"
    # Some of the data is zero at the end: only `elements` says where padding begins.
    flat = torch.arange(1.0, size + 1)  # (size,)
    flat[size - size // 4:] = 0
    read, want = CountingReader(shards_of(flat, before, padding)), shards_of(flat, after)[rank]
    got = reshard(read, size, before, after, rank)
    if not isinstance(got, torch.Tensor):
        raise Wrong(f"reshard returned {kind_of(got)}, not a tensor",
                    "Return the shard of the rank that was asked for.", code="wrong_type")
    # Old padding that is kept makes shards too long, and lies between parameters.
    if got.shape != want.shape:
        raise Wrong(f"{case}: {_size(got)}, not {_size(want)}",
                    "All new shards are equally long: elements / after, rounded up.",
                    code="wrong_shape")
    # Only the old padding is NaN here.
    if got.isnan().any():
        raise Wrong(f"{case}: what was padding in the old shards (NaN here) is in the new shard",
                    "Read up to the last of `elements`, not to the end of the old shard: nothing "
                    "says what its padding holds. The new padding is zeros.", code="padding_kept")
    if not got.equal(want):
        raise Wrong(f"{case}: its numbers are other numbers than its own",
                    "Its elements are rank·k to (rank+1)·k of the full tensor, without padding; "
                    "old rank r has those from r times the old k on.", code="wrong_elements")
    # A rank that reads everything needs memory for everything, which does not fit on one rank.
    if read.elements > len(want):
        raise Wrong(f"{case}: {read.elements:,} elements are read to fill a shard of {len(want):,}",
                    "Read of an old shard only the part that overlaps with the new one.",
                    code="reads_too_much")


def _size(shard) -> str:
    return f"{len(shard)} numbers" if shard.dim() == 1 else f"a shape of {tuple(shard.shape)}"


def _resume(reshard, strategy) -> float:
    """Trains on each of RANKS in turn, from what was saved before; the largest difference."""
    saved, worst = None, 0.0
    for number, ranks in enumerate(RANKS):
        results = launch(_train, strategy, saved, reshard, number, ranks=ranks, quiet=True)
        saved = [state for state, _ in results]  # by rank
        worst = max(worst, *(difference for _, difference in results))
    return worst


def _train(strategy, saved, reshard, number) -> tuple[list[dict], float]:
    """On a rank: STEPS steps of a new training, or of the one that was saved: (what to save, the
    largest difference from a reference that was never interrupted)."""
    reference = Reference(EdgeCaseModel(seed=0), adamw)
    steps = [Step(batch, lambda rank: True) for batch in data.xy_batches(len(RANKS) * STEPS, BATCH)]
    model = EdgeCaseModel(seed=0)
    module, optimizer = raise_on_all_ranks(build, strategy, model, SETTINGS)
    if not isinstance(optimizer, ShardedOptimizer):
        raise Wrong(f"the strategy's optimizer is {kind_of(optimizer)}, not a "
                    "lab.ShardedOptimizer", "Give your ZeRO-1 of exercise 3.2.",
                    code="wrong_strategy")
    if saved:
        load_sharded_state_dict(optimizer, saved, reshard)
    begin = number * STEPS
    train(module, optimizer, [step.inputs() for step in steps[begin:begin + STEPS]])
    # The reference trains from step 0 in every launch: it is never interrupted.
    for step in steps[:begin + STEPS]:
        reference.train(step)
    when = (f"{STEPS} steps after loading on {RANKS[number]} ranks" if saved
            else f"after {STEPS} steps on {RANKS[0]} ranks, before anything is saved")
    found = parameters_of(module, model)
    if found is None:
        raise Wrong(f"the parameters have no memory {when}", "Give your ZeRO-1 of exercise 3.2.",
                    code="wrong_strategy")
    # Parameters alone could come back right: steps after loading also show lost or moved moments.
    difference = raise_on_all_ranks(judge_parameters, found, [reference], when, (), HINTS)
    return sharded_state_dict(optimizer), difference


@shows("3.7")
def show_reads(reshard: Callable, before: int = 512, after: int = 8, total: int = 840) -> Picture:
    """Draws the GB that a new rank reads: all shards, as who joins them would, and what `reshard`
    reads of them, counted on a model in which an element stands for 10 MB. total: GB."""
    elements = 100 * total
    read = CountingReader(shards_of(torch.ones(elements), before))
    reshard(read, elements, before, after, 0)
    rows = [Bar("all shards, joined and cut again", total, colour=palette.PLAIN),
            Bar("your reshard", read.elements / 100, total / after, guessed("3.7"), palette.PLAIN)]
    return bars(rows, "GB", f"read by one of {after} ranks, saved by {before}",
                note="Counted with tensors in which one element stands for 10 MB.",
                source="counted", lesson=(
                    f"Your reshard reads {rows[1].measured / total:.1%} of all shards"))
