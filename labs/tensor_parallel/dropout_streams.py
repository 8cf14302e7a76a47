"""Exercise 7.8: two streams of random numbers, one that the ranks of a tensor-parallel group share,
and one that each has for itself."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy
import torch
import torch.distributed as dist

from labs.checks.inputs import UnchangedInputs, require_dtype
from labs.checks.on_ranks import on_ranks, raise_on_all_ranks
from labs.checks.verdicts import Wrong, check, kind_of, shows
from labs.pictures import palette
from labs.pictures.marks import HEADLINE, headline
from labs.pictures.picture import WIDTH, Picture, canvas
from labs.tensor_parallel.groups import groups_to_try
from labs.words import counted
from labs.workers.launcher import launch

SHAPE, P = (16, 128), 0.25  # of a masked tensor: two masks are never equal by chance
STEPS = 3
SEEDS = (11, 12)  # consecutive, as data-parallel replicas have them
REPLICAS = 2048  # 16,384 ranks in groups of 8; each is tried for one small mask of either kind
WAYS = {False: "a tensor that all ranks have (is_shard=False)", True: "a shard (is_shard=True)"}
_SEEDS_HINT = ("One torch.Generator for each stream. The shared one is seeded by `seed` alone, the "
               "own one also by the rank in the group.")
_COLLIDES = ("Data-parallel replicas have seeds that follow one another: with seed + rank, one's "
             "rank 1 draws what the next one's rank 0 draws; a fixed distance between the streams "
             "is used up after as many replicas. Multiply the seed first.")
_APPLY = "Kept numbers are divided by 1 - p: F.dropout does the same."


@check("7.8")
def check_dropout_streams(streams_class):
    """streams_class(seed, group), with dropout(x, p, is_shard), state_dict() and
    load_state_dict(state)."""
    on_ranks(_try_streams, streams_class)
    return (f"on 2, 3 and 4 ranks, and on two groups of 2: over {STEPS} steps, dropout of "
            "replicated activations has one mask on all ranks, dropout of shards another one on "
            f"each; a new mask in each step, and no stream twice in {REPLICAS:,} replicas; the "
            "state continues where it was saved, and torch's own generator stays as it is")


def _try_streams(streams_class):
    for _, group in groups_to_try():
        _try_group(streams_class, group)
    if dist.get_world_size() == 2:
        _try_replicas(streams_class)


def _try_group(streams_class, group):
    # Groups have other seeds, as other replicas have; within a group all ranks have the same.
    seeds = [seed + 100 * dist.get_process_group_ranks(group)[0] for seed in SEEDS]
    raise_on_all_ranks(_judge_one_call, streams_class, seeds[0], group)
    masks = [draw_masks(streams_class(seed, group)) for seed in seeds]
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, masks)
    by_rank = [everyone[rank] for rank in dist.get_process_group_ranks(group)]
    raise_on_all_ranks(_judge_masks, by_rank)
    raise_on_all_ranks(_judge_reproduced, streams_class, seeds[0], group, masks[0])
    raise_on_all_ranks(_judge_resumed, streams_class, seeds[0], group)


def _try_replicas(streams_class):
    """One rank of each of many replicas after the other, each with a seed of its own."""
    masks = [draw_masks(streams_class(seed, dist.group.WORLD), 1, shape=(4, 64))
             for seed in range(REPLICAS)]
    own = [{is_shard: mask.numpy().tobytes() for is_shard, [mask] in of_seed.items()}
           for of_seed in masks]
    by_rank = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, own)
    raise_on_all_ranks(_judge_replicas, by_rank)


def _judge_replicas(by_rank):
    # Catches streams at a fixed distance, such as seed and seed + 1000 · (rank + 1): then the
    # heads of one replica have the masks of another one's residual stream.
    seen: dict[bytes, _Drawn] = {}
    for rank, of_rank in enumerate(by_rank):
        for seed, masks in enumerate(of_rank):
            for is_shard, mask in masks.items():
                # The shared mask of rank 0 stands for that of all ranks.
                if rank and not is_shard:
                    continue
                drawn = _Drawn(seed, rank, is_shard, 0)
                before = seen.setdefault(mask, drawn)
                if before != drawn:
                    raise Wrong(f"{REPLICAS:,} replicas of {len(by_rank)} ranks: the mask of "
                                f"{drawn} is also that of {before}", _COLLIDES, code="masks_equal")


Masks = dict[bool, list[torch.Tensor]]  # is_shard -> the mask of each step


def draw_masks(streams, steps: int = STEPS, disturb: Callable = lambda: None,
               shape: tuple[int, int] = SHAPE) -> Masks:
    """Returns the masks of so many steps; the two kinds take turns, as in a layer. disturb: called
    between, as other code that draws."""
    found = {False: [], True: []}
    for _ in range(steps):
        for is_shard, masks in found.items():
            disturb()
            # Of ones: what is 0 afterwards was dropped.
            dropped = streams.dropout(torch.ones(shape), P, is_shard)
            if not isinstance(dropped, torch.Tensor):
                raise Wrong(f"dropout returned {kind_of(dropped)}, not a tensor", code="wrong_type")
            masks.append(dropped != 0)
    return found


def masks_of_rank(streams_class, seed: int, shape: tuple[int, int]) -> Masks:
    """On a rank: the masks that the picture draws."""
    return draw_masks(streams_class(seed, dist.group.WORLD), shape=shape)


def _judge_one_call(streams_class, seed, group):
    """The numbers of single calls: what dropout is, whichever stream it draws from."""
    streams = streams_class(seed, group)
    for is_shard, way in WAYS.items():
        for p, dtype in ((P, torch.float32), (0.5, torch.bfloat16), (0.0, torch.float32)):
            who = f"rank {dist.get_rank()}, dropout(x, {p}, is_shard={is_shard})"
            # No zeros, so that a 0 in the result was dropped; not 1, so that a result of the mask
            # alone shows.
            x = torch.full(SHAPE, 3.0, dtype=dtype).requires_grad_()
            kept, default = UnchangedInputs("dropout", x=x), torch.get_rng_state()
            y = streams.dropout(x, p, is_shard)
            kept.judge()
            _judge_numbers(y, x, p, who)
            # Whatever else draws from torch's own generator, such as data or initialization, moves
            # it, on some ranks more than on others.
            if not torch.equal(default, torch.get_rng_state()):
                raise Wrong(f"{who} draws from torch's default generator, on {way}",
                            "Other code draws from it as well, and then the ranks' masks no longer "
                            "agree. torch.rand(..., generator=...) takes one of your own.",
                            code="default_generator")


def _judge_numbers(y, x, p, who):
    if not isinstance(y, torch.Tensor) or y.shape != x.shape:
        raise Wrong(f"{who} returned {kind_of(y)}, not a tensor of x's shape, {list(x.shape)}",
                    code="wrong_shape")
    require_dtype(y, x, f"{who}: the result")
    kept = (y != 0).float().mean().item()
    # 5 standard deviations of a share of 2,048 numbers
    if abs(kept - (1 - p)) > 5 * (p * (1 - p) / x.numel()) ** 0.5:
        raise Wrong(f"{who} keeps {kept:.1%} of the numbers; 1 - p is {1 - p:.0%}",
                    "A number drawn from [0, 1) is below p with probability p.",
                    code="wrong_share_kept")
    # Catches a mask of one row that is repeated, such as one for all sequences of a batch.
    # 128 numbers of a row never agree by chance; the 16 of a column do at times, so a quarter of
    # the columns is enough.
    rows, columns = ((y != 0).unique(dim=dim).shape[dim] for dim in (0, 1))
    if 0 < p and (rows < SHAPE[0] or columns < SHAPE[1] / 4):
        raise Wrong(f"{who}: its mask of shape {list(SHAPE)} has {counted(rows, 'different row')} "
                    f"and {counted(columns, 'different column')}", "Each number of x is dropped or "
                    "kept by itself: draw as many numbers as x has.", code="mask_too_coarse")
    want = x.detach() * (y.detach() != 0) / (1 - p)
    if not torch.allclose(y, want, rtol=1e-2):
        raise Wrong(f"{who}: kept numbers are {y.max().item() / 3:.4g} times what they were, not "
                    f"1/(1 - p) = {1 / (1 - p):.4g}", _APPLY, code="not_scaled")
    # want / 3 is the mask / (1 - p), because x is 3 everywhere.
    gradient = torch.autograd.grad(y.sum(), x, allow_unused=True)[0] if y.requires_grad else None
    if gradient is None or not torch.allclose(gradient, want / 3, rtol=1e-2):
        raise Wrong(f"{who}: x's gradient is not the mask divided by 1 - p", _APPLY,
                    code="wrong_gradient")


def _judge_masks(by_rank: list[list[Masks]]):
    """by_rank: of each rank of the group, the masks of each seed."""
    ranks = len(by_rank)
    first, *others = (of_rank[0] for of_rank in by_rank)
    for step in range(STEPS):
        # Between the regions of tensor parallelism every rank has the same activations. With
        # different masks they are different ones from here on, and nothing raises.
        for rank, masks in enumerate(others, 1):
            if not torch.equal(first[False][step], masks[False][step]):
                raise Wrong(f"step {step}: ranks 0 and {rank} of a group of {ranks} drop different "
                            f"numbers of {WAYS[False]}, where they must agree", _SEEDS_HINT,
                            code="masks_differ")
    # One seed for all: the heads of different ranks, or the pieces of a sequence, have one mask.
    seen: dict[bytes, _Drawn] = {}
    for seed in range(len(SEEDS)):
        for rank, of_rank in enumerate(by_rank):
            for is_shard, masks in of_rank[seed].items():
                if rank and not is_shard:
                    continue  # the same on all ranks, as it must be
                for step, mask in enumerate(masks):
                    drawn = _Drawn(SEEDS[seed], rank, is_shard, step)
                    before = seen.setdefault(mask.numpy().tobytes(), drawn)
                    if before != drawn:
                        raise Wrong(f"group of {ranks} ranks: the mask of {drawn} is also that of "
                                    f"{before}", _hint(before, drawn), code="masks_equal")


class _Drawn(NamedTuple):
    """Which mask it is. rank: 0 for a mask that all ranks have."""

    seed: int
    rank: int
    is_shard: bool
    step: int

    def __str__(self):
        what = f"rank {self.rank}'s shard" if self.is_shard else "the replicated activations"
        return f"{what} in step {self.step}, seed {self.seed}"


def _hint(before: _Drawn, drawn: _Drawn) -> str:
    if before.seed != drawn.seed:
        return _COLLIDES
    if (before.rank, before.is_shard) == (drawn.rank, drawn.is_shard):
        return "A stream continues from call to call: seed it once, when it is made."
    return _SEEDS_HINT


def _judge_reproduced(streams_class, seed, group, want: Masks):
    rank = dist.get_rank()

    def disturb():
        # torch's default generator moves on, on each rank by another number.
        torch.rand(1 + rank)

    again = draw_masks(streams_class(seed, group), disturb=disturb)
    for is_shard, way in WAYS.items():
        if not all(map(torch.equal, want[is_shard], again[is_shard])):
            raise Wrong(f"rank {rank}: a second object with the same seed draws other masks for "
                        f"{way}", "Masks depend on the seed, the group and the number of calls "
                        "before, and on nothing else.", code="not_reproducible")


def _judge_resumed(streams_class, seed, group):
    """A job that is resumed continues with the masks that it would have had."""
    streams = streams_class(seed, group)
    draw_masks(streams, 2)
    state: Any = streams.state_dict()
    if not isinstance(state, dict):
        raise Wrong(f"state_dict() returned {kind_of(state)}, not a dictionary", code="wrong_type")
    copied = copy.deepcopy(state)
    want = draw_masks(streams, 2)  # a state that is the generator itself moves on with it
    resumed = streams_class(seed, group)
    resumed.load_state_dict(state)
    found = draw_masks(resumed, 2)
    for is_shard, way in WAYS.items():
        if all(map(torch.equal, want[is_shard], found[is_shard])):
            continue
        # which of the two it was: a stream that begins again, or a state that is not a copy
        fresh = draw_masks(streams_class(seed, group), 2)[is_shard]
        again = streams_class(seed, group)
        again.load_state_dict(copied)
        is_live = all(map(torch.equal, want[is_shard], draw_masks(again, 2)[is_shard]))
        why = ("it begins from its seed again" if all(map(torch.equal, fresh, found[is_shard]))
               else "the saved state has moved on with the streams" if is_live
               else "it continues with other masks")
        raise Wrong(f"rank {dist.get_rank()}, resumed after 2 steps, dropout of {way}: {why}",
                    "Generator.get_state() returns a copy of the state, a tensor, and set_state "
                    "takes it. Both streams have one.", code="state_not_restored")


RANKS, PICTURE_SHAPE, SEED = 4, (8, 16), 0
_KINDS = {False: "a tensor that all ranks have", True: "this rank's shard"}


@shows("7.8")
def show_masks(streams_class: Callable) -> Picture:
    """Draws the masks of the student's two streams over several steps on 4 ranks: a row for each
    rank, dropped numbers dark."""
    by_rank = launch(masks_of_rank, streams_class, SEED, PICTURE_SHAPE, ranks=RANKS, quiet=True)
    figure, axes = canvas(WIDTH, 3.3 + HEADLINE, nrows=RANKS, ncols=2 * STEPS + 1, squeeze=False,
                          width_ratios=[1] * STEPS + [0.12] + [1] * STEPS)
    different = {is_shard: max(_different(by_rank, is_shard)) for is_shard in _KINDS}
    lesson = (f"In one step {RANKS} ranks have {counted(different[False], 'mask')} for what all "
              f"have, and {counted(different[True], 'mask')} for their shards")
    headline(figure, lesson)
    figure.get_layout_engine().set(wspace=0.03, hspace=0.04)
    for rank, masks in enumerate(by_rank):
        axes[rank][STEPS].set_axis_off()
        for is_shard, of_steps in masks.items():
            for step, mask in enumerate(of_steps):
                ax = axes[rank][step + is_shard * (STEPS + 1)]
                _draw_mask(ax, mask, palette.rank(rank) if is_shard else palette.PLAIN)
                if not rank:
                    ax.set_title(f"step {step}", fontsize=9.5, color=palette.MUTED)
        axes[rank][0].set_ylabel(f"rank {rank}", rotation=0, ha="right", va="center")
    for is_shard, kind in _KINDS.items():
        middle = axes[-1][STEPS // 2 + is_shard * (STEPS + 1)]
        middle.set_xlabel(f"dropout of {kind}", fontsize=10)
    return Picture(figure, f"{lesson}\n{_in_words(by_rank)}", data=by_rank)


def _draw_mask(ax, mask, colour):
    """A mask with the dropped numbers in the colour."""
    pixels = numpy.array([[palette.SURFACE, colour][int(dropped)] for dropped in ~mask.flatten()])
    rgb = numpy.array([[int(pixel[at:at + 2], 16) for at in (1, 3, 5)] for pixel in pixels])
    ax.imshow(rgb.reshape(*mask.shape, 3), aspect="auto", interpolation="nearest")
    ax.set_xticks([])
    ax.set_yticks([])
    for spine in ax.spines.values():
        spine.set(visible=True, color=palette.BORDER)


def _in_words(by_rank: list[Masks]) -> str:
    lines = [f"masks of dropout with p = {P:g}, a row for each rank, a column for each step"]
    for is_shard, kind in _KINDS.items():
        different = _different(by_rank, is_shard)
        lines.append(f"dropout of {kind}: " + ", ".join(
            f"step {step}: {counted(number, 'different mask')} on {len(by_rank)} ranks"
            for step, number in enumerate(different)))
    return "\n".join(lines)


def _different(by_rank, is_shard) -> list[int]:
    """For each step, how many different masks the ranks have."""
    return [len({mask.numpy().tobytes() for mask in masks}) for masks in
            zip(*(of_rank[is_shard] for of_rank in by_rank), strict=True)]
