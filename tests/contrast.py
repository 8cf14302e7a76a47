"""Texts of a figure that are hard to read, because they differ too little from what is below."""

from matplotlib.colors import to_hex, to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch

from labs.pictures import palette

LEAST = 4.5  # WCAG 2.2, 1.4.3, for text of the size that pictures have
INSIDE = 3  # pixels from a text's anchor into the text


def faint_texts(figure: Figure) -> list[str]:
    """A sentence for each text with less contrast than LEAST; nothing is drawn for that."""
    return [f"{text.get_text()!r}: {found:.1f} ({to_hex(text.get_color())} on {background})"
            for ax in figure.axes for patches in [_with_extents(ax)] for text in ax.texts
            if text.get_text().strip()
            and not text.get_path_effects()  # an outline, where it stands on several colours
            for background in [_background(patches, text)]
            if (found := palette.contrast(to_hex(text.get_color()), background)) < LEAST]


def _with_extents(ax) -> list:
    """Each patch that hides what is below it, with its bounding box: to ask a box for a point is
    much quicker than to ask a patch, and there are hundreds of both."""
    return [(patch, patch.get_window_extent()) for patch in ax.patches if _opaque(patch)]


def _background(patches, text) -> str:
    """The colour below a text: of its own plate, else of the topmost patch at its anchor."""
    plate = text.get_bbox_patch()
    if plate is not None:
        return _on_paper(plate.get_facecolor(), plate.get_alpha())
    point = _point(text)
    # What lies over a text hides it, as a piece on its way does.
    below = [patch for patch, extent in patches if patch.get_zorder() <= text.get_zorder()
             and extent.contains(*point) and patch.contains_point(point)]
    # Of those in one layer the last is on top, and the sort keeps their order.
    top = next(iter(sorted(reversed(below), key=lambda patch: -patch.get_zorder())), None)
    return palette.PAPER if top is None else _on_paper(top.get_facecolor(), None)


def _point(text):
    x, y = text.get_transform().transform(text.get_position())
    x += {"left": INSIDE, "center": 0, "right": -INSIDE}[text.get_ha()]
    y += {"bottom": INSIDE, "top": -INSIDE}.get(text.get_va(), 0)
    return x, y


def _opaque(patch) -> bool:
    return (patch.get_visible() and patch.get_facecolor()[3] > 0.5 and patch.get_fill()
            and not isinstance(patch, FancyArrowPatch))


def _on_paper(colour, alpha) -> str:
    *channels, opacity = to_rgba(colour)
    opacity = opacity if alpha is None else alpha
    return to_hex([opacity * channel + 1 - opacity for channel in channels])
