"""What travels in a step, by collective: elements on the left, bytes on the right."""

from dataclasses import dataclass

from matplotlib.ticker import MultipleLocator

from labs.pictures import marks, palette
from labs.pictures.picture import Picture
from labs.words import counted

ROW = 0.42  # inches from one bar to the next


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


    def in_elements(self) -> marks.LabelledBar:
        """The bar on the left."""
        calls = f" in {counted(self.calls, 'call')}" if self.calls else ""
        return marks.LabelledBar(_of_known_kinds(self.elements, 1),
                                 f"{_psi(sum(self.elements.values()))}{calls}", self.predicted,
                                 self.guessed)

    def in_bytes(self, unit: marks.Unit) -> marks.LabelledBar:
        """The bar on the right."""
        return marks.LabelledBar(_of_known_kinds(self.bytes, unit.size),
                                 unit.text(sum(self.bytes.values())),
                                 self.predicted_bytes and self.predicted_bytes / unit.size)

    def words(self, unit: marks.Unit) -> str:
        """The row in a sentence."""
        kinds = ", ".join(f"{kind} {_psi(n)}" for kind, n in self.elements.items() if n >= 0.005)
        return ", ".join([f"{self.name}: {self.in_elements().label} ({kinds})",
                          self.in_bytes(unit).label, *self.in_elements().tick_words(_psi)])


def stacked_traffic(rows: list[TrafficRow], ranks: int) -> Picture:
    """Draws two horizontal bars for each row, of elements and of bytes, stacked by collective, with
    the prediction's tick and the student's."""
    unit = marks.unit_for(max(sum(row.bytes.values()) for row in rows))
    share = f"each rank sends {ranks - 1}/{ranks} of it"
    bars = [[row.in_elements() for row in rows], [row.in_bytes(unit) for row in rows]]
    figure, axes = marks.bar_chart(
        [row.name for row in rows], bars,
        ["Ψ elements that travel per step\n(an all-reduce counts twice)",
         f"{unit.name} that travel per step\n({share})"], 1.35 + ROW * len(rows), size=9.5)
    axes[0].xaxis.set_major_locator(MultipleLocator(1))
    marks.draw_legend(figure, sum(bars, []))
    return Picture(figure, "\n".join([
        f"travels per step, an all-reduce counted twice; {share}",
        *(row.words(unit) for row in rows)]), data=rows)


def _of_known_kinds(sizes, unit) -> dict[str, float]:
    """What travels by kind, in units; what the palette has no colour for is `other`."""
    parts = {}
    for kind, size in sizes.items():
        name = kind if kind in palette.COLLECTIVES else "other"
        parts[name] = parts.get(name, 0) + size / unit
    return parts


def _psi(value) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") + "Ψ"
