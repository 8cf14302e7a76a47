"""A ring all-reduce step by step: who holds what, and who sends which piece to whom.

A number's digits say which ranks were summed in it (`collectives.origins`), so each cell has a slot
for each rank: a slot gets its rank's colour as soon as that rank's number is in the sum.
"""

import math
import textwrap
from dataclasses import dataclass

from matplotlib.patches import Rectangle

from labs.pictures import palette
from labs.pictures.collectives import State, digits, in_words, origins
from labs.pictures.picture import WIDTH, Picture
from labs.pictures.sheet import arrow, box, chip, sheet, write

LESSON = "Ring all-reduce: in each step every rank sends one piece, to the next rank only"
LABELS = 0.92  # inches for the ranks' names
RIGHT = 2.55  # inches for the ring itself, right of a grid that leaves so much room
LETTERS, LINE = 116, 0.2  # of who sends what: characters in a line, inches from one to the next


@dataclass(frozen=True, order=True)
class Received:
    """What changed on a rank in a step: one of its pieces. how: "add" (the previous rank's number
    was added), "copy" (that number took its place) or "" (neither, so nobody sent it)."""

    rank: int
    piece: int
    how: str


def received(old: list[list[float]], new: list[list[float]]) -> list[Received]:
    """What each rank received between two moments of a ring: [rank][piece] before and after."""
    found = []
    for rank, row in enumerate(new):
        for piece, number in enumerate(row):
            own, sent = old[rank][piece], old[rank - 1][piece]
            if number != own:
                how = "copy" if number == sent else "add" if number == own + sent else ""
                found.append(Received(rank, piece, how))
    return found


def action(changes: list[Received]) -> str:
    """What the receivers of a step do: "copy" if nothing is added, else "add"."""
    return "copy" if all(one.how == "copy" for one in changes) else "add"


def sentence(states: list[State], number: int) -> str:
    """Who sends what to whom in step `number`; of number 0, what there is before."""
    if not number:
        return ("Each rank holds its own numbers only. A coloured digit comes from the rank with "
                "that colour.")
    ranks, changes = len(states[0].held), _changes(states, number)
    sent = sorted(((one.rank - 1) % ranks, one) for one in changes if one.how)
    parts = [f"rank {sender} {'' if at else 'sends '}piece {one.piece} to rank {one.rank}"
             for at, (sender, one) in enumerate(sent)]
    # A wrong answer is drawn as it is: its numbers need not be what a ring makes.
    parts += [f"piece {one.piece} of rank {one.rank} became "
              f"{digits(states[number].held[one.rank][one.piece])}, neither a sum nor a copy"
              for one in changes if not one.how]
    words = ", ".join(parts) or "no number changed"
    return f"{words[0].upper()}{words[1:]}."


def ring_step(states: list[State], number: int, moved: float | None = None, lesson: str = LESSON,
              told: str | None = None) -> Picture:
    """Draws the state after step `number`, or, for 0, before the first. What the step changed has a
    dark frame, and an arrow from the rank that sent it.

    moved: for moving pictures, how much of its way each piece has made, from 0 to 1; below 1 the
    ranks still hold what they held before. told: in place of the sentence of who sends what.
    """
    ranks, changes = len(states[0].held), _changes(states, number)
    beside = 3 <= ranks <= 5  # the ring has room right of the grid, and is one
    cell = (WIDTH - LABELS - (RIGHT if beside else 0.05)) / ranks
    # As many lines as the longest sentence has, so that nothing jumps from one step to the next.
    lines = max(len(textwrap.wrap(sentence(states, each), LETTERS)) for each in range(len(states)))
    head = 0.76 + LINE * lines
    grid = _Grid(LABELS, head + 0.62, cell, 0.44, 0.27, ranks)
    figure, ax = sheet(WIDTH, grid.bottom + 0.3)
    told = sentence(states, number) if told is None else told
    heading = _heading(states, number)
    write(ax, 0.12, 0.2, lesson, size=12, weight="bold")
    write(ax, 0.12, 0.5, heading, size=10.5, weight="bold", colour=palette.readable(palette.PLAIN))
    for line, words in enumerate(textwrap.wrap(told, LETTERS)):
        write(ax, 0.12, 0.76 + LINE * line, words, size=10)
    on_the_way = moved is not None and moved < 1
    grid.draw(ax, states[number - on_the_way].held, [] if on_the_way else changes, labelled=True)
    grid.arrows(ax, changes)
    if on_the_way:
        grid.moving(ax, states[number - 1].held, changes, moved)
    if beside:
        middle, top = WIDTH - RIGHT / 2 + 0.1, head + 0.7
        _draw_steps(ax, middle, head + 0.3, states, number)
        _draw_ring(ax, middle, (top + grid.bottom + 0.2) / 2,
                   min((grid.bottom + 0.2 - top) / 2 - 0.16, RIGHT / 2 - 0.32), ranks, changes,
                   0.5 if moved is None else moved)
    return Picture(figure, f"{heading}: {told}\n{in_words('ring', states[:number + 1])}",
                   data=states)


def ring_still(states: list[State]) -> Picture:
    """Draws three moments where nobody can move a slider: before, after the last step that adds (or
    after the first), and after the last."""
    last, ranks = len(states) - 1, len(states[0].held)
    adds = [number for number in range(1, last) if action(_changes(states, number)) == "add"]
    adds_to_the_end = action(_changes(states, last)) == "add"
    shown = sorted({0, min(1, last) if adds_to_the_end or not adds else adds[-1], last})
    across = len(shown) if ranks <= 4 else 1
    wide = (WIDTH - LABELS - 0.05 - 0.3 * (across - 1)) / across
    high = 0.62 + 0.46 * ranks
    figure, ax = sheet(WIDTH, 0.42 + high * math.ceil(len(shown) / across))
    write(ax, 0.12, 0.2, LESSON, size=12, weight="bold")
    for slot, number in enumerate(shown):
        x, y = LABELS + slot % across * (wide + 0.3), 1 + slot // across * high
        grid = _Grid(x, y, wide / ranks, 0.4, 0.06, ranks)
        write(ax, x + wide / 2, y - 0.42, states[number].title, size=10.5, weight="bold",
              ha="center")
        grid.draw(ax, states[number].held, _changes(states, number), labelled=slot % across == 0)
    told = [f"{_heading(states, number)}: {sentence(states, number)}"
            for number in range(1, len(states))]
    return Picture(figure, "\n".join([in_words("ring", states), *told]), data=states)


def _changes(states, number) -> list[Received]:
    return received(states[number - 1].held, states[number].held) if number else []


def _heading(states, number) -> str:
    if not number:
        return "before the first step"
    phase = {"add": "reduce-scatter, the receiver adds the piece to its own",
             "copy": "all-gather, the receiver copies the piece"}
    return f"step {number} of {len(states) - 1}: {phase[action(_changes(states, number))]}"


@dataclass(frozen=True)
class _Grid:
    """A row for each rank, a column for each piece. x, y: of the first cell, in inches; gap:
    between rows, for arrows."""

    x: float
    y: float
    cell: float
    high: float
    gap: float
    ranks: int

    @property
    def bottom(self) -> float:
        return self.top(self.ranks - 1) + self.high

    def top(self, rank: float) -> float:
        return self.y + rank * (self.high + self.gap)

    def middle(self, piece: int) -> float:
        return self.x + (piece + 0.5) * self.cell

    def draw(self, ax, held, changes, labelled):
        """All cells; frames around those that changed."""
        changed = {(one.rank, one.piece) for one in changes}
        above = self.y - (0.17 if self.gap < 0.2 else 0.4)
        if labelled:
            write(ax, self.x - 0.12, above, "piece", size=9, colour=palette.MUTED, ha="right")
        for piece in range(len(held[0])):
            write(ax, self.middle(piece), above, f"{piece}", size=9, colour=palette.MUTED,
                  ha="center")
        for rank, row in enumerate(held):
            if labelled:
                chip(ax, self.x - LABELS / 2 - 0.02, self.top(rank) + self.high / 2, rank)
            for piece, value in enumerate(row):
                self.number(ax, piece, rank, value, (rank, piece) in changed)

    def number(self, ax, piece, rank, value, framed=False):
        """One number: a slot for each rank, coloured where that rank is in the sum. rank: may lie
        between two, of a number on its way."""
        area = (self.x + piece * self.cell + 0.05, self.top(rank), self.cell - 0.1, self.high)
        edge, line = (palette.INK, 2.4) if framed else (palette.BORDER, 0.8)
        summed = dict(origins(value, self.ranks))
        if not summed:
            box(ax, *area, [palette.UNKNOWN_ORIGIN], edge=edge, line=line)
            write(ax, self.middle(piece), area[1] + self.high / 2, digits(value), size=9,
                  weight="bold", ha="center", colour=palette.text_on(palette.UNKNOWN_ORIGIN))
            return
        colours = [palette.rank(r) if r in summed else palette.SURFACE for r in range(self.ranks)]
        box(ax, *area, colours, edge=edge, line=line)
        slot = area[2] / self.ranks
        size = max(8.5, min(13.0, slot * 72 / 0.95))
        # Also the zeros in front: an empty slot would look as if a digit were missing.
        for at, digit in enumerate(f"{int(value):0{self.ranks}d}"):
            colour, weight = ((palette.text_on(colours[at]), "bold") if at in summed else
                              (palette.MUTED, "normal"))
            write(ax, area[0] + (at + 0.5) * slot, area[1] + self.high / 2, digit, size=size,
                  ha="center", colour=colour, weight=weight)

    def arrows(self, ax, changes):
        """From each sender's row into the next one; the last rank's leaves the grid below, and
        comes back in above."""
        for one in changes:
            if not one.how:
                continue
            x = self.middle(one.piece)
            if one.rank:
                arrow(ax, (x, self.top(one.rank) - self.gap + 0.02), (x, self.top(one.rank) - 0.01),
                      palette.INK)
                continue
            arrow(ax, (x, self.bottom + 0.02), (x, self.bottom + self.gap - 0.02), palette.INK)
            arrow(ax, (x, self.y - self.gap + 0.02), (x, self.y - 0.01), palette.INK)
            side, ha = (0.12, "left") if x < WIDTH - 1 else (-0.12, "right")
            for y, name in ((self.bottom + 0.15, "to rank 0"),
                            (self.y - 0.15, f"from rank {self.ranks - 1}")):
                write(ax, x + side, y, name, size=8.5, ha=ha, colour=palette.MUTED)

    def moving(self, ax, held, changes, moved):
        """Each piece on its way, above everything else."""
        for one in changes:
            # What leaves the grid below comes in above at the same time, and is seen in part there
            # and in part here.
            for rank in [one.rank - 1 + moved] + [self.ranks - 1 + moved] * (not one.rank):
                self._lifted(ax, one.piece, rank, held[one.rank - 1][one.piece])

    def _lifted(self, ax, piece, rank, value):
        shapes, words = len(ax.patches), len(ax.texts)
        self.number(ax, piece, rank, value, framed=True)
        window = Rectangle((0, self.y - self.gap), WIDTH, self.bottom - self.y + 2 * self.gap,
                           transform=ax.transData)
        for artist in [*ax.patches[shapes:], *ax.texts[words:]]:
            artist.set_zorder(artist.get_zorder() + 10)
            if not 0 <= rank <= self.ranks - 1:
                artist.set_clip_path(window)


def _draw_steps(ax, middle, y, states, number):
    """A box for each step: done, the one that is shown, still to come; above them, what they do."""
    steps = range(1, len(states))
    wide = min(0.34, (RIGHT - 0.2) / max(len(steps), 1))
    left = middle - wide * len(steps) / 2
    doing = [action(_changes(states, step)) for step in steps]
    for phase, name in (("add", "reduce-scatter"), ("copy", "all-gather")):
        if phase in doing:
            first, after = doing.index(phase), len(doing) - doing[::-1].index(phase)
            now = number and doing[number - 1] == phase
            write(ax, left + wide * (first + after) / 2, y - 0.24, name, size=9, ha="center",
                  colour=palette.INK if now else palette.MUTED)
    for step in steps:
        colour = (palette.INK if step == number else palette.COLLECTIVE_DONE if step < number
                  else palette.SURFACE)
        x = left + wide * (step - 1)
        box(ax, x + 0.03, y - 0.12, wide - 0.06, 0.24, [colour])
        write(ax, x + wide / 2, y, f"{step}", size=9, ha="center", colour=palette.text_on(colour))


def _draw_ring(ax, x, y, radius, ranks, changes, along):
    """The ring itself: each rank sends to the next. along: where on its arrow a piece is, 0 to
    1."""
    points = [(x + radius * math.sin(2 * math.pi * r / ranks),
               y - radius * math.cos(2 * math.pi * r / ranks)) for r in range(ranks)]
    pieces = {one.rank: one.piece for one in changes if one.how}
    for rank, (px, py) in enumerate(points):
        qx, qy = points[(rank + 1) % ranks]
        length = math.hypot(qx - px, qy - py) or 1
        ux, uy = (qx - px) / length, (qy - py) / length
        start, end = (px + 0.22 * ux, py + 0.22 * uy), (qx - 0.22 * ux, qy - 0.22 * uy)
        arrow(ax, start, end, bend=0.18)
        chip(ax, px, py, rank, width=0.32, height=0.3, words=f"{rank}")
        piece = pieces.get((rank + 1) % ranks)
        if piece is not None:
            (x0, y0), dx, dy = start, end[0] - start[0], end[1] - start[1]
            share = 0.12 + 0.72 * along
            bow = 2 * 0.18 * share * (1 - share)  # how far the arrow's curve is off its chord
            _draw_piece(ax, x0 + share * dx + bow * dy, y0 + share * dy - bow * dx, piece)
    write(ax, x, y, "the ring", size=9, colour=palette.MUTED, ha="center")


def _draw_piece(ax, x, y, piece):
    box(ax, x - 0.3, y - 0.11, 0.6, 0.22, [palette.PAPER], edge=palette.INK, line=1.2).set_zorder(6)
    write(ax, x, y, f"piece {piece}", size=8.5, ha="center").set_zorder(7)
