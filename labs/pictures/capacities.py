"""Lines that say how much memory a GPU has, across a chart of bytes; their names never overlap."""

from labs.pictures import palette
from labs.pictures.marks import CHARACTER

_LINE = {"color": palette.MUTED, "linestyle": (0, (4, 3)), "linewidth": 1, "zorder": 0.5}
_NAME = {"color": palette.MUTED, "fontsize": 9}
SIZE = 0.9 * CHARACTER  # inches of a character of a name
LEVEL = 0.19  # inches from a name to the next above it


def shown(capacities, most: float) -> list:
    """Those (bytes, name) that belong on a chart whose longest bar is `most` bytes: all that it
    crosses, and the next, unless that lies so far off that the bars would shrink to nothing."""
    beyond = min((size for size, _ in capacities if size > most), default=0)
    far = len(capacities) > 1 and beyond > 4 * most
    return [line for line in capacities if line[0] <= max(most, 0 if far else 1.02 * beyond)]


def merged(capacities, apart: float) -> list:
    """[(bytes, name)], the smallest first; lines less than `apart` bytes from the first of a group
    become one, with the names of all in the order given: `A100-80, H100`."""
    groups = []
    for line in sorted(capacities):
        if groups and line[0] - groups[-1][0][0] < apart:
            groups[-1].append(line)
        else:
            groups.append([line])
    return [(group[0][0], ", ".join(line[1] for line in capacities if line in group))
            for group in groups]


def levels(named, per_inch: float) -> list:
    """[(bytes, name, level)] of lines, the smallest first: a name stands right of its line, one
    level above all lines that it would run into. per_inch: bytes of the axis to an inch."""
    placed = []
    for size, name in reversed(named):
        end = size + (len(name) * SIZE + 0.1) * per_inch
        level = max((level + 1 for other, _, level in placed if other < end), default=0)
        placed.append((size, name, level))
    return placed[::-1]


def upright(ax, capacities, unit: float, top: float, row: float):
    """Vertical lines with names above the first bar, whose upper edge is at `top`; the y axis runs
    downwards, `row` inches to one. capacities: as `levels` gives them."""
    for size, name, level in capacities:
        high = top - (LEVEL * level + 0.17) / row
        ax.vlines(size / unit, high, ax.get_ylim()[0], **_LINE)
        ax.text(size / unit, high, f" {name}", ha="left", va="top", **_NAME)


def lying(ax, capacities, unit: float, right: float, apart: float):
    """Horizontal lines up to x = `right`, and from there a leader to each name; names are at least
    `apart` bytes from each other. capacities: as `merged` gives them."""
    left, free = ax.get_xlim()[0], 0.0
    for size, name in capacities:
        height = max(size, free)
        ax.hlines(size / unit, left, right, **_LINE)
        ax.plot([right, right + 0.2], [size / unit, height / unit], color=palette.MUTED,
                linewidth=0.7)
        ax.text(right + 0.2, height / unit, f" {name}", ha="left", va="center", **_NAME)
        free = height + apart
