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
    ordered = sorted(capacities)
    beyond = [line for line in ordered if line[0] > most][:1]
    return [line for line in ordered if line[0] <= most] + [
        line for line in beyond if line[0] <= 4 * most or len(ordered) == 1]


def merged(capacities, apart: float) -> list:
    """[(bytes, name)] where lines less than `apart` bytes from the first of a group share a name,
    `A100-80, H100`."""
    groups = []
    for size, name in sorted(capacities):
        if groups and size - groups[-1][0][0] < apart:
            groups[-1].append((size, name))
        else:
            groups.append([(size, name)])
    return [(group[0][0], ", ".join(name for _, name in group)) for group in groups]


def levels(named, per_inch: float) -> list:
    """[(bytes, name, level)]: a name stands right of its line; where it would run into the next
    line's name, it moves up one level. per_inch: bytes of the axis to an inch."""
    placed, free = [], []  # free[level]: the leftmost byte that is taken there
    for size, name in reversed(named):
        end = size + (len(name) * SIZE + 0.1) * per_inch
        level = next((at for at, taken in enumerate(free) if end <= taken), len(free))
        free[level:level + 1] = [size]
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
    """Horizontal lines with names at their right end, x = `right`, at least `apart` bytes from
    each other."""
    lowest = 0.0
    for size, name in capacities:
        ax.axhline(size / unit, **_LINE)
        lowest = max(lowest, size - apart / 2)
        ax.text(right, lowest / unit, f" {name}", ha="left", va="bottom", **_NAME)
        lowest += apart
