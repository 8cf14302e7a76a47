"""The page's part on predictions: what was off, and, folded, all that was predicted."""

from _solutions import markup, results
from _solutions.units import TIME, subject, written

AGREES = 0.05  # of the measured value: closer than that counts as predicted
SUBJECTS = ("Memory", "Traffic", TIME, "Other numbers")
_HEAD = ["what", "where", "measured", "predicted", "off by"]


def section(data: dict) -> str:
    """A table of the subjects, one of what is off, and one of everything; empty where nothing was
    predicted."""
    rows = [_row(key, metric) for key, metric in compared(data).items()]
    if not rows:
        return ""
    rows.sort(key=lambda row: SUBJECTS.index(row[0]))
    wrong = [cells for _, off, cells in rows if abs(off) > AGREES]
    parts = ["<h2>Predicted and measured</h2>", _symbol(data), _summary(rows)]
    if wrong:
        parts.append(markup.table(f"What is off by more than {AGREES:.0%}", _HEAD, wrong,
                                  numbers=3))
    parts.append(markup.folded(f"All {len(rows)} predictions", markup.table(
        "By formula, and by the run", _HEAD, [cells for *_, cells in rows], numbers=3)))
    return "".join(parts)


def _symbol(data) -> str:
    """What Ψ means, where a number below has it."""
    if not any("Ψ" in f"{name} {metric['unit']}" for (*_, name), metric in compared(data).items()):
        return ""
    return ("<p>Ψ is the number of parameters of a model: \"2 Ψ\" elements are twice as many as it "
            "has parameters.</p>")


def compared(data: dict) -> dict[tuple[str, str, str], dict]:
    """The metrics that have a prediction; what an exercise gives as numbers and as a picture too,
    once."""
    found, seen = {}, set()
    for (notebook, exercise, name), metric in results.metrics(data).items():
        number = (notebook, exercise, metric["name"].partition(":")[0],
                  *(written(metric[each], metric["unit"]) for each in ("value", "predicted")))
        if metric["predicted"] is not None and metric["value"] and number not in seen:
            found[notebook, exercise, name] = metric
            seen.add(number)
    return found


def _row(key, metric) -> tuple[str, float, list[str]]:
    """(subject, relative error, the row's cells)."""
    notebook, exercise, name = key
    off, unit = metric["predicted"] / metric["value"] - 1, metric["unit"]
    kind = "good" if abs(off) <= AGREES else "plain"
    return subject(name, unit), off, [
        markup.text(name), markup.where(notebook, exercise),
        *(markup.text(written(metric[each], unit)) for each in ("value", "predicted")),
        f"<span class='{kind}'>{_percent(off)}</span>"]


def _percent(share) -> str:
    return "0.0 %" if abs(share) < 5e-4 else f"{100 * share:+.1f} %".replace("-", "−")


def _summary(rows) -> str:
    lines = []
    for name in SUBJECTS:
        errors = sorted(abs(off) for what, off, _ in rows if what == name)
        if errors:
            lines.append([name, str(len(errors)), str(sum(off <= AGREES for off in errors)),
                          _percent(errors[len(errors) // 2]).strip("+"),
                          _percent(errors[-1]).strip("+")])
    return markup.table("How far predictions are from what was measured",
                      ["about", "predictions", f"within {AGREES:.0%}", "off by, median", "at most"],
                      lines, numbers=4)
