"""What the cells of the notebook define, and which of them have not run in this kernel: for
messages that say which cell to run, in place of a bare NameError or a look at an old answer.

Imports no IPython: without a kernel there is nothing to say.
"""

import builtins
import contextlib
import json
import os
import re
import symtable
import sys

from labs.words import listed

ABOVE = "Run > Run All Above Selected Cell runs all that come before it"
# Names at the left margin of a cell: functions, classes, and the first target of an assignment. A
# regular expression, because a cell that is not Python has no syntax tree.
_DEFINES = re.compile(r"^(?:async +)?(?:def|class) +(\w+)|^(\w+)(?: *,.*?)? *=(?!=)", re.MULTILINE)
_IMPORTS = re.compile(r"^(?:from +\S+ +)?import +(.+)$", re.MULTILINE)
_GUESS = re.compile(r"""^labs\.guess\(\s*["']([\w.]+)["']""", re.MULTILINE)
_HEADINGS = re.compile(r"^#+ +(.+)$", re.MULTILINE)
_MISSING = re.compile(r"name '(\w+)' is not defined")
# What the first cells of all our notebooks import, where the notebook's file is not known.
_OURS = {"lab", "labs", "launch", "torch", "dist"}
unread: dict[str, str] = {}
"""Name -> where, and why, the last cell that was to define it is not Python. A guess has the name
"guess 3.8"."""
_said = False  # whether what runs has named such a cell itself


def watch() -> None:
    """Notes from now on which cells of this kernel are not Python; where there is one."""
    shell = _shell()
    if shell and _note not in shell.events.callbacks["post_run_cell"]:
        shell.events.register("post_run_cell", _note)


def old_answer() -> str:
    """Says that the cell that runs uses a name whose last cell is not Python; or ""."""
    global _said
    if not unread:
        return ""
    source = _shell().user_ns["In"][-1]
    used = _used_names(source) - names_in(source)
    for name, why in unread.items():
        if name in used:
            _said = True
            return (f"the last cell that defines {name} is not Python ({why}), so this would look "
                    "at what you had before: fix that cell and run it, then this one")
    return ""


def what_to_run(message: str) -> str:
    """Says which cell to run first, for the message of a NameError whose name a cell of the
    notebook defines; "" where it is a slip in the student's code, and outside of a notebook."""
    global _said
    shell, found = _shell(), _MISSING.search(message)
    if not (shell and found) or found[1] in shell.user_ns:
        return ""
    name = found[1]
    if name in unread:
        _said = True
        return (f"The last cell that defines {name} is not Python ({unread[name]}): fix it and run "
                "it, then this one.")
    if cell := _cell_with(name):
        others = [other for other in _missing_too() if other != name]
        return (f"{name} is defined in the cell that begins with {cell}, which has not run to "
                f"its end since the kernel was started: run it first ({ABOVE}), then this one."
                + (f" Missing, too: {listed(others)}." if others else ""))
    return f"Run the cells above this one first ({ABOVE})." if name in _OURS else ""


def _missing_too() -> list[str]:
    """The names that the cell that runs uses, and that a cell which has not run defines."""
    shell = _shell()
    source = shell.user_ns["In"][-1]
    return sorted(name for name in _used_names(source) - names_in(source) - set(shell.user_ns)
                  if not hasattr(builtins, name) and _cell_with(name))


def names_in(source: str) -> set[str]:
    """The names that a cell defines or imports, at its left margin, and its guesses."""
    if source.startswith("%%"):  # a file that it writes, or a script that it runs
        return set()
    names = {first or second for first, second in _DEFINES.findall(source)}
    for imported in _IMPORTS.findall(source):
        parts = filter(None, map(str.strip, imported.split(",")))
        names |= {part.split()[-1].partition(".")[0] for part in parts}
    return names | {f"guess {exercise}" for exercise in _GUESS.findall(source)}


def _cell_with(name) -> str:
    """The first line of the cell that defines a name, in the notebook of this kernel, and the
    heading that it stands under; or ""."""
    heading = ""
    for cell in _cells():
        source = "".join(cell.get("source", ""))
        if cell.get("cell_type") == "markdown":
            heading = next(reversed(_HEADINGS.findall(source)), heading)
        if cell.get("cell_type") == "code" and name in names_in(source):
            first = source.strip().splitlines()[0]
            begins = f"`{first if len(first) <= 70 else first[:69] + '…'}`"
            return begins + (f" (below the heading “{heading.strip()}”)" if heading else "")
    return ""


def _cells() -> list[dict]:
    """The cells of the notebook of this kernel; none where its file is not known."""
    # Jupyter's server and VS Code each say in a way of their own which file it is.
    path = _shell().user_ns.get("__vsc_ipynb_file__") or os.environ.get("JPY_SESSION_NAME", "")
    with contextlib.suppress(OSError, ValueError, AttributeError):
        with open(path, encoding="utf-8") as file:
            return json.load(file).get("cells", [])
    return []


def _shell():
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython else None


def _used_names(source) -> set[str]:
    """The global names that a cell reads, also in its functions; and its guesses."""
    try:
        tables = [symtable.symtable(source, "cell", "exec")]
    except SyntaxError:  # a magic command, which symtable does not know
        return set(re.findall(r"\w+", source))
    names = {f"guess {exercise}" for exercise in _GUESS.findall(source)}
    for table in tables:
        is_cell = table.get_type() == "module"
        names |= {symbol.get_name() for symbol in table.get_symbols()
                  if symbol.is_referenced() and (is_cell or symbol.is_global())}
        tables += table.get_children()
    return names


def _note(result) -> None:
    """IPython calls it after each cell, of which one that is not Python was not run at all."""
    global _said
    source = result.info.raw_cell or ""
    names = names_in(source)
    # Set where IPython could not compile the cell: none of its lines ran, so its names are stale.
    error = result.error_before_exec
    if isinstance(error, SyntaxError):
        where = f"In [{result.execution_count}] line {error.lineno}" if error.lineno else "a cell"
        unread.update(dict.fromkeys(names, f"{where}: {error.msg}"))
        return
    for name in names:
        unread.pop(name, None)
    # A check says so itself, before it runs; of what else a cell of ours did, this comes after.
    is_ours = re.search(r"\b(lab\.\w+|launch)\(", source)
    if unread and is_ours and not _said and (old := old_answer()):
        print(f"○ {old.replace('this would look', 'this looked')}")
    _said = False
