"""Lines across a chart of bytes at the capacities of GPUs; their names never overlap."""

from matplotlib.axes import Axes

from labs.pictures import palette
from labs.pictures.marks import CHARACTER
from labs.pictures.picture import grow

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


def draw_upright(ax: Axes, capacities: list[Capacity], unit: float, inches: float, row: float):
    """Draws vertical lines with their names above the first bar. The axis (of `inches`) ends right
    of the last name, and the figure grows by the inches that the names take. row: inches."""
    if not capacities:
        return
    lines = [(size / unit, name) for size, name in capacities]
    lines = merge_close(lines, 0.012 * max([ax.get_xlim()[1], *(1.1 * at for at, _ in lines)]))
    last, name = lines[-1]
    right = max(ax.get_xlim()[1], last / (1 - (SIZE * len(name) + 0.1) / inches))
    levels = _name_levels(lines, right / inches)
    (below, top), heads = ax.get_ylim(), 0.17 + LEVEL * max(levels)
    for (at, name), level in zip(lines, levels, strict=True):
        high = -0.5 - (LEVEL * level + 0.17) / row
        ax.vlines(at, high, below, **_LINE)
        ax.text(at, high, f" {name}", ha="left", va="top", **_NAME)
    ax.set_xlim(0, right)
    ax.set_ylim(below, top - heads / row)
    grow(ax.figure, heads)


def _name_levels(lines, per_inch) -> list[int]:
    """How high the name of each of the lines stands, which are in ascending order: right of its
    line, one level above all lines that it would run into. per_inch: of the axis."""
    placed = []
    for at, name in reversed(lines):
        end = at + (len(name) * SIZE + 0.1) * per_inch
        placed.append((at, max((level + 1 for other, level in placed if other < end), default=0)))
    return [level for _, level in reversed(placed)]


def draw_across(ax: Axes, capacities: list[Capacity], unit: float, right: float):
    """Draws horizontal lines up to x = `right` and from there a leader to each name; names that
    would touch are moved apart."""
    left, free, top = ax.get_xlim()[0], 0.0, ax.get_ylim()[1]
    for at, name in merge_close([(size / unit, name) for size, name in capacities], 0.012 * top):
        height = max(at, free)
        ax.hlines(at, left, right, **_LINE)
        ax.plot([right, right + 0.2], [at, height], color=palette.MUTED, linewidth=0.7)
        ax.text(right + 0.2, height, f" {name}", ha="left", va="center", **_NAME)
        free = height + 0.065 * top
