"""The state of each rank at the end of a launch: its collectives in order, the line at which it is,
and the message that `launch` gives."""

import contextlib
import io
import textwrap
import tokenize
from collections.abc import Sequence
from dataclasses import dataclass

from labs.pictures import palette
from labs.pictures.picture import WIDTH, Picture
from labs.pictures.sheet import box, chip, sheet, write
from labs.words import listed
from labs.workers.failures import LaunchError
from labs.workers.outcomes import Kind, Outcome
from labs.workers.source_lines import Place

ROW = 0.38  # inches from one rank to the next
HEAD = 0.48  # inches above the first rank: the title
LINE = 0.18  # inches from one line of the message to the next
TRACK = 0.95  # inches: where a rank's collectives begin
DONE = 0.5  # inches for a collective that is done
SHOWN = 4  # at most so many of those are drawn
WAITING, FAILED, FINE = palette.RANK_WAITS, palette.RANK_FAILED, palette.RANK_RETURNED

# Few words for each kind: the message below the lanes says it in full.
_LABELS = {Kind.STARTING: "was still starting", Kind.COMPUTING: "computes",
           Kind.WAITING: "waits in {outcome.collective}{number}",
           Kind.MISMATCHED: "calls {outcome.collective}{number}",
           Kind.OUT_OF_COLLECTIVES: "calls no further collective",
           Kind.UNRESPONSIVE: "does not answer", Kind.SUSPENDED: "is suspended",
           Kind.RETURNED: "returned",
           Kind.RAISED: "raised {outcome.error_type}", Kind.OUT_OF_MEMORY: "ran out of memory",
           Kind.LOST_CONNECTION: "lost its connection",
           Kind.CALLED_EXIT: "called sys.exit({outcome.message})",
           Kind.CANNOT_SEND: "returned what cannot be sent",
           Kind.KILLED: "was killed by signal {outcome.signal.value}",
           Kind.PROCESS_EXITED: "exited with code {outcome.exit_code}",
           Kind.OUT_OF_MEMORY_IN_CPP: "ran out of memory"}


@dataclass(frozen=True)
class Lane:
    """One rank: how many collectives it finished (None: not known), what it does now, where."""

    rank: int
    done: int | None
    label: str
    colour: str
    place: Place | None = None


def draw_failure(error: LaunchError, guessed: float | None = None) -> Picture:
    """Draws a RankFailed or RanksStuck. guessed: the rank that was guessed to be missing."""
    outcomes = getattr(error, "outcomes", [])
    title = f"launch raised {type(error).__name__}"
    message = [part for line in str(error).splitlines()
               for part in textwrap.wrap(line, 102, subsequent_indent="    ") or [""]]
    note = _compared(outcomes, guessed)
    return draw_lanes(title, FAILED, [_lane(outcome) for outcome in outcomes], message, note,
                      "\n".join([f"{title}: {error}", *([note] if note else [])]))


def draw_success(results: Sequence) -> Picture:
    """Draws a launch in which every rank returned."""
    values = [" ".join(repr(value).split()) for value in results]
    lanes = [Lane(rank, None, f"returned {value[:59] + '…' * (len(value) > 59)}", FINE)
             for rank, value in enumerate(values)]
    return draw_lanes("every rank returned", FINE, lanes, [], "",
                      "\n".join(f"rank {lane.rank} {lane.label}" for lane in lanes))


def label(outcome: Outcome) -> str:
    """How a rank ended, in a few words."""
    number = f" (#{outcome.number})" if outcome.number else ""
    return _LABELS[outcome.kind].format(outcome=outcome, number=number)


def _lane(outcome) -> Lane:
    kind = outcome.kind
    done = (outcome.number or 1) - 1 if kind is Kind.WAITING else outcome.issued
    waits = kind in (Kind.WAITING, Kind.LOST_CONNECTION)
    failed = kind.is_failure or kind in (Kind.MISMATCHED, Kind.OUT_OF_COLLECTIVES)
    colour = WAITING if waits else FAILED if failed else palette.MUTED
    return Lane(outcome.rank, done, label(outcome), colour, outcome.place)


def draw_lanes(title: str, colour: str, lanes: list[Lane], message: list[str], note: str,
               text: str, room: int = 0) -> Picture:
    """Draws a lane for each rank between a title and the lines of a message, with a note below.
    text: the picture in words. room: leaves place for so many lines at least, for moving pictures.
    """
    under, lines = HEAD + 0.04 + ROW * len(lanes), max(len(message), room)
    height = under + (0.2 + LINE * lines if lines else 0) + (0.32 if note else 0) + 0.04
    figure, ax = sheet(WIDTH, height)
    ax.vlines(0.1, 0.05, 0.35, color=colour, linewidth=5)
    write(ax, 0.24, 0.2, title, size=12, weight="bold", colour=colour)
    rows = [(HEAD + ROW * (number + 0.5), lane) for number, lane in enumerate(lanes)]
    ends = [_draw_track(ax, y, lane) for y, lane in rows]
    for y, lane in rows:
        _draw_place(ax, max(ends) + 0.2, y, lane)
    if message:
        box(ax, 0.06, under, WIDTH - 0.12, 0.18 + LINE * len(message), [palette.SURFACE])
        for number, line in enumerate(message):
            write(ax, 0.2, under + 0.18 + LINE * number, line, size=9, family="monospace")
    if note:
        write(ax, 0.1, height - 0.16, note)
    return Picture(figure, text, data=lanes)


def _draw_track(ax, y, lane) -> float:
    """A rank's collectives from left to right, then what it does now; returns where that ends."""
    chip(ax, 0.42, y, lane.rank)
    x = TRACK
    for number in range(max(1, (lane.done or 0) - SHOWN + 1), (lane.done or 0) + 1):
        box(ax, x, y - 0.14, DONE - 0.08, 0.28, [palette.COLLECTIVE_DONE])
        write(ax, x + DONE / 2 - 0.04, y, f"#{number} ✓", size=9, colour=FINE, ha="center")
        x += DONE
    width = 0.073 * len(lane.label) + 0.24
    box(ax, x, y - 0.14, width, 0.28, edge=lane.colour, dashed=lane.colour == WAITING, line=1.4)
    write(ax, x + width / 2, y, lane.label, size=9.5, colour=lane.colour, weight="bold",
          ha="center")
    return x + width


def _draw_place(ax, x, y, lane):
    end = x + 0.069 * len(str(lane.place))
    if lane.place and end <= WIDTH:
        write(ax, x, y, str(lane.place), size=9, colour=palette.MUTED)
        room = max(int((WIDTH - end - 0.15) / 0.0805), 1)
        source = _without_comment(lane.place.source)
        write(ax, end + 0.1, y, source if len(source) <= room else f"{source[:room - 1]}…", size=9,
              family="monospace")


def _without_comment(source) -> str:
    """A line of code without the comment at its end, which would be cut in the picture."""
    comment = None
    with contextlib.suppress(tokenize.TokenError, SyntaxError):  # a statement of several lines
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                comment = token.start[1]
    return source[:comment].rstrip() or source


def _compared(outcomes, guessed) -> str:
    """The guess and which rank is missing: the one that returned while others waited."""
    if guessed is None:
        return ""
    left = [outcome.rank for outcome in outcomes if outcome.kind is Kind.RETURNED]
    if left == [guessed]:
        return f"You guessed rank {guessed:g}, and rank {guessed:g} it is."
    missing = f"the missing one is rank {listed(left)}" if left else "no rank has left"
    return f"You guessed rank {guessed:g}; {missing}."
