"""Exercise 7.26: DDP, FSDP and tensor parallelism as PartitionSpecs, judged by what each device
holds and by the collectives of the compiled program."""

from collections.abc import Callable
from dataclasses import replace

from labs.exercises.student_code import shortened
from labs.exercises.verdicts import Verdict, Wrong, check
from labs.pipeline_parallel.charts.device_pieces import measured_layouts
from labs.pipeline_parallel.jax_view.layouts import ARRAYS, MeasuredLayout, Pieces
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
    return any(set(parts) == {_part(pieces.shape, dimension)}
               and len(parts) == (1 if dimension is WHOLE else DEVICES) for dimension in dimensions)


def _part(shape, cut) -> tuple[int, ...]:
    return tuple(size // DEVICES if number == cut else size for number, size in enumerate(shape))


def _held(pieces, device) -> str:
    sides = [f"{end - first} of {size} {side}" for (first, end), size, side in zip(
        pieces.by_device[device], pieces.shape, ("rows", "columns"), strict=True)
        if end - first < size]
    return listed(sides) if sides else "the whole"


def _wanted(pieces, cut) -> str:
    if cut is WHOLE:
        return "the whole"
    if cut == ANY:
        return f"1/{DEVICES} of it, another piece than the others"
    side = ("rows", "columns")[cut]
    return f"{pieces.shape[cut] // DEVICES} of {pieces.shape[cut]} {side}"


def _judge_collectives(name, layout):
    """The traffic of the layout's kind, by bytes: what is combined into one call may differ."""
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
