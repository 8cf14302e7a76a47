"""What checks and pictures said in a whole run of a notebook: a line of JSON for each, in the file
that $WORKBOOK_RECORDS names. scripts/solutions makes its report of them; without the variable
nothing is written. In memory the results themselves are kept once `keep()` was called: notebook 06
documents them."""

import json
import math
import os
import time
from dataclasses import asdict, dataclass
from typing import Any

from labs.workers import script_run

FILE = "WORKBOOK_RECORDS"
MAX_RECORDS = 64  # results in memory: a picture of a thousand points is 1 MB
_kept: dict[str, "Result"] | None = None


@dataclass(frozen=True)
class Result:
    """What a check or a picture returned last. function: its name; ended: by time.time()."""

    exercise: str
    function: str
    found: Any
    seconds: float
    ended: float


def keep() -> None:
    """From now on the last result of each check and picture stays in memory, of MAX_RECORDS
    functions. Notebooks that nobody documents do not call this, and so hold no figures."""
    global _kept
    if _kept is None:
        _kept = {}


def kept() -> list[Result]:
    """The results in memory, the oldest first."""
    return list((_kept or {}).values())


def record(exercise: str, found: Any, seconds: float, function: str = "") -> None:
    """Keeps what a check or a picture returned, and appends it to the file, with the seconds that
    it took."""
    if hasattr(found, "passed"):
        script_run.note(function, exercise, found.passed)
    if _kept is not None:
        _kept.pop(function, None)  # so that the newest comes last
        _kept[function] = Result(exercise, function, found, seconds, time.time())
        if len(_kept) > MAX_RECORDS:
            del _kept[next(iter(_kept))]
    path = os.environ.get(FILE)
    if not path:
        return
    line = {"exercise": exercise, "kind": type(found).__name__, "seconds": seconds,
            "passed": getattr(found, "passed", None), "text": str(found),
            "metrics": [_finite(asdict(metric)) for metric in metrics_of(found)]}
    # Appended line by line, not written at the end: a notebook that stops leaves what came before.
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
