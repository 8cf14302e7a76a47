"""Lines across a chart of bytes at the capacities of GPUs; their names never overlap."""

from matplotlib.axes import Axes

from labs.pictures import palette
from labs.pictures.marks import CHARACTER

_LINE = {"color": palette.MUTED, "linestyle": (0, (4, 3)), "linewidth": 1, "zorder": 0.5}
_NAME = {"color": palette.MUTED, "fontsize": 9}
SIZE = 0.9 * CHARACTER  # inches of a character of a name
LEVEL = 0.19  # inches from a name to the next above it

Capacity = tuple[float, str]  # (bytes, name)


def capacities_shown(capacities: list[Capacity], longest: float) -> list[Capacity]:
    """Those capacities that a chart shows whose longest bar has `longest` bytes: all that the bar
    crosses and the next larger one, unless that is so large that the bars would shrink to
    nothing."""
    next_larger = min((size for size, _ in capacities if size > longest), default=0)
    too_large = len(capacities) > 1 and next_larger > 4 * longest
    limit = max(longest, 0 if too_large else 1.02 * next_larger)
    return [line for line in capacities if line[0] <= limit]


def merge_close(capacities: list[Capacity], distance: float) -> list[Capacity]:
    """The capacities in ascending order, where those less than `distance` bytes above the first of
    a group become one line with the names of all, in the order given: `A100-80, H100`."""
    groups = []
    for line in sorted(capacities):
        if groups and line[0] - groups[-1][0][0] < distance:
            groups[-1].append(line)
        else:
            groups.append([line])
    return [(group[0][0], ", ".join(line[1] for line in capacities if line in group))
            for group in groups]


def name_levels(capacities: list[Capacity], per_inch: float) -> list[tuple[float, str, int]]:
    """[(bytes, name, level)] for capacities in ascending order: a name stands right of its line,
    one level above all lines that it would run into. per_inch: bytes of the axis to an inch."""
    placed = []
    for size, name in reversed(capacities):
        end = size + (len(name) * SIZE + 0.1) * per_inch
        level = max((level + 1 for other, _, level in placed if other < end), default=0)
        placed.append((size, name, level))
    return placed[::-1]


def draw_upright(ax: Axes, levels: list[tuple[float, str, int]], unit: float, top: float,
                 row: float):
    """Draws vertical lines with their names above the first bar, whose upper edge is at `top`; the
    y axis runs downwards, and one row is `row` inches. levels: from `name_levels`."""
    for size, name, level in levels:
        high = top - (LEVEL * level + 0.17) / row
        ax.vlines(size / unit, high, ax.get_ylim()[0], **_LINE)
        ax.text(size / unit, high, f" {name}", ha="left", va="top", **_NAME)


def draw_across(ax: Axes, capacities: list[Capacity], unit: float, right: float, distance: float):
    """Draws horizontal lines up to x = `right` and from there a leader to each name; names are at
    least `distance` bytes from each other. capacities: from `merge_close`."""
    left, free = ax.get_xlim()[0], 0.0
    for size, name in capacities:
        height = max(size, free)
        ax.hlines(size / unit, left, right, **_LINE)
        ax.plot([right, right + 0.2], [size / unit, height / unit], color=palette.MUTED,
                linewidth=0.7)
        ax.text(right + 0.2, height / unit, f" {name}", ha="left", va="center", **_NAME)
        free = height + distance
