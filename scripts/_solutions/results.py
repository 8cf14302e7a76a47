"""results.json: what a run of the solutions found, as data."""

import json
import platform
from datetime import datetime
from pathlib import Path

from _unattended import machine, reference
from _unattended.folder import commit, read
from _unattended.runner import FAILED, PASSED, TIMED_OUT, Result

from _solutions.units import written


def header(found: dict, root: Path, preflight: list[dict], options) -> dict:
    """The machine, the versions, the commit, and what was asked for."""
    import psutil

    return {"date": datetime.now().isoformat(timespec="seconds"), "commit": commit(root),
            "machine": found | {"title": machine.title(found) if found["gpus"] else
                                f"{psutil.cpu_count()} cores, no GPU",
                                "cores": psutil.cpu_count(), "system": platform.platform(),
                                "memory": written(psutil.virtual_memory().total, "bytes")},
            "note": options.note, "preset": options.preset, "ranks": options.ranks,
            "dollars_per_hour": options.dollars_per_hour, "preflight": preflight}


def of_notebook(name: str, result: Result, out: Path) -> dict:
    """One notebook: its outcome, its cells' seconds, and what its checks and pictures said. A
    notebook fails if a cell raised, or if a check of the solution did not pass."""
    state, records = read(out / f"{name}.json"), read_lines(out / f"{name}.records.jsonl")
    wrong = [record for record in records if record["passed"] is False]
    outcome, why = result.outcome, result.why
    if outcome in (PASSED, FAILED) and (state.get("failed") or wrong):
        outcome = FAILED
        why = "; ".join([*(f"cell {cell}: {said}" for cell, said in state.get("failed", ())),
                         *(record["text"].splitlines()[0] for record in wrong)])
    elif outcome == TIMED_OUT:
        why = f"{why}, in cell {state.get('running', 0)} of {state.get('cells', '?')}"
    return {"name": name, "outcome": outcome, "why": why, "seconds": round(result.seconds, 1),
            "cells": state.get("cells", 0), "cell_seconds": state.get("seconds", []),
            "left_on_gpu_mib": result.left, "records": records}


def read_lines(path: Path) -> list[dict]:
    """A file with a line of JSON each; the last one may be cut off, and is then left out."""
    found = []
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def last_seconds(root: Path, found: dict) -> dict[str, float]:
    """Notebook -> seconds of its newest run that passed on this machine or one like it; else those
    of the reference run of this kind of machine. found: as results.json has the machine."""
    data = [read(path) for path in (root / "experiments").glob("*/results.json")]
    own = [run for run in data if "notebooks" in run  # scripts/on-gpu's has parts
           and run["machine"]["title"] == found["title"]]
    last = reference.seconds(reference.of_machine(found, root) or {})
    for run in sorted(own, key=lambda run: run["date"]):
        last |= reference.seconds(run)
    return last


def metrics(data: dict) -> dict[tuple[str, str, str], dict]:
    """(notebook, exercise, name) -> the metric as results.json has it. A name that comes again in
    the same exercise gets a number."""
    found = {}
    for one in data.get("notebooks", ()):
        for record in one.get("records", ()):
            for metric in record["metrics"]:
                name, again = metric["name"], 2
                while (one["name"], record["exercise"], name) in found:
                    name, again = f"{metric['name']} ({again})", again + 1
                found[one["name"], record["exercise"], name] = metric
    return found


def resumed(header: dict, earlier: dict) -> dict:
    """The header of a run that goes on where an earlier one stopped: what was noted of it stays,
    and "runs" has the seconds and the price of each run before, so that all are paid for.

    header: of the new run; earlier: its results.json, empty for a new folder."""
    kept = {name: header[name] or earlier.get(name) for name in ("note", "dollars_per_hour")}
    return header | kept | {"runs": runs(earlier) if earlier else []}


def runs(data: dict) -> list[dict]:
    """All runs into one folder, the last one at the end: date, seconds, dollars_per_hour."""
    seconds = data.get("seconds", 0.0)
    if "runs" not in data:  # written before the runs were kept: what was resumed is missing there
        seconds = max(seconds, sum(one["seconds"] for one in data.get("notebooks", ())))
    return [*data.get("runs", ()), {"date": data.get("date"), "seconds": seconds,
                                    "dollars_per_hour": data.get("dollars_per_hour")}]


def dollars(data: dict, seconds: float) -> float | None:
    """What so many seconds cost, where it is known what the machine costs."""
    rate = data.get("dollars_per_hour")
    return None if not rate else rate * seconds / 3600


def dollars_of_runs(found: list[dict]) -> float:
    """What these runs cost, from start to end, each at its own price; 0 where none has one."""
    return sum((run["dollars_per_hour"] or 0) * run["seconds"] / 3600 for run in found)


def in_words(data: dict) -> str:
    """One line: how many passed, and what it took, with the runs that it goes on from."""
    done, all_runs = data["notebooks"], runs(data)
    passed = sum(one["outcome"] == PASSED for one in done)
    seconds = sum(run["seconds"] for run in all_runs)
    cost = dollars_of_runs(all_runs)
    return (f"{passed} of {len(done)} notebooks passed in {seconds / 60:.1f} minutes"
            + (f", {cost:.2f} dollars" if cost else "")
            + (f" ({len(all_runs)} runs)" if len(all_runs) > 1 else ""))
