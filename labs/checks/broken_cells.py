"""Cells that Python could not read: what they were to define is what an earlier run left, or is not
there at all."""

import re
import sys

# Names at the left margin of a cell: functions, classes, and the first target of an assignment. A
# regular expression, because a cell that is not Python has no syntax tree.
_DEFINES = re.compile(r"^(?:async +)?(?:def|class) +(\w+)|^(\w+)(?: *,.*?)? *=(?!=)", re.MULTILINE)
_unread: dict[str, str] = {}
"""Name -> where, and why, the last cell that was to define it is not Python."""


def watch() -> None:
    """Notes from now on which cells of this kernel are not Python; where there is one."""
    shell = _shell()
    if shell and _note not in shell.events.callbacks["post_run_cell"]:
        shell.events.register("post_run_cell", _note)


def old_answer() -> str:
    """Says that the cell that runs, a check's, uses a name whose last cell is not Python; or ""."""
    if not _unread:
        return ""
    words = set(re.findall(r"\w+", _shell().user_ns["In"][-1]))
    for name, why in _unread.items():
        if name in words:
            return (f"the last cell that defines {name} is not Python ({why}), so this would look "
                    "at what you had before")
    return ""


def _shell():
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython else None


def _note(result) -> None:
    """IPython calls it after each cell, of which one that is not Python was not run at all."""
    names = {first or second for first, second in _DEFINES.findall(result.info.raw_cell or "")}
    # Set where IPython could not compile the cell: none of its lines ran, so its names are stale.
    error = result.error_before_exec
    if isinstance(error, SyntaxError):
        where = f"In [{result.execution_count}] line {error.lineno}" if error.lineno else "a cell"
        _unread.update(dict.fromkeys(names, f"{where}: {error.msg}"))
    else:
        for name in names:
            _unread.pop(name, None)
