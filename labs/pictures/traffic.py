"""What travels in a step, by collective: elements on the left, bytes on the right."""

from dataclasses import dataclass

from matplotlib.patches import Patch
from matplotlib.ticker import MultipleLocator

from labs.pictures import marks, palette
from labs.pictures.picture import WIDTH, Picture, canvas
from labs.words import counted

ROW = 0.42  # inches from one bar to the next
PANEL = 2.6  # inches of a panel's axis, at least


@dataclass(frozen=True)
class TrafficRow:
    """One strategy. elements, bytes: by kind of collective, what travels through it in a step, in Ψ
    and in bytes, an all-reduce counted twice. calls: of all kinds. predicted, guessed: Ψ of all
    kinds together; predicted_bytes: the same in bytes."""

    name: str
    elements: dict[str, float]
    bytes: dict[str, float]
    calls: int = 0
    predicted: float | None = None
    guessed: float | None = None
    predicted_bytes: float | None = None


def stacked_traffic(rows: list[TrafficRow], ranks: int) -> Picture:
    """Draws two horizontal bars for each row, of elements and of bytes, stacked by collective, with
    the prediction's tick and the student's."""
    most = max(sum(row.bytes.values()) for row in rows)
    unit, size = marks.unit_for(most)
    figure, axes = canvas(WIDTH, 1.35 + ROW * len(rows), ncols=2, sharey=True)
    marks.draw_bars(axes[0], [_elements(row) for row in rows], PANEL, size=9.5)
    axes[0].xaxis.set_major_locator(MultipleLocator(1))
    marks.draw_bars(axes[1], [_bytes(row, unit, size) for row in rows], PANEL, size=9.5)
    marks.name_rows(axes[0], [row.name for row in rows])
    axes[0].set_xlabel("Ψ elements that travel per step\n(an all-reduce counts twice)")
    axes[1].set_xlabel(f"{unit} that travel per step\n(each rank sends {ranks - 1}/{ranks} of it)")
    handles = [Patch(color=palette.COLLECTIVES[kind], label=kind)
               for kind in palette.COLLECTIVES if any(_of(row, kind) for row in rows)]
    handles += marks.tick_handles(rows)
    marks.legend_above(figure, handles, columnspacing=1.1)
    return Picture(figure, _text(rows, ranks, unit, size), data=rows)


def _of(row, kind) -> float:
    if kind == "other":
        return sum(n for name, n in row.elements.items() if name not in palette.COLLECTIVES)
    return row.elements.get(kind, 0)


def _elements(row) -> marks.LabelledBar:
    calls = f" in {counted(row.calls, 'call')}" if row.calls else ""
    return marks.LabelledBar(_parts(row.elements),
                             f"{_psi(sum(row.elements.values()))}{calls}", row.predicted,
                             row.guessed)


def _bytes(row, unit, size) -> marks.LabelledBar:
    total = marks.format_number(sum(row.bytes.values()) / size)
    return marks.LabelledBar(_parts(row.bytes, size), f"{total} {unit}",
                             row.predicted_bytes and row.predicted_bytes / size)


def _parts(sizes, unit=1) -> list[tuple[float, dict]]:
    return [(size / unit, {"color": palette.COLLECTIVES.get(kind, palette.COLLECTIVES["other"]),
                           "edgecolor": "white", "linewidth": 0.5})
            for kind, size in sizes.items()]


def _psi(value) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") + "Ψ"


def _text(rows, ranks, unit, size) -> str:
    def line(row):
        kinds = ", ".join(f"{kind} {_psi(n)}" for kind, n in row.elements.items() if n >= 0.005)
        numbers = [f"{_psi(sum(row.elements.values()))} in {row.calls} calls ({kinds})",
                   f"{marks.format_number(sum(row.bytes.values()) / size)} {unit}"]
        return f"{row.name}: " + ", ".join(
            [*numbers, *marks.tick_words(row.predicted, row.guessed, _psi)])

    return "\n".join([f"travels per step, an all-reduce counted twice; each rank sends "
                      f"{ranks - 1}/{ranks} of it", *map(line, rows)])
