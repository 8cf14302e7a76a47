"""Who holds what: the numbers on every rank before and after a collective, coloured by origin."""

import math
from dataclasses import dataclass

from matplotlib import patheffects

from labs.pictures import palette
from labs.pictures.picture import WIDTH, Picture
from labs.pictures.sheet import arrow, box, chip, sheet, write

LABELS = 0.86  # inches for the ranks' names
ROW = 0.46  # inches from one rank to the next
SMALLEST = 8.5  # points of a number
TOP = 0.62  # inches above the first rank: title and piece numbers


@dataclass(frozen=True)
class State:
    """What every rank holds at one moment. held[rank] is a list of numbers; title stands above
    them, arrow names the collective that led to them."""

    title: str
    held: list[list[float]]
    arrow: str = ""


def origins(value: float, ranks: int) -> list[tuple[int, int]]:
    """[(rank, piece), ...] of the numbers that were summed to `value`, read from its digits: of as
    many digits as there are ranks, the first is rank 0's and says piece + 1; 0 means nothing.
    Empty where the digits make no sense."""
    if not 0 < value < 10**ranks or value != int(value):  # nan and inf fail the first
        return []
    return [(rank, int(digit) - 1) for rank, digit in enumerate(f"{int(value):0{ranks}d}")
            if digit != "0"]


def digits(value: float) -> str:
    """A whole number with all its digits, 33333333 and not 3.33333e+07; any other rounded."""
    return f"{int(value)}" if math.isfinite(value) and value == int(value) else f"{value:g}"


def places(numbers: list[float], ranks: int) -> list[float | None]:
    """One entry per piece, None where nothing is held. The numbers of a shard are put where their
    digits say that they belong; where digits say nothing, at the left."""
    if len(numbers) >= ranks:
        return list(numbers)
    row = [None] * ranks
    for number, value in enumerate(numbers):
        # A sum of one piece over several ranks has the same digit for each: that digit is its
        # place.
        pieces = {piece for _, piece in origins(value, ranks)}
        place = pieces.pop() if len(pieces) == 1 else number
        place = place if place < ranks and row[place] is None else row.index(None)
        row[place] = value
    return row


def who_holds_what(states: list[State], note: str = "") -> Picture:
    """Draws a panel for each State, with arrows between them; note is written below."""
    ranks = len(states[0].held)
    layout = _Layout(ranks, len(states), gap=1.36 if len(states) < 3 else 0.74)
    figure, ax = sheet(layout.width, layout.height + (0.3 if note else 0))
    for number, state in enumerate(states):
        _panel(ax, layout, number, state)
        if number:
            _arrow_into(ax, layout, number, state.arrow)
    if note:
        write(ax, 0.1, layout.height + 0.1, note, colour=palette.INK)
    return Picture(figure, in_words("who holds what", states, note), data=states)


class _Layout:
    """Where the panels go: as many side by side as fit."""

    def __init__(self, ranks, panels, gap, across=None):
        self.ranks, self.gap = ranks, gap
        smallest = max(0.45, 0.07 * ranks + 0.14)
        fits = int((WIDTH - LABELS + gap) // (smallest * ranks + gap))
        self.across = across or (panels if panels <= fits else 1)
        room = (WIDTH - LABELS - gap * (self.across - 1)) / self.across / ranks
        self.cell = min(room, 0.95 if ranks > 4 else 0.78)
        self.rows = math.ceil(panels / self.across)
        self.panel = self.cell * ranks
        self.width = LABELS + self.across * self.panel + (self.across - 1) * gap + 0.05
        self.row_height = TOP + ranks * ROW + 0.2
        self.height = self.rows * self.row_height - 0.12

    def starts_row(self, number):
        return number % self.across == 0

    def corner(self, number):
        return (LABELS + number % self.across * (self.panel + self.gap),
                number // self.across * self.row_height)


def _panel(ax, layout, slot, state):
    """A state in a slot of the layout."""
    ranks, labelled, (x, y) = layout.ranks, layout.starts_row(slot), layout.corner(slot)
    rows = [places(row, ranks) for row in state.held]
    columns = max(map(len, rows))
    cell = layout.panel / columns
    write(ax, x + cell * columns / 2, y + 0.16, state.title, size=10.5, weight="bold", ha="center")
    for piece in range(columns):
        write(ax, x + cell * (piece + 0.5), y + 0.46, f"{piece}", size=9, colour=palette.MUTED,
              ha="center")
    if labelled:
        write(ax, x - 0.12, y + 0.46, "piece", size=9, colour=palette.MUTED, ha="right")
    for rank, row in enumerate(rows):
        if labelled:
            chip(ax, x - LABELS / 2 - 0.05, y + TOP + ROW * (rank + 0.5), rank)
        for piece, value in enumerate(row):
            _cell(ax, x + cell * piece, y + TOP + ROW * rank, cell, value, ranks)


def _cell(ax, x, y, width, value, ranks):
    inset = 0.03
    area = (x + inset, y + inset, width - 2 * inset, ROW - 2 * inset)
    if value is None:
        box(ax, *area, edge=palette.BORDER, dashed=True, line=1.0)
        return
    summed = origins(value, ranks)
    colours = [palette.rank(rank) for rank, _ in summed] or [palette.UNKNOWN_ORIGIN]
    box(ax, *area, colours)
    shown = digits(value)
    size = width * 72 / (0.92 * max(len(shown), ranks, 3))
    if size < SMALLEST:
        return  # colour alone
    size = min(11.5, max(SMALLEST, 0.88 * size))  # so that neighbouring digits do not touch
    stripes = list(shown) if len(summed) == ranks else [shown]  # each digit on its own stripe
    for number, words in enumerate(stripes):
        middle = area[0] + area[2] * (number + 0.5) / len(stripes)
        text = write(ax, middle, y + ROW / 2, words, size=size, weight="bold", ha="center",
                     colour=palette.text_on(colours[number]))
        if len(stripes) < len(colours):  # one text across several colours
            text.set_color(palette.PAPER)
            text.set_path_effects([patheffects.withStroke(linewidth=2.5,
                                                          foreground=palette.DARKEST)])


def _arrow_into(ax, layout, number, collective):
    """The arrow into panel `number`, with the collective's name."""
    x, y = layout.corner(number)
    middle = y + TOP + ROW * layout.ranks / 2
    if layout.starts_row(number):
        x, y = x + layout.panel / 2, y - 0.2
        arrow(ax, (x, y + 0.02), (x, y + 0.24))
        write(ax, x + 0.2, y + 0.08, collective, size=10, style="italic")
        return
    arrow(ax, (x - layout.gap + 0.12, middle), (x - 0.12, middle))
    name = collective.replace("_", "_\n") if layout.gap < 1 else collective
    write(ax, x - layout.gap / 2, middle - 0.1, name, size=10 if layout.gap > 1 else 9, ha="center",
          va="bottom", style="italic")


def in_words(title: str, states: list[State], note: str = "") -> str:
    """The moments, then what each rank held in each of them."""
    moments = " → ".join(state.arrow or state.title for state in states)
    held = zip(*(state.held for state in states), strict=True)
    lines = [f"{title}: {moments}"]
    lines += [f"rank {rank}: " + " → ".join(" ".join(map(digits, row)) or "nothing" for row in rows)
             for rank, rows in enumerate(held)]
    return "\n".join([*lines, note] if note else lines)
