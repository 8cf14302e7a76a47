"""A blank sheet measured in inches, and the shapes that are drawn on it."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle
from matplotlib.text import Text

from labs.pictures import palette
from labs.pictures.picture import canvas


def sheet(width: float, height: float) -> tuple[Figure, Axes]:
    """(figure, axes) whose coordinates are inches; y counts downwards from the top."""
    figure, ax = canvas(width, height)
    figure.set_layout_engine("none")
    ax.set_position((0, 0, 1, 1))
    ax.set_xlim(0, width)
    ax.set_ylim(height, 0)
    ax.axis("off")
    return figure, ax


def box(ax, x, y, width, height, colours=(), edge=None, dashed=False, line=1.2) -> None:
    """A rounded box with its upper left corner at (x, y), filled with equal stripes of `colours`.
    Lengths are inches, `line` is points."""
    def rounded(**style):
        return FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0,rounding_size=0.06",
                              **style)

    filled = colours[0] if len(colours) == 1 else "none"
    for number, colour in enumerate(colours if len(colours) > 1 else ()):
        stripe = width / len(colours)
        part = Rectangle((x + number * stripe, y), stripe, height, facecolor=colour,
                         edgecolor="none", zorder=2)
        ax.add_patch(part)
        # Stripes are rectangles: clipped to the box, they get its rounded corners.
        part.set_clip_path(rounded(transform=ax.transData))
    return ax.add_patch(rounded(facecolor=filled, edgecolor=edge or "none", linewidth=line,
                                linestyle=(0, (2, 2)) if dashed else "solid",
                                zorder=2 if filled != "none" else 3))


def chip(ax, x, y, rank, width=0.66, height=0.26, words=None) -> None:
    """A label with a rank's number in its colour, centred at (x, y)."""
    box(ax, x - width / 2, y - height / 2, width, height, [palette.rank(rank)])
    write(ax, x, y, words or f"rank {rank}", size=9.5, weight="bold", ha="center",
          colour=palette.text_on(palette.rank(rank)))


def write(ax, x, y, words, size=10.0, colour=palette.INK, ha="left", va="center", **style) -> Text:
    """Text; x and y in inches, size in points."""
    return ax.text(x, y, words, fontsize=size, color=colour, ha=ha, va=va, zorder=5, **style)


def arrow(ax, start, end, colour=palette.MUTED, bend=0.0, width=1.6) -> None:
    """An arrow between two points."""
    ax.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=13, color=colour,
                                 linewidth=width, connectionstyle=f"arc3,rad={bend}",
                                 shrinkA=0, shrinkB=0, zorder=4))
