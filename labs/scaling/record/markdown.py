"""Tables in Markdown."""

from collections.abc import Iterable, Sequence

from labs.scaling.record.session import Row


def table(head: Sequence[str], rows: Iterable[Sequence[object]], left: int = 1) -> list[str]:
    """Lines of a table; the first `left` columns are set to the left, the others to the right."""
    sides = [":--" if column < left else "--:" for column in range(len(head))]
    return [_line(head), _line(sides), *map(_line, rows)]


def _line(cells) -> str:
    texts = (" ".join(str(cell).split()).replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(texts)} |"


def number_rows(rows: Sequence[Row]) -> list[str]:
    """A table of measured numbers: with predictions and ranges only if one of them has some. What
    was recorded on another machine says so."""
    metrics = [row.metric for row in rows]
    predicted = any(metric.predicted is not None for metric in metrics)
    ranged = any(metric.least is not None for metric in metrics)
    head = ["exercise", "what", "measured", *["predicted", "measured is"] * predicted,
            *["least to most"] * ranged]
    return table(head, [[row.exercise, row.metric.name + " (recorded elsewhere)" * row.recorded,
                         _text(row.metric.value, row.metric.unit),
                         *_predicted(row.metric) * predicted, *[_range(row.metric)] * ranged]
                        for row in rows], left=2)


def _predicted(metric) -> list[str]:
    if metric.predicted is None:
        return ["", ""]
    share = f"{metric.value / metric.predicted - 1:+.1%}" if metric.predicted else ""
    return [_text(metric.predicted, metric.unit), share]


def _range(metric) -> str:
    if metric.least is None or metric.most is None:
        return ""
    return f"{_text(metric.least)} to {_text(metric.most, metric.unit)}"


def _text(value: float, unit: str = "") -> str:
    """Four digits; whole numbers in full, with commas."""
    number = f"{value:,.0f}" if abs(value) >= 1000 or value == round(value) else f"{value:.4g}"
    return f"{number} {unit}".strip()
