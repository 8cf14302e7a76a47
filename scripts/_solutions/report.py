"""report.html: one self-contained page on a run of the solutions."""

import html
import json
from pathlib import Path

from _unattended.runner import PASSED

from _solutions import charts, results
from _solutions.units import subject, written

STYLE = (Path(__file__).parent / "report.css").read_text()
SUBJECTS = ("Memory", "Traffic", "Time and scaling", "Other numbers")
AGREES = 0.05  # of the measured value: closer than that counts as predicted
_SIGNS = {PASSED: "✓", "failed": "✗", "timed out": "✗", "skipped": "–", "interrupted": "–"}
_CLASSES = {PASSED: "good", "failed": "bad", "timed out": "bad"}


def page(data: dict, out: Path, reference: dict | None = None) -> str:
    """The page, from results.json and the executed notebooks beside it. reference: the results of
    another run of the same kind of machine, if there is one."""
    title = f"Workbook solutions on {data['machine']['title']}"
    parts = [_notebooks(data), _wrong(data), _predicted(data), _differences(data, reference),
             charts.sections(data, out), _preflight(data), _about(data)]
    lead = " · ".join(filter(None, [results.in_words(data), data["date"][:10],
                                    f"commit {data['commit']}", data.get("note")]))
    return document(title, lead, parts)


def document(title: str, lead: str, parts: list[str]) -> str:
    """A whole page in the house style; parts: its sections' HTML."""
    return (f"<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
            f"<meta name='viewport' content='width=device-width'><title>{text(title)}</title>"
            f"<style>\n{STYLE}</style></head>\n<body><main>\n<h1>{text(title)}</h1>\n"
            f"<p class='lead'>{text(lead)}</p>\n" + "\n".join(filter(None, parts))
            + "\n</main></body></html>\n")


def text(value) -> str:
    """A value as HTML."""
    return html.escape(str(value))


def table(caption: str, head: list[str], rows: list[list[str]], numbers: int = 0,
          total: bool = False) -> str:
    """An HTML table of cells that are HTML already; the last `numbers` columns are set to the
    right. total: the last row is a sum."""
    first = len(head) - numbers
    sides = ["" if column < first else " class='number'" for column in range(len(head))]
    lines = ["<tr>" + "".join(f"<th scope='col'{side}>{cell}</th>"
                              for side, cell in zip(sides, head, strict=True)) + "</tr>"]
    for row in rows:
        kind = " class='total'" if total and row is rows[-1] else ""
        cells = [f"<th scope='row'>{row[0]}</th>", *(
            f"<td{side}>{cell}</td>" for side, cell in zip(sides[1:], row[1:], strict=True))]
        lines.append(f"<tr{kind}>{''.join(cells)}</tr>")
    return f"<table><caption>{caption}</caption>{''.join(lines)}</table>"


def outcome(word: str) -> str:
    """The word with its sign and colour; the sign alone would say nothing to some readers."""
    kind, sign = _CLASSES.get(word, "plain"), _SIGNS.get(word, "")
    return f"<span class='{kind}'>{sign} {text(word)}</span>"


def _notebooks(data) -> str:
    rows = []
    for one in data["notebooks"]:
        checks = [record for record in one.get("records", ()) if record["passed"] is not None]
        passed = sum(record["passed"] for record in checks)
        rows.append([text(one["name"]), outcome(one["outcome"]),
                     f"{passed} of {len(checks)}" if checks else "–", minutes(one["seconds"]),
                     _dollars(data, one["seconds"])])
    seconds = sum(one["seconds"] for one in data["notebooks"])
    rows.append(["together", "", "", minutes(seconds), _dollars(data, seconds)])
    rate = data.get("dollars_per_hour")
    price = f"; at {rate:g} dollars an hour" if rate else ""
    return "<h2>Notebooks</h2>" + table(f"What passed, and what it took{price}",
                                        ["notebook", "outcome", "checks", "minutes", "dollars"],
                                        rows, numbers=3, total=True)


def minutes(seconds: float) -> str:
    """Seconds as minutes; of what did not run, a dash."""
    return f"{seconds / 60:.1f}" if seconds else "–"


def _dollars(data, seconds) -> str:
    cost = results.dollars(data, seconds)
    return "–" if cost is None or not seconds else f"{cost:.2f}"


def _wrong(data) -> str:
    items = []
    for one in data["notebooks"]:
        if one["outcome"] == PASSED:
            continue
        items.append(f"<li><b>{text(one['name'])}</b> {text(one['outcome'])}: "
                     f"{text(one['why'])}</li>")
        items += [f"<li><b>{text(one['name'])}</b> <pre>{text(record['text'])}</pre></li>"
                  for record in one.get("records", ()) if record["passed"] is False]
    return f"<h2>What went wrong</h2><ul>{''.join(items)}</ul>" if items else ""


def _predicted(data) -> str:
    rows = {}
    for (notebook, exercise, name), metric in _compared(data).items():
        off = metric["predicted"] / metric["value"] - 1
        cells = [text(name), text(f"{notebook[:2]} · {exercise}"),
                 text(written(metric["value"], metric["unit"])),
                 text(written(metric["predicted"], metric["unit"])),
                 f"<span class='{'good' if abs(off) <= AGREES else 'plain'}'>{_off(off)}</span>"]
        rows.setdefault(subject(name, metric["unit"]), []).append((cells, abs(off)))
    if not rows:
        return ""
    return "<h2>Predicted and measured</h2>" + "".join(
        _predicted_section(what, rows[what]) for what in SUBJECTS if what in rows)


def _predicted_section(what, rows) -> str:
    close = sum(off <= AGREES for _, off in rows)
    return (f"<h3>{what}</h3><p>{close} of {len(rows)} predictions are within {AGREES:.0%} of what "
            "was measured.</p>" + table(f"{what}: by formula, and by the run", [
                "what", "where", "measured", "predicted", "off by"],
                [cells for cells, _ in rows], numbers=3))


def _compared(data) -> dict[tuple[str, str, str], dict]:
    """The metrics that have a prediction; the same number twice in an exercise, once."""
    found, seen = {}, set()
    for (notebook, exercise, name), metric in results.metrics(data).items():
        number = (notebook, exercise, metric["value"], metric["predicted"],
                  subject(name, metric["unit"]), name.partition(":")[0])
        if metric["predicted"] is not None and metric["value"] and number not in seen:
            found[notebook, exercise, name] = metric
            seen.add(number)
    return found


def _off(share) -> str:
    return "0.0%" if abs(share) < 5e-4 else f"{share:+.1%}"


def _differences(data, reference) -> str:
    if not reference:
        return ("<h2>Against the reference run</h2><p>There is none of this kind of machine "
                "yet.</p>")
    rows = [[text(name), text(f"{notebook[:2]} · {exercise}"), spread(mine), spread(its)]
            for (notebook, exercise, name), mine, its in differing(data, reference)]
    words = (f"<p>Compared with {text(reference['machine']['title'])} on "
             f"{text(reference['date'][:10])}, commit {text(reference['commit'])}.</p>")
    if not rows:
        return f"<h2>Against the reference run</h2>{words}<p>Nothing differs beyond its spread.</p>"
    return (f"<h2>Against the reference run</h2>{words}"
            + table("What differs by more than its spread",
                    ["what", "where", "this run", "the reference"], rows, numbers=2))


def differing(data: dict, reference: dict) -> list[tuple]:
    """(key, metric, the reference's) of what differs by more than both spreads, or, where there is
    no spread, by more than 2 %."""
    mine, its, found = results.metrics(data), results.metrics(reference), []
    for key in mine.keys() & its.keys():
        low, high = _range(mine[key])
        its_low, its_high = _range(its[key])
        if low is not None and its_low is not None and (low > its_high or high < its_low):
            found.append((key, mine[key], its[key]))
    return sorted(found, key=lambda row: row[0])


def _range(metric) -> tuple:
    value = metric["value"]
    if value is None:
        return None, None
    if metric["least"] is not None:
        return metric["least"], metric["most"]
    return value - abs(value) * 0.01, value + abs(value) * 0.01


def spread(metric: dict) -> str:
    """A metric's value, and the bounds of its rounds where it has some."""
    words = written(metric["value"], metric["unit"])
    if metric["least"] is not None:
        words += (f" ({written(metric['least'], metric['unit'])} to "
                  f"{written(metric['most'], metric['unit'])})")
    return text(words)


def _preflight(data) -> str:
    if not data.get("preflight"):
        return ""
    rows = [[text(row["name"]), text(row["status"]),
             text(row["value"]) + (f"<br><i>{text(row['advice'])}</i>" if row["advice"] else "")]
            for row in data["preflight"]]
    return "<h2>Preflight</h2>" + table("What this machine has", ["row", "status", "found"], rows)


def _about(data) -> str:
    facts = {name: value for name, value in data["machine"].items() if name != "gpus"}
    facts |= {"preset": data["preset"] or "the machine's", "ranks": data["ranks"] or "the preset's"}
    return "<h2>Machine</h2>" + table("Versions and sizes", ["what", "found"], [
        [text(name), text(value if isinstance(value, str) else json.dumps(value))]
        for name, value in facts.items() if value is not None])
