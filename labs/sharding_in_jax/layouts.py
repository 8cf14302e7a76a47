"""Exercise 7.26: DDP, FSDP and tensor parallelism as PartitionSpecs, judged by what each device
holds and by the collectives of the compiled program; and the picture of which device holds which
piece of each array."""

import math
import textwrap
from collections.abc import Callable
from dataclasses import replace

from labs.checks.student_code import shortened
from labs.checks.verdicts import Verdict, Wrong, check, shows
from labs.pictures import palette
from labs.pictures.picture import WIDTH, Picture
from labs.pictures.sheet import box, sheet, write
from labs.sharding_in_jax.jax_layouts import ARRAYS, Complaint, MeasuredLayout, Pieces, measure
from labs.sharding_in_jax.jax_process import in_jax_process
from labs.words import counted, listed

DEVICES = 4
WHOLE, ANY = None, "any"
# Layout -> array -> the dimension along which it is cut. FSDP may cut a weight along any.
_CUT = {"DDP": {"up": WHOLE, "down": WHOLE, "x": 0, "h": 0, "y": 0},
        "FSDP": {"up": ANY, "down": ANY, "x": 0, "h": 0, "y": 0},
        "TP": {"up": 1, "down": 0, "x": WHOLE, "h": 1, "y": WHOLE}}
_HINTS = {
    "DDP": "DDP: each device has its own tokens, from x to y, and all weights.",
    "FSDP": "FSDP: tokens as in DDP; each weight is cut, so that a device keeps 1/4 of it.",
    "TP": "TP: all tokens everywhere. up is cut by columns (7.2), so h is too; down by the rows "
          "that fit them, and y is their sum."}
_REFUSED = {
    "illegally sharded": "Both dimensions of h would be cut along the same axis of the mesh: cut "
                         "this weight along its other dimension.",
    "ambiguous": "Both sides of a product are cut along the dimension that it sums over.",
    "not found in mesh": 'The mesh has one axis, "n".'}
# Scalars, such as the mean loss, may be reduced in addition.
_FEW = 64  # bytes


@check("7.26")
def check_layouts(layouts: Callable):
    """layouts(): layout -> array -> PartitionSpec, for DDP, FSDP and TP."""
    measured = measured_layouts(layouts, {"n": DEVICES})
    if isinstance(measured, Verdict):
        return replace(measured, exercise="7.26")
    return judge(measured)


def judge(measured: dict[str, MeasuredLayout]) -> str:
    """The sentence for right layouts; raises Wrong for others."""
    missing = [name for name in _CUT if name not in measured]
    if missing:
        raise Wrong(f"layouts() has no {listed(missing)}; it has "
                    f"{listed(measured) if measured else 'none'}", code="missing_keys")
    for name, cuts in _CUT.items():
        _judge_pieces(name, measured[name], cuts)
        _judge_collectives(name, measured[name])
    worst = max(measured[name].difference for name in _CUT)
    return (f"on {DEVICES} devices DDP all-reduces the gradients; FSDP keeps 1/{DEVICES} of the "
            "weights and gathers them; TP all-reduces y and x's gradient, no weight; loss and "
            f"gradients equal one device's (max difference {worst:.0e})")


def _judge_pieces(name, layout, cuts):
    if layout.refused:
        hint = next((hint for part, hint in _REFUSED.items() if part in layout.refused), "")
        raise Wrong(f"{name}: JAX refuses it. {shortened(layout.refused, 400, 4)}",
                    hint or _HINTS[name], code="layout_refused")
    # What a device really holds: a spec that cuts nothing leaves the whole array on each of them.
    for array, cut in cuts.items():
        pieces, device = layout.pieces[array], DEVICES - 1
        if not _is_cut(pieces, cut):
            raise Wrong(f"{name}: device {device} holds {_held(pieces, device)} of {array}, "
                        f"{layout.types[array]}; it should hold {_wanted(pieces, cut)}",
                        _HINTS[name], code="wrong_pieces")


def _is_cut(pieces: Pieces, cut) -> bool:
    parts = [tuple(end - first for first, end in index) for index in pieces.holders()]
    dimensions = range(len(pieces.shape)) if cut == ANY else [cut]
    # Different parts: 4 of the size of a quarter, or one of the full size that all devices hold.
    return any(set(parts) == {_part(pieces.shape, dimension)}
               and len(parts) == (1 if dimension is WHOLE else DEVICES) for dimension in dimensions)


def _part(shape, cut) -> tuple[int, ...]:
    return tuple(size // DEVICES if number == cut else size for number, size in enumerate(shape))


def _held(pieces, device) -> str:
    sides = [f"{end - first} of {size} {side}" for (first, end), size, side in zip(
        pieces.by_device[device], pieces.shape, ("rows", "columns"), strict=True)
        if end - first < size]
    return listed(sides) if sides else "the full array"


def _wanted(pieces, cut) -> str:
    if cut is WHOLE:
        return "the full array"
    if cut == ANY:
        return f"1/{DEVICES} of it, another piece than the others"
    side = ("rows", "columns")[cut]
    return f"{pieces.shape[cut] // DEVICES} of {pieces.shape[cut]} {side}"


def _judge_collectives(name, layout):
    """The traffic of the layout's kind, by bytes: what is combined into one call may differ."""
    # Bytes of the whole arrays in float32.
    whole = {array: 4 * _elements(layout.pieces[array].shape) for array in ARRAYS}
    weights = whole["up"] + whole["down"]
    most = {"DDP": {"gather": 0, "reduce": weights},
            # gathered once for forward and backward, or once for each
            "FSDP": {"gather": 2 * weights, "reduce": weights},
            # g in forward, f in backward
            "TP": {"gather": 0, "reduce": whole["y"] + whole["x"]}}[name]
    found = {"gather": _bytes(layout, "all_gather", "all_to_all", "collective_permute"),
             "reduce": _bytes(layout, "all_reduce", "reduce_scatter")}
    for what, bytes_ in found.items():
        if bytes_ > most[what] + _FEW:
            raise Wrong(f"{name}: the compiled program {what}s {bytes_:,} bytes in "
                        f"{counted(len(layout.collectives), 'collective')}; this layout needs "
                        f"{most[what]:,}", _HINTS[name], code="extra_collective")


def _elements(shape) -> int:
    return shape[0] * shape[1]


def _bytes(layout, *kinds) -> int:
    return sum(call.bytes for call in layout.collectives if call.kind in kinds)


# Inches. Lengths of tokens, hidden and inner; not to scale, or hidden could not be seen.
_INCHES = {1024: 1.0, 64: 0.72, 256: 1.24}
_TOP, _ROW, _MIDDLE, _LABEL = 0.5, 2.12, 0.9, 0.69  # a layout's height; in it, below its title
_REFUSED_HEIGHT = 1.0  # the height of a layout that JAX refuses
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
    heights = [_REFUSED_HEIGHT if layout.refused else _ROW for layout in measured.values()]
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
