"""What tensor parallelism of the layers holds and sends: pictures that run the student's code."""

from collections.abc import Callable
from functools import partial

import torch
from matplotlib.patches import Rectangle

from labs.exercises.guesses import guessed
from labs.exercises.verdicts import shows
from labs.meters.metrics import Metric, name_of
from labs.pictures import marks, palette
from labs.pictures.bars import Bar, bars
from labs.pictures.picture import WIDTH, Picture
from labs.pictures.sheet import chip, sheet, write
from labs.tensor_parallel.charts.recording import (
    BATCH,
    SEQUENCE,
    SIZES,
    Holding,
    f_at_each_layer,
    record_all_reduces,
    record_holdings,
    record_resident_bytes,
)
from labs.workers.launcher import launch

RANKS = (1, 2, 4)
_DIVIDED, _WHOLE = "attention and MLP", "embedding, head and norms"
_LEFT, _GAP, _TOP = 0.15, 0.25, 0.62  # inches


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
    return Picture(figure, "\n".join([*lines, *words]), data=found)


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
    """What a rank has of the layer, and what every rank has whole."""
    whole = sum(_size(each) for each in layer)
    own = sum(_size(each) / (ranks if each.dimension is not None else 1) for each in layer)
    norms = [each for each in layer if len(each.shape) == 1 and each.dimension is None]
    kept = [each for each in found if ".layers." not in each.name and each.dimension is None]
    names = ", ".join(each.name.removeprefix("model.").removesuffix(".weight") for each in kept)
    lines = [f"This layer has {whole:,} parameters; a rank has {own:,.0f}.",
             f"Whole on every rank: its norms, {sum(map(_size, norms)):,};"]
    return [*lines, f"outside the layers {names}: {sum(map(_size, kept)):,}."]


def _size(each: Holding) -> int:
    return torch.Size(each.shape).numel()


def _in_words(each: Holding) -> str:
    if each.dimension is None:
        return "whole on every rank"
    kind = "rows" if each.dimension == 0 else "columns"
    return f"{' + '.join(map(str, each.sizes))} {kind} on ranks 0 to {len(each.sizes) - 1}"


# what travels


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
    elements = BATCH * SEQUENCE * SIZES["hidden"]
    return bars(rows, "all-reduces", f"of b·s·h = {elements:,} elements, a layer and step")


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
    note = (f"predicted: 1/t of {total / 1e6:.2f} MB. What a rank of {RANKS[-1]} has is "
            f"{total / sum(held[-1]):.2f} times smaller.")
    figure, _ = marks.bar_chart(names, [drawn], ["MB of parameters, gradients and AdamW's state"],
                                1.3 + 0.5 * len(names))
    marks.note_below(figure, note)
    marks.draw_legend(figure, drawn)
    words = [", ".join([f"{name}: {bar.label}{bar.by_part()}", *bar.tick_words()])
             for name, bar in zip(names, drawn, strict=True)]
    return Picture(figure, "\n".join([*words, note]), data=held, metrics=[
        Metric(name_of(name, "resident"), sum(each), "bytes", divided / ranks + whole)
        for name, each, ranks in zip(names, held, RANKS, strict=True)
        for divided, whole in held[:1]])


class _Bar(marks.LabelledBar):
    """Two parts: what the ranks divide, and what each has whole."""

    def style(self, part: str) -> dict:
        colour = palette.MEMORY["parameters" if part == _DIVIDED else "other"]
        return {"facecolor": colour, "edgecolor": "white", "linewidth": 0.5}
