"""A script before its run: the worked one, and whether a student's is there and filled in; and the
JSON file that the run has written."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from labs.checks.verdicts import Verdict, Wrong, kind_of
from labs.words import listed

SCRIPTS = Path(__file__).resolve().parents[3] / "solutions" / "scripts"
_MARKER = re.compile(r"^\s*### (BEGIN|END) SOLUTION\n", re.MULTILINE)
_GAP = re.compile(r'raise NotImplementedError\("Exercise (\d+\.\d+)"\)')
_WRITE = "Rank 0 writes its metrics there, as JSON, before it ends."
_AGAIN = "Run the cell that starts the script again, then this one."
EARLIER = 0.1  # seconds that a file may seem older than it is: clocks of files are coarse


class FileText(str):
    """The text of a file, which a notebook's cell shows line by line, not as a quoted string."""

    def __repr__(self):
        return str(self)


def worked_script(name: str) -> str:
    """The text of a worked script, such as "train.py"."""
    return _MARKER.sub("", (SCRIPTS / name).read_text(encoding="utf-8"))


def write_script(name: str, folder: Path | str = ".") -> Path:
    """Writes the worked script to the folder, as the solution's cell `%%writefile NAME` does it in
    Jupyter, and returns its path."""
    path = Path(folder) / name
    path.write_text(worked_script(name), encoding="utf-8")
    return path


def waiting_exercise(script: str | Path) -> str | None:
    """The number of the first exercise that a script file still waits for; None without one."""
    path = Path(script)
    if path.suffix != ".py" or not path.is_file():
        return None
    found = _GAP.search(path.read_text(encoding="utf-8", errors="replace"))
    return found[1] if found else None


def waits_for(exercise: str, script: str) -> Verdict | None:
    """The verdict where there is no such file; None where there is. Raises NotImplementedError for
    a gap in it."""
    path = Path(script)
    if not script or not path.is_file():
        return Verdict(exercise, None, f"waits for the file {script}: run the cell that writes it")
    if number := waiting_exercise(path):
        raise NotImplementedError(f"Exercise {number}")
    return None


def missing_script(script: str | Path) -> str | None:
    """A sentence on a script that is not there, with the scripts that are; None where it is."""
    path = Path(script)
    if path.is_file():
        return None
    others = sorted(other.name for other in path.parent.glob("*.py"))
    found = f"there {'is' if len(others) == 1 else 'are'} {listed(others)}" if others else (
        "there is no script at all: run the cell that writes it")
    return f"there is no file {script}; {found}"


def raise_if_waiting(answer: Callable, arguments: int) -> None:
    """Raises the NotImplementedError of a function that has not been filled in: what follows takes
    seconds. One that is filled in fails in some other way on arguments that are None."""
    try:
        answer(*arguments * [None])
    except NotImplementedError as error:
        if str(error).startswith("Exercise"):
            raise
    except Exception:
        return


def read_metrics(run: Any, path: str | Path, keys: dict[str, type]) -> dict[str, Any]:
    """What the JSON file holds that this run of a script, a CommandResult, has written. keys: what
    must be in it, of which type. Raises Wrong where the run failed or has not written it."""
    if not hasattr(run, "code"):
        raise Wrong(f"this is {kind_of(run)}, and no run", "Give it what the cell that started the "
                    "script has returned.", code="wrong_type")
    if run.code != 0:
        raise Wrong(f"the run has {'been stopped' if run.code is None else 'failed'} ({run!r}), so "
                    f"there is no {path} of it", "What it printed says why.", code="run_failed")
    if not Path(path).is_file():
        raise Wrong(f"there is no {path}: the run wrote none", _WRITE, code="file_missing")
    # Invariant: the file is of this run. Catches the metrics of an earlier run, which a script that
    # writes none leaves in place, and those of a run that came later.
    written = Path(path).stat().st_mtime
    if written < run.began - EARLIER:
        raise Wrong(f"{path} is of an earlier run: this one wrote none", _WRITE,
                    code="file_outdated")
    if written > run.began + run.seconds:
        raise Wrong(f"another run has written {path} since", _AGAIN, code="file_outdated")
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError:
        raise Wrong(f"{path} is not JSON", _WRITE, code="not_json") from None
    require_keys(found, path, keys)
    return found


def require_keys(found: Any, path: str | Path, keys: dict[str, type]) -> None:
    """Raises Wrong unless what a file holds is a dictionary with these keys, of these types."""
    missing = [f'{kind.__name__} "{key}"' for key, kind in keys.items()
               if not isinstance(found, dict) or not isinstance(found.get(key), kind)]
    if missing:
        raise Wrong(f"{path} has no {listed(missing)}: has another script written it?", _AGAIN,
                    code="wrong_keys")
