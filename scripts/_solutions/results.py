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


def dollars(data: dict, seconds: float) -> float | None:
    """What so many seconds cost, where it is known what the machine costs."""
    rate = data.get("dollars_per_hour")
    return None if not rate else rate * seconds / 3600


def in_words(data: dict) -> str:
    """One line: how many passed, and what it took."""
    done = data["notebooks"]
    passed = sum(one["outcome"] == PASSED for one in done)
    seconds = sum(one["seconds"] for one in done)  # those of a run that is resumed, too
    cost = dollars(data, seconds)
    return (f"{passed} of {len(done)} notebooks passed in {seconds / 60:.1f} minutes"
            + (f", {cost:.2f} dollars" if cost else ""))
