"""The step-time model against published training runs that it was not fitted to."""

import functools
import math

from labs.predictions.step_time import (
    FITTED,
    PublishedRun,
    RowsError,
    error_percent,
    load_published_runs,
    step_time,
)
from labs.predictions.step_time.fit import FOLDS, by_code_base, held_out, left_out

BANDS = {"up to 2k": (0, 2048), "2k to 4k": (2049, 4096), "4k to 8k": (4097, 8192),
         "above 8k": (8193, math.inf), "up to 4k": (0, 4096), "above 4k": (4097, math.inf)}


def run(arguments) -> dict:
    """rows: predicted, published and error of each; excluded: id -> the rule; summary: mean errors
    by length of sequence and by code base, of rows left out by k folds and by code bases."""
    try:
        return compare(load_published_runs(*filter(None, [arguments.rows])))
    except RowsError as error:
        raise SystemExit(f"scripts/bench steptime: {error}") from None


def compare(published: list[PublishedRun]) -> dict:
    """The result for these rows. A row that is among those of the repository is predicted with
    constants that were fitted without its fold; any other with the table of constants, which never
    saw it. Errors in percent: predicted over published seconds, less 100."""
    runs = [row for row in published if row.run]
    if not runs:
        raise RowsError(f"none of {len(published)} rows can be predicted; {published[0].id} "
                        f"{published[0].excluded}")
    without_fold, without_code_base = _constants()
    rows = [_row(row, without_fold.get(row.key, FITTED)) for row in runs]
    harder = [_row(row, without_code_base.get(row.code_base.name, FITTED)) for row in runs]
    return {"rows": rows, "excluded": {row.id: row.excluded for row in published if row.excluded},
            "summary": _summary(rows), "code_base_left_out": _summary(harder),
            "folds": FOLDS, "constants": vars(FITTED)}


@functools.cache
def _constants() -> tuple[dict, dict]:
    """Constants that were fitted without a row's fold, by the row's key; without a whole code base,
    by its name."""
    ours = [row for row in load_published_runs() if row.run]
    by_fold, by_base = held_out(), left_out(ours, by_code_base(ours))
    return ({row.key: by_fold[row.id] for row in ours},
            {row.code_base.name: by_base[row.id] for row in ours})


def _row(row, constants) -> dict:
    predicted = step_time(row.run, constants)
    return {"id": row.id, "model": row.model, "code_base": row.code_base.name,
            "gpu": row.run.gpu.name, "gpus": row.run.gpus, "seq_len": row.sequence,
            "predicted_s": predicted.total, "published_s": row.seconds,
            "error_percent": error_percent(predicted.total, row.seconds),
            "causes_s": vars(predicted)}


def _summary(rows) -> dict:
    bands = {band: [row for row in rows if shortest <= row["seq_len"] <= longest]
             for band, (shortest, longest) in BANDS.items()}
    code_bases = {name: [row for row in rows if row["code_base"] == name]
                  for name in sorted({row["code_base"] for row in rows})}
    return {"by_length": _errors(bands), "by_code_base": _errors(code_bases)}


def _errors(groups) -> dict[str, dict]:
    """Group -> its rows, mean error without sign, mean error, and the worst row."""
    found = {}
    for name, rows in groups.items():
        if rows:
            errors = [row["error_percent"] for row in rows]
            worst = max(rows, key=lambda row: abs(row["error_percent"]))
            found[name] = {"rows": len(rows), "bias_percent": sum(errors) / len(rows),
                           "mean_error_percent": sum(map(abs, errors)) / len(rows),
                           "worst": worst["id"],
                           "worst_error_percent": worst["error_percent"]}
    return found


def table(result) -> str:
    """The result for a terminal."""
    lines = [f"{'row':22s} {'model':14s} {'GPU':8s} {'GPUs':>5} {'length':>7} {'predicted':>10} "
             f"{'published':>10} {'error':>8}"]
    lines += [f"{row['id']:22.22s} {row['model']:14.14s} {row['gpu']:8s} {row['gpus']:>5} "
              f"{row['seq_len']:>7} {row['predicted_s']:>8.3f} s {row['published_s']:>8.3f} s "
              f"{row['error_percent']:>+7.1f}%" for row in result["rows"]]
    lines += [f"{name:22.22s} excluded: {reason}" for name, reason in result["excluded"].items()]
    lines += _summary_lines(f"a row's fold of {result['folds']} left out of the fit; all rows of a "
                            "model are in one fold", result["summary"])
    lines += _summary_lines("a row's whole code base left out", result["code_base_left_out"])
    constants = ", ".join(f"{name} {value:.3g}" for name, value in result["constants"].items())
    return "\n".join([*lines, "", f"fitted to all: {constants}"])


def _summary_lines(title, summary) -> list[str]:
    lines = ["", f"mean error, {title}"]
    for name, found in {**summary["by_length"], **summary["by_code_base"]}.items():
        lines.append(f"{name:14s} {found['rows']:>4} rows {found['mean_error_percent']:>6.1f}% "
                     f"(bias {found['bias_percent']:+.1f}%), worst {found['worst']} "
                     f"{found['worst_error_percent']:+.1f}%")
    return lines
