"""Runs student code in the kernel so that whatever it does ends in a verdict: what it prints is
cut, input is refused, exit() does not end the kernel, and a long loop is pointed at."""

import builtins
import contextlib
import functools
import sys
import threading
from collections.abc import Iterator
from unittest import mock

from labs.workers import hang_rules, progress, source_lines
from labs.workers.launch_error import Stopped

MAX_SHOWN = 10_000  # characters that one check may print
MAX_PRINTED = 1_000_000  # characters after which the code that prints them is stopped
MAX_SENTENCE, MAX_LINES = 4000, 40  # of a sentence, which may hold the repr of a huge value
MESSAGE, MESSAGE_LINES = 1000, 10  # of an exception's message, which a line of code follows


class TooMuchOutput(BaseException):
    """Raised by print inside a check; no Exception, which an endless loop could catch."""

    def __str__(self):
        return f"it printed more than {MAX_PRINTED:,} characters: is there an endless loop?"


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Runs the block, which calls student code, with what it prints cut after MAX_SHOWN characters.
    Raises TooMuchOutput after MAX_PRINTED, RuntimeError where input is asked for, SystemExit for
    exit() in a cell, and Stopped where the student interrupts it."""
    # The stack's depth is measured here, so that the notice names a line that runs inside the check
    # and not the line of the cell that called it.
    caller = sys._getframe(2)  # above contextlib's
    words = functools.partial(_where_it_is, len(source_lines.stack_of(caller)))
    with contextlib.ExitStack() as stack:
        stack.enter_context(progress.notice(hang_rules.STALL_NOTICE, words))
        stack.enter_context(contextlib.redirect_stdout(_Cut(sys.stdout)))
        stack.enter_context(contextlib.redirect_stderr(_Cut(sys.stderr)))
        # ipykernel replaces builtins.input by a request to the page, which would wait for an
        # answer.
        stack.enter_context(mock.patch.object(builtins, "input", _refuse_input))
        if shell := _shell():  # exit() and quit() in a cell ask the kernel to end after it
            stack.enter_context(mock.patch.object(shell, "ask_exit", _raise_exit))
        try:
            yield
        except Stopped:  # by what has started the ranks, which says where they were
            raise
        except KeyboardInterrupt as error:
            raise Stopped(_interruption(error)) from None


def own_place(error: BaseException) -> source_lines.Place | None:
    """The innermost line of the student's that an exception, or one that caused it, went through;
    None where no line of theirs is involved."""
    # __cause__: RankFailed and wrapped errors are raised "from" the exception of the student's
    # line. own_place: scripts/grade runs the student's code in another process, which says it.
    while error is not None:
        if hasattr(error, "own_place"):
            return error.own_place
        own = [place for place in source_lines.traceback_of(error) if place.is_students]
        if own:
            return own[-1]
        error = error.__cause__
    return None


def message_of(error: BaseException) -> str:
    """What an exception says, on one line with its type; cut where it is long."""
    if isinstance(error, TooMuchOutput):
        return str(error)
    if isinstance(error, SystemExit):
        code = "" if error.code is None else shortened(error.code, 100)
        return f"the code called sys.exit({code})"
    try:
        text = str(error)
    except BaseException as another:
        text = f"(its message cannot be shown: {type(another).__name__})"
    name = type(error).__name__
    return shortened(f"{name}: {text}" if text else name, MESSAGE, MESSAGE_LINES)


def shortened(text, longest: int = MAX_SENTENCE, most_lines: int = MAX_LINES) -> str:
    """The text, cut after so many characters or lines."""
    text = str(text)
    lines = text[:longest].splitlines()
    cut = len(text) > longest or len(lines) > most_lines
    return "\n".join(lines[:most_lines]) + f" … ({len(text):,} characters)" * cut


class _Cut:
    """A stream that passes on MAX_SHOWN characters."""

    def __init__(self, stream):
        self._stream, self._written = stream, 0

    def write(self, text):
        room = MAX_SHOWN - self._written
        self._written += len(text)
        if room > 0:
            self._stream.write(text[:room])
        # Only the write that reaches the limit says so: afterwards room is 0 or negative.
        if 0 < room <= len(text):
            self._stream.write(f"\n… (a check shows the first {MAX_SHOWN:,} characters)\n")
        if self._written > MAX_PRINTED:
            raise TooMuchOutput
        return len(text)

    def writelines(self, lines):
        for line in lines:
            self.write(line)

    def __getattr__(self, name):
        return getattr(self._stream, name)


def _refuse_input(prompt="", /):
    raise RuntimeError("a check cannot answer input(): take what you need as an argument")


def _raise_exit():
    raise SystemExit


def _shell():
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython else None


def _interruption(error) -> str:
    place = own_place(error)
    return f"interrupted in your code, at {place}:  {place.source}" if place else "interrupted"


def _where_it_is(depth) -> str:
    """On another thread: which line of the student's has been running for so long. depth: of the
    stack where the check began; frames below belong to the cell that called it."""
    frame = sys._current_frames()[threading.main_thread().ident]
    own = [place for place in source_lines.stack_of(frame)[depth:] if place.is_students]
    return (f"after {hang_rules.STALL_NOTICE:.0f} s the check is still in your code, at "
            f"{own[-1]}:  {own[-1].source}  (the stop button ends it)" if own else "")
