"""Exercise 7.3: a Llama whose attention and MLPs are sharded over ranks trains as the unsharded
one does, with 1/t of those parameters on each rank and four all-reduces a layer."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from matplotlib.patches import Rectangle
from torch import nn

from labs.checks.guesses import guessed
from labs.checks.invariants import (
    Activations,
    ResidentBytes,
    judge_collectives,
    judge_resident_bytes,
    record_step,
)
from labs.checks.on_ranks import on_ranks, raise_on_all_ranks, torchs_own_refused
from labs.checks.reference import Reference
from labs.checks.verdicts import check, shows
from labs.meters.metrics import Metric, name_of
from labs.pictures import marks, palette
from labs.pictures.bars import Bar, bars
from labs.pictures.picture import WIDTH, Picture
from labs.pictures.sheet import chip, sheet, write
from labs.tensor_parallel.groups import every_second_rank, require_value_error
from labs.tensor_parallel.picture_records import (
    RECORDED_BATCH,
    RECORDED_SEQUENCE,
    RECORDED_SIZES,
    Holding,
    f_at_each_layer,
    record_all_reduces,
    record_holdings,
    record_resident_bytes,
)
from labs.tensor_parallel.whole_batch import (
    ADAMW,
    MEMORY_HINTS,
    SGD,
    STEPS,
    build,
    make_optimizer,
    token_batches,
    train_on_whole_batch,
    whole_steps,
)
from labs.training import models
from labs.words import to_within
from labs.workers.launcher import launch

WORLD_SIZES = (2, 4)
# No parameter has as many elements as an activation, so that a collective tells which it sends.
SIZES = {"layers": 2, "hidden": 48, "heads": 8, "kv_heads": 4, "intermediate": 92, "context": 16}
BATCH, SEQUENCE = 3, 10
PER_LAYER = 4  # all-reduces of b·s·h: f's and g's, of attention and of the MLP
_ATTENTION = r"(?i)attn|attention|[qkvo]_proj"
_MLP = r"(?i)mlp|gate_proj|up_proj|down_proj|intermediate"
COLLECTIVE_HINTS = {
    "all_reduce": "Query, key and value layers take the same input, and so do gate and up: apply f "
                  "once to that input, at the entry of attention and of the MLP. Gradients of "
                  "parameters are not reduced: a shard's is complete, a replicated one's is the "
                  "same on all ranks.",
    "all_gather": "Weights stay where they are: each rank computes with its own shard."}


@dataclass(frozen=True)
class Case:
    """A model and an optimizer to train. pairs: on two groups of every second rank."""

    optimizer: tuple[type, dict]
    tied: bool
    bias: bool
    pairs: bool = False

    def model(self) -> nn.Module:
        """The full model, on the rank's device."""
        return models.move_to_rank(models.llama(tied=self.tied, bias=self.bias, **SIZES))


# The first one finds most; with weight decay, and a bias that shows if it is added twice.
CASES = {2: (Case(ADAMW, False, True), Case(SGD, True, False)),
         4: (Case(SGD, False, True), Case(ADAMW, True, False, pairs=True))}
# ranks -> (sizes, what does not divide, its number, what must be named)
REFUSED = {2: (({"heads": 6, "kv_heads": 3, "hidden": 48}, "3 key/value heads", 3, _ATTENTION),
               ({"intermediate": 97}, "an MLP 97 wide", 97, _MLP)),
           4: (({"heads": 6, "kv_heads": 6, "hidden": 48}, "6 heads of 8 elements", 6, _ATTENTION),
               ({"heads": 8, "kv_heads": 2}, "2 key/value heads", 2, _ATTENTION))}


@check("7.3")
def check_tensor_parallel(tensor_parallel: Callable):
    """tensor_parallel(model, optimizer_class, group=None, **settings) -> (module, optimizer) for a
    Llama of Hugging Face's: attention and MLPs sharded over the group's ranks."""
    difference = max(on_ranks(_try_all, tensor_parallel, world_sizes=WORLD_SIZES, timeout=60))
    return (f"equals the reference over {STEPS} steps on 2 and 4 ranks and on a group of 2 of them "
            f"({to_within(difference)}); a rank holds 1/t of attention and MLP, and sends "
            f"{PER_LAYER} all-reduces of b·s·h elements a layer and step; heads and sizes that do "
            "not divide are refused")


def _try_all(tensor_parallel) -> float:
    ranks = dist.get_world_size()
    with torchs_own_refused():
        first, *others = CASES[ranks]  # most mistakes show in what is judged before the others
        differences = [_train(tensor_parallel, first)]
        _judge_traffic_and_memory(tensor_parallel, ranks)
        for sizes, what, number, module in REFUSED[ranks]:
            # The invariant: sizes that t does not divide raise a ValueError that names attention or
            # the MLP, whichever is at fault, and not the other. Without it heads are cut in two, or
            # the last rows are on no rank, and training continues with wrong numbers.
            small = models.llama(**{**SIZES, "layers": 1, **sizes})
            require_value_error(
                partial(tensor_parallel, small, torch.optim.SGD, lr=0.1), f"a Llama with {what}",
                (number, ranks), module, _MLP if module == _ATTENTION else _ATTENTION)
        return max(differences + [_train(tensor_parallel, case) for case in others])


def _train(tensor_parallel, case: Case) -> float:
    group = every_second_rank() if case.pairs else None
    model = case.model()
    # A copy, because the strategy replaces layers of `model` itself.
    reference = Reference(copy.deepcopy(model), make_optimizer(*case.optimizer))
    # Otherwise without the argument: its default must be all ranks.
    options = {"group": group} if case.pairs else {}
    # All ranks of the group train on the same batch. The invariant: loss and parameters after each
    # step are those of a single process, because only sums are divided, never the batch.
    module, optimizer = raise_on_all_ranks(
        build, partial(tensor_parallel, **options), model, *case.optimizer)
    return train_on_whole_batch(module, optimizer, reference,
                                whole_steps(STEPS, BATCH, SEQUENCE), group)


def _judge_traffic_and_memory(tensor_parallel, ranks):
    case, batches = CASES[ranks][0], token_batches(2, BATCH, SEQUENCE)
    # AdamW keeps two numbers for each element (ResidentBytes.states), so that optimizer state made
    # for the whole model shows.
    make = partial(build, tensor_parallel, optimizer_class=torch.optim.AdamW, settings={"lr": 1e-3})
    traffic = record_step(lambda model: raise_on_all_ranks(make, model), case.model(), batches)
    whole = case.model()
    # The invariant: g of attention and MLP in forward, f of both in backward, and nothing else.
    # Catches f at each of query, key, value, gate and up (7 all-reduces), and an all-reduce of
    # gradients, as DDP does it.
    judge_collectives(traffic, {"all_reduce": PER_LAYER},
                      Activations(SIZES["layers"], BATCH, SEQUENCE, SIZES["hidden"]),
                      hints=COLLECTIVE_HINTS)
    # The invariant: 1/t of attention and MLP is resident after each phase. The model is built
    # inside, so that memory of the whole one which is not freed counts.
    judge_resident_bytes(lambda: make(case.model()), batches,
                         ResidentBytes.of(whole, sharded_names(whole), ranks),
                         "under tensor parallelism", MEMORY_HINTS)


def sharded_names(model: nn.Module) -> list[str]:
    """The parameters that tensor parallelism divides: the linear layers of attention and MLP, but
    for the biases of the row-parallel ones."""
    return [name for name, _ in model.named_parameters() if "_proj." in name
            and not name.endswith(("o_proj.bias", "down_proj.bias"))]


RANKS = (1, 2, 4)
_DIVIDED, _WHOLE = "attention and MLP", "embedding, head and norms"
_LEFT, _GAP, _TOP = 0.15, 0.25, 0.9  # inches


# who holds what


@shows("7.3")
def show_shards(tensor_parallel: Callable, ranks: int = 4) -> Picture:
    """Each matrix of the first layer, drawn to scale as nn.Linear keeps it, [out, in], coloured by
    the rank that holds each part: read from the shapes of the module that the student returns."""
    found = launch(record_holdings, tensor_parallel, ranks=ranks, quiet=True)[0]
    return _draw_shards(found, ranks)


def _draw_shards(found: list[Holding], ranks: int) -> Picture:
    layer = [each for each in found if ".layers.0." in each.name]
    matrices = [each for each in layer if len(each.shape) == 2]
    scale = (WIDTH - 2 * _LEFT - _GAP * len(matrices)) / sum(each.shape[1] for each in matrices)
    high = max(2.2, scale * max(each.shape[0] for each in matrices))
    figure, ax = sheet(WIDTH, _TOP + high + 0.15)
    whole, own = _sizes(layer, ranks)
    lesson = f"A rank of {ranks} has {own / whole:.1%} of the parameters of this layer"
    write(ax, _LEFT, 0.2, lesson, size=11, weight="bold")
    x, lines = _LEFT, []
    for each in matrices:
        name = each.name.split(".")[-2]
        x += _GAP * (name == "gate_proj")  # attention to the left, the MLP to the right
        write(ax, x, _TOP - 0.36, name, size=10, weight="bold")
        write(ax, x, _TOP - 0.15, f"{each.shape[0]} × {each.shape[1]}", size=9,
              colour=palette.MUTED)
        _draw_matrix(ax, x, _TOP, each, scale)
        x += scale * each.shape[1] + _GAP
        lines.append(f"{name} {list(each.shape)}: {_in_words(each)}")
    for rank in range(ranks):
        chip(ax, _LEFT + 0.33 + 0.74 * rank, _TOP + high - 1.1, rank)
    for number, line in enumerate(words := _held_words(found, layer, ranks)):
        write(ax, _LEFT, _TOP + high - 0.76 + 0.23 * number, line, size=9.5)
    return Picture(figure, "\n".join([lesson, *lines, *words]), data=found)


def _draw_matrix(ax, x, y, each, scale):
    """A matrix with out rows and in columns. What all ranks hold is grey."""
    height, width = (scale * size for size in each.shape)
    if each.dimension is None:
        _part(ax, x, y, width, height, palette.BORDER, "all")
        return
    for rank, size in enumerate(each.sizes):
        colour = palette.rank(rank)
        if each.dimension == 0:
            _part(ax, x, y, width, scale * size, colour, f"{rank}")
            y += scale * size
        else:
            _part(ax, x, y, scale * size, height, colour, f"{rank}")
            x += scale * size


def _part(ax, x, y, width, height, colour, words):
    inset = 0.012
    ax.add_patch(Rectangle((x + inset, y + inset), width - 2 * inset, height - 2 * inset,
                           facecolor=colour, edgecolor="none", zorder=2))
    if height > 0.15:  # else the colour alone
        write(ax, x + width / 2, y + height / 2, words, size=9.5, weight="bold", ha="center",
              colour=palette.text_on(colour))


def _held_words(found, layer, ranks) -> list[str]:
    """What a rank has of the layer, and what is replicated."""
    whole, own = _sizes(layer, ranks)
    norms = [each for each in layer if len(each.shape) == 1 and each.dimension is None]
    kept = [each for each in found if ".layers." not in each.name and each.dimension is None]
    names = ", ".join(each.name.removeprefix("model.").removesuffix(".weight") for each in kept)
    lines = [f"This layer has {whole:,} parameters; a rank has {own:,.0f}.",
             f"Replicated: its norms, {sum(map(_size, norms)):,};"]
    return [*lines, f"outside the layers {names}: {sum(map(_size, kept)):,}."]


def _sizes(layer, ranks) -> tuple[int, float]:
    """How many parameters the layer has, and how many of them a rank."""
    own = sum(_size(each) / (ranks if each.dimension is not None else 1) for each in layer)
    return sum(map(_size, layer)), own


def _size(each: Holding) -> int:
    return torch.Size(each.shape).numel()


def _in_words(each: Holding) -> str:
    if each.dimension is None:
        return "replicated"
    kind = "rows" if each.dimension == 0 else "columns"
    return f"{' + '.join(map(str, each.sizes))} {kind} on ranks 0 to {len(each.sizes) - 1}"


# what is communicated


@shows("7.3")
def show_all_reduces(tensor_parallel: Callable, CopyToRegion: type, column_shard: Callable,
                     RowParallelLinear: Callable, ranks: int = 2) -> Picture:
    """All-reduces of b·s·h elements in a layer and step: by the student's `tensor_parallel`, and by
    a variant, made of the student's parts, with f at the entry of each column-parallel layer."""
    variant = partial(f_at_each_layer, CopyToRegion, column_shard, RowParallelLinear)
    # forward: g of attention and of the MLP; backward: f of query, key, value, gate and up
    predicted = {"f at each\ncolumn-parallel layer": (variant, 2 + 3 + 2, None),
                 "your\ntensor_parallel": (tensor_parallel, 2 + 2, guessed("7.3"))}
    rows = [Bar(name, launch(record_all_reduces, strategy, ranks=ranks, quiet=True)[0], formula,
                guess, palette.COLLECTIVES["all_reduce"])
            for name, (strategy, formula, guess) in predicted.items()]
    elements = RECORDED_BATCH * RECORDED_SEQUENCE * RECORDED_SIZES["hidden"]
    return bars(rows, "all-reduces", f"of b·s·h = {elements:,} elements, a layer and step", lesson=(
        f"One f for all layers with the same input: {rows[1].measured:g} all-reduces in place of "
        f"{rows[0].measured:g}"))


# what stays


@shows("7.3")
def show_resident_bytes(tensor_parallel: Callable) -> Picture:
    """Bytes of parameters, gradients and AdamW's state of one of 1, 2 and 4 ranks after backward,
    beside 1/t of what one rank has."""
    held = [launch(record_resident_bytes, tensor_parallel, ranks=ranks, quiet=True)[0]
            for ranks in RANKS]
    total, guess = sum(held[0]), guessed("7.3b")
    names = [f"{ranks} rank{'s' * (ranks > 1)}" for ranks in RANKS]
    guesses = [None, None, total / guess / 1e6 if guess else None]
    drawn = [_Bar({_DIVIDED: divided / 1e6, _WHOLE: whole / 1e6},
                  f"{(divided + whole) / 1e6:.2f} MB", total / ranks / 1e6, tick)
             for ranks, (divided, whole), tick in zip(RANKS, held, guesses, strict=True)]
    lesson = (f"On {RANKS[-1]} ranks each has 1/{total / sum(held[-1]):.2f} of one rank's bytes: "
              f"{_WHOLE} are replicated")
    answer = marks.answered(guess, total / sum(held[-1]), "times")
    note = "\n".join([*filter(None, [answer]), f"predicted: 1/t of {total / 1e6:.2f} MB"])
    figure, _ = marks.bar_chart(names, [drawn], ["MB of parameters, gradients and AdamW's state"],
                                1.3 + 0.5 * len(names) + marks.HEADLINE
                                + marks.NOTE_LINE * bool(answer))
    marks.headline(figure, lesson)
    marks.note_below(figure, note)
    marks.draw_legend(figure, drawn)
    words = [", ".join([f"{name}: {bar.label}{bar.by_part()}", *bar.tick_words()])
             for name, bar in zip(names, drawn, strict=True)]
    return Picture(figure, "\n".join([lesson, *words, note]), data=held, metrics=[
        Metric(name_of(name, "resident"), sum(each), "bytes", divided / ranks + whole)
        for name, each, ranks in zip(names, held, RANKS, strict=True)
        for divided, whole in held[:1]])


class _Bar(marks.LabelledBar):
    """Two parts: what is sharded, and what is replicated."""

    def style(self, part: str) -> dict:
        colour = palette.MEMORY["parameters" if part == _DIVIDED else "other"]
        return {"facecolor": colour, "edgecolor": "white", "linewidth": 0.5}
