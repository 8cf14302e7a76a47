"""Progress of whatever takes over two seconds: bars, and a line that says what is being done.

Both leave nothing behind, neither in a terminal nor in a notebook that is opened again. A widget
would: its state is gone when the kernel is, and JupyterLab shows an error in its place.
"""

import contextlib
import html
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import copy_context
from typing import Any

SHOWN_AFTER = 2.0  # seconds: what is faster shows nothing
OFF = "WORKBOOK_PROGRESS"  # the environment variable; "0" where outputs are compared or kept
_WIDTH = 88  # characters of a bar's line

_doing: list[str] = []  # what is being done, the outermost first
before: list[Callable[[], None]] = []
"""Functions that are called before anything is done that may take long."""
_details: list[Callable[[], str]] = []  # functions that say more about it
_bars = set()  # those that are open: the line would repeat what they show
_began = 0.0  # when the outermost of it began, by time.monotonic()
_tickers = 0  # threads that write the line


class _CellLine:
    """A file for tqdm: a line below the cell that each write replaces, and an empty one removes."""

    encoding = "utf-8"

    def __init__(self):
        self._handle = None

    def write(self, text: str) -> None:
        from IPython.display import display

        text = text.strip("\r\n ")
        style = "margin:0;padding:0;background:none;color:inherit"
        shown = f"<pre style='{style}'>{html.escape(text)}</pre>" if text else ""
        data = {"text/html": shown, "text/plain": text}
        if self._handle:
            self._handle.update(data, raw=True)
        elif text:
            self._handle = display(data, raw=True, display_id=True)

    def flush(self) -> None:
        pass


class _TerminalLine:
    """The same on a terminal."""

    def __init__(self):
        self._long = 0

    def write(self, text: str) -> None:
        # A line that wraps could not be written over: the carriage return goes to its last row.
        room = shutil.get_terminal_size().columns - 1
        text = text if len(text) <= room else text[:room - 1] + "…"
        sys.stderr.write(f"\r{text:{self._long}}\r{text}")
        sys.stderr.flush()
        self._long = len(text)


def progress_bar(iterable: Any = None, **options: Any) -> Any:
    """Returns a tqdm bar that disappears when it is closed; the options are tqdm's. It is shown in
    a notebook and on a terminal, not where stderr is a file."""
    from tqdm import tqdm

    class Bar(tqdm):
        def close(self):
            # tqdm closes again when the interpreter ends: then this module's names are gone
            if _bars is not None:
                _bars.discard(id(self))
            super().close()

    if os.environ.get(OFF) == "0":
        options["disable"] = True
    elif in_notebook():
        options = {"file": _CellLine(), "ncols": _WIDTH, **options}
    bar = Bar(iterable, **{"leave": False, "disable": None, **options})
    _bars.add(id(bar))
    return bar


@contextlib.contextmanager
def status(words: str, terminal: bool = True,
           details: Callable[[], str] | None = None) -> Iterator[None]:
    """While the block runs, says what is being done and for how long, from the third second on.

    Blocks inside one another make one line: "turn 3 of 12 · 4 ranks at work · 7 s". terminal: also
    in a terminal, where the line must not meet what ranks print. details: is called each second, in
    another thread, and returns what follows the seconds, or "".
    """
    global _began
    if not _doing:
        for function in before:
            function()
        _began = time.monotonic()
    _doing.append(words)
    if details:
        _details.append(details)
    shown = (in_notebook() or terminal and sys.stderr.isatty()) and os.environ.get(OFF) != "0"
    try:
        # one line is enough: that of an outer block, or of the cell
        with _ticking() if shown and not _tickers else contextlib.nullcontext():
            yield
    except KeyboardInterrupt as error:
        # For the message (labs/workers/launch_error.py); the innermost status knows all of it.
        error.doing = getattr(error, "doing", tuple(_doing))
        raise
    finally:
        _doing.pop()
        if details:
            _details.remove(details)


class CellLine:
    """The same line for all that a cell does: `begin` before it runs, `end` after. Where no
    `status` says what is being done, it has words of its own."""

    def __init__(self):
        self._ticking = None

    def begin(self, words: str) -> None:
        """From the third second on, says what is being done, or `words`, and for how long."""
        self.end()
        if in_notebook() and os.environ.get(OFF) != "0":
            self._ticking = _ticking(words)
            self._ticking.__enter__()

    def end(self) -> None:
        """Takes the line away."""
        if self._ticking:
            self._ticking.__exit__(None, None, None)
            self._ticking = None


@contextlib.contextmanager
def notice(after: float, words: Callable[[], str]) -> Iterator[None]:
    """Shows words() once if the block takes longer than `after` seconds, unless they are "". In a
    notebook they disappear with the block's end, as outputs that are kept must not depend on how
    fast the machine is; elsewhere they are printed."""
    line = _CellLine() if in_notebook() else _Printed(sys.stdout)
    timer = threading.Timer(after, copy_context().run, [_show, line, words])
    timer.daemon = True
    if not (in_notebook() and os.environ.get(OFF) == "0"):
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if timer.is_alive():
            timer.join()  # it may be writing
        line.write("")


def _show(line, words):
    if text := words():
        line.write(text)


class _Printed:
    """A line that stays."""

    def __init__(self, stream):
        self._stream = stream

    def write(self, text: str) -> None:
        if text:
            print(text, file=self._stream, flush=True)


@contextlib.contextmanager
def _ticking(words=""):
    """A thread that rewrites the line each second. words: where no status says more."""
    global _tickers
    ended = threading.Event()
    line = _CellLine() if in_notebook() else _TerminalLine()
    # In the context of the cell: so ipykernel knows below which cell the line stands.
    thread = threading.Thread(target=copy_context().run, args=(_tick, line, ended, words),
                              daemon=True)
    thread.start()
    _tickers += 1
    try:
        yield
    finally:
        _tickers -= 1
        ended.set()
        thread.join()


def _tick(line, ended, words):
    began = time.monotonic()
    wait, visible = SHOWN_AFTER, False
    while not ended.wait(wait):
        details = [text for function in list(_details) if (text := function())]
        doing = list(_doing)
        seconds = time.monotonic() - (_began if doing else began)
        parts = [*(doing or [words]), f"{seconds:.0f} s", *details]
        if _bars:  # which a terminal has in the same place; below a cell both can stand
            parts = details if isinstance(line, _CellLine) else []
        wait, visible = 1.0, bool(parts)
        line.write(" · ".join(parts))
    if visible:
        line.write("")


def in_notebook() -> bool:
    """Whether a Jupyter kernel runs this process; without importing IPython where there is none."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return getattr(shell, "kernel", None) is not None
