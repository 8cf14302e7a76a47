"""Which device holds which piece of each array, under each layout."""

import math
import textwrap
from collections.abc import Callable

from labs.exercises.verdicts import Verdict, Wrong, shows
from labs.pictures import palette
from labs.pictures.picture import WIDTH, Picture
from labs.pictures.sheet import box, sheet, write
from labs.pipeline_parallel.jax_view.layouts import (
    ARRAYS,
    Complaint,
    MeasuredLayout,
    Pieces,
    measure,
)
from labs.pipeline_parallel.jax_view.process import in_jax_process
from labs.words import listed

# Inches. Lengths of tokens, hidden and inner; not to scale, or hidden could not be seen.
_INCHES = {1024: 1.0, 64: 0.72, 256: 1.24}
_TOP, _ROW, _MIDDLE, _LABEL = 0.5, 2.12, 0.9, 0.69  # a layout's height; in it, below its title
_REFUSED = 1.0  # the height of a layout that JAX refuses
_CENTRES = dict(zip(ARRAYS, (0.95, 2.5, 4.25, 6.0, 7.65), strict=True))
_SIGNS = {"x": "@", "up": "→", "h": "@", "down": "→"}  # between an array and the next


@shows("7.26")
def show_layouts(layouts: Callable, mesh: dict[str, int] | None = None) -> Picture | Verdict:
    """Draws what each device really holds of each array. layouts: returns layout -> array ->
    PartitionSpec. mesh: axis -> devices along it; by default one axis "n" of 4."""
    mesh = mesh or {"n": 4}
    measured = measured_layouts(layouts, mesh)
    return measured if isinstance(measured, Verdict) else draw_pieces(measured, mesh)


def measured_layouts(layouts, mesh) -> dict[str, MeasuredLayout] | Verdict:
    """What `measure` has found in JAX's process. Raises Wrong where nothing could be measured."""
    found = in_jax_process(measure, layouts, mesh, devices=math.prod(mesh.values()))
    if isinstance(found, Complaint):
        raise Wrong(found.sentence, found.hint, code=found.code)
    return found


def draw_pieces(measured: dict[str, MeasuredLayout], mesh: dict[str, int]) -> Picture:
    """Draws measured layouts, one below the other."""
    heights = [_REFUSED if layout.refused else _ROW for layout in measured.values()]
    figure, ax = sheet(WIDTH, _TOP + sum(heights))
    axes = " × ".join(f'{size} along "{name}"' for name, size in mesh.items())
    write(ax, 0.12, 0.2, f"A mesh of {axes}. On each piece stand the devices that hold it; grey: "
          "more than one", size=9.5, colour=palette.MUTED)
    lines, top = [], _TOP
    for (name, layout), height in zip(measured.items(), heights, strict=True):
        write(ax, 0.12, top + 0.06, name, size=11, weight="bold")
        words = "refused" if layout.refused else _in_words(layout)
        write(ax, WIDTH - 0.12, top + 0.06, words, size=9.5, ha="right", colour=palette.MUTED)
        if layout.refused:
            write(ax, 0.3, top + 0.5, _wrapped(f"JAX refuses it: {layout.refused}"), size=9.5)
        else:
            _draw_block(ax, top + _MIDDLE, layout)
        lines.append(f"{name}: {words}")
        top += height
    return Picture(figure, "\n".join(lines), data=measured)


def _draw_block(ax, middle, layout):
    for array in ARRAYS:
        pieces, centre = layout.pieces[array], _CENTRES[array]
        high, wide = (_INCHES[size] for size in pieces.shape)
        _draw_array(ax, centre - wide / 2, middle - high / 2, high, wide, pieces)
        write(ax, centre, middle + _LABEL, _label(array, layout.types[array]), size=9.5,
              ha="center", va="top", linespacing=1.2)
        if array in _SIGNS:
            following = ARRAYS[ARRAYS.index(array) + 1]
            left = centre + wide / 2
            right = _CENTRES[following] - _INCHES[layout.pieces[following].shape[1]] / 2
            write(ax, (left + right) / 2, middle, _SIGNS[array], size=13, ha="center",
                  colour=palette.MUTED)


def _label(array, type_) -> str:
    """The array's name and type, which takes a second line where both its axes are cut."""
    text = f"{array}: {type_.removeprefix('float32')}"
    return text.replace(",", ",\n") if len(text) > 18 else text


def _draw_array(ax, left, top, high, wide, pieces: Pieces):
    everyone = len(pieces.by_device)
    rows, columns = pieces.shape
    for ((y0, y1), (x0, x1)), holders in pieces.holders().items():
        x, width = left + wide * x0 / columns, wide * (x1 - x0) / columns
        y, height = top + high * y0 / rows, high * (y1 - y0) / rows
        colour = palette.rank(holders[0]) if len(holders) == 1 else (
            palette.SURFACE if len(holders) == everyone else palette.GRID)
        box(ax, x + 0.012, y + 0.012, width - 0.024, height - 0.024, [colour],
            edge=None if len(holders) == 1 else palette.BORDER)
        write(ax, x + width / 2, y + height / 2, _names(holders, width), ha="center",
              size=9.5 if height > 0.2 else 8, weight="bold", colour=palette.text_on(colour),
              linespacing=1.25)


def _names(holders, width) -> str:
    """The devices' numbers, as many in a line as there is room for."""
    fit = max(1, int((width - 0.05) / 0.14))
    if len(holders) > fit and holders == list(range(holders[0], holders[-1] + 1)):
        return f"{holders[0]}–{holders[-1]}"
    return " ".join(map(str, holders))


def _in_words(layout) -> str:
    weights, activations = (
        sum(layout.pieces[array].bytes(0) for array in group)
        for group in (("up", "down"), ("x", "h", "y")))
    return (f"on each device {weights / 1e3:,.0f} kB of weights and {activations / 1e3:,.0f} kB "
            f"of {listed(['x', 'h', 'y'])}")


def _wrapped(text, width: int = 110) -> str:
    return "\n".join(textwrap.wrap(text, width)[:6])
