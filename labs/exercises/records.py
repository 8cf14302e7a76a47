"""What checks and pictures said in a whole run of a notebook: a line of JSON for each, in the file
that $WORKBOOK_RECORDS names. scripts/solutions makes its report of them; without the variable
nothing is written."""

import json
import math
import os
from dataclasses import asdict
from typing import Any

FILE = "WORKBOOK_RECORDS"


def record(exercise: str, found: Any, seconds: float) -> None:
    """Appends what a check or a picture returned, and the seconds that it took."""
    path = os.environ.get(FILE)
    if not path:
        return
    line = {"exercise": exercise, "kind": type(found).__name__, "seconds": seconds,
            "passed": getattr(found, "passed", None), "text": str(found),
            "metrics": [_finite(asdict(metric)) for metric in metrics_of(found)]}
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(line, ensure_ascii=False) + "\n")


def metrics_of(found: Any) -> list:
    """The metrics of a result that has some, or of each in a list of such."""
    if hasattr(found, "metrics"):
        return list(found.metrics())
    if isinstance(found, list | tuple):
        return [metric for each in found for metric in metrics_of(each)]
    return []


def _finite(metric: dict) -> dict:
    """JSON has no infinities."""
    return {name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in metric.items()}
