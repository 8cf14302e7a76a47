"""What a turn hands back: the executed notebook, and a short report on it."""

import json
import shutil
from pathlib import Path

from _solutions import markup, results
from _solutions.units import written
from _unattended import folder, runner

from labs.words import counted

ENDED, RAISED = "ran to its end", "a cell raised"
SIGNS = {True: "✓", False: "✗", None: "·"}


def found(name: str, turn, waited: float, minutes: float) -> dict:
    """The report as data. turn: a `session.Turn` that has run; waited: seconds."""
    state = folder.read(turn.results / f"{name}.json")
    result, failed = turn.result, state.get("failed", [])
    outcome = result.outcome
    if outcome in (runner.PASSED, runner.FAILED):
        outcome = RAISED if failed or outcome == runner.FAILED else ENDED
    exercises = {}
    for record in results.read_lines(turn.results / f"{name}.records.jsonl"):
        if record["kind"] == "Verdict":  # not a picture; of each check the last verdict counts
            exercises[record["exercise"]] = {"passed": record["passed"],
                                             "sentence": record["text"].splitlines()[0]}
    return {"notebook": name, "outcome": outcome, "cell": state.get("running", 0),
            "cells": state.get("cells", 0), "failed": failed,
            # Why the executor failed, where no cell did: killed, for example.
            "why": result.why if outcome == RAISED and not failed else "",
            "minutes": round(result.seconds / 60, 2), "minutes_allowed": minutes,
            "minutes_waited": round(waited / 60, 2), "ran_on": turn.names,
            "cores": len(turn.node.cores_of(turn.names)), "peak_bytes": turn.memory,
            "peak_gpu_bytes": turn.gpu_memory, "exercises": exercises}


def exit_code(data: dict) -> int:
    """0 for a notebook that ran to its end, 124 after its minutes, as of the program timeout."""
    return {ENDED: 0, runner.TIMED_OUT: 124, runner.INTERRUPTED: 130}.get(data["outcome"], 1)


def verdict(data: dict) -> str:
    """One sentence: how it ended, and what passed."""
    how = {runner.TIMED_OUT: f"was ended in cell {data['cell']} of {data['cells']}, because its "
                             f"{data['minutes_allowed']:g} minutes were over",
           runner.INTERRUPTED: f"was interrupted in cell {data['cell']} of {data['cells']}",
           RAISED: "did not run without an error"}.get(data["outcome"], ENDED)
    said = [one["passed"] for one in data["exercises"].values()]
    if not said:
        return f"{data['notebook']} {how}; no check was called."
    return (f"{data['notebook']} {how}; of {counted(len(said), 'exercise')} that were checked, "
            f"{said.count(True)} passed, {said.count(False)} failed, {said.count(None)} not filled "
            "in.")


def text(data: dict) -> str:
    """The report for a terminal."""
    lines = [verdict(data), *(f"  {name:9s} {value}" for name, value in _facts(data))]
    lines += [f"  {SIGNS[one['passed']]} {number}  {_sentence(one)}"
              for number, one in data["exercises"].items()]
    return "\n".join([*lines, *(f"  ! {why}" for why in _errors(data))])


def _facts(data) -> list[tuple[str, str]]:
    memory = [f"{written(data[key], 'bytes')} {where}" for key, where in (
        ("peak_bytes", "on the host"), ("peak_gpu_bytes", "on a GPU")) if data[key]]
    return [("minutes", f"{data['minutes']:.1f} of at most {data['minutes_allowed']:g}, after "
                        f"{data['minutes_waited']:.1f} in the queue"),
            ("ran on", f"{', '.join(data['ran_on'])}, with {counted(data['cores'], 'core')}"),
            ("peak", " and ".join(memory) or "not measured")]


def _errors(data) -> list[str]:
    errors = [f"cell {cell}: {why}" for cell, why in data["failed"]]
    return [*errors, data["why"]] if data["why"] else errors


def _sentence(one) -> str:
    """Without the sign and the exercise's number, which stand before it."""
    return one["sentence"].partition("  ")[2] or one["sentence"]


def page(data: dict) -> str:
    """The report as a self-contained page."""
    rows = [[markup.text(number), SIGNS[one["passed"]], markup.text(_sentence(one))]
            for number, one in data["exercises"].items()]
    errors = "".join(f"<li>{markup.text(why)}</li>" for why in _errors(data))
    return markup.document(data["notebook"], verdict(data), [
        rows and "<h2>Exercises</h2>" + markup.table(
            "What each check said last: ✓ passed, ✗ failed, · not filled in",
            ["exercise", "", "sentence"], rows),
        errors and f"<h2>What went wrong</h2><ul>{errors}</ul>",
        "<h2>The turn</h2>" + markup.table("What it took", ["what", "found"], [
            [name, markup.text(value)] for name, value in _facts(data)])])


def hand_back(data: dict, results_folder: Path, copy: Path, out: Path) -> list[Path]:
    """Writes the notebook and the report into `out`; returns their paths."""
    name = data["notebook"]
    executed = results_folder / f"{name}.ipynb"
    target = out / f"{name}.executed.ipynb"
    # Without outputs where the executor itself was killed, which its report says.
    shutil.copyfile(executed if executed.exists() else copy, target)
    paths = [target]
    for suffix, content in (("html", page(data)), ("txt", f"{text(data)}\n"),
                            ("json", json.dumps(data, indent=1, ensure_ascii=False) + "\n")):
        paths.append(out / f"{name}.report.{suffix}")
        paths[-1].write_text(content, encoding="utf-8")
    return paths
