"""What became of each rank of a launch: its collectives in order, where it stands, and the
message that `launch` gives."""

import textwrap
from dataclasses import dataclass

from labs.pictures import palette
from labs.pictures.picture import WIDTH, Picture
from labs.pictures.sheet import box, chip, sheet, write

ROW = 0.42  # inches from one rank to the next
TRACK = 0.95  # inches: where a rank's collectives begin
DONE = 0.5  # inches for a collective that is done
SHOWN = 4  # at most so many of those are drawn
WAITING, FAILED, FINE = palette.RANK_WAITS, palette.RANK_FAILED, palette.RANK_RETURNED
_COLOURS = {"waits": WAITING, "calls": FAILED, "failed": FAILED, "died": FAILED}


@dataclass(frozen=True)
class Lane:
    """One rank: how many collectives it finished (None: not known), what it does now, where."""

    rank: int
    done: int
    deed: str
    colour: str
    place: str = ""
    source: str = ""


def picture(error, guessed: float = None) -> Picture:
    """Draws a RankFailed or RanksStuck. guessed: the rank that was guessed to be missing."""
    lanes = [_lane(outcome) for outcome in getattr(error, "outcomes", [])]
    title = f"launch raised {type(error).__name__}"
    message = [part for line in str(error).splitlines()
               for part in textwrap.wrap(line, 102, subsequent_indent="    ") or [""]]
    note = _compared(error, guessed)
    return _drawn(title, FAILED, lanes, message, note,
                  "\n".join([f"{title}: {error}", *([note] if note else [])]))


def all_is_well(results) -> Picture:
    """Draws a launch in which every rank returned."""
    lanes = [Lane(rank, None, f"returned {_short(value)}", FINE)
             for rank, value in enumerate(results)]
    return _drawn("every rank returned", FINE, lanes, [], "",
                  "\n".join(f"rank {lane.rank} {lane.deed}" for lane in lanes))


def _lane(outcome) -> Lane:
    own = [place for place in outcome.stack if place.is_students]
    place, source = (str(own[-1]), own[-1].source) if own else ("", "")
    done = {"waits": (outcome.number or 1) - 1, "returned": outcome.number}.get(outcome.kind)
    colour = WAITING if outcome.is_victim else _COLOURS.get(outcome.kind, palette.MUTED)
    return Lane(outcome.rank, done, _deed(outcome), colour, place, source)


def _deed(outcome) -> str:
    """Few words: the message below the lanes has them all."""
    if outcome.kind == "waits":
        return f"waits in {outcome.call}" + (f" #{outcome.number}" if outcome.number else "")
    if outcome.is_victim:
        return "lost its connection"
    if outcome.kind == "failed":
        return f"raised {outcome.error_type}"
    if outcome.kind == "died":
        return outcome.deed().split(" (")[0]
    return outcome.deed().split(" at ")[0].split(":")[0].removeprefix("already ")


def _drawn(title, colour, lanes, message, note, text) -> Picture:
    under = 0.62 + ROW * len(lanes)
    height = under + (0.24 + 0.19 * len(message) if message else 0) + (0.36 if note else 0) + 0.04
    figure, ax = sheet(WIDTH, height)
    ax.vlines(0.1, 0.08, 0.38, color=colour, linewidth=5)
    write(ax, 0.24, 0.23, title, size=12, weight="bold", colour=colour)
    ends = [_track(ax, 0.62 + ROW * (number + 0.5) - 0.06, lane)
            for number, lane in enumerate(lanes)]
    for number, lane in enumerate(lanes):
        _where(ax, max(ends) + 0.25, 0.62 + ROW * (number + 0.5) - 0.06, lane)
    if message:
        box(ax, 0.06, under, WIDTH - 0.12, 0.22 + 0.19 * len(message), [palette.SURFACE])
        for number, line in enumerate(message):
            write(ax, 0.2, under + 0.2 + 0.19 * number, line, size=9, family="monospace")
    if note:
        write(ax, 0.1, height - 0.18, note, colour=palette.INK)
    return Picture(figure, text, data=lanes)


def _track(ax, y, lane) -> float:
    """A rank's collectives from left to right, then what it does now; gives where that ends."""
    chip(ax, 0.42, y, lane.rank)
    x = TRACK
    for number in range(max(1, (lane.done or 0) - SHOWN + 1), (lane.done or 0) + 1):
        box(ax, x, y - 0.14, DONE - 0.08, 0.28, ["#dcefe2"])
        write(ax, x + DONE / 2 - 0.04, y, f"#{number} ✓", size=9, colour=FINE, ha="center")
        x += DONE
    width = 0.079 * len(lane.deed) + 0.22
    box(ax, x, y - 0.14, width, 0.28, edge=lane.colour, dashed=lane.colour == WAITING, line=1.4)
    write(ax, x + width / 2, y, lane.deed, size=9.5, colour=lane.colour, weight="bold", ha="center")
    return x + width


def _where(ax, x, y, lane):
    end = x + 0.078 * len(lane.place)
    if not lane.place or end > WIDTH:
        return
    write(ax, x, y, lane.place, size=9, colour=palette.MUTED)
    room = int((WIDTH - end - 0.15) / 0.082)
    source = lane.source if len(lane.source) <= room else lane.source[: max(room - 1, 0)] + "…"
    write(ax, end + 0.1, y, source, size=9, family="monospace")


def _compared(error, guessed) -> str:
    if guessed is None:
        return ""
    left = [o.rank for o in getattr(error, "outcomes", []) if o.kind == "returned"]
    if not left:
        return f"You guessed rank {guessed:g}; no rank has left."
    missing = " and ".join(map(str, left))
    if left == [guessed]:
        return f"You guessed rank {guessed:g}, and rank {missing} it is."
    return f"You guessed rank {guessed:g}; the missing one is rank {missing}."


def _short(value) -> str:
    words = " ".join(repr(value).split())
    return words if len(words) <= 60 else words[:59] + "…"
