"""report.html: one self-contained page on a run of the solutions."""

import json
from pathlib import Path

from _notebooks import number
from _unattended.runner import PASSED

from _solutions import charts, predicted, results
from _solutions.markup import document, table, text, where
from _solutions.units import TIME, subject, written
from labs.words import counted, listed

ROOT = Path(__file__).resolve().parents[2]
CLASS, GROUP = 80, 10  # students, as on book/node.md
_SIGNS = {PASSED: "✓", "failed": "✗", "timed out": "✗", "skipped": "–", "interrupted": "–"}
_CLASSES = {PASSED: "good", "failed": "bad", "timed out": "bad"}


def page(data: dict, out: Path, reference: dict | None = None) -> str:
    """The page, from results.json and the executed notebooks beside it. reference: the results of
    another run of the same kind of machine, if there is one."""
    title = f"Workbook solutions on {data['machine']['title']}"
    parts = [_verdict(data), _notebooks(data, out), _cost_of_a_class(data), _wrong(data),
             _differences(data, reference), predicted.section(data), charts.sections(data, out),
             _preflight(data), _about(data)]
    lead = " · ".join(filter(None, [results.in_words(data), data["date"][:10],
                                    f"commit {data['commit']}", data.get("note")]))
    return document(title, lead, parts)


def outcome(word: str) -> str:
    """The word with its sign and colour; the sign alone would say nothing to some readers."""
    kind, sign = _CLASSES.get(word, "plain"), _SIGNS.get(word, "")
    return f"<span class='{kind}'>{sign} {text(word)}</span>"


def _verdict(data) -> str:
    """One sentence: whether this machine runs the workbook, and if not, what to look at."""
    bad = [one for one in data["notebooks"] if one["outcome"] != PASSED]
    # After an interrupt or without time, what was not begun says nothing about the machine.
    failed = [one["name"] for one in bad if one["outcome"] in ("failed", "timed out")]
    if not bad:
        words, kind = "Every notebook that was run passed on this machine.", "good"
    elif failed:
        words = (f"Not ready for a class: {listed(failed)} did not pass; \"What went wrong\" says "
                 "why.")
        kind = "bad"
    else:
        words = (f"Not complete: {counted(len(bad), 'notebook')} of {len(data['notebooks'])} "
                 "did not run to the end; scripts/solutions --resume goes on.")
        kind = "plain"
    return f"<p class='verdict'><span class='{kind}'>{text(words)}</span></p>"


def _title(name: str, out: Path) -> str:
    """A notebook's title, "02 · Manual DDP", from its first cell; its name where it has none."""
    for folder in (out, ROOT / "notebooks"):
        for cell in results.read(folder / f"{name}.ipynb").get("cells", ())[:1]:
            first = "".join(cell["source"]).partition("\n")[0]
            if first.startswith(f"# {number(name)} "):
                return first.removeprefix("# ")
    return name


def _cost_of_a_class(data) -> str:
    """What these notebooks cost for a class at this machine's price, if it is known."""
    rate, seconds = data.get("dollars_per_hour"), sum(one["seconds"] for one in data["notebooks"])
    if not rate or not seconds:
        return ""
    rows = []
    for who, times in ((f"{CLASS} students, each alone on the machine", CLASS),
                       (f"{CLASS} students in groups of {GROUP}", -(-CLASS // GROUP))):
        cost = results.dollars(data, times * seconds)
        rows.append([who, str(times), f"{times * seconds / 3600:.1f}", f"{cost:,.2f}",
                     f"{cost / CLASS:.2f}"])
    return "<h2>Cost of a class</h2>" + table(
        f"These notebooks once for each student or group, at {rate:g} dollars an hour, without "
        "set-up; scripts/turn shares a node by GPUs, and book/node.md has an hour's plan",
        ["who", "runs", "hours", "dollars", "dollars a student"], rows, 4)


def _notebooks(data, out) -> str:
    """With dollars, where it is known what the machine costs."""
    rate = data.get("dollars_per_hour")
    rows = [[text(_title(one["name"], out)), outcome(one["outcome"]), _checks(one),
             minutes(one["seconds"]), _dollars(data, one["seconds"])] for one in data["notebooks"]]
    seconds = sum(one["seconds"] for one in data["notebooks"])
    rows.append(["together", "", "", minutes(seconds), _dollars(data, seconds)])
    price = f"; at {rate:g} dollars an hour" if rate else ""
    head = ["notebook", "outcome", "checks", "minutes", "dollars"]
    shown = len(head) if rate else len(head) - 1
    return "<h2>Notebooks</h2>" + table(f"What passed, and what it took{price}", head[:shown],
                                        [row[:shown] for row in rows], shown - 2, total=True)


def _checks(one) -> str:
    checks = [record["passed"] for record in one.get("records", ()) if record["passed"] is not None]
    return f"{sum(checks)} of {len(checks)}" if checks else "–"


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


def _differences(data, reference) -> str:
    title = "<h2>Against the reference run</h2>"
    if not reference:
        return f"{title}<p>There is no other of this kind of machine and of these sizes.</p>"
    rows = [[text(name), where(notebook, exercise), spread(mine), spread(its)]
            for (notebook, exercise, name), mine, its in differing(data, reference)]
    both = results.metrics(data).keys() & results.metrics(reference).keys()
    note = f" ({text(reference['note'])})" if reference.get("note") else ""
    words = (f"<p>{len(rows)} of {len(both)} numbers differ by more than their spread from "
             f"{text(reference['machine']['title'])}, {text(reference['date'][:10])}, commit "
             f"{text(reference['commit'])}{note}. Times that were measured once are left out.</p>")
    return title + words + (table("What differs by more than its spread", [
        "what", "where", "this run", "the reference"], rows, numbers=2) if rows else "")


def differing(data: dict, reference: dict) -> list[tuple]:
    """(key, metric, the reference's) of what differs by more than both spreads, or, where there is
    no spread, by more than 2 %. Times that were measured once are left out: they always differ."""
    mine, its, found = results.metrics(data), results.metrics(reference), []
    for key in mine.keys() & its.keys():
        low, high = _range(key[2], mine[key])
        its_low, its_high = _range(key[2], its[key])
        if low is not None and its_low is not None and (low > its_high or high < its_low):
            found.append((key, mine[key], its[key]))
    return sorted(found, key=lambda row: row[0])


def _range(name, metric) -> tuple:
    value = metric["value"]
    if metric["least"] is not None:
        return metric["least"], metric["most"]
    if value is None or subject(name, metric["unit"]) == TIME:
        return None, None
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
    facts = {name: value for name, value in data["machine"].items()
             if name not in ("gpus", "title")}
    facts |= {"preset": data["preset"] or "the machine's", "ranks": data["ranks"] or "the preset's"}
    return "<h2>Machine</h2>" + table("Versions and sizes", ["what", "found"], [
        [text(name), text(value if isinstance(value, str) else json.dumps(value))]
        for name, value in facts.items() if value is not None])
