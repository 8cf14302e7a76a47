"""An extension of IPython that set-up loads into each kernel of .venv. Of a cell that is run before
those that define what it needs it says so in place of a traceback, of one that was interrupted what
to run next, and of one that takes long that it is at work."""

import re

from labs.words import wrapped
from labs.workers import notebook_cells, source_lines
from labs.workers.launch_error import NotRunYet, Stopped
from labs.workers.progress import CellLine

_OURS = re.compile(r"\b(lab\.\w+|labs\.\w+|launch)\(")
_line = CellLine()
_NOTE = f"Run the cells above this one first ({notebook_cells.ABOVE})."


def load_ipython_extension(shell) -> None:
    shell.set_custom_exc((NameError, NotImplementedError, KeyboardInterrupt), _show)
    notebook_cells.watch()
    shell.events.register("pre_run_cell", _begin)
    shell.events.register("post_run_cell", _end)


def _show(shell, kind, error, traceback, tb_offset=None):
    if isinstance(error, KeyboardInterrupt):
        _show_interrupted(shell, error)
        return
    if isinstance(error, NameError):
        if first := notebook_cells.what_to_run(str(error)):
            _show_not_run_yet(shell, error, first)
            return
        note = _note_in_the_cell(shell, traceback)
    else:
        note = (f"{error} is waiting for your code: the line above raises this error until you "
                "write your own there." if re.match(r"Exercise [\d.]+$", str(error)) else "")
    if note:
        error.add_note(wrapped(note))
    shell.showtraceback((kind, error, traceback), tb_offset=tb_offset)


def _note_in_the_cell(shell, traceback) -> str:
    """Of a name that no cell is known to define, in a cell of ours; not of a student's own slip."""
    # frames: IPython's own, then the cell's; a further one is a function's, with a slip of its own
    in_the_cell = traceback.tb_next is None or traceback.tb_next.tb_next is None
    return _NOTE if in_the_cell and _OURS.search(shell.user_ns["In"][-1]) else ""


def _show_not_run_yet(shell, error, first) -> None:
    """What is missing, where, and which cell to run first."""
    own = [place for place in source_lines.traceback_of(error) if place.is_students]
    short = NotRunYet(f"{error}{f', at {own[-1]}' if own else ''}", first)
    short.__context__ = error
    shell.showtraceback((type(short), short, error.__traceback__))


def _show_interrupted(shell, error) -> None:
    """What was stopped and what to run next, without pages of lines that are not the student's."""
    if not isinstance(error, Stopped):
        own = [place for place in source_lines.traceback_of(error) if place.is_students]
        where = f" at {own[-1]}:  {own[-1].source}" if own else ""
        stopped = Stopped(str(error) or f"interrupted{where}")
        stopped.__context__ = error
        error = stopped
    shell.showtraceback((type(error), error, error.__traceback__))


def _begin(info) -> None:
    imports = re.match(r"\s*(import|from) ", info.raw_cell or "")
    _line.begin("importing, which takes longest the first time" if imports
                else "this cell is running")


def _end(result) -> None:
    _line.end()
