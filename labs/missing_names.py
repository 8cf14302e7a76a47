"""An extension of IPython that set-up loads into each kernel of .venv: a cell of a notebook that is
run before those above it, as after a restart, says so below its NameError."""

import re

_OURS = re.compile(r"\blab\.\w+\(")
_NOTE = ("Run the cells above this one first (Run > Run All Above Selected Cell): what they define "
         "is gone after a restart of the kernel.")


def load_ipython_extension(shell) -> None:
    shell.set_custom_exc((NameError,), _show)


def _show(shell, kind, error, traceback, tb_offset=None):
    # frames: IPython's own, then the cell's; a further one is a function's, with a slip of its own
    in_the_cell = traceback.tb_next is None or traceback.tb_next.tb_next is None
    if in_the_cell and _OURS.search(shell.user_ns["In"][-1]):
        error.add_note(_NOTE)
    shell.showtraceback((kind, error, traceback), tb_offset=tb_offset)
