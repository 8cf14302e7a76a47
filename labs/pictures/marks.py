"""What charts of measurements share: the formula's tick, the student's tick, numbers, a legend."""

from matplotlib.lines import Line2D

from labs.pictures import palette

UNITS = {"GB": 10**9, "MB": 10**6, "kB": 10**3, "bytes": 1}
CHARACTER = 0.082  # inches that a character of 10 points takes, generously


def number(value) -> str:
    """A number for a label: thousands whole, 227.5 with four digits, smaller ones with three."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:,.4g}" if value >= 100 else f"{value:.3g}"


def unit_for(most: float, unit: str = None) -> tuple:
    """(name, bytes) of the unit in which `most` bytes is a handy number, or of the one named."""
    if unit is not None and unit not in UNITS:
        raise ValueError(f"no unit {unit!r}: choose {', '.join(UNITS)}")
    chosen = unit or next((name for name, size in UNITS.items() if most >= 0.9 * size), "bytes")
    return chosen, UNITS[chosen]


def tick(ax, value, place, colour, upright=False):
    """A thick mark at `value` across the bar at `place`; upright bars get it lying."""
    if value is not None:
        lines = ax.hlines if upright else ax.vlines
        lines(value, place - 0.43, place + 0.43, color=colour, linewidth=3, zorder=4)


def tick_handles(rows) -> list:
    """The legend's entries for those ticks that any of the rows has."""
    handles = []
    if any(row.predicted is not None for row in rows):
        handles.append(Line2D([], [], color=palette.PREDICTED, linewidth=3, label="the formula"))
    if any(row.guessed is not None for row in rows):
        handles.append(Line2D([], [], color=palette.GUESSED, linewidth=3, label="your guess"))
    return handles


def beside(end, predicted, guessed, room) -> float:
    """Where the words beside a bar begin, which take `room`: right of the bar and the formula's
    tick, and of the guess where that would be in the way."""
    end = max(end, predicted or 0)
    return guessed if guessed and end < guessed < end + room else end
